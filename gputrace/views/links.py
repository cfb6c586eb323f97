"""The table of what went from GPU to GPU, and how fast."""

from __future__ import annotations

from collections.abc import Iterator

from gputrace.analyzers.results import Analysis
from gputrace.analyzers.results.links import GpuLink
from gputrace.views.tables import Table, gpu_label


def links_tables(analysis: Analysis, most: int) -> Iterator[Table]:
    """One table of the directions with most bytes copied, or none where nothing was."""
    used = [row for row in analysis.links if row.bytes or row.staged_bytes]
    used.sort(key=lambda row: -(row.bytes + row.staged_bytes))
    if not used:
        return
    several = len({row.host for row in used}) > 1
    shown = used[:most]
    more = f" (the {len(shown)} of {len(used)} directions with most)" if len(used) > most else ""
    header = ("", "link", "copies", "bytes", "GB/s", "link carries", "through the host")
    rows = tuple((_ends(analysis, row, several), *_cells(row)) for row in shown)
    yield Table(f"Copies between GPUs{more}", header, rows)


def _ends(analysis: Analysis, row: GpuLink, several: bool) -> str:
    """``gpu 0 to gpu 1``, with the host where there are several."""
    labels = {(own.gpu, own.rank): gpu_label(own, analysis) for own in analysis.breakdown}
    ends = ((row.from_, row.from_rank), (row.to, row.to_rank))
    told = " to ".join(labels.get(end, f"gpu {end[0]}") for end in ends)
    return told + (f" on {row.host}" if several else "")


def _cells(row: GpuLink) -> tuple[str, ...]:
    staged = f"{row.staged_copies:,} copies, {_size(row.staged_bytes)}"
    return (
        row.link or "unknown",
        f"{row.copies:,}",
        _size(row.bytes),
        _rate(row.bandwidth),
        _rate(row.able),
        staged if row.staged_copies else "–",
    )


def _rate(bytes_per_second: int | None) -> str:
    """Billions of bytes a second; a dash where they are not known."""
    return "–" if bytes_per_second is None else f"{bytes_per_second / 1e9:.3g}"


def _size(count: int) -> str:
    """``1.39 GB``, ``4.61 MB``."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"
