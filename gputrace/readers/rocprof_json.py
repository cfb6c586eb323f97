"""JSON of AMD's rocprofv3 (`--output-format json`): a file, or an entry of its list, for a process.

The layout is rocprofiler-sdk's (source/docs/rocprofv3-schema.json): a list of rows for each kind of
activity, in which operations, kernels and messages are numbers, and lists of what these stand for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final, TypeVar

import numpy as np
from msgspec import Meta, MsgspecError, Raw, Struct, field, json
from msgspec.json import Decoder

from gputrace.errors import STOP, ErrorPolicy, InputError
from gputrace.model.events import UNKNOWN, Kind
from gputrace.model.trace import Device, Process
from gputrace.readers.chrome_json import NOT_JSON
from gputrace.readers.compressed import read_content
from gputrace.readers.in_memory import Names
from gputrace.readers.rocpd import Columns, Ints, RocprofTrace, copy_columns

T = TypeVar("T")
_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Handle = dict[str, _Count]

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
        recorded = json.decode(content, type=_Document).recorded
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
