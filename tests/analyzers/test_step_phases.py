"""Phases of a step: forward, backward, optimizer, data; and how long GPUs idle in each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

import gputrace
from gputrace.api import Report
from gputrace.collectors.finalize import merge
from gputrace.collectors.spool.host_events import HostEvents
from gputrace.model.host import PHASES, StepPhases
from gputrace.model.results import Finding
from tests.helpers.exports import STEP, Export, global_id
from tests.helpers.handmade import MS, Run, analyze
from tests.test_hooks import Program, event_names, recorded_with_torch

PID: Final = 100
STEPS: Final = 20
PERIOD: Final = 10 * MS
RANGES: Final = "GPUTRACE_HOST_RANGE"
WAIT: Final = "torch.wait"

Calls = list[tuple[str, float, float]]
"""Name, begin and end in milliseconds of a step."""

PLAIN: Final[Calls] = [
    (WAIT, 1, 2),
    ("backward", 4, 7),
    ("gradient clipping", 7, 7.5),
    ("optimizer", 8, 10),
]
"""Nothing for 1 ms, as in the half before the optimizer; data for 1, forward for 2."""


class Host:
    """A process whose training thread makes the same calls in each step of 10 ms."""

    def __init__(self) -> None:
        self.export = Export()
        self.export.give("GPUTRACE_META", "name", "value")
        self.export.give(RANGES, "start", "end", "globalTid", "nameId", "kind")
        self.export.rows.setdefault("GPUTRACE_META", [])
        self.step = PERIOD

    def trains(self, *calls: tuple[str, float, float], thread: int = PID) -> Host:
        for number in range(STEPS):
            begin = (number + 1) * self.step
            if thread == PID:
                self._add(STEP, "torch.step", begin, begin + self.step, thread, step=number)
            for name, start, end in calls:
                span = begin + round(start * MS), begin + round(end * MS)
                self._add(RANGES, name, *span, thread, kind=1 if name == WAIT else 4)
        return self

    def _add(self, table: str, name: str, start: int, end: int, thread: int, **more: int) -> None:
        who = {"globalTid": global_id(PID, thread=thread), "nameId": self.export.string(name)}
        self.export.add(table, start=start, end=end, **who, **more)

    def computes(self, *work: tuple[float, float]) -> Run:
        """A GPU that works from the one to the other millisecond of each step."""
        run = Run(self.export, pid=PID)
        # Before the first step too, which would else begin with its first kernel.
        for number in range(STEPS + 1):
            for start, end in work:
                run.now = number * self.step + round(start * MS)
                run.kernel(round((end - start) * MS), "gemm")
        return run


def the(report: Report) -> StepPhases:
    (row,) = report.step_phases
    return row


def host_ms(row: StepPhases) -> dict[str, float]:
    return {phase.name: phase.host_ns / MS for phase in row.phases if phase.host_ns}


def host_work(report: Report) -> Finding:
    (found,) = (finding for finding in report.findings if finding.id == "host-work")
    return found


# ---- what the host does ----


def test_forward_is_from_the_end_of_the_wait_to_the_beginning_of_backward(tmp_path: Path) -> None:
    row = the(analyze(Host().trains(*PLAIN).export, tmp_path))
    assert host_ms(row) == {
        "data": 1,
        "forward": 2,
        "backward": 3,
        "gradient clipping": 0.5,
        "optimizer": 2,
        "other": 1.5,
    }
    assert tuple(phase.name for phase in row.phases) == tuple(PHASES)
    assert (row.rank, row.step_ns) == (0, PERIOD)


def test_without_a_wait_forward_begins_where_the_step_before_ended(tmp_path: Path) -> None:
    row = the(analyze(Host().trains(("backward", 4, 7), ("optimizer", 8, 9)).export, tmp_path))
    assert host_ms(row) == {"forward": 4, "backward": 3, "optimizer": 1, "other": 2}


def test_a_forward_pass_that_a_framework_calls_is_what_it_says(tmp_path: Path) -> None:
    """As Lightning does, in a closure that its optimizer calls."""
    calls: Calls = [(WAIT, 0, 1), ("optimizer", 1, 10), ("forward", 2, 4), ("backward", 5, 8)]
    row = the(analyze(Host().trains(*calls).export, tmp_path))
    assert host_ms(row) == {"data": 1, "forward": 2, "backward": 3, "optimizer": 4}


def test_each_of_several_backward_passes_has_a_forward_pass(tmp_path: Path) -> None:
    """Gradients of two batches are summed, and then those of a third without a wait for it."""
    calls: Calls = [
        *[(WAIT, 0, 1), ("backward", 2, 3), (WAIT, 3.5, 4), ("backward", 6, 7)],
        *[("backward", 8, 9), ("optimizer", 9, 10)],
    ]
    row = the(analyze(Host().trains(*calls).export, tmp_path))
    expected = {"data": 1.5, "forward": 1 + 2 + 1, "backward": 3, "optimizer": 1, "other": 0.5}
    assert host_ms(row) == expected


def test_an_optimizer_that_calls_a_closure_counts_for_the_rest(tmp_path: Path) -> None:
    calls: Calls = [(WAIT, 0, 1), ("optimizer", 2, 10), ("backward", 5, 8)]
    row = the(analyze(Host().trains(*calls).export, tmp_path))
    assert host_ms(row) == {"data": 1, "forward": 4, "backward": 3, "optimizer": 2}


def test_a_closure_that_is_timed_itself_is_no_part_of_the_optimizer(tmp_path: Path) -> None:
    """As Lightning's, which zeroes gradients and calls the program's hooks."""
    calls: Calls = [("optimizer", 1, 10), ("other", 2, 9), ("forward", 3, 5), ("backward", 5, 8)]
    row = the(analyze(Host().trains(*calls).export, tmp_path))
    assert host_ms(row) == {"forward": 2, "backward": 3, "optimizer": 2, "other": 3}


def test_optimizers_within_a_backward_pass_are_no_part_of_it(tmp_path: Path) -> None:
    calls: Calls = [(WAIT, 0, 1), ("backward", 3, 9), ("optimizer", 4, 5), ("optimizer", 6, 7)]
    row = the(analyze(Host().trains(*calls).export, tmp_path))
    assert host_ms(row) == {"data": 1, "forward": 2, "backward": 4, "optimizer": 2, "other": 1}


def test_what_autograd_s_threads_do_counts_for_the_thread_that_called_it(tmp_path: Path) -> None:
    host = Host().trains(*PLAIN)
    host.trains(("backward", 5, 6), thread=PID + 1)
    assert host_ms(the(analyze(host.export, tmp_path)))["backward"] == 3


@pytest.mark.parametrize("odd", [1, 7, 333_333])
def test_phases_sum_to_the_step_to_the_nanosecond(tmp_path: Path, odd: int) -> None:
    host = Host()
    host.step += odd
    run = host.trains(*PLAIN).computes((2, 4), (6.5, 8))
    report = analyze(run, tmp_path)
    row, (gpu,) = the(report), report.breakdown
    assert sum(phase.host_ns for phase in row.phases) == row.step_ns == gpu.total_ns // gpu.steps
    causes = ("recorder", "data_feeding", "sync", "alloc", "launch", "other_idle")
    idle = sum(gpu.of(cause) for cause in causes)
    assert sum(phase.idle_ns or 0 for phase in row.phases) == idle // gpu.steps
    launch = sum(phase.launch_ns or 0 for phase in row.phases)
    assert launch == gpu.of("launch") // gpu.steps


# ---- what the GPU lacks meanwhile ----


@pytest.fixture
def slow_backward(tmp_path: Path) -> Report:
    """The GPU idles 2.5 of the 3 ms of backward, and until the forward pass: 1 ms for data."""
    return analyze(Host().trains(*PLAIN).computes((2, 4), (6.5, 10)), tmp_path)


def test_idle_time_is_given_to_the_phase_that_the_host_is_in(slow_backward: Report) -> None:
    row = the(slow_backward)
    idle = {phase.name: phase.idle_ns for phase in row.phases if phase.idle_ns}
    launch = {phase.name: phase.launch_ns for phase in row.phases if phase.launch_ns}
    # A launch takes some microseconds of the forward pass, too.
    expected = {"data": 1.0, "forward": 0.0, "backward": 2.5, "other": 1.0}
    assert {name: (time or 0) / MS for name, time in idle.items()} == pytest.approx(
        expected, abs=0.02
    )
    del expected["data"]
    assert {name: (time or 0) / MS for name, time in launch.items()} == pytest.approx(
        expected, abs=0.02
    )


def test_a_finding_names_the_phase_that_has_most_of_it(slow_backward: Report) -> None:
    found = host_work(slow_backward)
    assert "; most of it in the backward pass, 2.50 ms of " in found.message
    assert found.evidence["phase"] == "backward"
    # A launch takes some microseconds of it.
    assert found.evidence["phase_ns"] == pytest.approx(2.5 * MS, rel=0.01)


def test_no_phase_is_named_where_none_has_most(tmp_path: Path) -> None:
    report = analyze(Host().trains(*PLAIN).computes((3, 5), (6, 8), (9, 10)), tmp_path)
    found = host_work(report)
    assert "most of it" not in found.message
    assert "phase" not in found.evidence


def test_the_report_has_a_table(slow_backward: Report) -> None:
    shown = slow_backward.render()
    table = shown[shown.index("What the host does in a step") :].split("\n\n")[0].splitlines()
    assert table[0].startswith("What the host does in a step (mean of ")
    assert table[1].split() == ["host", "share", "GPU", "idle", "meanwhile"]
    assert ["backward", "3.00", "ms", "30.0%", "2.50", "ms"] in [line.split() for line in table]
    assert not any("unscaling" in line for line in table)


def test_the_json_has_all_phases(slow_backward: Report) -> None:
    (row,) = json.loads(slow_backward.render("json"))["step_phases"]
    assert row.keys() == {"rank", "steps", "step_ns", "phases"}
    assert [phase["name"] for phase in row["phases"]] == list(PHASES)
    assert row["phases"][3] == {
        "name": "gradient unscaling",
        "host_ns": 0,
        "idle_ns": 0,
        "launch_ns": 0,
    }


def test_without_a_gpu_idle_time_is_unknown(tmp_path: Path) -> None:
    report = analyze(Host().trains(*PLAIN).export, tmp_path)
    assert {(phase.idle_ns, phase.launch_ns) for phase in the(report).phases} == {(None, None)}
    assert "GPU idle meanwhile" not in report.render()


def test_waits_for_data_alone_are_no_phases(tmp_path: Path) -> None:
    report = analyze(Host().trains((WAIT, 1, 2)).computes((2, 4), (8, 10)), tmp_path)
    assert report.step_phases == ()
    assert "What the host does" not in report.render()
    assert "most of it" not in host_work(report).message


def test_what_a_phase_takes_before_an_input_copy_is_no_loading(tmp_path: Path) -> None:
    """The host is held in the optimizer for 5 ms, then makes a batch in 3 and copies it."""
    host = Host().trains(("backward", 0.5, 1), ("optimizer", 1, 7))
    run = Run(host.export, pid=PID)
    for number in range(STEPS + 1):
        run.now = number * PERIOD
        run.input_copy()
        run.now = number * PERIOD + MS
        run.kernel(MS, "gemm")
    (row,) = analyze(run, tmp_path).breakdown
    assert row.data_feeding_ns / row.steps == pytest.approx(3 * MS, rel=0.1)
    assert row.launch_ns / row.steps == pytest.approx(5.5 * MS, rel=0.1)


# ---- the hooks, with modules that stand for torch's ----

TORCH: Final = {
    "torch/autograd/__init__.py": """
