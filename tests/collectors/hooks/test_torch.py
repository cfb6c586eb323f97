"""PyTorch: steps of its optimizers, phases of a step, and its profilers."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

import gputrace
from gputrace.collectors.finalize import merge
from tests.helpers.handmade import MS
from tests.helpers.programs import (
    LOAD,
    LOOP,
    Program,
    calls,
    event_names,
    numbers,
    phases,
    torch_python,
)


def test_optimizers_of_an_old_torch_are_wrapped_class_by_class(torch: Program) -> None:
    torch.write(
        {
            "torch/optim/optimizer.py": """
class Optimizer:
    def __init__(self, rate): self.rate = rate
class SGD(Optimizer):
    def step(self, closure=None): return self.rate
"""
        }
    )
    source = "from torch.optim.optimizer import SGD\n"
    source += "for _ in range(2): SGD(0.5); print(SGD(0.25).step(closure=None))"
    assert torch.quietly(source) == "0.25\n0.25\n"
    assert numbers(torch.events(), "step") == [0, 1]


def test_hooks_that_torch_compile_removes_are_put_back(torch: Program) -> None:
    torch.write(
        {
            "torch/optim/__init__.py": "from .optimizer import Optimizer, SGD, LBFGS",
            "torch/optim/optimizer.py": """
import functools
_hooks = []
def register_optimizer_step_post_hook(hook): _hooks.append(hook)
class Optimizer:
    def __init__(self):
        cls = type(self)
        if not getattr(cls.step, "hooked", False):
            cls.step = self.profile_hook_step(cls.step)
            cls.step.hooked = True
    @staticmethod
    def profile_hook_step(func):
        @functools.wraps(func)
        def wrapper(*args):
            profile_name = ""
            func(*args)
            for hook in _hooks: hook(args[0], args, {})
        return wrapper
class SGD(Optimizer):
    def step(self): pass
class LBFGS(Optimizer):
    def step(self): pass
""",
            "torch/_dynamo/eval_frame.py": """
import functools, torch.optim
class TorchPatcher:
    @staticmethod
    @functools.lru_cache(None)
    def patch():
        torch.optim.SGD.step = torch.optim.SGD.step.__wrapped__
        torch.optim.SGD.step.hooked = True
        step = torch.optim.LBFGS.step
        torch.optim.LBFGS.step = functools.wraps(step)(lambda self: step(self))
""",
        }
    )
    for name in ("SGD", "LBFGS"):
        torch.quietly(
            f"from torch.optim import SGD, LBFGS\nSGD(), LBFGS()\noptimizer = {name}()\n"
            "optimizer.step()\n"
            "from torch._dynamo.eval_frame import TorchPatcher\n"
            "TorchPatcher.patch(); TorchPatcher.patch()\n"
            "optimizer.step(); optimizer.step()\n"
        )
    assert [numbers(events, "step") for events in torch.all_events()] == [[0, 1, 2]] * 2
    # They are timed before and after; torch's patch took off what it found outermost.
    phases = [event_names(events, "phase") for events in torch.all_events()]
    assert phases == [["optimizer"] * 3] * 2


def test_a_step_that_calls_its_base_classs_step_counts_once(program: Program) -> None:
    """Torch calls hooks in both, where the base class has been used too."""
    program.quietly(
        "import torch\n"
        "class Lookahead(torch.optim.SGD):\n"
        "    def step(self, closure=None): return super().step(closure)\n"
        "weights = [torch.ones(1, requires_grad=True)]\n"
        "torch.optim.SGD(weights, lr=0.1)\n"
        "optimizer = Lookahead(weights, lr=0.1)\n"
        "for _ in range(3): optimizer.step()\n",
        python=torch_python(),
    )
    assert numbers(program.events(), "step") == [0, 1, 2]


def test_a_step_whose_gradients_overflow_counts(torch: Program) -> None:
    torch.write(
        {
            "torch/amp/grad_scaler.py": """
class GradScaler:
    def step(self, optimizer, overflow):
        return None if overflow else optimizer.step()
