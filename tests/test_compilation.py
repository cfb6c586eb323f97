"""Compilations in steps: what the hooks record of them, and what is said of a run that has them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from gputrace.api import Report
from gputrace.collectors.spool.host_events import HostEvents
from gputrace.model.results import Finding
from tests.helpers.exports import STEP, Export, global_id
from tests.helpers.handmade import MS, analyze
from tests.test_hooks import Program, event_names, recorded_with_torch

PID: Final = 100
STEPS: Final = 40
RANGES: Final = "GPUTRACE_HOST_RANGE"


def of_compilations(folder: Path, *names: str, every: int, length_ms: float) -> Report:
    """Steps of 10 ms; every so many, something is compiled, by which the step is longer."""
    export = Export()
    export.give("GPUTRACE_META", "name", "value")
    export.give(RANGES, "start", "end", "globalTid", "nameId", "kind")
    export.rows.setdefault("GPUTRACE_META", [])
    who = {"globalTid": global_id(PID, thread=PID)}
    at, texts = 0, iter(names * STEPS)
    for number in range(STEPS):
        compiles = round(length_ms * MS) if number % every == every - 1 else 0
        if compiles:
            span = {"start": at + 1, "end": at + compiles + 1}
            export.add(RANGES, **span, **who, nameId=export.string(next(texts)), kind=6)
        end = at + 10 * MS + compiles
        step = {"start": at + 1, "end": end + 1, "step": number}
        export.add(STEP, **step, **who, nameId=export.string("torch.step"))
        at = end
    return analyze(export, folder)


def found(report: Report, id: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.id == id]


def test_compilations_in_measured_steps_are_named_with_their_reason(tmp_path: Path) -> None:
    report = of_compilations(
        tmp_path, "f (t.py:1): x == 3", "f (t.py:1): x == 4", every=4, length_ms=60
    )
    (finding,) = found(report, "recompilation")
    assert report.findings[0] is finding
    assert finding.severity == "high"
    assert finding.impact_ns == pytest.approx(15 * MS, rel=0.05)
    assert "(60%): 9 times in 36 steps, mostly f (t.py:1), since x == " in finding.message
    assert "torch.compile(dynamic=True)" in finding.advice
    (slow,) = found(report, "slow-steps")
    assert "parts of the program are compiled for 60.0 ms of each" in slow.message


@pytest.mark.parametrize(
    ("what", "cure"), [("Triton add", "constexpr"), ("tf.function train", "reduce_retracing")]
)
def test_the_cure_is_that_of_the_compiler(tmp_path: Path, what: str, cure: str) -> None:
    (finding,) = found(of_compilations(tmp_path, what, every=4, length_ms=60), "recompilation")
    assert cure in finding.advice


def test_rare_and_short_compilations_are_none(tmp_path: Path) -> None:
    report = of_compilations(tmp_path, "f", every=20, length_ms=2)
    assert not found(report, "recompilation")


# ---- the hooks, with modules that stand for torch's and JAX's ----

MODULES: Final = {
    "torch/_dynamo/convert_frame.py": """
import time
def get_and_maybe_log_recompilation_reasons(entries): return entries
def _compile(code, entries, inner=None):
    get_and_maybe_log_recompilation_reasons(entries)
    if inner: inner()
    time.sleep(0.02)
    if entries == ["fails"]: raise ValueError("cannot be compiled")
    return code.co_name
def compiles(*args): return _compile(*args)
""",
    "torch/_dynamo/callback.py": """
from enum import Enum
class Trigger(Enum): LAZY_BACKWARD = 1
class Args: callback_trigger = Trigger.LAZY_BACKWARD
class CompilationCallbackHandler:
    def run_start_callbacks(self, args): return "start"
    def run_end_callbacks(self, args): return "end"
""",
    "jax/_src/monitoring.py": """
listeners = []
def record_event_duration_secs(event, duration, **more):
    for listener in listeners: listener(event, duration, **more)
