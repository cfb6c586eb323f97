"""Tables of nsys SQLite exports: columns and enums; machine, ranks, GPUs and NCCL's messages."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from msgspec import DecodeError
from msgspec.json import decode
from numpy.typing import NDArray

from gputrace.errors import InputError
from gputrace.model.attempts import Life
from gputrace.model.events import COLUMN_TYPES, COPY_KINDS, GPU_KINDS, UNKNOWN, Events, Kind, Memory
from gputrace.model.nvml import (
    ACTIVITY,
    VALUES,
    Card,
    Link,
    Nvml,
    ProcessUse,
    Samples,
    plain_uuid,
)
from gputrace.model.options import Window
from gputrace.model.struct import Struct
from gputrace.model.trace import Session
from gputrace.store.sqlite_page_scan import quote_identifier
from gputrace.store.sqlite_reader import Database, EventTable, SqliteTables, TimedTable


class Table(EventTable, frozen=True):
    """Table of events; ``columns`` are nsys's columns for each event column, best first."""

    columns: Mapping[str, tuple[str, ...]]
    types: tuple[int, ...] = ()
    """Values of ``eventType`` of the rows that are events; empty where all are."""


_SPAN: Final = {"start": ("start",), "end": ("end",)}
_ON_GPU: Final = {
    **_SPAN,
    "process": ("globalPid",),
    "device": ("deviceId",),
    "stream": ("streamId",),
    "correlation": ("correlationId",),
}
_ON_HOST: Final = {
    **_SPAN,
    "process": ("globalTid",),
    "thread": ("globalTid",),
    "name": ("nameId",),
}

RANGE_TYPES: Final = (59, 60, 70, 71)
"""ENUM_NSYS_EVENT_TYPE: NVTX push/pop and start/end ranges, of programs and of text files."""
MARK_TYPES: Final = (34, 65)
HOST_RANGES: Final = "GPUTRACE_HOST_RANGE"
_HOST_RANGES: Final = (
    *(Kind.DATA_WAIT, Kind.RANGE, Kind.COLLECTION, Kind.PHASE, Kind.LOADER),
    *(Kind.COMPILATION, Kind.MODULE, Kind.SOURCE),
)
"""Kinds by ``kind`` in GPUTRACE_HOST_RANGE, from 1."""


def _table(shared: Mapping[str, tuple[str, ...]], table: str, /, *kinds: Kind, **of: str) -> Table:
    """Describe a table by columns that several have, and its other ones, parted by spaces, best
    first.
    """
    return Table(table, kinds, {**shared, **{name: tuple(b.split()) for name, b in of.items()}})


_of_gpu = partial(_table, _ON_GPU)
_of_host = partial(_table, _ON_HOST)

TABLES: Final = (
    _of_gpu(
        "CUPTI_ACTIVITY_KIND_KERNEL",
        Kind.KERNEL,
        name="demangledName shortName mangledName",
        node="graphNodeId",
    ),
    _of_gpu("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", Kind.GRAPH, name="graphExecId graphId"),
    _of_gpu(
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        *COPY_KINDS,
        kind="copyKind",
        bytes="bytes",
        source_memory="srcKind",
        destination_memory="dstKind",
        source_device="srcDeviceId",
        destination_device="dstDeviceId",
    ),
    _of_gpu("CUPTI_ACTIVITY_KIND_MEMSET", Kind.MEMSET, bytes="bytes"),
    _of_host("CUPTI_ACTIVITY_KIND_RUNTIME", Kind.API, correlation="correlationId"),
    _of_gpu("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", Kind.SYNC, name="syncType"),
    _of_host("OSRT_API", Kind.OS_RUNTIME),
    _of_host(
        "CUDA_GRAPH_NODE_EVENTS",
        Kind.GRAPH_NODE,
        correlation="graphNodeId",
        bytes="originalGraphNodeId",
    ),
    Table(
        "NVTX_EVENTS",
        (Kind.RANGE, Kind.MARK),
        {**_ON_HOST, "kind": ("eventType",), "name": ("textId",)},
        RANGE_TYPES + MARK_TYPES,
    ),
    *(
        _of_host(f"MPI_{name}_EVENTS", Kind.RANGE, name="textId")
        for name in ("P2P", "COLLECTIVES", "START_WAIT", "OTHER")
    ),
    _of_host("PROFILER_OVERHEAD", Kind.OVERHEAD),
    # gputrace's own, in its traces and in exports that it has added to:
    _of_host("GPUTRACE_STEP", Kind.STEP, correlation="step"),
    _of_host(HOST_RANGES, *_HOST_RANGES, kind="kind", correlation="number"),
    _of_host(
        "GPUTRACE_PYTHON_SAMPLE",
        Kind.SAMPLE,
        end="start",
        bytes="waitedNs",
        correlation="innerNameId",
    ),
    _of_host(
        "GPUTRACE_MESSAGE",
        *(Kind.MESSAGE, Kind.COMMUNICATOR),
        kind="ranks",
        correlation="communicator",
        bytes="bytes",
        device="peer",
    ),
    _of_host("GPUTRACE_HOST_COUNTER", Kind.COUNTER, bytes="value"),
    _of_host("CUPTI_ACTIVITY_KIND_OVERHEAD", Kind.OVERHEAD),
)

