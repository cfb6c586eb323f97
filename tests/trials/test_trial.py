"""Trials: which runs are made, and what the outcome says of each cure."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import gputrace
from gputrace.errors import InputError, UsageError
from gputrace.studies.runner import Failed
from gputrace.trials import ledger, runs
from gputrace.trials.choice import Charges
from gputrace.trials.cures import Candidate, Prediction, read_candidates
from gputrace.trials.history import History, Request, Row
from gputrace.trials.runs import Change, Measured, Spent, Turns
from gputrace.trials.runs import Program as ProgramToTry
from gputrace.trials.statistics import MOST, Verdict
from gputrace.trials.trial import Trial
from tests.helpers.recordings import unpack
from tests.helpers.tried_programs import (
    FASTER,
    INTERRUPTED,
    NOT_FASTER,
    PROGRAM,
    UNREADABLE,
    Real,
    Simulated,
    gputrace_try,
)


@pytest.mark.parametrize("words", [["gc"], []])
@pytest.mark.parametrize("sleeps", ["1", "30"])
def test_a_python_without_the_hooks_is_said_to_be_why_no_step_was_seen(
    real: Real, words: list[str], sleeps: str
) -> None:
    program = [sys.executable, "-I", "-c", f"import time; time.sleep({sleeps})"]
    with pytest.raises(InputError, match=r"ran without the hooks.* started with -I"):
        gputrace.try_cures(program, *words, budget="3s")


def test_a_first_run_longer_than_the_budget_is_ended_and_said_of_each_cure(real: Real) -> None:
    slow = PROGRAM.replace("range(500)", "range(500000)")
    real.script.write_text(slow)
    command = [sys.executable, str(real.script)]
    assert len(gputrace.try_cures(command, budget="1s", steps=100000).notes) == 1
    outcome = gputrace.try_cures(command, "workers=4,gc", budget="4s", steps=100000)
    assert outcome.seconds < 1.03 * 4 + 2 * runs._SIGNAL_S + runs._GRACE_S
    assert outcome.runs == 1
    assert [(row.cure, row.verdict, row.why) for row in outcome.rows] == [
        ("workers=4", "cannot tell yet", "the budget ended within the first run"),
        ("gc", "cannot tell yet", "the budget ended within the first run"),
    ]
    [note] = outcome.notes
    assert "the first run took longer than the budget" in note
    assert "no step was seen" not in note


def test_a_first_run_without_any_step_is_said_to_have_none(real: Real) -> None:
    real.script.write_text("import time\ntime.sleep(60)\n")
    outcome = gputrace.try_cures([sys.executable, str(real.script)], "gc", budget="4s")
    [note] = outcome.notes
    assert "by then no step was seen; the hooks know steps of PyTorch" in note


def test_a_program_that_trains_for_a_short_time_is_measured_by_several_runs(real: Real) -> None:
    ends = "    if time.monotonic() > begun + 1.5: break\n    optimizer.step()\n"
    program = PROGRAM.replace("    optimizer.step()\n", ends).replace("=1)", "=8)")
    real.script.write_text("import time\nbegun = time.monotonic()\n" + program)
    command = [sys.executable, str(real.script)]
    outcome = gputrace.try_cures(command, "gc,set-to-none,foreach", budget="12s")
    rows = {row.cure: row for row in outcome.rows}
    assert rows["gc"].rounds >= 6
    assert rows["gc"].verdict not in ("failed", "changes nothing")


FAILS: Final = PROGRAM.replace("range(500)", "range(120)").replace('print("done")', "sys.exit(3)")
"""Ends with an exit code of its own after 120 steps: in the run of turns, not in the first."""


def test_a_program_that_fails_after_its_steps_as_it_is_fails_by_no_cure(real: Real) -> None:
    real.script.write_text(FAILS)
    outcome = gputrace.try_cures([sys.executable, str(real.script)], "gc", budget="2min")
    [row] = outcome.rows
    assert row.verdict != "failed"
    assert row.rounds >= 3
    said = "the program also fails without cures, after 120 steps; those before count: exit code 3"
    assert said in outcome.notes


def test_a_program_that_fails_with_a_cure_alone_fails_by_it(real: Real) -> None:
    """The same exit code, but not as far; the program as it is also fails, at its end."""
    cured = "    if item > 60 and not gc.isenabled(): sys.exit(3)\n    optimizer.step()\n"
    real.script.write_text("import gc\n" + FAILS.replace("    optimizer.step()\n", cured))
    outcome = gputrace.try_cures([sys.executable, str(real.script)], "gc", budget="2min")
    assert [(row.verdict, row.why) for row in outcome.rows] == [("failed", "exit code 3")]


def test_a_loader_whose_turns_fail_later_has_no_answer_of_them(simulated: Simulated) -> None:
    """Whole runs are of another kind, so that one run of turns that ended early counts no more."""
    simulated.factors = {"workers=4": 0.5}
    [cure] = read_candidates("workers=4")
    history, row = History(Request(("x",))), Row(cure)
    turns = Turns((cure,), 5)
    run = simulated.run(cure, 10, 70, None, turns, lambda _: [1])
    row.take(run, run.turns[0])
    assert (row.verdict, len(row.cured)) == ("faster", 7)
    history.add_failure(row, [row], Failed("exit code 1"))
    assert (row.within, row.cured, row.verdict, row.ratio) == (False, [], Verdict.OPEN, None)


def test_each_cure_has_its_answer_and_the_best_go_together(
    simulated: Simulated, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated.factors = {
        "workers=4": 0.8,
        "async-checkpoint": 0.9,
        "fused": 1.1,
        "pinned": 0,
        "foreach": 1.0,
    }
    simulated.failing = {"compile=default": "exit code 1: no compiler"}
    simulated.changes["workers=4"] = Change(
        "", "DataLoader", "num_workers", -1, "1", "4", str(simulated.path), 6
    )
    words = (
        "workers=4,async-checkpoint,fused,foreach,pinned,compile",
        "--json",
        "--apply",
        "--",
        "true",
    )
    ran = gputrace_try(capsys, *words)
    result = json.loads(ran.out)
    rows = {row["cure"]: row for row in result["rows"]}
    assert {cure: row["verdict"] for cure, row in rows.items()} == {
        "workers=4": "faster",
        "async-checkpoint": "faster",
        "fused": "slower",
        "foreach": "no difference",
        "pinned": "changes nothing",
        "compile=default": "failed",
        "workers=4+async-checkpoint": "faster",
    }
    assert rows["workers=4+async-checkpoint"]["ratio"] == pytest.approx(0.72, rel=0.01)
    assert (ran.code, result["best"]) == (FASTER, "workers=4+async-checkpoint")
    assert rows["compile=default"]["why"] == "exit code 1: no compiler"
    assert "+loader = DataLoader(range(500), num_workers=4)" in result["patch"]["diff"]
    assert simulated.path.read_text() == PROGRAM.replace("num_workers=1", "num_workers=4")
    kept = json.loads(gputrace_try(capsys, "--history", "--json").out)
    assert kept["trials"] == result["rows"]


@pytest.mark.parametrize(("noise", "said"), [(0.02, False), (0.3, True)])
def test_a_busy_machine_is_said_to_be_why_nothing_can_be_told(
    simulated: Simulated, noise: float, said: bool
) -> None:
    simulated.factors, simulated.noise = {"async-checkpoint": 1.0}, noise
    outcome = gputrace.try_cures(["x"], "async-checkpoint", budget="1min")
    assert outcome.rows[0].verdict == "cannot tell yet"
    assert any("is the machine busy" in note for note in outcome.notes) == said


def test_a_cure_whose_hook_raised_has_failed(simulated: Simulated) -> None:
    simulated.factors = {"graphs": 0, "pinned": 0}
    simulated.reasons = {"graphs": "failed: RuntimeError('capture')", "pinned": "torch sees no GPU"}
    outcome = gputrace.try_cures(["x"], "graphs,pinned")
    assert [(row.verdict, row.why) for row in outcome.rows] == [
        ("failed", "RuntimeError('capture')"),
        ("changes nothing", "torch sees no GPU"),
    ]


def test_a_program_that_fails_later_leaves_what_is_known_by_then(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_at_the_tenth_run(candidate: Candidate, *given: Any) -> Measured:
        if len(simulated.made) >= 9:
            raise Failed("exit code 1: no space left")
        return run(candidate, *given)

    run = simulated.run
    monkeypatch.setattr(simulated, "run", fail_at_the_tenth_run)
    simulated.factors, simulated.noise = {"async-checkpoint": 0.8}, 0.01
    outcome = gputrace.try_cures(["x"], "async-checkpoint")
    assert (outcome.best, outcome.rows[0].rounds) == ("async-checkpoint", 4)
    assert outcome.notes == ("no more rounds were made: x: exit code 1: no space left",)


def test_an_interrupted_run_leaves_the_rounds_it_had(
    simulated: Simulated, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated.factors = {"pinned": 0.5}
    rounds, switched = 0, simulated.by_turns

    def by_turns(
        run: Measured, turns: Turns, steps: int, going: Callable[[Measured], Sequence[int]]
    ) -> Measured:
        def interrupted(measured: Measured) -> Sequence[int]:
            nonlocal rounds
            rounds += 1
            going(measured)
            if rounds == 8:
                raise KeyboardInterrupt
            return [1]

        return switched(run, turns, steps, interrupted)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(simulated, "by_turns", by_turns)
        ran = gputrace_try(capsys, "pinned", "--", sys.executable, simulated.path)
    assert ran.code == INTERRUPTED
    assert "pinned: 10 → 5 ms, 2.0x faster (2.0x to 2.0x)" in ran.out
    assert re.search(r"pinned .* 8$", ran.out, re.M)


def test_an_interrupt_between_runs_shows_each_round_so_far(
    simulated: Simulated, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two cures have had a run in the first round, and a third one not yet."""

    def interrupt() -> None:
        if len(simulated.made) == 5:
            raise KeyboardInterrupt

    simulated.factors, simulated.before = {"static-graph": 0.1, "bucket-view": 0.8}, interrupt
    cures = "static-graph,bucket-view,bucket-cap"
    ran = gputrace_try(capsys, cures, "--", sys.executable, simulated.path)
    assert ran.code == INTERRUPTED
    assert re.search(r"static-graph .* → 1 ms, 10.0x in 1 round, too few", ran.out)
    assert re.search(r"bucket-view .* 1\.2\dx in 1 round, too few to tell", ran.out)
    assert ran.out.startswith("Nothing is proven yet; static-graph: ")


