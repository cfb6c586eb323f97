"""Modules of a torch network: a stand-in runs its backward pass in a thread of its own."""

from __future__ import annotations

import sys
from typing import Final

import pytest

from gputrace.collectors.spool.host_events import HostEvents
from tests.helpers.handmade import MS
from tests.helpers.programs import Program, event_names, torch_python

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


@pytest.fixture
def network(torch: Program) -> Program:
    torch.write(NETWORK)
    for name, source in NETWORK.items():
        (torch.modules / name).write_text(source, encoding="utf-8")
    return torch


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
    network: Program, window: dict[str, str], seen: list[int], steps: list[int]
) -> None:
    """In one step before, only the outermost calls are looked for."""
    assert network.quietly(TRAINING, **window) == f"True {seen + steps}\n"
    forward = [("Net_0/Linear_0", 0), ("Net_0/Linear_1", 0), ("Net_0/Linear_0", 0)]
    backward = [("Net_0", 1), ("Net_0/Linear_1", 1), ("Net_0/Linear_0", 1)]
    assert stretches_of(network.events()) == (forward + backward) * len(steps)


def test_a_phase_within_a_backward_pass_does_not_end_it(network: Program) -> None:
    """Checkpoints make a pass within another; optimizers may step within one."""
    here = "threading.current_thread() is threading.main_thread()"
    with (network.modules / "torch/_C.py").open("a", encoding="utf-8") as file:
        file.write(f"import threading\ndef _current_graph_task_id(): return -1 if {here} else 0\n")
    plain = "lambda: time.sleep(0.002)"
    within = "lambda: (torch.autograd.backward(torch.Tensor()), time.sleep(0.002))"
    assert plain in TRAINING
    network.quietly(TRAINING.replace(plain, within))
    assert stretches_of(network.events()).count(("Net_0", 1)) == 3


STEPS: Final = """
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
def test_a_program_runs_in_recorded_steps_as_in_others(network: Program, does: str) -> None:
    before, step, paths = PROGRAMS[does]
    assert network.quietly(STEPS.format(before, step)) == ""
    events = network.events()
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


def test_torch_compiles_as_often_as_without_modules(program: Program) -> None:
    python = torch_python()
    outputs = [
        program.run(COMPILED, python=python, GPUTRACE_MODULES=number).out for number in ("0", "3")
    ]
    assert outputs[0] == outputs[1] != ""
    without, recorded = (
        {events.names[int(row["name"])] for row in events.records["module"]}
        for events in program.all_events()
    )
    assert not without
    # It has the name of the module that was compiled, whose parts are not called any more.
    assert "Sequential_0/Sequential_2" in recorded
    assert not any("Sequential_0/Sequential_2/" in path for path in recorded)


# ---- captured into CUDA graphs ----

CAPTURES: Final = """
import torch.autograd, torch.cuda, torch.cuda.graphs, time
from torch.autograd import Node
from torch.cuda.graphs import CUDAGraph
from torch.nn import Module
from torch.optim import Optimizer
class Linear(Module):
    def forward(self, x):
        time.sleep(0.001)
        return torch.Tensor(Node(x.grad_fn, lambda: time.sleep(0.001)))
class Net(Module):
    def __init__(self): self.layers = [Linear(), Linear()]
    def forward(self, x):
        for layer in self.layers: x = layer(x)
        return x
net, optimizer, original = Net(), Optimizer(), Module.__call__
def passes(capture):
    graph = CUDAGraph()
    if capture: graph.capture_begin()
    loss = net(torch.Tensor())
    if capture and apart: graph.capture_end(), graph.capture_begin(pool=1)
    torch.autograd.backward(loss)
    if capture: print(graph.capture_end(), Module.__call__ is original)
    return loss
for step in range(8):
    loss = passes(capture=step == 4)
    optimizer.step()
    assert step < 4 or (Module.__call__ is original and not loss.grad_fn.hooks)
"""
PASSES: Final = [("Net_0/Linear_0", 0), ("Net_0/Linear_1", 0), ("Net_0/Linear_1", 1)]
GRAPHS: Final = {
    "torch/cuda/graphs.py": """
class CUDAGraph:
    def capture_begin(self, pool=None): pass
    def capture_end(self): return "captured"
"""
}


@pytest.mark.parametrize("apart", [False, True])
def test_modules_are_recorded_while_they_are_captured(network: Program, apart: bool) -> None:
    """The passes may be captured apart from each other, as by ``make_graphed_callables``."""
    network.write(GRAPHS)
    source = f"apart = {apart}\n{CAPTURES}"
    assert network.quietly(source, GPUTRACE_GRAPH_NODES="4") == "captured True\n"
    assert stretches_of(network.events()) == [*PASSES, ("Net_0/Linear_0", 1)]


@pytest.mark.parametrize("window", [{}, {"GPUTRACE_GRAPH_NODES": "4", "GPUTRACE_MODULES": "0"}])
def test_without_being_asked_they_are_not(network: Program, window: dict[str, str]) -> None:
    network.write(GRAPHS)
    assert network.quietly(f"apart = False\n{CAPTURES}", **window) == "captured True\n"
    assert stretches_of(network.events()) == []


def test_the_lines_that_call_modules_are_recorded(network: Program) -> None:
    """Once each in a few steps, and not those of torch's own containers."""
    network.quietly(TRAINING)
    sources = set(event_names(network.events(), "source"))
    main, lines = network.folder / "main.py", TRAINING.splitlines()
    call, layer = (
        next(n for n, line in enumerate(lines, 1) if text in line)
        for text in ("loss = net(", "x = layer(x)")
    )
    forward = "Net.forward" if sys.version_info >= (3, 11) else "forward"
    assert sources == {
        f"Net_0 at {main}:{call} <module>",
        *(f"Net_0/Linear_{n} at {main}:{layer} {forward}" for n in range(2)),
    }
