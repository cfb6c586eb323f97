"""A study from its file to its results: what `gputrace bench` does, in order."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from gputrace.bench.cards import find_gpus
from gputrace.bench.database import Database, Run, StudyRow
from gputrace.bench.environments import Environments
from gputrace.bench.folder import Folder
from gputrace.bench.frameworks import check_names, find_workloads, read_frameworks
from gputrace.bench.nodes import Nodes
from gputrace.bench.plan import Planned, configurations_of, label, make_plan, only
from gputrace.bench.processes import end_all
from gputrace.bench.runner import Runner
from gputrace.bench.study import Study, read_study
from gputrace.errors import ExitCode, UsageError

_INTERRUPTING: Final = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for.

    Attributes:
        output: the folder of results; None for that of the study's name, here.
        workloads: the folder of the scripts; None for that of the study, or the one above.
        only: settings and values; runs that have others wait.
        retry: whether what failed is run again; ``force``: whether everything is.
        skip_missing: whether all may count as done where some runs were skipped.
        nodes: the machines that it may use.
        configuration: key of the only one to run; None for all.
        planned_for: GPUs of the machine that it will run on; None for this one.
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
        """The folder of results."""
        return self.output or Path(f"{self.study.stem}.bench")


class Watcher(Protocol):
    """Who is told how it goes."""

    def tell(self, line: str) -> None:
        """A line on something that takes long."""

    def begin(self, planned: Planned, label: str, number: int, total: int) -> None:
        """A run begins; numbers are from 1."""

    def end(self, run: Run) -> None:
        """The run that began last is over."""


@dataclass(frozen=True, slots=True)
class Work:
    """A study that was read and planned.

    Attributes:
        plan: all runs of the study.
        chosen: those that are asked for now.
        gpus: of this machine, as CUDA_VISIBLE_DEVICES names them.
    """

    request: Request
    study: Study
    plan: Sequence[Planned]
    chosen: Sequence[Planned]
    gpus: Sequence[str]
    folder: Folder

    def label(self, planned: Planned) -> str:
        """What tells its configuration from the others of the study."""
        return label(planned.configuration, configurations_of(self.plan))

    def pending(self, over: Mapping[Any, Run]) -> list[Planned]:
        """The chosen runs that are still to be made, with those that could not be made before."""
        again = {"skipped", *(["failed"] if self.request.retry else [])}
        return [
            planned
            for planned in self.chosen
            if self.request.force or planned.place not in over or over[planned.place].state in again
        ]


def prepare(request: Request) -> Work:
    """Reads and plans, and writes nothing; raises GputraceError for what makes no sense."""
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
    """The runs of one configuration, as a job of an array asks for it."""
    chosen = [run for run in plan if key in (None, run.configuration.key)]
    if not chosen:
        raise UsageError(f"--configuration {key}: the study has none; write its jobs again")
    return chosen


def over(database: Database) -> dict[Any, Run]:
    """The study's runs that are over, by their place."""
    return {run.place: run for run in database.runs()}


def carry_out(work: Work, watcher: Watcher) -> ExitCode:
    """Makes all runs that are still to be made; how much of the study is done then.

    A KeyboardInterrupt comes through, also for SIGTERM; what is over stays.
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
    # Forgotten at once, so that one who is interrupted goes on without --force or --retry.
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
    found = over(database)
    states = {found[planned.place].state for planned in work.chosen}
    if states == {"skipped"}:
        return ExitCode.MISSING_HERE
    if work.request.skip_missing:
        states.discard("skipped")
    return ExitCode.DONE if states == {"done"} else ExitCode.DONE_IN_PART


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Whoever asks us to end is answered as Ctrl+C is; what `nohup` ignores stays ignored."""
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
