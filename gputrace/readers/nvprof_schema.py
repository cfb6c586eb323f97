"""Tables of nvprof's files, found by looking, and their rows in the tables of nsys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.errors import InputError
from gputrace.model.events import COPY_KINDS, UNKNOWN, Kind
from gputrace.model.struct import Struct
from gputrace.store.sqlite_page_scan import Integers, quote_identifier
from gputrace.store.sqlite_reader import Database, EventTable, SqliteTables, TimedTable
from gputrace.store.writer import DOMAIN, MARK, OVERHEADS, PUSH_POP, START_END, UNKNOWN_OVERHEAD

PREFIX: Final = "CUPTI_ACTIVITY_KIND_"
KERNELS: Final = ("CONCURRENT_KERNEL", "KERNEL", "CDP_KERNEL")
"""Tables of kernels: nearly all, those that ran one at a time, those that kernels launched."""
COPIES: Final = ("MEMCPY", "MEMCPY2")
ON_GPU: Final = (*KERNELS, *COPIES, "MEMSET", "GRAPH_TRACE")
CALLS: Final = ("RUNTIME", "DRIVER")


class NvprofFile(Struct, frozen=True):
    """One process, as nvprof recorded it."""

    path: Path
    pid: int
    """0 if no row has it."""
    columns: Mapping[str, frozenset[str]]
    """By table with rows; names without `PREFIX`."""
    start: int | None
    """Its first moment, nanoseconds of CLOCK_REALTIME; None without any."""
    kernels: int
    """Rows of kernels, with or without times."""


def read_file(path: Path) -> NvprofFile:
    """Inspect a file; raise InputError if it is broken or not of nvprof."""
    with closing(Database(path)) as database:
        tables = [table for table in database.tables if table.startswith(PREFIX)]
        if not tables or "StringTable" not in database.tables:
            raise InputError(path, "an SQLite file, but not of nvprof")
        columns = {
            table.removeprefix(PREFIX): frozenset(database.tables[table])
            for table in tables
            if database.has_rows(table)
        }

        def value(expression: str, table: str) -> Any:
            return next(database.query(f"SELECT {expression} FROM {PREFIX}{table}"))[0]

        starts = [
            # A row without times has 0 for one.
            value(f"CAST(min(NULLIF(max({column}, 0), 0)) AS INTEGER)", table)
            for table in (*ON_GPU, *CALLS, "SYNCHRONIZATION", "OVERHEAD", "MARKER")
            if (column := "timestamp" if table == "MARKER" else "start") in columns.get(table, ())
        ]
        return NvprofFile(
            path,
            read_pid(database),
            columns,
            min((start for start in starts if start is not None), default=None),
            sum(value("count(*)", table) for table in KERNELS if table in columns),
        )


def read_pid(database: Database) -> int:
    """Return the process's id; 0 if no row has it."""
    for table in CALLS:
        for (pid,) in database.select(PREFIX + table, "processId", where="1 LIMIT 1"):
            if isinstance(pid, int):
                return pid
    if database.has(f"{PREFIX}NAME", "objectKind"):
        is_process = "objectKind = 1"  # CUPTI_ACTIVITY_OBJECT_PROCESS
        for (raw,) in database.select(f"{PREFIX}NAME", "objectId", where=is_process):
            return int.from_bytes(raw[:4], "little") if isinstance(raw, bytes) else 0
    return 0


Columns = frozenset[str]

TEMPORARY: Final = {
    "names": "id INTEGER PRIMARY KEY, kept INTEGER, demangled INTEGER, short INTEGER",
    "threads": "number INTEGER PRIMARY KEY, raw BLOB UNIQUE, thread INTEGER",
    "calls": "class INTEGER, number INTEGER, kept INTEGER, PRIMARY KEY (class, number)",
    "overheads": "kind INTEGER PRIMARY KEY, number INTEGER, kept INTEGER",
}
_ON_HOST: Final = {edge: f"r.{edge} - :origin" for edge in ("start", "end")}
HAS_TIMES: Final = "r.start > 0 AND r.end > 0"
"""nvprof writes 0 where it had no room left to take a time."""
OBJECT_THREAD: Final = "CASE r.objectKind WHEN 2 THEN substr(r.objectId, 5, 4) ELSE x'00000000' END"
"""Parts of a union of pid and thread, device and stream; kind 2 is a thread."""
_LAUNCH: Final = (
    *("registersPerThread", "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"),
    *("staticSharedMemory", "dynamicSharedMemory", "localMemoryPerThread", "localMemoryTotal"),
    "gridId",
)


