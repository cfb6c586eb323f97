"""Short runs of a program: changed by the hooks, stopped after some steps, and measured by them."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from time import monotonic, time_ns
from typing import Any, Final

import msgspec

from gputrace.collectors.launch import gputrace_command
from gputrace.collectors.processes import orphans_of
from gputrace.collectors.session import HOOKS, keep_hooks
from gputrace.collectors.unreached import ReachWatch
from gputrace.errors import UsageError
from gputrace.studies.runner import MARK, Failed, end_all, why_failed
from gputrace.trials.cures import Candidate, read_candidates

TRACKERS: Final = {
    "WANDB_MODE": "offline",
    "MLFLOW_TRACKING_URI": "file:{folder}/mlruns",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "COMET_START_ONLINE": "0",
    "WANDB_DIR": "{folder}",
}
"""Variables that keep trackers of experiments from counting a trial as a run."""
_QUIETER: Final = {"WANDB_MODE": "disabled", "NEPTUNE_MODE": "debug"}
"""Values of the person's own by which a tracker does even less."""
FAILURE: Final = "failed: "
"""Prefix of the reason of a cure whose hook raised an error."""
WHOLE: Final = "not by turns: "
"""Prefix of the reason of a cure that could not be switched within a run."""
_LOOK_S: Final = 0.05
_GRACE_S: Final = 20.0
"""Seconds that a program gets to end after its last step, and its recorder at least to write the
trace after that."""
_SIGNAL_S: Final = 5.0
"""Seconds between SIGTERM and SIGKILL."""
_FEWEST_STEPS: Final = 5
_ORDERS: Final = 16
"""Orders of turns, each for two rounds: more rounds than a run has."""


@dataclass(frozen=True, slots=True)
class Change:
    """Call whose argument a cure changed, and where the program makes it."""

    cure: str
    call: str
    """Name of the function or class; empty for a setting."""
    argument: str
    position: int
    """Place of the argument in the call, from 0; -1 where it is given by name or not at all."""
    old: str
    new: str
    file: str
    line: int
    outer: tuple[str, str, int] | None = None
    """Class of the program whose constructor makes the call, and where the program calls that."""


class Spent(Exception):
    """The time for a run is over before it has an answer; the message says why, if known."""


class _Left(msgspec.Struct):
    """Content of the file that the hooks of one process leave."""

    pid: int
    host: str
    rank: int | None
    world_size: int | None
    ends: list[int]
    losses: list[float | None]
    rounds: list[list[int]]
    batches: list[list[int]]
    stopped: bool
    changes: list[Change]
    reasons: dict[str, str]
    main: str
    versions: dict[str, str]
    gpu: str
    buffered: int
    threads: int
    has: list[str] = []


@dataclass(frozen=True, slots=True)
class Turn:
    """Mean step of the program as it is, and with a cure, in the same round."""

    bare_ns: float
    cured_ns: float
    losses: tuple[float, float] | tuple[()] = ()
    """Mean losses of the two, of the first rank; empty where the hooks saw none."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured run: the slowest rank's mean step, and what else the processes reported."""

    step_ns: float
    steps: int
    """Steps measured."""
    ranks: int
    losses: tuple[float, ...]
    """Losses of the measured steps, of the first rank; empty where the hooks saw none."""
    changes: tuple[Change, ...]
    reasons: Mapping[str, str]
    """Why a cure changed nothing, by its id."""
    main: str
    """Path of the program."""
    versions: Mapping[str, str]
    gpu: str
    buffered: int
    """Batches that loaders may have ready before the first step."""
    seconds: float
    ended: bool
    """True if the program ended by itself after its last step, without a signal of ours."""
    made: int = 0
    """Steps made, with those of the warm-up."""
    code: int | None = None
    """Exit code, 128 + N for signal N, of a program that had no more steps to make; None for one
    that was stopped."""
    failure: str = ""
    """That code with the program's error; empty for 0 and None."""
    turns: tuple[tuple[Turn, ...], ...] = ()
    """Rounds of each cure that had turns within the run."""
    start_s: float = 0.0
    """Seconds to the end of the first step."""
    threads: int = 0
    """Threads of torch for mathematics; 0 without torch."""
    has: frozenset[str] = frozenset()
    """Words of `Cure.needs` for all that the program has."""
    lengths_ns: tuple[int, ...] = ()
    """Lengths of the measured steps of the slowest rank."""


