"""Inputs given to one target by one process, counted, and kept where they do something new.

The counts are in a file that outlives the process, and the input under way is in its place: the
runner sees what ended it.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Final

import numpy as np

from tests.fuzz.guard import Guard, Verdict
from tests.fuzz.looking import GAZE, GLANCE, LOOK
from tests.fuzz.targets import Place, Target

COUNTS: Final = ("inputs", "read", "refused", "failed", "looked", "found")
"""Inputs given, what became of them, how many were also analyzed, how many outcomes differ."""
_LOOKED: Final = 64
_GAZED: Final = 4096
"""One input of so many, told by its bytes, is also analyzed; or drawn and exported, too."""
_WORD: Final = re.compile(r"[A-Za-z]{1,20}[,.;:]?|[\w.]+\.py:\d+:?|\[[\d, ]*\]?|True|False|\d,?")
_MOST_KEPT: Final = 400
_LONGEST_KEPT: Final = 50_000
"""Inputs with an outcome of their own, which further ones are made of."""


class Counts:
    """Numbers of `COUNTS` in a file, mapped, so that they are there whatever ends the process."""

    def __init__(self, path: Path) -> None:
        self._numbers = np.memmap(path, np.int64, "r+" if path.exists() else "w+", shape=6)

    def add(self, name: str) -> None:
        self._numbers[COUNTS.index(name)] += 1

    def as_dict(self) -> dict[str, int]:
        return dict(zip(COUNTS, self._numbers.tolist(), strict=True))


class Session:
    """One process's inputs to one target."""

    def __init__(self, target: Target, folder: Path, guard: Guard) -> None:
        self.target, self.folder = target, folder
        self.place = Place(folder / "in", folder / "out", folder / "beside")
        for path in (self.place.input, self.place.out, self.place.beside, folder / "failures"):
            path.mkdir(parents=True, exist_ok=True)
        self.counts = Counts(folder / "counts")
        self.file = self.place.input / target.file
        self.known: set[str] = set()
        self.seeds = list(target.seeds)
        self.pools: dict[str, list[bytes]] = {kind: [] for kind in ("read", "refused", "failed")}
        if target.prepare:
            target.prepare(self.place)
        self.guard = guard
        for seed in self.seeds:
            self.give(seed, LOOK)
        guard.settle()

    def give(self, data: bytes, depth: int | None = None) -> Verdict:
        """Gives one input, counts it, and keeps it where it failed or did something new."""
        self.counts.add("inputs")
        deep = _depth(data) if depth is None else depth
        verdict = self._judge(data, deep)
        outcome = f"{verdict.kind} {_plain(verdict.about)}"
        if outcome not in self.known:
            if deep == GLANCE and verdict.kind == "read":
                deep, verdict = LOOK, self._judge(data, LOOK)
            self._keep(data, outcome, verdict.kind)
        self.counts.add(verdict.kind)
        if deep >= LOOK:
            self.counts.add("looked")
        if verdict.kind == "failed":
            self._save(data, verdict)
        return verdict

    def _judge(self, data: bytes, depth: int) -> Verdict:
        self.file.write_bytes(data)
        before = self._state()
        target, place = self.target, self.place
        verdict = self.guard.judge(lambda: target.give(self.file, depth, place), len(data))
        if self._state() != before and verdict.kind != "failed":
            return Verdict("failed", f"the input's folder changed: {sorted(self._state())}")
        return verdict

    def _state(self) -> dict[str, tuple[int, int]]:
        return {
            entry.name: (entry.stat().st_size, entry.stat().st_mtime_ns)
            for entry in os.scandir(self.place.input)
        }

    def _keep(self, data: bytes, outcome: str, kind: str) -> None:
        self.known.add(outcome)
        self.counts.add("found")
        pool = self.pools[kind]
        if len(data) > _LONGEST_KEPT:
            return
        if len(pool) < _MOST_KEPT:
            pool.append(data)
        else:
            pool[zlib.crc32(data) % _MOST_KEPT] = data

    def parent(self, rng: Random) -> bytes:
        """Choose the base of a further input: seldom a refused one, whose variants are refused."""
        kind = rng.choices(("read", "refused"), (9, 1))[0]
        pool = self.pools[kind] if rng.random() < 0.7 else self.seeds
        return rng.choice(pool or self.seeds)

    def _save(self, data: bytes, verdict: Verdict) -> None:
        # The same wrong in different words and numbers is one failure.
        name = f"{self.target.name}-{sha256(_plain(verdict.about).encode()).hexdigest()[:12]}"
        path = self.folder / "failures" / name
        if not path.exists() or path.stat().st_size > len(data):
            path.write_bytes(data)
            path.with_suffix(".txt").write_text(verdict.about, "utf-8", "replace")


def _depth(data: bytes) -> int:
    number = zlib.crc32(data)
    return GAZE if number % _GAZED == 0 else LOOK if number % _LOOKED == 0 else GLANCE


def _plain(about: str) -> str:
    """An outcome without what is only this input's: numbers, paths and odd words."""
    return " ".join(word for word in about.split() if _WORD.fullmatch(word))[:90]


def mutate_randomly(session: Session, seed: int, inputs: int, seconds: float) -> None:
    """Inputs made of known ones, until there were so many, or for so long."""
    rng = Random(f"{session.target.name} {seed}")
    end = time.monotonic() + seconds
    while inputs > 0 and time.monotonic() < end:
        session.give(session.target.mutate(rng, session.parent(rng)))
        inputs -= 1
