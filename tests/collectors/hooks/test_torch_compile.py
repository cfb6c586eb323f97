"""torch.compile: compilations, with the reasons for compiling again."""

from __future__ import annotations

from typing import Final

import pytest

from gputrace.collectors.spool.host_events import HostEvents
from tests.helpers.handmade import MS
from tests.helpers.programs import Program, event_names

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
    "torch/_inductor/runtime/triton_heuristics.py": """
def triton_poi_fused_0(): pass
triton_poi_fused_0.starting_line_number = 17
class CachingAutotuner:
    fn = staticmethod(triton_poi_fused_0)
    def __init__(self, filename): self.filename, self.launchers = filename, []
    def precompile(self, warm_cache_only=False):
        if not warm_cache_only: self.launchers.append(1)
        return "done"
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
def dynamo(program: Program) -> Program:
    program.write(MODULES)
    return program


def compilations(events: HostEvents) -> list[str]:
    return event_names(events, "compilation")


def test_functions_are_named_and_why_they_are_compiled_again(dynamo: Program) -> None:
    out = dynamo.quietly(
        USES + "print(compiles(train.__code__, []))\n"
        "compiles(train.__code__, ['0/0: k == 3      # def f(): pass\\nstack', 'second'])\n"
    )
    assert out == "train\n"
    events = dynamo.events()
    name = f"train ({dynamo.folder / 'main.py'}:4)"
    assert compilations(events) == [name, f"{name}: k == 3"]
    rows = events.records["compilation"]
    assert all(20 * MS <= length < 500 * MS for length in rows["end"] - rows["start"])


def test_what_is_compiled_within_a_compilation_is_a_part_of_it(dynamo: Program) -> None:
    source = "compiles(train.__code__, [], both)\nassert both() == ('start', 'end')\n"
    dynamo.quietly(USES + source)
    names = [name.partition(" (")[0] for name in compilations(dynamo.events())]
    assert names == ["train", "lazy backward"]


def test_an_error_of_the_compiler_reaches_the_program(dynamo: Program) -> None:
    out = dynamo.quietly(
        USES + "try: compiles(train.__code__, ['fails'])\nexcept ValueError as e: print(e)\n"
    )
    assert out == "cannot be compiled\n"
    assert compilations(dynamo.events())[0].endswith(": fails")


def test_where_inductor_wrote_the_kernels_that_it_launches_is_recorded(dynamo: Program) -> None:
    """Not by the processes that only compile them."""
    out = dynamo.quietly(
        "from torch._inductor.runtime.triton_heuristics import CachingAutotuner\n"
        "CachingAutotuner('/tmp/worker.py').precompile(warm_cache_only=True)\n"
        "print(CachingAutotuner('/tmp/cabc.py').precompile())\n"
        "print(CachingAutotuner(None).precompile())\n"
    )
    assert out == "done\ndone\n"
    source = "triton_poi_fused_0 at /tmp/cabc.py:17 triton_poi_fused_0"
    assert event_names(dynamo.events(), "source") == [source]