@dataclass(frozen=True, slots=True)
class Turns:
    """Cures that hooks switch off and on by turns in a run."""

    each: tuple[Candidate, ...]
    stretch: int
    """Steps of a turn."""
    passed: int = 1
    """Steps at its beginning that do not count."""

    @property
    def asked(self) -> dict[str, Any]:
        """Return the turns as the hooks take them."""
        return {
            "turns": [[setting.cure.id for setting in each.settings] for each in self.each],
            "orders": self.orders,
            "stretch": self.stretch,
            "passed": self.passed,
        }

    @property
    def orders(self) -> list[list[int]]:
        """Return the order of the turns of each round, 0 for the program as it is.

        It is random, as a validation every few turns would otherwise always count for the same
        cure. Every second round reverses the one before it, to cancel drift.
        """
        orders = []
        for number in range(_ORDERS):
            order = list(range(len(self.each) + 1))
            Random(number).shuffle(order)
            orders += [order, order[::-1]]
        return orders

    def measured(self, left: Sequence[_Left], warmup: int) -> tuple[tuple[Turn, ...], ...]:
        """Return the rounds of each candidate, by the slowest rank of a turn."""
        stretch, passed = self.stretch, self.passed
        # A process of a few steps, as for a last evaluation, has no part in the turns.
        least = warmup + (len(self.each) + 1) * stretch
        left = [each for each in left if len(each.ends) >= least]
        whole = min(((len(each.ends) - warmup) // stretch for each in left), default=0)
        means = [max(self._step(each, warmup, turn) for each in left) for turn in range(whole)]
        first = min(left, key=lambda each: each.rank or 0, default=None)
        losses = [
            _mean_loss(first.losses[warmup + at + passed : warmup + at + stretch] if first else [])
            for at in range(0, whole * stretch, stretch)
        ]
        pairs: list[list[Turn]] = [[] for _ in self.each]
        at = 0
        for order in first.rounds if first else []:
            if at + len(order) > whole:
                break
            bare = at + order.index(0)
            for cured, turn in enumerate(order, at):
                if turn:
                    seen = losses[bare], losses[cured]
                    both = () if None in seen else seen
                    pairs[turn - 1].append(Turn(means[bare], means[cured], both))  # type: ignore[arg-type]
            at += len(order)
        return tuple(map(tuple, pairs))

    def _step(self, left: _Left, warmup: int, turn: int) -> float:
        """Return the mean step of a turn, corrected to as many ready batches at its end as before.

        Between its turns a loader fills its buffer, and a turn that drains it is faster than any
        run of that loader. What counts is how many batches were made.
        """
        at = warmup - 1 + turn * self.stretch
        steps = self.stretch - self.passed
        made = float(steps)
        counted = [each for each in left.batches[2 * turn : 2 * turn + 2] if each]
        if len(counted) == 2:
            (ready, taken), (ready_later, taken_later) = counted
            # A step that accumulates gradients takes several.
            taken = max(taken_later - taken, 1)
            made = steps * (taken + ready_later - ready) / taken
        return (left.ends[at + self.stretch] - left.ends[at + self.passed]) / max(made, steps / 2)


def _chooser(folder: Path, choose: Callable[[], Sequence[int]]) -> Callable[[], None]:
    """Return a function that checks whether a round of turns is over, and then tells the program
    the turns of the following rounds.
    """
    seen: list[int] = []

    def look() -> None:
        with suppress(Failed, OSError):
            changed = [path.stat().st_mtime_ns for path in folder.glob("*.turns")]
            if changed == seen:
                return
            seen[:] = changed
            ranks = max((each.world_size or 1 for each in _left_in(folder, "turns")), default=1)
            # Other machines would not see it, and ranks would not all see it in the same round.
            if ranks <= len(changed):
                kept = list(choose())
                if len(changed) == 1 or not kept:
                    (folder / "going.new").write_text(json.dumps(kept))
                    (folder / "going.new").rename(folder / "going")

    return look


@dataclass(frozen=True, slots=True)
class Program:
    """Program to try cures on."""

    command: tuple[str, ...]
    workdir: Path | None = None
    """Folder of which each run gets a copy; None to run in the current one."""
    keep_trackers: bool = False
    timeout_s: float = 600.0
    """Longest time of one run."""
    tick: Callable[[], object] = lambda: None
    """Callback during a run."""

    def run(
        self,
        candidate: Candidate,
        warmup: int,
        steps: int,
        record: Path | None = None,
        turns: Turns | None = None,
        going: Callable[[Measured], Sequence[int]] | None = None,
        left_s: float = math.inf,
        sign_s: float = math.inf,
        enough_s: float = math.inf,
    ) -> Measured:
        """Run it to the end of its last step to measure.

        Args:
            candidate: cures to apply.
            warmup: steps to pass first.
            steps: steps to measure.
            record: trace to write, by `gputrace record`.
            turns: cures that are on by turns with the program as it is; None to leave all on.
            going: asked after each round of turns, with what is measured so far, which turns, from
                1, those to come have; with none it ends. Of several ranks, all have them all.
            left_s: time after which it is ended.
            sign_s: time after which it is ended if it has measured nothing by then.
            enough_s: time after which it is ended once it has made a few steps, if it is a
                single process; as many of them are passed as that leaves.

        Raises Failed where it fails, or measures no steps; Spent where the time is over before.
        """
        with tempfile.TemporaryDirectory(prefix="gputrace-try-") as name:
            folder = Path(name).resolve()
            began, clock_ns = monotonic(), time_ns()
            asked = {
                "warmup": warmup,
                "steps": steps,
                "folder": str(folder),
                "recorded": record is not None,
                "keep": self.keep_trackers,
                **({"until": clock_ns + round(1e9 * enough_s)} if enough_s < math.inf else {}),
                **(turns.asked if turns else {}),
            }

            def read(code: int | None, kind: str = "try") -> Measured:
                left = _left_in(folder, kind)
                passed = warmup
                if enough_s < math.inf:
                    made = max((len(each.ends) for each in left), default=0)
                    passed = min(warmup, max(made - _FEWEST_STEPS, 1))
                run = self._read(folder, code, passed, monotonic() - began, kind)
                started = min(each.ends[0] for each in left if each.ends)
                return replace(
                    run,
                    turns=turns.measured(left, warmup) if turns else (),
                    start_s=max(started - clock_ns, 0) / 1e9,
                )

            spool = record.with_name(f"{record.name}.spool") if record else folder / "spool"
            watch = ReachWatch(spool, self.command)

            def look_for_a_sign() -> None:
                late = monotonic() > began + sign_s
                if late and not any(any(folder.glob(f"*.{kind}")) for kind in ("turns", "try")):
                    raise Spent

            looks = [self.tick, watch.look_now_and_then, look_for_a_sign]
            if turns and going:
                looks.append(_chooser(folder, lambda: going(read(None, "turns"))))
            try:
                code = self._go(folder, candidate, asked, record, looks, began + left_s)
            except Spent:
                with suppress(Failed):
                    return read(None, "turns")
                if why := watch.notice():
                    raise Failed(why) from None
                if _left_in(folder, "begun"):
                    raise
                raise Spent(_why_no_steps([], warmup)) from None
            if code == 0 and not _left_in(folder) and (why := watch.notice()):
                raise Failed(why)
            return read(code)

    def _go(
        self,
        folder: Path,
        candidate: Candidate,
        asked: Mapping[str, Any],
        record: Path | None,
        looks: Sequence[Callable[[], object]],
        until: float,
    ) -> int | None:
        """Return the exit code, -N for signal N; None where it had to be ended after its steps."""
        command = list(self.command)
        if record is not None:
            # What the statements take is known by more samples; nothing is measured in this run.
            recorder = gputrace_command("record", "--python", "--force", "-o", str(record), "--")
            command = [*recorder, *command]
        where = None if self.workdir is None else _copy(self.workdir.resolve(), folder)
        environment = dict(os.environ) | {MARK: str(folder)}
        if not self.keep_trackers:
            kept = {name for name, value in _QUIETER.items() if environment.get(name) == value}
            told = {name: text for name, text in TRACKERS.items() if name not in kept}
            environment |= {name: text.format(folder=folder) for name, text in told.items()}
        environment |= _variables(candidate, folder, asked)
        out, err = folder / "out", folder / "err"
        try:
            with out.open("wb") as to_out, err.open("wb") as to_err:
                process = subprocess.Popen(
                    keep_hooks(command),
                    stdin=subprocess.DEVNULL,
                    stdout=to_out,
                    stderr=to_err,
                    env=environment,
                    cwd=where,
                    start_new_session=True,
                )
            return self._wait(process, folder, record is not None, looks, until)
        except OSError as error:
            raise Failed(f"it cannot be started ({error.strerror})") from None
        finally:
            end_all(folder)

    def _wait(
        self,
        process: subprocess.Popen[bytes],
        folder: Path,
        recorded: bool,
        looks: Sequence[Callable[[], object]],
        until: float,
    ) -> int | None:
        """Wait for the end, and look meanwhile; end a program that goes on after its steps."""
        deadline, stops = monotonic() + self.timeout_s, math.inf
        recorded_in = folder if recorded else None
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(_LOOK_S)
                for look in looks:
                    look()
                now = monotonic()
                if stops == math.inf and any(folder.glob("*.try")):
                    stops = now + _GRACE_S
                if now <= min(until, deadline, stops):
                    continue
                if stops < math.inf:
                    _end(process, recorded_in, min(until, deadline) - now)
                    return None
                if now > until:
                    raise Spent
                raise Failed(f"ended after {self.timeout_s:.0f} s, the most for one run")
        except BaseException:
            _end(process, recorded_in)
            raise

    def _read(
        self, folder: Path, code: int | None, warmup: int, seconds: float, kind: str
    ) -> Measured:
        left = _left_in(folder, kind)
        measured = [each for each in left if len(each.ends) >= warmup + _FEWEST_STEPS]
        if any(each.stopped for each in left):
            exit_code = None
        else:
            exit_code = 128 - code if code is not None and code < 0 else code
        failure = why_failed(exit_code, folder / "out", folder / "err") if exit_code else ""
        if failure and not measured:
            raise Failed(failure)
        if not measured:
            raise Failed(_why_no_steps(left, warmup))
        slowest = max(measured, key=lambda each: _mean(each, warmup))
        first = min(measured, key=lambda each: each.rank or 0)
        losses = [loss for loss in first.losses[warmup:] if loss is not None]
        reasons = {cure: why for each in left for cure, why in each.reasons.items()}
        return Measured(
            step_ns=_mean(slowest, warmup),
            steps=len(slowest.ends) - warmup,
            ranks=len(measured),
            losses=tuple(losses),
            changes=tuple(
                replace(change, file=self._original(change.file, folder))
                for change in first.changes
            ),
            reasons=reasons,
            main=self._original(first.main, folder),
            versions=first.versions,
            gpu=first.gpu,
            buffered=max(each.buffered for each in left),
            threads=first.threads,
            has=frozenset(word for each in left for word in each.has),
            lengths_ns=tuple(b - a for a, b in pairwise(slowest.ends[warmup - 1 :])),
            seconds=seconds,
            ended=code is not None,
            made=len(slowest.ends),
            code=exit_code,
            failure=failure,
        )

    def _original(self, path: str, folder: Path) -> str:
        """Return the path of a file in the copy as it is in the original."""
        copy = folder / "copy"
        if self.workdir is None or not Path(path).is_relative_to(copy):
            return path
        return str(self.workdir.resolve() / Path(path).relative_to(copy))


def _copy(workdir: Path, folder: Path) -> Path:
    """Copy a folder into that of a run, and return where the program is to start in the copy.

    Links stay links; those to what lies outside lead there from the copy, too. Raises OSError.
    """
    copy = folder / "copy"
    try:
        # The folder of the run may be in the folder to copy.
        ignored = shutil.ignore_patterns(folder.name)
        shutil.copytree(workdir, copy, symlinks=True, ignore=ignored)
    except shutil.Error as error:
        source, _, why = error.args[0][0]
        raise OSError(0, f"cannot be copied ({why})", source) from None
    for within, folders, files in os.walk(copy):
        for link in (path for name in folders + files if (path := Path(within, name)).is_symlink()):
            original = workdir / link.relative_to(copy)
            target = os.path.normpath(original.parent / link.readlink())
            if not Path(target).is_relative_to(workdir):
                link.unlink()
                link.symlink_to(target)
    current = Path.cwd()
    return copy / current.relative_to(workdir) if current.is_relative_to(workdir) else copy


_CALL: Final = """\
import pickle, runpy, sys
with open(sys.argv[1], "rb") as file:
    sys.path[:], sys.argv[:], script = pickle.load(file)
    if script:
        main = sys.modules["__mp_main__"] = sys.modules["__main__"]
        vars(main).update(runpy.run_path(script, run_name="__mp_main__"))
    function = pickle.load(file)
function()
"""
"""Program that calls a pickled function, whose script it runs first, as multiprocessing does."""


def call_command(function: Callable[[], object], folder: Path) -> tuple[str, ...]:
    """Return the command that calls a function in a new process, by a file in a folder.

    Raises UsageError for a function that no other process can import.
    """
    of = getattr(function, "func", function)
    file = getattr(sys.modules.get(getattr(of, "__module__", "")), "__file__", None)
    try:
        call = pickle.dumps(function)
    except Exception as error:
        raise UsageError(_NO_FUNCTION.format(function, error)) from None
    if file is None:
        raise UsageError(_NO_FUNCTION.format(function, "it has no file"))
    script = str(Path(file).absolute())
    path = folder / "function.pickle"
    head = (sys.path, [script], script if of.__module__ == "__main__" else "")
    path.write_bytes(pickle.dumps(head) + call)
    return (sys.executable, "-c", _CALL, str(path))


_NO_FUNCTION: Final = (
    "{0!r} cannot be called in another process ({1}); define it at the top level of a file"
)


def _variables(candidate: Candidate, folder: Path, asked: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that apply a candidate to a program.

    Args:
        candidate: cures to apply.
        folder: folder for the reports of its processes.
        asked: further settings of the hooks.
    """
    settings = candidate.settings
    cures = {
        "cures": {setting.cure.id: setting.for_hook for setting in settings},
        "hooks": {s.cure.id: str(s.cure.hook) for s in settings if s.cure.hook},
    }
    changed = candidate.environment(os.environ) | {"GPUTRACE_TRY": json.dumps({**cures, **asked})}
    if not asked["recorded"]:
        spool = folder / "spool"
        spool.mkdir(exist_ok=True)
        paths = filter(None, [str(HOOKS), os.environ.get("PYTHONPATH", "")])
        changed |= {"GPUTRACE_DIR": str(spool), "PYTHONPATH": os.pathsep.join(paths)}
    return changed


class CuredStudy:
    """Cures as a setting of a study, whose runs go on to their end."""

    def check(self, cures: str) -> None:
        """Raise UsageError for an unknown cure, or for several alternatives."""
        self._candidate(cures)

    def variables(self, cures: str, folder: Path, recorded: bool) -> dict[str, str]:
        """Return the environment variables that apply the cures; the run reports into a folder."""
        asked = {
            "warmup": 0,
            "steps": None,
            "folder": str(folder),
            "recorded": recorded,
            "keep": True,
        }
        return _variables(self._candidate(cures), folder, asked)

    def unchanged(self, cures: str, folder: Path) -> str:
        """Return why a finished run was not changed as asked; empty if it was."""
        left = _left_in(folder)
        changed = {change.cure for each in left for change in each.changes}
        reasons = {cure: why for each in left for cure, why in each.reasons.items()}
        return why_idle(self._candidate(cures), changed, reasons)

    def _candidate(self, cures: str) -> Candidate:
        candidates = read_candidates(cures)
        if len(candidates) > 1:
            raise UsageError(f"cures = {cures!r}: join them by +, or give a list of alternatives")
        return candidates[0] if candidates else Candidate()


def why_idle(candidate: Candidate, changed: Collection[str], reasons: Mapping[str, str]) -> str:
    """Return which cures of a candidate changed nothing, or failed, and why; empty if none did."""
    idle = [
        setting.cure.id
        for setting in candidate.settings
        if reasons.get(setting.cure.id, "").startswith(FAILURE)
        or (setting.cure.id not in changed and not setting.cure.variables)
    ]
    whys = [reasons.get(id, "the program makes no call that it changes") for id in idle]
    named = len(candidate.settings) > 1
    return "; ".join(f"{id}: {why}" if named else why for id, why in zip(idle, whys, strict=True))


def _left_in(folder: Path, kind: str = "try") -> list[_Left]:
    """Read the reports of the hooks of all processes in a folder, at exit or after a round."""
    left = []
    for path in sorted(folder.glob(f"*.{kind}")):
        # Not by msgspec: paths may have bytes that are no UTF-8.
        with suppress(ValueError):
            left.append(msgspec.convert(json.loads(path.read_bytes()), _Left))
    return left


def _end(process: subprocess.Popen[bytes], recorded_in: Path | None, left_s: float = 0.0) -> None:
    """End a program: SIGTERM to its group, then SIGKILL to what is left.

    With the folder of a recorded run, only its program gets them: the recorder has the seconds
    left to write the trace.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        if recorded_in is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        else:
            for pid in {*orphans_of(recorded_in, MARK)} - {process.pid}:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SIGNAL_S if number == signal.SIGTERM else max(_GRACE_S, left_s))
            return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_SIGNAL_S)


def _mean(left: _Left, warmup: int) -> float:
    return (left.ends[-1] - left.ends[warmup - 1]) / (len(left.ends) - warmup)


def _mean_loss(losses: Sequence[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if known else None


def _why_no_steps(left: Sequence[_Left], warmup: int) -> str:
    if not left:
        return (
            "no step was seen; the hooks know steps of PyTorch, Keras, TensorFlow, Chainer, MXNet "
            "and others; `import gputrace` and mark those of any other loop with gputrace.step()"
        )
    most = max(len(each.ends) for each in left)
    fewer = most - _FEWEST_STEPS
    return (
        f"it makes {most} steps in all, too few for {warmup} to warm up and {_FEWEST_STEPS} to "
        f"measure; give it more data{f', or --warmup {fewer}' if fewer > 0 else ''}"
    )