def test_a_capture_with_which_the_program_fails_costs_the_others_one_run(
    simulated: Simulated,
) -> None:
    simulated.failing, simulated.factors = {"graphs": "exit code 1"}, {"gc": 0.5}
    outcome = gputrace.try_cures(["x"], "graphs,gc,less-often=train.py:9")
    assert simulated.made[1:4] == [
        "graphs+gc+less-often=train.py:9",
        "gc+less-often=train.py:9",
        "graphs",
    ]
    verdicts = {row.cure.partition("=")[0]: row.verdict for row in outcome.rows}
    assert verdicts == {"graphs": "failed", "gc": "faster", "less-often": "no difference"}


@pytest.mark.parametrize(
    ("made", "code", "steps"), [(8, None, (1, 8)), (8, 0, None), (50, None, None), (1, None, None)]
)
def test_of_a_first_run_that_was_ended_early_all_steps_but_the_first_count(
    simulated: Simulated, made: int, code: int | None, steps: tuple[int, int] | None
) -> None:
    trial = Trial(Request(("x",)))
    pilot = replace(simulated.run(Candidate(), 10, 40), made=made, code=code)
    trial._history.pilot = pilot
    assert trial._few() == steps


def test_a_cure_that_shows_nothing_has_a_third_of_the_budget_at_most(simulated: Simulated) -> None:
    """Compiling would take a minute of the 90 s; the others have their answers nevertheless."""
    times: list[float] = []

    def run(candidate: Candidate, *given: Any) -> Measured:
        sign_s = given[6]
        if str(candidate) == "compile=default":
            times.append(sign_s)
            simulated.spent += min(60.0, sign_s)
            raise Spent
        return plain(candidate, *given)

    plain = simulated.run
    simulated.seconds, simulated.factors = 1.0, {"gc": 0.97}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(simulated, "run", run)
        outcome = gputrace.try_cures(["x"], "compile,gc,graphs", budget="90s")
    rows = {row.cure: row for row in outcome.rows}
    assert (rows["gc"].verdict, rows["graphs"].verdict) == ("faster", "no difference")
    assert (rows["compile=default"].verdict, times) == ("cannot tell yet", [30.0])
    assert any(
        "left out: compile=default (showed nothing in 30 s, its part of the budget)" in note
        for note in outcome.notes
    )
    assert outcome.best == "gc"


