"""Modules of a network: what they and their parts launch, forward and backward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

import gputrace
from gputrace.api import Report
from gputrace.collectors.spool.host_events import HostEvents
from tests.helpers.exports import STEP, global_id
from tests.helpers.handmade import MS, US, Run, analyze
from tests.helpers.kineto import event, kernel, real, write
from tests.helpers.recordings import DATA
from tests.test_hooks import TORCH, Program, event_names, torch_python

REAL: Final = json.loads((DATA / "torch_modules.json").read_text())
"""Two steps of Sequential(Mlp, Mlp, Linear) under PyTorch 2.14's profiler with stacks; an Mlp has
two Linears. The times are of a CPU: each product is given a kernel here."""
BACKWARD: Final = "autograd::engine::evaluate_function: AddmmBackward0"


def launched(number: int, at: float, start: float, length: float, **more: Any) -> list[Any]:
    """A kernel, and the call that launches it, by the thread of the recording."""
    tid = {"tid": REAL[0]["tid"], "pid": REAL[0]["pid"]} | more
    call = event("cuda_runtime", "cudaLaunchKernel", at, 1, args={"correlation": number}, **tid)
    return [call, kernel(start, length, correlation=number)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    path = tmp_path_factory.mktemp("modules") / "run.pt.trace.json"
    events, begun = list(REAL), min(e["ts"] for e in REAL)
    for number, e in enumerate(REAL, 1):
        length = {"aten::addmm": 10, BACKWARD: 20}.get(e["name"])
        if length:
            # Far behind the host, as on a busy GPU.
            events += launched(number, e["ts"] + 1, begun + 5_000 + 50 * number, length)
    write(path, *events, deviceProperties=[{"id": 0, "name": "GPU"}])
    with gputrace.open(path) as trace:
        return trace.analyze()


def test_backward_kernels_belong_to_the_modules_that_made_them(report: Report) -> None:
    assert report.steps.count == 2
    rows = {row.path: row for row in report.modules}
    # Products a step: one in each of the five Linears, and one for the gradients of each.
    expected = {"Sequential": (1, 5), "Sequential/Linear": (1, 1), "Sequential/Mlp": (2, 4)}
    expected["Sequential/Mlp/Linear"] = (4, 4)
    assert rows.keys() == expected.keys()
    for path, (instances, products) in expected.items():
        row = rows[path]
        assert row.instances == instances
        assert row.forward_ns == products * 10_000
        assert row.backward_ns == products * 20_000
        assert row.launches == products * 2


def test_the_tree_is_shown_with_its_parts_below_it(report: Report) -> None:
    text = report.render("text")
    assert text.index("· Mlp") < text.index("· · Linear")
    assert "backward" in text[text.index("Modules by the kernels") :]


def test_kernels_of_no_module_are_set_apart_and_all_sum_up(tmp_path: Path) -> None:
    module = {"pid": 1, "tid": 1}
    events = [
        event("python_function", "nn.Module: Net_0", 100, 100, **module),
        event("python_function", "nn.Module: Linear_0", 120, 20, **module),
        *launched(1, 125, 1000, 7, **module),
        *launched(2, 150, 1010, 11, **module),
        *launched(3, 250, 1030, 13, **module),
    ]
    with gputrace.open(write(tmp_path / "run.pt.trace.json", *events)) as trace:
        modules = trace.analyze().modules
    assert [(row.path, row.forward_ns, row.launches) for row in modules] == [
        ("", 13_000, 1),
        ("Net", 18_000, 2),
        ("Net/Linear", 7_000, 1),
    ]


def test_a_real_vision_transformer_has_its_twelve_layers() -> None:
    with gputrace.open(real("tracelens", "tracelens-falconsai.json.gz")) as trace:
        report = trace.analyze()
    layers = next(row for row in report.modules if row.path.endswith("/ViTLayer"))
    assert layers.instances == 12
    whole = sum(row.forward_ns for row in report.modules if "/" not in row.path)
    assert report.kernels is not None
    assert whole == sum(use.total_ns for use in report.kernels.top) + report.kernels.rest_ns
    assert 0.8 * whole < layers.forward_ns < whole


# ---- of a recording ----


def rows_of(report: Report) -> dict[str, tuple[int, int, int, float]]:
    return {
        row.path: (row.instances, row.forward_ns, row.backward_ns, row.launches)
        for row in report.modules
    }


def test_modules_are_means_of_the_steps_in_which_they_were_recorded(tmp_path: Path) -> None:
    run = Run()
    thread, ranges = global_id(100, thread=100), "GPUTRACE_HOST_RANGE"
    run.export.give("GPUTRACE_META", "name", "value").rows["GPUTRACE_META"] = []
    run.export.give(ranges, "start", "end", "globalTid", "nameId", "kind", "number")

    def inside(path: str, backward: int, recorded: bool, name: str, length: int) -> None:
        start = run.now
        run.kernel(length, name)
        name_id = run.export.string(path)
        more = {"globalTid": thread, "nameId": name_id, "kind": 7, "number": backward}
        if recorded:
            run.export.add(ranges, start=start, end=run.now, **more)

    for step in range(20):
        begin, recorded = run.now, step in (12, 13)
        run.input_copy()
        for layer in range(2):
            inside(f"Net_0/Mlp_{layer}", 0, recorded, "forward", 40 * US)
        for layer in (1, 0):
            inside(f"Net_0/Mlp_{layer}", 1, recorded, "backward", 70 * US)
        run.optimizer(1)
        run.synchronize()
        step_row = {"globalTid": thread, "nameId": run.export.string("step"), "step": step}
        run.export.add(STEP, start=begin, end=run.now, **step_row)
    assert rows_of(analyze(run, tmp_path)) == {
        "": (0, 30 * US, 0, 1),
        "Net": (1, 80 * US, 140 * US, 4),
        "Net/Mlp": (2, 80 * US, 140 * US, 4),
    }


@pytest.mark.parametrize("form", ["{}", "{{'Module': '{}', 'TrainableParams': 12}}"])
def test_ranges_named_as_modules_are_modules(tmp_path: Path, form: str) -> None:
    run = Run()
    for step in range(20):
        begin_of_step = run.now
        run.input_copy()
        outer, spans = run.now, []
        for layer in range(3):
            begin = run.now
            run.kernel(10 * US, "norm")
            inner = run.now
            run.kernel(20 * US, "gemm")
            spans += [(inner, run.now, f"model.layers.{layer}.mlp")]
            spans += [(begin, run.now, f"model.layers.{layer}")]
        run.kernel(5 * US, "head")
        for start, end, name in (*spans, (outer, run.now, "model")):
            run.range(start, end, form.format(name))
        run.optimizer(1)
        run.synchronize()
        run.range(begin_of_step, run.now, f"step {step}")
    assert rows_of(analyze(run, tmp_path)) == {
        "": (0, 30 * US, 0, 1),
        "model": (1, 95 * US, 0, 7),
        "model/layers": (3, 90 * US, 0, 6),
        "model/layers/mlp": (3, 60 * US, 0, 3),
    }


# ---- the hooks, with a stand-in that has a graph of nodes and runs it in a thread of its own ----

NETWORK: Final = {
    "torch/__init__.py": """
