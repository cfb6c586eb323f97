"""torch's DataLoader (from 1.2 on) and torchdata's StatefulDataLoader: the parts of a batch, in
their workers and in the process that trains.

A worker's main thread fetches and collates; the thread of its queue pickles and sends. Their
numbers are batches, as torch counts them; those of instants are named below. A worker knows its
loader by the seed that the loader gave to all of its workers. It costs some 25 µs a batch in a
worker and 15 µs in the process that trains, and 0.3 µs for each transform of a sample.
"""

import _thread
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial, wraps
from time import CLOCK_THREAD_CPUTIME_ID, clock_gettime
from types import FunctionType
from typing import Any
from weakref import ref

from .. import BEGAN
from ..host_file import Suppress, time_ns
from ..pipelines import add as _add
from ..pipelines import count as _loaders
from ..pipelines import worker as _worker
from ..recorder import note_ours, word, write
from ..steps import weak
from ..wrappers import around, call_after, iterators

FETCH, COLLATE, SEND = word("fetch"), word("collate"), word("send")
"""Getting the samples with their transforms, making a batch of them; processor time of sending:
by the clock, that holds waiting for the process that trains to read."""
CPU, WAIT, START = word("processor time"), word("wait for work"), word("start worker")
"""Processor time of fetch and collate; the wait for the next batch's indices; from the process's
begin to that. The number of START is the worker's."""
STARTS, RECEIVE, PIN = word("start workers"), word("receive"), word("pin")
"""In the process that trains: making the workers, of which the number says how many; reading and
unpickling a batch; in the thread that receives, copying it into pinned memory and handing it on."""
ASK = word("ask")
"""Moment; its number says how many batches were ready."""
SEED, PREFETCH, PINS, CORES = map(word, ("loader", "prefetch factor", "pins memory", "cores"))
"""Moments when a loader begins; the number of SEED is of its seed and process, in workers too."""
READ, DISK = word("KiB read"), word("KiB read from disk")
"""By a worker since the last such moment."""

_SECOND = 1000000000
_MOST_DEPTH = 3
_LOOK_AGAIN = 2
# What timing a transform once takes, about; where that is more than one part in so many of a
# batch, the next batches go without it.
_TIMING_NS, _PART, _MOST_REST = 400, 250, 50

_now = _thread._local()
"""State of each thread: ``fetches``, while it does; ``batch``; when it began ``collating`` that."""
_alike: "dict[Any, tuple[int, Callable[[], object] | None]]" = {}
"""Number of the last loader of a kind, and a weak reference to it."""


def _cpu_time() -> int:
    return int(clock_gettime(CLOCK_THREAD_CPUTIME_ID) * 1e9)


class _Timed(list):  # type: ignore[type-arg]
    """The callables of a Compose; what is done with each until the next is asked for counts."""

    def __init__(self, items: "list[Any]") -> None:
        list.__init__(self, items)
        self.sums = [0] * len(items)
        self.times = 0

    def __iter__(self) -> "Iterator[Any]":
        if getattr(_now, "fetches", False) and len(self) == len(self.sums):
            self.times += 1
            return _timing(list.__iter__(self), self.sums)
        return list.__iter__(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(self),)


def _timing(items: "Iterator[Any]", sums: "list[int]") -> "Iterator[Any]":
    for number, item in enumerate(items):
        start = time_ns()
        yield item
        if number < len(sums):
            sums[number] += time_ns() - start


def _name(item: Any) -> str:
    """Return the name of a function, or of the class of another callable."""
    if isinstance(item, FunctionType):
        return item.__name__
    if type(item) is partial:
        return _name(item.func)
    return type(item).__name__


def _composes(dataset: Any) -> "list[Any]":
    """Return the objects within a dataset that hold a list of transforms, each once."""
    composes: dict[int, Any] = {id(value): value for value in _search(dataset, 0)}
    return list(composes.values())


