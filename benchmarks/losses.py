"""Rows taken out of generated runs, which the audit has to report; in whole runs, nothing."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Final

import gputrace
from benchmarks.diagnosis import plant_of
from benchmarks.options import Options
from tests.synthetic import planted
from tests.synthetic.lost_rows import LOSSES, Loss, lose

SHARES: Final = (0.02, 0.03, 0.05, 0.10, 0.20)


def run(options: Options) -> int:
    """Prints how many losses are reported; gives 1 where one is not, or a whole run gets one."""
    reported = dict.fromkeys((loss.name for loss in LOSSES), 0)
    tried = dict.fromkeys(reported, 0)
    false, shown = 0, []
    for seed in range(options.seeds):
        loss, share = LOSSES[seed % len(LOSSES)], SHARES[seed // len(LOSSES) % len(SHARES)]
        whole, lossy = audit(seed, loss, share)
        false += whole
        tried[loss.name] += 1
        reported[loss.name] += lossy
        if whole or not lossy:
            shown.append(f"- run {seed}: {'whole, and reported' if whole else loss.name} ({share})")
    lines = ["| lost | runs | reported |", "| :-- | --: | --: |"]
    lines += [f"| {name} | {tried[name]} | {reported[name]} |" for name in tried if tried[name]]
    lines += ["", f"Reported in {false} of {options.seeds} whole runs.", *shown]
    print("\n".join(lines))
    return int(bool(false or reported != tried)) if options.check else 0


def audit(seed: int, loss: Loss, share: float) -> tuple[bool, bool]:
    """Return whether rows are reported missing in a run, and in the run that lost some."""
    plant = plant_of(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.sqlite"
        plant.write(planted(plant, seed), path)
        found = []
        for is_lossy in (False, True):
            if is_lossy:
                lose(path, loss, share, random.Random(seed))
            with gputrace.open(path) as trace:
                found.append(bool(trace.analyze().missing))
    return found[0], found[1]