from . import _C
class Tensor:
    def __init__(self, node=None): self.grad_fn = node
""",
    "torch/_C.py": """
class DisableTorchFunction:
    def __enter__(self): pass
    def __exit__(self, *error): pass
""",
    "torch/autograd.py": """
import threading
local = threading.local()
def _get_sequence_nr(): return getattr(local, 'next', 0)
class Handle:
    def __init__(self, hooks, hook): self.hooks, self.hook = hooks, hook
    def remove(self): self.hooks.remove(self.hook)
class Node:
    def __init__(self, before, work):
        self.before, self.work, self.hooks = before, work, []
        self.number = _get_sequence_nr()
        local.next = self.number + 1
    def _sequence_nr(self): return self.number
    def register_prehook(self, hook):
        self.hooks.append(hook)
        return Handle(self.hooks, hook)
def backward(tensor):
    def run():
        node = tensor.grad_fn
        while node is not None:
            for hook in node.hooks: assert hook(()) is None
            node.work()
            node = node.before
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
""",
    "torch/nn.py": """
class Module:
    def _call_impl(self, *args, **keywords): return self.forward(*args, **keywords)
    __call__ = _call_impl
""",
    "torch/cuda/__init__.py": "def is_initialized(): return True",
}
TRAINING: Final = """
import pickle, sys, threading, time, torch.autograd, torch.cuda
from torch.autograd import Node
from torch.nn import Module
from torch.optim import Optimizer
original, seen, raised = Module.__call__, [], []
class Linear(Module):
    def forward(self, x, fails=False):
        seen.append(Module.__call__ is not original)
        time.sleep(0.001)
        if fails: raise KeyError("the program's")
        return torch.Tensor(Node(x.grad_fn, lambda: time.sleep(0.001)))
