"""The public function `compare`, and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from gputrace.analyzers.compare import compare as compare_runs
from gputrace.analyzers.compare import with_batch
from gputrace.analyzers.compare.results import Comparison
from gputrace.analyzers.compare.runs import Run, read_run
from gputrace.errors import UsageError
from gputrace.model.options import Options, read_steps
from gputrace.model.results import as_subclass
from gputrace.model.trace import Progress
from gputrace.readers.open import open_traces
from gputrace.report.html import write_page

__all__ = ["ComparisonReport", "compare"]

Batch = float | Sequence[float] | None
Progresses = Callable[[str], AbstractContextManager[Progress | None]]
"""Factory of progress callbacks, given the name of what is being read."""


@dataclass(frozen=True, slots=True, repr=False)
class ComparisonReport(Comparison):
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
    if batch is not None and global_batch is not None:
        raise UsageError("give the batch of a GPU or that of all GPUs, not both")
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
