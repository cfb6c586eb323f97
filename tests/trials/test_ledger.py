"""The ledger of trials."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gputrace.errors import InputError
from gputrace.trials import ledger
from gputrace.trials.cures import Prediction, read_candidates
from gputrace.trials.runs import Program as ProgramToTry
from gputrace.trials.runs import Turns
from tests.helpers.tried_programs import ENTRY, PROGRAM, Real


def test_the_ledger_says_how_far_predictions_were_off(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "ledger.sqlite"
    assert ledger.read(path) == []
    ledger.append(path, [ENTRY])
    ledger.append(
        path,
        [
            replace(ENTRY, cure="workers=4", ratio=0.8),
            replace(ENTRY, cure="gc", predicted=None, loss_differs=True),
        ],
    )
    assert ledger.read(path)[0] == ENTRY
    gc, workers = ledger.records(ledger.read(path))
    assert (gc.cure, gc.predicted, gc.mean_error) == ("gc", 0, None)
    assert (workers.trials, workers.predicted, workers.ranged, workers.within) == (2, 2, 2, 1)
    assert workers.mean_error == pytest.approx(-0.05)
    assert workers.mean_size == pytest.approx(0.15)


def test_the_history_has_what_a_cure_gained_by_program() -> None:
    entries = [
        ENTRY,
        replace(ENTRY, cure="workers=4", ratio=0.7),
        replace(ENTRY, program="python other.py", ratio=0.9, low=None, verdict="cannot tell yet"),
    ]
    other, train = ledger.records(entries, by_program=True)
    assert (train.program, train.cure, train.trials) == ("python train.py", "workers", 2)
    assert train.ratio == pytest.approx(0.6)
    assert (other.faster, other.ratio) == (0, None), "of too few rounds"


def test_predictions_and_what_came_are_written_as_those_that_ship_with_gputrace(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pairs.csv"
    entries = [
        replace(ENTRY, cure="defer-item", gpu="H100", bare_ns=4e6),
        replace(ENTRY, cure="gc", predicted=None),
        replace(ENTRY, cure="gc+fused"),
        replace(ENTRY, cure="gc", low=None),
    ]
    assert ledger.export(path, entries) == 1
    head, row = path.read_text().splitlines()
    assert head == "cure,program,now_ms,predicted_ms,low_ms,high_ms,measured_ms,counts,source"
    assert row == "sync,H100: python train.py,4.0,2.4,2.0,2.8,2.0,yes,gputrace try 1970-01-01"
    with pytest.raises(InputError, match="cannot be written"):
        ledger.export(tmp_path / "missing" / "pairs.csv", entries)


def test_a_cure_of_which_three_predictions_came_true_has_their_range() -> None:
    """Measured steps were 5/6, 1 and 7/6 of the predicted ones."""
    known = ledger.pairs_of([replace(ENTRY, ratio=ratio) for ratio in (0.5, 0.6, 0.7)])
    workers, other = read_candidates("workers=4,gc")
    predicted = Prediction(0.3, 0.29, 0.31)
    learned = ledger.learn(workers, predicted, known)
    assert (learned.ratio, learned.low, learned.high) == pytest.approx((0.3, 0.25, 0.35))
    assert ledger.learn(other, predicted, known) == predicted
    assert ledger.learn(workers, predicted, known[:2]) == predicted


@pytest.mark.parametrize("content", ["mine", "1"])
def test_a_file_that_is_no_ledger_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    """SQLite takes a file of one byte for an empty one."""
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(InputError, match="ledger"):
        ledger.append(path, [ENTRY])
    assert path.read_text() == content


def test_a_program_whose_name_is_no_text_is_tried_and_kept(real: Real) -> None:
    real.script = real.folder / os.fsdecode(b"tr\xff.py")
    real.script.write_text(PROGRAM)
    [gc] = read_candidates("gc")
    trial = ProgramToTry((sys.executable, str(real.script)))
    run = trial.run(gc, 2, 4 * 6, turns=Turns((gc,), 6))
    assert (len(run.turns[0]), run.main) == (2, str(real.script))
    path = real.folder / "ledger.sqlite"
    ledger.append(path, [replace(ENTRY, program=str(real.script))])
    assert [entry.program for entry in ledger.read(path)] == [f"{real.folder}/tr?.py"]
