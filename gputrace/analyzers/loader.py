"""Data loaders: what their workers' time goes into, how evenly, and how many would keep up.

Other numbers of workers are simulated: batches go to the workers in turn, so many ahead as the
prefetch factor says, and are taken in order. A worker sends one batch while it makes the next, as
far as that leaves it its processor: a process of Python has one for both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gputrace.analyzers.gpu_shards import Shard
from gputrace.analyzers.grouping import median
from gputrace.model.events import UNKNOWN, Kind, Mask, distinct_ids
from gputrace.model.host import (
    COLLATING,
    READING,
    SENDING,
    InputPipeline,
    InputSetting,
    Loader,
    LoaderChoice,
    LoaderPart,
    LoaderWorker,
)
from gputrace.model.intervals import Intervals, Times
from gputrace.model.struct import Struct

_TRANSFORM: Final = "transform "
_KIB: Final = 1024
_MOST_WORKERS: Final = 64
_FEWEST_BATCHES: Final = 4
"""Batches from which anything is said."""

Floats = NDArray[np.float64]


class LoaderEvents(Struct, frozen=True, dict=True):
    """Loader events of a trace, in the order of their ends.

    Attributes:
        start, end, process, name: as in `Events`, with the texts of names.
        host: number of the machine.
        owner: the loader's number; in its workers, the worker's plus one.
        number: the batch, or what a moment tells.
        is_aside: whether another thread of a process that marks steps is at it.
    """

    start: Times
    end: Times
    process: Times
    host: Times
    name: NDArray[np.object_]
    owner: Times
    number: Times
    is_aside: Mask

    def select(self, rows: Mask) -> LoaderEvents:
        """Return some of the events."""
        return LoaderEvents(*(getattr(self, column)[rows] for column in self.__struct_fields__))

    def of(self, name: str) -> LoaderEvents:
        """Return the events of a name."""
        return self.select(self.name == name)

    @property
    def lengths(self) -> Times:
        """Nanoseconds of each."""
        return self.end - self.start


def read_loaders(shard: Shard) -> LoaderEvents | None:
    """Read the loader events of all processes; None where there are none."""
    trace = shard.trace
    if Kind.LOADER not in trace.kinds:
        return None
    columns = ["start", "end", "name", "process", "thread", "correlation"]
    events = trace.events([Kind.LOADER], columns)
    if not len(events):
        return None
    steps = trace.events([Kind.STEP], ["process", "thread"])
    marks = np.full(len(trace.processes), UNKNOWN, np.int64)
    marks[steps.process] = steps.thread
    texts = trace.names(distinct_ids(events.name))
    events = events.select(np.argsort(events.end, kind="stable"))
    hosts = np.array([process.host for process in trace.processes], np.int64)
    return LoaderEvents(
        events.start,
        events.end,
        events.process.astype(np.int64),
        hosts[events.process],
        np.array([texts[id] for id in events.name.tolist()], object),
        events.correlation >> 32,
        events.correlation & 0xFFFFFFFF,
        (marks != UNKNOWN)[events.process] & (marks[events.process] != events.thread),
    )


class Pace(Struct, frozen=True, dict=True):
    """Steps of a rank, and the nanoseconds of a mean step and of its wait."""

    time: Intervals
    begins: Times
    """Begins of the steps, in order."""
    step_ns: float
    wait_ns: float
    train_ns: float
    """Time of the GPU in a mean step that waits for no batch; without a GPU, of the process."""
    host_ns: float
    """Time of the process in a mean step, without its own waits for batches."""
    late_ns: float
    """Time of the GPU in a mean step in which it waits in collectives for other ranks."""
    busy_ns: float
    """Processor time of the process in a mean step; 0 where unknown."""
    share_cores: int
    """Ranks that share the cores."""
    is_crowded: bool
    """True where other threads of the process are queued for cores."""

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.begins)


def measure_loaders(
    events: LoaderEvents, processes: Mapping[int, int], paces: Mapping[int, Pace]
) -> tuple[Loader, ...]:
    """Return the loader that feeds each rank in its measured steps.

    Args:
        events: of all processes.
        processes: of each rank that trains.
        paces: steps by rank.
    """
    loaders, paces = [], without_late_batches(paces)
    for rank, process in sorted(processes.items()):
        if rank in paces and paces[rank].steps:
            loader = _measure(events, rank, process, paces[rank])
            loaders += [] if loader is None else [loader]
    return tuple(loaders)


def without_late_batches(paces: Mapping[int, Pace]) -> dict[int, Pace]:
    """Return the paces of ranks that wait in no collective for another, which waits for a batch."""
    apart = {}
    for rank, pace in paces.items():
        waits = (other.wait_ns for number, other in paces.items() if number != rank)
        late_ns = min(pace.late_ns, max(waits, default=0.0))
        apart[rank] = replace(pace, train_ns=pace.train_ns - late_ns)
    return apart


def _measure(events: LoaderEvents, rank: int, process: int, pace: Pace) -> Loader | None:
    main = events.select(events.process == process)
    inside = pace.time.contains(main.end)
    asked = main.select(inside & ((main.name == "ask") | (main.name == "fetch")))
    if not len(asked.owner):
        return None
    # Of several, the one that most steps ask: one for validation is asked often in few of them.
    in_step = np.searchsorted(pace.begins, asked.end)
    each = np.unique(np.stack((asked.owner, in_step)), axis=1)
    owners, counts = np.unique(each[0], return_counts=True)
    owner = int(owners[np.argmax(counts)])
    mine = main.select(main.owner == owner)
    asks, at_work = asked.select(asked.owner == owner), mine
    workers = _last(mine, "start workers", 0)
    if workers:
        asks = asks.of("ask")
        at_work = _workers_of(events, mine.of("loader"))
    batches = _Batches(at_work, pace.time)
    if len(batches.keys) < _FEWEST_BATCHES:
        return None
    cores = max(1, _last(mine, "cores", 1))
    receiving = _receiving(mine, asks if workers else None, pace)
    per_step = len(asks.end) / pace.steps
    by_worker = batches.by_worker(at_work) if workers else ()
    prefetch = _last(mine, "prefetch factor", 2)
    at_least = max(per_step, 1e-9)
    predicted = _Prediction(pace, at_least, workers, cores, receiving, prefetch, batches)
    starts = mine.of("start workers").lengths
    is_unknown = pace.is_crowded or (not workers and bool(asks.is_aside.all()))
    return Loader(
        rank,
        workers,
        batches=len(asks.end),
        batches_per_step=round(per_step, 3),
        prefetch_factor=prefetch,
        pins_memory=receiving.pins,
        cores=cores,
        batch_ns=sum(part.batch_ns for part in batches.parts),
        processor_ns=round(float(batches.processor.mean())),
        receive_ns=round(receiving.receive_ns),
        pin_ns=None if receiving.pin_ns is None else round(receiving.pin_ns),
        parts=batches.parts,
        by_worker=by_worker,
        start_workers_ns=int(median(starts)) if workers and len(starts) else 0,
        queue_median=float(median(asks.number)) if workers else None,
        queue_empty=round(float(np.mean(asks.number == 0)), 4) if workers else None,
        step_ns=round(pace.step_ns),
        wait_ns=round(pace.wait_ns),
        predictions=() if is_unknown else predicted.choices(),
        half_step_ns=None if is_unknown else predicted.with_half(),
        no_disk_step_ns=None if is_unknown else predicted.without_waits(),
        cached_step_ns=None if is_unknown else predicted.with_cache(),
        doubled_step_ns=predicted.with_twice_ahead() if workers and not is_unknown else None,
    )


class _Receiving(Struct, frozen=True):
    """Mean nanoseconds that the process that trains takes for a batch of its workers."""

    receive_ns: float
    pin_ns: float | None
    """Copy into pinned memory; None if none was seen."""
    pins: bool
    """True where a thread receives and pins, beside the one that trains."""
    whole: float
    """Receiving and pinning, with what else the loader does in the thread that trains."""
    whole_idle: float
    """``whole`` of a batch whose worker is idle."""


def _receiving(mine: LoaderEvents, asks: LoaderEvents | None, pace: Pace) -> _Receiving:
    """Return the times of a loader's batches in the process that trains.

    Args:
        mine: events of the loader in that process.
        asks: waits for a batch of workers; None without workers.
        pace: measured steps.
    """
    every, pinned = mine.of("receive"), mine.of("pin")
    received = every.select(pace.time.contains(every.end))
    pinned = pinned.select(pace.time.contains(pinned.end))
    receive = float(received.lengths.mean()) if len(received.end) else 0.0
    pin = float(pinned.lengths.mean()) if len(pinned.end) else None
    pins = bool(_last(mine, "pins memory", 0))
    rest = (pin or 0.0) + (0.0 if pins or asks is None else _handling(asks, received, pace))
    shortest = np.sort(every.lengths)[: math.ceil(_QUICK_BATCHES_SHARE * len(every.end))]
    idle = float(shortest.mean()) if len(shortest) else receive
    return _Receiving(receive, pin, pins, receive + rest, idle + rest)


def _handling(asks: LoaderEvents, received: LoaderEvents, pace: Pace) -> float:
    """Return the nanoseconds that the training process spends in the loader for a batch, without
    receiving it and waiting for it.
    """
    moments = np.sort(np.concatenate([asks.end, received.end]))
    since = moments[np.searchsorted(moments, received.start, "right") - 1]
    waited = np.maximum(received.start - since, 0).sum() + received.lengths.sum()
    within = (pace.step_ns - pace.host_ns) * pace.steps
    return max(0.0, within - float(waited)) / len(asks.end)


def measure_pipelines(
    events: LoaderEvents, processes: Mapping[int, int], paces: Mapping[int, Pace]
) -> tuple[InputPipeline, ...]:
    """Return the settings of the input pipeline of each rank, of those that are not torch's; see
    `measure_loaders`.

    Of several, it is the first: one for validation comes later.
    """
    pipelines = []
    for rank, process in sorted(processes.items()):
        mine = events.select(events.process == process)
        said = mine.select(np.array([_SETTING in name for name in mine.name], bool))
        if rank not in paces or not len(said.owner):
            continue
        pace, owner = paces[rank], said.owner[0]
        said, mine = said.select(said.owner == owner), mine.select(mine.owner == owner)
        settings, cores, library = [], 1, ""
        for text, number in zip(said.name.tolist(), said.number.tolist(), strict=True):
            library, stage, name = text.split(_SETTING, 2)
            if stage:
                settings.append(InputSetting(stage, name, None if number == _AUTOMATIC else number))
            else:
                cores = number
        asked = mine.of("ready")
        ready = asked.number[pace.time.contains(asked.end)]
        pipelines.append(
            InputPipeline(
                rank,
                library,
                cores,
                tuple(settings),
                float(median(ready)) if len(ready) else None,
                round(float(np.mean(ready == 0)), 4) if len(ready) else None,
                round(pace.step_ns),
                round(pace.wait_ns),
            )
        )
    return tuple(pipelines)


_SETTING: Final = "|"
_AUTOMATIC: Final = 0xFFFFFFFF


def _last(events: LoaderEvents, name: str, otherwise: int) -> int:
    """Return the number of the last event of a name."""
    numbers = events.of(name).number
    return int(numbers[-1]) if len(numbers) else otherwise


def _workers_of(events: LoaderEvents, began: LoaderEvents) -> LoaderEvents:
    """Return the events of a loader's workers, which carry one of its numbers."""
    loaders = events.of("loader")
    mine = np.isin(loaders.host, began.host) & np.isin(loaders.number, began.number)
    # A process that starts workers itself is not a worker.
    makers = np.unique(events.of("cores").process)
    processes = np.setdiff1d(loaders.process[mine], makers)
    return events.select(np.isin(events.process, processes))


