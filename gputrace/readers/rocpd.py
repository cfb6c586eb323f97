"""Databases of AMD's rocprofv3 (ROCm 7 and newer, `--output-format rocpd`), read whole.

The schema is version 3 of ROCm's rocprofiler-sdk (share/rocprofiler-sdk-rocpd/rocpd_tables.sql):
tables named rocpd_NAME_UUID, a set of them for each recorded process. In later revisions rows name
a track and timestamps in place of a process, a thread and times. Times are nanoseconds since the
machine was booted, so files of one machine share a clock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.errors import InputError
from gputrace.model.events import GPU_KINDS, UNKNOWN, Events, IdLookup, Kind, Mask
from gputrace.model.trace import Device, Process, Session
from gputrace.readers.in_memory import MemoryTrace, Names
from gputrace.store.sqlite_page_scan import Query, Value
from gputrace.store.sqlite_reader import Database, read_integers

Ints = NDArray[np.int64]
Columns = dict[str, Ints]

_SET: Final = re.compile(r"rocpd_info_agent(_\w{1,100}|)")
_TRACKED: Final = ("pid", "tid", "agent_id", "queue_id", "stream_id")
_RANKS: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZES: Final = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_CATEGORIES: Final = {"HIP_": Kind.API, "MARKER_": Kind.RANGE, "RCCL_": Kind.RANGE}
"""Kinds of calls by the beginning of their category; HSA's calls are made within HIP's."""
_NOTHING: Final = (
    "rocprofv3 recorded nothing that ran on a GPU; record it again: "
    "rocprofv3 --runtime-trace --output-format rocpd -- python train.py"
)
BEFORE: Final = 1_000_000_000
"""Nanoseconds of the columns' clock before the first event: a time of 0 would seem lost."""


def is_rocpd(database: Database) -> bool:
    """Return True for tables of rocprofv3."""
    return any(True for _ in _suffixes(database))


def open_rocpd(path: Path, database: Database) -> RocprofTrace:
    """Open kernels, copies, HIP calls and ROCTX ranges of one or more processes."""
    names = Names()
    sets: list[_TableSet] = []
    for suffix in _suffixes(database):
        before = sum(len(tables.processes) for tables in sets)
        sets.append(_TableSet(database, suffix, names, before))
    sizes = {tables.world_size for tables in sets} - {UNKNOWN}
    trace = RocprofTrace(
        path,
        [part for tables in sets for part in tables.parts()],
        names.texts,
        [process for tables in sets for process in tables.processes],
        [device for tables in sets for device in tables.devices()],
        min(sizes) if len(sizes) == 1 else None,
    )
    database.close()
    return trace


class RocprofTrace(MemoryTrace):
    """Rows of rocprofv3, on a clock that begins shortly before the first of them."""

    def __init__(
        self,
        path: Path,
        parts: Iterable[Columns],
        names: Sequence[str],
        processes: Sequence[Process],
        devices: Sequence[Device],
        world_size: int | None = None,
    ) -> None:
        """Create the trace of columns with the times of a file, in nanoseconds since the boot.

        Raises InputError if nothing in them ran on a GPU.
        """
        rows = [part for part in parts if len(part["start"])]
        if not any(np.isin(part["kind"], GPU_KINDS).any() for part in rows):
            raise InputError(path, _NOTHING)
        timed = [part["start"][part["start"] > 0] for part in rows]
        first = min((int(starts.min()) for starts in timed if len(starts)), default=BEFORE)
        moved = []
        for part in rows:
            columns = dict(part)
            for edge in ("start", "end"):
                is_time = (part[edge] > 0) & (part[edge] < 1 << 62)
                columns[edge] = np.where(is_time, part[edge] + BEFORE - first, UNKNOWN)
            moved.append(Events.fitting(columns))
        session = Session(
            epoch_ns=first - BEFORE,
            hosts=frozenset(process.host_name for process in processes) - {""},
            ranks=frozenset(process.rank for process in processes) - {UNKNOWN},
            world_size=world_size,
        )
        super().__init__(path, "rocprofv3", moved, names, processes, devices, session)
        self.origin = BEFORE


def _suffixes(database: Database) -> Iterator[str]:
    """Yield what the names of each set of tables end in."""
    for name in database.tables:
        known = _SET.fullmatch(name)
        if known and database.has(f"rocpd_string{known[1]}", "id", "string"):
            yield known[1]


