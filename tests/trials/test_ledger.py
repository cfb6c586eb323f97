"""The ledger of trials."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gputrace.errors import InputError
from gputrace.trials import ledger
from gputrace.trials.cures import read_candidates
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
