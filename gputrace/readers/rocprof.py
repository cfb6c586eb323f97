"""Recordings of AMD's rocprofv3, read whole: databases (ROCm 7 and newer, `--output-format rocpd`)
and JSON (`--output-format json`).

The databases' schema is version 3 of ROCm's rocprofiler-sdk
(share/rocprofiler-sdk-rocpd/rocpd_tables.sql): tables named rocpd_NAME_UUID, a set of them for each
recorded process. In later revisions rows name a track and timestamps in place of a process, a
thread and times. Times are nanoseconds since the machine was booted, so files of one machine share
a clock.

The JSON's layout is rocprofiler-sdk's, too (source/docs/rocprofv3-schema.json). A file, or an entry
of its list, is for a process: a list of rows for each kind of activity, in which operations,
kernels and messages are numbers, and lists of what these stand for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import numpy as np
from msgspec import Meta, MsgspecError, Raw, Struct, field
from msgspec.json import Decoder
from numpy.typing import NDArray

from gputrace.errors import STOP, ErrorPolicy, InputError
from gputrace.model.events import GPU_KINDS, UNKNOWN, Events, IdLookup, Kind, Mask
from gputrace.model.trace import Device, Process, Session
from gputrace.readers.chrome_json import NOT_JSON
from gputrace.readers.compressed import read_content
from gputrace.readers.in_memory import MemoryTrace, Names
from gputrace.store.sqlite_page_scan import Query, Value
from gputrace.store.sqlite_reader import Database, read_integers

Ints = NDArray[np.int64]
Columns = dict[str, Ints]
T = TypeVar("T")
_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Handle = dict[str, _Count]

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
        rows = self._timed("kernel_dispatch", "kernel_id")
        symbols = {
            id: str(shown or str(mangled or "").removesuffix(".kd"))
            for id, mangled, shown in self._select(
                "info_kernel_symbol", "id", "kernel_name", "display_name"
            )
        }
        # Without HIP's streams all kernels are on stream 0, whatever their queue.
        streams = "stream_id" if (rows["stream_id"] > 0).any() else "queue_id"
        yield (
            self._common(rows, events)
            | {
                "kind": np.full(len(rows["start"]), Kind.KERNEL),
                "name": self._numbers(symbols, rows["kernel_id"]),
                "device": _look_up(
                    self._agents["id"], self._agents["type_index"], rows["agent_id"]
                ),
                "stream": rows[streams],
            }
        )
        yield self._copies(events)
        yield from self._calls(events)

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


_MOST_BYTES: Final = 8 << 30
_GPU: Final = 2
"""Type of an agent that is a GPU."""


class _Dispatch(Struct, frozen=True):
    kernel_id: _Count = 0
    agent_id: _Handle = {}
    queue_id: _Handle = {}


class _Row(Struct, frozen=True):
    """Row of any list; what a list does not have is left at its default."""

    start_timestamp: _Count
    end_timestamp: _Count
    kind: _Count = 0
    operation: _Count = 0
    thread_id: _Count = 0
    correlation_id: _Handle = {}
    dispatch_info: _Dispatch | None = None
    stream_id: _Handle = {}
    src_agent_id: _Handle = {}
    dst_agent_id: _Handle = {}
    bytes: _Count = 0


class _Agent(Struct, frozen=True):
    id: _Handle
    type: int
    logical_node_type_id: Annotated[int, Meta(ge=0, lt=1 << 15)]
    product_name: str = ""


class _Symbol(Struct, frozen=True):
    kernel_id: _Count
    formatted_kernel_name: str


class _Operations(Struct, frozen=True):
    operations: list[str]


class _Message(Struct, frozen=True):
    """Text of a ROCTX range, by the range's correlation id."""

    key: _Count
    value: str


class _Names(Struct, frozen=True):
    buffer_records: list[Raw] = []
    marker_api: list[Raw] = []


class _Activity(Struct, frozen=True):
    kernel_dispatch: list[Raw] = []
    memory_copy: list[Raw] = []
    hip_api: list[Raw] = []
    rccl_api: list[Raw] = []
    marker_api: list[Raw] = []


_KINDS: Final = {
    "kernel_dispatch": Kind.KERNEL,
    "memory_copy": Kind.COPY_OTHER,
    "hip_api": Kind.API,
    "rccl_api": Kind.RANGE,
    "marker_api": Kind.RANGE,
}
"""Kinds of the lists; HSA's calls, which are not read, are made within HIP's."""


class _Node(Struct, frozen=True):
    hostname: str = ""


class _About(Struct, frozen=True):
    pid: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    node: _Node = _Node()


class _Recorded(Struct, frozen=True):
    """Rows of one process."""

    metadata: _About = _About()
    agents: list[Raw] = []
    kernel_symbols: list[Raw] = []
    strings: _Names = _Names()
    buffer_records: _Activity = _Activity()


