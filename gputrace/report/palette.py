"""Colours and letters of the classes of time in terminals; letters serve those without colours.

Terminals of 16 colours get colours from their own palette.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from rich.style import Style

from gputrace.model.time_class import TIME_CLASSES


@dataclass(frozen=True, slots=True)
class Look:
    """Appearance of a class of time."""

    short: str
    """Name in the legend."""
    color: str
    basic: str
    """Colour in terminals of 16 colours."""
    letter: str
    """Letter in terminals without colours."""


LOOKS: Final = {
    **{row.id: Look(row.short, row.color, row.basic, row.letter) for row in TIME_CLASSES},
    "host_sync": Look("sync call", "#b15cb1", "#ff55ff", "s"),
    "host_alloc": Look("alloc call", "#c87316", "#ff5555", "a"),
    "host_launch": Look("launch call", "#3a8c7a", "#00aa00", "l"),
    "host_call": Look("CUDA call", "#98975f", "#5555ff", "c"),
    "host_data": Look("data", "#fbc735", "#ffff55", "D"),
    "host_system": Look("system call", "#092b5e", "#555555", "w"),
    "host_rest": Look("the rest", "#092b5e", "#555555", "·"),
}
"""Looks by class, in the order of the legend."""

NOTHING: Final = Look("", "#3d3d47", "#000000", " ")
"""Look of time about which nothing is known."""
SEVERITIES: Final = {
    "high": "bold #ff8787",
    "medium": "bold #ffd75f",
    "low": "#5fd7ff",
    "info": "",
    "none": "#5fd75f",
}
"""Styles of the findings' severities, light enough to be read as the greys of letters mode, too;
``none`` is that of a verdict without findings."""
LEVELS: Final = " ▁▂▃▄▅▆▇█"
"""Block characters by height in eighths."""
_DARK: Final = 140
"""Luminance (0 to 255) below which a background gets white text."""


@dataclass(frozen=True)
class Palette:
    """Styles for a terminal's number of colours."""

    colors: int = 1 << 24
    """Number of colours: 2^24, 16, or 0 for letters."""

    def look(self, name: str) -> Look:
        return LOOKS.get(name, NOTHING)

    def color(self, name: str) -> str:
        look = self.look(name)
        return look.basic if self.colors == 16 else look.color

    def bars(self, names: tuple[str, ...]) -> list[list[Style]]:
        """Return the styles of a partly filled cell by class of its lower and of its upper part."""
        return _bars(tuple(self.color(name) for name in names))

    def text(self, on: str) -> Style:
        """Return the style of text on a class's colour."""
        if not self.colors:
            return Style(reverse=True)
        ground = self.color(on)
        red, green, blue = (int(ground[at : at + 2], 16) for at in (1, 3, 5))
        light = 0.299 * red + 0.587 * green + 0.114 * blue
        return _style("#ffffff" if light < _DARK else "#000000", ground, bold=True)

    def swatch(self, name: str) -> tuple[str, Style]:
        """Return the character and style that show a class in the legend."""
        look = self.look(name)
        if not self.colors:
            return look.letter, Style(bold=True)
        return "█", Style(color=self.color(name))


@cache
def _bars(colors: tuple[str, ...]) -> list[list[Style]]:
    return [[_style(lower, upper) for upper in colors] for lower in colors]


@cache
def _style(color: str, ground: str, *, bold: bool = False) -> Style:
    return Style(color=color, bgcolor=ground, bold=bold)
