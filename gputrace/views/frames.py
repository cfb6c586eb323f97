"""Tables of an analysis as pandas DataFrames, for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from gputrace.analyzers.kernels import KernelOnGpu, KernelUse
from gputrace.analyzers.results import (
    Analysis,
    Breakdown,
    Finding,
    Gap,
    GpuTotals,
    Phase,
    Step,
)
from gputrace.analyzers.results.cards import CardUse
from gputrace.errors import MissingError, UsageError

if TYPE_CHECKING:
    import pandas

_TABLES: Final[dict[str, type]] = {
    "breakdown": Breakdown,
    "gpus": GpuTotals,
    "step_list": Step,
    "phases": Phase,
    "gaps": Gap,
    "findings": Finding,
    "cards": CardUse,
    "kernels": KernelUse,
}


def frame(analysis: Analysis, table: str) -> pandas.DataFrame:
    """One table, a column per field; raises UsageError for an unknown table."""
    if table not in _TABLES:
        raise UsageError(f"no table is called {table!r}; there are {', '.join(_TABLES)}")
    try:
        import pandas
    except ImportError:
        raise MissingError("to_pandas() needs pandas; install gputrace[pandas]") from None
    rows: Sequence[Any] = getattr(analysis, table)
    if table == "gaps":
        rows = analysis.gaps.largest
    if table == "kernels":
        return pandas.DataFrame(_kernels(analysis))
    names = [field.name for field in fields(_TABLES[table])]
    return pandas.DataFrame({name: [getattr(row, name) for row in rows] for name in names})


def _kernels(analysis: Analysis) -> dict[str, list[Any]]:
    """The kernels that take most time, a row for each and each GPU that runs it."""
    top = analysis.kernels.top if analysis.kernels else ()
    pairs = [(use, own) for use in top for own in use.by_gpu]
    own_names = [field.name for field in fields(KernelOnGpu)]
    names = [f.name for f in fields(KernelUse) if f.name not in {*own_names, "by_gpu", "share"}]
    columns = {name: [getattr(use, name) for use, _ in pairs] for name in names}
    return columns | {name: [getattr(own, name) for _, own in pairs] for name in own_names}