"""
        }
    )
    out = torch.quietly(
        LOOP + "from torch.amp.grad_scaler import GradScaler\n"
        "first, second, scaler = Optimizer(), Optimizer(), GradScaler()\n"
        "for overflow in (True, False, True):\n"
        "    print(scaler.step(first, overflow=overflow)); scaler.step(second, overflow)\n"
    )
    assert out == "None\nstepped\nNone\n"
    assert numbers(torch.events(), "step") == [0, 1, 2]


@pytest.mark.parametrize(
    ("activities", "expected"),
    [("{'ProfilerActivity.CUDA'}", ["pause 1", "pause 0"]), ("{'ProfilerActivity.CPU'}", [])],
)
def test_the_collector_makes_way_while_torch_profiler_records_the_gpu(
    torch: Program, library: dict[str, str], activities: str, expected: list[str]
) -> None:
    body = f"enabled, kineto_activities = True, {activities}\n"
    body += "    def __enter__(self): self._prepare_trace(); return self\n"
    body += "    def _prepare_trace(self): print('prepares', self.calls())\n"
    body += "    def __exit__(self, *error): print('stops', self.calls())\n"
    torch.write({"torch/autograd/profiler.py": f"class profile:\n    {body}"})
    out = torch.quietly(
        LOAD + "load()\nfrom torch.autograd.profiler import profile\n"
        "profile.calls = staticmethod(calls)\n"
        "try:\n    with profile(): print('inside'); raise KeyError\nexcept KeyError: pass\n",
        **library,
    )
    seen = "pause 1" if expected else "none"
    assert out == f"prepares {seen}\ninside\nstops {seen}\n"
    assert calls(library) == expected
    if expected:
        begun, ended = event_names(torch.events(), "note")
        assert "torch.profiler records it" in begun
        assert "recorded again" in ended
    else:
        assert not torch.files()


@pytest.mark.parametrize(
    "module", ["torch.profiler._cupti_monitor", "torch.profiler._cupti.monitor"]
)
def test_the_collector_makes_way_for_torchs_cupti_monitor(
    program: Program, library: dict[str, str], module: str
) -> None:
    body = "class CuptiMonitor:\n    def start(self): pass\n    def stop(self): pass\n"
    program.write({module.replace(".", "/") + ".py": body})
    program.quietly(
        f"{LOAD}load()\nfrom {module} import CuptiMonitor\nmonitor = CuptiMonitor()\n"
        "monitor.start(); assert calls() == 'pause 1'; monitor.stop(); monitor.stop()\n",
        **library,
    )
    assert calls(library) == ["pause 1", "pause 0"]
    assert "torch's CUPTI monitor records it" in event_names(program.events(), "note")[0]


# ---- phases of a step ----


PHASED: Final = {
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
    "torch/__init__.py": "def is_anomaly_enabled(): return True",
    "torch/autograd/anomaly_mode.py": """
class detect_anomaly:
    def __enter__(self): pass
    def __exit__(self, *args): pass
class set_detect_anomaly:
    def __init__(self, mode): pass
""",
    "torch/serialization.py": "def save(obj, f): return f.write(obj)",
    "torch/compiler/__init__.py": "tracing = False\ndef is_compiling(): return tracing",
    "torch/distributed/pipelining/stage.py": """
class _PipelineStageBase:
    def forward_one_chunk(self, batch): return 2 * batch
class PipelineStage(_PipelineStageBase): pass
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
def phased(program: Program) -> Program:
    program.write(PHASED)
    return program


def test_phases_are_timed_and_return_what_they_did(phased: Program) -> None:
    out = phased.quietly(
        USES + "import time\nbackward(lambda: time.sleep(0.02))\n"
        "print(clip_grad_norm_([], 7), GradScaler().step(optimizer), optimizer.step())\n"
    )
    assert out == "7 stepped stepped\n"
    events = phased.events()
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


def test_a_forward_pass_of_a_pipelines_stage_is_timed(phased: Program) -> None:
    out = phased.quietly(
        f"{USES}from torch.distributed.pipelining.stage import PipelineStage\n"
        "print(PipelineStage().forward_one_chunk(21))\nbackward(); optimizer.step()\n"
    )
    assert out == "42\n"
    assert phases(phased.events()) == ["forward", "backward", "optimizer"]