class TableInsert(Struct, frozen=True):
    """Insertion into one of nsys's tables: an expression for each column, and their source."""

    table: str
    columns: Mapping[str, str]
    source: str

    @property
    def insert(self) -> str:
        """The statement."""
        names, values = ", ".join(self.columns), ", ".join(self.columns.values())
        return f"INSERT INTO main.{self.table} ({names}) SELECT {values} FROM {self.source}"


def table_inserts(columns: Mapping[str, Columns]) -> Iterator[TableInsert]:
    """Return the statements for a file that has these columns, by table."""
    for table, make in _MAKERS.items():
        if table in columns and _NEEDS.get(table, table) in columns:
            yield from make(table, columns[table])


def strings_named(columns: Mapping[str, Columns]) -> Iterator[tuple[str, str]]:
    """Yield tables, and expressions for the strings that their rows name, 0 for none.

    Others are not copied: the command line is the name of a process.
    """
    yield from ((table, "r.name") for table in (*KERNELS, "MARKER") if table in columns)
    if "domain" in columns.get("MARKER", ()):
        yield "MARKER", "r.domain"
    yield "NAME", "CASE r.objectKind WHEN 2 THEN r.name END"


def _from(table: str) -> str:
    return f"nvprof.{PREFIX}{table} AS r"


def _on_gpu(known: Columns) -> dict[str, str]:
    span = {edge: f"r.{edge} - :origin - :late" for edge in ("start", "end")}
    same = {name: f"r.{name}" for name in ("deviceId", "contextId", "streamId", "correlationId")}
    node = {"graphNodeId": "NULLIF(r.graphNodeId, 0)"} if "graphNodeId" in known else {}
    return span | same | node | {"globalPid": ":process"}


def _same(names: tuple[str, ...], known: Columns, otherwise: str) -> dict[str, str]:
    return {name: f"r.{name}" if name in known else otherwise for name in names}


def _memory(column: str, known: Columns) -> str:
    """nsys counts kinds of memory from pageable, CUPTI from unknown; 7 is nsys's unknown."""
    if column not in known:
        return "7"
    return f"CASE WHEN r.{column} BETWEEN 1 AND 7 THEN r.{column} - 1 ELSE 7 END"


def _kernels(table: str, known: Columns) -> Iterator[TableInsert]:
    names = {
        "demangledName": "COALESCE(n.demangled, :unknown)",
        "shortName": "COALESCE(n.short, :unknown)",
        "mangledName": "COALESCE(n.kept, :unknown)",
    }
    more = _same(_LAUNCH, known, "0") | _same(("launchType", "sharedMemoryExecuted"), known, "NULL")
    ids = _on_gpu(known) | _same(("streamId",), known, "0")
    source = f"{_from(table)} LEFT JOIN temp.names AS n ON n.id = r.name WHERE {HAS_TIMES}"
    yield TableInsert(f"{PREFIX}KERNEL", ids | names | more, source)


def _copies(table: str, known: Columns) -> Iterator[TableInsert]:
    ends = ("srcDeviceId", "srcContextId", "dstDeviceId", "dstContextId")
    columns = _on_gpu(known) | {
        "bytes": "r.bytes",
        "copyKind": "r.copyKind",
        "srcKind": _memory("srcKind", known),
        "dstKind": _memory("dstKind", known),
        **_same(ends, known, "NULL"),
    }
    yield TableInsert(f"{PREFIX}MEMCPY", columns, f"{_from(table)} WHERE {HAS_TIMES}")


def _memsets(table: str, known: Columns) -> Iterator[TableInsert]:
    kind = _memory("memoryKind", known)
    columns = _on_gpu(known) | {"value": "r.value", "bytes": "r.bytes", "memKind": kind}
    yield TableInsert(f"{PREFIX}MEMSET", columns, f"{_from(table)} WHERE {HAS_TIMES}")


def _graphs(table: str, known: Columns) -> Iterator[TableInsert]:
    columns = _on_gpu(known) | {"graphId": "r.graphId", "graphExecId": "r.graphId"}
    yield TableInsert(f"{PREFIX}GRAPH_TRACE", columns, f"{_from(table)} WHERE {HAS_TIMES}")


