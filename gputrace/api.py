"""The public functions `open` and `compare`, and what they return.

Reading and analyzing are imported when they are needed: a cached answer takes a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from gputrace import report
from gputrace.errors import GputraceError, InputError, UsageError
from gputrace.model.comparison import Comparison
from gputrace.model.options import Options, Window, read_options, read_steps, read_window
from gputrace.model.results import Analysis, LeftOut, as_subclass
from gputrace.report.wording import verdict
from gputrace.store.cache import ResultCache

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

    from gputrace.analyzers.compare.runs import Run
    from gputrace.analyzers.kernels import Launches
    from gputrace.analyzers.timeline_model import Scene
    from gputrace.model.comparison import StepExplanation
    from gputrace.model.trace import Progress, Trace
    from gputrace.report.html import Page
    from gputrace.report.html.timeline import Material

    Batch = float | Sequence[float] | None
    Progresses = Callable[[str], AbstractContextManager[Progress | None]]
    """Factory of progress callbacks, given the name of what is being read."""


__all__ = ["ComparisonReport", "OpenTrace", "Report", "compare", "open"]


class Report(Analysis, frozen=True):
    """Analysis that can render itself."""

    def render(self, form: str = "text") -> str:
        """Return the report as text for people or programs.

        Args:
            form: ``text`` (lines of 80 columns), ``json`` (one line), ``markdown``, ``csv`` (a line
                for each GPU; times in nanoseconds), or the name of a plugin's view.

        Raises UsageError for any other form.
        """
        return report.render(self, form)

    def to_pandas(self, table: str = "breakdown") -> pandas.DataFrame:
        """Return one of the tables as a DataFrame: a row for each entry, a column for each field.

        Args:
            table: ``breakdown`` or ``gpus`` (a row for each GPU), ``step_list`` (for each step and
                GPU), ``phases``, ``gaps`` (the largest), ``findings``, ``cards``, ``kernels`` (for
                each of the 50 that take most time and each GPU), ``ledger`` (lost time by cause).

        Columns that end in ``_ns`` are integer nanoseconds, on the trace's own clock where they are
        points in time; unknown values are None or NaN.

        Raises MissingError if pandas is not installed, UsageError for any other table.
        """
        frame: pandas.DataFrame = report.frame(self, table, "pandas")
        return frame

    def to_polars(self, table: str = "breakdown") -> polars.DataFrame:
        """Return one of the tables as a DataFrame of polars.

        Args:
            table: as `to_pandas` takes it.

        Unknown values are null; fields that are neither numbers nor text are JSON.

        Raises MissingError if polars is not installed, UsageError for any other table.
        """
        frame: polars.DataFrame = report.frame(self, table, "polars")
        return frame

    def to_arrow(self, table: str = "breakdown") -> pyarrow.Table:
        """Return one of the tables as Arrow's.

        Args:
            table: as `to_pandas` takes it.

        Unknown values are null; fields that are neither numbers nor text are JSON.

        Raises MissingError if pyarrow is not installed, UsageError for any other table.
        """
        frame: pyarrow.Table = report.frame(self, table, "pyarrow")
        return frame

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        return f"<gputrace.Report {_title(self.paths)}: {verdict(self)}>"

    def _repr_html_(self) -> str:
        from gputrace.report.markdown_html import NOTEBOOK, render_html
        from gputrace.report.tables import document

        return render_html(document(self, NOTEBOOK))


_Result = TypeVar("_Result")


class OpenTrace:
    """Open trace files of one run; close them, or use a ``with`` statement."""

    def __init__(
        self,
        *paths: str | PathLike[str],
        keep_going: bool = False,
        workers: int | None = None,
        windows: bool = False,
        scheduler: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Take the arguments of `gputrace.open`, and raise what it raises."""
        self._paths = [str(path) for path in paths]
        if any(":/" in path for path in self._paths):
            from gputrace.readers.open import fetch_urls

            self._paths = fetch_urls(self._paths, progress)
        self._keep_going, self._scheduler = keep_going, scheduler
        self._workers, self._windows = workers, windows
        self._cache = ResultCache(self._paths, windows)
        self._opened: Trace | None = None
        self._closing = ExitStack()
        self._closed = False
        if not self._cache.any:
            # Report unreadable files immediately.
            self._opened = self._trace

    @property
    def _trace(self) -> Trace:
        """Return all files as one trace, opened if need be; raises UsageError once closed."""
        if self._closed:
            raise UsageError("the trace is closed; open it again")
        if self._opened is None:
            from gputrace.readers.open import open_traces

            with ExitStack() as stack:
                opening = None
                if self._scheduler is not None:
                    from gputrace.distributed import Cluster

                    opening = stack.enter_context(Cluster(self._scheduler)).open_each
                self._opened = open_traces(
                    self._paths, self._keep_going, self._workers, self._windows, opening
                )
                self._closing = stack.pop_all()
        return self._opened

    def _absolute(self, window: Window | None) -> Window | None:
        """Convert a window relative to the trace's origin to the trace's own clock."""
        if window is None:
            return None
        return Window(window.start + self._trace.origin, window.end + self._trace.origin)

    def _read(
        self,
        work: Callable[[Trace], _Result],
        options: Options,
        progress: Progress | None,
        caches: bool = False,
    ) -> _Result:
        """Do the work on the trace, or on its window; the result is cached on demand.

        Files that turn out to be corrupt are left out if ``keep_going`` allows it.
        """
        from gputrace.readers.open import leave_out

        while True:
            try:
                window = self._absolute(options.window)
                if window is None:
                    result = work(self._trace)
                else:
                    from gputrace.store.slice import windowed

                    with windowed(self._trace, window, progress) as part:
                        result = work(part)
                break
            except InputError as error:
                if not self._keep_going:
                    raise
                self._opened = leave_out(self._trace, error)
        if caches and not self.left_out:
            self._cache.keep(result, options)
        return result

    def _cached(self, kind: type[_Result], options: Options) -> _Result | None:
        """Return the result of an earlier reading of the same files; None if there is none."""
        return None if self._closed else self._cache.find(kind, options)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Return the files that were left out, wholly or in part, because they cannot be read.

        Each has a ``path`` and a ``problem``. Filled only with ``keep_going``; `analyze` and
        `export` may add more.
        """
        return () if self._opened is None else tuple(self._opened.quality.left_out)

    def analyze(
        self,
        *,
        steps: str | tuple[int, int] | None = None,
        time: str | tuple[int, int] | None = None,
        gaps: int = 50,
        progress: Progress | None = None,
    ) -> Report:
        """Measure where the time went, as exact integer nanoseconds.

        Args:
            steps: the steps to measure, as ``"8:25"`` or as two numbers, counted from 0, the end
                excluded; by default the steady steps.
            time: a window of the trace, as ``"12s:14s"`` or as two nanosecond counts, both relative
                to the report's time 0 (``origin_ns``), the end excluded.
            gaps: how many of the largest gaps to list.
            progress: called with rows read so far and in all.

        Raises InputError for a corrupt file, UsageError for an empty window and for steps that do
        not exist.
        """
        options = read_options(steps, time, gaps)

        analysis = self._cached(Analysis, options)
        if analysis is None:
            from gputrace.analyzers.pipeline import analyze

            work = partial(analyze, options=options, progress=progress)
            if self._scheduler is not None:
                from gputrace.distributed import spread

                work = partial(work, spread=spread)
            analysis = self._read(work, options, progress, caches=True)
        return as_subclass(analysis, Report)

    def explain_step(
        self,
        number: int | str,
        *,
        steps: str | tuple[int, int] | None = None,
        time: str | tuple[int, int] | None = None,
        progress: Progress | None = None,
    ) -> StepExplanation:
        """Say why a step took as long as it did: its causes against those of the median step.

        Args:
            number: of the step, counted from 0; or ``"slowest"``, of those measured.
            steps, time, progress: see `analyze`.

        Raises what `analyze` raises, UsageError if there is no such step.
        """
        from gputrace.analyzers.gpu_shards import Shard
        from gputrace.analyzers.timeline_model.gaps import explain_step

        options = read_options(steps, time, 50)
        scene = self._scene(options, progress)
        return self._read(lambda trace: explain_step(scene, number, Shard(trace)), options, None)

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
        """Write the report as one HTML file that opens offline, with charts and the timeline.

        Args:
            target: the file to write.
            steps, time, gaps: see `analyze`.
            force: whether to replace a target that exists.
            progress: called with rows read so far and in all.

        Raises what `analyze` raises, UsageError for an existing target, MissingError without
        bokeh, OSError if the target cannot be written.
        """
        from gputrace.report.html import write_page

        write_page(
            target,
            self._trace.paths,
            force,
            lambda page: page.render(
                self.material(steps=steps, time=time, gaps=gaps, progress=progress)
            ),
        )

    def page(
        self,
        *,
        steps: str | tuple[int, int] | None = None,
        time: str | tuple[int, int] | None = None,
        gaps: int = 50,
        height: int = 800,
        progress: Progress | None = None,
    ) -> Page:
        """Return the page that `report` writes, to show in a notebook: lanes, causes, charts, gaps.

        Args:
            steps, time, gaps: see `analyze`.
            height: of the cell, in pixels.
            progress: called with rows read so far and in all.

        Raises what `analyze` raises, MissingError without bokeh.
        """
        from gputrace.report.html import Page, load

        material = self.material(steps=steps, time=time, gaps=gaps, progress=progress)
        return Page(load("page").render(material), height)

    def material(
        self,
        *,
        steps: str | tuple[int, int] | None = None,
        time: str | tuple[int, int] | None = None,
        gaps: int = 50,
        progress: Progress | None = None,
    ) -> Material:
        """Return the content of a report page: the analysis, and the run-length encoded timeline.

        Takes ``steps``, ``time``, ``gaps`` and ``progress`` like `analyze`, and raises what it
        raises. The result is for gputrace's own pages, and may change.
        """
        from gputrace.report.html.timeline import TraceParts, gather, read_parts, read_window

        options = read_options(steps, time, gaps)
        scene = self._scene(options, progress)
        parts = self._cached(TraceParts, options)
        if parts is None:
            parts = self._read(partial(read_parts, scene=scene), options, None, caches=True)
        material = gather(scene, parts)
        return replace(material, window_rows=lambda window: read_window(self._trace, scene, window))

    def _scene(self, options: Options, progress: Progress | None) -> Scene:
        from gputrace.analyzers.timeline_model import Scene, read_scene

        scene = self._cached(Scene, options)
        if scene is None:
            work = partial(read_scene, options=options, progress=progress)
            scene = self._read(work, options, progress, caches=True)
        return scene

    def launches(self, kernel: str, *, progress: Progress | None = None) -> Launches:
        """Find a kernel, and the launches of it that a kernel profiler should capture.

        Args:
            kernel: its name, a part of its name, or its rank by total time, from ``"1"``.
            progress: called with rows read so far and in all.

        Raises what `analyze` raises, UsageError if there is no such kernel.
        """
        from gputrace.analyzers.kernels import find_launches
        from gputrace.analyzers.pipeline import analyze

        options = Options(gaps=0)

        def work(trace: Trace) -> Launches:
            return find_launches(trace, analyze(trace, options), kernel, progress)

        return self._read(work, options, progress)

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
        """Export the trace, or a part of it, for other programs.

        Args:
            form: ``trace`` (the same format, but smaller), ``perfetto``, ``parquet`` or ``csv``.
            target: the file to write; a folder for ``parquet`` and ``csv``.
            time: a window of the trace, as `analyze` takes it; all of it if not given.
            redact: whether to replace the names of hosts, users, paths and programs.
            force: whether to replace a target that exists.
            progress: called with work done so far and in all.

        Raises InputError for a corrupt file, UsageError for an existing target and for a trace that
        has no such form, OSError if the target cannot be written.
        """
        from gputrace.analyzers.timeline_model import read_scene
        from gputrace.report import check_target
        from gputrace.report.export import Job, export
        from gputrace.store.redact import RedactedTrace

        window = read_window(time)
        path = check_target(Path(target), self._trace.paths, force)

        def write(part: Trace) -> None:
            trace = RedactedTrace(part) if redact and form != "trace" else part
            job = Job(
                trace,
                path,
                self._absolute(window),
                redact,
                lambda gaps: read_scene(trace, Options(window, gaps=gaps), progress),
                progress,
            )
            export(job, form)

        self._read(write, Options(window if form != "trace" else None), progress)

    def __repr__(self) -> str:
        """Return the name and the verdict, for which the trace is analyzed; a closed one has none.

        The analysis is kept, as all are, and is there when it is asked for again.
        """
        title = _title(self._paths) if self._opened is None else self._opened.title
        if self._closed:
            return f"<gputrace.OpenTrace {title}, closed>"
        try:
            return f"<gputrace.OpenTrace {title}: {verdict(self.analyze())}>"
        except GputraceError as error:
            return f"<gputrace.OpenTrace {title}: {error}>"

    def _repr_html_(self) -> str:
        """Return the report for notebooks, or the reason why there is none."""
        try:
            return self.analyze()._repr_html_()
        except GputraceError as error:
            from html import escape

            return f"<p>{escape(str(error))}</p>"

    def close(self) -> None:
        """Close the files; nothing can be read afterwards. Idempotent; raises nothing."""
        self._closed = True
        with self._closing:
            if self._opened is not None:
                self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _title(paths: Sequence[object]) -> str:
    first, *others = paths
    return f"{first} and {len(others)} more" if others else str(first)


def open(
    path: str | PathLike[str],
    *more: str | PathLike[str],
    keep_going: bool = False,
    workers: int | None = None,
    windows: bool = False,
    scheduler: str | None = None,
    progress: Progress | None = None,
) -> OpenTrace:
    """Open a trace of any recorder, or the traces of one run (a file per machine or rank) as one.

    Args:
        path: a file, or a folder, which stands for all traces in it.
        more: further files of the same run; logs of nvidia-smi add GPU clocks and utilization.
        keep_going: whether to skip what cannot be read; `OpenTrace.left_out` lists it.
        workers: how many threads decode text files; chosen by file size if not given.
        windows: whether only windows will be analyzed (``time``): text of over 512 MiB is then
            not held in memory, but scanned again for each window.
        scheduler: a Dask cluster that analyzes the files: an address, ``local:N`` or ``slurm:N``
            (with ``local``, guard your program by ``if __name__ == "__main__"``).
        progress: called with bytes fetched so far and in all, for files in object stores.

    Raises InputError if a file cannot be read, or is not of the same run as the others; with
    ``keep_going`` only if nothing can be read. Raises MissingError if this machine lacks what a
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


