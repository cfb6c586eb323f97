"""The Python interface: open a trace, analyze it, look at it in any form.

report = gputrace.open("trace.sqlite").analyze()  # or several: open("a.sqlite", "b.sqlite")
print(report)                    # what `gputrace analyze` prints
report.findings[0].advice        # plain dataclasses, times in integer nanoseconds
report.to_pandas("gaps")         # a DataFrame
gputrace.open("trace.sqlite").report("report.html")   # the page of `gputrace report`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from html import escape
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from gputrace import views
from gputrace.analyzers.analysis import analyze
from gputrace.analyzers.options import Options, read_options, read_window
from gputrace.analyzers.results import Analysis
from gputrace.errors import GputraceError, InputError
from gputrace.traces.opening import go_on_without, open_traces
from gputrace.traces.quality import LeftOut
from gputrace.traces.trace import Progress, Window
from gputrace.traces.within import within

if TYPE_CHECKING:
    import pandas

    from gputrace.views.page.material import Material

__all__ = ["OpenTrace", "Report", "open"]

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Report(Analysis):
    """An analysis that can show itself."""

    def render(self, form: str = "text") -> str:
        """The report as ``text``, ``json``, ``markdown`` or ``csv``."""
        return views.render(self, form)

    def to_pandas(self, table: str = "breakdown") -> pandas.DataFrame:
        """One of ``breakdown``, ``gpus``, ``step_list``, ``phases``, ``gaps``, ``findings``,
        ``cards``, ``kernels`` (a row for each kernel and GPU).

        Raises MissingError where pandas is not installed, UsageError for another name.
        """
        from gputrace.views.frames import frame

        return frame(self, table)

    def __str__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        from gputrace.views.html import render

        return render(self)


class OpenTrace:
    """Trace files of a run, open for reading; close them, or use a ``with`` statement."""

    def __init__(
        self,
        *paths: str | PathLike[str],
        keep_going: bool = False,
        workers: int | None = None,
        windows: bool = False,
    ) -> None:
        self._keep_going = keep_going
        self._trace = open_traces([str(path) for path in paths], keep_going, workers, windows)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The files that could not be read, or not to their end, where one goes on without them.

        `analyze` and `export` may find more.
        """
        return tuple(self._trace.quality.left_out)

    def analyze(
        self,
        *,
        steps: str | tuple[int, int] | None = None,
        time: str | tuple[int, int] | None = None,
        gaps: int = 50,
        progress: Progress | None = None,
    ) -> Report:
        """Where the time went.

        Args:
            steps: the steps to measure, as ``"8:25"`` or as two numbers, counted from 0, the end
                not included; the steady ones if not given.
            time: a window of the trace, as ``"12s:14s"`` or as two nanosecond counts.
            gaps: how many of the largest gaps to list.
            progress: called with rows read so far and in all.

        Raises InputError where the file is broken, UsageError for a window with nothing in it.
        """
        options = read_options(steps, time, gaps)

        def run() -> Analysis:
            with within(self._trace, self._absolute(options.window), progress) as trace:
                return analyze(trace, options, progress)

        result = self._going_on(run)
        return Report(**{field.name: getattr(result, field.name) for field in fields(Analysis)})

    def report(
        self,
        target: str | PathLike[str],
        *,
        steps: str | tuple[int, int] | None = None,
        time: str | tuple[int, int] | None = None,
        gaps: int = 50,
        force: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Writes the report as one HTML file that opens offline, with charts and the timeline.

        Args:
            target: the file to write.
            steps, time, gaps: as of `analyze`.
            force: whether to replace a target that exists.
            progress: called with rows read so far and in all.

        Raises what `analyze` raises, UsageError for a target that exists, MissingError without
        bokeh, OSError where the target cannot be written.
        """
        from gputrace.views.exports.targets import check_target, unfinished_file
        from gputrace.views.page import load

        path = check_target(Path(target), self._trace.paths, force)
        text = load("document").render(
            self.material(steps=steps, time=time, gaps=gaps, progress=progress)
        )
        with unfinished_file(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")

    def material(
        self,
        *,
        steps: str | tuple[int, int] | None = None,
        time: str | tuple[int, int] | None = None,
        gaps: int = 50,
        progress: Progress | None = None,
    ) -> Material:
        """What a page shows: the analysis, and the timeline as runs; arguments as of `analyze`."""
        from gputrace.views.page.material import gather

        options = read_options(steps, time, gaps)

        def run() -> Material:
            with within(self._trace, self._absolute(options.window), progress) as trace:
                return gather(trace, options, progress)

        return self._going_on(run)

    def export(
        self,
        form: str,
        target: str | PathLike[str],
        *,
        time: str | tuple[int, int] | None = None,
        redact: bool = False,
        force: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Writes the trace for other programs, or a part of it.

        Args:
            form: ``trace`` (a smaller one of the same kind), ``perfetto``, ``parquet`` or ``csv``.
            target: the file to write; a folder for ``parquet`` and ``csv``.
            time: a window of the trace, as `analyze` takes it.
            redact: whether to replace the names of hosts, users, paths and programs.
            force: whether to replace a target that exists.
            progress: called with work done so far and in all.

        Raises InputError where the file is broken, UsageError for a target that exists and for what
        has no such form, OSError where the target cannot be written.
        """
        from gputrace.traces.redacted import RedactedTrace
        from gputrace.views.exports import Job, export
        from gputrace.views.exports.targets import check_target

        window = read_window(time)
        path = check_target(Path(target), self._trace.paths, force)

        def write() -> None:
            absolute = self._absolute(window)
            with within(self._trace, absolute if form != "trace" else None, progress) as part:
                trace = RedactedTrace(part) if redact and form != "trace" else part
                job = Job(
                    trace,
                    path,
                    absolute,
                    redact,
                    lambda gaps: analyze(trace, Options(window, gaps=gaps), progress),
                    progress,
                )
                export(job, form)

        self._going_on(write)

    def _absolute(self, window: Window | None) -> Window | None:
        """A window after the trace's origin as one of its clock."""
        origin = self._trace.origin
        return window and Window(window.start + origin, window.end + origin)

    def _going_on(self, work: Callable[[], _Result]) -> _Result:
        """Does the work; without a file that turns out to be broken meanwhile, if it may."""
        while True:
            try:
                return work()
            except InputError as error:
                if not self._keep_going:
                    raise
                self._trace = go_on_without(self._trace, error)

    def __repr__(self) -> str:
        return f"<gputrace.OpenTrace {self._trace.title}>"

    def _repr_html_(self) -> str:
        """The report, in notebooks; or why there is none."""
        try:
            return self.analyze()._repr_html_()
        except GputraceError as error:
            return f"<p>{escape(str(error))}</p>"

    def close(self) -> None:
        """Gives back the files."""
        self._trace.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def open(
    path: str | PathLike[str],
    *more: str | PathLike[str],
    keep_going: bool = False,
    workers: int | None = None,
    windows: bool = False,
) -> OpenTrace:
    """Opens a trace of any recorder, or the traces of one run as one: a file a machine or a rank.

    Args:
        path: a file, or a folder, which stands for the traces in it.
        more: further ones of the same run; logs of nvidia-smi say what the GPUs did meanwhile.
        keep_going: whether to go on without what cannot be read; `OpenTrace.left_out` says what.
        workers: how many processes decode files of text; chosen by their sizes if not given.
        windows: whether only windows of it will be asked for (``time``): text of over 512 MiB is
            then not held, but gone through again for each.

    Raises InputError where a file cannot be read, or is not of the same run as the others; with
    ``keep_going`` only where nothing can be read.
    """
    return OpenTrace(path, *more, keep_going=keep_going, workers=workers, windows=windows)
