"""The tables of a report in the order in which a person reads them, whatever the form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from gputrace.analyzers.results import Analysis
from gputrace.views.cards import cards_table
from gputrace.views.collectives import collectives_tables
from gputrace.views.extra import extra_table
from gputrace.views.kernels import kernels_table
from gputrace.views.links import links_tables
from gputrace.views.tables import Table, gaps_table, main_table


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of each a form has room for."""

    gpus_across: int
    """Up to so many GPUs are columns of the first table; more are rows."""
    gaps: int
    links: int
    kernels: int
    kernel_name: int = 80
    """Characters of a kernel's name."""


Section = Callable[[Analysis, Limits], Iterable[Table | None]]

_BEFORE_FINDINGS: Final[tuple[Section, ...]] = (
    lambda analysis, limits: [main_table(analysis, limits.gpus_across)],
    lambda analysis, limits: [gaps_table(analysis, limits.gaps)] if analysis.gaps.largest else [],
)
_AFTER_FINDINGS: Final[tuple[Section, ...]] = (
    lambda analysis, limits: collectives_tables(analysis),
    lambda analysis, limits: links_tables(analysis, limits.links),
    lambda analysis, limits: [cards_table(analysis)],
    lambda analysis, limits: [kernels_table(analysis, limits.kernels, limits.kernel_name)],
    lambda analysis, limits: map(extra_table, analysis.tables),
)


def tables_before(analysis: Analysis, limits: Limits) -> list[Table]:
    """What comes between the verdict and the other findings."""
    return _tables(_BEFORE_FINDINGS, analysis, limits)


def tables_after(analysis: Analysis, limits: Limits) -> list[Table]:
    """What comes after the findings."""
    return _tables(_AFTER_FINDINGS, analysis, limits)


def _tables(sections: tuple[Section, ...], analysis: Analysis, limits: Limits) -> list[Table]:
    made = (table for section in sections for table in section(analysis, limits))
    return [table for table in made if table is not None]
