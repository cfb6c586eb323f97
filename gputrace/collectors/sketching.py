"""Sketches of armed processes, made of what their hooks write while they train, and of short
windows of kernels that are opened in them now and then.

But for the windows, nothing is added to the processes: their files are read from outside.
"""

from __future__ import annotations

import re
import socket
import statistics
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from gputrace.collectors.armed import KEPT_NS, ArmedProcess, ask, locked, settles_s
from gputrace.collectors.live import RecordingFollower
from gputrace.collectors.spool import in_order
from gputrace.collectors.spool.activity import Spool, join_spools, read_spool
from gputrace.collectors.spool.host_events import HostEvents, Records, counts
from gputrace.errors import InputError
from gputrace.model.host import BACKWARD, CHECKPOINT, DATA_RANGE, FORWARD, OPTIMIZER
from gputrace.model.intervals import union
from gputrace.model.names import demangle_all
from gputrace.store.sketches import COLLECTIVE, FAMILY, KERNEL, KERNELS, STEP, SketchWriter, Steps

_SETTLES_NS: Final = 1_000_000_000
"""Age of a step from which all that belongs to it has been written."""
_PHASES: Final = (CHECKPOINT, FORWARD, BACKWARD, OPTIMIZER)
WINDOW_STEPS: Final = 3
"""Steps of a window of kernels."""
_MARGIN: Final = 3
"""Steps that processes may make while they are asked for a window."""
_DEAREST: Final = 0.01
"""Part of the time between windows that they may cost."""
_ECHO_NS: Final = 500_000_000
"""For so long after a window steps may be longer, since CUPTI has to go."""
_FEWEST_JUDGED, _MOST_JUDGED = 8, 64
"""Number of windows by which their cost is told: the first that are, and the last ones."""
_COMPARED: Final = 16
"""Kernels of a window that are kept by name and size, those with most time."""
_LONGEST_NAME: Final = 60
_LONGEST_NS: Final = 2**32 - 1

Classify = Callable[[str], tuple[str, str]]
"""Returns the family of a kernel by its name, and its collective operation or a short name."""


