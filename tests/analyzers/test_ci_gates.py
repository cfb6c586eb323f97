"""The gate on a slow-down: what noise, and other programs on the machine, can explain passes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace as replaced

from gputrace.analyzers.ci_gates import Gate, gate_slowdown
from gputrace.analyzers.compare import changed_parts, compare, with_batch, work_ratio
from gputrace.analyzers.compare.runs import Run
from gputrace.api import open_runs
from gputrace.data import unpacked
from gputrace.model.comparison import ClassChange
from gputrace.model.host import HostLine
from gputrace.model.results import Finding, Throughput
from tests.analyzers.test_host_only_traces import Made

MS = 1_000_000


def run_of(
    path: Path,
    step: float,
    scatter: float = 0.5,
    queued: float = 0,
    others: bool = True,
    lines: Mapping[str, float] | None = None,
    steps: int = 40,
) -> Run:
    """Steps without a GPU; times in milliseconds of a step."""
    made = Made(path)
    made.process(1, 0)
    signs = (1, 1, -1, 1, -1, -1, 1, -1)
    lengths = [step + scatter * signs[number % 8] for number in range(steps)]
    for start, end in pairwise(accumulate(lengths, initial=0)):
        made.step(start, end)
    made.report()
    (run,) = open_runs([path], [path.stem])
    evidence = {"others_are_why": others, "queued_ns": round(queued * MS)}
    starved = Finding("cpu-starved", "high", (), (0,), round(queued * MS), "", "", evidence)
    rows = tuple(
        HostLine(0, line, round(ns * MS), ns / step, round(1_000 * ns / step))
        for line, ns in (lines or {}).items()
    )
    findings = (starved,) if queued else ()
    return replace(run, analysis=replaced(run.analysis, findings=findings, host_lines=rows))


def test_a_run_has_the_samples_that_its_program_gave_unless_the_user_says_others(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path / "a.sqlite", 20)
    row = Throughput(0, 24.0, None, None, 1200.0, None, None)
    both = replaced(run.analysis, throughput=(row, replaced(row, rank=1)))
    said = replace(run, analysis=both)
    assert with_batch(said, None, None).samples == 48
    assert with_batch(said, None, 64).samples == 64
    assert with_batch(run, None, None).samples is None
    assert work_ratio(with_batch(run, None, 48.1), with_batch(said, None, None))[0] == 1


@pytest.mark.parametrize(
    ("before", "after", "passed", "said"),
    [
        pytest.param((20, 0.5), (20.2, 0.5), True, "limit is 3% slower", id="no slower"),
        pytest.param((20, 0.5), (26, 0.5), False, "30.0% slower", id="clearly slower"),
        pytest.param((20, 2), (21, 2), True, "the noise of the steps could explain it", id="noise"),
        pytest.param((20, 0.5), (20.7, 0.5), True, "but not for certain by more", id="near it"),
        pytest.param(
            (20, 4),
            (20.2, 4),
            True,
            "passes, but the noise is larger than the limit",
            id="much noise",
        ),
        pytest.param(
            (20, 0.5, 2), (26, 0.5, 8), True, "other programs had the cores", id="a busy machine"
        ),
        pytest.param((20, 0.5, 10), (26, 0.5, 13), False, "30.0% slower", id="slower and busy"),
        pytest.param((20, 0.5, 2), (26, 0.5, 8, False), False, "30.0% slower", id="own threads"),
    ],
)
def test_only_what_nothing_else_explains_fails(
    before: tuple[float, ...],
    after: tuple[float, ...],
    passed: bool,
    said: str,
    tmp_path: Path,
) -> None:
    baseline = run_of(tmp_path / "a.sqlite", *before)  # type: ignore[arg-type]
    run = run_of(tmp_path / "b.sqlite", *after)  # type: ignore[arg-type]
    gate = gate_slowdown(run, baseline, 0.03)
    assert (gate.passed, gate.evaluated) == (passed, True)
    assert said in gate.message


@pytest.mark.parametrize(
    ("before", "after", "passed"),
    [((20, 2), (21, 2), False), ((20, 4), (20.2, 4), True), ((20, 0.5), (20.7, 0.5), False)],
    ids=["slower", "no slower", "near the limit"],
)
def test_a_gate_that_noise_leaves_open_says_how_many_steps_decide_it(
    before: tuple[float, float], after: tuple[float, float], passed: bool, tmp_path: Path
) -> None:
    def gate(steps: int) -> Gate:
        run, baseline = (
            run_of(tmp_path / f"{name}{steps}.sqlite", *times, steps=steps)
            for name, times in (("b", after), ("a", before))
        )
        return gate_slowdown(run, baseline, 0.03)

    said = re.search(r"about ([\d,]+) steps of each would decide", gate(40).message)
    assert said is not None
    decided = gate(int(1.5 * int(said[1].replace(",", ""))))
    assert decided.passed is passed
    assert "would decide" not in decided.message


def test_no_number_of_steps_decides_a_gate_exactly_at_its_limit(tmp_path: Path) -> None:
    run, base = (run_of(tmp_path / f"{at}.sqlite", 20 + at, scatter=2) for at in (1, 0))
    message = gate_slowdown(run, base, 0.05).message
    assert "too close to the limit for more steps to decide" in message


@pytest.mark.parametrize(
    ("queued", "others", "said"),
    [
        (8, True, "cores that other programs use may explain it (2.00 ms of a step in a, 8.00 ms "),
        (3, True, "a step takes 26.0 ms instead of 20.0 ms"),
        (8, False, "a step takes 26.0 ms instead of 20.0 ms"),
    ],
    ids=["decides", "is too little", "own threads"],
)
def test_a_comparison_says_how_much_waits_for_a_core_where_that_decides(
    queued: float, others: bool, said: str, tmp_path: Path
) -> None:
    a = run_of(tmp_path / "a.sqlite", 20, queued=2)
    result = compare([a, run_of(tmp_path / "b.sqlite", 26, queued=queued, others=others)])
    assert said in result.message
    assert ("may explain it" in result.message) == (queued == 8 and others)


def test_two_gpus_are_no_scaling_of_a_run_without_any(tmp_path: Path) -> None:
    with unpacked("demo.sqlite.xz") as demo:
        (on_gpus,) = open_runs([demo], ["demo"])
    result = compare([run_of(tmp_path / "a.sqlite", 20), on_gpus])
    assert (result.scaling, [run.gpus for run in result.runs]) == (None, [0, 2])
    assert result.message.startswith("demo is 2.45x slower")
    assert "GPU" not in result.message
    assert any("taken as equal work" in warning for warning in result.warnings)


def test_the_line_that_grew_is_the_reason(tmp_path: Path) -> None:
    """A line that moved within its function is the same place; a small one is noise."""
    before = {"train.py:7 load": 8.0, "train.py:12 model": 11.0, "train.py:20 log": 1.0}
    after = {"train.py:8 load": 8.1, "train.py:15 model": 17.0, "train.py:23 log": 0.9}
    a = run_of(tmp_path / "a.sqlite", 20, lines=before)
    b = run_of(tmp_path / "b.sqlite", 26, lines=after)
    result = compare([a, b])
    assert result.pair is not None
    assert [(row.line, row.difference_ns) for row in result.pair.lines] == [
        ("train.py:15 model", 6 * MS)
    ]
    assert result.message.endswith("6.00 ms more in model (train.py:15)")
    assert gate_slowdown(b, a, 0.03).message.endswith("6.00 ms more in model (train.py:15)")
    for waits, said in (
        (6, "6.00 ms of it in model (train.py:15)"),
        (1, "6.00 ms more in model (train.py:15)"),
    ):
        change = 0, waits * MS, waits * MS, None, None, True
        loader = ClassChange(*change, "host_data", 0.0, 0.0, None, None)
        pair = replace(result.pair, classes=(loader,))
        assert [*changed_parts("slower", pair, "step")][-1] == said


def test_functions_of_a_renamed_file_are_the_same(tmp_path: Path) -> None:
    """Else the fetch of a script that was renamed would be the culprit of what its main does."""
    before = {"marked.py:20 fetch": 15.0, "marked.py:30 main": 1.0, "shared.py:3 log": 4.0}
    after = {"host.py:20 fetch": 15.1, "host.py:31 main": 7.0, "shared.py:3 log": 3.9}
    a = run_of(tmp_path / "a.sqlite", 20, lines=before)
    result = compare([a, run_of(tmp_path / "b.sqlite", 26, lines=after)])
    assert result.message.endswith("20.0 ms; 6.00 ms more in main (host.py:31)")


@pytest.mark.parametrize(
    ("of_load", "said"), [(8.0, "; all of that in load (train.py:7)"), (19.0, "of 20.0 ms")]
)
def test_no_function_is_said_to_cost_more_than_the_step_grew(
    of_load: float, said: str, tmp_path: Path
) -> None:
    """Time that has moved from one function to another is no culprit."""
    before = {"train.py:7 load": 0.5, "train.py:12 model": 19.5}
    after = {"train.py:7 load": 0.5 + of_load, "train.py:12 model": 25.5 - of_load}
    a = run_of(tmp_path / "a.sqlite", 20, lines=before)
    result = compare([a, run_of(tmp_path / "b.sqlite", 26, lines=after)])
    assert result.message.endswith(said.replace("of 20.0", "instead of 20.0"))
