"""A recording from its preparation to the trace: folder, environment, run, growth, merge."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gputrace.collectors import job_tasks, unreached
from gputrace.collectors.backend import (
    HOW_TO_BUILD,
    Backend,
    Limits,
    Merged,
    Plan,
    bytes_in,
    has_driver,
)
from gputrace.collectors.backends import HOST, backend_named, choose
from gputrace.collectors.backends.cupti import CUPTI
from gputrace.collectors.exit_watch import ExitWatch
from gputrace.collectors.hang_watch import Hangs
from gputrace.collectors.launch import Launch, find_program, load_numpy
from gputrace.collectors.masking import masked
from gputrace.collectors.neighbours import CoreNeighbours
from gputrace.collectors.nvml import Sampler
from gputrace.collectors.spool import CHUNK, HEADER
from gputrace.errors import GputraceError, MissingError, UsageError
from gputrace.native import built
from gputrace.store import sqlite_security
from gputrace.units import format_ranges

if TYPE_CHECKING:
    from gputrace.collectors.slow_steps import SlowSteps


def record(
    prepared: Prepared,
    log: Callable[[str], object],
    report_size: Callable[[Size], None],
    from_bytes: int,
    explain: Callable[[Path], list[str]] = lambda _: [],
) -> int:
    """Run the program to its end; return its exit code.

    ``log`` takes lines for the user; ``report_size`` is called when the recording has
    ``from_bytes``, and each time its size has doubled; ``explain`` makes lines for the user of a
    report of a hang.

    Raises CannotRun if the program does not start, MissingError if its recorder does not.
    """
    plan, team, task = prepared.plan, prepared.team, prepared.task
    meta = job_tasks.describe(masked(prepared.command), prepared.backend.name, task)
    job_tasks.write_meta(prepared.folder, meta)
    if prepared.backend is HOST and (names := _given(plan, *_NOT_BY_HOST)):
        why = "without a GPU to record, the host is recorded from start to end"
        log(f"{names}: ignored: {why}; `gputrace analyze --steps` takes a part")
    hangs: list[Hangs] = []
    if plan.hang_ns:
        watch = Hangs(prepared.folder, plan.output, plan.hang_ns, log, explain)
        team.let_one("hangs", lambda: hangs.append(watch))
    sampler = None
    # Of tasks that share no folder, the first one samples the GPUs.
    if plan.nvml and has_driver() and (task is None or team.shares or task.local_rank == 0):
        sampler = Sampler()
        team.let_one("nvml", partial(sampler.start, prepared.folder, limits=plan.limits))
    exits = ExitWatch(prepared.folder)
    team.let_one("exits", exits.start)
    try:
        growth = GrowthWatch(prepared.folder, from_bytes, report_size)
        with _watched(prepared, log, growth, hangs) as meanwhile:
            code = prepared.backend.run(prepared.launch, prepared.folder, log, meanwhile)
        if task is None:
            meta = job_tasks.read_meta(prepared.folder) | {"exit_code": str(code)}
            # The program may have removed it, or filled the disk: what was recorded comes first.
            with suppress(OSError):
                job_tasks.write_meta(prepared.folder, meta)
        for watch in hangs:
            watch.finish(code)
        return code
    finally:
        exits.stop()
        if sampler is not None:
            sampler.stop()
            if sampler.notice:
                log(sampler.notice)


@contextmanager
def _watched(
    prepared: Prepared, log: Callable[[str], object], growth: GrowthWatch, hangs: Sequence[Hangs]
) -> Iterator[Callable[[], None]]:
    """Yield the function to call now and then while the program runs."""
    plan, folder, team = prepared.plan, prepared.folder, prepared.team
    bounds = LimitWatch(folder, plan.limits, log)
    reach = unreached.ReachWatch(folder, prepared.command)
    slow: list[SlowSteps] = []
    looks = [growth.look_now_and_then, bounds.look, reach.look_now_and_then]
    team.let_one("cores", lambda: looks.append(CoreNeighbours(folder).look))
    if plan.when_slow:
        load_numpy()
        from gputrace.collectors.slow_steps import SlowSteps

        steps = SlowSteps(folder, plan.output, plan.when_slow, plan.limits.longest_ns, log)
        team.let_one("slow", lambda: slow.append(steps))

    def look() -> None:
        for each in (*looks, *(steps.look for steps in slow), *(hang.look for hang in hangs)):
            each()

    yield look
    for steps in slow:
        steps.finish()
    if notice := reach.notice():
        job_tasks.write_meta(folder, job_tasks.read_meta(folder) | {"unreached": notice})


def conclude(prepared: Prepared, has_run: bool = True) -> Merged | None:
    """Make the trace if this recorder is the last one of its machine; else return None.

    Nothing is made if the program did not start and nobody else recorded. Raises InputError if
    nothing can be read, OSError if the trace cannot be written; the folder stays.
    """
    team = prepared.team
    with team.leave() as is_last:
        if not is_last:
            return None
        merged = None
        if has_run or len(job_tasks.ranks_in(team.folder)) > 1:
            merged = finish(team.folder, prepared.plan.output, keep=True)
        if merged is None or not merged.unread:
            team.dissolve()
        return merged


def can_be_read_meanwhile(folder: Path) -> bool:
    """Return whether processes write as they go; raises MissingError for a plugin that is gone."""
    return backend_named(job_tasks.read_meta(folder).get("backend", CUPTI.name)).shares


def finish(folder: Path, output: Path, keep: bool = False) -> Merged:
    """Make the trace of a folder, and remove the folder unless it has unreadable files.

    Raises InputError if nothing in it can be read, OSError if the trace cannot be written; the
    folder stays then.
    """
    load_numpy()
    from gputrace.store.writer import remove_unfinished

    job_tasks.assert_ours(folder)
    meta = job_tasks.read_meta(folder)
    if "world_size" in meta:
        meta["ranks"] = format_ranges(job_tasks.ranks_in(folder))
    backend = backend_named(meta.get("backend", CUPTI.name))
    remove_unfinished(output)
    merged = backend.merge(folder, output, meta)
    if not keep and not merged.unread:
        shutil.rmtree(folder)
    notes = merged.notes
    if backend is HOST:
        what = f" ({', '.join(merged.of_host)})" if merged.of_host else ""
        notes += (f"only the host was recorded{what}, nothing of a GPU",)
    if merged.unread:
        notes += (f"{folder} is kept, for what could not be read",)
    why = "" if merged.steps else meta.get("unreached", "")
    return replace(merged, notes=notes, unreached=why)


HOOKS: Final = unreached.HOOKS


@dataclass(frozen=True, slots=True)
class Prepared:
    """Recording that is ready to start."""

    plan: Plan
    command: tuple[str, ...]
    """The program as the user wrote it."""
    backend: Backend
    team: job_tasks.Team
    """The recorders of this machine that write one trace together."""
    launch: Launch
    task: job_tasks.Task | None
    traces: str
    """Shell pattern of the traces of all machines."""

    @property
    def folder(self) -> Path:
        """Folder that the processes write into; it exists."""
        return self.team.folder


def unused(output: Path, command: Sequence[str]) -> Path:
    """Return the output, numbered as in ``trace-2.sqlite`` where other jobs' traces have its name.

    All machines of a job get the same number if they see the same files.
    """
    task = job_tasks.find_task(os.environ)
    numbered = output
    for number in count(2):
        name = job_tasks.name_output(
            str(numbered), task, command, os.environ, socket.gethostname(), os.getpid()
        )
        job = "" if task is None else task.job
        if all(_is_of(Path(path), job) for path in glob(name.pattern)):
            break
        numbered = output.with_stem(f"{output.stem}-{number}")
    return numbered


def prepare(plan: Plan, command: Sequence[str], force: bool) -> Prepared:
    """Choose the backend and make the folder.

    Raises CannotRun if there is no such program, UsageError if something is in the way,
    MissingError if the requested backend cannot work here.
    """
    find_program(command[0])
    backend = choose(plan, os.environ)
    if not backend.heeds_long and (names := _given(plan, *_BY_CUPTI_ALONE)):
        raise UsageError(f"{names}: not with --backend {backend.name}; record with --backend cupti")
    task = job_tasks.find_task(os.environ)
    host, pid = socket.gethostname(), os.getpid()
    name = job_tasks.name_output(str(plan.output), task, command, os.environ, host, pid)
    team, output = _gather(name, task, backend, force)
    plan = replace(plan, output=output)
    try:
        environment = with_hooks(plan, team.folder, os.environ)
        launch = backend.launch(plan, team.folder, keep_hooks(command), environment)
    except GputraceError:
        with team.leave() as is_last:
            if is_last:
                team.dissolve()
        raise
    return Prepared(plan, tuple(command), backend, team, launch, task, name.pattern)


_OF_GPUS: Final = ("--api", "--graph-nodes", "--hw-trace")
_NOT_BY_HOST: Final = ("--steps", "--delay", "--duration", "--profiler-api", "--every", *_OF_GPUS)
_BY_CUPTI_ALONE: Final = ("--every", "--keep", "--max-size", *_OF_GPUS)


def _given(plan: Plan, *options: str) -> str:
    """Return the given options that a plan sets, for a message."""
    given = {
        "--steps": plan.steps is not None,
        "--delay": plan.delay_ns > 0,
        "--duration": plan.duration_ns > 0,
        "--profiler-api": plan.profiler_api,
        "--every": plan.every is not None,
        "--keep": plan.limits.segment_ns > 0,
        "--max-size": plan.limits.max_bytes > 0,
        "--api": plan.api != "all",
        "--graph-nodes": plan.graph_nodes > 0,
        "--hw-trace": plan.hw_trace,
    }
    return ", ".join(option for option in options if given[option])


def _gather(
    name: job_tasks.Name, task: job_tasks.Task | None, backend: Backend, force: bool
) -> tuple[job_tasks.Team, Path]:
    """Join the recorders of this machine; return the membership, and the trace to write."""
    output = name.path
    if task is not None and not name.is_tasks_own:
        if backend.shares and not _is_of(output, task.job):
            folder = spool_of(output, force)
            with suppress(job_tasks.CannotShare):
                return job_tasks.Team(folder, task.job, task.rank, task.local_tasks), output
        output = job_tasks.of_task(output, task)
    return job_tasks.Team(spool_of(output, force), rank=0 if task is None else task.rank), output


def spool_of(output: Path, force: bool = False) -> Path:
    """Return the folder of a trace's recording; raise UsageError if the trace exists."""
    if output.exists() and not (force and output.is_file()):
        raise UsageError(f"{output}: exists; name another with -o, or give --force")
    return output.with_name(f"{output.name}.spool")


