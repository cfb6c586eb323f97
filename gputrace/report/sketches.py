"""Report of a folder of sketches, for every format."""

from __future__ import annotations

from gputrace.model.sketches import RankSummary, SketchReport
from gputrace.model.struct import Column
from gputrace.report.document import Document, Limits, Line, Records, attributes, declared, present
from gputrace.report.wording import capital


def document(result: SketchReport, limits: Limits) -> Document:
    """Return what changed, the cards of several runs, and the steps and kernels of each job."""
    jobs = {row.job for row in result.ranks}
    messages = [card.message for card in result.cards if card.message]
    messages += [change.message for change in result.changes]
    head = [Line(f"{capital(message)}.") for message in messages]
    first = (Column("job", "job"),) if len(jobs) > 1 else ()
    title = "Steps of each rank (median, 95th percentile; means: waits for data, queued for a core)"
    return Document(
        head=tuple(head) or (Line("No rank is late, and no step became slower."),),
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