class Sketcher:
    """Follower of armed processes that writes sketches of their steps into a folder.

    With ``every``, it opens windows of kernels in them at multiples of so many steps, the same on
    all ranks and machines; where processes make half as many between two looks, or where windows
    would cost more than a hundredth of the time between them, at multiples of a power of two more.
    """

    def __init__(self, folder: Path, every: int, classify: Classify) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._every, self._classify = folder, every, classify
        self._followers: dict[Path, RecordingFollower] = {}
        self._writers: dict[int, SketchWriter] = {}
        # First step of the window of each process, and how many had ended before it.
        self._asked: dict[int, tuple[int, int]] = {}
        self._before: dict[int, int] = {}
        self._costs: deque[float] = deque(maxlen=_MOST_JUDGED)

    def look(self, members: Sequence[ArmedProcess]) -> int:
        """Write sketches of what ended since the last look; return the number of steps.

        Raises OSError if the folder cannot be written.
        """
        settled, written = time.time_ns() - _SETTLES_NS, 0
        for folder in {member.folder for member in members}:
            self._followers.setdefault(folder, RecordingFollower(folder)).read()
        for member in members:
            host = self._followers[member.folder].host_events(member.pid)
            if host is None or not len(host.records["step"]):
                continue
            if member.pid not in self._writers:
                about = {
                    "job": member.job,
                    "rank": member.rank or 0,
                    "host": socket.gethostname(),
                    "pid": member.pid,
                }
                self._writers[member.pid] = SketchWriter(self._folder, about)
            writer = self._writers[member.pid]
            rows = host.records["step"]
            new = rows[(rows["number"].astype(np.int64) > writer.last) & (rows["end"] <= settled)]
            if len(new):
                writer.append(sketch(host, new, writer))
                written += len(new)
            self._take_window(member, rows, writer)
        if self._every:
            self._open_windows([m for m in members if m.step and m.gpu == "ready"])
        return written

    def _open_windows(self, members: Sequence[ArmedProcess]) -> None:
        """Open the next window, if it would else have begun by the next look but one.

        A process that is too late is left out, as are all while somebody else records them.
        """
        made = max((m.step - self._before.get(m.pid, m.step) for m in members), default=0)
        self._before = {member.pid: member.step for member in members}
        latest = max(self._before.values(), default=0)
        distance = steps_between_windows(self._every, made, self._costs)
        first = -(-(latest + _MARGIN + made // 16) // distance) * distance
        is_awaited = not self._asked.keys().isdisjoint(self._before)
        if is_awaited or first - latest > 2 * made + _MARGIN:
            return
        with ExitStack() as held, suppress(OSError):
            for folder in {member.folder for member in members}:
                held.enter_context(locked(folder))
            for member in members:
                numbers = first, first + WINDOW_STEPS, KEPT_NS
                if "error" not in ask(member.socket, "record", *numbers):
                    self._asked[member.pid] = first, member.windows

    def _take_window(self, member: ArmedProcess, steps: Records, writer: SketchWriter) -> None:
        """Write the kernels of a window, once it has ended and all of it is there."""
        first, before = self._asked.get(member.pid, (0, member.windows))
        since, end = member.span
        is_settled = time.time() - end / 1e9 > settles_s(member.span, WINDOW_STEPS)
        if member.windows == before or not is_settled:
            return
        del self._asked[member.pid]
        cost = window_cost(steps, first)
        if cost is not None:
            self._costs.append(cost)
        last = steps[steps["number"] == first + WINDOW_STEPS - 1]["end"]
        # Somebody may have ended it early.
        if len(last) and int(last[0]) <= end:
            with suppress(OSError, InputError):
                ask(member.socket, "write")
                # A new file may have begun meanwhile; each repeats names and cards.
                paths = in_order(member.folder.glob(f"*.{member.pid}[.~-]*spool"))[-2:]
                spool = join_spools([read_spool(path) for path in paths])
                for tag in (b"KERN", b"GRPH"):
                    rows = spool.records[tag]
                    spool.records[tag] = rows[rows["start"] >= since]
                reduce_kernels(spool, first, self._classify, writer)


def steps_between_windows(every: int, made: int, costs: Collection[float]) -> int:
    """Return at multiples of how many steps windows are opened.

    That is ``every``, doubled until processes make half of it between two looks at most (``made``),
    and windows, of which ``costs`` are known in steps, cost a hundredth of it at most.
    """
    is_known = len(costs) >= _FEWEST_JUDGED
    least = max(2.0 * made, statistics.median(costs) / _DEAREST if is_known else 0.0)
    while every < least:
        every *= 2
    return every


def window_cost(steps: Records, first: int) -> float | None:
    """Return by how many usual steps a window and the half second after it took longer than as many
    steps before it; None where there are not so many.
    """
    began = np.searchsorted(steps["number"], first)
    lengths = steps["end"].astype(np.int64) - steps["start"].astype(np.int64)
    ends = steps["end"][began : began + WINDOW_STEPS]
    ended = np.searchsorted(steps["start"], ends.max(initial=0) + _ECHO_NS)
    count = ended - began
    before, since = lengths[max(began - count, 0) : began], lengths[began:ended]
    if not 0 < count == len(before):
        return None
    return float((since.sum() - before.sum()) / max(np.median(before), 1))


def reduce_kernels(spool: Spool, first: int, classify: Classify, writer: SketchWriter) -> None:
    """Write counts and times of the kernels of a window by family, by collective, and of the
    longest ones by name and size: of the card that ran most of them in the process.

    CUDA graphs of whose kernels nothing is known are a family, too.
    """
    kernels, graphs, cards = (spool.records[tag] for tag in (b"KERN", b"GRPH", b"DEVI"))
    devices = np.append(kernels["device"], graphs["device"])
    if not len(devices):
        return
    device = np.unique(devices)[np.unique(devices, return_counts=True)[1].argmax()]
    kernels, graphs = (rows[rows["device"] == device] for rows in (kernels, graphs))
    sizes = np.column_stack([kernels[name] for name in ("name", "grid", "block")]).astype(np.int64)
    alike, which = np.unique(sizes, axis=0, return_inverse=True)
    clear = demangle_all({spool.name(id) for id in set(alike[:, 0].tolist())})
    groups: dict[tuple[int, str], list[Records]] = defaultdict(list)
    if len(graphs):
        groups[FAMILY, "CUDA graphs"].append(graphs)
    for n, (id, *size) in enumerate(alike.tolist()):
        name, rows = clear[spool.name(id)], kernels[which.ravel() == n]
        family, text = (part[:_LONGEST_NAME] for part in classify(name))
        kind = COLLECTIVE if family == "communication" else KERNEL
        if kind == KERNEL:
            text += f" {zlib.crc32(f'{name}{size}'.encode()):08x}"
        groups[FAMILY, family].append(rows)
        groups[kind, text].append(rows)
    found = []
    for (kind, text), parts in groups.items():
        start, end = (np.concatenate([rows[name] for rows in parts]) for name in ("start", "end"))
        lengths = (end - start).astype(np.int64)
        middle, total = min(int(np.median(lengths)), _LONGEST_NS), int(lengths.sum())
        found.append((kind, text, len(lengths), middle, total))
    found.sort(key=lambda row: (row[0], -row[-1]))
    compared = [row for row in found if row[0] == KERNEL][:_COMPARED]
    table = [
        (first, WINDOW_STEPS, kind, writer.number(text), *figures)
        for kind, text, *figures in (*(row for row in found if row[0] != KERNEL), *compared)
    ]
    card = next((card for card in cards if card["ordinal"] == device), None)
    uuid = "" if card is None else f"GPU-{UUID(bytes=bytes(card['uuid']))}"
    model = "" if card is None else bytes(card["name"]).decode("utf-8", "replace")
    writer.append_kernels(np.array(table, KERNELS), uuid, model)


def sketch(host: HostEvents, ended: Records, writer: SketchWriter) -> Steps:
    """Return the records of some steps of a process."""
    steps, records = np.zeros(len(ended), STEP), host.records
    start, end = (ended[name].astype(np.int64) for name in ("start", "end"))
    steps["end"], steps["length"], steps["step"] = end, end - start, ended["number"]
    id_of = {name: id for id, name in host.names.items()}
    phases = {name: _named(records["phase"], id_of, name) for name in _PHASES}
    ranges = records["annotation"]
    loads = [id for id, name in host.names.items() if re.search(DATA_RANGE, name)]
    of_parts = {
        "data": np.concatenate([records["data_wait"], ranges[np.isin(ranges["name"], loads)]]),
        "gc": records["gc"],
        "compilation": records["compilation"],
        **phases,
    }
    for part, rows in of_parts.items():
        steps[part] = union(rows["start"], rows["end"]).within(start, end)
    ends = np.sort(phases[FORWARD]["end"].astype(np.int64))
    last = np.searchsorted(ends, end, side="right") - 1
    inside = (last >= 0) & (ends[last] > start) if len(ends) else np.zeros(len(start), np.bool_)
    steps["forward_end"][inside] = ends[last[inside]]
    counters = records["counter"]
    queued = _named(counters, id_of, "queued")
    # The looks of earlier steps are in their sketches.
    is_new = queued["end"].astype(np.int64) > start[0]
    queued = queued[is_new & np.isin(queued["thread"], ended["thread"])]
    at = np.searchsorted(end, queued["end"].astype(np.int64))
    within = at < len(end)
    steps["queued"] = np.bincount(at[within], counts(queued)[within], len(end))
    memory = _named(counters, id_of, "resident memory")
    if len(memory):
        seen = np.searchsorted(memory["end"], ended["end"], side="right") - 1
        steps["resident_bytes"] = np.where(seen >= 0, counts(memory)[seen], 0)
    samples = records["sample"]
    samples = samples[np.isin(samples["thread"], ended["thread"])]
    seen = np.searchsorted(samples["start"], ended["end"], side="right") - 1
    for index in np.flatnonzero(seen >= 0).tolist():
        sample = samples[seen[index]]
        if sample["start"] >= start[index]:
            steps["line"][index] = writer.number(host.names.get(int(sample["name"]), "?"))
    return steps


def _named(rows: Records, id_of: dict[str, int], name: str) -> NDArray[Any]:
    named: NDArray[Any] = rows[rows["name"] == id_of[name]] if name in id_of else rows[:0]
    return named
