"""JAX: annotated steps, compilations, and its profiler."""

from __future__ import annotations

from typing import Final

from tests.helpers.handmade import MS
from tests.helpers.programs import LOAD, Program, calls, check_profiler, event_names

MONITORING: Final = """
listeners = []
def record_event_duration_secs(event, duration, **more):
    for listener in listeners: listener(event, duration, **more)
"""


def test_a_step_annotation_is_a_step(program: Program) -> None:
    program.write(
        {
            "jax/_src/profiler.py": """
class TraceAnnotation:
    def __enter__(self): return self
    def __exit__(self, *error): return None
class StepTraceAnnotation(TraceAnnotation): pass
"""
        }
    )
    program.quietly(
        "from jax._src.profiler import StepTraceAnnotation, TraceAnnotation\n"
        "for _ in range(3):\n    with StepTraceAnnotation(), TraceAnnotation(): pass\n"
    )
    assert event_names(program.events(), "step") == ["jax.profiler.StepTraceAnnotation"] * 3


def test_compilations_have_the_name_and_length_that_jax_reports(program: Program) -> None:
    program.write({"jax/_src/monitoring.py": MONITORING})
    program.quietly(
        "from jax._src import monitoring\nseen = []\n"
        "monitoring.listeners.append(lambda *args, **more: seen.append((args, more)))\n"
        "say = monitoring.record_event_duration_secs\n"
        "say('/jax/core/compile/backend_compile_duration', 0.25, fun_name='jit(step)')\n"
        "say('/jax/other', 0.5)\nassert len(seen) == 2, seen\n"
    )
    events = program.events()
    assert event_names(events, "compilation") == ["jit(step)"]
    (row,) = events.records["compilation"]
    assert row["end"] - row["start"] == 250 * MS


def test_a_function_that_is_compiled_again_says_which_argument_changed(program: Program) -> None:
    program.write({"jax/_src/monitoring.py": MONITORING})
    program.quietly(
        "from types import SimpleNamespace as Values\n"
        "from jax._src import monitoring\n"
        "def array(*shape): return Values(shape=shape, dtype='float32')\n"
        "def step(weights, x, n): pass\n"
        "def compiled(fun, *args, **kwargs):\n"
        "    def cache_miss(fun, jit_info, args, kwargs):\n"
        "        for part in 'jaxpr_trace', 'backend_compile':\n"
        "            name = fun.__name__ if part == 'jaxpr_trace' else f'jit({fun.__name__})'\n"
        "            monitoring.record_event_duration_secs(\n"
        "                f'/jax/core/compile/{part}_duration', 0.25, fun_name=name)\n"
        "    cache_miss(fun, Values(static_argnums=(2,), static_argnames=()), args, kwargs)\n"
        "weights = {'w': array(8, 8)}\n"
        "compiled(step, weights, array(4, 8), 3)\n"
        "compiled(step, weights, array(4, 8), 4)\n"
        "compiled(step, weights, array(4, 8), 5)\n"
        "compiled(step, weights, array(6, 8), 5)\n"
        "for each in range(2):\n    def made(x): pass\n    compiled(made, array(2))\n"
    )
    static, shape = (
        "static argument n was 3, is 4",
        "argument x was float32[4, 8], is float32[6, 8]",
    )
    anew = "it is another function each time"
    reasons = ["", static, static, shape]
    expected = [("step", reason) for reason in reasons] + [("made", ""), ("made", anew)]
    assert event_names(program.events(), "compilation") == [
        f"{name}: {reason}" if reason else name
        for function, reason in expected
        for name in (function, f"jit({function})")
    ]


def test_the_collector_makes_way_for_jaxs_profiler(
    program: Program, library: dict[str, str]
) -> None:
    check_profiler(program, library, "jax._src.profiler", "start_trace", "stop_trace")


def test_a_profiler_that_would_crash_the_programs_graphs_does_not_get_cupti(
    program: Program, library: dict[str, str]
) -> None:
    body = "def start_trace(where): print('starts')\ndef stop_trace(): print('stops')\n"
    program.write({"jax/_src/profiler.py": body})
    out = program.quietly(
        f"{LOAD}load()\nfrom jax._src import profiler\n"
        "profiler.start_trace('there')\nprofiler.stop_trace()\n",
        KEEPS="1",
        **library,
    )
    assert out == "starts\nstops\n"
    assert calls(library) == []
    (note,) = event_names(program.events(), "note")
    assert note.startswith("JAX's profiler sees nothing of the GPU: gputrace records it")