def _keys(events: LoaderEvents) -> list[tuple[int, int, int]]:
    """Return process, number and epoch of each event: workers that stay count anew in each."""
    seen: Counter[tuple[int, int]] = Counter()
    keys = []
    for key in zip(events.process.tolist(), events.number.tolist(), strict=True):
        keys.append((*key, seen[key]))
        seen[key] += 1
    return keys


class _Batches:
    """Times of batches by part, a row for each batch; only batches that end in the given time."""

    def __init__(self, events: LoaderEvents, time: Intervals) -> None:
        fetched = events.of("fetch")
        inside = time.contains(fetched.end)
        self.worker = fetched.owner[inside]
        keys = [key for key, there in zip(_keys(fetched), inside.tolist(), strict=True) if there]
        self.keys = {key: row for row, key in enumerate(keys)}
        fetch = self._sums(events.of("fetch"))
        self.transforms = {
            name.removeprefix(_TRANSFORM): self._sums(events.of(name))
            for name in sorted({*events.name.tolist()})
            if name.startswith(_TRANSFORM)
        }
        timed = sum(self.transforms.values(), np.zeros(len(fetch))) > 0
        if timed.any():
            # Batches whose transforms were not timed have the share of the others.
            whole = max(float(fetch[timed].sum()), 1.0)
            for times in self.transforms.values():
                times[~timed] = fetch[~timed] * float(times[timed].sum()) / whole
        self.fetch = fetch
        self.read = np.maximum(fetch - sum(self.transforms.values(), np.zeros(len(fetch))), 0)
        collate, self.send = self._sums(events.of("collate")), self._sums(events.of("send"))
        self.work = fetch + collate
        self.processor = self._sums(events.of("processor time")) + self.send
        columns = {READING: self.read, COLLATING: collate, SENDING: self.send}
        columns |= {_TRANSFORM + name: times for name, times in self.transforms.items()}
        total = max(float(sum(column.sum() for column in columns.values())), 1.0)
        parts = [
            LoaderPart(name, round(float(times.mean())), round(float(times.sum()) / total, 4))
            for name, times in columns.items()
            if len(times) and times.any()
        ]
        self.parts = tuple(sorted(parts, key=lambda part: -part.batch_ns))

    def _sums(self, events: LoaderEvents) -> Floats:
        """Return the nanoseconds of events by batch."""
        sums = np.zeros(len(self.keys))
        for key, length in zip(_keys(events), events.lengths.tolist(), strict=True):
            row = self.keys.get(key)
            if row is not None:
                sums[row] += length
        return sums

    def by_worker(self, events: LoaderEvents) -> tuple[LoaderWorker, ...]:
        """Return each worker's batches, and what it waited and read."""
        loaders = []
        idle = self._sums(events.of("wait for work"))
        for owner in distinct_ids(self.worker).tolist():
            rows = self.worker == owner
            work, waited = float(self.work[rows].sum()), float(idle[rows].sum())
            mine = events.select(events.owner == owner)
            read, disk = (mine.of(name).number for name in ("KiB read", "KiB read from disk"))
            loaders.append(
                LoaderWorker(
                    owner - 1,
                    int(rows.sum()),
                    int(median(self.work[rows] + self.send[rows])),
                    round(waited / max(work + waited, 1.0), 4),
                    int(read.sum()) * _KIB if len(read) else None,
                    int(disk.sum()) * _KIB if len(disk) else None,
                )
            )
        return tuple(loaders)

    def rows(self, values: Floats) -> Sequence[Floats]:
        """Return the values of each worker's batches, in order."""
        return [values[self.worker == owner] for owner in distinct_ids(self.worker).tolist()]