def _calls(table: str, _known: Columns) -> Iterator[TableInsert]:
    event_class = DRIVER if table == "DRIVER" else RUNTIME
    columns = _ON_HOST | {
        "eventClass": str(event_class),
        "globalTid": "t.thread",
        "correlationId": "r.correlationId",
        "nameId": "c.kept",
        "returnValue": "r.returnValue",
    }
    source = (
        f"{_from(table)} JOIN temp.threads AS t ON t.number = r.threadId & 0xffffffff "
        f"JOIN temp.calls AS c ON c.class = {event_class} AND c.number = r.cbid WHERE {HAS_TIMES}"
    )
    yield TableInsert(f"{PREFIX}RUNTIME", columns, source)


def _synchronizations(table: str, _known: Columns) -> Iterator[TableInsert]:
    columns = _ON_HOST | {
        "deviceId": "c.deviceId",
        "contextId": "r.contextId",
        "streamId": "r.streamId & 0xffffffff",
        "correlationId": "r.correlationId",
        "globalPid": ":process",
        "syncType": "r.type",
        "eventId": "r.cudaEventId & 0xffffffff",
    }
    contexts = (
        f"(SELECT contextId, min(deviceId) AS deviceId FROM nvprof.{PREFIX}CONTEXT GROUP BY 1)"
    )
    source = f"{_from(table)} JOIN {contexts} AS c USING (contextId) WHERE {HAS_TIMES}"
    yield TableInsert(f"{PREFIX}SYNCHRONIZATION", columns, source)


def _overheads(table: str, _known: Columns) -> Iterator[TableInsert]:
    columns = _ON_HOST | {
        "eventClass": "0",
        "globalTid": "t.thread",
        "nameId": "o.kept",
        "overheadType": "o.number",
    }
    source = (
        f"{_from(table)} JOIN temp.threads AS t ON t.raw = {OBJECT_THREAD} "
        f"JOIN temp.overheads AS o ON o.kind = r.overheadKind WHERE {HAS_TIMES}"
    )
    yield TableInsert(f"{PREFIX}OVERHEAD", columns, source)


def _markers(table: str, known: Columns) -> Iterator[TableInsert]:
    """NVTX: a range is two rows of one id, flags 2 where it starts and 4 at its end; 1, a mark."""
    domain = "r.domain" if "domain" in known else "0"
    shared = {
        "start": "r.timestamp - :origin",
        "textId": "n.kept",
        "globalTid": "t.thread",
        "domainId": domain,
    }
    source = (
        f"{_from(table)} JOIN temp.threads AS t ON t.raw = {OBJECT_THREAD} "
        "LEFT JOIN temp.names AS n ON n.id = r.name"
    )
    ends = (
        "(SELECT id, min(timestamp) AS timestamp, min(objectId) AS objectId "
        f"FROM nvprof.{PREFIX}MARKER WHERE flags & 4 GROUP BY id)"
    )
    kind = f"CASE WHEN e.objectId <> r.objectId THEN {START_END} ELSE {PUSH_POP} END"
    ranges = shared | {"end": "e.timestamp - :origin", "eventType": kind}
    joined = f"{source} LEFT JOIN {ends} AS e ON e.id = r.id WHERE r.flags & 2"
    yield TableInsert("NVTX_EVENTS", ranges, joined)
    yield TableInsert(
        "NVTX_EVENTS", shared | {"eventType": str(MARK)}, f"{source} WHERE r.flags & 1"
    )
    if "domain" in known:
        created = shared | {"eventType": str(DOMAIN), "start": "min(r.timestamp) - :origin"}
        named = f"{source.replace('r.name', 'r.domain')} WHERE r.domain > 0 GROUP BY r.domain"
        yield TableInsert("NVTX_EVENTS", created, named)


def _thread_names(table: str, _known: Columns) -> Iterator[TableInsert]:
    source = (
        f"{_from(table)} JOIN temp.threads AS t ON t.raw = {OBJECT_THREAD} "
        "JOIN temp.names AS n ON n.id = r.name WHERE r.objectKind = 2"
    )
    yield TableInsert("ThreadNames", {"nameId": "n.kept", "globalTid": "t.thread"}, source)