def _search(dataset: Any, depth: int) -> "list[Any]":
    """Return the ones of a dataset, and of the datasets in it."""
    held = getattr(dataset, "__dict__", {})
    composes = []
    for value in list(held.values()):
        inner = getattr(value, "__dict__", {}).get("transforms")
        if callable(value) and isinstance(inner, list) and inner and all(map(callable, inner)):
            composes.append(value)
    if depth < _MOST_DEPTH:
        within = held.get("datasets")
        datasets = [held.get("dataset"), *(within if isinstance(within, (list, tuple)) else ())]
        for inner in datasets:
            composes += _search(inner, depth + 1)
    return composes


def fetchers(module: Any) -> None:
    """Time the functions that fetch and collate a batch."""
    call_after(module._BaseDatasetFetcher, "__init__", _watch_fetcher)
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):

        @around(getattr(module, name, None), "fetch")
        def fetch(original: Any, self: Any, index: Any) -> Any:
            fetching = self.__dict__.get("_of_gputrace")
            # A dataset may use a loader of its own.
            if fetching is None or getattr(_now, "fetches", False):
                return original(self, index)
            swapped = fetching.begin()
            _now.fetches, _now.collating = True, 0
            used, start = _cpu_time(), time_ns()
            try:
                return original(self, index)
            finally:
                _now.fetches = False
                fetching.end(swapped, start, time_ns(), _cpu_time() - used)


def _watch_fetcher(fetcher: Any) -> None:
    try:
        fetcher._of_gputrace = _Fetching(fetcher.dataset)
        collate = fetcher.collate_fn
        if not callable(collate):
            return

        @wraps(collate, assigned=())
        def collated(data: Any) -> Any:
            start = _now.collating = time_ns()
            try:
                return collate(data)
            finally:
                _add(start, time_ns(), COLLATE, *getattr(_now, "batch", (0, 0)))

        fetcher.collate_fn = collated
    except Exception:
        note_ours("watching a dataset")


class _Fetching:
    """A fetcher's batches so far; its transforms are timed in some of them, to cost little."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.composes = _composes(dataset)
        self.loader = self.count = self.rest = 0

    def begin(self) -> "list[Any]":
        """Begin the next batch; return the lists of transforms to time, and their holders."""
        if not _worker[0]:
            _now.batch = self.loader, self.count
        self.count += 1
        if not self.composes and self.count == _LOOK_AGAIN:
            # What a dataset makes when it is first asked.
            self.composes = _composes(self.dataset)
        if self.rest:
            self.rest -= 1
            return []
        return [swap for swap in map(_swap, self.composes) if swap is not None]

    def end(self, swapped: "list[Any]", start: int, end: int, used: int) -> None:
        """Restore the lists and record the batch."""
        batch = getattr(_now, "batch", (0, 0))
        _add(start, _now.collating or end, FETCH, *batch)
        spent = 0
        for held, timed, plain in swapped:
            if held.get("transforms") is timed:
                # What the program did to it meanwhile is kept.
                if len(timed) != len(plain):
                    plain[:] = list(timed)
                held["transforms"] = plain
            spent += timed.times * len(timed) * _TIMING_NS
            for item, length in zip(list.__iter__(timed), timed.sums):
                _add(start, start + length, word("transform " + _name(item)), *batch)
        if swapped:
            self.rest = min(spent * _PART // max(end - start, 1), _MOST_REST)
        _add(start, start + used, CPU, *batch)


def _swap(compose: Any) -> Any:
    """Replace a plain list by a timed one, for one batch."""
    held = compose.__dict__
    plain = held.get("transforms")
    if type(plain) is not list:
        return None
    timed = held["transforms"] = _Timed(plain)
    return held, timed, plain


def worker_loop(module: Any) -> None:
    """Watch the queues of each worker from within it."""

    @around(module, "_worker_loop")
    def loop(original: Any, *args: Any, **keywords: Any) -> Any:
        try:
            _watch_worker(dict(zip(original.__code__.co_varnames, args), **keywords))
        except Exception:
            note_ours("watching a loader's worker")
        return original(*args, **keywords)


def _watch_worker(given: "dict[str, Any]") -> None:
    worker, entered = given["worker_id"], time_ns()
    began = BEGAN[1] if BEGAN[0] == os.getpid() else entered
    seed = given["base_seed"] if "base_seed" in given else given["seed"] - worker
    if not hasattr(os, "register_at_fork"):
        # Before Python 3.7 the first write in a forked child forgets what came before it.
        write(entered)
    _worker[0] = worker + 1
    _now.batch = worker + 1, 0
    # A server may have started this process for the one that made it.
    parent = getattr(sys.modules.get("multiprocessing"), "parent_process", lambda: None)()
    maker = os.getppid() if parent is None else parent.pid
    _add(entered, entered, SEED, worker + 1, _mixed(seed, maker))
    _watch_results(given["data_queue"], worker + 1)
    indices = given["index_queue"]
    get, since, looked = _method(indices, "get"), [0], [_Reads(entered)]

    def next_index(*args: Any, **keywords: Any) -> Any:
        nonlocal began
        if not since[0]:
            since[0] = time_ns()
            if began:
                _add(began, since[0], START, worker + 1, worker)
                began = 0
        item = get(*args, **keywords)
        now = time_ns()
        if type(item) is tuple and len(item) == 2 and isinstance(item[0], int):
            _now.batch = worker + 1, item[0]
            _add(since[0], now, WAIT, worker + 1, item[0])
        since[0] = 0
        looked[0].look(now)
        return item

    indices.get = next_index


def _method(queue: Any, name: str) -> "Callable[..., Any]":
    """Return a method for a wrapper that its object will hold: a bound one would hold the object,
    whose pipes would then stay open until garbage is collected.
    """
    function, held = getattr(type(queue), name), ref(queue)

    def call(*args: Any, **keywords: Any) -> Any:
        return function(held(), *args, **keywords)

    return call


def _mixed(seed: int, pid: int) -> int:
    """Return a number for a loader's iterator: processes of a run may all have the same seed."""
    return seed + (pid << 12)


