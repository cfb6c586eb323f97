"""What findings say: one sentence of at most 25 words, with what the trace shows below it.

`tests/conftest.py` checks this for every finding of every trace that a test analyzes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import gputrace
from gputrace.model.results import Finding
from tests.helpers.sentences import check_sentences


@pytest.mark.parametrize(
    "message",
    [
        "the GPUs wait; the host sleeps",
        "the GPUs wait. The host sleeps",
        "the GPUs wait for data.",
        " ".join(["word"] * 26),
    ],
)
def test_a_chain_of_clauses_is_no_message(message: str) -> None:
    with pytest.raises(AssertionError):
        check_sentences(Finding("id", "high", (0,), (0,), 1, message, "wait less"))


def test_a_sentence_with_details_is_one() -> None:
    message = "the GPUs wait for data 40% of each step (25.3 of 63.4 ms)"
    details = ("thread 979 slept 25.4 ms (clock_nanosleep)",)
    check_sentences(Finding("id", "high", (0,), (0,), 1, message, "wait less", {}, details))


def test_a_loop_that_sleeps_is_said_to(recording: Callable[[str], Path]) -> None:
    with gputrace.open(recording("h200x4-ddp-starved-9-15.sqlite")) as trace:
        report = trace.analyze()
    slept = r"thread \d+ slept 25\.\d ms \(clock_nanosleep\)"
    assert re.fullmatch(slept, report.findings[0].details[0])
    assert re.match(slept, report.gaps.largest_in_steps[0].evidence)
    assert "sleeps" in report.findings[0].advice
