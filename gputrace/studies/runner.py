"""Execution of a study: its runs one after the other, and the page of their results."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from gputrace.collectors.launch import gputrace_command
from gputrace.collectors.processes import orphans_of
from gputrace.errors import ExitCode, UsageError
from gputrace.model.struct import Struct
from gputrace.studies.database import Database, Folder, Run, Settings, StudyHeader, StudyPlan
from gputrace.studies.framework_environments import (
    GENERATED,
    Environments,
    Unavailable,
    check_names,
    find_workloads,
    read_frameworks,
)
from gputrace.studies.plan import (
    Nodes,
    PlannedRun,
    Study,
    arguments_of,
    configurations_of,
    find_gpus,
    make_plan,
    only,
    read_study,
    run_label,
    why_not,
)
from gputrace.units import format_ns


class Cures(Protocol):
    """Changes of programs from outside, by the words of a study's ``cures``."""

    def check(self, cures: str) -> None: ...
    def variables(self, cures: str, folder: Path, recorded: bool) -> Mapping[str, str]: ...
    def unchanged(self, cures: str, folder: Path) -> str: ...


class Request(Struct, frozen=True):
    """Options of the command line."""

    study: Path
    output: Path
    """Folder of results."""
    workloads: Path | None = None
    """Folder of the scripts; None for that of the study, or its parent."""
    pythons: Mapping[str, Path] = {}
    installer: str | None = None
    only: Sequence[tuple[str, str]] = ()
    """Settings and values that select runs."""
    backend: str = "auto"
    retry: bool = False
    """Run failed runs again; with ``force``, all."""
    force: bool = False
    skip_missing: bool = False
    """Ignore skipped runs in the exit code."""
    nodes: Nodes = Nodes()
    configuration: str | None = None
    """Key of the only configuration to run; None for all."""
    planned_for: int | None = None
    """Number of GPUs of the target machine; None for this machine."""
    cures: Cures | None = None
    """Changes that ``cures`` of a study names; None where none can be made."""


class Watcher(Protocol):
    """Observer of a study's progress."""

    def log(self, line: str) -> None: ...
    def begin(self, planned: PlannedRun, label: str, number: int, total: int) -> None: ...
    def end(self, run: Run) -> None: ...


class Work(Struct, frozen=True):
    """Planned study, all of whose runs are in ``plan``, and the selected ones in ``chosen``."""

    request: Request
    study: Study
    plan: Sequence[PlannedRun]
    chosen: Sequence[PlannedRun]
    gpus: Sequence[str]
    """GPUs of this machine, as named in CUDA_VISIBLE_DEVICES."""
    folder: Folder

    def label(self, planned: PlannedRun) -> str:
        """Return the settings in which its configuration differs from the study's others."""
        return run_label(planned.configuration, configurations_of(self.plan))

    def pending(self, finished: Mapping[Any, Run]) -> list[PlannedRun]:
        """Return the selected runs still to be made, including those skipped before."""
        again = {"skipped", *(["failed"] if self.request.retry else [])}
        return [
            planned
            for planned in self.chosen
            if self.request.force
            or planned.key not in finished
            or finished[planned.key].state in again
        ]


def prepare(request: Request) -> Work:
    """Read and plan a study without writing anything; raises GputraceError if it is invalid."""
    study = read_study(request.study)
    frameworks = read_frameworks(find_workloads(request.study, request.workloads))
    check_names(request.study, (s["framework"] for s in study.combinations), frameworks)
    for name in request.pythons:
        if name not in frameworks:
            raise UsageError(f"--python {name}: no such framework; {', '.join(frameworks)} are")
    for settings in study.combinations:
        if request.cures is not None and "cures" in settings:
            request.cures.check(settings["cures"])
    count, key = request.planned_for, request.configuration
    gpus = find_gpus() if count is None else [str(number) for number in range(count)]
    plan = make_plan(study, frameworks, len(gpus))
    chosen = only(plan, request.only)
    chosen = [run for run in chosen if key in (None, run.configuration.key)]
    if not chosen:
        raise UsageError(f"--configuration {key}: the study has none; write its jobs again")
    return Work(request, study, plan, chosen, gpus, Folder(request.output))


def finished_runs(database: Database) -> dict[Any, Run]:
    """Return the study's finished runs by `Run.key`."""
    return {run.key: run for run in database.runs()}


