"""The gate: ratios that may not grow. Seconds differ from machine to machine, ratios far less."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final, NamedTuple

from benchmarks import commands
from benchmarks.inputs import USUAL, kineto_folder, nsys_export, ranks_folder
from benchmarks.measure import alternate_all
from benchmarks.options import Options
from benchmarks.tables import show

ATTEMPTS: Final = 3
"""A ratio fails when it is worse that many times in a row."""


class Bound(NamedTuple):
    """Ratio when it was last looked at, and how much worse it may be."""

    usual: float
    margin: float
    """Above what a busy machine does to it: clocks suffer most, processor time little."""


BOUNDS: Final = {
    "analyze: time / floor's time": Bound(3.5, 0.5),
    "analyze: processor time / floor's": Bound(3.6, 0.25),
    "analyze: peak memory / size of the file": Bound(2.1, 0.2),
    "analyze, Kineto: processor time / nsys's": Bound(2.7, 0.25),
    "analyze, 0.1 M: processor time / numpy's import": Bound(2.7, 0.25),
    "analyze: time of 3 M / of 0.8 M, a kernel": Bound(0.65, 0.4),
    "analyze, 64 ranks of 16 k: processor time / 3 M's": Bound(0.95, 0.25),
    "--help: time / Python's start": Bound(3.0, 0.4),
}
"""Lower one when gputrace has become better, so that it stays so."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One ratio and what it may be."""

    name: str
    ratio: float

    @property
    def limit(self) -> float:
        bound = BOUNDS[self.name]
        return bound.usual * (1 + bound.margin)

    @property
    def passed(self) -> bool:
        return self.ratio <= self.limit


def check(options: Options) -> int:
    """Prints the ratios; 1 where one is worse than its bound by more than its margin."""
    best: dict[str, Judged] = {}
    for _ in range(ATTEMPTS):
        for judged in map(Judged, BOUNDS, _ratios(options.runs)):
            best[judged.name] = min(judged, best.get(judged.name, judged), key=_ratio)
        if all(judged.passed for judged in best.values()):
            break
    show(
        f"Ratios against their bounds, the best of up to {ATTEMPTS} attempts",
        ("ratio", "measured", "usual", "may be", "verdict"),
        [_line(judged) for judged in best.values()],
    )
    return 0 if all(judged.passed for judged in best.values()) else 1


def _ratio(judged: Judged) -> float:
    return judged.ratio


def _line(judged: Judged) -> tuple[str, ...]:
    figures = (judged.ratio, BOUNDS[judged.name].usual, judged.limit)
    return (
        judged.name,
        *(f"{value:.2f}" for value in figures),
        "good" if judged.passed else "WORSE",
    )


def _ratios(turns: int) -> tuple[float, ...]:
    """In the order of BOUNDS."""
    usual, larger = nsys_export(USUAL), nsys_export("3 M")
    print("measuring", file=sys.stderr)
    series = alternate_all(
        [
            commands.analyze(usual, "usual"),
            commands.floor(usual, "floor"),
            commands.analyze(kineto_folder(USUAL), "Kineto"),
            commands.analyze(nsys_export("0.1 M"), "small"),
            commands.python("import numpy", "numpy"),
            commands.analyze(larger, "larger"),
            commands.floor(larger, "larger floor"),
            commands.analyze(ranks_folder("64 ranks of 16 k"), "ranks"),
            commands.usage("help"),
            commands.python("pass", "start"),
        ],
        turns,
    )
    kernels = [commands.rows(series[name])[0] for name in ("floor", "larger floor")]
    for name in ("usual", "Kineto"):
        commands.require_right(series[name], kernels[0])
    return (
        series["usual"].times(series["floor"]),
        series["usual"].cpu_s / series["floor"].cpu_s,
        series["usual"].peak_bytes / usual.stat().st_size,
        series["Kineto"].cpu_s / series["usual"].cpu_s,
        series["small"].cpu_s / series["numpy"].cpu_s,
        series["larger"].times(series["usual"]) * kernels[0] / kernels[1],
        series["ranks"].cpu_s / series["larger"].cpu_s,
        series["help"].times(series["start"]),
    )