_MAKERS: Final[Mapping[str, Callable[[str, Columns], Iterator[TableInsert]]]] = {
    **dict.fromkeys(KERNELS, _kernels),
    **dict.fromkeys(COPIES, _copies),
    **dict.fromkeys(CALLS, _calls),
    "MEMSET": _memsets,
    "GRAPH_TRACE": _graphs,
    "SYNCHRONIZATION": _synchronizations,
    "OVERHEAD": _overheads,
    "MARKER": _markers,
    "NAME": _thread_names,
}
_NEEDS: Final = {"SYNCHRONIZATION": "CONTEXT"}
"""The table without which a table's rows cannot be made."""


RUNTIME: Final = 0
DRIVER: Final = 1
"""CUDA interface of a call, as nsys's ``eventClass`` has it."""


def call_name(event_class: int, number: int) -> str:
    """Return the name as CUPTI spells it, with its version's suffix: ``cudaLaunchKernel_v7000``.

    Numbers beyond CUDA 12.9 get a name that says so.
    """
    prefix = "cuda" if event_class == RUNTIME else "cu"
    return call_names().get((event_class, number), f"{prefix}(unknown call {number})")


@cache
def call_names() -> dict[tuple[int, int], str]:
    """Return CUPTI's names of calls by interface and number."""
    text = files(__package__).joinpath("nvprof_calls.txt").read_text(encoding="ascii")
    rows = (line.split() for line in text.splitlines() if not line.startswith("#"))
    return {(int(event_class), int(number)): name for event_class, number, name in rows}


OVERHEAD: Final = 2
"""Beside `RUNTIME` and `DRIVER`, a family of names."""
_FAMILIES: Final = 4
_FIRST: Final = -2
"""Ids from here down are numbers of families; others are of StringTable."""
_MOST_NUMBER: Final = 1 << 27
_GRAPHS: Final = -(1 << 30)
"""Ids from here down are graphs: this minus the graph's id."""


class Table(EventTable, frozen=True):
    """Table of events; ``columns`` are SQL expressions by event column."""

    columns: Mapping[str, str]
    family: int | None = None
    """Names by number, if the names are numbers; else they are ids of strings."""
    on_gpu: bool = True
    """True if its times are of the GPU's clock."""
    required: tuple[str, ...] = ("start", "end")
    """Event columns without which its rows are useless."""

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


_SPAN: Final = {"start": '"start"', "end": '"end"'}
_ON_GPU: Final = {
    **_SPAN,
    "device": "deviceId",
    "stream": "streamId",
    "correlation": "correlationId",
}
_COPY: Final = {
    **_ON_GPU,
    "kind": "copyKind",
    "bytes": "bytes",
    "source_memory": "srcKind",
    "destination_memory": "dstKind",
    "source_device": "srcDeviceId",
    "destination_device": "dstDeviceId",
}
_CALL: Final = {**_SPAN, "thread": "threadId", "correlation": "correlationId", "name": "cbid"}
_OBJECT_THREAD: Final = OBJECT_THREAD.replace("r.", "")
OBJECT_COLUMNS: Final = ("objectKind", "objectId")
"""Columns that the expression for the thread of an object needs."""
_EDGES: Final = ("flags", "id", "timestamp")

TABLES: Final = (
    *(Table(name, (Kind.KERNEL,), {**_ON_GPU, "name": "name"}) for name in KERNELS),
    Table("GRAPH_TRACE", (Kind.GRAPH,), {**_ON_GPU, "name": "graphId"}),
    *(Table(name, COPY_KINDS, _COPY) for name in COPIES),
    Table("MEMSET", (Kind.MEMSET,), {**_ON_GPU, "bytes": "bytes"}),
    Table("RUNTIME", (Kind.API,), _CALL, RUNTIME, on_gpu=False),
    Table("DRIVER", (Kind.API,), _CALL, DRIVER, on_gpu=False),
    Table(
        "SYNCHRONIZATION",
        (Kind.SYNC,),
        {**_SPAN, "device": "contextId", "stream": "streamId", "correlation": "correlationId"},
        on_gpu=False,
    ),
    Table(
        "OVERHEAD",
        (Kind.OVERHEAD,),
        {**_SPAN, "thread": _OBJECT_THREAD, "name": "overheadKind"},
        OVERHEAD,
        on_gpu=False,
    ),
)
MARKERS: Final = Table(
    "MARKER",
    (Kind.RANGE, Kind.MARK),
    {**dict(zip(_EDGES, _EDGES, strict=True)), "name": "name", "thread": _OBJECT_THREAD},
    on_gpu=False,
    required=_EDGES,
)
"""Its rows are not events, but the edges of some."""