class _Document(Struct, frozen=True):
    recorded: list[_Recorded] = field(name="rocprofiler-sdk-tool")


def is_rocprof_json(content: bytes) -> bool:
    """Return True if uncompressed content begins as rocprofv3's JSON."""
    return content.lstrip(b" \n\r\t{").startswith(b'"rocprofiler-sdk-tool"')


def open_rocprof_json(path: Path, breaks: ErrorPolicy = STOP) -> RocprofTrace:
    """Open kernels, copies, calls of HIP and RCCL, and ROCTX ranges; broken rows are left out."""
    content = read_content(path, _MOST_BYTES, breaks)
    try:
        recorded = Decoder(_Document).decode(content).recorded
    except (MsgspecError, ValueError, RecursionError) as error:
        raise InputError(path, f"broken JSON of rocprofv3: {error}") from None
    del content
    reading = _Reading()
    parts = [
        part for number, each in enumerate(recorded) for part in reading.parts_of(number, each)
    ]
    processes, names = reading.processes or [Process(0)], reading.names.texts
    trace = RocprofTrace(path, parts, names, processes, reading.devices)
    trace.quality.drop(NOT_JSON, reading.skipped)
    return trace


class _Reading:
    """Columns of the processes in a file, and what their rows refer to."""

    def __init__(self) -> None:
        self.skipped = 0
        self.names = Names()
        self.processes: list[Process] = []
        self.devices: list[Device] = []

    def parts_of(self, number: int, recorded: _Recorded) -> Iterator[Columns]:
        """Yield the rows of one process, with the times of the file."""
        self.processes.append(
            Process(recorded.metadata.pid, host_name=recorded.metadata.node.hostname)
        )
        agents = {_handle(agent.id): agent for agent in self._each(recorded.agents, _Agent)}
        gpus = {
            id: agent.logical_node_type_id for id, agent in agents.items() if agent.type == _GPU
        }
        for id, index in gpus.items():
            self.devices.append(Device(number, index, name=agents[id].product_name))
        symbols = {
            symbol.kernel_id: symbol.formatted_kernel_name
            for symbol in self._each(recorded.kernel_symbols, _Symbol)
        }
        messages = {
            message.key: message.value
            for message in self._each(recorded.strings.marker_api, _Message)
        }
        operations = [
            each.operations for each in self._each(recorded.strings.buffer_records, _Operations)
        ]
        for name, kind in _KINDS.items():
            rows = list(self._each(getattr(recorded.buffer_records, name), _Row))
            part = _common(rows, number, kind)
            texts = [_operation(operations, row) for row in rows]
            if kind == Kind.KERNEL:
                dispatches = [row.dispatch_info or _Dispatch() for row in rows]
                texts = [symbols.get(each.kernel_id, "") for each in dispatches]
                queues = [_handle(each.queue_id) for each in dispatches]
                part["device"] = _column(gpus.get(_handle(each.agent_id)) for each in dispatches)
                # Without HIP's streams all kernels are on stream 0, whatever their queue.
                if not (part["stream"] > 0).any():
                    part["stream"] = _column(queues)
            elif kind == Kind.COPY_OTHER:
                source, destination = (
                    _column(gpus.get(_handle(getattr(row, end))) for row in rows)
                    for end in ("src_agent_id", "dst_agent_id")
                )
                part |= copy_columns(source != UNKNOWN, destination != UNKNOWN, source, destination)
                part["bytes"] = _column(row.bytes for row in rows)
            elif kind == Kind.RANGE:
                texts = [
                    messages.get(row.correlation_id.get("internal", 0)) or text
                    for row, text in zip(rows, texts, strict=True)
                ]
            part["name"] = _column(self.names.number(text) if text else None for text in texts)
            yield part

    def _each(self, items: list[Raw], kind: type[T]) -> Iterator[T]:
        decoder = Decoder(kind)
        for item in items:
            try:
                yield decoder.decode(item)
            except (MsgspecError, ValueError, RecursionError):
                self.skipped += 1


def _common(rows: list[_Row], process: int, kind: Kind) -> Columns:
    return {
        "start": _column(row.start_timestamp for row in rows),
        "end": _column(row.end_timestamp for row in rows),
        "kind": np.full(len(rows), kind, np.int64),
        "process": np.full(len(rows), process, np.int64),
        "thread": _column(row.thread_id for row in rows),
        "correlation": _column(row.correlation_id.get("internal") or None for row in rows),
        "stream": _column(_handle(row.stream_id) for row in rows),
    }


def _column(values: Iterable[int | None]) -> Ints:
    return np.array([UNKNOWN if value is None else value for value in values], np.int64)


def _handle(id: _Handle) -> int:
    return id.get("handle", UNKNOWN)


def _operation(operations: list[list[str]], row: _Row) -> str:
    names = operations[row.kind] if row.kind < len(operations) else []
    return names[row.operation] if row.operation < len(names) else ""
