"""The cards that recorded processes saw, as far as nvprof's files and NVML tell them apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gputrace.collectors.nvml.log import read_nvml
from gputrace.traces.nvprof.file import PREFIX, NvprofFile, opened
from gputrace.traces.writer import TraceWriter

_KILO = 1000
_COLUMNS = (
    "name",
    "uuid",
    "coreClockRate",
    "globalMemoryBandwidth",
    "globalMemorySize",
    "l2CacheSize",
    "numMultiprocessors",
)


@dataclass(frozen=True, slots=True)
class _Card:
    """A row of DEVICE: one card as one process saw it."""

    pid: int
    ordinal: int
    name: str
    uuid: str
    figures: tuple[int | None, ...]
    """Clock in Hz, bytes a second of memory, bytes of memory and of L2 cache, multiprocessors."""

    @property
    def key(self) -> object:
        """The same for the same card; without a uuid, each process's are its own."""
        return self.uuid or (self.pid, self.ordinal)


def write_cards(writer: TraceWriter, files: Sequence[tuple[NvprofFile, int]], folder: Path) -> None:
    """Writes the cards and which ordinal of a process means which; files come with their pids.

    A card has the number that NVML gives it; without NVML, they are counted as they come.
    """
    seen = [card for file, pid in files for card in _cards(file, pid)]
    known = _nvml_cards(folder)
    first: dict[object, _Card] = {}
    for card in seen:
        first.setdefault(card.key, card)
    ids = _numbers(first.values(), known)
    rows = [
        (0, ids[key], card.name, known.get(card.uuid, (0, None))[1], 1, card.uuid, *card.figures)
        for key, card in first.items()
    ]
    columns = ["vmId", "id", "name", "busLocation", "isDiscrete", "uuid"]
    columns += ["clockRate", "memoryBandwidth", "totalMemory", "l2CacheSize", "smCount"]
    if rows:
        writer.add_rows("TARGET_INFO_GPU", columns, rows)
        devices = [(ids[card.key], card.ordinal, card.pid) for card in seen]
        writer.add_rows("TARGET_INFO_CUDA_DEVICE", ["gpuId", "cudaId", "pid"], devices)


def _numbers(cards: Iterable[_Card], known: dict[str, tuple[int, str]]) -> dict[object, int]:
    listed = list(cards)
    if all(card.uuid in known for card in listed):
        return {card.key: known[card.uuid][0] for card in listed}
    return {card.key: number for number, card in enumerate(listed)}


def _nvml_cards(folder: Path) -> dict[str, tuple[int, str]]:
    """Index and PCI address by uuid (hexadecimal digits alone)."""
    found = {}
    for path in folder.glob("*.nvml.jsonl"):
        for device in read_nvml(path).devices:
            uuid = str(device["uuid"] or "").removeprefix("GPU-").replace("-", "").lower()
            found[uuid] = int(device["gpu"]), str(device["pciBusId"] or "").lower()
    return found


def _cards(file: NvprofFile, pid: int) -> Iterator[_Card]:
    known = file.columns.get("DEVICE", frozenset())
    if "id" not in known:
        return
    selected = ", ".join(f"d.{name}" if name in known else "NULL" for name in _COLUMNS[1:])
    sql = (
        f"SELECT d.id, s.value, {selected} FROM {PREFIX}DEVICE AS d "
        "LEFT JOIN StringTable AS s ON s._id_ = d.name ORDER BY d.id"
    )
    with opened(file.path) as database:
        for ordinal, name, uuid, clock, bandwidth, *rest in database.execute(sql).fetchall():
            scaled = (None if value is None else value * _KILO for value in (clock, bandwidth))
            yield _Card(pid, ordinal, name or "", (uuid or b"").hex(), (*scaled, *rest))
