"""Plain tables, and figures for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.measure import MIB, Series


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table: the first column to the left, the others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    print(f"\n{title}\n")
    for number, line in enumerate(lines):
        cells = [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  " + "   ".join(cells).rstrip())
        if not number:
            print("  " + "   ".join("-" * width for width in widths))


def seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def spread(series: Series) -> str:
    """The fastest and the slowest run: how far to trust the median."""
    return f"{seconds(min(series.walls))} to {seconds(max(series.walls))}"


def mebibytes(value: float) -> str:
    return f"{value / MIB:,.0f}"


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"
