"""Execution of a study, from its file to its results."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from gputrace.errors import ExitCode, UsageError
from gputrace.studies.database import Database, Folder, Run, StudyRow
from gputrace.studies.environments import Environments, check_names, find_workloads, read_frameworks
from gputrace.studies.measures import Telling, measure_runs, read_results
from gputrace.studies.plan import (
    Planned,
    Study,
    configurations_of,
    find_gpus,
    make_plan,
    only,
    read_study,
    run_label,
)
from gputrace.studies.results import Summary
from gputrace.studies.runner import Runner, end_all
from gputrace.studies.slurm import Nodes
from gputrace.studies.summary import summarize

_INTERRUPTING: Final = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Request:
    """Options of the command line.

    Attributes:
        output: folder of results; None for the study's name in the current folder.
        workloads: folder of the scripts; None for that of the study, or its parent.
        only: settings and values that select runs.
        retry: run failed runs again; ``force``: run everything again.
        skip_missing: ignore skipped runs in the exit code.
        nodes: nodes that runs may use.
        configuration: key of the only configuration to run; None for all.
        planned_for: number of GPUs of the target machine; None for this machine.
    """

    study: Path
    output: Path | None = None
    workloads: Path | None = None
    pythons: Mapping[str, Path] | None = None
    installer: str | None = None
    only: Sequence[tuple[str, str]] = ()
    backend: str = "auto"
    retry: bool = False
    force: bool = False
    skip_missing: bool = False
    nodes: Nodes = field(default_factory=Nodes)
    configuration: str | None = None
    planned_for: int | None = None

    @property
    def results(self) -> Path:
        """Return the folder of results."""
        return self.output or Path(f"{self.study.stem}.bench")


class Watcher(Protocol):
    """Observer of a study's progress."""

    def tell(self, line: str) -> None:
        """Report a line on something that takes long."""

    def begin(self, planned: Planned, label: str, number: int, total: int) -> None:
        """Report the start of a run; ``number`` is from 1."""

    def end(self, run: Run) -> None:
        """Report the end of the run that was started last."""


@dataclass(frozen=True, slots=True)
class Work:
    """Planned study.

    Attributes:
        plan: all runs of the study.
        chosen: selected runs.
        gpus: GPUs of this machine, as named in CUDA_VISIBLE_DEVICES.
    """

    request: Request
    study: Study
    plan: Sequence[Planned]
    chosen: Sequence[Planned]
    gpus: Sequence[str]
    folder: Folder

    def label(self, planned: Planned) -> str:
        """Return the settings in which its configuration differs from the study's others."""
        return run_label(planned.configuration, configurations_of(self.plan))

    def pending(self, over: Mapping[Any, Run]) -> list[Planned]:
        """Return the selected runs still to be made, including those skipped before."""
        again = {"skipped", *(["failed"] if self.request.retry else [])}
        return [
            planned
            for planned in self.chosen
            if self.request.force or planned.place not in over or over[planned.place].state in again
        ]


def prepare(request: Request) -> Work:
    """Read and plan a study without writing anything; raises GputraceError if it is invalid."""
    study = read_study(request.study)
    frameworks = read_frameworks(find_workloads(request.study, request.workloads))
    check_names(request.study, (s["framework"] for s in study.combinations), frameworks)
    for name in request.pythons or {}:
        if name not in frameworks:
            raise UsageError(f"--python {name}: no such framework; {', '.join(frameworks)} are")
    here = request.planned_for
    gpus = find_gpus() if here is None else [str(number) for number in range(here)]
    plan = make_plan(study, frameworks, len(gpus))
    chosen = _configuration(only(plan, request.only), request.configuration)
    return Work(request, study, plan, chosen, gpus, Folder(request.results))


def _configuration(plan: Sequence[Planned], key: str | None) -> list[Planned]:
    """Select the runs of one configuration, for a job of an array."""
    chosen = [run for run in plan if key in (None, run.configuration.key)]
    if not chosen:
        raise UsageError(f"--configuration {key}: the study has none; write its jobs again")
    return chosen


def over(database: Database) -> dict[Any, Run]:
    """Return the study's finished runs by `Run.place`."""
    return {run.place: run for run in database.runs()}


def carry_out(work: Work, watcher: Watcher) -> ExitCode:
    """Make all pending runs; return the exit code for the state of the study.

    Raises KeyboardInterrupt, also on SIGTERM and SIGHUP; finished runs are kept.
    """
    work.folder.make()
    with work.folder.held(), _interrupted_by_signals():
        end_all(work.folder.path)
        with Database(work.folder.path, create=True) as database:
            _begin(work, database, watcher)
            _run_all(work, database, watcher)
            return _outcome(work, database)


def _begin(work: Work, database: Database, watcher: Watcher) -> None:
    study = work.study
    before = database.study_file()
    row = StudyRow(
        study.title, study.question, study.repeats, study.recording, str(study.path.resolve())
    )
    if before and before != row.file:
        watcher.tell(
            f"{work.folder.path} is of {before} so far; of its runs, those that "
            f"{study.path} does not ask for are kept, and not shown"
        )
    database.set_study(row, configurations_of(work.plan))


def _run_all(work: Work, database: Database, watcher: Watcher) -> None:
    done = over(database)
    pending = work.pending(done)
    # Deleted first, so that an interrupted study resumes without --force or --retry.
    database.drop(done[each.place] for each in pending if each.place in done)
    if any(_is_scaled(planned) for planned in pending):
        watcher.tell("learning-rate is that of 1 GPU, times gpus; batch is that of each GPU")
    request = work.request
    environments = Environments(request.pythons or {}, request.installer, watcher.tell)
    runner = Runner(
        work.study,
        work.folder,
        database,
        environments,
        work.gpus,
        request.backend,
        request.nodes,
    )
    for number, planned in enumerate(pending, 1):
        watcher.begin(planned, work.label(planned), number, len(pending))
        watcher.end(runner.run(planned))


def _is_scaled(planned: Planned) -> bool:
    configuration = planned.configuration
    return configuration.gpus > 1 and "learning-rate" in configuration.settings


def _outcome(work: Work, database: Database) -> ExitCode:
    finished = over(database)
    states = {finished[planned.place].state for planned in work.chosen}
    if states == {"skipped"}:
        return ExitCode.MISSING_HERE
    if work.request.skip_missing:
        states.discard("skipped")
    return ExitCode.DONE if states == {"done"} else ExitCode.DONE_IN_PART


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt; what `nohup` ignores stays ignored."""
    before = {each: signal.getsignal(each) for each in _INTERRUPTING}
    for each, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(each, _interrupt)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


_PAGE: Final = "results.html"


def report(database: Database, telling: Telling) -> Summary:
    """Summarize the results, after measuring new recordings."""
    measure_runs(database, telling)
    return summarize(read_results(database))


def write_page(summary: Summary, folder: Path) -> Path:
    """Write the page into the folder of results; raises OSError with its name if that fails."""
    from gputrace.report.output_file import unfinished_file
    from gputrace.studies.page import render

    page = folder / _PAGE
    text = render(summary)
    try:
        with unfinished_file(page) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(page)) from None
    return page


def holds(summary: Summary) -> bool:
    """Return whether all recordings agree with their scripts' own reports."""
    return all(check.ok is not False for check in summary.checks)