""",
}
USES: Final = """
from torch._dynamo import convert_frame
from torch._dynamo.callback import Args, CompilationCallbackHandler
def train(): pass
compiles, handler = convert_frame.compiles, CompilationCallbackHandler()
def both(): return handler.run_start_callbacks(Args()), handler.run_end_callbacks(Args())
"""


@pytest.fixture
def program(tmp_path: Path) -> Program:
    made = Program(tmp_path)
    made.write(MODULES)
    return made


def compilations(events: HostEvents) -> list[str]:
    return event_names(events, "compilation")


def test_functions_are_named_and_why_they_are_compiled_again(program: Program) -> None:
    out = program.quietly(
        USES + "print(compiles(train.__code__, []))\n"
        "compiles(train.__code__, ['0/0: k == 3      # def f(): pass\\nstack', 'second'])\n"
    )
    assert out == "train\n"
    events = program.events()
    name = f"train ({program.folder / 'main.py'}:4)"
    assert compilations(events) == [name, f"{name}: k == 3"]
    rows = events.records["compilation"]
    assert all(20 * MS <= length < 500 * MS for length in rows["end"] - rows["start"])


def test_what_is_compiled_within_a_compilation_is_a_part_of_it(program: Program) -> None:
    source = "compiles(train.__code__, [], both)\nassert both() == ('start', 'end')\n"
    program.quietly(USES + source)
    names = [name.partition(" (")[0] for name in compilations(program.events())]
    assert names == ["train", "lazy backward"]


def test_an_error_of_the_compiler_reaches_the_program(program: Program) -> None:
    out = program.quietly(
        USES + "try: compiles(train.__code__, ['fails'])\nexcept ValueError as e: print(e)\n"
    )
    assert out == "cannot be compiled\n"
    assert compilations(program.events())[0].endswith(": fails")


def test_jax_says_what_it_compiles_and_how_long(program: Program) -> None:
    program.quietly(
        "from jax._src import monitoring\nseen = []\n"
        "monitoring.listeners.append(lambda *args, **more: seen.append((args, more)))\n"
        "say = monitoring.record_event_duration_secs\n"
        "say('/jax/core/compile/backend_compile_duration', 0.25, fun_name='jit(step)')\n"
        "say('/jax/other', 0.5)\nassert len(seen) == 2, seen\n"
    )
    events = program.events()
    assert compilations(events) == ["jit(step)"]
    (row,) = events.records["compilation"]
    assert row["end"] - row["start"] == 250 * MS


# ---- real torch ----

PLANTED: Final = """
import time, torch, torch._dynamo.config as config
torch.set_num_threads(1)
config.automatic_dynamic_shapes, config.recompile_limit = False, 100
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

@torch.compile(backend="eager", dynamic=False)
def loss_of(x): return model(x).square().mean()

for step in range(40):
    loss_of(torch.ones(step if step > 12 and step % 3 == 0 else 2, 8)).backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.005)
"""


def test_batches_of_many_shapes_are_found_in_a_real_program(tmp_path: Path) -> None:
    _, report = recorded_with_torch(tmp_path, PLANTED)
    (finding,) = found(report, "recompilation")
    assert "mostly loss_of (" in finding.message
    assert "size mismatch at index 0" in finding.message
    assert finding.evidence["compilations"] == 9


OTHERS: Final = {
    "triton/compiler/compiler.py": "def compile(src, target=None): return src.fn.__name__\n",
    "triton/runtime/autotuner.py": """
from triton.compiler.compiler import compile
class Autotuner:
    def __init__(self, fn): self.fn = fn
    def _bench(self, *args, config): return compile(self) + config
""",
    "tensorflow/python/eager/polymorphic_function/tracing_compilation.py": """
class Options: name = "train"
def _create_concrete_function(function_type, options): return options.name
""",
}


def test_other_compilers_are_named_from_the_first_step_on(program: Program) -> None:
    program.write(OTHERS)
    out = program.quietly(
        "import gputrace\n"
        "from triton.compiler import compiler\n"
        "from triton.runtime.autotuner import Autotuner\n"
        "from tensorflow.python.eager.polymorphic_function import tracing_compilation as tf\n"
        "def add(): pass\n"
        "tuner = Autotuner(add)\n"
        "for _ in range(2):\n"
        "    print(compiler.compile(tuner, target=1), tuner._bench(config='!'))\n"
        "    print(tf._create_concrete_function(0, tf.Options()))\n"
        "    gputrace.step()\n"
    )
    assert out == "add add!\ntrain\n" * 2
    names = compilations(program.events())
    assert names == ["Triton add", "Triton's search for add", "tf.function train"]
