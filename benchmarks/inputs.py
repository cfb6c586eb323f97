"""Traces to measure on: generated once, kept in the user's cache folder.

The name of each holds a key made of the generator's source and the plan's, so that a change of
either makes a new file; the old one is then removed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks.measure import ROOT, Failed, run

SIZES: Final = {
    "0.1 M": (12, 1),
    "0.8 M": (100, 1),
    "1 M": (125, 1),
    "3 M": (375, 1),
    "10 M": (1250, 1),
    "30 M": (1250, 3),
    "100 M": (125, 100),
}
"""Training steps of eight ranks, about 1,000 kernels each, and how often all of it comes; by the
millions of kernels that makes."""
USUAL: Final = "0.8 M"
LARGE: Final = ("10 M", "30 M")
HUGE: Final = "100 M"
"""A file of 12 GB, of which an analysis writes 17 GB more to disk meanwhile."""
DENSE_SIZES: Final = {"2 M": (3000, 2), "6 M": (3000, 6), "10 M": (3000, 10)}
"""Steps and repetitions of a launch-bound training on one GPU, 330 kernels a step; by size."""
RANK_SIZES: Final = {
    "64 ranks of 16 k": (16, 1, 8),
    "64 ranks of 1 M": (250, 4, 8),
    "1,000 ranks of 10 k": (10, 1, 125),
    "1,000 ranks of 100 k": (100, 1, 125),
    "10,000 ranks of 10 k": (10, 1, 1250),
}
"""Steps and repetitions of a file for each rank, and hosts of eight ranks; by ranks and kernels."""
_SOURCES: Final = (
    *sorted((ROOT / "tests" / "synthetic").glob("*.py")),
    ROOT / "benchmarks" / "generate.py",
)
_LIMIT_S: Final = 1_800.0


def nsys_export(size: str, kind: str = "nsys") -> Path:
    """An nsys SQLite export, in the page cache unless huge; ``dense`` of a GPU that waits for each
    launch.
    """
    path = _made(kind, size, ".sqlite")
    if size == HUGE:
        return path
    with path.open("rb") as file:
        while file.read(1 << 24):
            pass
    return path


def kineto_folder(size: str) -> Path:
    """Return the recording as PyTorch's profiler writes it: one JSON file a rank."""
    return _made("kineto", size, "")


def nvprof_folder(size: str) -> Path:
    """Return the recording as nvprof writes it: one SQLite file a rank, in the page cache."""
    folder = _made("nvprof", size, "")
    for path in folder.iterdir():
        path.read_bytes()
    return folder


def ranks_folder(size: str) -> Path:
    """A run of `RANK_SIZES`, an nsys export for each rank."""
    return _made("ranks", size, "")


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gputrace-benchmarks"


def _made(kind: str, size: str, suffix: str) -> Path:
    name = f"{kind}-{size.replace(' ', '')}-"
    target = cache_folder() / f"{name}{_key()}{suffix}"
    if target.exists():
        return target
    for old in cache_folder().glob(f"{name}*"):
        remove(old)
    target.parent.mkdir(parents=True, exist_ok=True)
    _generate(kind, size, target)
    return target


def _generate(kind: str, size: str, target: Path) -> None:
    """In a process of its own, since it needs a gigabyte for 3 million kernels."""
    print(f"generating {target.name}", file=sys.stderr)
    by_kind: dict[str, Mapping[str, tuple[int, ...]]] = {"ranks": RANK_SIZES, "dense": DENSE_SIZES}
    sizes = by_kind.get(kind, SIZES)
    unfinished = target.with_name(f"unfinished-{os.getpid()}-{target.name}")
    command = (
        sys.executable,
        "-m",
        "benchmarks.generate",
        kind,
        str(unfinished),
        *map(str, sizes[size]),
    )
    result = run(command, _LIMIT_S)
    if result.code:
        remove(unfinished)
        raise Failed(f"{target.name} could not be made: {result.error.strip()[-500:]}")
    unfinished.rename(target)


def remove(path: Path) -> None:
    """A file or a folder, which need not be there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _key() -> str:
    digest = hashlib.sha256()
    for source in _SOURCES:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]
