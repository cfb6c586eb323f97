"""The Python interface to comparisons: traces of several runs, opened one after the other.

report = gputrace.compare("before.sqlite", "after.sqlite")
print(report)                 # what `gputrace compare` prints
report.pair.speed_up          # plain dataclasses, times in integer nanoseconds
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path

from gputrace.analyzers.compare import Comparison, Run, read_run, with_batch
from gputrace.analyzers.compare import compare as compare_runs
from gputrace.analyzers.options import Options, read_steps
from gputrace.errors import UsageError
from gputrace.traces.opening import open_traces
from gputrace.traces.trace import Progress
from gputrace.views import compare as views

__all__ = ["ComparisonReport", "compare"]

Batch = float | Sequence[float] | None
Progresses = Callable[[str], AbstractContextManager[Progress | None]]
"""Given what is read, whom to tell how far it is."""


@dataclass(frozen=True, slots=True)
class ComparisonReport(Comparison):
    """A comparison that can show itself."""

    def render(self, form: str = "text") -> str:
        """The comparison as a text for people or programs.

        Args:
            form: ``text`` (lines of 80 columns), ``json`` (one line), ``markdown`` or ``csv``
                (times in nanoseconds).

        Raises UsageError for any other form.
        """
        return views.render(self, form)

    def save(self, target: str | PathLike[str], *, force: bool = False) -> None:
        """Writes the comparison as one HTML file that opens offline.

        Args:
            target: the file to write.
            force: whether to replace a target that exists.

        Raises UsageError for a target that exists, unless ``force``; MissingError without bokeh.
        """
        from gputrace.views.exports.targets import check_target, unfinished_file
        from gputrace.views.page import load

        inputs = [Path(path) for run in self.runs for path in run.paths]
        path = check_target(Path(target), inputs, force)
        text = load("comparison").render(self)
        with unfinished_file(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        return self.render()

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
    """What differs between two runs, or how several scale with their number of GPUs.

    Only one trace is open at a time. Times of the result are means over steps and GPUs, in
    nanoseconds, and their bounds are of 95 %.

    Args:
        traces: a file or folder for each run, at least two; a folder is a run of several files.
        labels: what to call the runs; A and B, or of more than two their files' names.
        steps: the steps to measure of each, as `OpenTrace.analyze` takes them.
        batch: samples that a GPU gets in a step, one number for all runs or one for each.
        global_batch: samples of a step on all GPUs together, likewise; not with ``batch``.
        progress: called with the name of each trace; gives what to tell rows read and in all.

    Raises InputError where a trace cannot be read, UsageError for arguments that make no sense.
    """
    if len(traces) < 2:
        raise UsageError("a comparison takes two traces or more; a folder is one run")
    names = _labels(traces, labels)
    runs = open_runs(
        traces, names, steps=steps, batch=batch, global_batch=global_batch, progress=progress
    )
    result = compare_runs(runs)
    values = {field.name: getattr(result, field.name) for field in fields(Comparison)}
    return ComparisonReport(**values)


def open_runs(
    traces: Sequence[str | PathLike[str]],
    labels: Sequence[str],
    *,
    steps: str | tuple[int, int] | None = None,
    batch: Batch = None,
    global_batch: Batch = None,
    progress: Progresses | None = None,
) -> list[Run]:
    """What a comparison needs of each trace; each is closed before the next is opened."""
    if batch is not None and global_batch is not None:
        raise UsageError("give the batch of a GPU or that of all GPUs, not both")
    options = Options(steps=read_steps(steps), gaps=0)
    of_gpu, of_all = (_of_each(given, len(traces)) for given in (batch, global_batch))
    runs = []
    for path, label, own, everyone in zip(traces, labels, of_gpu, of_all, strict=True):
        told = progress(Path(path).name) if progress is not None else nullcontext()
        with open_traces([str(path)]) as trace, told as tell:
            runs.append(with_batch(read_run(trace, label, options, tell), own, everyone))
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
    """Samples for each run; raises UsageError where they are not as many, or none at all."""
    if batch is None:
        return [None] * runs
    given = [batch] * runs if isinstance(batch, (int, float)) else list(batch)
    given = given * runs if len(given) == 1 else given
    if len(given) != runs or min(given) <= 0:
        raise UsageError(f"give one batch for all {runs} traces, or one for each, above 0")
    return list(given)
