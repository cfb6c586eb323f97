"""Some fifty small trainings with one planted fault each: does the first line name the cause?

Each is recorded as it is (``--runs`` times), trains bare cured and as it is, which is what the gain
is measured by, and runs under torch.profiler for the peers that read its traces. What each tool
says first is kept in the file of ``--save``; `judge` judges it by ``truth.toml``, and `table` sums
up. Programs with one GPU train on all cards at once, and one program on a card: only their
start-ups overlap. With recordings and profiles in the folder that ``GPUTRACE_CAUSES`` names, as
``--save`` leaves them, only those are read.
"""

from __future__ import annotations

import lzma
import os
import re
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from time import monotonic
from typing import Any, Final

from benchmarks.causes.judge import Truth, judge, of_gputrace
from benchmarks.causes.peers import PROFILE, RECORDING, Reader
from benchmarks.causes.table import known_truths, sums, write_csv
from benchmarks.experiment import (
    WORKLOADS,
    Journal,
    analysis,
    cards,
    execute,
    in_lane,
    lacks,
    printed_result,
    program,
    recorded,
    unfit,
)
from benchmarks.measure import Failed
from benchmarks.options import Options
from gputrace.studies.framework_environments import Environments, Unavailable, read_frameworks

LIMIT_S: Final = 180.0
"""One run of a program, with its start and its wait for those that train before it."""
AT_ONCE: Final = 5
"""Programs of a card, of which one trains while others start or write what they recorded."""
READERS: Final = 3
"""Recordings that are read at a time, beside the programs."""
_PACE: Final = re.compile(r"^step \d+: ([\d.]+) ms", re.M)
_KEPT: Final = ("id", "severity", "ranks", "impact_ns", "message", "advice", "details")


def run(options: Options) -> int:
    """Print a line for each recording and the scores; 1 if a program failed."""
    all_of_them = known_truths()
    wanted = [one for one in all_of_them if not options.parts or one.name in options.parts]
    kept = os.environ.get("GPUTRACE_CAUSES")
    if options.cpu and (made := _made_python()):
        os.environ.setdefault("GPUTRACE_BENCH_PYTHON", made)
    if kept is None and (why := unfit(options, "torch")):
        print(f"causes: {why}")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.save.parent / "causes" if options.save else Path(scratch)
        folder.mkdir(exist_ok=True)
        judges = Judges(Journal("causes", options), options, folder)
        if kept is not None:
            judges.read_all(Path(kept), wanted)
        else:
            judges.train_all([truth for truth in wanted if not _lacks(truth, options)])
        judges.close(wanted)
    return judges.journal.code


class Judges:
    """Runs programs, and keeps what is said about their recordings."""

    def __init__(self, journal: Journal, options: Options, folder: Path) -> None:
        self.journal, self.options, self.folder = journal, options, folder
        self.kept: dict[str, list[dict[str, Any]]] = {"answers": [], "steps": []}
        self.steps: dict[tuple[str, str], float] = {}
        """Mean milliseconds of a step, by recording and by how a program last trained."""
        self._one = Lock()
        self._readers = ThreadPoolExecutor(READERS)
        self._reads: list[Future[None]] = []

    def train_all(self, wanted: list[Truth]) -> None:
        """Record all programs; on GPUs, train them cured and as they are, then profile them."""
        parts: list[Any] = [
            partial(self.record, run=run) for run in range(1, self.options.runs_or(1) + 1)
        ]
        if not self.options.cpu:
            parts += [partial(self.bare, how="cured"), partial(self.bare, how="sick")]
        if self.options.peers and not self.options.cpu:
            parts.append(self.profile)
        for part in parts:
            self.each(wanted, part)

    def each(self, wanted: list[Truth], part: Any) -> None:
        """Run a part of all programs: those with one GPU on all cards at once."""
        lanes: SimpleQueue[int] = SimpleQueue()
        count = max(min(len(cards()), 2), 1)
        for lane in list(range(count)) * AT_ONCE:
            lanes.put(lane)

        def in_a_lane(truth: Truth) -> None:
            lane = lanes.get()
            self.one(truth, part, lane if truth.gpus == 1 else None)
            lanes.put(lane)

        with ThreadPoolExecutor(1 if self.options.cpu else count * AT_ONCE) as pool:
            list(pool.map(in_a_lane, wanted))

    def one(self, truth: Truth, part: Any, lane: int | None) -> None:
        """Run a part of one program, unless no time is left."""
        if self.journal.left_s >= 5:
            self._try(truth, part, lane)

    def _try(self, truth: Truth, part: Any, *of: object) -> None:
        """Do a part of one program; its failure is said and ends nothing."""
        try:
            part(truth, *of)
        except Failed as failure:
            with self._one:
                self.journal.fail(truth.name, str(failure))

    def record(self, truth: Truth, lane: int | None, run: int) -> None:
        """Record a program as it is; what is said about the recording follows beside the next."""
        trace = self.folder / f"{truth.name}.{run}.sqlite"
        command = recorded(trace, self._command(truth, lane, "recorded"))
        self._train(truth, lane, "recorded", command, run)
        self._read_later(truth, trace)

    def bare(self, truth: Truth, lane: int | None, how: str) -> None:
        """Train a program without a recorder."""
        self._train(truth, lane, how, self._command(truth, lane, how))

    def profile(self, truth: Truth, lane: int | None) -> None:
        """Run some steps of a program of this folder under torch.profiler."""
        if truth.gpus > 1 or not _is_own(truth) or not _imports(truth, "torch"):
            return
        trace = self.folder / f"{truth.name}.pt.trace.json"
        words = str(Path(__file__).with_name("profiled.py")), str(trace)
        command = self._command(truth, lane, "profiled", *words)
        ended = execute(in_lane(command, lane if len(cards()) > 1 else None), LIMIT_S)
        if not trace.exists():
            raise Failed(f"profiled: exit status {ended.code} ({ended.last_words})")
        self._read_later(truth, trace)

    def read_all(self, kept: Path, wanted: list[Truth]) -> None:
        """Read the recordings and profiles of a folder."""
        named = {truth.name: truth for truth in wanted}
        for path in sorted(kept.iterdir()):
            if truth := named.get(path.name.partition(".")[0]):
                self._read_later(truth, path)

    def _read_later(self, truth: Truth, path: Path) -> None:
        self._reads.append(self._readers.submit(self._try, truth, self.read, path))

    def read(self, truth: Truth, path: Path) -> None:
        """Keep what gputrace and the peers say first of a recording or a profile."""
        trace = unpacked(path, self.folder)
        run = int(found[1]) if (found := re.search(r"\.(\d+)\.", path.name)) else 1
        is_recording = trace.suffix == ".sqlite"
        if is_recording:
            self._read_by_gputrace(truth, trace, run)
        for name, reader in (RECORDING if is_recording else PROFILE).items():
            # One recording of each program is enough for tools that see no more in the others.
            if self.options.peers and run == 1:
                self._read_by(truth, name, reader, trace)
        if path != trace:
            trace.unlink()

    def _read_by_gputrace(self, truth: Truth, trace: Path, run: int) -> None:
        found = analysis(trace)
        answer = of_gputrace(found, self.steps.get((truth.name, f"recorded {run}")))
        self._keep(truth, "gputrace", run, answer, steps=found["steps"]["count"])
        kept = [{key: one[key] for key in _KEPT} for one in found["findings"][:5]]
        with self._one:
            self.journal.keep("findings", {"part": truth.name, "run": run, "findings": kept})

    def _read_by(self, truth: Truth, name: str, reader: Reader, trace: Path) -> None:
        try:
            answer = reader(trace)
        except Failed as failure:
            # What a peer cannot read it says nothing of.
            with self._one:
                self.journal.skip(truth.name, f"{name}: {failure}")
            return
        if answer is not None:
            self._keep(truth, name, 1, answer)

    def _keep(self, truth: Truth, tool: str, run: int, answer: Any, **more: object) -> None:
        verdict = judge(truth, answer)
        said = {"cause": answer.cause, "right": verdict.cause, "place": verdict.place}
        row = {"part": truth.name, "tool": tool, "run": run, **asdict(answer), **more}
        with self._one:
            self.kept["answers"].append(row)
            self.journal.row(f"{truth.name}, {tool} {run}", **said, accuses=verdict.accuses, **more)
            self.journal.keep("answers", row)

    def _command(self, truth: Truth, lane: int | None, how: str, *before: str) -> tuple[str, ...]:
        words = [*before, str(truth.path)]
        if not _is_own(truth):
            words += ["--steps", "60", *(["--cured"] if how == "cured" else [])]
            words += ["--tiny"] if self.options.cpu else []
        # JAX would take most of a card's memory, and other programs have some already.
        variables = {"CURED": str(int(how == "cured")), "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}
        if truth.steps:
            variables |= {"STEPS": str(truth.steps), "WARM": str(truth.steps // 4)}
        command = program(*words, ranks=_ranks(truth))
        if self.options.cpu:
            variables["TINY"] = "1"
        else:
            taken = range(len(cards())) if lane is None else (lane,)
            locks = [str(self.folder / f"lane-{card}.lock") for card in taken]
            variables["CAUSES_LOCK"] = os.pathsep.join(locks)
            # These know no lock, so that their start-ups cannot overlap.
            command = command if _is_own(truth) else ("flock", locks[0], *command)
        return ("env", *(f"{name}={value}" for name, value in variables.items()), *command)

    def _train(
        self, truth: Truth, lane: int | None, how: str, command: tuple[str, ...], run: int = 1
    ) -> None:
        began = monotonic()
        ended = execute(in_lane(command, lane if len(cards()) > 1 else None), LIMIT_S)
        if ended.code:
            raise Failed(f"{how}: exit status {ended.code} ({ended.last_words})")
        paces = _PACE.findall(ended.output)
        took = float(paces[-1]) if paces else printed_result(ended)["mean_ms"]
        row = {"part": truth.name, "how": how, "run": run, "ms": took, "s": monotonic() - began}
        with self._one:
            self.steps[truth.name, f"{how} {run}"] = took
            self.kept["steps"].append(row)
            self.journal.keep("steps", row)

    def close(self, wanted: list[Truth]) -> None:
        """Print the score of each tool, and write the table beside the file of ``--save``."""
        for reading in self._reads:
            reading.result()
        print(f"\n{sums(wanted, self.kept)}")
        if self.options.save:
            write_csv(self.options.save.with_suffix(".csv"), wanted, self.kept)


def _made_python() -> str:
    """Return this Python if it has PyTorch, or the one that `gputrace bench` made; else empty."""
    frameworks = read_frameworks(WORKLOADS / "frameworks.toml")
    try:
        return str(Environments({}, None, print).find(frameworks["torch"]))
    except Unavailable:
        return ""


def unpacked(path: Path, folder: Path) -> Path:
    """Return a recording, unpacked into a folder if it is compressed."""
    if path.suffix != ".xz":
        return path
    unpacked = folder / path.stem
    unpacked.write_bytes(lzma.decompress(path.read_bytes()))
    return unpacked


def _ranks(truth: Truth) -> int:
    """Return how many processes torchrun starts; a program that spawns its own has one."""
    return 1 if "mp.spawn(" in truth.path.read_text(encoding="utf-8") else truth.gpus


def _lacks(truth: Truth, options: Options) -> str:
    if not options.cpu and truth.gpus > len(cards()):
        return "too few GPUs"
    if options.cpu and not truth.cpu:
        return "needs a GPU"
    frameworks = ("jax", "transformers", "pytorch_lightning", "torchmetrics", "torchvision", "cupy")
    return lacks(*(name for name in frameworks if _imports(truth, name)))


def _imports(truth: Truth, name: str) -> bool:
    text = truth.path.read_text(encoding="utf-8")
    return bool(re.search(rf"^\s*(import|from) {name}\b", text, re.M))


def _is_own(truth: Truth) -> bool:
    """Tell whether a program is one of this folder, which know variables and the lock."""
    return truth.path.parent.name == "programs"
