"""Steps: those that the program marks, and which count where several sources mark them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import gputrace
from tests.helpers import command
from tests.helpers.programs import LOOP, Program, event_names, numbers


@pytest.mark.parametrize(
    ("loop", "steps"),
    [
        ("for _ in range(4): d.step(); g.step()", 4),
        ("for _ in range(4): d.step(); d.step(); g.step()", 8),
        ("for _ in range(4): g.step(); d.step(); d.step()", 4),
        ("for _ in range(4): g.step()\nfor _ in range(60): d.step()", 64),
        ("for _ in range(4): g.step()\ndel g\nfor _ in range(4): d.step()", 8),
        ("for _ in range(4): Outer(g).step()", 4),
    ],
)
def test_of_several_optimizers_the_first_counts_while_it_steps(
    torch: Program, loop: str, steps: int
) -> None:
    outer = "class Outer(Optimizer):\n    def __init__(self, inner): self.inner = inner\n"
    outer += "    def step(self): self.inner.step(); super().step()\n"
    torch.quietly(f"{LOOP}{outer}d, g = Optimizer(), Optimizer()\n{loop}")
    assert numbers(torch.events(), "step") == list(range(steps))
    assert (np.diff(torch.events().records["step"]["end"].astype(np.int64)) > 0).all()


def test_steps_of_the_user_count_before_those_of_a_loop_and_these_before_an_optimizers(
    torch: Program,
) -> None:
    path = "deepspeed/runtime/engine.py"
    torch.write({path: "class DeepSpeedEngine:\n    def _take_model_step(self): pass\n"})
    loop = "from deepspeed.runtime.engine import DeepSpeedEngine\n"
    loop += "optimizer, engine = Optimizer(), DeepSpeedEngine()\n"
    loop += "for _ in range(2): optimizer.step(); optimizer.step(); engine._take_model_step()\n"
    torch.quietly(LOOP + loop)
    torch.quietly(f"{LOOP}{loop}from gputrace.marks import step\nstep()")
    by_source = {
        event_names(events, "step")[0]: numbers(events, "step") for events in torch.all_events()
    }
    assert by_source == {"deepspeed.DeepSpeedEngine.step": [0, 1], "gputrace.step": [0]}


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("for _ in range(4): gputrace.step()", 4),
        ("for _ in range(4):\n with gputrace.step(): pass", 4),
        ("for _ in range(2):\n with gputrace.step(): pass\ngputrace.step()", 3),
        ("gputrace.step()\nfor _ in range(2):\n with gputrace.step(): pass", 3),
        ("for _ in range(2):\n with gputrace.step(): continue", 2),
        ("try:\n with gputrace.step(): 1 / 0\nexcept ArithmeticError: pass\ngputrace.step()", 1),
    ],
)
def test_a_step_ends_where_the_user_marks_it_or_with_its_block(
    body: str, count: int, program: Program
) -> None:
    program.quietly(f"import gputrace\n{body}")
    assert event_names(program.events(), "step") == ["gputrace.step"] * count


def test_a_block_of_a_step_records_nothing_without_a_recorder(program: Program) -> None:
    source = "import gputrace\nwith gputrace.step(): pass\ngputrace.step()"
    program.quietly(source, hooked=False)
    assert program.files() == []


def test_annotations_are_context_managers_and_decorators(program: Program) -> None:
    program.quietly(
        "from gputrace.marks import annotate, step\n"
        "@annotate('half')\n"
        "def half(n):\n    'Doc.'\n    return half(n // 2) if n else 'end'\n"
        "assert (half(2), half.__name__, half.__doc__) == ('end', 'half', 'Doc.')\n"
        "again = annotate('again')\n"
        "with again, again: pass\n"
        "try:\n    with annotate('fails'): raise KeyError\nexcept KeyError: pass\n"
        "step(); step()\n"
    )
    events = program.events()
    assert sorted(event_names(events, "annotation")) == ["again"] * 2 + ["fails"] + ["half"] * 3
    assert event_names(events, "step") == ["gputrace.step"] * 2
    assert (events.records["annotation"]["start"] <= events.records["annotation"]["end"]).all()


def test_marks_work_without_sitecustomize(program: Program) -> None:
    program.quietly("from gputrace.marks import step\nstep()", "-S")
    assert numbers(program.events(), "step") == [0]


def test_marks_cost_nothing_without_a_recorder(program: Program) -> None:
    out = program.quietly(
        "import sys, timeit\n"
        "from gputrace.marks import annotate, step\n"
        "def f(): pass\n"
        "assert annotate('f')(f) is f\n"
        "with annotate('a'): step()\n"
        "assert not any('_gputrace_hooks' in name for name in sys.modules)\n"
        "print(min(timeit.repeat(step, number=10000, repeat=5)) / 10000)\n",
        hooked=False,
    )
    assert float(out) < 1e-6


def test_samples_tokens_and_flop_of_steps_give_the_throughput(tmp_path: Path) -> None:
    script, trace = tmp_path / "train.py", tmp_path / "trace.sqlite"
    script.write_text(
        "import gputrace, time\n"
        "for _ in range(15):\n"
        "    time.sleep(0.01)\n"
        "    gputrace.step(samples=16, tokens=8192, flop=6e15 + 500_000)\n"
        "    time.sleep(0.01)\n"
        "    gputrace.step()\n"
    )
    ran = command.gputrace(
        "record", "--backend", "host", "--no-nvml", "-o", trace, "--", sys.executable, script
    )
    assert ran.code == 0, ran.err
    with gputrace.open(trace) as opened:
        report = opened.analyze()
    (row,) = report.throughput
    assert (row.samples_per_step, row.tokens_per_step, row.flop_per_step) == (
        8,
        4096,
        3e15 + 250_000,
    )
    assert row.mfu is None, "no card was seen"
    assert row.samples_per_s is not None
    assert row.tokens_per_s == pytest.approx(512 * row.samples_per_s, rel=1e-3)
    assert row.samples_per_s == pytest.approx(8e9 / (report.steps.mean_ns or 0), rel=0.01)
