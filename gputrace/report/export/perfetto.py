"""Export for ui.perfetto.dev: its own packets, or the Trace Event Format (JSON).

Each GPU becomes a process with a thread for each stream, and for its steps, gaps, causes of lost
time and findings; each process of the program becomes one, too. Times are those of the report, in
microseconds with decimals, so that no nanosecond is lost.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, BinaryIO, Final, TextIO

import numpy as np

from gputrace.analyzers.operations import Gpu
from gputrace.analyzers.timeline_model import Scene
from gputrace.analyzers.timeline_model.trace_rows import Track, read_gpu_tracks, read_host_tracks
from gputrace.model.events import Events, Kind, distinct_ids
from gputrace.model.results import Analysis
from gputrace.model.time_class import CLASSES
from gputrace.model.trace import Trace
from gputrace.report import unfinished_file
from gputrace.report.export import Job
from gputrace.sanitize import cut, json_text

MOST_GAPS: Final = 10_000
"""Number of gaps exported, and of stretches of lost time of each GPU; the largest ones."""
_GPU_IDS: Final = 1
_HOST_IDS: Final = 1_000_000
"""First id of GPUs, and of processes; the operating system's ids may not be unique."""
_THREAD_IDS: Final = 10_000_000
"""First id of tracks, which are unique: Perfetto names threads by their id alone, and takes one
that equals its process's id for the main thread."""
_MOST_TRACKS: Final = 16
_COMPRESSION: Final = 5
_ROWS_AT_ONCE: Final = 8_192
_SEQUENCE: Final = 1
_CLEARED, _NEEDED = 1, 2
"""Flags of packets: what was written once before no longer counts, or is needed."""
_BEGIN, _END = 1, 2
"""Types of events of a track."""

KIND_NAMES: Final = {
    int(kind): kind.name.lower().replace("_", " ").replace("h2d", "host to device")
    .replace("d2h", "device to host").replace("d2d", "device to device")
    for kind in Kind
}  # fmt: skip
"""Names of events that have none, by their kind."""

Slice = tuple[int, int, str, Mapping[str, object]]
"""Start, end, name, arguments."""


def write(job: Job) -> None:
    """Write packets where the file's name ends in ``.pftrace``, else JSON, compressed where it
    ends in ``.gz``.
    """
    scene = job.read(MOST_GAPS)
    analysis = scene.analysis
    assert analysis is not None
    if job.target.suffix == ".pftrace":
        with unfinished_file(job.target) as path, path.open("wb") as packets:
            _write_all(PacketWriter(packets, job.trace.origin), job, scene)
        return
    compressed = job.target.suffix == ".gz"
    with (
        unfinished_file(job.target) as path,
        path.open("wb") as raw,
        # No file name and time in the header: the same trace yields the same bytes.
        gzip.GzipFile("", "wb", _COMPRESSION, raw, 0) if compressed else raw as packed,
        io.TextIOWrapper(packed, encoding="utf-8", errors="replace") as file,
    ):
        about = {"source": analysis.source, "notes": analysis.warnings}
        file.write('{"displayTimeUnit":"ns","otherData":' + _json(about) + ',"traceEvents":[\n')
        _write_all(JsonWriter(file, job.trace.origin), job, scene)
        file.write("\n]}\n")


def _write_all(writer: Writer, job: Job, scene: Scene) -> None:
    gpus = read_gpu_tracks(job.trace, job.window, job.progress)
    for number, (gpu, tracks) in enumerate(gpus):
        _write_gpu(writer, _GPU_IDS + number, gpu, tracks, scene, job.trace)
    for process, thread, track in read_host_tracks(job.trace, job.window):
        known = job.trace.processes[process]
        id = _HOST_IDS + process
        rank = f"rank {known.rank} " if known.rank >= 0 else ""
        host = f" on {known.host_name}" if known.host_name else ""
        writer.process(id, f"{rank}process {known.pid}{host} {known.name}".rstrip())
        # Keeps the tracks of a thread together.
        row_thread = writer.thread(
            id, f"{thread} {track.name}", thread * _MOST_TRACKS + track.kind_index
        )
        writer.rows(id, row_thread, track.events, _names(job.trace, track.events))