_SCHEMAS: Final = "gputrace knows nsys's schemas 2.9.1 to 3.27.0; use a newer one"


def usable(database: Database, table: Table, name: str) -> bool:
    """Return True if a table of the file has the columns that the rows of a known one need."""
    required = ["start", *(() if table.name == "NVTX_EVENTS" else table.columns["end"])]
    return database.has(name, *required, *(["eventType"] if table.types else []))


def name_tables(database: Database) -> list[str]:
    """Know tables with a suffix (``CUPTI_ACTIVITY_KIND_KERNEL_V3``), which later versions may
    write, by the names without one, if their columns fit and they have rows; return warnings of
    the others. Raises InputError for a table of kernels whose columns do not.
    """
    warnings = []
    for table in TABLES:
        place = "deviceId" if "device" in table.columns else "globalTid"
        known = {other.name for other in TABLES}
        named = [name for name in database.tables if name.startswith(f"{table.name}_")]
        for name in [table.name, *(name for name in named if name not in known)]:
            is_nsys = name in database.tables and not database.has(name, "_id_")
            if not is_nsys or not database.has_rows(name):
                continue
            needed = () if name == table.name else (place,)
            if not usable(database, table, name) or not database.has(name, *needed):
                what = f"table {name} has other columns than gputrace knows"
                if Kind.KERNEL in table.kinds:
                    raise InputError(database.path, f"its {what}; {_SCHEMAS}")
                warnings.append(f"left out: {what}")
            elif table.name not in database.tables or not database.has_rows(table.name):
                database.rename(name, table.name)
    return warnings


_FAILURE: Final = re.compile(
    r"(?m)^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b.*|terminate called .*"
    r"|.*(?:Segmentation fault|error while loading shared libraries|can't open file).*)$"
)
_LAST_TEXT: Final = 2_000
"""Characters at the end of a program's output in which to look for its last words."""
_MOST_WORDS: Final = 200


def read_failure(database: Database) -> str:
    """Return the error with which the recorded program's output ends; empty without one."""
    if not database.has("ProcessStreams", "contentId") or not database.has("StringIds", "value"):
        return ""
    sql = f"SELECT substr(CAST(value AS TEXT), -{_LAST_TEXT}) FROM {database.quoted('StringIds')} "
    ends = database.query(sql + "WHERE id IN (SELECT contentId FROM ProcessStreams)")
    errors = [error for (end,) in ends for error in _FAILURE.findall(str(end))[-1:]]
    return errors[-1].strip()[:_MOST_WORDS] if errors else ""


_COPIES: Final = "H2D D2H H2D D2H D2D D2D D2D D2D OTHER PEER H2D D2H D2D"
"""Kinds by ENUM_CUDA_MEMCPY_OPER, from 1; arrays are the device's memory, unified memory moves
pages."""
MIGRATIONS: Final = (11, 12, 13)
"""Numbers of ENUM_CUDA_MEMCPY_OPER for pages of unified memory, whose ends are left unknown."""
KIND_OF: Final[Mapping[str, Mapping[int, Kind]]] = {
    "CUPTI_ACTIVITY_KIND_MEMCPY": {
        number: Kind[f"COPY_{kind}"] for number, kind in enumerate(_COPIES.split(), 1)
    },
    HOST_RANGES: dict(enumerate(_HOST_RANGES, 1)),
    "GPUTRACE_MESSAGE": {1: Kind.MESSAGE, 2: Kind.COMMUNICATOR},
    "NVTX_EVENTS": {
        **dict.fromkeys(RANGE_TYPES, Kind.RANGE),
        **dict.fromkeys(MARK_TYPES, Kind.MARK),
    },
}