class _TableSet:
    """Tables of one run of rocprofv3; ids in them are of this set alone."""

    def __init__(self, database: Database, suffix: str, names: Names, first_process: int) -> None:
        self._database, self._suffix, self._names = database, suffix, names
        self._first_process = first_process
        hosts = dict(self._select("info_node", "id", "hostname"))
        self._process_ids: list[int] = []
        self.processes: list[Process] = []
        self.world_size = UNKNOWN
        environments = dict(self._select("info_process", "id", "environment"))
        for id, pid, node in self._select("info_process", "id", "pid", "nid"):
            variables = _object(environments.get(id))
            self.world_size = max(self.world_size, _number(variables, _SIZES))
            host = list(hosts).index(node) if node in hosts else 0
            name = str(hosts.get(node) or "")
            rank = _number(variables, _RANKS)
            self._process_ids.append(id)
            pid = pid if isinstance(pid, int) and 0 <= pid < 1 << 31 else 0
            self.processes.append(Process(pid, host, rank, host_name=name))
        self.processes = self.processes or [Process(0)]
        self._agents = self._integers("info_agent", "id", "type_index")
        gpus = {id for id, kind in self._select("info_agent", "id", "type") if kind == "GPU"}
        self._is_gpu = np.array([id in gpus for id in self._agents["id"].tolist()], np.int64)

    def devices(self) -> Iterator[Device]:
        """Yield the GPUs of each process."""
        columns = ("id", "type_index", "product_name", "name")
        for _, number, product, name in self._select("info_agent", *columns, where="type = 'GPU'"):
            if number in range(1 << 15):
                for process in range(len(self.processes)):
                    card = str(product or name or "")
                    yield Device(self._first_process + process, number, name=card)

    def parts(self) -> Iterator[Columns]:
        """Yield the rows of each table, with the times of the file."""
        events = self._integers("event", "id", "category_id", "stack_id")
        yield self._kernels(events)
        yield self._copies(events)
        yield from self._calls(events)

    def _kernels(self, events: Columns) -> Columns:
        rows = self._timed("kernel_dispatch", "kernel_id")
        symbols = {
            id: str(shown or str(mangled or "").removesuffix(".kd"))
            for id, mangled, shown in self._select(
                "info_kernel_symbol", "id", "kernel_name", "display_name"
            )
        }
        # Without HIP's streams all kernels are on stream 0, whatever their queue.
        streams = "stream_id" if (rows["stream_id"] > 0).any() else "queue_id"
        return self._common(rows, events) | {
            "kind": np.full(len(rows["start"]), Kind.KERNEL),
            "name": self._numbers(symbols, rows["kernel_id"]),
            "device": _look_up(self._agents["id"], self._agents["type_index"], rows["agent_id"]),
            "stream": rows[streams],
        }

    def _copies(self, events: Columns) -> Columns:
        rows = self._timed("memory_copy", "name_id", "src_agent_id", "dst_agent_id", "size")
        agents, numbers = self._agents["id"], self._agents["type_index"]
        ends = rows["src_agent_id"], rows["dst_agent_id"]
        from_gpu, to_gpu = (_look_up(agents, self._is_gpu, end) for end in ends)
        source, destination = (_look_up(agents, numbers, end) for end in ends)
        return (
            self._common(rows, events)
            | copy_columns(from_gpu == 1, to_gpu == 1, source, destination)
            | {
                "name": self._strings(rows["name_id"]),
                "stream": rows["stream_id"],
                "bytes": rows["size"],
            }
        )

    def _calls(self, events: Columns) -> Iterator[Columns]:
        """Yield HIP's and RCCL's calls and ROCTX's ranges, and then its marks."""
        kinds = self._category_kinds()
        categories = np.array(list(kinds), np.int64)
        kind_of = _look_up(
            categories, np.array(list(kinds.values()), np.int64), events["category_id"]
        )
        # Most events have no message, which is written as an empty object.
        said = self._select("event", "id", "extdata", where="extdata <> '{}'")
        messages = {id: str(_object(data).get("message") or "") for id, data in said}
        for table, columns in (("region", ("name_id",)), ("sample", ())):
            rows = self._timed(table, *columns)
            if not len(rows["start"]):
                continue
            part = self._common(rows, events)
            part["kind"] = _look_up(events["id"], kind_of, rows["event_id"])
            is_range = part["kind"] == Kind.RANGE
            name = np.where(is_range, self._numbers(messages, rows["event_id"]), UNKNOWN)
            if table == "region":
                part["name"] = np.where(name == UNKNOWN, self._strings(rows["name_id"]), name)
                keep = part["kind"] != UNKNOWN
            else:
                part["name"], keep = name, name != UNKNOWN
                part["kind"] = np.full(len(name), Kind.MARK)
            yield {name: column[keep] for name, column in part.items()}

    def _category_kinds(self) -> dict[int, Kind]:
        """Return the kinds of calls by the id of their category."""
        table, text = "string", "string"
        if self._database.has(f"rocpd_info_category{self._suffix}", "id", "name"):
            table, text = "info_category", "name"
        return {
            id: kind
            for id, name in self._select(table, "id", text)
            for beginning, kind in _CATEGORIES.items()
            if str(name).startswith(beginning)
        }

    def _common(self, rows: Columns, events: Columns) -> Columns:
        ids = np.array(self._process_ids, np.int64)
        numbers = self._first_process + np.arange(len(ids))
        process = _look_up(ids, numbers, rows["pid"])
        # A process that is not described is the first one.
        process[process == UNKNOWN] = self._first_process
        threads = self._integers("info_thread", "id", "tid")
        links = _look_up(events["id"], events["stack_id"], rows["event_id"])
        return {
            "start": rows["start"],
            "end": rows["end"],
            "process": process,
            "thread": _look_up(threads["id"], threads["tid"], rows["tid"]),
            "correlation": np.where(links > 0, links, UNKNOWN),
        }

    def _timed(self, table: str, *columns: str) -> Columns:
        """Return columns of a table, and process, thread, event and times of its rows."""
        there = self._database.tables.get(f"rocpd_{table}{self._suffix}", {})
        ids = ("event_id", "track_id", "start_id", "end_id", "timestamp_id")
        rows = self._integers(table, *_TRACKED, "start", "end", "timestamp", *ids, *columns)
        if "track_id" in there:
            tracks = self._integers("track", "id", *_TRACKED)
            for name in _TRACKED:
                if name not in there:
                    rows[name] = _look_up(tracks["id"], tracks[name], rows["track_id"])
        for edge in ("start", "end"):
            if "timestamp" in there:
                rows[edge] = rows["timestamp"]
            elif edge not in there:
                moments = self._integers("timestamp", "id", "value")
                id = f"{edge}_id" if f"{edge}_id" in there else "timestamp_id"
                rows[edge] = _look_up(moments["id"], moments["value"], rows[id])
        return rows

    def _integers(self, table: str, *columns: str) -> Columns:
        """Read integer columns of a table; one that is not there is `UNKNOWN`."""
        name = f"rocpd_{table}{self._suffix}"
        there = [column for column in columns if self._database.has(name, column)]
        values = {column: Value.of(column) for column in there}
        read: Mapping[str, Ints] = (
            read_integers(self._database, Query(name, values, dict.fromkeys(there, np.int64)))
            if there
            else {}
        )
        count = len(next(iter(read.values()), ()))
        unknown = np.full(count, UNKNOWN)
        return {column: read.get(column, unknown).astype(np.int64) for column in columns}

    def _select(self, table: str, *columns: str, where: str = "1") -> Iterator[tuple[Any, ...]]:
        """Yield columns of the rows that have an id; any value may be of any type."""
        where = f"typeof(id) = 'integer' AND {where}"
        return self._database.select(f"rocpd_{table}{self._suffix}", *columns, where=where)

    def _strings(self, ids: Ints) -> Ints:
        texts = {id: str(text) for id, text in self._select("string", "id", "string")}
        return self._numbers(texts, ids)

    def _numbers(self, texts: Mapping[int, str], ids: Ints) -> Ints:
        """Return the name ids of texts, given the texts by the ids of a table."""
        used, index = np.unique(ids, return_inverse=True)
        known = (texts.get(id) for id in used.tolist())
        numbers = [self._names.number(text) if text else UNKNOWN for text in known]
        return np.array(numbers, np.int64)[index]