class ComparisonReport(Comparison, frozen=True):
    """Comparison that can render itself."""

    def render(self, form: str = "text") -> str:
        """Return the comparison as text for people or programs.

        Args:
            form: ``text`` (lines of 80 columns), ``json`` (one line), ``markdown`` or ``csv``
                (times in nanoseconds).

        Raises UsageError for any other form.
        """
        from gputrace.report.comparison import render as render_comparison

        return render_comparison(self, form)

    def save(self, target: str | PathLike[str], *, force: bool = False) -> None:
        """Write the comparison as one HTML file that opens offline.

        Args:
            target: the file to write.
            force: whether to replace a target that exists.

        Raises UsageError for an existing target, unless ``force``; MissingError without bokeh.
        """
        from gputrace.report.html import write_page

        inputs = [Path(path) for run in self.runs for path in run.paths]
        write_page(target, inputs, force, lambda page: page.render_comparison(self))

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        return f"<gputrace.ComparisonReport: {self.message}>"

    def _repr_markdown_(self) -> str:
        return self.render("markdown")


def compare(
    *traces: str | PathLike[str],
    labels: Sequence[str] | None = None,
    steps: str | tuple[int, int] | None = None,
    batch: Batch = None,
    global_batch: Batch = None,
    progress: Progresses | None = None,
) -> ComparisonReport:
    """Compare two runs, or measure how several scale with their number of GPUs.

    Only one trace is open at a time. Times in the result are means over steps and GPUs, in
    nanoseconds, with 95 % confidence bounds.

    Args:
        traces: a file or folder for each run, at least two; a folder is a run of several files.
        labels: names of the runs; by default A and B, or the file names if there are more than two.
        steps: the steps to measure of each, as `OpenTrace.analyze` takes them.
        batch: samples that a GPU gets in a step, one number for all runs or one for each.
        global_batch: samples of a step on all GPUs together, likewise; not with ``batch``.
        progress: called with the name of each trace; returns a context manager that yields the
            callback for rows read so far and in all.

    Raises InputError if a trace cannot be read, UsageError for inconsistent arguments.
    """
    from gputrace.analyzers.compare import compare as compare_runs

    if len(traces) < 2:
        raise UsageError("a comparison takes two traces or more; a folder is one run")
    names = _labels(traces, labels)
    runs = open_runs(
        traces, names, steps=steps, batch=batch, global_batch=global_batch, progress=progress
    )
    return as_subclass(compare_runs(runs), ComparisonReport)