def carry_out(work: Work, watcher: Watcher) -> ExitCode:
    """Make all pending runs; return the exit code for the state of the study.

    After a KeyboardInterrupt, finished runs are kept.
    """
    work.folder.make()
    with work.folder.held():
        end_all(work.folder.path)
        with Database(work.folder.path, create=True) as database:
            study, before = work.study, database.find_plan()
            file = str(study.path.resolve())
            row = StudyHeader(study.title, study.question, study.repeats, study.recording, file)
            if before is not None and before.study.file != row.file:
                watcher.log(
                    f"{work.folder.path} belongs to {before.study.file}; runs that "
                    f"{study.path} does not ask for are kept but not shown"
                )
            database.set_plan(StudyPlan(row, tuple(configurations_of(work.plan))))
            done = finished_runs(database)
            pending = work.pending(done)
            # Deleted first, so that an interrupted study resumes without --force or --retry.
            database.drop(done[each.key] for each in pending if each.key in done)
            asked = (run.configuration for run in pending)
            if any(each.gpus > 1 and "learning-rate" in each.settings for each in asked):
                watcher.log("learning-rate is that of 1 GPU, times gpus; batch is that of each GPU")
            request = work.request
            environments = Environments(request.pythons, request.installer, watcher.log)
            for number, planned in enumerate(pending, 1):
                watcher.begin(planned, work.label(planned), number, len(pending))
                watcher.end(_make_run(work, database, environments, planned))
            finished = finished_runs(database)
    states = {finished[planned.key].state for planned in work.chosen}
    if states == {"skipped"}:
        return ExitCode.MISSING_HERE
    if work.request.skip_missing:
        states.discard("skipped")
    return ExitCode.DONE if states == {"done"} else ExitCode.DONE_IN_PART


_SIDE: Final = 264
_SIDES: Final = {"inception3": 320}
"""Pixels of an image's side, larger than the model's input for random crops."""


def _make_run(
    work: Work, database: Database, environments: Environments, planned: PlannedRun
) -> Run:
    """Make one run and save it; after a KeyboardInterrupt, nothing of it is saved."""
    run, nodes = Run(*planned.key, "done"), work.request.nodes
    spreads = nodes.spreads(planned)
    reason = nodes.why_not(planned) if spreads else why_not(planned, len(work.gpus))
    if not reason:
        try:
            python = environments.find(planned.framework)
        except Unavailable as error:
            reason = str(error)
    if reason:
        return database.save(replace(run, state="skipped", why=reason))
    work.folder.clean()
    attempt, started = _Attempt(work, environments, planned, python), time.time_ns()
    try:
        attempt.go()
        result, why = read_result(attempt.out, planned.configuration.settings), ""
    except Failed as error:
        result, why = None, str(error)
    trace, log = attempt.keep()
    if not why and planned.recorded and trace is None:
        result, why = None, "gputrace record left no trace"
    return database.save(
        replace(
            run,
            state="failed" if why else "done",
            why=why,
            started_ns=started,
            ended_ns=time.time_ns(),
            exit_code=attempt.code,
            result=result,
            trace=trace,
            log=log,
        )
    )