def copy_columns(from_gpu: Mask, to_gpu: Mask, source: Ints, destination: Ints) -> Columns:
    """Return kinds and devices of copies, given whether each end is a GPU, and its number."""
    kinds = np.full(len(source), Kind.COPY_OTHER, np.int64)
    kinds[~from_gpu & to_gpu] = Kind.COPY_H2D
    kinds[from_gpu & ~to_gpu] = Kind.COPY_D2H
    both = from_gpu & to_gpu
    kinds[both] = np.where(source == destination, Kind.COPY_D2D, Kind.COPY_PEER)[both]
    is_peer = kinds == Kind.COPY_PEER
    return {
        "kind": kinds,
        "device": np.where(to_gpu, destination, np.where(from_gpu, source, UNKNOWN)),
        "source_device": np.where(is_peer, source, UNKNOWN),
        "destination_device": np.where(is_peer, destination, UNKNOWN),
    }


def _look_up(keys: Ints, values: Ints, wanted: Ints) -> Ints:
    """Return the value of each wanted key, or `UNKNOWN`."""
    if not len(keys):
        return np.full(len(wanted), UNKNOWN)
    rows = IdLookup(keys, np.arange(len(keys))).rows(wanted)
    return np.where(rows == UNKNOWN, UNKNOWN, values[rows])


def _object(text: object) -> Mapping[str, object]:
    """Return an object of JSON; empty for anything else."""
    try:
        value = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _number(variables: Mapping[str, object], names: tuple[str, ...]) -> int:
    """Return the first of some variables that is a number of 16 bits, or `UNKNOWN`."""
    texts = (str(variables.get(name, "")) for name in names)
    return next((int(text) for text in texts if re.fullmatch(r"[0-9]{1,4}", text)), UNKNOWN)