def open_runs(
    traces: Sequence[str | PathLike[str]],
    labels: Sequence[str],
    *,
    steps: str | tuple[int, int] | None = None,
    batch: Batch = None,
    global_batch: Batch = None,
    progress: Progresses | None = None,
) -> list[Run]:
    """Read what a comparison needs from each trace; each is closed before the next is opened."""
    from gputrace.analyzers.compare import with_batch
    from gputrace.analyzers.compare.runs import read_run
    from gputrace.readers.open import open_traces

    if batch is not None and global_batch is not None:
        raise UsageError("give the batch per GPU or the batch of all GPUs, not both")
    options = Options(steps=read_steps(steps), gaps=0)
    gpu_batches, global_batches = (_of_each(given, len(traces)) for given in (batch, global_batch))
    runs = []
    for path, label, per_gpu, per_step in zip(
        traces, labels, gpu_batches, global_batches, strict=True
    ):
        reporting = progress(Path(path).name) if progress is not None else nullcontext()
        with open_traces([str(path)]) as trace, reporting as report:
            runs.append(with_batch(read_run(trace, label, options, report), per_gpu, per_step))
    return runs


def _labels(traces: Sequence[str | PathLike[str]], given: Sequence[str] | None) -> list[str]:
    if given:
        if len(given) != len(traces) or len(set(given)) < len(given):
            raise UsageError(f"give each of the {len(traces)} traces a label of its own, or none")
        return list(given)
    if len(traces) == 2:
        return ["A", "B"]
    paths = [Path(path) for path in traces]
    short = [path.name.partition(".")[0] or path.name for path in paths]
    if len(set(short)) == len(short):
        return short
    return [f"{number} {name}" for number, name in enumerate(short, 1)]


def _of_each(batch: Batch, runs: int) -> list[float | None]:
    """Expand a batch to one value per run; raises UsageError for a wrong count or a value <= 0."""
    if batch is None:
        return [None] * runs
    given = [batch] * runs if isinstance(batch, (int, float)) else list(batch)
    given = given * runs if len(given) == 1 else given
    if len(given) != runs or min(given) <= 0:
        raise UsageError(f"give one batch for all {runs} traces, or one for each, above 0")
    return list(given)