def backward(tensors, fails=False):
    if fails: raise ValueError("no gradient")
    for call in tensors: call()
""",
    "torch/nn/utils/clip_grad.py": "def clip_grad_norm_(parameters, most): return most",
    "torch/amp/grad_scaler.py": """
class GradScaler:
    overflows = False
    def unscale_(self, optimizer): pass
    def step(self, optimizer):
        self.unscale_(optimizer)
        return None if self.overflows else optimizer.step()
""",
    "torch/optim/optimizer.py": """
_before, _after = [], []
def register_optimizer_step_pre_hook(hook): _before.append(hook)
def register_optimizer_step_post_hook(hook): _after.append(hook)
class Optimizer:
    def __init__(self): pass
    def step(self):
        for hook in _before: assert hook(self, (), {}) is None
        for hook in _after: assert hook(self, (), {}) is None
        return "stepped"
""",
    "torch/compiler/__init__.py": "tracing = False\ndef is_compiling(): return tracing",
    "torch/distributed/pipelining/stage.py": """
class _PipelineStageBase:
    def forward_one_chunk(self, batch): return 2 * batch
class PipelineStage(_PipelineStageBase): pass
""",
    "lightning/pytorch/strategies/strategy.py": """
class Strategy:
    def training_step(self, batch): return 2 * batch
    def backward(self, loss):
        import time, torch.autograd
        time.sleep(0.02)  # the program's on_before_backward
        torch.autograd.backward([])
        return loss
    def optimizer_step(self, optimizer, call):
        result = call()
        optimizer.step()
        return result
