"""The page's colours: classes as in the terminal, GPUs from a palette for all eyes."""

from __future__ import annotations

from typing import Final

from gputrace.analyzers.scene.runs import RUN_CLASSES
from gputrace.views.palette import LOOKS, NOTHING
from gputrace.views.tables import CLASS_NAMES

GROUND: Final = "#16161c"
"""Behind classes, whose colours are made for it."""

_GPUS: Final = ("#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#0072b2", "#d55e00", "#8a8a8a")
"""GPU 0 is green; all by Okabe and Ito, but for the yellow that white swallows."""
_DASHES: Final = ("solid", "dashed", "dotted", "dotdash")
PHASES: Final = {"warmup": "#e69f00", "validation": "#56b4e9", "checkpoint": "#cc79a7"}

_OTHERS: Final = {
    "host_data": "waits for data",
    "host_rest": "the rest",
    "unknown": "outside of what was recorded",
}


def gpu_look(place: int) -> tuple[str, str]:
    """The colour and the dash pattern of the line of a GPU, by its place in the list."""
    return _GPUS[place % len(_GPUS)], _DASHES[place // len(_GPUS) % len(_DASHES)]


def class_color(name: str) -> str:
    """Of one of `RUN_CLASSES`."""
    return LOOKS.get(name, NOTHING).color


def class_label(name: str) -> str:
    """What people call one of `RUN_CLASSES`."""
    return CLASS_NAMES.get(name) or _OTHERS[name]


def class_list() -> list[dict[str, str]]:
    """Name, label and colour of every run class, in the order of their numbers."""
    return [
        {"name": name, "label": class_label(name), "color": class_color(name)}
        for name in RUN_CLASSES
    ]
