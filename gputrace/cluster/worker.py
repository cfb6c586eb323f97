"""What runs on the workers: files stay open there, and requests are answered from them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np

from gputrace import __version__
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
from gputrace.traces.events import GPU_KINDS, Events, Kind
from gputrace.traces.quality import Quality
from gputrace.traces.readers import open_trace
from gputrace.traces.scratch import Scratch
from gputrace.traces.trace import Device, Process, Trace
from gputrace.traces.within import part_of

_FEW: Final = 4096
"""So many names travel with the rows that have them; of more, those that are asked for."""


class _Open:
    """A file that is open in this process, for one request at a time."""

    def __init__(self, file: File) -> None:
        self.closing = ExitStack()
        self.lock = Lock()
        self.trace = open_trace(Path(file.path), file.keep_going, file.windows)
        self.closing.callback(self.trace.close)
        self.told = Quality()
        self.shard: RemoteShard | None = None
        self.past = 0
        """How many batches have changed it."""
        if file.part is not None:
            folder = self.closing.enter_context(tempfile.TemporaryDirectory(prefix="gputrace-"))
            self.trace = part_of(self.trace, file.part, Path(folder), self.closing)


_open: Final[dict[File, _Open]] = {}
_opening: Final = Lock()


def answer(asked: Sequence[bytes]) -> list[bytes]:
    """The `Reply` to each `Request`, all as they travel."""
    return [_reply(one) for one in asked]


def _reply(asked: bytes) -> bytes:
    request = decode_request(asked)
    try:
        own, again = _opened(request.file)
        with own.lock:
            reply = _answer(own, request)
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
    """Closes the files of a run; one that is being read goes when that is done."""
    for file in [file for file in list(_open) if file.run == run]:
        own = _open.pop(file)
        if own.lock.acquire(blocking=False):
            own.closing.close()
            own.lock.release()


def _opened(file: File) -> tuple[_Open, bool]:
    """A file, and whether it had to be opened, which only one thread may do."""
    with _opening:
        again = file not in _open
        if again:
            _open[file] = _Open(file)
        return _open[file], again


def _answer(own: _Open, request: Request) -> Reply:
    trace, reply = own.trace, Reply(__version__)
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
        found = _work(own, request.work)
        reply.found, reply.lost = found or b"", found is None
    reply.processes = trace.processes
    reply.recorded = [_recorded(trace, number) for number in range(len(trace.processes))]
    reply.told = _news(trace.quality, own.told)
    return reply


def _read(trace: Trace, request: Request, reply: Reply) -> None:
    """Adds the rows that are asked for."""
    kinds = frozenset(map(Kind, request.kinds))
    events = trace.read(kinds, request.columns, request.window, None)
    reply.events = pack(events)
    reply.devices = [trace.device(*pair) for pair in _pairs(events)]
    if request.with_names:
        reply.names = _names(trace, events)


def _work(own: _Open, work: Work) -> bytes | None:
    """What is found with a file's shard; None where that is not as it is thought to be."""
    if work.past != (0 if work.anew else own.past):
        return None
    shard = None if work.anew else own.shard
    own.shard, own.past = None, 0  # As it stays if anything goes wrong.
    if not work.batches:
        return to_bytes(None)
    shard = shard or RemoteShard(own.trace, Scratch() if work.large else None)
    found, past = [], work.past
    for batch in work.batches:
        found = [_done(shard, order) for order in batch.orders]
        past += batch.changes
    shard.rest()
    own.shard, own.past = shard, past
    return to_bytes(found)


def _done(shard: RemoteShard, order: Order) -> Any:
    given = [from_bytes(one) for one in order.given]
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
    """What a process calls by an ordinal, though nothing of it was read here yet."""
    if process not in trace.processes:
        trace.read(trace.kinds, ("process",), None, None)
    return trace.device(trace.processes.index(process), device)


def _pairs(events: Events) -> set[tuple[int, int]]:
    """Whose GPU operations are among the rows."""
    if not {"process", "device", "kind"} <= set(events.columns):
        return set()
    gpu = np.isin(events.kind, GPU_KINDS)
    pairs = np.stack([events.process[gpu], events.device[gpu]], axis=-1)
    return set(map(tuple, np.unique(pairs, axis=0).tolist()))


def _names(trace: Trace, events: Events) -> dict[int, str]:
    ids = np.unique(events.name)
    return trace.names(ids) if len(ids) <= _FEW else {}


def _news(quality: Quality, told: Quality) -> Told:
    """What was found wrong since the last answer."""
    news = Told(
        quality.warnings[len(told.warnings) :],
        quality.notes[len(told.notes) :],
        quality.left_out[len(told.left_out) :],
        [(reason, where, rows) for (reason, where), rows in quality.places.items()],
    )
    told.warnings, told.notes = list(quality.warnings), list(quality.notes)
    told.left_out = list(quality.left_out)
    return news