""",
    "pytorch_lightning/plugins/precision/precision.py": """
class Precision:
    def clip_gradients(self, optimizer, most): return most
""",
    "pytorch_lightning/loops/optimization/automatic.py": """
class Closure:
    def closure(self): return 42
    def __call__(self): return self.closure()
""",
    "transformers/trainer.py": """
class Trainer:
    def __init__(self, scale=2): self.scale = scale
    def compute_loss(self, batch): return self.scale * batch
    def _clip_grad_norm(self, most): return most
""",
    "accelerate/accelerator.py": """
class Accelerator:
    def backward(self, loss): return loss
    def clip_grad_norm_(self, parameters, most): return most
""",
    "accelerate/optimizer.py": """
class AcceleratedOptimizer:
    def __init__(self, optimizer): self.optimizer = optimizer
    def step(self): return self.optimizer.step()
""",
    "deepspeed/runtime/engine.py": """
class DeepSpeedEngine:
    def forward(self, batch): return batch
    def backward(self, loss): return loss
    def clip_fp32_gradients(self): pass
    def _take_model_step(self): self.clip_fp32_gradients()
    def step(self): self._take_model_step()
""",
    "keras/src/backend/torch/optimizers/torch_parallel_optimizer.py": """
class TorchParallelOptimizer:
    def _backend_update_step(self, grads, variables, rate): return rate
