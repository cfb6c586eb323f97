"""Report of a folder of sketches, for every format."""

from __future__ import annotations

from gputrace.model.sketches import RankSummary, SketchReport
from gputrace.model.struct import Column
from gputrace.report.document import Document, Limits, Line, Records, attributes, declared, present
from gputrace.report.wording import capital


def document(result: SketchReport, limits: Limits) -> Document:
    """Return what changed, and the steps of each rank."""
    jobs = {row.job for row in result.ranks}
    head = [Line(f"{capital(change.message)}.") for change in result.changes]
    first = (Column("job", "job"),) if len(jobs) > 1 else ()
    title = "Steps of each rank (median, 95th percentile, and the mean of each part)"
    return Document(
        head=tuple(head) or (Line("No rank is late, and no step became slower."),),
        tables=present([declared(title, result.ranks, *first)]),
    )


def records(result: SketchReport) -> Records:
    """Return a row for each rank."""
    names = RankSummary.__struct_fields__
    return names, attributes(result.ranks, names)