class JsonWriter:
    """Writer of trace events, one per line."""

    def __init__(self, file: TextIO, origin: int) -> None:
        self._file, self._origin = file, origin
        self._separator = ""
        self._processes: set[int] = set()
        self._threads = count(_THREAD_IDS)

    def process(self, id: int, name: str) -> None:
        """Name a process, and sort it below earlier ones."""
        if id not in self._processes:
            self._processes.add(id)
            self._about(id, 0, "process_name", {"name": name})
            self._about(id, 0, "process_sort_index", {"sort_index": id})

    def thread(self, process: int, name: str, order: int | None = None) -> int:
        """Add a thread, which is a track, and return its id; sort it by ``order``, else last."""
        id = next(self._threads)
        self._about(process, id, "thread_name", {"name": name})
        sort_index = id if order is None else order
        self._about(process, id, "thread_sort_index", {"sort_index": sort_index})
        return id

    def slices(self, process: int, thread: int, slices: Iterable[Slice]) -> None:
        """Write nested slices, each after the one that encloses it."""
        where = f',"pid":{process},"tid":{thread}'
        self._lines(
            f'{{"ph":"X","name":{_json(name)},"ts":{microseconds(start - self._origin)},'
            f'"dur":{microseconds(end - start)}{where},"args":{_json(arguments)}}}'
            for start, end, name, arguments in slices
        )

    def rows(self, process: int, thread: int, events: Events, names: Mapping[int, str]) -> None:
        """Write events as slices; also those of zero length, so that all are clickable."""
        where = f',"pid":{process},"tid":{thread}'
        quoted = {id: _json(text) for id, text in names.items()}
        for first in range(0, len(events), _ROWS_AT_ONCE):
            part = slice(first, first + _ROWS_AT_ONCE)
            starts = (events.start[part] - self._origin).tolist()
            lengths = (events.end[part] - events.start[part]).tolist()
            ids = zip(events.kind[part].tolist(), events.name[part].tolist(), strict=True)
            texts = _arguments(events, part)
            self._lines(
                f'{{"ph":"X","name":{quoted[id] if id in quoted else _QUOTED[kind]},'
                f'"ts":{microseconds(start)},"dur":{microseconds(length)}{where}{more}}}'
                for start, length, (kind, id), more in zip(starts, lengths, ids, texts, strict=True)
            )

    def _about(self, process: int, thread: int, what: str, arguments: Mapping[str, object]) -> None:
        where = f'"pid":{process},"tid":{thread}'
        self._lines([f'{{"ph":"M","name":"{what}",{where},"args":{_json(arguments)}}}'])

    def _lines(self, lines: Iterable[str]) -> None:
        text = ",\n".join(lines)
        if text:
            self._file.write(self._separator + text)
            self._separator = ",\n"


def _varint(number: int) -> bytes:
    data = bytearray()
    number &= (1 << 64) - 1
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _data(field: int, value: bytes | str) -> bytes:
    content = value.encode(errors="replace") if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(content)) + content


