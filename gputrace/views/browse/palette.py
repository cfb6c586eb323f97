"""What each class of time looks like: a colour, and a letter where there are no colours.

The colours start from those of Okabe and Ito, which people with any colour vision tell apart, and
differ in lightness too. Terminals of 16 colours get others, that are exactly theirs.
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
    "compute": Look("compute", "#009e73", "#00aa00", "█"),
    "communication": Look("comm", "#3d6fd9", "#5555ff", "▒"),
    "h2d": Look("h2d", "#56d4f5", "#55ffff", "H"),
    "other_copy": Look("copies", "#9aa5b8", "#00aaaa", "c"),
    "memset": Look("memset", "#6e5a46", "#555555", "m"),
    "recorder": Look("recorder", "#ffffff", "#ffffff", "R"),
    "data_feeding": Look("data", "#f0e442", "#ffff55", "D"),
    "sync": Look("sync", "#cc79a7", "#ff55ff", "s"),
    "alloc": Look("alloc", "#e69f00", "#aa5500", "a"),
    "launch": Look("launch", "#c0392b", "#aa0000", "l"),
    "other_idle": Look("idle?", "#4a4a55", "#0000aa", "·"),
    "host_sync": Look("sync call", "#cc79a7", "#ff55ff", "s"),
    "host_alloc": Look("alloc call", "#e69f00", "#aa5500", "a"),
    "host_launch": Look("launch call", "#009e73", "#00aa00", "l"),
    "host_call": Look("CUDA call", "#9aa5b8", "#00aaaa", "c"),
    "host_data": Look("data", "#f0e442", "#ffff55", "D"),
    "host_system": Look("system call", "#6e5a46", "#555555", "w"),
    "host_rest": Look("the rest", "#4a4a55", "#0000aa", "·"),
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

    def bar(self, lower: str, upper: str) -> Style:
        """For a character of which the lower part is one class and the rest another."""
        if not self.colors:
            return Style()
        return _style(self.color(lower), self.color(upper))

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
def _style(color: str, ground: str, *, bold: bool = False) -> Style:
    return Style(color=color, bgcolor=ground, bold=bold)


def _light(color: str) -> float:
    """From 0 to 255, as eyes weigh it."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue
