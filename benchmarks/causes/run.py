"""Some fifty small trainings with one planted fault each: does the first line name the cause?

Each is recorded as it is, and trains bare as it is and cured, which is what the gain is measured
by. All that a tool says is judged by `judge`; ``truth.toml`` has what is right. Programs with one
GPU train on all cards at once, and one on a card: only their start-ups overlap. With recordings
in the folder that ``GPUTRACE_CAUSES`` names, as ``--save`` leaves them, only those are judged.
"""

from __future__ import annotations

import lzma
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from time import monotonic
from typing import Any, Final

from benchmarks.causes.judge import Truth, judge, of_gputrace, truths
from benchmarks.causes.peers import nsys_ai
from benchmarks.experiment import (
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
from benchmarks.measure import ROOT, Failed
from benchmarks.options import Options

LIMIT_S: Final = 90.0
"""One run of a program, with its start and the reading of its recording."""
AT_ONCE: Final = 2
"""Programs of a card, of which one trains while the other one starts or is read."""
_PACE: Final = re.compile(r"^step \d+: ([\d.]+) ms", re.M)
_KEPT: Final = ("id", "severity", "ranks", "impact_ns", "message", "advice", "details")


def run(options: Options) -> int:
    """Print a line for each program and the score; 1 if a program failed."""
    table = tomllib.loads(Path(__file__).with_name("truth.toml").read_text(encoding="utf-8"))
    all_of_them = truths(table, ROOT)
    wanted = [one for one in all_of_them if not options.parts or one.name in options.parts]
    kept = os.environ.get("GPUTRACE_CAUSES")
    if kept is None and (why := unfit(options, "torch")):
        print(f"causes: {why}")
        return 0
    journal = Journal("causes", options)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.save.parent / "causes" if options.save else Path(scratch)
        folder.mkdir(exist_ok=True)
        judges = Judges(journal, options, folder)
        if kept is not None:
            for path in sorted(Path(kept).glob("*.sqlite*")):
                for truth in wanted:
                    if truth.name == path.name.partition(".")[0]:
                        judges.read(truth, unpacked(path, folder))
            judges.close(wanted)
            return journal.code
        wanted = [truth for truth in wanted if not _lacks(truth, options)]
        # The recordings and cured runs first; runs that are neither say what recording costs.
        for part in (judges.record, partial(judges.bare, cured=True), judges.bare):
            judges.each([truth for truth in wanted if truth.gpus == 1], part)
            for truth in wanted:
                if truth.gpus > 1:
                    judges.one(truth, part, None)
    judges.close(wanted)
    return journal.code


class Judges:
    """Runs programs, and judges what is said about their recordings."""

    def __init__(self, journal: Journal, options: Options, folder: Path) -> None:
        self.journal, self.options, self.folder = journal, options, folder
        self.steps: dict[tuple[str, str], float] = {}
        """Mean milliseconds of a step, by program and by ``recorded``, ``cured`` or ``sick``."""
        self.rows: dict[str, Mapping[str, Any]] = {}
        self._one = Lock()

    def each(self, wanted: list[Truth], part: Any) -> None:
        """Run a part of programs with one GPU on all cards at once."""
        lanes: SimpleQueue[int] = SimpleQueue()
        count = max(min(len(cards()), 2), 1)
        for lane in list(range(count)) * AT_ONCE:
            lanes.put(lane)

        def in_a_lane(truth: Truth) -> None:
            lane = lanes.get()
            self.one(truth, part, lane)
            lanes.put(lane)

        with ThreadPoolExecutor(1 if self.options.cpu else count * AT_ONCE) as pool:
            list(pool.map(in_a_lane, wanted))

    def one(self, truth: Truth, part: Any, lane: int | None) -> None:
        """Run a part of one program; its failure is said and ends nothing."""
        if self.journal.left_s < 5:
            return
        try:
            part(truth, lane)
        except Failed as failure:
            with self._one:
                self.journal.fail(truth.name, str(failure))

    def record(self, truth: Truth, lane: int | None) -> None:
        """Record a program as it is, and judge the first line."""
        trace = self.folder / f"{truth.name}.sqlite"
        self._train(truth, lane, "recorded", trace)
        self.read(truth, trace)

    def read(self, truth: Truth, trace: Path) -> None:
        found = analysis(trace)
        answer = of_gputrace(found, self.steps.get((truth.name, "recorded")))
        verdict = judge(truth, answer)
        other = nsys_ai(trace) if self.options.peers else None
        row = {
            "first": answer.cause,
            "right": verdict.cause,
            "place": verdict.place,
            "accuses": verdict.accuses,
            "saves": answer.saves,
            "says": answer.words.splitlines()[:1],
            "nsys_ai": other and other.words.splitlines()[0],
            "nsys_ai_right": other and judge(truth, other).cause,
            "steps": found["steps"]["count"],
            "step_ms": (found["steps"].get("mean_ns") or 0) / 1e6,
        }
        with self._one:
            self.rows[truth.name] = row
            self.journal.row(truth.name, **row)
            kept = [{key: one[key] for key in _KEPT} for one in found["findings"][:5]]
            self.journal.keep("findings", {"part": truth.name, "findings": kept})

    def bare(self, truth: Truth, lane: int | None, cured: bool = False) -> None:
        self._train(truth, lane, "cured" if cured else "sick", None)

    def _train(self, truth: Truth, lane: int | None, how: str, trace: Path | None) -> None:
        own = truth.path.parent.name == "programs"
        words = [str(truth.path)]
        if not own:
            words += ["--steps", "60", *(["--cured"] if how == "cured" else [])]
        if self.options.cpu and not own:
            words.append("--tiny")
        command = program(*words, ranks=_ranks(truth))
        variables = {"CURED": str(int(how == "cured"))}
        if truth.steps:
            variables |= {"STEPS": str(truth.steps), "WARM": str(truth.steps // 4)}
        if self.options.cpu:
            variables["TINY"] = "1"
        elif lane is not None:
            variables["CAUSES_LOCK"] = str(self.folder / f"lane-{lane}.lock")
        command = ("env", *(f"{name}={value}" for name, value in variables.items()), *command)
        if trace is not None:
            command = recorded(trace, command)
        began = monotonic()
        ended = execute(in_lane(command, lane if len(cards()) > 1 else None), LIMIT_S)
        if ended.code:
            raise Failed(f"{how}: exit status {ended.code} ({ended.last_words})")
        paces = _PACE.findall(ended.output)
        took = float(paces[-1]) if paces else printed_result(ended)["mean_ms"]
        with self._one:
            self.steps[truth.name, how] = took
            row = {"part": truth.name, "how": how, "ms": took, "s": monotonic() - began}
            self.journal.keep("steps", row)

    def close(self, wanted: list[Truth]) -> None:
        """Print the table and the score."""
        print("\n| program | fault | first line | cause | place | said | measured |")
        print("| :-- | :-- | :-- | :-- | :-- | --: | --: |")
        done = [truth for truth in wanted if truth.name in self.rows]
        for truth in done:
            row = self.rows[truth.name]
            said = "" if row["saves"] is None else f"{100 * row['saves']:.0f} %"
            print(
                f"| {truth.name} | {truth.cause} | `{row['first']}` | {_word(row['right'])}"
                f" | {_word(row['place'])} | {said} | {self._measured(truth)} |"
            )
        right = sum(self.rows[truth.name]["right"] for truth in done)
        accused = sum(self.rows[truth.name]["accuses"] for truth in done)
        print(f"\n{right} of {len(done)} right, {accused} false accusations")
        if others := [row["nsys_ai_right"] for row in self.rows.values() if row["nsys_ai"]]:
            print(f"nsys-ai: {sum(others)} of {len(others)} right")

    def _measured(self, truth: Truth) -> str:
        """Return the part of a step that the cure saves; of a recorded one, if none was bare."""
        sick = self.steps.get((truth.name, "sick")) or self.steps.get((truth.name, "recorded"))
        cured = self.steps.get((truth.name, "cured"))
        return f"{100 * (1 - cured / sick):.0f} %" if sick and cured else ""


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
    text = truth.path.read_text(encoding="utf-8")
    frameworks = ("jax", "transformers", "pytorch_lightning", "torchmetrics", "torchvision")
    return lacks(
        *(name for name in frameworks if re.search(rf"^\s*(import|from) {name}", text, re.M))
    )


def _word(right: bool | None) -> str:
    return {True: "yes", False: "**no**", None: ""}[right]