class PacketWriter:
    """Writer of Perfetto's own format, a stream of protocol buffers: smaller than JSON and quicker
    to open; its methods are those of `JsonWriter`.

    A process is a track whose children are its threads' tracks; a slice is the packet of its
    beginning and that of its end. Field numbers are those of perfetto/trace/trace_packet.proto and
    track_event/*.proto. Names are written once, before the first packet that needs them.
    """

    def __init__(self, file: BinaryIO, origin: int) -> None:
        self._file, self._origin = file, origin
        self._processes: set[int] = set()
        self._tracks = count(1 << 32)
        self._names: dict[str, int] = {}
        self._arguments: dict[str, int] = {}
        self._packet(_number(13, _CLEARED))

    def process(self, id: int, name: str) -> None:
        """Name a process, and sort it below earlier ones."""
        if id not in self._processes:
            self._processes.add(id)
            about = _number(1, id) + _data(6, name) + _number(3, id)
            self._packet(_data(60, _number(1, id) + _data(2, name) + _data(3, about)))

    def thread(self, process: int, name: str, order: int | None = None) -> int:
        """Add a thread, which is a track, and return its id; sort it by ``order``, else last."""
        id = next(self._tracks)
        rank = id - (1 << 32) if order is None else order
        track = _number(1, id) + _data(2, name) + _number(5, process) + _number(12, rank)
        self._packet(_data(60, track))
        return id

    def slices(self, process: int, thread: int, slices: Iterable[Slice]) -> None:
        """Write nested slices, each after the one that encloses it."""
        self._events(
            thread,
            (
                (start, end, self._name(name), self._annotations(arguments))
                for start, end, name, arguments in slices
            ),
        )

    def rows(self, process: int, thread: int, events: Events, names: Mapping[int, str]) -> None:
        """Write events as slices; also those of zero length, so that all are clickable."""
        columns: list[Any] = [events.start, events.end, events.kind, events.name]
        more = "bytes" in events.columns
        columns += [events.correlation, events.bytes] if more else []

        def each() -> Iterator[tuple[int, int, int, bytes]]:
            for first in range(0, len(events), _ROWS_AT_ONCE):
                part = (column[first : first + _ROWS_AT_ONCE].tolist() for column in columns)
                for start, end, kind, id, *values in zip(*part, strict=True):
                    name = self._name(names[id] if id in names else KIND_NAMES[kind])
                    pairs = zip(("correlation", "bytes"), values, strict=False)
                    about = {key: value for key, value in pairs if key != "bytes" or value >= 0}
                    yield start, end, name, self._annotations(about)

        self._events(thread, each())

    def _events(self, thread: int, slices: Iterable[tuple[int, int, int, bytes]]) -> None:
        """Write the beginnings and ends of slices in order of time."""
        track, open_ends = _number(11, thread), list[int]()
        for start, end, name, arguments in slices:
            while open_ends and open_ends[-1] <= start:
                self._event(open_ends.pop(), _number(9, _END) + track)
            self._event(start, _number(9, _BEGIN) + track + _number(10, name) + arguments)
            open_ends.append(end)
        while open_ends:
            self._event(open_ends.pop(), _number(9, _END) + track)

    def _event(self, time: int, event: bytes) -> None:
        self._packet(_number(8, time - self._origin) + _number(13, _NEEDED) + _data(11, event))

    def _name(self, text: str) -> int:
        return self._interned(2, self._names, text)

    def _interned(self, field: int, known: dict[str, int], text: str) -> int:
        """Return the number of a text, which is written if it is new."""
        number = known.get(text)
        if number is None:
            number = known[text] = len(known) + 1
            entry = _data(field, _number(1, number) + _data(2, text))
            self._packet(_number(13, _NEEDED) + _data(12, entry))
        return number

    def _annotations(self, arguments: Mapping[str, object]) -> bytes:
        parts = b""
        for key, value in arguments.items():
            name = _number(1, self._interned(3, self._arguments, key))
            whole = isinstance(value, int) and not isinstance(value, bool)
            content = _number(4, value) if whole else _data(6, str(value))  # type: ignore[arg-type]
            parts += _data(4, name + content)
        return parts

    def _packet(self, content: bytes) -> None:
        self._file.write(_data(1, content + _number(10, _SEQUENCE)))


Writer = JsonWriter | PacketWriter


def microseconds(nanoseconds: int) -> str:
    """Format nanoseconds as microseconds that convert back exactly, by rounding or truncation.

    Perfetto multiplies a double by 1000 and truncates it. That would make some slices a nanosecond
    too short, and drop slices inside them that seem to end later.
    """
    sign = "-" if nanoseconds < 0 else ""
    whole, below = divmod(abs(nanoseconds), 1_000)
    if not below:
        return f"{sign}{whole}"
    text = f"{sign}{whole}.{below:03d}"
    return text if int(float(text) * 1000.0) == nanoseconds else f"{text}4"


def _json(value: object) -> str:
    return json_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


_QUOTED: Final = {kind: _json(name) for kind, name in KIND_NAMES.items()}