MEMORY_OF: Final[Mapping[int, Memory]] = {memory - 1: memory for memory in Memory if memory}
"""ENUM_CUDA_MEM_KIND, which counts from pageable where CUPTI counts from unknown."""


_STRINGS: Final = (
    r"(?m)\b(demangledName|shortName|mangledName|nameId|innerNameId|textId|jsonTextId)\b"
    r'|^\s*"?(\w+)\b.*REFERENCES StringIds'
)
"""Columns that name strings, in a table's declaration, where nsys says so in comments."""
_DECLARED_SYMBOLS: Final = r"\b(symbol|module)\b(?=\s+INTEGER)"
"""Text columns of call chains, which their declaration does not show."""

_TIMES: Final = ("start", "timestamp", "timeNs")
_GPU: Final = ("globalPid", "deviceId", "copyKind", "srcDeviceId", "dstDeviceId")
"""Who rows on a GPU are of, as far as a table has it; a peer copy is on two GPUs."""


def string_columns(declaration: str) -> frozenset[str]:
    """Return the columns that hold ids of StringIds, by a table's CREATE TABLE statement."""
    named = {match[1] or match[2] for match in re.finditer(_STRINGS, declaration)}
    return frozenset(named | {match[1] for match in re.finditer(_DECLARED_SYMBOLS, declaration)})


def _timed(database: Database, table: str, late: int) -> TimedTable | None:
    columns = database.tables[table]
    start = next((quote_identifier(name) for name in _TIMES if name in columns), None)
    if start is None:
        return None
    end = f'COALESCE("end", {start})' if "end" in columns else start
    if late and any(known.name == table and known.kinds[0] in GPU_KINDS for known in TABLES):
        start, end = f"({start} - {late})", f"({end} - {late})"
    groups: tuple[str, ...] = ("gpu",)
    if "deviceId" in columns:
        groups = tuple(name for name in _GPU if name in columns)
    elif "timeNs" not in columns:
        # What a thread last called before a wait for data is among the names' last calls.
        named = ("globalTid", "nameId") if "correlationId" in columns else ("globalTid",)
        groups = tuple(name for name in named if columns.keys() >= {"globalTid", name})
    process = next((name for name in ("globalPid", "globalTid") if name in columns), None)
    if "correlationId" in columns and process is not None:
        pair = f"{process} >> 24", "correlationId"
        if "deviceId" in columns:
            return TimedTable(start, end, groups, issues=pair)
        return TimedTable(start, end, groups, issued=pair)
    always = "0"
    if table == "GPUTRACE_API_WINDOW":
        always = "1"  # Without a row for a process, all of its calls were recorded.
    elif table == HOST_RANGES:
        always = "kind = 8"  # Lines of the source are recorded when they are first met.
    elif table == "GPUTRACE_MESSAGE":
        always = "ranks IS NOT NULL"  # Communicators are made before any window.
    elif table == "NVTX_EVENTS" and "eventType" in columns:
        # The names of domains and categories are among the events.
        always = f"eventType NOT IN {(*RANGE_TYPES, *MARK_TYPES)}"
    return TimedTable(start, end, groups, beside=start == '"timeNs"', always=always)


def nsys_tables(database: Database, late: int = 0) -> SqliteTables:
    """Describe how to slice an nsys export, whose times on GPUs are late by ns, or a trace of
    ours.
    """
    kernels = {"CUPTI_ACTIVITY_KIND_KERNEL": ("demangledName", "shortName", "mangledName")}
    timed = partial(_timed, late=late)
    return SqliteTables(database, timed, "StringIds", "id", string_columns, kernels, late)


class Member(Struct, frozen=True):
    """Host and rank of a process."""

    host: str = ""
    rank: int = UNKNOWN
    world_size: int = 0
    """0 where it is not known."""


_FARTHEST_ZONE: Final = 15 * 3600
NOBODY: Final = Member()


