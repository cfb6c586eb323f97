"""Worker side: keeps files open and answers requests about them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np

from gputrace.cluster.messages import (
    About,
    File,
    Order,
    Recorded,
    Reply,
    Request,
    Told,
    Work,
    decode_request,
    encode,
    pack_samples,
    problem_of,
)
from gputrace.cluster.packing import pack
from gputrace.cluster.placed import RemoteShard
from gputrace.cluster.records import from_bytes, to_bytes, work_of
from gputrace.errors import GputraceError
from gputrace.model.events import GPU_KINDS, Events, Kind
from gputrace.model.trace import Device, Process, Quality, Trace
from gputrace.readers.registry import open_trace
from gputrace.store.slice import slice_window
from gputrace.store.spill_file import SpillFile
from gputrace.version import __version__

_FEW: Final = 4096
"""Up to this many names are sent with their rows; otherwise only on request."""


class _Open:
    """File that is open in this process, for one request at a time."""

    def __init__(self, file: File) -> None:
        self.closing = ExitStack()
        self.lock = Lock()
        self.trace = open_trace(Path(file.path), file.keep_going, file.windows)
        self.closing.callback(self.trace.close)
        self.told = Quality()
        self.shard: RemoteShard | None = None
        self.past = 0
        """Number of batches that changed the shard."""
        if file.part is not None:
            folder = self.closing.enter_context(tempfile.TemporaryDirectory(prefix="gputrace-"))
            self.trace = slice_window(self.trace, file.part, Path(folder), self.closing)


_open: Final[dict[File, _Open]] = {}
_opening: Final = Lock()


def answer(asked: Sequence[bytes]) -> list[bytes]:
    """Answer each encoded `Request` with an encoded `Reply`."""
    return [_reply(request) for request in asked]


def _reply(asked: bytes) -> bytes:
    request = decode_request(asked)
    try:
        file, again = _opened(request.file)
        with file.lock:
            reply = _answer(file, request)
        reply.again = again
    except GputraceError as error:
        reply = Reply(__version__, problem=problem_of(error))
    reply.worker = _address()
    sent: bytes = encode(reply)
    return sent


def _address() -> str:
    from distributed import get_worker

    address: str = get_worker().address
    return address


def forget(run: str) -> None:
    """Close the files of a run; a file being read is closed when that is done."""
    for file in [file for file in list(_open) if file.run == run]:
        opened = _open.pop(file)
        if opened.lock.acquire(blocking=False):
            opened.closing.close()
            opened.lock.release()


def _opened(file: File) -> tuple[_Open, bool]:
    """Return a file, and whether it had to be opened, which only one thread may do."""
    with _opening:
        again = file not in _open
        if again:
            _open[file] = _Open(file)
        return _open[file], again


def _answer(file: _Open, request: Request) -> Reply:
    trace, reply = file.trace, Reply(__version__)
    if request.about:
        reply.about = _about(trace)
    if request.columns:
        _read(trace, request, reply)
    if request.pattern:
        pattern = re.compile(request.pattern, request.flags)
        reply.names = trace.search(np.array(request.names, np.int64), pattern)
    elif request.names:
        reply.names = trace.names(request.names)
    if request.device is not None:
        reply.devices.append(_device(trace, *request.device))
    if request.nvml:
        nvml = trace.read_nvml()
        reply.cards, reply.links = nvml.cards, nvml.links
        reply.samples = pack_samples(nvml.samples)
    if request.work is not None:
        result = _work(file, request.work)
        reply.found, reply.lost = result or b"", result is None
    reply.processes = trace.processes
    reply.recorded = [_recorded(trace, number) for number in range(len(trace.processes))]
    reply.told = _news(trace.quality, file.told)
    return reply


def _read(trace: Trace, request: Request, reply: Reply) -> None:
    """Add the requested rows to the reply."""
    kinds = frozenset(map(Kind, request.kinds))
    events = trace.read(kinds, request.columns, request.window, None)
    reply.events = pack(events)
    reply.devices = [trace.device(*pair) for pair in _pairs(events)]
    if request.with_names:
        reply.names = _names(trace, events)


def _work(file: _Open, work: Work) -> bytes | None:
    """Run operations on a file's shard; None if it is not in the expected state."""
    if work.past != (0 if work.anew else file.past):
        return None
    shard = None if work.anew else file.shard
    file.shard, file.past = None, 0  # The state after an error.
    if not work.batches:
        return to_bytes(None)
    shard = shard or RemoteShard(file.trace, SpillFile() if work.large else None)
    results, past = [], work.past
    for batch in work.batches:
        results = [_done(shard, order) for order in batch.orders]
        past += batch.changes
    shard.rest()
    file.shard, file.past = shard, past
    return to_bytes(results)


def _done(shard: RemoteShard, order: Order) -> Any:
    given = [from_bytes(raw) for raw in order.given]
    return shard.do(work_of(order.work), from_bytes(order.gpu), given)


def _about(trace: Trace) -> About:
    kinds = tuple(sorted(int(kind) for kind in trace.kinds))
    return About(
        source=trace.source,
        origin=trace.origin,
        session=trace.session,
        kinds=kinds,
        no_gpu=trace.no_gpu,
        held=trace.held,
        cut_bytes=trace.cut_bytes,
    )


def _recorded(trace: Trace, process: int) -> Recorded:
    calls = trace.calls_recorded(process)
    return Recorded(tuple(trace.recorded(process)), None if calls is None else tuple(calls))


def _device(trace: Trace, process: Process, device: int) -> Device:
    """Return a device of a process, also if nothing of it was read here yet."""
    if process not in trace.processes:
        trace.read(trace.kinds, ("process",), None, None)
    return trace.device(trace.processes.index(process), device)


def _pairs(events: Events) -> set[tuple[int, int]]:
    """Return the (process, device) pairs of the GPU operations among the rows."""
    if not {"process", "device", "kind"} <= set(events.columns):
        return set()
    gpu = np.isin(events.kind, GPU_KINDS)
    pairs = np.stack([events.process[gpu], events.device[gpu]], axis=-1)
    return set(map(tuple, np.unique(pairs, axis=0).tolist()))


def _names(trace: Trace, events: Events) -> dict[int, str]:
    ids = np.unique(events.name)
    return trace.names(ids) if len(ids) <= _FEW else {}


def _news(quality: Quality, reported: Quality) -> Told:
    """Return the problems found since the last answer."""
    news = Told(
        quality.warnings[len(reported.warnings) :],
        quality.notes[len(reported.notes) :],
        quality.left_out[len(reported.left_out) :],
        [(reason, where, rows) for (reason, where), rows in quality.places.items()],
    )
    reported.warnings, reported.notes = list(quality.warnings), list(quality.notes)
    reported.left_out = list(quality.left_out)
    return news