class _Prediction(Struct, frozen=True):
    """Predicted steps of one loader."""

    pace: Pace
    per_step: float
    """Batches of a step; above 0."""
    workers: int
    cores: int
    receiving: _Receiving
    prefetch: int
    batches: _Batches

    def choices(self) -> tuple[LoaderChoice, ...]:
        """Return the steps for numbers of workers from 0 to the cores, and at least to 8."""
        doubled = takewhile(lambda n: n <= max(self.cores, 8), (1 << i for i in range(32)))
        counts = {0, *doubled, self.workers, max(8, self.cores)}
        feed = self._feed()
        return tuple(
            self._choice(feed, count)
            for count in sorted(counts)
            if count <= max(_MOST_WORKERS, self.workers)
        )

    def with_half(self) -> int | None:
        """Return the step if the longest transform took half as long."""
        transforms = self.batches.transforms.values()
        longest = max(transforms, key=lambda t: float(t.sum()), default=None)
        return None if longest is None else self._without(longest / 2)

    def without_waits(self) -> int:
        """Return the step if reading samples took only processor time, as from files in memory."""
        batches = self.batches
        waited = np.maximum(batches.work + batches.send - batches.processor, 0)
        return self._without(np.minimum(batches.read, waited), is_computed=False)

    def with_cache(self) -> int:
        """Return the step if the results of the last transform were cached."""
        return self._without(self.batches.fetch)

    def with_twice_ahead(self) -> int:
        """Return the step if the prefetch factor were twice as large."""
        feed = replace(self._feed(), prefetch=2 * self.prefetch)
        return self._choice(feed, self.workers).step_ns

    def _without(self, part: Floats, is_computed: bool = True) -> int:
        feed = self._feed().without(self.batches.rows(part), is_computed)
        return self._choice(feed, self.workers).step_ns

    def _choice(self, feed: BatchTimes, workers: int) -> LoaderChoice:
        step = batch_ns(feed, workers) * self.per_step
        return LoaderChoice(workers, round(step), round(max(0.0, step - self.pace.train_ns)))

    def _feed(self) -> BatchTimes:
        batches, pace = self.batches, self.pace
        busy = pace.busy_ns / self.per_step
        if not self.workers:
            busy = max(0.0, busy - float(batches.processor.mean()))
        return BatchTimes(
            batches.rows(batches.work),
            batches.rows(batches.send),
            batches.rows(batches.processor),
            self.receiving.whole,
            self.receiving.whole_idle,
            pace.train_ns / self.per_step,
            pace.host_ns / self.per_step,
            self.prefetch,
            self.receiving.pins,
            self.cores / max(pace.share_cores, 1),
            busy,
        )


