"""The rows of nvprof's tables as rows of nsys's: an INSERT ... SELECT for each table.

The statements expect nvprof's file attached as ``nvprof``, and these temporary tables, which say
what stands for a thing of the file in the new one:

names      id (of StringTable), kept (in StringIds), demangled, short
threads    number (of 32 bits of a pthread id; 0 for none), raw (as 4 bytes), thread (globalTid)
calls      class, number, kept
overheads  kind, number, kept

Parameters: ``:origin``, the moment that is 0 (nanoseconds of CLOCK_REALTIME); ``:late``, by how
much the GPU's clock is ahead of the host's; ``:process``, a globalPid; ``:unknown``, a string's id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from gputrace.traces.nvprof.calls import DRIVER, RUNTIME
from gputrace.traces.nvprof.file import CALLS, COPIES, KERNELS, PREFIX

Columns = frozenset[str]

TEMPORARY: Final = {
    "names": "id INTEGER PRIMARY KEY, kept INTEGER, demangled INTEGER, short INTEGER",
    "threads": "number INTEGER PRIMARY KEY, raw BLOB UNIQUE, thread INTEGER",
    "calls": "class INTEGER, number INTEGER, kept INTEGER, PRIMARY KEY (class, number)",
    "overheads": "kind INTEGER PRIMARY KEY, number INTEGER, kept INTEGER",
}
HAS_TIMES: Final = "r.start > 0 AND r.end > 0"
"""nvprof writes 0 where it had no room left to take a time."""
OBJECT_THREAD: Final = "CASE r.objectKind WHEN 2 THEN substr(r.objectId, 5, 4) ELSE x'00000000' END"
"""Of a union of pid and thread, device and stream; kind 2 is a thread."""
_PUSH_POP, _START_END, _MARK, _DOMAIN = 59, 60, 34, 75
"""Of nsys's NVTX events."""
_LAUNCH: Final = (
    *("registersPerThread", "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"),
    *("staticSharedMemory", "dynamicSharedMemory", "localMemoryPerThread", "localMemoryTotal"),
    "gridId",
)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one of nsys's tables: an expression for each column, and where they come from."""

    table: str
    columns: Mapping[str, str]
    source: str

    @property
    def insert(self) -> str:
        """The statement."""
        names, values = ", ".join(self.columns), ", ".join(self.columns.values())
        return f"INSERT INTO main.{self.table} ({names}) SELECT {values} FROM {self.source}"


def all_rows(columns: Mapping[str, Columns]) -> Iterator[Rows]:
    """What can be made of a file that has these columns, by table."""
    for table, make in _MAKERS.items():
        if table in columns and _NEEDS.get(table, table) in columns:
            yield from make(table, columns[table])


def strings_named(columns: Mapping[str, Columns]) -> Iterator[tuple[str, str]]:
    """Tables, and expressions for the strings that their rows name, 0 for none.

    Other strings stay behind: the command line is the name of a process.
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


def _on_host() -> dict[str, str]:
    return {edge: f"r.{edge} - :origin" for edge in ("start", "end")}


def _same(names: tuple[str, ...], known: Columns, otherwise: str) -> dict[str, str]:
    return {name: f"r.{name}" if name in known else otherwise for name in names}


def _memory(column: str, known: Columns) -> str:
    """nsys counts kinds of memory from pageable, CUPTI from unknown; 7 is nsys's unknown."""
    if column not in known:
        return "7"
    return f"CASE WHEN r.{column} BETWEEN 1 AND 7 THEN r.{column} - 1 ELSE 7 END"


def _kernels(table: str, known: Columns) -> Iterator[Rows]:
    names = {
        "demangledName": "COALESCE(n.demangled, :unknown)",
        "shortName": "COALESCE(n.short, :unknown)",
        "mangledName": "COALESCE(n.kept, :unknown)",
    }
    more = _same(_LAUNCH, known, "0") | _same(("launchType", "sharedMemoryExecuted"), known, "NULL")
    ids = _on_gpu(known) | _same(("streamId",), known, "0")
    source = f"{_from(table)} LEFT JOIN temp.names AS n ON n.id = r.name WHERE {HAS_TIMES}"
    yield Rows(f"{PREFIX}KERNEL", ids | names | more, source)


