"""What lies over the timeline for a moment: a question, and the help."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from gputrace.cleaning import clean
from gputrace.views.browse.keys import GROUPS

Check = Callable[[str], None]
"""Takes what was typed; raises ValueError, or a UsageError, that says what is wrong with it."""


class Prompt(ModalScreen[str | None]):
    """Asks for a line at the foot of the screen; gives None when it is called off."""

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


class Help(ModalScreen[None]):
    """All keys."""

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
        with VerticalScroll():
            yield Static(_help())

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()


def _help() -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for title, keys in GROUPS.items():
        table.add_row(Text(title, style="bold"), "")
        for key in keys:
            table.add_row(Text(f"  {key.written}"), Text(key.does))
    table.add_row(Text("Mouse", style="bold"), "")
    table.add_row(Text("  wheel"), Text("zoom at the pointer; with Shift, to the side"))
    table.add_row(Text("  drag"), Text("to the side"))
    table.add_row(Text("  click"), Text("the gap or the operation there; a gap of the list"))
    return table