class _Attempt:
    """Run in progress, and its files."""

    def __init__(
        self, work: Work, environments: Environments, planned: PlannedRun, python: Path
    ) -> None:
        self._work, self._environments, self._folder = work, environments, work.folder
        self._planned, self._python = planned, python
        self.code: int | None = None
        self._heading = ""
        underway, name = self._folder.underway, planned.name
        self._trace, self._log = underway / f"{name}.sqlite", underway / f"{name}.log"
        self.out, self.err = underway / f"{name}.out", underway / f"{name}.err"

    def go(self) -> None:
        """Run the script to its end; raises Failed if it fails or times out."""
        planned, nodes = self._planned, self._work.request.nodes
        several = nodes.spreads(planned)
        words = arguments_of(planned, self._images(), nodes.gpus if several else None)
        script = [str(self._python), str(planned.framework.script), *words]
        output = ("-o", str(self._trace), "--force", "--backend", self._work.request.backend)
        record = gputrace_command("record", *output, "--") if planned.recorded else []
        self._run(
            nodes.command(planned, record, script) if several else [*record, *script],
            self._work.study.timeout_ns,
        )
        if self.code:
            raise Failed(why_failed(self.code, self.out, self.err))
        cures, asked = self._work.request.cures, planned.configuration.settings.get("cures")
        if cures is not None and asked and (why := cures.unchanged(asked, self._folder.underway)):
            raise Failed(f"nothing was changed: {why}")

    def _run(self, command: list[str], timeout_ns: int | None = None) -> None:
        """Run a program to its end and store its exit code, 128 + N for signal N.

        A KeyboardInterrupt is forwarded to it and re-raised. Raises Failed after the timeout, and
        if the program cannot be started.
        """
        variables = self._variables()
        words = [*(f"{name}={value}" for name, value in variables.items()), *command]
        self._heading = f"$ {shlex.join(words)}\n"
        try:
            with self.out.open("wb") as out, self.err.open("wb") as err:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env={**os.environ, **variables, MARK: str(self._folder.path)},
                    # Ctrl-C at the terminal reaches this process, which forwards it.
                    start_new_session=True,
                )
            try:
                status = process.wait(None if timeout_ns is None else timeout_ns / 1e9)
                self.code = status if status >= 0 else 128 - status
            except subprocess.TimeoutExpired:
                self.code = 128 + signal.SIGTERM
                _ask_to_end(process, signal.SIGTERM)
                assert timeout_ns is not None
                raise Failed(f"ended after {format_ns(timeout_ns)}, the study's timeout") from None
            except KeyboardInterrupt:
                # In the background, where shells set SIGINT to be ignored, it takes SIGTERM.
                ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
                _ask_to_end(process, signal.SIGTERM if ignored else signal.SIGINT)
                raise
        except OSError as error:
            raise Failed(f"{command[0]}: {error.strerror}") from None
        finally:
            end_all(self._folder.path)

    def _variables(self) -> dict[str, str]:
        """Return the environment variables for the cures and the GPUs that the study selects."""
        settings, cures = self._planned.configuration.settings, self._work.request.cures
        changed: Mapping[str, str] = {}
        if cures is not None and settings.get("cures"):
            underway = self._folder.underway
            changed = cures.variables(settings["cures"], underway, self._planned.recorded)
        visible = settings.get("visible")
        if not visible:
            return {**changed}
        gpus = self._work.gpus
        names = [gpus[index] if index < len(gpus) else str(index) for index in visible]
        order = {} if "CUDA_VISIBLE_DEVICES" in os.environ else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return {**changed, **order, "CUDA_VISIBLE_DEVICES": ",".join(names)}

    def _images(self) -> str | None:
        """Return the folder of images for the run, generated if need be; None for other data."""
        settings = self._planned.configuration.settings
        form = settings.get("data")
        if form not in GENERATED:
            return None
        side, count = _SIDES.get(settings.get("model", ""), _SIDE), self._work.study.images
        folder = self._folder.images / f"{form}-{side}-{count}"
        if not (folder / "done.json").exists():
            self._environments.log(f"making images in {folder}")
            script = self._planned.framework.script.with_name("images.py")
            # Use gputrace's own Python: a framework's may lack what the script needs.
            words = [sys.executable, script, folder, "--count", count, "--size", side]
            self._run([*map(str, words), "--format", form, "--seed", "0"])
            if self.code:
                raise Failed(f"no images: {why_failed(self.code, self.out, self.err)}")
        return str(folder)

    def keep(self) -> tuple[str | None, str]:
        """Move the trace and the log into the results; return their relative paths."""
        with self._log.open("wb") as log:
            log.write(self._heading.encode("utf-8", "surrogateescape"))
            for path in (self.out, self.err):
                if path.exists():
                    with path.open("rb") as file:
                        shutil.copyfileobj(file, log)
                    path.unlink()
        traces, logs = self._folder.traces, self._folder.logs
        self._log.replace(logs / self._log.name)
        trace: Path | None = traces / self._trace.name
        if self._trace.exists():
            self._trace.replace(traces / self._trace.name)
        elif parts := [*self._trace.parent.glob(f"{self._trace.stem}.*{self._trace.suffix}")]:
            # The traces of a run's nodes are collected in a folder.
            trace = traces / self._trace.stem
            shutil.rmtree(trace, ignore_errors=True)
            trace.mkdir()
            for part in parts:
                part.replace(trace / part.name)
        else:
            trace = None
        name = None if trace is None else f"{traces.name}/{trace.name}"
        return name, f"{logs.name}/{self._log.name}"


