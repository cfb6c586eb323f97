"""The Python interface: open a trace, analyze it, look at it in any form.

report = gputrace.open("trace.sqlite").analyze()  # or several: open("a.sqlite", "b.sqlite")
print(report)                    # what `gputrace analyze` prints
report.findings[0].advice        # plain dataclasses, times in integer nanoseconds
report.to_pandas("gaps")         # a DataFrame
gputrace.open("trace.sqlite").report("report.html")   # the page of `gputrace report`
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gputrace import views
from gputrace.analyzers.options import Options, read_options, read_window
from gputrace.analyzers.results import Analysis
from gputrace.errors import GputraceError
from gputrace.files import Files
from gputrace.traces.quality import LeftOut
from gputrace.traces.trace import Progress, Trace

if TYPE_CHECKING:
    import pandas

    from gputrace.analyzers.analysis import Spread
    from gputrace.analyzers.launches import Launches
    from gputrace.views.page.material import Material

__all__ = ["OpenTrace", "Report", "open"]


@dataclass(frozen=True, slots=True)
class Report(Analysis):
    """An analysis that can show itself."""

    def render(self, form: str = "text") -> str:
        """The report as a text for people or programs.

        Args:
            form: ``text`` (lines of 80 columns), ``json`` (one line), ``markdown``, ``csv`` (a line
                for each GPU; times in nanoseconds), or the name of a plugin's view.

        Raises UsageError for any other form.
        """
        return views.render(self, form)

    def to_pandas(self, table: str = "breakdown") -> pandas.DataFrame:
        """One of the tables as a DataFrame: a row for each entry, a column for each of its names.

        Args:
            table: ``breakdown`` or ``gpus`` (a row for each GPU), ``step_list`` (for each step and
                GPU), ``phases``, ``gaps`` (the largest), ``findings``, ``cards``, ``kernels`` (for
                each of the 50 that take most time and each GPU).

        Columns that end in ``_ns`` are integer nanoseconds, on the trace's own clock where they are
        moments; what is not known is None or NaN.

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
        scheduler: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        here = [str(path) for path in paths]
        self._files = Files(here, keep_going, workers, windows, scheduler, progress)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The files that could not be read, or not to their end, where one goes on without them.

        Each has its ``path`` and its ``problem``. `analyze` and `export` may find more.
        """
        return self._files.left_out

    def analyze(
        self,
        *,
        steps: str | tuple[int, int] | None = None,
        time: str | tuple[int, int] | None = None,
        gaps: int = 50,
        progress: Progress | None = None,
    ) -> Report:
        """Where the time went, as exact integer nanoseconds.

        Args:
            steps: the steps to measure, as ``"8:25"`` or as two numbers, counted from 0, the end
                not included; the steady ones if not given.
            time: a window of the trace, as ``"12s:14s"`` or as two nanosecond counts, both from
                the report's moment 0 (``origin_ns``), the end not included.
            gaps: how many of the largest gaps to list.
            progress: called with rows read so far and in all.

        Raises InputError where the file is broken, UsageError for a window with nothing in it and
        for steps that there are not.
        """
        options = read_options(steps, time, gaps)

        def run() -> Analysis:
            with self._files.reading(options.window, progress) as trace:
                return _analyze(trace, options, progress, self._files.spread)

        result = self._files.answer(Analysis, options, run)
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

        path = check_target(Path(target), self._files.trace.paths, force)
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
        """What a page shows: the analysis, and the timeline as runs.

        ``steps``, ``time``, ``gaps`` and ``progress`` are as of `analyze`, and so is what it
        raises. What it gives is for gputrace's own pages, and may change.
        """
        from gputrace.analyzers.scene.scene import Scene
        from gputrace.views.page.material import gather, read_scene

        options = read_options(steps, time, gaps)

        def run() -> Scene:
            with self._files.reading(options.window, progress) as trace:
                return read_scene(trace, options, progress)

        return gather(self._files.answer(Scene, options, run))

    def launches(self, kernel: str, *, progress: Progress | None = None) -> Launches:
        """One kernel, and which of its launches a profiler of kernels is to look at.

        Args:
            kernel: its name, a part of one, or its place by time, from ``"1"``.
            progress: called with rows read so far and in all.

        Raises what `analyze` raises, UsageError where there is no such kernel.
        """
        from gputrace.analyzers.launches import find_launches

        def run() -> Launches:
            with self._files.reading(None, progress) as trace:
                return find_launches(trace, _analyze(trace, Options(gaps=0)), kernel, progress)

        return self._files.going_on(run)

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
            time: a window of the trace, as `analyze` takes it; all of it if not given.
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
        path = check_target(Path(target), self._files.trace.paths, force)

        def write() -> None:
            absolute = self._files.absolute(window)
            with self._files.reading(window if form != "trace" else None, progress) as part:
                trace = RedactedTrace(part) if redact and form != "trace" else part
                job = Job(
                    trace,
                    path,
                    absolute,
                    redact,
                    lambda gaps: _analyze(trace, Options(window, gaps=gaps), progress),
                    progress,
                )
                export(job, form)

        self._files.going_on(write)

    def __repr__(self) -> str:
        return f"<gputrace.OpenTrace {self._files.title}>"

    def _repr_html_(self) -> str:
        """The report, in notebooks; or why there is none."""
        try:
            return self.analyze()._repr_html_()
        except GputraceError as error:
            from html import escape

            return f"<p>{escape(str(error))}</p>"

    def close(self) -> None:
        """Gives back the files; nothing can be asked for then. Raises nothing, also if repeated."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _analyze(
    trace: Trace,
    options: Options,
    progress: Progress | None = None,
    spread: Spread | None = None,
) -> Analysis:
    """Analyzes; what does is imported when it must, since an answer may be known without."""
    from gputrace.analyzers.analysis import analyze

    return analyze(trace, options, progress, spread=spread)


def open(
    path: str | PathLike[str],
    *more: str | PathLike[str],
    keep_going: bool = False,
    workers: int | None = None,
    windows: bool = False,
    scheduler: str | None = None,
    progress: Progress | None = None,
) -> OpenTrace:
    """Opens a trace of any recorder, or the traces of one run as one: a file a machine or a rank.

    Args:
        path: a file, or a folder, which stands for the traces in it.
        more: further ones of the same run; logs of nvidia-smi say what the GPUs did meanwhile.
        keep_going: whether to go on without what cannot be read; `OpenTrace.left_out` says what.
        workers: how many processes decode files of text; chosen by their sizes if not given.
        windows: whether only windows of it will be asked for (``time``): text of over 512 MiB is
            then not held, but gone through again for each.
        scheduler: a Dask cluster that analyzes the files: an address, ``local:N`` or ``slurm:N``
            (with ``local``, guard your program by ``if __name__ == "__main__"``).
        progress: called with bytes fetched so far and in all, of files of object stores.

    Raises InputError where a file cannot be read, or is not of the same run as the others; with
    ``keep_going`` only where nothing can be read. MissingError where this machine lacks what a
    file or the cluster needs: nsys, dask, fsspec.
    """
    return OpenTrace(
        path,
        *more,
        keep_going=keep_going,
        workers=workers,
        windows=windows,
        scheduler=scheduler,
        progress=progress,
    )
