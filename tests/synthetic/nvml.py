"""NVML samples and a topology for the cards of a recording, added to the file that has it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from tests.synthetic.recording import Recording

MIB = 1 << 20
IDLE_REASON = 0x1
Row = dict[str, float | int | str | None]
Values = Mapping[str, float | int | str | None]


@dataclass(frozen=True)
class NvmlCard:
    """Values that a card reports: once, while its GPU works, and while it does not."""

    described: Values = field(default_factory=dict)
    busy: Values = field(default_factory=dict)
    idle: Values = field(default_factory=dict)


DESCRIBED: Row = {
    "name": "NVIDIA H200", "memoryTotal": 143_771 * MIB, "smClockMax": 1980,
    "memoryClockMax": 3201, "pcieGenMax": 5, "pcieWidthMax": 16, "powerLimit": 700_000,
}  # fmt: skip
BUSY: Row = {
    "memoryUsed": 40_000 * MIB, "smClock": 1980, "memoryClock": 3201, "power": 500_000,
    "temperature": 60, "clocksEventReasons": 0, "pcieGen": 5, "pcieWidth": 16, "utilization": 95.0,
    "powerCapTime": 0, "swThermalTime": 0, "hwThermalTime": 0, "powerBrakeTime": 0,
}  # fmt: skip
IDLE: Row = BUSY | {
    "smClock": 345, "power": 80_000, "clocksEventReasons": IDLE_REASON, "pcieGen": 1,
    "utilization": 0.0,
}  # fmt: skip


def write_nvml(
    recording: Recording,
    path: str | Path,
    cards: Mapping[int, NvmlCard] | None = None,
    *,
    every_ns: int = 2_000_000,
    around_ns: int = 50_000_000,
    link: Callable[[int, int], Row] | None = None,
    value: Callable[[int, int, Row], Values] | None = None,
) -> None:
    """Adds the tables.

    Args:
        recording: what runs on the GPUs, and when.
        path: the nsys export that it was written to.
        cards: how each physical GPU differs from an H200 that nothing is wrong with.
        every_ns: from one sample to the next.
        around_ns: how long is sampled before the first operation and after the last.
        link: the columns of GPUTRACE_TOPOLOGY for two cards; 18 NVLinks if not given.
        value: what differs in a sample, by GPU, time and the sample's values.
    """
    busy = _busy(recording)
    given = cards or {}
    first = min(start for start, _ in busy.values()) - around_ns
    last = max(end for _, end in busy.values()) + around_ns
    with closing(sqlite3.connect(path)) as database, database:
        described = [{**_described(gpu), **given.get(gpu, NvmlCard()).described} for gpu in busy]
        _fill(database, "GPUTRACE_NVML_DEVICE", described)
        samples = []
        for time in range(first, last, every_ns):
            for gpu, (start, end) in busy.items():
                row = _sample(given.get(gpu, NvmlCard()), start <= time < end)
                row |= value(gpu, time, row) if value is not None else {}
                samples.append({"gpu": gpu, "timeNs": time} | row)
        _fill(database, "GPUTRACE_NVML_SAMPLE", samples)
        _fill(database, "GPUTRACE_TOPOLOGY", [(link or nvlinks)(a, b) for a in busy for b in busy])


NEIGHBOUR: Final = 4711
"""Id of the other process."""


def write_neighbour(recording: Recording, path: str | Path, *, every_ns: int = 5_000_000) -> None:
    """Adds which processes use each card, with the plan's neighbour in the steps that have it.

    Without a neighbour in the plan, a process with a context on each card computes nothing.
    """
    plan, busy = recording.plan, _busy(recording)
    pids = {gpu: p.pid for p in recording.processes for _, gpu in p.devices}
    ranks = {gpu: p.rank for p in recording.processes for _, gpu in p.devices}
    times = [
        (w.start, w.end)
        for w in recording.truth.windows
        if w.rank == plan.neighbour_rank and (w.step in plan.odd_steps or not plan.odd_steps)
    ]
    rows: list[Row] = []
    for gpu, (start, end) in busy.items():
        for time in range(start, end + every_ns, every_ns):
            look: Row = {"timeNs": time, "durationNs": every_ns, "gpu": gpu, "memoryUsed": MIB}
            held = sum(max(0, min(b, time) - max(a, time - every_ns)) for a, b in times)
            use = plan.neighbour_use * held / every_ns if ranks[gpu] == plan.neighbour_rank else 0.0
            rows.append(look | {"pid": pids[gpu], "isRecorded": 1, "use": 1 - use})
            rows.append(look | {"pid": NEIGHBOUR, "name": "python", "isRecorded": 0, "use": use})
    with closing(sqlite3.connect(path)) as database, database:
        _fill(database, "GPUTRACE_PROCESS_USE", rows)


def nvlinks(gpu: int, peer: int) -> Row:
    """Two cards of a machine with NVSwitch."""
    row: Row = {"gpu": gpu, "peer": peer, "link": "NV18", "ancestor": "PHB", "nvlinks": 18}
    if gpu == peer:
        row |= {"link": "X", "ancestor": "X", "nvlinks": None}
    status = None if gpu == peer else "OK"
    return row | {"p2pRead": status, "p2pWrite": status, "p2pNvlink": status}


def pcie(ancestor: str, p2p: str = "OK") -> Callable[[int, int], Row]:
    """Cards without NVLink, all related in one way."""

    def related(gpu: int, peer: int) -> Row:
        shown = "X" if gpu == peer else ancestor
        status = None if gpu == peer else p2p
        row: Row = {"gpu": gpu, "peer": peer, "link": shown, "ancestor": shown, "nvlinks": 0}
        return row | {"p2pRead": status, "p2pWrite": status, "p2pNvlink": "NS"}

    return related


def _busy(recording: Recording) -> dict[int, tuple[int, int]]:
    """From first to last operation, by GPU."""
    ops = recording.ops
    return {
        gpu: (int(ops["start"][ops["gpu"] == gpu].min()), int(ops["end"][ops["gpu"] == gpu].max()))
        for gpu in sorted({gpu for process in recording.processes for _, gpu in process.devices})
    }


def _described(gpu: int) -> Row:
    uuid = f"GPU-{gpu:08x}-1b03-36ec-9b21-6a0c3eb7c873"
    return {"gpu": gpu, "uuid": uuid, "pciBusId": f"0000:00:{6 + gpu:02x}.0", **DESCRIBED}


def _sample(card: NvmlCard, busy: bool) -> Row:
    return {**BUSY, **card.busy} if busy else {**IDLE, **card.idle}


def _fill(database: sqlite3.Connection, table: str, rows: Sequence[Mapping[str, object]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    database.execute(f"CREATE TABLE {table} ({', '.join(names)})")
    slots = ", ".join("?" * len(names))
    values = [[row.get(name) for name in names] for row in rows]
    database.executemany(f"INSERT INTO {table} VALUES ({slots})", values)


ACTIVE: Final[Mapping[str, tuple[float, float, float, float]]] = {
    "gemm": (94.8, 92.0, 0.0, 17.6),
    "sgemm": (95.4, 0.0, 75.9, 3.1),
    "elementwise": (98.1, 0.0, 1.6, 87.0),
    "copy_kernel": (98.0, 0.0, 0.0, 87.9),
    "void at::native::multi_tensor_apply_kernel": (97.0, 0.0, 1.0, 85.0),
    "attention": (88.0, 40.1, 18.4, 7.3),
    "embedding": (98.1, 0.0, 0.0, 77.5),
    "sort": (86.3, 0.1, 0.0, 49.9),
    "dropout": (97.3, 0.0, 3.3, 68.1),
    "conv": (89.2, 17.7, 0.9, 49.7),
    "lstm": (27.7, 0.25, 1.9, 0.08),
    "scan": (46.0, 0.0, 1.1, 0.001),
    "fma_one_block": (0.756, 0.0, 0.28, 0.0),
    "spin_one_block": (0.755, 0.0, 0.0, 0.0),
    "spin_clock": (99.7, 0.0, 0.0, 0.0),
    "spin_sleeping": (99.7, 0.0, 0.0, 0.0),
    "fused_exchange": (99.0, 45.0, 2.0, 10.0),
    "ncclDevKernel_AllReduce": (18.0, 0.0, 0.1, 2.0),
}
"""What an H200 counted during kernels: SMs, tensor cores, fp32 and memory active, in percent."""
SENT: Final = {"fused_exchange": 150e9, "ncclDevKernel_AllReduce": 100e9}
"""Bytes a second over NVLink."""


def write_activity(
    path: str | Path, *, seed: int = 0, delay_ns: int = 60_000_000, jitter_ns: int = 5_000_000
) -> None:
    """Adds readings of the counters of activity for all kernels of an export, each of 100 ms.

    A kernel does what the first name of `ACTIVE` does that its own begins with. The counters are
    seen ``delay_ns`` after that time, give or take ``jitter_ns``.
    """
    random = Random(seed)
    with closing(sqlite3.connect(path)) as database, database:
        kernels = database.execute(
            "SELECT deviceId, start, end, value FROM CUPTI_ACTIVITY_KIND_KERNEL "
            "JOIN StringIds ON id = demangledName ORDER BY start"
        ).fetchall()
        rows: list[Row] = []
        for gpu in sorted({row[0] for row in kernels}):
            ran = [(row[1], row[2], _active(row[3])) for row in kernels if row[0] == gpu]
            begin = ran[0][0] - random.randrange(50_000_000)
            last = max(end for _, end, _ in ran) + 200_000_000
            said, first = begin + delay_ns, 0
            while (end := begin + 100_000_000) <= last:
                while first < len(ran) and ran[first][1] <= begin:
                    first += 1
                sums = [0.0] * 5
                for start, until, values in ran[first:]:
                    if start >= end:
                        break
                    part = max(min(until, end) - max(start, begin), 0) / (end - begin)
                    sums = [all + part * value for all, value in zip(sums, values, strict=True)]
                written = end + delay_ns + random.randint(-jitter_ns, jitter_ns)
                rows.append({
                    "gpu": gpu, "timeNs": written, "periodNs": written - said,
                    "smActive": sums[0], "smOccupancy": sums[0] / 2, "integerActive": 5.0,
                    "tensorActive": sums[1], "dramActive": sums[3] + 0.0004, "fp64Active": 0.0,
                    "fp32Active": sums[2], "fp16Active": 0.0, "pcieTxRate": 10e6,
                    "pcieRxRate": 30e6, "nvlinkTxRate": sums[4], "nvlinkRxRate": sums[4],
                })  # fmt: skip
                begin, said = end, written
        _fill(database, "GPUTRACE_NVML_ACTIVITY", rows)


def _active(kernel: str) -> tuple[float, ...]:
    name = next(name for name in ACTIVE if kernel.startswith(name))
    return (*ACTIVE[name], SENT.get(name, 0.0))
