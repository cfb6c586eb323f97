"""Experiments on a GPU machine: parts within a budget, figures that are saved as they come.

Programs run in the Python that GPUTRACE_BENCH_PYTHON names, else in this one. A part that cannot
run here (no such framework, too few GPUs, no time left) is said in one line, and is no failure.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar

from benchmarks.commands import gputrace
from benchmarks.measure import ROOT, Failed, machine
from benchmarks.options import Options
from gputrace.collectors.backend import has_driver
from gputrace.units import format_number

ROUNDS: Final = 3
LIMIT_S: Final = 600.0
WORKLOADS: Final = ROOT / "workloads"
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended."""

    code: int
    """The exit status, or minus the signal that ended it."""
    output: str
    error: str

    @property
    def last_words(self) -> str:
        """Return the last line that it wrote on stderr."""
        lines = [line.strip() for line in self.error.splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it said nothing"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure in several rounds; their range is the noise of the host."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """The greatest less the least, in the figure's unit."""
        return max(self.rounds) - min(self.rounds)

    def __str__(self) -> str:
        middle, low, high = map(format_number, (self.median, min(self.rounds), max(self.rounds)))
        return f"{middle} ({low} to {high})"


@dataclass(frozen=True, slots=True)
class Check:
    """A figure beside what it should be, or be at most, in one unit."""

    what: str
    found: float
    wanted: float
    allowed: float
    """How far it may be off."""
    noise: float = 0.0
    """The spread of what it is held against: what is off by less is not told apart from it."""
    at_most: bool = False
    """It may be less by any amount."""

    @property
    def met(self) -> bool | None:
        """None where it is off by more than it may, but not by more than the noise."""
        off = self.found - self.wanted if self.at_most else abs(self.found - self.wanted)
        return True if off <= self.allowed else None if off <= self.noise else False

    def __str__(self) -> str:
        found, wanted, allowed = map(format_number, (self.found, self.wanted, self.allowed))
        limit = f"{'at most ' if self.at_most else ''}{wanted} ± {allowed}"
        noise = f", noise {format_number(self.noise)}" if self.noise else ""
        verdict = {True: "met", None: "within the noise", False: "MISSED"}[self.met]
        return f"{self.what}: {found}, asked {limit}{noise}: {verdict}"


def near(what: str, found: float, truth: Figure, part: float, at_most: bool = False) -> Check:
    """A figure that should be the median of others, within a part of it."""
    return Check(what, found, truth.median, part * truth.median, truth.spread, at_most)


class Journal:
    """Findings of one experiment: printed, and kept in the file of ``--save``, line by line."""

    def __init__(self, name: str, options: Options) -> None:
        self.name = name
        self.code = 0
        """1 once a check was missed or a program failed."""
        self._options = options
        self._ends = monotonic() + 60 * options.minutes if options.minutes else math.inf
        self._part_ends = self._ends
        self._kept: dict[str, Any] = {"machine": machine(), "cards": cards()}
        self._kept |= {"rows": [], "checks": [], "skipped": []}
        print(f"\n{name}: {self._kept['machine']}; {', '.join(cards()) or 'no GPU'}", flush=True)

    @property
    def left_s(self) -> float:
        """Seconds that are left for the part that runs; infinite without a budget."""
        return self._part_ends - monotonic()

    def each(self, names: Iterable[str], experiment: Callable[[str], object]) -> int:
        """Run the parts that were asked for while there is time, and say which had none.

        Each may take an equal part of the time that is left.
        """
        asked = self._options.parts
        chosen = [name for name in names if not asked or name in asked]
        for at, name in enumerate(chosen):
            now = monotonic()
            if now >= self._ends:
                self.skip(name, "no time was left")
                continue
            self._part_ends = now + (self._ends - now) / (len(chosen) - at)
            try:
                experiment(name)
            except Failed as failure:
                self.fail(name, str(failure))
        return self.code

    def row(self, part: str, **cells: object) -> None:
        """Say and keep one line of a table."""
        shown = "; ".join(f"{name.replace('_', ' ')} {cell}" for name, cell in cells.items())
        print(f"  {part}: {shown}", flush=True)
        self.keep("rows", {"part": part} | {name: _plain(cell) for name, cell in cells.items()})

    def check(self, part: str, check: Check) -> None:
        """Say and keep whether a figure is what it should be."""
        print(f"  {part}: {check}", flush=True)
        self.code = max(self.code, int(check.met is False))
        self.keep("checks", {"part": part} | asdict(check) | {"met": check.met})

    def skip(self, part: str, why: str) -> None:
        """Say and keep that a part is left out."""
        print(f"  {part}: skipped: {why}", flush=True)
        self.keep("skipped", {"part": part, "why": why})

    def fail(self, part: str, why: str) -> None:
        """Say and keep that a program failed; the experiment goes on, and ends with 1."""
        print(f"  {part}: FAILED: {why}", flush=True)
        self.code = 1
        self.keep("skipped", {"part": part, "why": why, "failed": True})

    def keep(self, kind: str, line: dict[str, Any]) -> None:
        """Keep a line of a kind of its own in the file, and print nothing."""
        self._kept.setdefault(kind, []).append(line)
        path = self._options.save
        if path is None:
            return
        whole = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        beside = path.with_name(f"{path.name}.part")
        beside.write_text(json.dumps(whole | {self.name: self._kept}, indent=1), encoding="utf-8")
        beside.replace(path)


def _plain(cell: object) -> object:
    """Return a cell as JSON has it: a figure with its rounds."""
    if isinstance(cell, Figure):
        return {"median": cell.median, "rounds": cell.rounds}
    return cell


def in_turn(
    journal: Journal, variants: Mapping[str, Callable[[], _Result]], rounds: int
) -> dict[str, list[_Result]]:
    """Run the variants in turn, each round from another on, until the part's time is over.

    The first round is whole in any case, unless a variant fails.
    """
    found: dict[str, list[_Result]] = {name: [] for name in variants}
    names = list(variants)
    for turn in range(rounds):
        began = monotonic()
        for at in range(len(names)):
            name = names[(turn + at) % len(names)]
            found[name].append(variants[name]())
        if journal.left_s < monotonic() - began:
            break
    return found


def at_once(runs: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """Run all at the same time."""
    with ThreadPoolExecutor(len(runs)) as pool:
        return [ran.result() for ran in [pool.submit(run) for run in runs]]


def in_lane(command: Sequence[str], lane: int | None) -> Sequence[str]:
    """Return a command that has one of two GPUs and half of the cores; the command if no lane is
    given.
    """
    if lane is None:
        return command
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    chosen = ",".join(map(str, cores[half:] if lane else cores[:half]))
    visible = [card for card in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if card]
    card = visible[lane] if visible else lane
    return ("env", f"CUDA_VISIBLE_DEVICES={card}", "taskset", "-c", chosen, *command)


def half_width(values: Sequence[float]) -> float:
    """Return half of the 95 % confidence interval of the mean, by Student's t."""
    if len(values) < 2:
        return math.nan
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}.get(len(values), 2.26)
    return t * statistics.stdev(values) / math.sqrt(len(values))


def python() -> str:
    """Return the Python that has the frameworks."""
    return os.environ.get("GPUTRACE_BENCH_PYTHON", sys.executable)


@cache
def lacks(*modules: str) -> str:
    """Return which modules the programs' Python has not; empty if it has all."""
    code = (
        "import sys, importlib.util as u; print(*[m for m in sys.argv[1:] if not u.find_spec(m)])"
    )
    asked = subprocess.run([python(), "-c", code, *modules], capture_output=True, text=True)
    missing = ", ".join(asked.stdout.split())
    return f"{missing} not installed" if missing or asked.returncode else ""


@cache
def cards() -> tuple[str, ...]:
    """Return the names of the GPUs that programs see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    try:
        ran = subprocess.run(query, capture_output=True, text=True, check=True)
        named = tuple(filter(None, ran.stdout.splitlines()))
    except (OSError, subprocess.CalledProcessError):
        named = ("a GPU",) * len(list(Path("/dev").glob("nvidia[0-9]*")))
    return named if visible is None else named[: len(list(filter(None, visible.split(","))))]


def unfit(options: Options, *modules: str) -> str:
    """Return why this machine cannot run an experiment; empty if it can."""
    if options.check or not (options.cpu or has_driver()):
        return "needs a GPU; see docs/benchmarks.md for what was measured"
    return lacks(*modules)


def program(*words: str, ranks: int = 1) -> tuple[str, ...]:
    """Return the command of a Python program, under torchrun where it has several ranks."""
    launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return (python(), *(launch if ranks > 1 else ()), *words)


def recorded(trace: Path, command: Sequence[str], *how: str) -> tuple[str, ...]:
    """Return the command that records another."""
    return (*gputrace(), "record", "--force", *how, "-o", str(trace), "--", *command)


def arm(command: Sequence[str]) -> tuple[str, ...]:
    """Return the command that arms another."""
    return (*gputrace(), "arm", "--", *command)


def execute(command: Sequence[str], limit_s: float = LIMIT_S) -> Ended:
    """Run a command to its end, or end it after a while."""
    # Programs of a Python that has no gputrace call gputrace.step() too.
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        for stop in (signal.SIGTERM, signal.SIGKILL, None):
            try:
                output, error = process.communicate(timeout=limit_s)
                break
            except subprocess.TimeoutExpired:
                limit_s = 20.0
                os.killpg(process.pid, stop or signal.SIGKILL)
    return Ended(process.returncode, output, error)


def completed(command: Sequence[str], limit_s: float = LIMIT_S) -> Ended:
    """Run a command that must succeed."""
    ended = execute(command, limit_s)
    if ended.code:
        raise Failed(f"exit status {ended.code} ({ended.last_words})")
    return ended


def printed_result(ran: Ended) -> dict[str, Any]:
    """Return the last line of JSON that a program printed."""
    lines = [line for line in ran.output.splitlines() if line.startswith('{"')]
    if not lines:
        raise Failed("it printed no line of JSON")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def analysis(trace: Path, *how: str) -> dict[str, Any]:
    """Return what ``gputrace analyze --json`` says of a trace."""
    command = ("env", "GPUTRACE_CACHE=off", *gputrace(), "analyze", str(trace), "--json", *how)
    return printed_result(completed(command))