def read_members(database: Database) -> dict[int, Member]:
    """Return gputrace's processes by globalPid (hw:8 vm:8 pid:24 tid:24 bits) without thread."""
    if not database.has("GPUTRACE_PROCESS", "globalPid", "host", "rank", "worldSize"):
        return {}
    sql = (
        "SELECT globalPid, CAST(host AS TEXT), CAST(rank AS INTEGER), CAST(worldSize AS INTEGER) "
        "FROM GPUTRACE_PROCESS WHERE typeof(globalPid) = 'integer'"
    )
    return {
        id >> 24: Member(host or "", UNKNOWN if rank is None else rank, size or 0)
        for id, host, rank, size in database.query(sql)
    }


def read_lives(database: Database) -> list[Life]:
    """Return when gputrace's processes began and ended, by globalPid without the thread."""
    columns = ("globalPid", "attempt", "startNs", "endNs", "steps")
    if not database.has("GPUTRACE_LIFE", *columns, "firstStepNs", "lastStepNs", "exitCode"):
        return []
    members = read_members(database)
    whole = " AND ".join(f"typeof({name}) = 'integer'" for name in columns)
    return [
        Life(pid >> 24, members.get(pid >> 24, NOBODY).rank, attempt, start, end, steps, *rest)
        for pid, attempt, start, end, steps, *rest in database.query(
            "SELECT globalPid, attempt, startNs, endNs, steps, CAST(IFNULL(firstStepNs, 0) AS "
            "INTEGER), CAST(IFNULL(lastStepNs, 0) AS INTEGER), CAST(exitCode AS INTEGER) "
            f"FROM GPUTRACE_LIFE WHERE {whole}"
        )
    ]


def read_session(database: Database) -> Session:
    """Return properties of the run, with the ranks of processes that use a GPU.

    A launcher has a rank among launchers, and a worker of a data loader that of its trainer.
    """
    meta = dict(database.select("GPUTRACE_META", "name", "value", where="value IS NOT NULL"))
    members = read_members(database)
    # CUDA devices are listed for the processes that use them.
    users = {pid for (pid,) in database.select("TARGET_INFO_CUDA_DEVICE", "pid") if pid is not None}
    epochs = database.select("TARGET_INFO_SESSION_START_TIME", "utcEpochNs", where="utcEpochNs > 0")
    on_gpu = [m for key, m in members.items() if not users or key & 0xFFFFFF in users]
    ranked = [member for member in on_gpu if member.rank != UNKNOWN]
    hosts = {member.host for member in members.values()} or {meta.get("hostname", "")}
    return Session(
        epoch_ns=next((time for (time,) in epochs if isinstance(time, int)), None),
        job=meta.get("job", ""),
        hosts=frozenset(hosts - {""}),
        ranks=frozenset(member.rank for member in ranked),
        world_size=max((member.world_size for member in ranked), default=0) or None,
        utc_offset_ns=_utc_offset(database),
    )


def _utc_offset(database: Database) -> int | None:
    """Compare the session's start in both times; zones differ by quarters of an hour."""
    if not database.has("TARGET_INFO_SESSION_START_TIME", "utcTime", "localTime"):
        return None
    sql = (
        "SELECT strftime('%s', localTime) - strftime('%s', utcTime) "
        "FROM TARGET_INFO_SESSION_START_TIME"
    )
    known = (seconds for (seconds,) in database.query(sql) if isinstance(seconds, int))
    seconds = next(known, _FARTHEST_ZONE)
    return round(seconds / 900) * 900 * 10**9 if abs(seconds) < _FARTHEST_ZONE else None


_VISIBLE: Final = r"\bCUDA_VISIBLE_DEVICES\b\s*[=:]\s*['\"]?(\d{1,9}(?:,\d{1,9})*)\b"


class TargetGpu(Struct, frozen=True):
    """A row of TARGET_INFO_GPU."""

    id: int
    name: str = ""
    bus: str = ""
    uuid: str = ""