_QUICK_BATCHES_SHARE: Final = 0.1
"""Share of a loader's batches that come as from idle workers: others wait for the interpreter."""
_LEAST_BATCHES: Final = 200
_SIMULATED_ROUNDS: Final = 20
"""Batches simulated: at least so many, and so many rounds of the workers."""


class BatchTimes(Struct, frozen=True, dict=True):
    """Measured times of batches, in nanoseconds.

    Attributes:
        work, send, processor: of batches: fetching and collating; sending, in processor time;
            processor time of all that. A row for each worker where workers differ, else one row.
        receive: of a batch in the process that trains, with its copy into pinned memory, or with
            what else the loader does in the thread that trains.
        receive_idle: the same where its worker is idle: what it shares is fetched from a thread of
            it, which waits for the interpreter while the worker makes a batch.
        train: of the GPU for a batch, without any wait for it; without a GPU, as ``host``.
        host: of that process between two batches, without any wait for them.
        prefetch: batches per worker that are made ahead.
        pins: whether a thread receives, beside the one that trains.
        cores: for this process and its workers.
        busy: processor time of the process that trains, between two batches.
    """

    work: Sequence[NDArray[np.float64]]
    send: Sequence[NDArray[np.float64]]
    processor: Sequence[NDArray[np.float64]]
    receive: float
    receive_idle: float
    train: float
    host: float
    prefetch: int
    pins: bool
    cores: float
    busy: float

    def without(self, part: Sequence[NDArray[np.float64]], is_computed: bool) -> BatchTimes:
        """Return the feed with some of the work left out, and its share of the processor time,
        unless it is a part that waits.
        """
        rows = list(zip(self.work, part, strict=True))
        work = [np.maximum(all - less, 0) for all, less in rows]
        if not is_computed:
            return replace(self, work=work)
        shares = [np.minimum(less / np.maximum(all, 1), 1) for all, less in rows]
        processor = [
            used - np.maximum(used - send, 0) * share
            for used, send, share in zip(self.processor, self.send, shares, strict=True)
        ]
        return replace(self, work=work, processor=processor)


def batch_ns(feed: BatchTimes, workers: int) -> float:
    """Return the mean nanoseconds from batch to batch in the long run."""
    mean_work = float(np.mean([row.mean() for row in feed.work]))
    if not workers:
        return max(mean_work + feed.host, feed.train)
    processor = float(np.mean([row.mean() for row in feed.processor]))
    return max(_in_turn(feed, workers), (processor + feed.busy) / max(feed.cores, 1))


def _in_turn(feed: BatchTimes, workers: int) -> float:
    count = max(_LEAST_BATCHES, _SIMULATED_ROUNDS * workers)
    ahead = feed.prefetch * workers
    free, received, taken = [0.0] * workers, 0.0, [0.0] * count
    given = [0] * len(feed.work)
    mean = float(np.mean([row.mean() for row in feed.work]))
    now = ended = 0.0
    for number in range(count):
        worker = number % workers
        row = worker % len(feed.work)
        at = given[row] % len(feed.work[row])
        given[row] += 1
        work, send = float(feed.work[row][at]), float(feed.send[row][at])
        arrived = taken[number - ahead] if number >= ahead else 0.0
        start = max(free[worker], arrived)
        free[worker] = start + max(work, float(feed.processor[row][at]))
        ready = start + work + send
        # The worker goes on to the batches that it was asked for before this one is taken.
        busy_until = free[worker]
        for later in range(1, feed.prefetch):
            before = number - (feed.prefetch - later) * workers
            asked = taken[before] if before >= 0 else 0.0
            busy_until = max(busy_until, asked) + mean
        at_hand = max(received if feed.pins else now, ready)
        receive = feed.receive if at_hand < busy_until else feed.receive_idle
        if feed.pins:
            received = at_hand + receive
            now = max(now, received)
        else:
            now = at_hand + receive
        taken[number] = now
        # The process is one step ahead of the GPU at most.
        now, ended = max(now + feed.host, ended), max(ended, now) + feed.train
    half = count // 2 // workers * workers
    rounds = (count - 1 - half) // workers * workers
    # Whole rounds, so that each worker counts as often as any other.
    return (taken[half + rounds] - taken[half]) / rounds
