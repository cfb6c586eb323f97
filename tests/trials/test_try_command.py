"""The command `gputrace try`: what it shows, and what it refuses."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gputrace.analyzers import whatif
from gputrace.cli import console
from gputrace.cli.try_ import _progress
from gputrace.trials import ledger
from gputrace.trials.cures import CURES, read_candidates
from gputrace.trials.history import Request
from gputrace.trials.runs import Change
from gputrace.trials.trial import Trial
from tests.helpers import command
from tests.helpers.command import assert_refused
from tests.helpers.tried_programs import (
    ENTRY,
    FASTER,
    PROGRAM,
    UNREADABLE,
    USAGE,
    Real,
    Simulated,
    gputrace_try,
)


def test_the_bar_goes_on_within_a_run(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    shown: list[tuple[str, float | None]] = []
    update = console._LateBar.update

    def seen(bar: console._LateBar, done: int, total: int, what: str = "") -> None:
        bar._timer.join()  # It starts the bar, and may have to import rich first.
        update(bar, done, total, what)
        assert bar._bar is not None
        shown.append((bar._bar.tasks[0].description, bar._bar.tasks[0].total))

    monkeypatch.setattr(console._LateBar, "update", seen)
    real.script.write_text(PROGRAM)
    with _progress() as progress:
        request = Request((sys.executable, str(real.script)), budget_s=2)
        Trial(replace(request, candidates=tuple(read_candidates("gc"))), progress).run()
    assert shown.count(("run 1, recording", 2)) > 2


@pytest.mark.parametrize(
    ("cure", "shown", "wrote"),
    [
        ("workers=4", "6: loader = DataLoader(range(500), num_workers=4)", "wrote {}"),
        ("threads=2", "threads=2: run it as OMP_NUM_THREADS=2", "wrote nothing: all of it is to"),
        ("persistent", "Nothing to gain beyond 3%", "wrote nothing: nothing is proven"),
    ],
)
def test_what_is_to_be_changed_is_shown_and_whether_it_was_written(
    simulated: Simulated,
    capsys: pytest.CaptureFixture[str],
    cure: str,
    shown: str,
    wrote: str,
) -> None:
    simulated.factors = {"workers=4": 0.5, "threads=2": 0.5, "persistent": 1.5}
    file = str(simulated.path)
    simulated.changes["workers=4"] = Change(
        "workers", "DataLoader", "num_workers", -1, "1", "4", file, 6
    )
    ran = gputrace_try(capsys, cure, "--apply", "--", "env", "python", "train.py")
    assert shown in " ".join(ran.out.split())
    assert wrote.format(file) in ran.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["worker=8"], "did you mean workers?"),
        (["workers"], "give its value, e.g. workers=8"),
        (["workers=many"], "not a number"),
        (["pinned=1"], "takes no value"),
        (["compile=fast"], "it takes default, reduce-overhead, max-autotune"),
        (["pinned", "fused+gc+foreach"], "exclude each other; try them apart: fused,gc,foreach"),
        (["workers=2+workers=4"], "exclude each other"),
        ([","], "name a cure"),
        (["gc", "--", "train.py"], "train.py: no such program; write python train.py"),
        (["pinned", "--budget", "soon"], "is not a time"),
        (["pinned", "--keep-recording", __file__], "is there already; name another"),
        (["pinned", "--keep-recording", "x", "--recording", __file__], "no recording is made"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(words: list[str], said: str) -> None:
    assert_refused(command.gputrace("try", *words, "--", "true"), USAGE, said)


def test_the_list_has_every_cure_and_what_it_does() -> None:
    shown = command.gputrace("try", "--list").out
    given = "prefetch=N\n    set prefetch_factor of DataLoaders; 4 if no value is given [torch]"
    assert given in shown
    assert "workers=N\n    set num_workers of DataLoaders [torch]\n" in shown
    listed = json.loads(command.gputrace("try", "--list", "--json").out)
    assert {cure["id"]: cure["numerics"] for cure in listed} == {
        cure.id: cure.numerics for cure in CURES
    }


@pytest.mark.parametrize("column", ["ratio", "low", "high"])
def test_a_step_that_takes_no_time_is_in_no_ledger(
    column: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ledger.sqlite"
    nothing: dict[str, Any] = {column: 0.0}
    ledger.append(path, [replace(ENTRY, **nothing)])
    ran = gputrace_try(capsys, "--history", "--ledger", path)
    assert ran.code == 3
    assert f"{path}: holds a row that no trial leaves" in ran.err


def test_the_history_has_the_pairs_that_ship_with_gputrace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ledger.sqlite"
    shipped = json.loads(gputrace_try(capsys, "--history", "--ledger", path, "--json").out)
    graphs = next(each for each in shipped["shipped"] if each["cure"] == "graphs")
    pairs = [pair for pair in whatif.pairs() if pair.cure == "graphs" and pair.now_ms]
    errors = [(pair.predicted_ms - pair.measured_ms) / pair.now_ms for pair in pairs if pair.now_ms]
    assert graphs["trials"] == len(pairs) >= 2
    assert graphs["mean_error"] == pytest.approx(sum(errors) / len(errors))
    assert graphs["mean_error"] < 0, "launches are not all that such a step waits for"
    shown = gputrace_try(capsys, "--history", "--ledger", path).out
    assert "holds nothing yet" in shown
    assert "Pairs that ship with gputrace" in shown


def test_the_history_has_each_trial_with_its_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, hour_ns = tmp_path / "ledger.sqlite", 3600 * 10**9
    later = replace(ENTRY, program="python other.py", time_ns=hour_ns)
    ledger.append(path, [ENTRY, replace(ENTRY, cure="pinned"), later])
    shown = gputrace_try(capsys, "--history", "--ledger", path).out
    heads = re.findall(r"^[-0-9]+ [:0-9]+ on node: (.*)\n.*measured +predicted$", shown, re.M)
    assert heads == ["python train.py", "python other.py"]
    first, second, *_ = shown.split("python other.py")
    assert first.index("workers=8") < first.index("pinned")
    assert "workers=8 1 → 0.5 ms, 2.0x faster" in second
    assert re.search(r"^ *python train.py +pinned +1 +1 +2.0x$", shown, re.M)
    shown = gputrace_try(capsys, "--history", "--ledger", path, "--", "python", "other.py").out
    assert "python train.py" not in shown


def test_a_ledger_that_cannot_be_kept_is_refused_before_any_run_and_costs_no_answer(
    simulated: Simulated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_text("mine")
    asked = "pinned", "--ledger", path, "--", sys.executable, simulated.path
    ran = gputrace_try(capsys, *asked)
    assert (ran.code, ran.out, simulated.made) == (UNREADABLE, "", [])
    assert "ledger.sqlite: cannot be used as a ledger" in ran.err
    path.unlink()
    simulated.factors["pinned"] = 0.5
    simulated.before = lambda: path.write_text("mine")
    ran = gputrace_try(capsys, *asked)
    assert (ran.code, "answers were not saved" in ran.out) == (FASTER, True)
    assert "2.0x faster" in ran.out
