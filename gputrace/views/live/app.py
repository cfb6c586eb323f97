"""The screen of a recording under way."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

from rich.console import RenderableType
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from gputrace.cleaning import clean
from gputrace.views.live.drawing import body, headline, status
from gputrace.views.live.now import Feed, Now
from gputrace.views.palette import Palette

_EVERY_S: Final = 1.0
_OUTPUT_S: Final = 0.25
_ROWS_OF_OUTPUT: Final = 8


class LiveApp(App[str]):
    """Shows what a feed sees; its result is ``open`` where the person wants the trace."""

    TITLE = "gputrace live"
    ENABLE_COMMAND_PALETTE = False
    CSS: ClassVar[str] = """
    Screen { layout: vertical; overflow: hidden; }
    #verdict { height: 1; padding: 0 1; background: $panel; }
    #status { height: 1; padding: 0 1; color: $text-muted; }
    #box { height: 1fr; padding: 0 1; }
    #body { height: auto; }
    #output { padding: 0 1; background: $surface; border-top: solid $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "leave", "leave"),
        Binding("enter,o", "open", "open the trace", key_display="Enter"),
        Binding("l", "letters", "letters in place of colours"),
        Binding("ctrl+c", "interrupt", "interrupt", show=False, priority=True),
    ]

    def __init__(
        self,
        feed: Feed,
        output: Callable[[int], list[str]] | None = None,
        interrupt: Callable[[], None] | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Of a program whose output is not on this terminal otherwise, there is more.

        Args:
            feed: looks at the recording.
            output: its last lines, as many as asked for.
            interrupt: does what Ctrl+C is to do; without it, that leaves.
            is_over: whether the screen is to go by itself.
        """
        super().__init__()
        self._feed, self._output, self._interrupt = feed, output, interrupt
        self._is_over = is_over
        self._looking = False
        self._task: asyncio.Task[None] | None = None
        self.palette = Palette()
        self.now: Now | None = None

    def compose(self) -> ComposeResult:
        yield Static("reading …", id="verdict", markup=False)
        yield Static(id="status", markup=False)
        with VerticalScroll(id="box"):
            yield Static(id="body", markup=False)
        if self._output is not None:
            yield Static(id="output", markup=False)
        yield Footer(show_command_palette=False)

    async def on_mount(self) -> None:
        colors = 16 if self.console.color_system == "standard" else 1 << 24
        self.palette = Palette(0 if self.no_color else colors)
        self.query_one("#box").focus()
        if self._interrupt is None:
            # Whoever ends the program gets the terminal back as it was.
            asyncio.get_running_loop().add_signal_handler(
                signal.SIGTERM, partial(self.exit, return_code=128 + signal.SIGTERM)
            )
        self.set_interval(_EVERY_S, self._look)
        if self._output is not None:
            self.query_one("#output").styles.height = self._rows_of_output + 1
            self.set_interval(_OUTPUT_S, self._show_output)
        self.call_later(self._look)

    @property
    def _rows_of_output(self) -> int:
        return min(_ROWS_OF_OUTPUT, max(self.size.height // 4, 1))

    def _look(self) -> None:
        if not self._looking and (self.now is None or self.now.state in ("running", "ending")):
            self._looking = True
            self._task = asyncio.create_task(self._take())

    async def _take(self) -> None:
        try:
            self.now = await asyncio.to_thread(self._feed.look)
        except Exception as error:
            told = clean(str(error) or type(error).__name__)
            self._put("verdict", Text(told, "bold red", no_wrap=True))
            return
        finally:
            self._looking = False
        self.show()

    def _show_output(self) -> None:
        assert self._output is not None
        if self._is_over():
            self.exit()
            return
        lines = [clean(line, self.size.width - 2) for line in self._output(self._rows_of_output)]
        self._put("output", Text("\n".join(lines), no_wrap=True))

    def show(self) -> None:
        """Draws what was seen last."""
        if self.now is None:
            return
        self._put("verdict", headline(self.now))
        self._put("status", status(self.now))
        self._put("body", body(self.now, self.palette, max(self.size.width - 4, 20)))

    def _put(self, place: str, what: RenderableType) -> None:
        """Draws something in its place; nothing where the screen is on its way out."""
        for widget in self.query(f"#{place}").results(Static):
            widget.update(what)

    def on_resize(self) -> None:
        self.show()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """There is a trace to open where a recording was watched, not made."""
        return self._output is None if action == "open" else True

    def action_letters(self) -> None:
        """Letters for colours, and colours again."""
        colors = 16 if self.console.color_system == "standard" else 1 << 24
        self.palette = Palette(0 if self.palette.colors else colors)
        self.show()

    def action_leave(self) -> None:
        self.exit()

    def action_open(self) -> None:
        if self.now is not None and self.now.state == "ended":
            self.exit("open")
        else:
            self.notify("the recording has not ended", timeout=2, markup=False)

    def action_interrupt(self) -> None:
        if self._interrupt is None:
            self.exit()
        else:
            self._interrupt()


def watch(feed: Feed) -> tuple[int, Path | None]:
    """Shows a recording until the person leaves: exit code, and the trace, if that is wanted."""
    app = LiveApp(feed)
    wanted = app.run()
    return app.return_code or 0, feed.trace if wanted == "open" else None