def _arguments(events: Events, part: slice) -> list[str]:
    """Serialize the arguments of GPU operations in a range of rows."""
    if "bytes" not in events.columns:
        return [""] * len(events.start[part])
    pairs = zip(events.correlation[part].tolist(), events.bytes[part].tolist(), strict=True)
    return [
        f',"args":{{"correlation":{correlation},"bytes":{size}}}'
        if size >= 0
        else f',"args":{{"correlation":{correlation}}}'
        for correlation, size in pairs
    ]


def _names(trace: Trace, events: Events) -> dict[int, str]:
    """Return the names of events, by id."""
    ids = distinct_ids(events.name)
    return {id: cut(text) for id, text in trace.names(ids[ids != -1]).items()}


def _lost_time(scene: Scene, gpu: Gpu, analysis: Analysis) -> list[Slice]:
    """Return the longest stretches in which a GPU loses time to one cause, in order of time."""
    same = gpu.gpu, gpu.rank, gpu.host_name
    lane = next((lane for lane in scene.lanes if (lane.gpu, lane.rank, lane.host) == same), None)
    if lane is None or not lane.lost.sets:
        return []
    start = np.concatenate([times.start for times in lane.lost.sets])
    end = np.concatenate([times.end for times in lane.lost.sets])
    causes = np.repeat(lane.lost.classes, list(map(len, lane.lost.sets)))
    rows = np.argsort(start - end, kind="stable")[:MOST_GAPS]
    rows = rows[np.argsort(start[rows])]
    slices = zip(*(column[rows].tolist() for column in (start, end, causes)), strict=True)
    return [(s, e, analysis.cause_label(cause), {"cause": cause}) for s, e, cause in slices]


def _write_gpu(
    writer: Writer,
    id: int,
    gpu: Gpu,
    tracks: Sequence[Track],
    scene: Scene,
    trace: Trace,
) -> None:
    analysis = scene.analysis
    assert analysis is not None
    same = (gpu.gpu, gpu.rank, gpu.device)
    total = next((t for t in analysis.gpus if (t.gpu, t.rank, t.device) == same), None)
    if total is None:
        return
    what = "GPU" if gpu.gpu_known else "device"
    host = f" on {gpu.host_name}" if gpu.host_name else ""
    writer.process(id, f"{what} {gpu.gpu} (rank {gpu.rank}){host} {gpu.name}".rstrip())
    lanes: dict[str, list[Slice]] = {
        "findings": _findings(analysis, gpu, total.start_ns, total.start_ns + total.span_ns),
        "steps": [
            (
                step.start_ns,
                step.end_ns,
                f"step {step.step} ({step.phase})",
                {f"{name}_ns": getattr(step, f"{name}_ns") for name in CLASSES},
            )
            for step in sorted(analysis.step_list, key=lambda step: step.start_ns)
            if (step.gpu, step.rank) == same[:2]
        ],
        "gaps": [
            (gap.start_ns, gap.end_ns, gap.cause, {"evidence": gap.evidence, "step": gap.step})
            for gap in sorted(analysis.gaps.largest, key=lambda gap: gap.start_ns)
            if (gap.gpu, gap.rank) == same[:2]
        ],
        "lost time: why": _lost_time(scene, gpu, analysis),
    }
    for name, slices in lanes.items():
        if slices:
            writer.slices(id, writer.thread(id, name), slices)
    for track in tracks:
        thread = writer.thread(id, track.name)
        writer.rows(id, thread, track.events, _names(trace, track.events))


def _findings(analysis: Analysis, gpu: Gpu, start: int, end: int) -> list[Slice]:
    """Return findings on the GPU, or on none in particular, as slices over its whole time."""
    return [
        (
            start,
            end,
            f"{finding.id} ({finding.severity})",
            {"message": finding.message, "advice": finding.advice, "impact_ns": finding.impact_ns}
            | dict(finding.evidence),
        )
        for finding in analysis.findings
        if not finding.gpus or gpu.gpu in finding.gpus
        if not finding.ranks or gpu.rank in finding.ranks
    ]
