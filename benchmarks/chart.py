"""A bar chart as SVG, for the documentation: readable on light and on dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log10
from pathlib import Path
from typing import Final

_BAR, _ROW, _LEFT, _WIDE, _TOP = 14, 26, 340, 380, 34
_TEXT: Final = 'fill="#888" font-family="sans-serif" font-size="12"'
_OURS, _THEIRS = "#2a9d8f", "#b08968"
_LEAST_S: Final = 0.1
"""Where the axis begins, which is logarithmic."""


def write_chart(path: Path, title: str, bars: Sequence[tuple[str, float, bool]]) -> None:
    """Writes bars of seconds; each with its label and whether it is ours."""
    most = max(seconds for _, seconds, _ in bars)
    height = _TOP + _ROW * len(bars) + 8
    width = _LEFT + _WIDE + 70
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<text x="8" y="18" {_TEXT} font-weight="bold">{escape(title)}</text>',
    ]
    for number, (label, seconds, ours) in enumerate(bars):
        lines += _bar(_TOP + _ROW * number, label, seconds, _length(seconds, most), ours)
    path.write_text("\n".join([*lines, "</svg>", ""]), encoding="utf-8")


def _bar(top: int, label: str, seconds: float, length: float, ours: bool) -> list[str]:
    middle = top + _BAR - 3
    colour = _OURS if ours else _THEIRS
    return [
        f'<text x="{_LEFT - 8}" y="{middle}" text-anchor="end" {_TEXT}>{escape(label)}</text>',
        f'<rect x="{_LEFT}" y="{top}" width="{length:.0f}" height="{_BAR}" fill="{colour}"/>',
        f'<text x="{_LEFT + length + 6:.0f}" y="{middle}" {_TEXT}>{seconds:.1f} s</text>',
    ]


def _length(seconds: float, most: float) -> float:
    span = log10(most / _LEAST_S)
    return max(2.0, _WIDE * log10(max(seconds, _LEAST_S) / _LEAST_S) / max(span, 1e-9))
