"""The GPUs of a run whose files the workers of a cluster have: analyzed there, one file a shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from typing import Any

import numpy as np

from gputrace.analyzers.execution import PerGpu, Shard, Shards, ShardTask
from gputrace.analyzers.host_calls import CudaApiCalls, read_calls
from gputrace.analyzers.operations import Gpu, group_gpus
from gputrace.cluster.messages import Batch, Order, Work, understood
from gputrace.cluster.placed import Census, Pair, Placing
from gputrace.cluster.records import from_bytes, name_of, to_bytes
from gputrace.cluster.remote import RemoteTrace, Ticket
from gputrace.errors import GputraceError
from gputrace.model.trace import Trace, Window
from gputrace.store.merge import MergedTrace
from gputrace.store.spill_file import LARGE


def spread(trace: Trace) -> PerGpu | None:
    """Return the GPUs of a run, analyzed where its files are.

    None if a GPU or a rank spans several files, whose rows must be merged.
    """
    files = trace.traces if isinstance(trace, MergedTrace) else [trace]
    remote = [file for file in files if isinstance(file, RemoteTrace)]
    if len(remote) < len(files):
        return None
    far = RemoteShards(trace, remote)
    with ExitStack() as undone:
        undone.callback(far.close)
        gpus = _placed(trace, far)
        if gpus is not None:
            undone.pop_all()
    return gpus


def _placed(trace: Trace, far: RemoteShards) -> PerGpu | None:
    counted: list[Census] = far.ask([ShardTask(n, "count") for n in range(len(far))], changes=True)
    if isinstance(trace, MergedTrace):
        trace.check_spans([census.span for census in counted])
    files = [_File(trace, far.files[n], n, census) for n, census in enumerate(counted)]
    work = {pair: count for file in files for pair, count in file.work.items()}
    gpus = _by_file(group_gpus(trace, dict(sorted(work.items()))), files)
    if gpus is None:
        return None
    placings = [file.placing(group) for file, group in zip(files, gpus, strict=True)]
    jobs = [ShardTask(number, "place", given=(placing,)) for number, placing in enumerate(placings)]
    return PerGpu(trace, far, far.ask(jobs, changes=True))


class _File:
    """File of the run, and its census."""

    def __init__(self, trace: Trace, remote: RemoteTrace, number: int, census: Census) -> None:
        remote.learn(census.devices, census.texts)
        self._census, self._shift = census, 0
        self._names = census.names.astype(np.int32)
        numbers: Sequence[int] = range(len(remote.processes))
        if isinstance(trace, MergedTrace):
            self._shift, numbers = trace.shifts[number], trace.processes_of(number)
            self._names = trace.number_names(number, census.names)
        self._processes = dict(zip(remote.processes, numbers, strict=True))

    @property
    def work(self) -> Mapping[tuple[int, int], int]:
        """Return the number of operations of each process (numbered by the run) and device."""
        return {self._pair(pair): count for pair, count in self._census.work.items()}

    @property
    def together(self) -> set[frozenset[tuple[int, int]]]:
        """Return the pairs of each GPU, as far as the file alone shows."""
        return {frozenset(map(self._pair, pairs)) for pairs in self._census.together}

    def _pair(self, pair: Pair) -> tuple[int, int]:
        return self._processes[pair[0]], pair[1]

    def placing(self, gpus: Sequence[Gpu]) -> Placing:
        """Return the mapping for the file's worker."""
        return Placing(self._processes, self._census.names, self._names, self._shift, tuple(gpus))


def _by_file(gpus: Sequence[Gpu], files: Sequence[_File]) -> list[list[Gpu]] | None:
    """Group the GPUs by file; None if a GPU or a rank is in several."""
    number_of = {pairs: number for number, file in enumerate(files) for pairs in file.together}
    by_file: list[list[Gpu]] = [[] for _ in files]
    of_rank: dict[int, int] = {}
    for gpu in gpus:
        number = number_of.get(frozenset(gpu.pairs))
        if number is None or of_rank.setdefault(gpu.rank, number) != number:
            return None
        by_file[number].append(gpu)
    return by_file


class RemoteShards(Shards):
    """Shards of a run, each a file that a worker has open.

    If another worker takes over, all batches that changed the shard are replayed there.
    """

    def __init__(self, trace: Trace, files: Sequence[RemoteTrace]) -> None:
        self.files = files
        self._trace = trace
        self._large = trace.cut_bytes > LARGE
        self._past: list[list[Batch]] = [[] for _ in files]

    def __len__(self) -> int:
        return len(self.files)

    def ask(self, jobs: Sequence[ShardTask], *, changes: bool = False) -> list[Any]:
        batches, indices = _batches(jobs, changes)
        tickets = {number: self._send(number, [batch]) for number, batch in batches.items()}
        results: list[Any] = [None] * len(jobs)
        for number, answers in self._results(tickets, batches).items():
            for index, result in zip(indices[number], answers, strict=True):
                results[index] = result
        if isinstance(self._trace, MergedTrace):
            self._trace.take_over()
        return results

    def _results(
        self, tickets: Mapping[int, Ticket], batches: Mapping[int, Batch]
    ) -> dict[int, list[Any]]:
        """Collect the results; raises the first error once all have answered, for `close`."""
        results: dict[int, list[Any]] = {}
        errors = []
        for number, ticket in tickets.items():
            try:
                results[number] = self._found(number, ticket, batches[number])
            except GputraceError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return results

    def _send(self, number: int, batches: Sequence[Batch], *, anew: bool = False) -> Ticket:
        past = 0 if anew else len(self._past[number])
        return self.files[number].send(Work(list(batches), past, self._large, anew))

    def _found(self, number: int, ticket: Ticket, batch: Batch) -> list[Any]:
        file, past = self.files[number], self._past[number]
        raw = file.receive(ticket)
        if raw is None:
            raw = file.receive(self._send(number, [*past, batch], anew=True))
        assert raw is not None
        if batch.changes:
            past.append(batch)
        with understood():
            results: list[Any] = from_bytes(raw)
        return results

    def close(self) -> None:
        """Release the shards on the workers."""
        made = [number for number, past in enumerate(self._past) if past]
        for ticket in [self._send(number, [], anew=True) for number in made]:
            with suppress(GputraceError):
                ticket.reply()

    @cached_property
    def _whole(self) -> Shard:
        return Shard(self._trace)

    def whole(self, trace: Trace) -> Shard:
        return self._whole

    def calls_within(self, trace: Trace, window: Window) -> CudaApiCalls | None:
        return read_calls(trace, window=window)


def _batches(
    jobs: Sequence[ShardTask], changes: bool
) -> tuple[dict[int, Batch], dict[int, list[int]]]:
    """Encode the jobs of each shard, and return them with their indices among all jobs."""
    batches: dict[int, Batch] = {}
    indices: dict[int, list[int]] = {}
    packed: dict[int, bytes] = {}

    def pack(value: Any) -> bytes:
        """Encode an argument once; jobs keep arguments alive, so ids identify them."""
        if id(value) not in packed:
            packed[id(value)] = to_bytes(value)
        return packed[id(value)]

    for index, job in enumerate(jobs):
        batch = batches.setdefault(job.shard, Batch(changes, []))
        batch.orders.append(Order(name_of(job.work), pack(job.gpu), [*map(pack, job.given)]))
        indices.setdefault(job.shard, []).append(index)
    return batches, indices
