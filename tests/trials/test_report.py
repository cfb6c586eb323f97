"""The report of a trial: its verdict, answers and notes in every format."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from typing import Any, Final

import pytest

from gputrace.report import render_as, text
from gputrace.trials.ledger import Entry
from gputrace.trials.outcome import Outcome, history

MODULE: Final = "gputrace.trials.outcome"


def entry(cure: str, **values: Any) -> Entry:
    """Return an answer: 25% faster than without the cure, unless said otherwise."""
    known: dict[str, Any] = {
        "time_ns": 0,
        **dict.fromkeys(("program", "host", "gpu", "versions", "why"), ""),
        **{"ranks": 1, "rounds": 4, "steps": 50, "bare_ns": 1e8, "verdict": "faster"},
        **{"ratio": 0.8, "low": 0.75, "high": 0.85, "numerics": False, "loss_differs": None},
        **dict.fromkeys(("predicted", "predicted_low", "predicted_high")),
    }
    return Entry(cure=cure, **known | values)


ROWS: Final = (entry("pinned"), entry("x|y", verdict="failed", why="it ended", ratio=None))
OUTCOME: Final = Outcome(
    ("train",), 5, 50, 7, 60.0, 1e8, ("data-feeding",), ROWS, "pinned", None, ("One note.",)
)


def test_markdown_has_the_table_of_answers_and_the_remarks_as_a_list() -> None:
    shown = render_as(OUTCOME, "markdown", MODULE)
    assert shown.startswith("**pinned: 100 → 80 ms, 1.25x faster (1.18x to 1.33x)**\n\n")
    assert "#### 7 runs in 60 s, unchanged step 100 ms\n" in shown
    assert "| pinned | 100 → 80 ms, 1.25x faster (1.18x to 1.33x) | 4 |" in shown
    assert "- x\\|y: failed: it ended\n- findings of the recording: data-feeding" in shown
    assert shown.endswith("- One note.\n")


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        (("tf32",), "Nothing to gain beyond 3% by what was tried."),
        (("tf32", "compile"), "Nothing to gain beyond 3% by what was tried; not tried: compile."),
        (("compile",), "Nothing that was tried has an answer yet: the budget is too small."),
        ((), "Nothing to gain beyond 3%: no cure that its findings ask for would change the"),
    ],
)
def test_of_a_healthy_program_it_says_what_was_not_tried(
    rows: tuple[str, ...], verdict: str
) -> None:
    known = {
        "tf32": entry("tf32", verdict="no difference", ratio=1.0, low=0.99, high=1.01),
        "compile": entry("compile", verdict="cannot tell yet", ratio=None, low=None, rounds=0),
    }
    outcome = replace(OUTCOME, rows=tuple(known[row] for row in rows), best=None)
    assert render_as(outcome, "text", MODULE).startswith(verdict)
    waited = replace(outcome, rows=(), interrupted=True)
    assert render_as(waited, "text", MODULE).startswith("Nothing was tried.")


def test_csv_has_a_row_for_each_answer() -> None:
    rows = list(csv.DictReader(io.StringIO(render_as(OUTCOME, "csv", MODULE))))
    assert [(row["cure"], row["ratio"], row["low"]) for row in rows] == [
        ("pinned", "0.8", "0.75"),
        ("x|y", "", "0.75"),
    ]


def test_the_history_has_a_table_for_each_trial_and_how_predictions_did() -> None:
    shown = text.render(history(ROWS))
    assert "1970-01-01" in shown or "1969-12-31" in shown
    assert "Predictions, in % of the unchanged step" in shown
    assert "Pairs that ship with gputrace" in shown