class DeviceMap:
    """Cards by process and CUDA ordinal, in one export.

    NVML counts cards in the order of their PCI addresses, nsys in an order of its own (an A100
    node: id 3 at 03:00.0, id 0 at c1:00.0); so if all addresses are known, they decide. NVML's
    records come first: processes may have seen some of the cards only.
    """

    def __init__(self, database: Database) -> None:
        rows = _rows(database, "TARGET_INFO_GPU", _TARGET, ["id", "name"])
        cards = [TargetGpu(**row) for row in rows]
        self._cards = {card.id: card for card in cards}
        # By nsys id: the id itself where not every card is listed with an address.
        self._indices = {card.id: card.id for card in cards}
        addresses = {card.bus for card in cards} - {""}
        if self._cards.keys() == set(range(len(cards))) and len(addresses) == len(cards):
            ordered = sorted(cards, key=lambda card: card.bus.lower())
            self._indices = {card.id: index for index, card in enumerate(ordered)}
        known = {plain_uuid(card.uuid): card.gpu for card in read_cards(database)}
        uuids = {card.id: plain_uuid(card.uuid) for card in cards}
        self._indices |= {id: known[uuid] for id, uuid in uuids.items() if uuid and uuid in known}
        used = database.select("TARGET_INFO_CUDA_DEVICE", "pid", "cudaId", "gpuId")
        whole = [row for row in used if all(isinstance(id, int) for id in row)]
        self._ids: dict[tuple[int, int], int] = {(pid, ordinal): id for pid, ordinal, id in whole}
        captured = database.select("META_DATA_CAPTURE", "name", "value")
        matches = (re.search(_VISIBLE, f"{name}={value}") for name, value in captured)
        visible = next(filter(None, matches), None)
        self._visible = [int(number) for number in visible[1].split(",")] if visible else []

    def find(self, pid: int, ordinal: int) -> tuple[int, str, str]:
        """Return physical index (or UNKNOWN), name and uuid of a process's CUDA ordinal."""
        id = self._ids.get((pid, ordinal))
        if id is None and not self._ids and len(self._cards) == 1 and ordinal == 0:
            id = next(iter(self._cards))
        if id is not None:
            card = self._cards.get(id, TargetGpu(id))
            return self._indices.get(id, id), card.name, card.uuid
        same = {card.name for card in self._cards.values()}
        name = same.pop() if len(same) == 1 else ""
        known = 0 <= ordinal < len(self._visible)
        return (self._visible[ordinal] if known else UNKNOWN), name, ""