class Net(Module):
    def __init__(self): self.layers = [Linear(), Linear()]
    def forward(self, x):
        for layer in self.layers: x = layer(x)
        try: self.layers[0](x, fails=True)
        except KeyError as error: raised.append(error.args)
        return {"loss": [torch.Tensor(Node(x.grad_fn, lambda: time.sleep(0.002)))]}
net, optimizer, graphs = Net(), Optimizer(), []
plain = pickle.dumps(net), set(vars(net))
for step in range(20):
    loss = net(x=torch.Tensor())["loss"][0]
    assert (pickle.dumps(net), set(vars(net))) == plain
    torch.autograd.backward(loss)
    graphs.append(loss)
    optimizer.step()
assert Module.__call__ is original and not any(loss.grad_fn.hooks for loss in graphs)
print(raised == [("the program's",)] * 20, [step for step in range(20) if seen[3 * step]])
"""


def network(folder: Path) -> Program:
    program = Program(folder)
    program.write(TORCH)
    program.write(NETWORK)
    for name, source in NETWORK.items():
        (program.modules / name).write_text(source, encoding="utf-8")
    return program


def stretches_of(events: HostEvents) -> list[tuple[str, int]]:
    """Modules in which threads were for half a millisecond or more, in order of their starts."""
    rows = events.records["module"]
    rows = rows[rows["end"] - rows["start"] > MS // 2]
    rows = rows[rows["start"].argsort()]
    return [(events.names[int(row["name"])], int(row["rank"])) for row in rows]


@pytest.mark.parametrize(
    ("window", "seen", "steps"),
    [
        ({}, [1], [16, 17, 18]),
        ({"GPUTRACE_STEPS": "4:8"}, [5], [6, 7]),
        ({"GPUTRACE_MODULES": "0"}, [], []),
    ],
)
def test_modules_are_recorded_in_a_few_steps_and_leave_nothing(
    tmp_path: Path, window: dict[str, str], seen: list[int], steps: list[int]
) -> None:
    """In one step before, only the outermost calls are looked for."""
    program = network(tmp_path)
    assert program.quietly(TRAINING, **window) == f"True {seen + steps}\n"
    forward = [("Net_0/Linear_0", 0), ("Net_0/Linear_1", 0), ("Net_0/Linear_0", 0)]
    backward = [("Net_0", 1), ("Net_0/Linear_1", 1), ("Net_0/Linear_0", 1)]
    assert stretches_of(program.events()) == (forward + backward) * len(steps)


def test_a_phase_within_a_backward_pass_does_not_end_it(tmp_path: Path) -> None:
    """Checkpoints make a pass within another; optimizers may step within one."""
    program = network(tmp_path)
    here = "threading.current_thread() is threading.main_thread()"
    with (program.modules / "torch/_C.py").open("a", encoding="utf-8") as file:
        file.write(f"import threading\ndef _current_graph_task_id(): return -1 if {here} else 0\n")
    plain = "lambda: time.sleep(0.002)"
    within = "lambda: (torch.autograd.backward(torch.Tensor()), time.sleep(0.002))"
    assert plain in TRAINING
    program.quietly(TRAINING.replace(plain, within))
    assert stretches_of(program.events()).count(("Net_0", 1)) == 3


LOOP: Final = """
import sys, torch.autograd, torch.cuda
from torch.nn import Module
from torch.optim import Optimizer
class Layer(Module):
    def forward(self, x): return x
