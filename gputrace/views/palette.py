"""What each class of time looks like: a colour, and a letter where there are no colours.

The colours were searched for so that people with any colour vision tell any two apart. Terminals of
16 colours get others, that are exactly theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from rich.style import Style


@dataclass(frozen=True, slots=True)
class Look:
    """How a class is shown."""

    short: str
    """Its name in the legend."""
    color: str
    basic: str
    """Its colour where there are but 16."""
    letter: str
    """What stands for it where there are none."""


LOOKS: Final = {
    "compute": Look("compute", "#3a8c7a", "#00aa00", "█"),
    "communication": Look("comm", "#8c78ff", "#0000aa", "▒"),
    "h2d": Look("h2d", "#4cdcff", "#00aaaa", "H"),
    "other_copy": Look("copies", "#98975f", "#5555ff", "c"),
    "memset": Look("memset", "#64262b", "#aa5500", "m"),
    "recorder": Look("recorder", "#ffffff", "#ffffff", "R"),
    "data_feeding": Look("data", "#fbc735", "#ffff55", "D"),
    "sync": Look("sync", "#b15cb1", "#ff55ff", "s"),
    "alloc": Look("alloc", "#c87316", "#ff5555", "a"),
    "launch": Look("launch", "#990900", "#aa0000", "l"),
    "other_idle": Look("idle?", "#092b5e", "#555555", "·"),
    "host_sync": Look("sync call", "#b15cb1", "#ff55ff", "s"),
    "host_alloc": Look("alloc call", "#c87316", "#ff5555", "a"),
    "host_launch": Look("launch call", "#3a8c7a", "#00aa00", "l"),
    "host_call": Look("CUDA call", "#98975f", "#5555ff", "c"),
    "host_data": Look("data", "#fbc735", "#ffff55", "D"),
    "host_system": Look("system call", "#092b5e", "#555555", "w"),
    "host_rest": Look("the rest", "#092b5e", "#555555", "·"),
}
"""By class, in the order of the legend."""

NOTHING: Final = Look("", "#16161c", "#000000", " ")
"""Of time of which nothing is known."""
SEVERITIES: Final = {"high": "bold red", "medium": "bold yellow", "low": "cyan", "info": ""}
LEVELS: Final = " ▁▂▃▄▅▆▇█"
"""By eighths."""
_DARK: Final = 140
"""Colours of less light get white text on them."""


@dataclass(frozen=True)
class Palette:
    """The looks of a terminal."""

    colors: int = 1 << 24
    """How many it has: 2^24, 16, or 0 to do without."""

    def look(self, name: str) -> Look:
        return LOOKS.get(name, NOTHING)

    def color(self, name: str) -> str:
        look = self.look(name)
        return look.basic if self.colors == 16 else look.color

    def bars(self, names: tuple[str, ...]) -> list[list[Style]]:
        """For a character of which the lower part is one of some classes, the rest another."""
        return _bars(tuple(self.color(name) for name in names))

    def text(self, on: str) -> Style:
        """For words on the ground of a class."""
        if not self.colors:
            return Style(reverse=True)
        ground = self.color(on)
        return _style("#ffffff" if _light(ground) < _DARK else "#000000", ground, bold=True)

    def swatch(self, name: str) -> tuple[str, Style]:
        """What shows a class in the legend."""
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


def _light(color: str) -> float:
    """From 0 to 255, as eyes weigh it."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue
