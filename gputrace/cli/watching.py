"""Tells how a study goes: lines on stderr, with a bar below them where that is a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gputrace.cleaning import clean, message
from gputrace.cli.telling import tell
from gputrace.units import format_ns

if TYPE_CHECKING:
    from rich.progress import Progress

    from gputrace.bench.database import Run
    from gputrace.bench.plan import Planned


@contextmanager
def watch() -> Iterator[Lines]:
    """Gives what is to be told how it goes."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield Bar(bar)


class Lines:
    """A line when a run is over; one for all repeats that are skipped for the same reason."""

    def __init__(self) -> None:
        self._begun = ""
        self._skipped: set[tuple[str, str]] = set()

    def tell(self, line: str) -> None:
        tell(line)

    def begin(self, planned: Planned, label: str, number: int, total: int) -> None:
        bare = "" if planned.recorded else ", bare"
        self._begun = f"[{number}/{total}] {label}, repeat {planned.repeat}{bare}"

    def end(self, run: Run) -> None:
        if run.state == "skipped":
            if (run.configuration, run.why) in self._skipped:
                return
            self._skipped.add((run.configuration, run.why))
        self.tell(f"{self._begun}: {_came(run)}")


class Bar(Lines):
    """The same above a bar of the runs."""

    def __init__(self, bar: Progress) -> None:
        super().__init__()
        self._bar = bar
        self._task = bar.add_task("", total=None)

    def tell(self, line: str) -> None:
        self._bar.console.print(
            f"gputrace: {message(line)}", markup=False, highlight=False, soft_wrap=True
        )

    def begin(self, planned: Planned, label: str, number: int, total: int) -> None:
        from rich.markup import escape

        super().begin(planned, label, number, total)
        self._bar.update(
            self._task, description=escape(clean(label)), completed=number - 1, total=total
        )

    def end(self, run: Run) -> None:
        super().end(run)
        self._bar.advance(self._task)


def _came(run: Run) -> str:
    """What came of a run, in a few words."""
    if run.result is None or run.started_ns is None or run.ended_ns is None:
        return f"{run.state}: {run.why}"
    rate = run.result["samples_per_second"]
    return f"{rate:,.1f} samples/s, done in {format_ns(run.ended_ns - run.started_ns)}"
