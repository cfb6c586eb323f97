"""Findings about traces that hold no GPU activity, from the host's signals alone."""

from __future__ import annotations

from collections.abc import Iterator

from gputrace.analyzers.findings.facts import Facts
from gputrace.analyzers.findings.idle import how_to_feed_faster
from gputrace.analyzers.results import Finding


def data_feeding(facts: Facts) -> Iterator[Finding]:
    """The program waits for the next batch, and perhaps a GPU with it.

    A GPU may have had work queued meanwhile: it is not shown to have idled.
    """
    yield from facts.costly(
        "data-feeding",
        "host_data",
        "the program waits {cost} for the next batch; no GPU was seen: this is the most that one "
        "can have idled for it",
        how_to_feed_faster(facts),
    )


def no_gpu_activity(facts: Facts) -> Iterator[Finding]:
    """The trace tells of the host alone (`low`); says why."""
    if facts.trace.no_gpu is None:
        return
    why, remedy = facts.trace.no_gpu
    yield facts.finding(
        "no-gpu-activity",
        "low",
        0,
        f"no GPU activity was recorded ({why}): kernels, copies and idle time are unknown; "
        f"{remedy}",
        "`gputrace doctor` says what a machine lacks to record its GPUs",
        {"why": why},
    )