class _Reads:
    """Bytes that this process has read, looked at once a second."""

    def __init__(self, now: int) -> None:
        self.at, self.before = now, self._numbers()

    def look(self, now: int) -> None:
        if 0 <= now - self.at < _SECOND:
            return
        self.at, before = now, self.before
        self.before = self._numbers()
        for what, old, new in zip((READ, DISK), before, self.before):
            _add(now, now, what, _worker[0], (new - old) >> 10)

    @staticmethod
    def _numbers() -> "tuple[int, ...]":
        with Suppress(OSError, ValueError, IndexError):
            with open("/proc/self/io", "rb", 0) as file:
                lines = file.read().split()
            return int(lines[1]), int(lines[lines.index(b"read_bytes:") + 1])
        return ()


class _Buffer(deque):  # type: ignore[type-arg]
    """Batches on their way to the thread that sends them; notes when it takes which."""

    taken = None

    def popleft(self) -> Any:
        item = deque.popleft(self)
        number = item[0] if type(item) is tuple and item and isinstance(item[0], int) else None
        self.taken = None if number is None else (number, time_ns(), _cpu_time())
        return item


def _watch_results(queue: Any, owner: int) -> None:
    """Time the work of the queue's thread, which starts with the first batch."""
    send, held = queue._send_bytes, queue._buffer
    if type(held) is not deque or held or queue._thread is not None:
        return
    buffer = queue._buffer = _Buffer()

    def send_bytes(data: Any, *args: Any) -> Any:
        result = send(data, *args)
        taken = buffer.taken
        if taken is not None:
            buffer.taken = None
            _add(taken[1], taken[1] + _cpu_time() - taken[2], SEND, owner, taken[0])
        return result

    queue._send_bytes = send_bytes