""",
}
OLDER: Final = """
class Optimizer:
    def __init__(self): pass
class SGD(Optimizer):
    def step(self): return "stepped"
"""
USES: Final = """
import torch.autograd, torch.compiler
from torch.nn.utils.clip_grad import clip_grad_norm_
from torch.amp.grad_scaler import GradScaler
from torch.optim import optimizer as module
optimizer = getattr(module, "SGD", module.Optimizer)()
def backward(*calls, **how): torch.autograd.backward(calls, **how)
"""


@pytest.fixture
def torch(tmp_path: Path) -> Program:
    program = Program(tmp_path)
    program.write(TORCH)
    return program


def phases(events: HostEvents) -> list[str]:
    return event_names(events, "phase")


def test_calls_are_timed_and_do_what_they_did(torch: Program) -> None:
    out = torch.quietly(
        USES + "import time\nbackward(lambda: time.sleep(0.02))\n"
        "print(clip_grad_norm_([], 7), GradScaler().step(optimizer), optimizer.step())\n"
    )
    assert out == "7 stepped stepped\n"
    events = torch.events()
    assert phases(events) == [
        *["backward", "gradient clipping", "gradient unscaling"],
        *["optimizer", "optimizer", "optimizer"],
    ]
    rows, steps = events.records["phase"], events.records["step"]
    assert 20 * MS <= rows["end"][0] - rows["start"][0] < 500 * MS
    # A step ends as its optimizer has stepped, within what the scaler does around it.
    assert len(steps) == 2
    assert rows["start"][3] <= steps["end"][0] <= rows["end"][3] <= rows["end"][4]
    assert rows["start"][4] <= rows["start"][2] <= rows["start"][3]
    assert rows["start"][5] <= steps["end"][1] <= rows["end"][5]


@pytest.mark.parametrize(
    "call",
    [
        "from lightning.pytorch.strategies.strategy import Strategy\n"
        "print(Strategy().training_step(21))",
        "from transformers.trainer import Trainer\nprint(Trainer(scale=2).compute_loss(21))",
        "from transformers.trainer import Trainer\n"
        "class Own(Trainer):\n    def compute_loss(self, batch): return 2 * batch\n"
        "print(Own().compute_loss(21))",
        "from torch.distributed.pipelining.stage import PipelineStage\n"
        "print(PipelineStage().forward_one_chunk(21))",
    ],
    ids=["lightning", "transformers", "a trainer of the program's", "a stage of a pipeline"],
)
def test_a_forward_pass_that_a_framework_calls_is_timed(torch: Program, call: str) -> None:
    out = torch.quietly(f"{USES}{call}\nbackward(); optimizer.step()\n")
    assert out == "42\n"
    assert phases(torch.events()) == ["forward", "backward", "optimizer"]


def test_phases_have_what_accelerate_does_around_torch_s_calls(torch: Program) -> None:
    out = torch.quietly(
        f"{USES}from accelerate.accelerator import Accelerator\n"
        "from accelerate.optimizer import AcceleratedOptimizer\n"
        "from transformers.trainer import Trainer\n"
        "both = Accelerator()\n"
        "print(both.backward(1), both.clip_grad_norm_([], 2), Trainer()._clip_grad_norm(3))\n"
        "print(AcceleratedOptimizer(optimizer).step())\n"
    )
    assert out == "1 2 3\nstepped\n"
    clipping = ["gradient clipping"] * 2
    assert phases(torch.events()) == ["backward", *clipping, "optimizer", "optimizer"]


def test_lightning_s_closure_is_no_part_of_its_optimizer_s_step(torch: Program) -> None:
    out = torch.quietly(
        f"{USES}from lightning.pytorch.strategies.strategy import Strategy\n"
        "from pytorch_lightning.loops.optimization.automatic import Closure\n"
        "from pytorch_lightning.plugins.precision.precision import Precision\n"
        "call = lambda: Precision().clip_gradients(optimizer, Closure()())\n"
        "print(Strategy().optimizer_step(optimizer, call))\n"
    )
    assert out == "42\n"
    inner = ["other", "gradient clipping", "optimizer"]
    assert phases(torch.events()) == [*inner, "optimizer"]


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_backward_pass_has_what_lightning_does_around_it(torch: Program, package: str) -> None:
    path = f"{package.replace('.', '/')}/strategies/strategy.py"
    torch.write({path: TORCH["lightning/pytorch/strategies/strategy.py"]})
    use = f"from {package}.strategies.strategy import Strategy\nprint(Strategy().backward(42))\n"
    assert torch.quietly(USES + use) == "42\n"
    events = torch.events()
    rows = events.records["phase"]
    assert phases(events) == ["backward", "backward"]
    assert (rows["end"] - rows["start"]).max() >= 20 * MS


def test_optimizers_that_are_none_of_torch_s_are_timed(torch: Program) -> None:
    out = torch.quietly(
        f"{USES}from deepspeed.runtime.engine import DeepSpeedEngine\n"
        "from keras.src.backend.torch.optimizers import torch_parallel_optimizer as keras\n"
        "engine = DeepSpeedEngine()\n"
        "engine.backward(engine.forward(1)), engine.step()\n"
        "print(keras.TorchParallelOptimizer()._backend_update_step([], [], 0.5))\n"
    )
    assert out == "0.5\n"
    events = torch.events()
    inner = ["forward", "backward", "gradient clipping", "optimizer"]
    assert phases(events) == [*inner, "optimizer"]
    assert len(events.records["step"]) == 1


def test_optimizers_without_hooks_are_timed_too(torch: Program) -> None:
    torch.write({"torch/optim/optimizer.py": OLDER})
    assert torch.quietly(USES + "print(optimizer.step())\n") == "stepped\n"
    assert phases(torch.events()) == ["optimizer"]


def test_an_error_in_backward_reaches_the_program(torch: Program) -> None:
    out = torch.quietly(
        USES + "try: backward(fails=True)\nexcept ValueError as error: print(error)\n"
    )
    assert out == "no gradient\n"
    assert phases(torch.events()) == ["backward"]


def test_warnings_name_the_program_s_lines(torch: Program) -> None:
    """As without ours: each place that calls what warns, with ``stacklevel=2``, is one."""
    torch.write(
        {
            "torch/autograd/__init__.py": """