def test_the_price_of_a_start_is_known_beforehand(simulated: Simulated) -> None:
    simulated.seconds = 12.0
    outcome = gputrace.try_cures(["x"], "gc,compile,graphs", budget="90s")
    assert "compile=default" not in simulated.made
    assert any("compile=default (a first sign takes 3" in note for note in outcome.notes)


def test_what_cures_gain_so_far_is_shown_while_it_works(simulated: Simulated) -> None:
    simulated.factors = {"gc": 0.5, "static-graph": 0.8}
    shown: list[str] = []
    request = Request(("x",), tuple(read_candidates("gc,static-graph")))
    Trial(request, lambda *given: shown.append(given[4])).run()
    assert shown[0] == ""
    assert shown[2] == "gc 2.00x"
    assert "gc 2.00x, static-graph 1.25x" in shown


def test_a_healthy_program_has_nothing_to_gain(
    simulated: Simulated, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated.seconds, simulated.noise = 4.0, 0.03
    ran = gputrace_try(capsys, "gc,fused,tf32,graphs", "--budget", "60s", "--", "true")
    assert (ran.code, ran.out.splitlines()[0]) == (
        NOT_FASTER,
        "Nothing to gain beyond 3% by what was tried.",
    )
    assert simulated.spent <= 60


def test_turns_of_the_best_together_and_of_other_starts_hold_as_many_checkpoints(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    simulated.factors = {"gc": 0.6, "fused": 0.7}
    chosen = tuple(read_candidates("gc,fused"))
    monkeypatch.setattr("gputrace.trials.trial.choose", lambda *_: (chosen, {}))
    monkeypatch.setattr("gputrace.trials.history._period", lambda *_: 60)
    measured: list[int] = []
    by_turns = simulated.by_turns

    def kept(run: Measured, turns: Turns, *more: Any) -> Measured:
        measured.append(turns.stretch - turns.passed)
        return by_turns(run, turns, *more)

    monkeypatch.setattr(simulated, "by_turns", kept)
    recording = unpack("h200x4-ddp-starved-9-15.sqlite", tmp_path)
    outcome = gputrace.try_cures(["x"], recording=recording)
    assert (outcome.best, len(measured)) == ("gc+fused", 4)
    assert set(measured) == {60}


def test_a_workers_number_that_the_winner_excludes_has_no_run(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    simulated.factors = {"workers=8": 0.25, "workers=4": 0.5}
    chosen = tuple(read_candidates("workers=4,workers=8"))
    monkeypatch.setattr("gputrace.trials.trial.choose", lambda *_: (chosen, {}))
    monkeypatch.setattr("gputrace.trials.history.predict", _predict)
    recording = unpack("h200x4-ddp-starved-9-15.sqlite", tmp_path)
    outcome = gputrace.try_cures(["x"], recording=recording)
    assert (outcome.best, [row.rounds > 0 for row in outcome.rows]) == ("workers=8", [False, True])
    assert "left out: workers=4 (little to gain next to workers=8)" in outcome.notes


@pytest.mark.parametrize(("slow", "said"), [(8000, "faster"), (15, "cannot tell yet")])
def test_what_starts_slowly_is_compared_with_the_first_run(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow: int, said: str
) -> None:
    """A run takes 20 s: in the first one, a step in five compiles; there is time for one more."""

    def run(candidate: Candidate, warmup: int, steps: int, *given: Any) -> Measured:
        asked.append((str(candidate), warmup, steps))
        made = simulated_run(candidate, warmup, steps, *given)
        lengths = [10] * steps if candidate.settings else [10, slow, 10, 10, 10]
        step_ns = 1e6 * sum(lengths) / len(lengths)
        lengths_ns = tuple(1_000_000 * ms for ms in lengths)
        return replace(made, step_ns=step_ns, steps=len(lengths), made=6, lengths_ns=lengths_ns)

    asked, simulated_run = list[tuple[str, int, int]](), simulated.run
    monkeypatch.setattr(simulated, "run", run)
    chosen = tuple(read_candidates("dynamic"))
    monkeypatch.setattr("gputrace.trials.trial.choose", lambda *_: (chosen, {}))
    charges = Charges({"recompilation": 0.9}, {})
    monkeypatch.setattr("gputrace.trials.history.charge", lambda _: charges)
    simulated.seconds = 20.0
    recording = unpack("h200x4-ddp-starved-9-15.sqlite", tmp_path)
    outcome = gputrace.try_cures(["x"], recording=recording, budget="1min")
    assert asked[1:] == [("dynamic", 1, 40)], "the first step is passed in both"
    assert [(row.verdict, row.rounds) for row in outcome.rows] == [(said, int(said == "faster"))]
    notes = " ".join(outcome.notes)
    assert ("dynamic had one run, compared with the first" in notes) == (said == "faster")
    assert ("dynamic (time for one run, which shows nothing)" in notes) == (said != "faster")


def _predict(candidate: Candidate, _: object) -> Prediction:
    return Prediction({"workers=4": 0.5, "workers=8": 0.25}[str(candidate)])


@pytest.mark.parametrize(("code", "kept"), [(None, (True, 2)), (0, (False, 0))])
def test_rounds_for_which_the_time_was_over_are_kept(
    simulated: Simulated, code: int | None, kept: tuple[bool, int]
) -> None:
    """A program that ends by itself has whole runs; one that was stopped goes on by turns."""
    [cure] = read_candidates("workers=4")
    history, row = History(Request(("x",))), Row(cure)
    history.pilot = simulated.run(Candidate(), 10, 40)
    turns = history.turns([row])
    run = simulated.run(cure, 10, 4 * turns.stretch, None, turns, lambda _: [1])
    history.add_turns([row], replace(run, code=code), turns, [])
    assert (row.within, len(row.cured)) == kept


def test_a_clear_winner_ends_the_trial_of_what_cannot_be_better(simulated: Simulated) -> None:
    """Three rounds, of three runs each, after the recorded one."""
    simulated.noise, simulated.factors = 0.01, {"async-checkpoint": 0.1}
    outcome = gputrace.try_cures(["x"], "async-checkpoint,bucket-view")
    best, other = outcome.rows
    assert (best.verdict, best.rounds, other.rounds) == ("faster", 3, 3)
    assert outcome.runs == 10


@pytest.mark.parametrize(
    ("noise", "verdict", "words"),
    [
        (
            0.1,
            "Nothing to gain beyond 3% by what was tried.",
            r"gc +gains [0-2]\.\d% at most \(-\d\.\d% to",
        ),
        (2.0, "Nothing that was tried is proven to be faster.", r"gc +cannot tell yet \(-"),
    ],
)
def test_what_gains_little_is_told_as_such(
    simulated: Simulated,
    capsys: pytest.CaptureFixture[str],
    noise: float,
    verdict: str,
    words: str,
) -> None:
    simulated.noise, simulated.factors = noise, {"gc": 1.015}
    ran = gputrace_try(capsys, "gc", "--", "true")
    assert (ran.code, ran.out.splitlines()[0]) == (NOT_FASTER, verdict)
    assert re.search(words, ran.out)


@pytest.mark.parametrize(("start_s", "steps"), [(7.0, "12,600"), (0.1, None)])
def test_a_run_as_a_whole_gains_less_for_its_start(
    simulated: Simulated, start_s: float, steps: str | None
) -> None:
    """A start of 1,400 steps of 5 ms: in nine times as many the gain is nine tenths."""
    simulated.seconds, simulated.noise, simulated.factors = start_s, 0.0, {"gc": 0.5}
    notes = " ".join(gputrace.try_cures(["x"], "gc").notes)
    said = f"The 7.0 s start-up matters only for runs under {steps} steps."
    assert (said in notes) == bool(steps)


def test_rounds_run_forwards_and_backwards_in_turn(simulated: Simulated) -> None:
    simulated.factors = {"async-checkpoint": 0.5}
    outcome = gputrace.try_cures(["x"], "async-checkpoint")
    assert simulated.made == [
        "as it is",
        *["as it is", "async-checkpoint", "async-checkpoint", "as it is"],
        "as it is",
        "async-checkpoint",
    ]
    assert (outcome.runs, outcome.best) == (7, "async-checkpoint")


def test_a_spent_budget_leaves_what_is_not_decided_open(
    simulated: Simulated, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated.factors, simulated.seconds = {"async-checkpoint": 0.5}, 100.0
    ran = gputrace_try(
        capsys, "async-checkpoint", "--budget", "2min", "--", "env", "python", "train.py"
    )
    assert ran.code == NOT_FASTER
    said = " ".join(ran.out.split())
    assert "undecided: async-checkpoint. One round takes 200 s; try --budget 14min." in said


def test_what_was_faster_so_far_has_its_answer_where_the_budget_is_short(
    simulated: Simulated,
) -> None:
    """A run takes 10 s here: three rounds of all cures would take 160 s."""
    simulated.factors, simulated.seconds = {"static-graph": 0.7}, 10.0
    cures = "async-checkpoint,threads=2,static-graph,bucket-view"
    outcome = gputrace.try_cures(["x"], cures, budget="110s")
    rounds = {row.cure: row.rounds for row in outcome.rows}
    assert outcome.best == "static-graph"
    assert rounds == {"async-checkpoint": 1, "threads=2": 1, "static-graph": 3, "bucket-view": 1}
    assert simulated.spent <= 110
    simulated.spent = 0.0
    outcome = gputrace.try_cures(["x"], "static-graph," + cures, budget="70s")
    assert [row.rounds for row in outcome.rows] == [3, 0, 0, 0]
    assert (outcome.best, simulated.spent) == ("static-graph", 70)


@pytest.mark.parametrize(("budget_s", "rounds"), [(40, 3), (30, 1)])
def test_what_is_left_goes_to_one_answer_unless_it_is_clearly_too_little(
    simulated: Simulated, budget_s: int, rounds: int
) -> None:
    """The first round of 10.5 s foretells 21 s for two more, where 20.5 s or 10.5 s are left."""
    seconds = iter([9.0, 5.0, 5.5])

    def take() -> None:
        simulated.seconds = next(seconds, 5.0)

    simulated.before, simulated.factors = take, {"static-graph": 0.7}
    outcome = gputrace.try_cures(
        ["x"], "static-graph,async-checkpoint,bucket-view", budget=f"{budget_s}s"
    )
    assert [row.rounds for row in outcome.rows] == [rounds, 0, 0]
    assert (outcome.best == "static-graph", simulated.spent <= budget_s) == (rounds == 3, True)


def test_to_choose_by_the_first_round_makes_no_cure_faster_that_is_not(
    simulated: Simulated,
) -> None:
    simulated.noise, simulated.seconds = 0.02, 10.0
    faster = 0
    for _ in range(40):
        simulated.spent = 0.0
        outcome = gputrace.try_cures(
            ["x"], "async-checkpoint,threads=2,static-graph,bucket-view", budget="110s"
        )
        faster += outcome.best is not None
    assert faster <= 2


def test_what_takes_long_to_start_has_its_turn_after_the_others(simulated: Simulated) -> None:
    gputrace.try_cures(["x"], "compile,foreach")
    assert simulated.made == ["as it is", "foreach", "compile=default"]


def test_a_recordings_findings_are_tried_and_its_predictions_are_kept(
    simulated: Simulated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated.trace = unpack("h200x4-ddp-starved-9-15.sqlite", tmp_path)
    ran = gputrace_try(capsys, "--json", "--", "true")
    result = json.loads(ran.out)
    rows = {row["cure"]: row for row in result["rows"]}
    assert result["findings"][0] == "data-feeding"
    workers = [cure for cure in rows if cure.startswith("workers=")]
    assert len(workers) >= 2
    for cure in workers:
        assert 0 < rows[cure]["predicted"] < 1
        assert rows[cure]["verdict"] == "no difference"
    assert "pinned" not in rows, "torch sees no GPU"
    assert (ran.code, result["best"]) == (NOT_FASTER, None)
    history = gputrace_try(capsys, "--history").out
    assert "Predictions, in % of the unchanged step" in history


def test_what_changes_results_joins_the_best_only_where_it_was_asked_for(
    simulated: Simulated,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    simulated.factors = {"tf32": 0.5}
    assert gputrace.try_cures(["x"], "tf32").best == "tf32"
    chosen = tuple(read_candidates("tf32"))
    monkeypatch.setattr("gputrace.trials.trial.choose", lambda *_: (chosen, {}))
    recording = unpack("h200x4-ddp-starved-9-15.sqlite", tmp_path)
    outcome = gputrace.try_cures(["x"], recording=recording)
    assert [(row.verdict, row.numerics) for row in outcome.rows] == [("faster", True)]
    assert outcome.best is None
    ran = gputrace_try(capsys, "--recording", recording, "--", "true")
    assert ran.code == FASTER
    assert "tf32: 10 → 5 ms, 2.0x faster (" in ran.out
    assert "but it changes numerics" in ran.out
    assert "gputrace try tf32" in " ".join(ran.out.split())


def test_what_can_be_switched_within_a_run_is_decided_by_fewer_runs(simulated: Simulated) -> None:
    """Runs differ by a tenth here, which hides a gain of 4 % from whole runs."""
    simulated.factors, simulated.noise = {"gc": 0.96, "async-checkpoint": 0.96}, 0.1
    within, whole = (gputrace.try_cures(["x"], cure) for cure in ("gc", "async-checkpoint"))
    assert (within.best, within.runs) == ("gc", 4), "and two other starts of the best"
    assert within.rows[0].rounds < MOST, "it ends as soon as it is decided"
    assert within.rows[0].ratio == pytest.approx(0.96, rel=0.02)
    assert (whole.best, whole.runs) == (None, 1 + 2 * MOST)


@pytest.mark.parametrize(
    ("ratios", "verdict", "said"),
    [
        ((0.5, 0.4, 0.6), "faster", "graphs gained 2.0x, 2.5x, 1.67x in 3 starts of the program"),
        ((0.5, 0.8, 1.25), "cannot tell yet", "graphs gained 2.0x, 1.25x, 0.80x in 3 starts"),
    ],
)
def test_the_best_is_measured_in_other_starts_of_the_program(
    simulated: Simulated, ratios: tuple[float, ...], verdict: str, said: str
) -> None:
    """What a start decides is the same in all rounds of its run."""
    planted = iter(ratios)
    simulated.before = lambda: simulated.factors.update(
        graphs=next(planted) if simulated.made[-1] == "graphs" else 1.0
    )
    outcome = gputrace.try_cures(["x"], "graphs")
    [graphs] = outcome.rows
    assert graphs.ratio == pytest.approx(np.prod(ratios) ** (1 / 3), rel=0.01)
    assert graphs.low is not None
    assert graphs.low < min(ratios)
    assert graphs.high is not None
    assert graphs.high > max(ratios)
    assert graphs.verdict == verdict
    assert any(note.startswith(said) for note in outcome.notes)


@pytest.mark.parametrize(("budget", "starts"), [("30s", 1), ("5min", 3)])
def test_other_starts_are_made_where_the_budget_pays_for_them(
    simulated: Simulated, budget: str, starts: int
) -> None:
    simulated.factors, simulated.seconds = {"graphs": 0.5}, 10.0
    outcome = gputrace.try_cures(["x"], "graphs", budget=budget)
    assert (outcome.best, simulated.made.count("graphs")) == ("graphs", starts)


def test_a_best_that_fails_in_another_start_keeps_its_answer(simulated: Simulated) -> None:
    def fail_later() -> None:
        if simulated.made.count("graphs") == 2:
            simulated.failing["graphs"] = "exit code 1: no memory"

    simulated.factors, simulated.before = {"graphs": 0.5}, fail_later
    outcome = gputrace.try_cures(["x"], "graphs")
    assert outcome.best == "graphs"
    assert outcome.notes == ("graphs failed in another start: exit code 1: no memory",)


def test_cures_that_can_be_switched_share_a_run(simulated: Simulated) -> None:
    simulated.factors = {"tf32": 0.5, "gc": 0.9}
    outcome = gputrace.try_cures(["x"], "tf32,graphs,gc,cudnn-benchmark=on,cudnn-benchmark=off")
    assert simulated.made == [
        "as it is",
        "tf32+gc+cudnn-benchmark=on",
        "graphs",
        "cudnn-benchmark=off",
        *["tf32+gc"] * 3,
    ]
    assert [row.verdict for row in outcome.rows[:3]] == ["faster", "no difference", "faster"]
    assert outcome.best == "tf32+gc"


def test_a_cure_that_changes_nothing_costs_one_run(
    simulated: Simulated, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated.factors, simulated.reasons = {"gc": 0}, {"gc": "it is so already"}
    ran = gputrace_try(capsys, "gc", "--", "true")
    assert ran.out.startswith("Nothing that was tried changes the program.\n")
    assert re.search(r"^ *gc changes nothing +1$", ran.out, re.M)
    assert "gc: changes nothing: it is so already\n" in ran.out
    assert simulated.made == ["as it is", "gc"]


def test_as_many_threads_as_there_are_cost_no_run(simulated: Simulated) -> None:
    simulated.factors = {"threads=1": 0.5, "threads=2": 0.5}
    [one, two] = gputrace.try_cures(["x"], "threads=1,threads=2").rows
    assert (one.verdict, one.rounds, two.verdict) == ("changes nothing", 0, "faster")
    assert "threads=1" not in simulated.made


def test_a_cure_that_ends_a_run_leaves_the_others_of_that_run_their_answers(
    simulated: Simulated,
) -> None:
    simulated.factors = {"gc": 0.9}
    simulated.failing = {"fused": "exit code 1: RuntimeError: planted"}
    outcome = gputrace.try_cures(["x"], "fused,gc")
    assert [row.verdict for row in outcome.rows] == ["failed", "faster"]
    assert simulated.made == ["as it is", "fused+gc", "fused", *["gc"] * 3]


def test_a_program_that_fails_as_it_is_ends_the_trial_in_one_line(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> Measured:
        raise Failed("exit code 1: ValueError: planted")

    monkeypatch.setattr(ProgramToTry, "run", fail)
    ran = gputrace_try(capsys, "gc", "--", "env", "python", "train.py")
    assert (ran.code, ran.out) == (UNREADABLE, "")
    last = "gputrace: env python train.py: exit code 1: ValueError: planted"
    assert ran.err.splitlines()[-1] == last


SCRIPT: Final = """\
import gputrace
from torch.optim import SGD
from torch.utils.data import DataLoader

def train():
    optimizer, loader = SGD([], 0.1), DataLoader(range(500), num_workers=1)
    for item in loader:
        optimizer.step()

if __name__ == "__main__":
    outcome = gputrace.try_cures(train, "workers=8", warmup=2, steps=8)
    print(outcome.best, *outcome.command, outcome.patch.diff)
"""


def test_a_function_of_a_script_is_tried(real: Real) -> None:
    real.script.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, real.script], capture_output=True, text=True, check=False)
    assert ran.stdout.startswith("workers=8 __main__.train()"), ran.stderr
    assert "DataLoader(range(500), num_workers=8)" in ran.stdout
    assert [entry.program for entry in ledger.read(ledger.default_ledger())] == ["__main__.train()"]


def test_python_says_what_it_cannot_try(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no cure is called 'magic'"):
        gputrace.try_cures(["python", "train.py"], "magic")
    with pytest.raises(UsageError, match="define it at the top level of a file"):
        gputrace.try_cures(lambda: None, "gc")
    monkeypatch.setenv("GPUTRACE_TRY", "{}")
    with pytest.raises(UsageError, match="__main__"):
        gputrace.try_cures(os.getpid, "gc")
