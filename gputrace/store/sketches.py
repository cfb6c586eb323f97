"""Sketches: about a hundred bytes for each step of a rank, kept for a whole run.

A folder has two or three files for each process: HOST.PID.sketch is a line of JSON about it, then
records of `STEP`; HOST.PID.kernels is a line about its card, then records of `KERNELS`, where
windows of kernels were opened; HOST.PID.lines has texts, of lines of the program and of kernels,
the first of which is number 1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.errors import InputError

PARTS: Final = ("data", "gc", "compilation", "checkpoint", "forward", "backward", "optimizer")
"""Parts of a step that hooks see, each of which a record has a field for."""
STEP: Final = np.dtype(
    [
        *(("end", "<i8"), ("length", "<i8"), ("forward_end", "<i8")),
        *((part, "<i8") for part in PARTS),
        *(("queued", "<i8"), ("resident_bytes", "<i8"), ("step", "<u4"), ("line", "<u4")),
    ]
)
"""A step: its end in nanoseconds of CLOCK_REALTIME, its length, when its last forward pass ended (0
without one), the time of its parts, for how long its thread waited for a core, memory, its number,
and the last line that was sampled in it, or 0."""
Steps = NDArray[np.void]
"""Records of `STEP`, in the order of their steps."""
FAMILY, COLLECTIVE, KERNEL = range(3)
"""Kinds of records, by what their kernels have in common: family, operation, or name and size."""
KERNELS: Final = np.dtype(
    [
        *(("step", "<u4"), ("steps", "<u4"), ("kind", "<u4"), ("name", "<u4")),
        *(("count", "<u4"), ("median", "<u4"), ("total", "<i8")),
    ]
)
"""Kernels of a window: its first step, the number of its steps, what they have in common, the
number of its text, how many there were, and their median and total time in nanoseconds."""
Kernels = NDArray[np.void]
"""Records of `KERNELS`, window by window."""

_WIDE: Final = [name for name in STEP.names or () if STEP[name].itemsize == 8]
COLUMN: Final = {name: number for number, name in enumerate(_WIDE)}
"""Columns of `step_table`, by the names of fields; those of four bytes have none."""
_VERSION: Final = 1
_LONGEST_HEAD: Final = 4096


@dataclass(frozen=True, slots=True)
class RankSketch:
    """Steps of one process, and what it is."""

    job: str
    rank: int
    host: str
    pid: int
    first: int
    last: int
    """Numbers of its first and last step; the first is larger if it has none."""
    load: Callable[[], Steps]
    """Reads the steps: those of thousands of ranks need not be in memory at once."""
    lines: Sequence[str] = ()
    load_kernels: Callable[[], Kernels] = lambda: np.zeros(0, KERNELS)
    """Reads the kernels of its windows."""
    gpu: str = ""
    """UUID of its card; empty where no window was opened."""
    card: str = ""
    """Model of its card."""

    def line(self, number: int) -> str:
        """Return a line of the program, or another text, by its number; empty for 0."""
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""


class SketchWriter:
    """Writer of the sketch of one process, which goes on where an earlier one has ended."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        """``about`` has the job, rank, host and pid."""
        stem = f"{about['host']}.{about['pid']}"
        self._steps, self._lines = folder / f"{stem}.sketch", folder / f"{stem}.lines"
        self._kernels = folder / f"{stem}.kernels"
        self._number: dict[str, int] = {}
        if self._lines.exists():
            texts = self._lines.read_text(encoding="utf-8").splitlines()
            self._number = {text: number for number, text in enumerate(texts, 1)}
        self.last = -1
        """Number of the last step that was written."""
        if self._steps.exists():
            ends = _read(self._steps, STEP)[-1]
            self.last = int(ends["step"][-1]) if len(ends) else -1
        else:
            head = json.dumps({"gputrace_sketch": _VERSION, **about})
            self._steps.write_text(head + "\n", encoding="utf-8")

    def number(self, line: str) -> int:
        """Return the number of a line or another text, which is written down if it is new."""
        text = " ".join(line.split())
        if text not in self._number:
            self._number[text] = len(self._number) + 1
            with self._lines.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
        return self._number[text]

    def append(self, steps: Steps) -> None:
        """Append steps; raises OSError if that fails."""
        with self._steps.open("ab") as file:
            file.write(steps.tobytes())
        self.last = int(steps["step"][-1])

    def append_kernels(self, kernels: Kernels, gpu: str, card: str) -> None:
        """Append the kernels of a window; raises OSError if that fails."""
        head = b""
        if not self._kernels.exists():
            about = {"gputrace_sketch": _VERSION, "gpu": gpu, "card": card}
            head = json.dumps(about).encode() + b"\n"
        with self._kernels.open("ab") as file:
            file.write(head + kernels.tobytes())


def _read(path: Path, kind: np.dtype[Any]) -> tuple[Mapping[str, Any], int, int, NDArray[np.void]]:
    """Return what a file is of, where its records begin, how many there are, and the first and the
    last of them.
    """
    size = kind.itemsize
    try:
        with path.open("rb", buffering=0) as file:
            head = file.read(_LONGEST_HEAD).partition(b"\n")[0]
            about, start = json.loads(head), len(head) + 1
            if about["gputrace_sketch"] != _VERSION:
                raise InputError(path, "a sketch of another version of gputrace")
            count = max(os.fstat(file.fileno()).st_size - start, 0) // size
            ends = [start, start + (count - 1) * size] if count else []
            read = b"".join(os.pread(file.fileno(), size, at) for at in ends)
        return about, start, count, np.frombuffer(read, kind)
    except OSError as error:
        raise InputError(path, f"cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(path, "not a sketch, or a broken one") from None


def _rows(path: Path, kind: np.dtype[Any], start: int, count: int) -> NDArray[np.void]:
    """Return the records of a file; numpy's own function takes three times as long."""
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        read = file.read(count * kind.itemsize)
    return np.frombuffer(read, kind, len(read) // kind.itemsize)


def step_table(steps: Steps) -> NDArray[np.int64]:
    """Return the fields of steps as columns, by the numbers of `COLUMN`: shape (steps, fields)."""
    return np.ascontiguousarray(steps).view("<i8").reshape(len(steps), -1)


def read_sketches(folder: Path) -> list[RankSketch]:
    """Find the sketches of a folder that have steps, by job, rank and the end of the last step.

    A record that was cut is left out. Raises InputError for a file that is no sketch.
    """
    sketches = []
    for path in sorted(folder.glob("*.sketch"), key=str):
        about, start, count, ends = _read(path, STEP)
        if not count:
            continue
        texts: list[str] = []
        with suppress(FileNotFoundError):
            texts = path.with_suffix(".lines").read_bytes().decode("utf-8", "replace").splitlines()
        try:
            job, host = str(about["job"]), str(about["host"])
            rank, pid = int(about["rank"]), int(about["pid"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise InputError(path, "not a sketch, or a broken one") from None
        load = partial(_rows, path, STEP, start, count)
        first, last = ends["step"].tolist()
        of_kernels: dict[str, Any] = {}
        if (kernels := path.with_suffix(".kernels")).exists():
            of, start, count, _ = _read(kernels, KERNELS)
            of_kernels = {name: str(of.get(name, "")) for name in ("gpu", "card")}
            of_kernels["load_kernels"] = partial(_rows, kernels, KERNELS, start, count)
        sketch = RankSketch(job, rank, host, pid, first, last, load, texts, **of_kernels)
        sketches.append((job, rank, int(ends["end"][-1]), sketch))
    return [row[-1] for row in sorted(sketches, key=lambda row: row[:-1])]


def latest_of_each_rank(sketches: Iterable[RankSketch]) -> list[RankSketch]:
    """Return the last sketch of each rank, given as `read_sketches` orders them: after a restart,
    steps count from 0 again in another process.
    """
    return list({(sketch.job, sketch.rank): sketch for sketch in sketches}.values())
