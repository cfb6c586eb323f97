"""The comparison as CSV: a row per class of two runs, a row per run of several."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, Final

from gputrace.analyzers.compare.results import Change, ClassChange, Comparison, ScalingRow
from gputrace.cleaning import cell

_CLASSES: Final = ("name", *(f.name for f in fields(Change)), "a_share", "b_share")
_RUNS: Final = tuple(field.name for field in fields(ScalingRow) if field.name != "losses")


def render(comparison: Comparison) -> str:
    """RFC 4180 with a header line; times in nanoseconds, unknown values empty."""
    if comparison.scaling is not None:
        return _written(_RUNS, comparison.scaling.rows)
    pair = comparison.pair
    if pair is None:
        return _written(("label", "gpus", "span_ns"), comparison.runs)
    return _written(_CLASSES, [*_total(comparison), *pair.classes])


def _total(comparison: Comparison) -> Iterable[ClassChange]:
    """The step as a row, named ``total``."""
    step = comparison.pair and comparison.pair.step
    if step is not None:
        whole = {field.name: getattr(step, field.name) for field in fields(Change)}
        yield ClassChange(
            **whole, name="total", a_share=1.0, b_share=1.0, a_worst=None, b_worst=None
        )


def _written(names: Sequence[str], rows: Iterable[Any]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([cell(getattr(row, name)) for name in names] for row in rows)
    return out.getvalue()