_COPIES: Final = "OTHER H2D D2H H2D D2H D2D D2D D2D D2D OTHER PEER OTHER"
"""Kinds by CUpti_ActivityMemcpyKind; arrays are the device's memory, the last is for others."""
_COPY_KINDS: Final = np.array([Kind[f"COPY_{kind}"] for kind in _COPIES.split()], np.int8)


def copy_kinds(numbers: Integers, source: Integers, destination: Integers) -> NDArray[np.int8]:
    """Return the kinds of copies; device-to-device between two devices is a peer copy."""
    last = len(_COPY_KINDS) - 1
    kinds: NDArray[np.int8] = _COPY_KINDS[np.where((numbers < 0) | (numbers > last), last, numbers)]
    apart = (source != destination) & (source != UNKNOWN) & (destination != UNKNOWN)
    return np.where((kinds == Kind.COPY_D2D) & apart, np.int8(Kind.COPY_PEER), kinds)


def name_ids(table: Table, numbers: Integers) -> Integers:
    """Return name ids for the numbers in a table; impossible numbers become `UNKNOWN`."""
    if table.kinds == (Kind.GRAPH,):
        ids = _GRAPHS - numbers
    elif table.family is None:
        return numbers
    else:
        numbers = _overhead_number(numbers) if table.family == OVERHEAD else numbers
        ids = _FIRST - _FAMILIES * numbers - table.family
    return np.where((numbers < 0) | (numbers > _MOST_NUMBER), UNKNOWN, ids)


def fixed_name(id: int) -> str:
    """Return the text of an id below 0, which is of no string in the file."""
    if id <= _GRAPHS:
        return f"CUDA graph {_GRAPHS - id}"
    number, family = divmod(_FIRST - id, _FAMILIES)
    if family in (RUNTIME, DRIVER):
        return call_name(family, number)
    if family != OVERHEAD:
        return f"<name {id}>"
    return _OVERHEAD_NAMES.get(number, UNKNOWN_OVERHEAD[1])


def _overhead_number(kinds: Any) -> Any:
    """Return small numbers for kinds of overhead: 1, and multiples of 65536."""
    return kinds >> 15 | kinds & 1


_OVERHEAD_NAMES: Final = {_overhead_number(kind): name for kind, (_, name) in OVERHEADS.items()}


_NAMES: Final = frozenset({"name", "domain"})
"""Columns that hold ids of StringTable, in the tables that have them."""
_GPU: Final = ("deviceId", "copyKind", "srcDeviceId", "dstDeviceId")


def nvprof_tables(database: Database, origin: int = 0, late: int = 0) -> SqliteTables:
    """Describe how to slice a file of nvprof.

    Windows count from ``origin`` on the file's clock; its times on a GPU are ``late``; both in ns.
    """
    kernels = {PREFIX + table: ("name",) for table in KERNELS}
    timed = partial(_timed, origin=origin, late=late)
    return SqliteTables(database, timed, "StringTable", "_id_", lambda _: _NAMES, kernels)


def _timed(database: Database, table: str, origin: int, late: int) -> TimedTable | None:
    columns, name = database.tables[table], table.removeprefix(PREFIX)
    shift = origin + (late if name in ON_GPU else 0)
    if {"timestamp", "id"} <= columns.keys():
        moment = _after(shift, "timestamp")  # Markers: a row for the start and one for the end.
        return TimedTable(moment, moment, together="id")
    if not {"start", "end"} <= columns.keys():
        return None
    start, end = _after(shift, "start"), _after(shift, "end")
    pair = "0", "correlationId"  # A file is of one process.
    if name in ON_GPU and "correlationId" in columns:
        return TimedTable(start, end, tuple(c for c in _GPU if c in columns), issues=pair)
    if name in CALLS and {"correlationId", "threadId", "cbid"} <= columns.keys():
        return TimedTable(start, end, ("threadId", "cbid"), issued=pair)
    return TimedTable(start, end)


def _after(moment: int, column: str) -> str:
    return f"({quote_identifier(column)} - {moment})" if moment else quote_identifier(column)
