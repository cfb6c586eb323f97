"""Prompts and help of the browser, and the parsers of what prompts ask for."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import ClassVar, Final

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from gputrace.analyzers.timeline_model import GapFilter
from gputrace.model.time_class import IDLE_CAUSES
from gputrace.report.tui.screen import GROUPS
from gputrace.sanitize import clean
from gputrace.units import format_ranges, parse_duration

Check = Callable[[str], None]
"""Function that takes the input; raises ValueError or UsageError if it is invalid."""


class Prompt(ModalScreen[str | None]):
    """Prompt for a line at the bottom of the screen; its result is None if cancelled."""

    DEFAULT_CSS: ClassVar[str] = """
    Prompt { align: center bottom; background: $background 20%; }
    Prompt > Vertical { height: auto; background: $panel; padding: 0 1; }
    Prompt Input { height: 1; border: none; padding: 0; background: $surface; }
    Prompt .wrong { color: $error; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "cancel")]

    def __init__(self, question: str, value: str, check: Check) -> None:
        super().__init__()
        self._question, self._value, self._check = question, value, check

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Text(self._question), id="question")
            yield Input(self._value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        try:
            self._check(event.value)
        except Exception as error:
            question = self.query_one("#question", Static)
            question.update(Text(clean(str(error))))
            question.add_class("wrong")
        else:
            self.dismiss(event.value)

    def action_cancel(self) -> None:
        self.dismiss(None)


_MOUSE: Final = [
    ("wheel", "zoom at the pointer; with Shift, to the side"),
    ("drag", "to the side"),
    ("click", "the gap or the operation there; a gap of the list"),
]


class Help(ModalScreen[None]):
    """Screen that lists all keys."""

    DEFAULT_CSS: ClassVar[str] = """
    Help { align: center middle; background: $background 40%; }
    Help > VerticalScroll {
        width: 78; max-width: 100%; height: auto; max-height: 100%;
        background: $panel; border: round $accent; padding: 0 1;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,f1", "app.pop_screen", "close")
    ]

    def compose(self) -> ComposeResult:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        rows = {title: [(key.written, key.does) for key in keys] for title, keys in GROUPS.items()}
        for title, keys in (rows | {"Mouse": _MOUSE}).items():
            table.add_row(Text(title, style="bold"), "")
            for key, does in keys:
                table.add_row(Text(f"  {key}"), Text(does))
        with VerticalScroll():
            yield Static(table)

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()


_CONDITION: Final = re.compile(r"(gpu|cause|step|len)\s*([=>])\s*(\S+)")
_CAUSES: Final = {cause.replace("_", "")[:4]: cause for cause in IDLE_CAUSES} | {
    "unexplained": "other_idle",
    "unex": "other_idle",
    "idle": "other_idle",
}


def parse_filter(text: str, labels: list[str]) -> GapFilter:
    """Parse a filter of gaps; raise ValueError that names what is invalid."""
    result = GapFilter()
    rest = _CONDITION.sub("", text).strip()
    if rest:
        raise ValueError(f"{rest!r} is not understood; write gpu=0 cause=data step=8:24 len>1ms")
    for name, _, value in _CONDITION.findall(text):
        if name == "gpu":
            wanted = set(value.split(","))
            lanes = [n for n, each in enumerate(labels) if wanted & {each, *each.split()}]
            if not lanes:
                raise ValueError(f"no lane is called {value}; there are {', '.join(labels)}")
            result = replace(result, lanes=lanes)
        elif name == "cause":
            result = replace(result, causes=[_cause(each) for each in value.split(",")])
        elif name == "step":
            first, _, last = value.partition(":")
            low = int(first or 0)
            result = replace(result, steps=(low, int(last or 1 << 30) if ":" in value else low + 1))
        else:
            result = replace(result, shortest_ns=parse_duration(value))
    return result


def _cause(text: str) -> str:
    """Return a cause by its name or a prefix of it."""
    key = text.replace("_", "").replace("-", "").lower()
    cause = _CAUSES.get(key) or _CAUSES.get(key[:4])
    if cause is None:
        raise ValueError(f"{text!r} is no cause; there are {', '.join(IDLE_CAUSES)}")
    return cause


def parse_ranks(text: str, known: Collection[int]) -> frozenset[int] | None:
    """Parse ranks as ``0,2-3``; return None, meaning all, for none.

    Raises ValueError for other input and for ranks that do not exist.
    """
    ranks: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part!r} is no rank; write 0,2-3, or nothing for all")
        low, high = int(first), int(last or first)
        ranks |= {rank for rank in known if low <= rank <= high}
        if not ranks:
            raise ValueError(f"no rank {part}; there are {format_ranges(sorted(known))}")
    return frozenset(ranks) or None
