"""How often the right cause is found first in generated runs, whose causes are planted.

Of a run's findings those count that name an imbalance, copies from pageable memory, or the cause
that is planted. What every run may have (launches that come late, exposed communication, waits for
data of all ranks alike) is left aside. A run counts as right if the first of these findings has an
id that its plant expects, names the rank that it was planted on, and says the planted pattern; a
run with nothing planted, if there is none of these findings at all.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import gputrace
from benchmarks.options import Options
from gputrace.model.results import Finding
from tests.synthetic import PLANTS, Plant, Recording, planted

IMBALANCE: Final = frozenset(
    {"straggler", "late-host", "gpu0-skew", "topology", "host-staged-comm", "clock-mismatch"}
    | {"throttling", "memory-imbalance"}
)
NEVER: Final = frozenset({"h2d-pageable"})
"""Findings that no run has but by a plant."""
LEAST_RIGHT: Final = 0.95
MOST_FALSE: Final = 0.02
NONE: Final = "none"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """First finding of one run."""

    seed: int
    plant: Plant
    ranks: int
    found: str
    """The finding's id, or `NONE`."""
    wrong: str
    """Nothing where all is right."""


def run(options: Options) -> int:
    """Prints the confusion table; gives 1 where too few runs are right."""
    found = [diagnose(seed) for seed in range(options.seeds)]
    print(table(found))
    return int(not good(found)) if options.check else 0


def diagnose(seed: int, plant: Plant | None = None) -> Diagnosis:
    """Makes a run, with the plant of the seed if none is given, and analyzes it as a user would."""
    plant = plant or plant_of(seed)
    recording = planted(plant, seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.sqlite"
        plant.write(recording, path)
        with gputrace.open(path) as trace:
            findings = trace.analyze().findings
    ids = IMBALANCE | NEVER | set(plant.expects)
    first = next((finding for finding in findings if finding.id in ids), None)
    found = NONE if first is None else first.id
    return Diagnosis(seed, plant, recording.plan.ranks, found, _wrong(plant, recording, first))


def plant_of(seed: int) -> Plant:
    """The plants in turn, and in every fourth run none."""
    if seed % 4 == 0:
        return PLANTS[0]
    sick = PLANTS[1:]
    return sick[(seed - seed // 4 - 1) % len(sick)]


def _wrong(plant: Plant, recording: Recording, found: Finding | None) -> str:
    if found is None:
        return "not found" if plant.expects else ""
    if found.id not in plant.expects:
        return f"{found.id} of rank {found.ranks}"
    if plant.rank is not None and found.ranks != (plant.rank(recording.plan),):
        return f"rank {found.ranks} for {plant.rank(recording.plan)}"
    pattern = found.evidence.get("pattern", "")
    return f"{pattern} for {plant.pattern}" if plant.pattern not in ("", pattern) else ""


def good(found: Sequence[Diagnosis]) -> bool:
    """Return True if the bounds are met."""
    sick = [one for one in found if one.plant.expects]
    well = [one for one in found if not one.plant.expects]
    right = sum(not one.wrong for one in sick) >= LEAST_RIGHT * len(sick)
    return right and sum(bool(one.wrong) for one in well) <= MOST_FALSE * len(well)


def table(found: Sequence[Diagnosis]) -> str:
    """The confusion table, as Markdown: a row for each plant, a column for each first finding."""
    ids = [NONE, *sorted({one.found for one in found} - {NONE})]
    lines = [
        f"| planted | runs | right | {' | '.join(ids)} |",
        f"| :-- | {' | '.join(['--:'] * (len(ids) + 2))} |",
    ]
    for plant in PLANTS:
        own = [one for one in found if one.plant is plant]
        counts = Counter(one.found for one in own)
        right = sum(not one.wrong for one in own)
        cells = [str(counts[id] or "") for id in ids]
        lines.append(f"| {plant.name} | {len(own)} | {right} | {' | '.join(cells)} |")
    lines += ["", _totals(found)]
    lines += [
        f"- run {o.seed} ({o.plant.name}, {o.ranks} ranks): {o.wrong}" for o in found if o.wrong
    ]
    return "\n".join(lines)


def _totals(found: Sequence[Diagnosis]) -> str:
    sick = [one for one in found if one.plant.expects]
    well = [one for one in found if not one.plant.expects]
    right, false = sum(not one.wrong for one in sick), sum(bool(one.wrong) for one in well)
    return (
        f"Right first in {right} of {len(sick)} runs with a plant; an imbalance was found in "
        f"{false} of {len(well)} without. Not right:\n"
    )