MARK: Final = "GPUTRACE_BENCH"
"""Variable in the environment of all processes of a run: the folder of results."""
_GRACE_S: Final = 10.0
"""Time for a program to exit after a signal."""
_GONE_S: Final = 5.0
_LOOK_S: Final = 0.05
_LOOKS_FOR_NONE: Final = 2


def _ask_to_end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(number)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)


def end_all(folder: Path) -> None:
    """Kill all remaining processes of runs in a folder of results."""
    deadline, looks = time.monotonic() + _GONE_S, 0
    # Look twice: a process being started has no environment for a moment.
    while looks < _LOOKS_FOR_NONE and time.monotonic() < deadline:
        left = orphans_of(folder, MARK)
        looks = 0 if left else looks + 1
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if looks < _LOOKS_FOR_NONE:
            time.sleep(_LOOK_S)


_TAIL: Final = 1 << 20
"""Bytes read from the end of a log."""
_LONGEST_QUOTE: Final = 200
"""Maximum characters quoted of another program's line."""

_ERROR: Final = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b(: .*)?")
_WARNING: Final = re.compile(
    r"^\S+:\d+: \w*Warning: .*\n"
    r"(?:(?:(?!Traceback |\S+:\d+: \w*Warning: )\S.*\n){0,20}[ \t]+\S.*(?:\n|\Z))?",
    re.MULTILINE,
)
"""Python warning, up to the indented line of source that ends it."""
_OURS: Final = "gputrace: "

_SAME: Final = ("model", "batch", "gpus", "update", "layout")
"""Settings repeated in a result, where they must be those of the run."""


class Failed(Exception):
    """Error for a run without a result; the message is one line with the reason."""


class _Result(msgspec.Struct):
    """Required fields of a result; others are kept too."""

    framework: str
    model: str
    gpus: int
    batch: int
    steps: int
    samples_per_second: float


def read_result(out: Path, settings: Settings) -> dict[str, Any]:
    """Parse the result at the end of a script's output; raises Failed if there is none.

    Threads of a framework may print more lines after it.
    """
    lines = _last_lines(out)
    line = next((line for line in lines if line.startswith("{")), next(iter(lines), ""))
    if not line:
        raise Failed("printed no result")
    try:
        # A loss of NaN is invalid JSON; it becomes None.
        result: dict[str, Any] = json.loads(line, parse_constant=lambda _: None)
        msgspec.convert(result, _Result)
    except json.JSONDecodeError:
        raise Failed(f"its last line is not a result: {_short(line)}") from None
    except msgspec.ValidationError as error:
        raise Failed(f"its result lacks something: {str(error).replace('`', '')}") from None
    for name in _SAME:
        reported, asked = result.get(name), settings.get(name)
        if None not in (reported, asked) and reported != asked:
            raise Failed(f"its result says {name} {reported}, but {asked} was asked for")
    return result


def why_failed(code: int, out: Path, err: Path) -> str:
    """Describe a failure as ``exit code 1: ValueError: no such model``."""
    if code == ExitCode.RECORDING_FAILED:
        line = _short(next((line for line in _last_lines(err) if line.startswith(_OURS)), ""))
    else:
        line = _problem(err) or _problem(out)
    if line.startswith("{"):
        line = "after it had printed its result"
    ending = f"exit code {code}"
    if code > 128:
        with suppress(ValueError):
            ending = f"ended by {signal.Signals(code - 128).name}"
    return f"{ending}: {line}" if line else ending


def _problem(path: Path) -> str:
    """Return the most informative line: the last one that names an error, else the last one.

    Launchers print boxes below the program's error, and `gputrace record` prints its summary.
    """
    lines = [line for line in _last_lines(path, _WARNING) if not line.startswith(_OURS)]
    errors = (line for line in lines if _ERROR.fullmatch(line))
    return _short(next(errors, "") or next(iter(lines), ""))


def _last_lines(path: Path, left_out: re.Pattern[str] | None = None) -> list[str]:
    """Return the non-empty lines at the end of a file, last one first, without some text."""
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL))
        text = file.read().decode("utf-8", "replace")
    text = left_out.sub("", text) if left_out else text
    return [line.strip() for line in reversed(text.splitlines()) if line.strip()]


def _short(line: str) -> str:
    plain = "".join(letter for letter in line if letter.isprintable())
    return plain if len(plain) <= _LONGEST_QUOTE else f"{plain[: _LONGEST_QUOTE - 1]}…"