def _copies(table: str, known: Columns) -> Iterator[Rows]:
    ends = ("srcDeviceId", "srcContextId", "dstDeviceId", "dstContextId")
    columns = _on_gpu(known) | {
        "bytes": "r.bytes",
        "copyKind": "r.copyKind",
        "srcKind": _memory("srcKind", known),
        "dstKind": _memory("dstKind", known),
        **_same(ends, known, "NULL"),
    }
    yield Rows(f"{PREFIX}MEMCPY", columns, f"{_from(table)} WHERE {HAS_TIMES}")


def _memsets(table: str, known: Columns) -> Iterator[Rows]:
    kind = _memory("memoryKind", known)
    columns = _on_gpu(known) | {"value": "r.value", "bytes": "r.bytes", "memKind": kind}
    yield Rows(f"{PREFIX}MEMSET", columns, f"{_from(table)} WHERE {HAS_TIMES}")


def _graphs(table: str, known: Columns) -> Iterator[Rows]:
    columns = _on_gpu(known) | {"graphId": "r.graphId", "graphExecId": "r.graphId"}
    yield Rows(f"{PREFIX}GRAPH_TRACE", columns, f"{_from(table)} WHERE {HAS_TIMES}")


def _calls(table: str, _known: Columns) -> Iterator[Rows]:
    event_class = DRIVER if table == "DRIVER" else RUNTIME
    columns = _on_host() | {
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
    yield Rows(f"{PREFIX}RUNTIME", columns, source)


def _synchronizations(table: str, _known: Columns) -> Iterator[Rows]:
    columns = _on_host() | {
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
    yield Rows(f"{PREFIX}SYNCHRONIZATION", columns, source)


def _overheads(table: str, _known: Columns) -> Iterator[Rows]:
    columns = _on_host() | {
        "eventClass": "0",
        "globalTid": "t.thread",
        "nameId": "o.kept",
        "overheadType": "o.number",
    }
    source = (
        f"{_from(table)} JOIN temp.threads AS t ON t.raw = {OBJECT_THREAD} "
        f"JOIN temp.overheads AS o ON o.kind = r.overheadKind WHERE {HAS_TIMES}"
    )
    yield Rows(f"{PREFIX}OVERHEAD", columns, source)


def _markers(table: str, known: Columns) -> Iterator[Rows]:
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
    kind = f"CASE WHEN e.objectId <> r.objectId THEN {_START_END} ELSE {_PUSH_POP} END"
    ranges = shared | {"end": "e.timestamp - :origin", "eventType": kind}
    joined = f"{source} LEFT JOIN {ends} AS e ON e.id = r.id WHERE r.flags & 2"
    yield Rows("NVTX_EVENTS", ranges, joined)
    yield Rows("NVTX_EVENTS", shared | {"eventType": str(_MARK)}, f"{source} WHERE r.flags & 1")
    if "domain" in known:
        created = shared | {"eventType": str(_DOMAIN), "start": "min(r.timestamp) - :origin"}
        named = f"{source.replace('r.name', 'r.domain')} WHERE r.domain > 0 GROUP BY r.domain"
        yield Rows("NVTX_EVENTS", created, named)


def _thread_names(table: str, _known: Columns) -> Iterator[Rows]:
    source = (
        f"{_from(table)} JOIN temp.threads AS t ON t.raw = {OBJECT_THREAD} "
        "JOIN temp.names AS n ON n.id = r.name WHERE r.objectKind = 2"
    )
    yield Rows("ThreadNames", {"nameId": "n.kept", "globalTid": "t.thread"}, source)


_MAKERS: Final[Mapping[str, Callable[[str, Columns], Iterator[Rows]]]] = {
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