def dataloader(module: Any) -> None:
    """Time waits for batches, as of every iterator, and the making of batches."""
    iterators(module)
    # The second are torchdata's, with the fetchers of the first.
    for kind in ("_", "_Stateful"):
        single = getattr(module, kind + "SingleProcessDataLoaderIter", None)
        several = getattr(module, kind + "MultiProcessingDataLoaderIter", None)
        for cls in (single, several):

            @around(cls, "__init__")
            def begin(original: Any, self: Any, loader: Any, *args: Any, **keywords: Any) -> None:
                start = time_ns()
                original(self, loader, *args, **keywords)
                try:
                    _announce(self, loader, start)
                except Exception:
                    note_ours("watching a loader")

        @around(several, "_next_data")
        def next_data(original: Any, self: Any) -> Any:
            number = self.__dict__.get("_of_gputrace")
            if number:
                try:
                    now = time_ns()
                    _add(now, now, ASK, number, count_ready(self))
                except Exception:
                    note_ours("looking at a loader's queue")
                    self._of_gputrace = 0
            return original(self)


def _announce(iterator: Any, loader: Any, start: int) -> None:
    if _worker[0]:
        return
    held, workers = loader.__dict__, getattr(iterator, "_num_workers", 0)
    if "_of_gputrace" not in held:
        held["_of_gputrace"] = _number(loader, workers)
    number, now = held["_of_gputrace"], time_ns()
    iterator._of_gputrace = number
    pins = bool(getattr(iterator, "_pin_memory", False))
    _add(now, now, SEED, number, _mixed(getattr(iterator, "_base_seed", 0), os.getpid()))
    _add(start, now, STARTS, number, workers)
    _add(now, now, PREFETCH, number, getattr(iterator, "_prefetch_factor", None) or 2)
    _add(now, now, PINS, number, pins)
    _add(now, now, CORES, number, len(os.sched_getaffinity(0)))
    fetcher = getattr(iterator, "_dataset_fetcher", None)
    if fetcher is not None and "_of_gputrace" in fetcher.__dict__:
        fetcher._of_gputrace.loader = number
    queue = getattr(iterator, "_worker_result_queue", None)
    if queue is not None:
        _watch_receiving(queue, number, pins)


def _number(loader: Any, workers: int) -> int:
    """Number a loader: as one like it that is gone, since a program may make one in each epoch."""
    kinds = type(getattr(loader, "dataset", None)), type(getattr(loader, "sampler", None))
    key = workers, getattr(loader, "batch_size", None), kinds
    number, last = _alike.get(key, (0, None))
    if last is None or last() is not None:
        _loaders[0] += 1
        number = _loaders[0]
    _alike[key] = number, weak(loader)
    return number


def _watch_receiving(queue: Any, owner: int, pins: bool) -> None:
    """Time reading and unpickling, without the wait until there is something to read."""
    get, receive = _method(queue, "get"), queue._recv_bytes
    begun, pinned = [0], [0, 0]

    def receive_bytes(*args: Any) -> Any:
        begun[0] = time_ns()
        return receive(*args)

    def get_batch(*args: Any, **keywords: Any) -> Any:
        if pinned[0]:
            _add(pinned[0], time_ns(), PIN, owner, pinned[1])
            pinned[0] = 0
        item = get(*args, **keywords)
        if type(item) is tuple and item and isinstance(item[0], int) and begun[0]:
            now = time_ns()
            _add(begun[0], now, RECEIVE, owner, item[0])
            if pins:  # The thread that asks does nothing else.
                pinned[:] = now, item[0]
        begun[0] = 0
        return item

    queue._recv_bytes, queue.get = receive_bytes, get_batch


def count_ready(iterator: Any) -> int:
    """Return how many batches the workers of a loader's iterator have ready."""
    # Those that came out of turn wait in the iterator, others in its queues.
    ready: int = sum(len(info) == 2 for info in iterator._task_info.values())
    ready += iterator._worker_result_queue.qsize()
    if iterator._data_queue is not iterator._worker_result_queue:
        ready += iterator._data_queue.qsize()
    return ready


PATCHES = [
    ("torch.utils.data._utils.fetch", fetchers),
    ("torch.utils.data._utils.worker", worker_loop),
    ("torch.utils.data.dataloader", dataloader),
    ("torchdata.stateful_dataloader.stateful_dataloader", dataloader),
    ("torchdata.stateful_dataloader.worker", worker_loop),
]
