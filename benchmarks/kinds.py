"""How well the kind of a recording and the number of its turns are known, of generated programs.

Turns of generation are tokens, with the passes over prompts or without, or three requests and more.
A turn that the edge of a recording cuts may count or not.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Final

import gputrace
from benchmarks.options import Options
from tests.synthetic import write_kineto, write_nsys
from tests.synthetic.programs import PROGRAMS

LEAST_KINDS: Final = 0.95
LEAST_COUNTS: Final = 0.97


@dataclass(frozen=True, slots=True)
class Score:
    """How one run was understood."""

    kind: str
    seed: int
    counts: tuple[int, ...]
    found: str
    count: int
    layers: int

    @property
    def is_counted(self) -> bool:
        return self.count in self.counts

    @property
    def counts_layers(self) -> bool:
        """True where more turns are counted than were, as many as layers would make."""
        return not self.is_counted and self.count >= max(max(self.counts), 1) * self.layers / 2


def run(options: Options) -> int:
    """Prints the table; gives 1 where too few runs are understood."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        scores = [
            one
            for kind in options.parts or PROGRAMS
            for one in pool.map(score, repeat(kind), range(options.seeds), chunksize=8)
        ]
    print(table(scores))
    return int(not all(map(is_good, _by_kind(scores)))) if options.check else 0


def score(kind: str, seed: int) -> Score:
    """Plays a program, writes it as nsys or PyTorch's profiler does, and analyzes the file."""
    program = PROGRAMS[kind](seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        if program.profiled:
            write_kineto(program.recording, path, annotations=None)
        else:
            path /= "run.sqlite"
            write_nsys(program.recording, path, nvtx=program.nvtx)
        with gputrace.open(path) as trace:
            steps = trace.analyze().steps
    return Score(kind, seed, program.counts, steps.kind, steps.count, program.layers)


def _by_kind(scores: Sequence[Score]) -> list[list[Score]]:
    return [
        [one for one in scores if one.kind == kind]
        for kind in dict.fromkeys(s.kind for s in scores)
    ]


def is_good(scores: Sequence[Score]) -> bool:
    """Returns whether runs of one kind are understood well enough."""
    kinds = sum(one.found == one.kind for one in scores)
    counts = sum(one.is_counted for one in scores)
    layers = any(one.counts_layers for one in scores)
    return (
        kinds >= LEAST_KINDS * len(scores) and counts >= LEAST_COUNTS * len(scores) and not layers
    )


def table(scores: Sequence[Score]) -> str:
    """The figures, as CSV, and each run that is not right."""
    lines = ["kind,runs,kind right,turns exact,layers counted"]
    for of_kind in _by_kind(scores):
        kinds = sum(one.found == one.kind for one in of_kind)
        counts = sum(one.is_counted for one in of_kind)
        layers = sum(one.counts_layers for one in of_kind)
        lines.append(f"{of_kind[0].kind},{len(of_kind)},{kinds},{counts},{layers}")
    wrong = [one for one in scores if one.found != one.kind or not one.is_counted]
    lines += [
        f"- {one.kind} {one.seed}: {one.found}, {one.count} turns for {one.counts}" for one in wrong
    ]
    return "\n".join(lines)