class Other(Layer): pass
{}
optimizer, original, limit = Optimizer(), Module.__call__, sys.getrecursionlimit()
for step in range(24):
    {}
    optimizer.step()
assert Module.__call__ is original and sys.getrecursionlimit() == limit
"""
PROGRAMS: Final = {
    "makes modules in its forward pass": (
        """
class Net(Module):
    def forward(self, x): return Other()(Layer()(x))
net = Net()
""",
        "net(1)",
        {"Net_0", "Net_0/Layer_0", "Net_0/Other_0"},
    ),
    "puts back later what it saved": (
        "layer, saved = Layer(), None",
        """
    if step == 17: saved = Module.__call__
    if step == 20: Module.__call__ = saved
    layer(1)
""",
        {"Layer_0"},
    ),
    "has a view that autograd cannot follow": (
        """
class Stale(torch.Tensor):
    def __init__(self): pass
    @property
    def grad_fn(self): raise RuntimeError("output of a function that returns multiple views")
layer, other = Layer(), Other()
""",
        "layer([Stale()]), other(1)",
        {"Layer_0", "Other_0"},
    ),
    "takes all of Python's stack": (
        """
class Deep(Module):
    def forward(self, depth): return depth and self(depth - 1)
def deepest():
    for depth in range(10_000):
        try: deep(depth)
        except RecursionError: return depth - 1
deep = Deep()
sys.setrecursionlimit(600)
room = deepest()
""",
        "deep(room)",
        {"/".join(["Deep_0"] * depth) for depth in range(1, 64)},
    ),
}


@pytest.mark.parametrize("does", PROGRAMS)
def test_a_program_runs_in_recorded_steps_as_in_others(tmp_path: Path, does: str) -> None:
    program = network(tmp_path)
    before, step, paths = PROGRAMS[does]
    assert program.quietly(LOOP.format(before, step)) == ""
    events = program.events()
    assert {events.names[int(row["name"])] for row in events.records["module"]} == paths
    deep = ["modules are timed no longer: over 64 lie within each other"]
    assert event_names(events, "note") == deep * (len(paths) == 63)


COMPILED: Final = """
import sys, warnings, torch
from torch._dynamo import utils
warnings.filterwarnings("error", message=".*hook.*")
class Broken(torch.nn.Linear):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)
torch.manual_seed(0)
eager = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
net = torch.nn.Sequential(eager, torch.nn.Sequential(Broken(4, 4), torch.nn.Linear(4, 2)))
net[1] = torch.compile(net[1], backend="eager")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
original = torch.nn.Module.__call__
for step in range(24):
    if step == 17: net[0] = torch.compile(eager, backend="eager")
    loss = net(torch.randn(3, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
assert torch.nn.Module.__call__ is original
print(dict(utils.counters["frames"]), dict(utils.counters["stats"]))
"""


def test_torch_compiles_as_often_as_without_modules(tmp_path: Path) -> None:
    program, python = Program(tmp_path), torch_python()
    outputs = [
        program.run(COMPILED, python=python, GPUTRACE_MODULES=number).out for number in ("0", "3")
    ]
    assert outputs[0] == outputs[1] != ""
    without, recorded = (
        {events.names[int(row["name"])] for row in events.records["module"]}
        for events in program.all_events()
    )
    assert not without
    assert "Sequential_0/OptimizedModule_0" in recorded
    assert not any("OptimizedModule_0/" in path for path in recorded)