def test_saving_a_checkpoint_is_timed_under_any_name(phased: Program) -> None:
    out = phased.quietly(
        f"{USES}import io\nfrom torch.serialization import save\nwritten = io.StringIO()\n"
        "print(save('all', written), written.getvalue())\noptimizer.step()\n"
    )
    assert out == "3 all\n"
    assert phases(phased.events()) == ["checkpoint", "optimizer"]


def test_a_search_for_anomalies_is_recorded_once(phased: Program) -> None:
    phased.quietly(
        f"{USES}from torch.autograd.anomaly_mode import detect_anomaly\n"
        "for _ in range(3):\n    with detect_anomaly(): optimizer.step()\n"
    )
    assert event_names(phased.events(), "counter").count("anomaly mode") == 1


def test_the_phase_of_an_old_torchs_optimizer_is_timed(phased: Program) -> None:
    phased.write({"torch/optim/optimizer.py": OLDER})
    assert phased.quietly(USES + "print(optimizer.step())\n") == "stepped\n"
    assert phases(phased.events()) == ["optimizer"]


def test_an_error_in_backward_reaches_the_program(phased: Program) -> None:
    out = phased.quietly(
        USES + "try: backward(fails=True)\nexcept ValueError as error: print(error)\n"
    )
    assert out == "no gradient\n"
    assert phases(phased.events()) == ["backward"]


def test_warnings_name_the_lines_of_the_program(phased: Program) -> None:
    """As without ours: each place that calls what warns, with ``stacklevel=2``, is one."""
    phased.write(
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
    hooked, without = phased.run(source), phased.run(source, hooked=False)
    assert hooked.code == without.code == 0
    assert hooked.err == without.err
    assert hooked.err.count("main.py:") == 4
    # A traceback has our line as before, from the wrappers' source.
    assert (hooked.out, without.out) == ("True\n", "False\n")


def test_an_overflow_has_the_optimizers_phase_without_its_step(phased: Program) -> None:
    phased.quietly(USES + "GradScaler.overflows = True\nGradScaler().step(optimizer)\n")
    events = phased.events()
    assert phases(events) == ["gradient unscaling", "optimizer"]
    assert len(events.records["step"]) == 1


def test_nothing_is_recorded_while_torch_compile_traces(phased: Program) -> None:
    """A call of the clock would break its graph."""
    phased.quietly(
        USES + "torch.compiler.tracing = True\n"
        "backward(); clip_grad_norm_([], 1); optimizer.step()\n"
        "torch.compiler.tracing = False\nbackward()\n"
    )
    events = phased.events()
    assert phases(events) == ["backward"]
    assert numbers(events, "step") == []


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_backward_passes_are_the_steps_of_a_program_without_optimizer(
    phased: Program, tmp_path: Path, has_optimizer: bool
) -> None:
    """A program that updates its parameters by itself calls none."""
    update = "optimizer.step()" if has_optimizer else "pass"
    phased.quietly(
        USES + "import time\nfor number in range(8):\n    backward(lambda: time.sleep(0.005))\n"
        f"    if number % 2: {update}\n"
    )
    path = tmp_path / "trace.sqlite"
    assert merge(phased.spool, path, {"backend": "host"}).steps == (4 if has_optimizer else 8)
    with gputrace.open(path) as opened:
        report = opened.analyze()
    assert report.steps.count == (3 if has_optimizer else 7)
    assert ("from mark to mark of 'backward'" in report.render()) == (not has_optimizer)


# ---- real torch ----

REAL: Final = """
import torch
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    data = TensorDataset(torch.zeros(32, 4), torch.zeros(32, 1))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for context in (None, "fork", "spawn"):
        loader = DataLoader(data, 8, num_workers=2 * bool(context), multiprocessing_context=context)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    print("trained")
"""


def test_real_torch_is_recorded_with_and_without_workers(program: Program) -> None:
    python = torch_python()
    ran = program.run(REAL, python=python)
    assert ran == program.run(REAL, python=python, hooked=False)
    assert (ran.code, ran.out) == (0, "trained\n")
    # The loader's workers leave files, too.
    [trained] = [events for events in program.all_events() if len(events.records["step"])]
    assert numbers(trained, "step") == list(range(12))
    assert numbers(trained, "data_wait") == [0, 0, 0, 0, 1] * 3
