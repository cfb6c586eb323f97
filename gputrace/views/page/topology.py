"""What lies between the GPUs, as a matrix: the link and the bandwidth measured over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from gputrace.analyzers.results import Analysis
from gputrace.analyzers.results.links import GpuLink
from gputrace.views.page.plain import plain_text
from gputrace.views.tables import Table

_MOST: Final = 16
"""GPUs of a host in a matrix."""


def topology(analysis: Analysis) -> Iterator[Table]:
    """A matrix for each host of which links are known."""
    links = analysis.links
    for host in dict.fromkeys(link.host for link in links):
        yield _matrix(host, [link for link in links if link.host == host])


def _matrix(host: str, links: Sequence[GpuLink]) -> Table:
    gpus = sorted({link.from_ for link in links} | {link.to for link in links})[:_MOST]
    between = {(link.from_, link.to): link for link in links}
    rows = tuple(
        (
            f"gpu {row}",
            *("–" if row == column else _cell(between.get((row, column))) for column in gpus),
        )
        for row in gpus
    )
    where = f" on {plain_text(host, 40)}" if host else ""
    title = f"From GPU (row) to GPU (column){where}: the link, and GB/s measured in large copies"
    return Table(title, ("", *(f"gpu {column}" for column in gpus)), rows)


def _cell(link: GpuLink | None) -> str:
    if link is None:
        return "unknown"
    rate = "" if link.bandwidth is None else f" {link.bandwidth / 1e9:.3g} GB/s"
    staged = " through the host" if link.staged_copies else ""
    return f"{link.link or 'unknown'}{rate}{staged}"