import warnings
def backward(tensors, fails=False):
    warnings.warn("deprecated", stacklevel=2)
    if fails: raise ValueError
"""
        }
    )
    source = (
        USES + "import traceback, sys\nfor _ in range(2):\n    backward()\n"
        "    torch.autograd.backward([])\n"
        "    torch.autograd.backward([])\n"
        "try: torch.autograd.backward([], fails=True)\n"
        "except ValueError: print('    return function(' in traceback.format_exc())\n"
    )
    hooked, without = torch.run(source), torch.run(source, hooked=False)
    assert hooked.code == without.code == 0
    assert hooked.err == without.err
    assert hooked.err.count("main.py:") == 4
    # A traceback has our line as before, from the wrappers' source.
    assert (hooked.out, without.out) == ("True\n", "False\n")


def test_an_overflow_is_an_optimizer_s_phase_without_its_step(torch: Program) -> None:
    torch.quietly(USES + "GradScaler.overflows = True\nGradScaler().step(optimizer)\n")
    events = torch.events()
    assert phases(events) == ["gradient unscaling", "optimizer"]
    assert len(events.records["step"]) == 1


def test_nothing_is_timed_while_torch_compile_traces(torch: Program) -> None:
    """A call of the clock would break its graph."""
    torch.quietly(
        USES + "torch.compiler.tracing = True\n"
        "backward(); clip_grad_norm_([], 1); optimizer.step()\n"
        "torch.compiler.tracing = False\nbackward()\n"
    )
    assert phases(torch.events()) == ["backward"]


def test_phases_of_short_steps_are_written_with_the_steps(torch: Program) -> None:
    """Not at the end of a backward pass, after which a GPU may wait for the next launch."""
    torch.quietly(
        USES + "import sys, time\n"
        "from _gputrace_hooks.host_file import HostFile\n"
        "append, found, start = HostFile.append, set(), time.time()\n"
        "def watched(*args):\n"
        "    frame, places = sys._getframe(), set()\n"
        "    while frame and 'step_ended' not in places:\n"
        "        places.add(frame.f_code.co_name); frame = frame.f_back\n"
        "    found.update(places)\n"
        "    return append(*args)\n"
        "HostFile.append = watched\n"
        "while time.time() < start + 0.8: backward(); optimizer.step()\n"
        "assert 'step_ended' in found and 'inside' not in found, found\n"
    )
    events = torch.events()
    assert len(events.records["phase"]) == 2 * len(events.records["step"])


# ---- real torch ----

PLANTED: Final = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        time.sleep(0.030)
        return x.clone()
    @staticmethod
    def backward(context, gradient):
        time.sleep(0.045)
        return gradient

class SGD(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(0.020)
        return super().step(closure)

class Data(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.005)
        return super().__getitem__(index)

torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = SGD(model.parameters(), lr=0.01)
batches = iter(DataLoader(Data(torch.randn(75, 8)), 3))
times = []
for _ in range(25):
    now = [time.perf_counter()]
    (x,) = next(batches)
    now.append(time.perf_counter())
    loss = Slow.apply(model(x)).sum()
    now.append(time.perf_counter())
    loss.backward()
    now.append(time.perf_counter())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    now.append(time.perf_counter())
    optimizer.step()
    now.append(time.perf_counter())
    optimizer.zero_grad()
    time.sleep(0.025)
    took = time.perf_counter() - now[0]
    times.append([1e3 * (b - a) for a, b in zip(now, now[1:])] + [1e3 * took])
print("times =", times)
"""


