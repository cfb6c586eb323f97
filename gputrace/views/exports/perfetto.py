"""What ui.perfetto.dev and chrome://tracing open: the Trace Event Format, as JSON.

A GPU is a process there, with a thread for each stream, its steps, its gaps and its findings; a
process of the program is one too. Moments are microseconds with decimals, so that no nanosecond is
lost, and are those of the report.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final, TextIO

from gputrace.analyzers.gpus import Gpu
from gputrace.analyzers.results import CLASSES, Analysis
from gputrace.analyzers.scene.tracks import Track, read_gpu_tracks, read_host_tracks
from gputrace.cleaning import exported, json_text
from gputrace.traces.events import Events, Kind
from gputrace.traces.trace import Trace
from gputrace.views.exports import Job
from gputrace.views.exports.targets import unfinished_file

MOST_GAPS: Final = 10_000
"""The largest gaps are shown."""
_GPU_IDS: Final = 1
_HOST_IDS: Final = 1_000_000
"""Where ids of GPUs and of processes begin; ids of the operating system may be the same twice."""
_THREAD_IDS: Final = 10_000_000
"""Where those of tracks begin, of which none is given twice: Perfetto names threads by them alone,
and takes one that has its process's id for the main thread."""
_MOST_TRACKS: Final = 16
_COMPRESSION: Final = 5
_ROWS_AT_ONCE: Final = 8_192

_Slice = tuple[int, int, str, Mapping[str, object]]
"""Start, end, name, arguments."""


def write(job: Job) -> None:
    """Writes the file, compressed where its name ends in ``.gz``."""
    analysis = job.analyze(MOST_GAPS)
    with unfinished_file(job.target) as path, _opened(path, job.target.suffix == ".gz") as file:
        about = {"source": analysis.source, "notes": analysis.warnings}
        file.write('{"displayTimeUnit":"ns","otherData":' + _json(about) + ',"traceEvents":[\n')
        writer = _Writer(file, job.trace.origin)
        for number, (gpu, tracks) in enumerate(
            read_gpu_tracks(job.trace, job.window, job.progress)
        ):
            _write_gpu(writer, _GPU_IDS + number, gpu, tracks, analysis, job.trace)
        for process, thread, track in read_host_tracks(job.trace, job.window):
            _write_host(writer, process, thread, track, job.trace)
        file.write("\n]}\n")


@contextmanager
def _opened(path: Path, compressed: bool) -> Iterator[TextIO]:
    if not compressed:
        with path.open("w", encoding="utf-8", errors="replace") as file:
            yield file
        return
    # Without a name and a time inside: the same trace gives the same bytes.
    with path.open("wb") as raw, gzip.GzipFile("", "wb", _COMPRESSION, raw, 0) as packed:
        import io

        with io.TextIOWrapper(packed, encoding="utf-8", errors="replace") as file:
            yield file


class _Writer:
    """Writes events of the format, each on a line."""

    def __init__(self, file: TextIO, origin: int) -> None:
        self._file, self._origin = file, origin
        self._separator = ""
        self._processes: set[int] = set()
        self._threads = count(_THREAD_IDS)

    def process(self, id: int, name: str) -> None:
        """Names a process, and puts it below those before."""
        if id not in self._processes:
            self._processes.add(id)
            self._about(id, 0, "process_name", {"name": name})
            self._about(id, 0, "process_sort_index", {"sort_index": id})

    def thread(self, process: int, name: str, place: int | None = None) -> int:
        """A thread of a process, which is a track; in order of ``place``, else below the last."""
        id = next(self._threads)
        self._about(process, id, "thread_name", {"name": name})
        self._about(
            process, id, "thread_sort_index", {"sort_index": id if place is None else place}
        )
        return id

    def slices(self, process: int, thread: int, slices: Iterable[_Slice]) -> None:
        """Slices that nest, each after what encloses it."""
        where = f',"pid":{process},"tid":{thread}'
        self._lines(
            f'{{"ph":"X","name":{_json(name)},"ts":{microseconds(start - self._origin)},'
            f'"dur":{microseconds(end - start)}{where},"args":{_json(arguments)}}}'
            for start, end, name, arguments in slices
        )

    def rows(self, process: int, thread: int, events: Events, names: Mapping[int, str]) -> None:
        """Rows of events; those of no length as slices of none, so that all can be clicked."""
        where = f',"pid":{process},"tid":{thread}'
        arguments = _arguments(events)
        for first in range(0, len(events), _ROWS_AT_ONCE):
            part = slice(first, first + _ROWS_AT_ONCE)
            starts = (events.start[part] - self._origin).tolist()
            lengths = (events.end[part] - events.start[part]).tolist()
            ids = zip(events.kind[part].tolist(), events.name[part].tolist(), strict=True)
            told = arguments(part)
            self._lines(
                f'{{"ph":"X","name":{names[id] if id >= 0 or id in names else _KIND_NAMES[kind]},'
                f'"ts":{microseconds(start)},"dur":{microseconds(length)}{where}{more}}}'
                for start, length, (kind, id), more in zip(starts, lengths, ids, told, strict=True)
            )

    def _about(self, process: int, thread: int, what: str, arguments: Mapping[str, object]) -> None:
        self._lines(
            [
                f'{{"ph":"M","name":"{what}","pid":{process},"tid":{thread},"args":{_json(arguments)}}}'
            ]
        )

    def _lines(self, lines: Iterable[str]) -> None:
        text = ",\n".join(lines)
        if text:
            self._file.write(self._separator + text)
            self._separator = ",\n"


def microseconds(nanoseconds: int) -> str:
    """Microseconds that are these nanoseconds to who rounds and to who cuts a double off.

    Perfetto takes a double times 1000 and cuts it off, which would make some a nanosecond shorter,
    so that what they enclose seems to reach beyond them, and is dropped.
    """
    sign = "-" if nanoseconds < 0 else ""
    whole, below = divmod(abs(nanoseconds), 1_000)
    if not below:
        return f"{sign}{whole}"
    text = f"{sign}{whole}.{below:03d}"
    return text if int(float(text) * 1000.0) == nanoseconds else f"{text}4"


def _json(value: object) -> str:
    return json_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


_KIND_NAMES: Final = {
    int(kind): _json(kind.name.lower().replace("_", " ").replace("h2d", "host to device")
    .replace("d2h", "device to host").replace("d2d", "device to device"))
    for kind in Kind
}  # fmt: skip


def _arguments(events: Events) -> Any:
    """Gives for rows the text of their arguments, of what is known of operations on a GPU."""
    if "correlation" not in events.columns:
        return lambda part: [""] * len(events.start[part])

    def told(part: slice) -> list[str]:
        pairs = zip(events.correlation[part].tolist(), events.bytes[part].tolist(), strict=True)
        return [
            f',"args":{{"correlation":{correlation},"bytes":{size}}}'
            if size >= 0
            else f',"args":{{"correlation":{correlation}}}'
            for correlation, size in pairs
        ]

    return told


def _names(trace: Trace, events: Events) -> dict[int, str]:
    """Names as JSON, of the ids that are some."""
    import numpy as np

    ids = np.unique(events.name)
    return {id: _json(exported(text)) for id, text in trace.names(ids[ids != -1]).items()}


def _write_gpu(
    writer: _Writer,
    id: int,
    gpu: Gpu,
    tracks: Sequence[Track],
    analysis: Analysis,
    trace: Trace,
) -> None:
    own = [t for t in analysis.gpus if (t.gpu, t.rank, t.device) == (gpu.gpu, gpu.rank, gpu.device)]
    if not own:
        return
    writer.process(id, _gpu_name(gpu))
    lanes = (
        ("findings", _findings(analysis, gpu, own[0].start_ns, own[0].start_ns + own[0].span_ns)),
        ("steps", _steps(analysis, gpu)),
        ("gaps", _gaps(analysis, gpu)),
    )
    for name, slices in lanes:
        if slices:
            writer.slices(id, writer.thread(id, name), slices)
    for track in tracks:
        thread = writer.thread(id, track.name)
        writer.rows(id, thread, track.events, _names(trace, track.events))


def _gpu_name(gpu: Gpu) -> str:
    what = "GPU" if gpu.gpu_known else "device"
    host = f" on {gpu.host_name}" if gpu.host_name else ""
    return f"{what} {gpu.gpu} (rank {gpu.rank}){host} {gpu.name}".rstrip()


def _findings(analysis: Analysis, gpu: Gpu, start: int, end: int) -> list[_Slice]:
    """Those about the GPU, or about none in particular, over its whole time."""
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


def _steps(analysis: Analysis, gpu: Gpu) -> list[_Slice]:
    return [
        (
            step.start_ns,
            step.end_ns,
            f"step {step.step} ({step.phase})",
            {f"{name}_ns": getattr(step, f"{name}_ns") for name in CLASSES},
        )
        for step in sorted(analysis.step_list, key=lambda step: step.start_ns)
        if (step.gpu, step.rank) == (gpu.gpu, gpu.rank)
    ]


def _gaps(analysis: Analysis, gpu: Gpu) -> list[_Slice]:
    return [
        (gap.start_ns, gap.end_ns, gap.cause, {"evidence": gap.evidence, "step": gap.step})
        for gap in sorted(analysis.gaps.largest, key=lambda gap: gap.start_ns)
        if (gap.gpu, gap.rank) == (gpu.gpu, gpu.rank)
    ]


def _write_host(writer: _Writer, process: int, thread: int, track: Track, trace: Trace) -> None:
    known = trace.processes[process]
    id = _HOST_IDS + process
    rank = f"rank {known.rank} " if known.rank >= 0 else ""
    host = f" on {known.host_name}" if known.host_name else ""
    writer.process(id, f"{rank}process {known.pid}{host} {known.name}".rstrip())
    # The tracks of a thread stay together.
    own = writer.thread(id, f"{thread} {track.name}", thread * _MOST_TRACKS + track.place)
    writer.rows(id, own, track.events, _names(trace, track.events))