def _is_of(output: Path, job: str) -> bool:
    """Return True if tasks of the job have already written the trace."""
    try:
        with closing(sqlite_security.connect(f"{output.absolute().as_uri()}?mode=ro")) as trace:
            sql = "SELECT value FROM GPUTRACE_META WHERE name = 'job'"
            return bool(job) and trace.execute(sql).fetchone() == (job,)
    except sqlite3.Error:
        return False


def with_hooks(plan: Plan, folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the inherited environment with what loads the hooks into the program's Python."""
    changed = dict(inherited) | {"GPUTRACE_DIR": str(folder.absolute())}
    changed.pop("GPUTRACE_ARM", None)
    library = built("_ticker") if plan.python is not False else None
    if plan.python is None and library is not None:
        changed["GPUTRACE_LINES"] = str(library)
    if plan.python:
        if library is None:
            raise MissingError(
                "--python needs a part of gputrace that was not built: there was no C compiler; "
                f"{HOW_TO_BUILD}, or record without --python"
            )
        changed["GPUTRACE_PYTHON"] = str(library)
    if (HOOKS / "sitecustomize.py").exists():
        paths = [str(HOOKS), inherited.get("PYTHONPATH", "")]
        changed["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if plan.hang_ns:
        changed["GPUTRACE_HANG"] = str(plan.hang_ns)
    if plan.memory:
        changed["GPUTRACE_MEMORY"] = str(plan.output.absolute().with_suffix(""))
    if plan.steps is not None:
        changed["GPUTRACE_STEPS"] = f"{plan.steps[0]}:{plan.steps[1]}"
    if plan.every is not None and plan.every.in_steps:
        changed["GPUTRACE_EVERY"] = f"{plan.every.distance}:{plan.every.length}"
    return changed | plan.limits.variables()


def keep_hooks(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command whose ``env PYTHONPATH=…`` has the hooks, too; others as they are."""
    words, name = list(command), "PYTHONPATH="
    if Path(words[0]).name == "env":
        for at, word in enumerate(words[1:], 1):
            if not word.startswith("-") and "=" not in word:
                break
            if word.startswith(name):
                given = word.removeprefix(name)
                words[at] = name + os.pathsep.join(filter(None, [str(HOOKS), given]))
    return tuple(words)


OF_A_PROCESS: Final = re.compile(r"\.(\d+)(?:[-.]\d+)?(?:~\d+)?\.(spool|host)")


class LimitWatch:
    """Enforcement of a ring for ended processes, and report of a reached limit."""

    def __init__(self, folder: Path, limits: Limits, log: Callable[[str], object]) -> None:
        self._folder, self._limits, self._log = folder, limits, log
        self._began, self._is_reported = time.monotonic(), False

    def look(self) -> None:
        """Check all files, at the cost of a stat or a short read of each."""
        if self._limits.segment_ns:
            prune(self._folder, self._limits.kept_ns, time.time_ns())
        if self._limits.max_bytes and not self._is_reported and has_stopped(self._folder):
            self._is_reported = True
            after = time.monotonic() - self._began
            self._log(
                f"the recording reached --max-size after {after:,.0f} s; the program "
                "continues unrecorded"
            )


def prune(folder: Path, older_ns: int, now: int) -> None:
    """Remove files without a writer that were last written over ``older_ns`` ago."""
    by_process: dict[tuple[str, str], list[tuple[int, Path]]] = defaultdict(list)
    # Not by iterdir, which raises for a folder that the program has removed.
    for path in folder.glob("*"):
        if match := OF_A_PROCESS.search(path.name):
            with suppress(FileNotFoundError):
                by_process[match[1], match[2]].append((path.stat().st_mtime_ns, path))
    for (pid, _), files in by_process.items():
        if Path("/proc", pid).exists():
            # The newest one may go on after a long silence.
            files.remove(max(files))
        for changed, path in files:
            if now - changed > older_ns:
                path.unlink(missing_ok=True)


def has_stopped(folder: Path) -> bool:
    """Return True if the first chunk of any process, FULL, says that it has stopped writing."""
    for path in (*folder.glob("*.spool"), *folder.glob("*.host")):
        with suppress(OSError), path.open("rb") as file:
            file.seek(HEADER.size + CHUNK.size)
            moment = file.read(8)
            if len(moment) == 8 and any(moment):
                return True
    return False


_BETWEEN_LOOKS_NS: Final = 4_000_000_000


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of a recording's folder, and nanoseconds since the recording began."""

    bytes: int
    elapsed_ns: int

    @property
    def rate(self) -> float:
        """Mean bytes per second."""
        return self.bytes / max(self.elapsed_ns, 1) * 1e9


class GrowthWatch:
    """Watch that reports the size at a number of bytes, and each time it has doubled."""

    def __init__(
        self,
        folder: Path,
        first: int,
        report: Callable[[Size], None],
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._folder, self._next, self._report, self._now = folder, first, report, now
        self._began = self._looked = now()

    def look_now_and_then(self) -> None:
        """Check the size if the last check was some seconds ago."""
        if self._now() - self._looked >= _BETWEEN_LOOKS_NS:
            self._looked = self._now()
            self.look()

    def look(self) -> None:
        """Check the size, at the cost of a stat of each file."""
        held = bytes_in(self._folder)
        if held < self._next:
            return
        while self._next <= held:
            self._next *= 2
        self._report(Size(held, self._now() - self._began))