def test_planted_times_are_found_in_a_real_program(tmp_path: Path) -> None:
    out, report = recorded_with_torch(tmp_path, PLANTED)
    row = the(report)
    # By the program's own clock, since a busy machine makes sleeps longer.
    clocked = json.loads(out.split("times = ")[1].splitlines()[0])[-row.steps :]
    names = "data", "forward", "backward", "gradient clipping", "optimizer", "step"
    clock = {name: sum(own) / row.steps for name, *own in zip(names, *clocked, strict=True)}
    step, clipping, found = clock.pop("step"), clock.pop("gradient clipping"), host_ms(row)
    assert clock["backward"] >= 45
    assert found.pop("gradient clipping") == pytest.approx(clipping, rel=0.1, abs=0.2)
    assert row.step_ns / MS == pytest.approx(step, rel=0.1)
    assert found.pop("other") >= 24
    assert found == pytest.approx(clock, rel=0.1)


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_backward_passes_end_steps_where_no_optimizer_is_called(
    torch: Program, tmp_path: Path, has_optimizer: bool
) -> None:
    """A program that updates its parameters by itself calls none."""
    update = "optimizer.step()" if has_optimizer else "pass"
    torch.quietly(
        USES + "import time\nfor number in range(8):\n    backward(lambda: time.sleep(0.005))\n"
        f"    if number % 2: {update}\n"
    )
    path = tmp_path / "trace.sqlite"
    assert merge(torch.spool, path, {"backend": "host"}).steps == (4 if has_optimizer else 8)
    with gputrace.open(path) as opened:
        report = opened.analyze()
    assert report.steps.count == (3 if has_optimizer else 7)
    assert ("from mark to mark of 'backward'" in report.render()) == (not has_optimizer)
