"""Report of a folder of sketches, for every format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gputrace.model.sketches import RankSummary, SketchReport
from gputrace.model.struct import Column
from gputrace.report import Document, Limits, Line, Records, attributes, declared, present
from gputrace.report.wording import capital
from gputrace.units import format_pair

_PARTS: Final = {
    "data_ns": "waits for data",
    "gc_ns": "collects garbage",
    "compilation_ns": "compiles",
    "checkpoint_ns": "saves checkpoints",
    "queued_ns": "is queued for a core",
}
_TOLD_SHARE: Final = 0.1
"""Part of its mean step from which a rank is said to have one of `_PARTS`."""


def _largest_part(ranks: Sequence[RankSummary], several: bool) -> list[str]:
    """Return which rank waits most, and for what, as a sentence, if it does so for long."""
    waits = {
        (getattr(row, name) / max(row.mean_ns, 1), name): row for row in ranks for name in _PARTS
    }
    (share, name), row = max(waits.items(), key=lambda item: item[0][0])
    if share < _TOLD_SHARE:
        return []
    job = f" of job {row.job}" if several else ""
    pair = format_pair(getattr(row, name), "of", row.mean_ns)
    return [f"rank {row.rank}{job} {_PARTS[name]} {share:.0%} of the time ({pair} a step)"]


def document(result: SketchReport, limits: Limits) -> Document:
    """Return what changed, the cards of several runs, and the steps and kernels of each job."""
    jobs = {row.job for row in result.ranks}
    messages = [card.message for card in result.cards if card.message]
    messages += [change.message for change in result.changes]
    messages += _largest_part(result.ranks, several=len(jobs) > 1)
    if not result.changes:
        messages.append("no rank is late, and no step became slower")
    first = (Column("job", "job"),) if len(jobs) > 1 else ()
    title = "Steps of each rank (median, 95th percentile; means: waits for data, queued for a core)"
    return Document(
        head=tuple(Line(f"{capital(message)}.") for message in messages),
        tables=present(
            [
                declared("The slowest cards, by the same kernels", result.cards[: limits.kernels]),
                declared(title, result.ranks, *first),
                declared("Kernels of a step, by family and collective", result.kernels, *first),
            ]
        ),
    )


def records(result: SketchReport) -> Records:
    """Return a row for each rank."""
    names = RankSummary.__struct_fields__
    return names, attributes(result.ranks, names)
