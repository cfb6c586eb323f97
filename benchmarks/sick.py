"""Six sick trainings under `gputrace try`, and changed by hand, on one GPU and on two.

Of each training of `workloads/sick`: is the cure that was planted the fastest of those tried, and
is what it brings what changing the program by hand brings, in turn within one process? Rounds go
over all trainings, so that what the budget does not pay for is repetitions. Rows of the ledger are
printed as docs/studies/cures.md has them.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.commands import gputrace
from benchmarks.experiment import (
    ROUNDS,
    WORKLOADS,
    Check,
    Figure,
    Journal,
    cards,
    completed,
    execute,
    lacks,
    printed_result,
    program,
    unfit,
)
from benchmarks.measure import Failed
from benchmarks.options import Options
from gputrace.model.struct import UNKNOWN
from gputrace.trials.ledger import Entry
from gputrace.trials.outcome import format_answer
from gputrace.units import format_times

FOLDER: Final = WORKLOADS / "sick"
POINTS: Final = 5.0
"""Percentage points by which a gain may be off."""
TURNS: Final = 3
BUDGET_S: Final = (30.0, 120.0)
"""Least and most time for a trial."""
DONE, NOTHING_FASTER = 0, 1
"""Exit codes of a trial that was held."""


@dataclass(frozen=True, slots=True)
class Sick:
    """A training, the cures that were planted, and steps of a turn by hand."""

    cures: tuple[str, ...]
    steps: int = 60
    modules: tuple[str, ...] = ("torch",)
    on_cpu: bool = False
    """Its cure helps without a GPU too."""


TRAININGS: Final = {
    "starved": Sick(("workers=8", "workers=4", "workers=16")),
    "pageable": Sick(("pinned",)),
    "launches": Sick(("graphs",), 100),
    "optimizer": Sick(("fused", "foreach"), on_cpu=True),
    "fp32": Sick(("tf32", "bf16")),
    "nchw": Sick(("channels-last",), modules=("torch", "torchvision")),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """The fastest single cure that `gputrace try` has proven, and what one brings by hand."""

    fastest: Entry | None
    hand: tuple[float, ...]
    """Gains of that cure in percent, by turn; of the first planted one where it is another."""


def run(options: Options) -> int:
    """Print a line for each trial, and at the end what is asked; 1 where something is missed."""
    if why := unfit(options, "torch"):
        print(f"sick: {why}")
        return 0
    journal = Journal("sick", options)
    wanted = _wanted(journal, options)
    trials: dict[str, list[Trial]] = defaultdict(list)
    turns = [part for _ in range(options.runs_or(ROUNDS)) for part in wanted]
    journal.each(turns, partial(_try, journal, options, trials))
    for part, held in trials.items():
        for check in asked(TRAININGS[part.removesuffix("-2")], held):
            journal.check(part, check)
    return journal.code


def _wanted(journal: Journal, options: Options) -> list[str]:
    """Return the parts that can run here, and say which cannot; ``-2`` is on two GPUs."""
    wanted = []
    names = [*TRAININGS, *(f"{name}-2" for name in TRAININGS if len(cards()) > 1)]
    for part in names:
        if not options.parts or part in options.parts:
            if why := _lacks(TRAININGS[part.removesuffix("-2")], options):
                journal.skip(part, why)
            else:
                wanted.append(part)
    return wanted


def _try(journal: Journal, options: Options, trials: dict[str, list[Trial]], part: str) -> None:
    name = part.removesuffix("-2")
    sick, ranks = TRAININGS[name], 1 if name == part else 2
    tiny = ("--tiny",) if options.cpu else ()
    command = program(str(FOLDER / f"{name}.py"), *tiny, ranks=ranks)
    # A third of the time is for the changes by hand.
    budget = min(max(0.66 * journal.left_s, BUDGET_S[0]), BUDGET_S[1])
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder, "ledger.sqlite")
        how = ("--budget", f"{budget:.0f}s", "--ledger", str(ledger), "--json")
        # Without a GPU no finding leads to these cures.
        cures = (",".join(sick.cures),) if options.cpu else ()
        ended = execute((*gputrace(), "try", *how, *cures, "--", *command), budget + 180)
    if ended.code not in (DONE, NOTHING_FASTER):
        raise Failed(f"gputrace try: exit status {ended.code} ({ended.last_words})")
    rows = [Entry(**row) for row in printed_result(ended)["rows"]]
    fastest = fastest_of(rows)
    cure = fastest.cure if fastest and fastest.cure in sick.cures else sick.cures[0]
    words = ("--turns", str(TURNS), "--steps", str(sick.steps), "--cured", cure)
    pairs = printed_result(completed((*command, *words)))["pairs"]
    hand = gains(pairs)
    trials[part].append(Trial(fastest, hand))
    for row in rows:
        journal.row(part, ledger=ledger_row(name, row))
    found = f"{fastest.cure}, {format_answer(fastest)}" if fastest else "none"
    as_it_is, cured = (
        Figure(tuple(1e3 * pair[which] for pair in pairs)) for which in ("sick", "cured")
    )
    steps = {"by_hand_as_it_is_ms": as_it_is, "by_hand_cured_ms": cured}
    journal.row(part, fastest=found, by_hand=Figure(hand), by_hand_with=cure, **steps)


def _lacks(sick: Sick, options: Options) -> str:
    return lacks(*sick.modules) or ("needs a GPU" if options.cpu and not sick.on_cpu else "")


def fastest_of(rows: Sequence[Entry]) -> Entry | None:
    """Return the single cure that is proven to bring most; None if none is."""
    single = [row for row in rows if row.verdict == "faster" and "+" not in row.cure]
    return min(single, key=lambda row: row.ratio or 1.0, default=None)


def gains(pairs: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """Return what each pair of steps as it is and changed says of the gain, in percent."""
    return tuple(100 * (pair["sick"] / pair["cured"] - 1) for pair in pairs)


def asked(sick: Sick, trials: Sequence[Trial]) -> list[Check]:
    """Ask that each trial found a cure that was planted, with the gain that it has by hand."""
    found = [(trial.fastest, trial.hand) for trial in trials]
    right = [(entry, hand) for entry, hand in found if entry and entry.cure in sick.cures]
    checks = [Check("trials that found the planted cure", len(right), len(trials), 0)]
    for entry, hand in right:
        measured, by_hand = 100 * (1 / (entry.ratio or 1.0) - 1), Figure(hand)
        what = f"gain of {entry.cure}, %"
        checks.append(Check(what, measured, by_hand.median, POINTS, by_hand.spread))
    return checks


def ledger_row(name: str, row: Entry) -> str:
    """Return an answer as a row of the tables of docs/studies/cures.md."""
    step = "" if row.bare_ns is None else f"{row.bare_ns / 1e6:.1f}"
    ratios = row.predicted, row.predicted_high, row.predicted_low
    gain, *bounds = ["" if each is None else format_times(1 / max(each, 1e-3)) for each in ratios]
    cells = (
        f"`{name}.py`",
        f"`{row.cure}`",
        format_answer(row),
        f"{gain or UNKNOWN} ({' to '.join(bounds)})" if all(bounds) else gain or UNKNOWN,
        step,
        str(row.rounds),
    )
    return f"| {' | '.join(cells)} | {row.why} |"