_TARGET: Final = {"id": "id", "name": "name", "bus": "busLocation", "uuid": "uuid"}
_CARD: Final = {
    "gpu": "gpu", "uuid": "uuid", "name": "name", "pci": "pciBusId", "memory_bytes": "memoryTotal",
    "sm_clock_max": "smClockMax", "memory_clock_max": "memoryClockMax",
    "sm_clock_application": "smClockApplication",
    "memory_clock_application": "memoryClockApplication", "pcie_gen_max": "pcieGenMax",
    "pcie_width_max": "pcieWidthMax", "power_limit_mw": "powerLimit", "lost_ns": "lostNs",
}  # fmt: skip
_LINK: Final = {
    "gpu": "gpu", "peer": "peer", "link": "link", "ancestor": "ancestor", "nvlinks": "nvlinks",
    "p2p_read": "p2pRead", "p2p_write": "p2pWrite", "p2p_nvlink": "p2pNvlink",
}  # fmt: skip
_USE: Final = {
    "time_ns": "timeNs", "duration_ns": "durationNs", "gpu": "gpu", "pid": "pid", "name": "name",
    "is_recorded": "isRecorded", "use": "use", "memory_bytes": "memoryUsed", "sharing": "sharing",
    "cpus": "cpus", "numa_node": "numaNode",
}  # fmt: skip
_TEXTS: Final = frozenset(
    {"uuid", "name", "bus", "pci", "link", "ancestor", "p2p_read", "p2p_write", "p2p_nvlink"}
    | {"sharing", "cpus"}
)
_ANY_HOST: Final = ("GPUTRACE_PROCESS", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY")
_NUMBERS: Final[Mapping[str, Any]] = {"use": int | float}
_MOST_USE: Final = 1e6
_LONGEST_NS: Final = 1 << 60
"""Larger than any number of cores, and any time of a trace."""
_LIMIT: Final = f"{2.0**62:.1f}"
"""Larger than any number of NVML."""
_SAMPLED: Final = {"GPUTRACE_NVML_SAMPLE": VALUES, "GPUTRACE_NVML_ACTIVITY": ACTIVITY}
"""Tables with a row for a card and a moment, and their columns."""
_TABLES: Final = ("GPUTRACE_NVML_DEVICE", "GPUTRACE_TOPOLOGY", *_SAMPLED, "GPUTRACE_PROCESS_USE")


def read_nvml(database: Database, epoch_ns: int | None) -> Nvml:
    """Read NVML's records, if any; ``epoch_ns`` is the wall clock at 0 of the trace's clock."""
    if not database.tables.keys() & set(_TABLES):
        return Nvml()
    host = _host(database)
    links = _rows(database, "GPUTRACE_TOPOLOGY", _LINK, ["gpu", "peer"])
    samples, activity = (_samples(database, host, *table) for table in _SAMPLED.items())
    return Nvml(
        read_cards(database, epoch_ns),
        tuple(Link(**row, host=host) for row in links),
        samples,
        activity,
        tuple(sorted(_process_uses(database, host), key=lambda use: use.time_ns)),
    )


def _process_uses(database: Database, host: int) -> Iterator[ProcessUse]:
    for row in _rows(database, "GPUTRACE_PROCESS_USE", _USE, []):
        times, use = (row.get("time_ns"), row.get("duration_ns")), row.get("use")
        if all(time is not None and abs(time) < _LONGEST_NS for time in times):
            row["use"] = use if use is not None and 0 <= use < _MOST_USE else None
            row["is_recorded"] = bool(row.get("is_recorded"))
            yield ProcessUse(**row, host=host)


def read_cards(database: Database, epoch_ns: int | None = None) -> tuple[Card, ...]:
    """Read the cards; without an epoch, it is not known when one was lost."""
    cards: list[Card] = []
    for row in _rows(database, "GPUTRACE_NVML_DEVICE", _CARD, ["gpu"]):
        lost = row.pop("lost_ns", None)  # The wall clock when the card was found gone.
        known = lost is not None and epoch_ns is not None
        host = cards[0].host if cards else _host(database)
        cards.append(Card(**row, host=host, lost_ns=lost - epoch_ns if known else None))
    return tuple(cards)


def _host(database: Database) -> int:
    """Return the machine's number in the ids of its processes; a file is of one machine."""
    for table in _ANY_HOST:
        is_id = "typeof(globalPid) = 'integer' LIMIT 1"
        if (row := next(database.select(table, "globalPid", where=is_id), None)) is not None:
            return int(row[0]) >> 48
    return 0


def _rows(
    database: Database, table: str, columns: Mapping[str, str], required: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Yield rows with a text, a whole number or None by our names of their columns."""
    if not database.has(table, *required):
        return
    there = {ours: column for ours, column in columns.items() if database.has(table, column)}
    for values in database.select(table, *there.values()):
        row: dict[str, Any] = {}
        for ours, value in zip(there, values, strict=True):
            kind, none = (str, "") if ours in _TEXTS else (_NUMBERS.get(ours, int), None)
            row[ours] = value if isinstance(value, kind) else none
        if all(row[name] is not None for name in required):
            yield row


def _samples(database: Database, host: int, table: str, columns: Sequence[str]) -> Samples:
    if not database.has(table, "gpu", "timeNs"):
        return Samples()
    names = [name for name in columns if database.has(table, name)]
    # A value that is no sensible number is NULL.
    values = [
        f"CASE WHEN typeof({name}) IN ('integer', 'real') AND abs(CAST({name} AS REAL)) < {_LIMIT} "
        f"THEN CAST({name} AS REAL) END"
        for name in names
    ]
    shown = ", ".join(["CAST(timeNs AS INTEGER)", "CAST(gpu AS INTEGER)", *values])
    sql = (
        f"SELECT {shown} FROM {quote_identifier(table)} WHERE abs(CAST(timeNs AS REAL)) < {_LIMIT} "
        f"AND abs(CAST(gpu AS REAL)) < {_LIMIT} ORDER BY timeNs"
    )
    found = list(zip(*database.query(sql), strict=True))
    if not found:
        return Samples()
    time, gpu = (np.array(column, np.int64) for column in found[:2])
    floats = {
        name: np.array(column, np.float64)
        for name, column in zip(names, found[2:], strict=True)
        if any(value is not None for value in column)
    }
    return Samples(time, np.full(len(time), host), gpu, floats)


# NCCL's messages and communicators are in payloads of NVTX ranges. A binary one begins with 32
# bytes: domain, schema, and sizes; NVTX_PAYLOAD_SCHEMA_ENTRIES says what is where in the rest.
# Exports have them with --include-blobs=true alone. One in JSON has the labels of such entries, and
# numbers or texts of them, with or without separators of thousands.

_HEAD: Final = np.dtype([("domain", "<u4"), ("", "<u4"), ("schema", "<u4"), ("rest", "V20")])
_INTEGERS: Final = {5: "<i4", 6: "<u4", 15: "<i4", 16: "<u4"} | dict.fromkeys(
    (7, 8, 9, 10, 17, 18, 22), "<i8"
)
"""Types of entries by NVTX_PAYLOAD_ENTRY_TYPE of nvToolsExtPayload.h."""
_LABELS: Final = {
    "NCCL communicator ID": "communicator",
    "RCCL communicator ID": "communicator",
    "Message size [bytes]": "bytes",
    "Peer rank": "peer",
    "Root": "peer",
    "No. of ranks": "ranks",
    "Rank": "rank",
}
_MOST_OFFSET: Final = 4096
"""Offset past which no entry of NCCL's is."""
MESSAGE_KINDS: Final = frozenset({Kind.MESSAGE, Kind.COMMUNICATOR})

Schema = Mapping[str, tuple[str, int]]
"""Type and offset of each value."""


def has_messages(database: Database) -> bool:
    """Return whether the ranges of NCCL may have payloads with sizes of messages."""
    if not database.has("NVTX_EVENTS", "start", "end", "globalTid"):
        return False
    in_json = _json_payloads(database)
    if in_json and any(True for _ in database.query(f"{in_json} LIMIT 1")):
        return True
    if not database.has("NVTX_EVENTS", "binaryData"):
        return False
    labels = database.select("NVTX_PAYLOAD_SCHEMA_ENTRIES", "name")
    return not {label for (label,) in labels}.isdisjoint(_LABELS)


def read_messages(
    database: Database, process_index: Callable[[int], int], window: Window | None
) -> Events:
    """Read all messages and communicators, those of a window if one is given.

    ``process_index`` returns the index of a process by its globalTid without the thread.
    """
    schemas = _schemas(database)
    inside = "1"
    if window is not None:
        inside = f'"start" < {window.end} AND COALESCE("end", "start") >= {window.start}'
    where = f"binaryData IS NOT NULL AND {inside}"
    rows: dict[tuple[int, int, int], list[tuple[Any, ...]]] = defaultdict(list)
    ranges = database.quoted("NVTX_EVENTS")
    query = f"SELECT {_OF_RANGE}, binaryData FROM {ranges} WHERE {where}"
    for row in database.query(query) if database.has("NVTX_EVENTS", "binaryData") else ():
        blob = _bytes(row[-1])
        if len(blob) >= _HEAD.itemsize and all(isinstance(value, int) for value in row[:-1]):
            head = np.frombuffer(blob, _HEAD, 1)[0]
            rows[int(head["domain"]), int(head["schema"]), len(blob)].append((*row[:-1], blob))
    parts = [
        _columns(group, _decoded(schema, size - _HEAD.itemsize, group), process_index)
        for (domain, number, size), group in rows.items()
        if (schema := schemas.get((domain, number), {}))
    ]
    parts += [
        _columns(
            group,
            dict(zip(known, np.array([row[-1] for row in group], np.int64).T, strict=True)),
            process_index,
        )
        for known, group in _json_rows(database, inside).items()
    ]
    names = ("start", "end", "kind", "name", "process", "thread", "correlation", "bytes", "device")
    return Events(
        {
            name: np.concatenate([np.empty(0, COLUMN_TYPES[name]), *(part[name] for part in parts)])
            for name in names
        }
    )


_OF_RANGE: Final = '"start", COALESCE("end", "start"), globalTid, COALESCE(textId, -1)'
_MOST_JSON: Final = 1 << 12
"""Characters of a payload of NCCL's in JSON, which has a few numbers."""


def _json_payloads(database: Database, inside: str = "1") -> str:
    """Return a query of ranges and their payloads in JSON, those that may be NCCL's; empty where
    the export has no such column.
    """
    if not database.has("NVTX_EVENTS", "jsonText"):
        return ""
    payload = "jsonText"
    if database.has("NVTX_EVENTS", "jsonTextId") and database.has("StringIds", "id", "value"):
        texts = database.quoted("StringIds")
        payload = f"COALESCE(jsonText, (SELECT value FROM {texts} WHERE id = jsonTextId))"
    ranges = database.quoted("NVTX_EVENTS")
    return (
        f"SELECT {_OF_RANGE}, {payload} AS payload FROM {ranges} WHERE {inside} "
        """AND payload LIKE '{%"%CCL communicator ID"%'"""
    )


def _json_rows(
    database: Database, inside: str
) -> dict[tuple[str, ...], list[tuple[int, int, int, int, list[int]]]]:
    """Return ranges with what their payloads say, by the names of that."""
    rows = defaultdict(list)
    query = _json_payloads(database, inside)
    for *of_range, text in database.query(query) if query else ():
        if not isinstance(text, str) or len(text) > _MOST_JSON:
            continue
        try:
            given = decode(text.encode())
        except (DecodeError, UnicodeEncodeError, RecursionError):
            continue
        values = {
            value: int(number)
            for label, value in _LABELS.items()
            if (number := str(given.get(label, "")).replace(",", "")).isdecimal()
        }
        # Ids have 64 bits without a sign.
        values = {
            name: number - (number >> 63 << 64)
            for name, number in values.items()
            if number < 1 << 64
        }
        if values and all(isinstance(value, int) for value in of_range):
            rows[tuple(values)].append((*of_range, [*values.values()]))
    return rows


def _bytes(value: object) -> bytes:
    """Return a BLOB, which some converters write as hexadecimal text."""
    if isinstance(value, str):
        try:
            return bytes.fromhex(value)
        except ValueError:
            return b""
    return value if isinstance(value, bytes) else b""


def _schemas(database: Database) -> dict[tuple[int, int], Schema]:
    """Return the schemas with any of NCCL's values, by domain and number."""
    schemas: dict[tuple[int, int], dict[str, tuple[str, int]]] = defaultdict(dict)
    columns = "domainId", "schemaId", "type", "name", "offset"
    entries = database.select("NVTX_PAYLOAD_SCHEMA_ENTRIES", *columns)
    for domain, number, type_, label, at in entries:
        kind, value, offset = _INTEGERS.get(type_), _LABELS.get(label), at or 0
        if kind and value and isinstance(offset, int) and 0 <= offset < _MOST_OFFSET:
            schemas[domain, number][value] = kind, offset
    return {**schemas}


def _decoded(
    schema: Schema, size: int, rows: list[tuple[Any, ...]]
) -> dict[str, NDArray[np.int64]]:
    """Return the values of ranges of one schema, whose payloads have one size."""
    blobs = [row[-1] for row in rows]
    bytes_ = np.frombuffer(b"".join(blobs), np.uint8).reshape(len(rows), -1)[:, _HEAD.itemsize :]
    values = {}
    for value, (kind, offset) in schema.items():
        width = np.dtype(kind).itemsize
        if offset + width <= size:
            part = np.ascontiguousarray(bytes_[:, offset : offset + width])
            values[value] = part.view(kind)[:, 0].astype(np.int64)
    return values


def _columns(
    rows: list[tuple[Any, ...]],
    values: Mapping[str, NDArray[np.int64]],
    process_index: Callable[[int], int],
) -> dict[str, NDArray[Any]]:
    """Return the event columns of ranges whose payloads say the same."""
    start, end, thread, name, _ = zip(*rows, strict=True)
    unknown = np.full(len(rows), UNKNOWN, np.int64)
    makes = "ranks" in values
    threads = np.array(thread, np.int64)
    processes = {key: process_index(key) for key in set((threads >> 24).tolist())}
    peer = values.get("rank" if makes else "peer", unknown)
    return {
        "start": np.array(start, np.int64),
        "end": np.array(end, np.int64),
        "kind": np.full(len(rows), Kind.COMMUNICATOR if makes else Kind.MESSAGE, np.int8),
        "name": np.array(name, np.int64),
        "process": np.array([processes[key] for key in (threads >> 24).tolist()]),
        "thread": threads & 0xFFFFFF,
        "correlation": values.get("communicator", unknown),
        "bytes": values.get("ranks" if makes else "bytes", unknown),
        "device": np.where((peer >= 0) & (peer < 1 << 15), peer, UNKNOWN),
    }
