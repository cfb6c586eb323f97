"""The GPUs of a run whose files the workers of a cluster have: analyzed there, one file a shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from gputrace.analyzers.gpus import Gpu, group_gpus
from gputrace.analyzers.host import HostCalls, read_calls
from gputrace.analyzers.per_gpu import Job, PerGpu, Shards
from gputrace.analyzers.shard import Shard
from gputrace.cluster.messages import Work, understood
from gputrace.cluster.placed import Census, Pair, Placing
from gputrace.cluster.records import from_bytes, name_of, to_bytes
from gputrace.cluster.remote import RemoteTrace, Ticket
from gputrace.traces.merged import MergedTrace
from gputrace.traces.scratch import LARGE
from gputrace.traces.trace import Trace, Window

_Batch = tuple[bool, list[tuple[Any, ...]]]
"""Jobs of one shard, each the name of a function, a GPU and arguments; whether they change it."""


def spread(trace: Trace) -> PerGpu | None:
    """The GPUs of a run, where its files are.

    None where one of them, or a rank, is in several files: their rows must come together.
    """
    files = trace.traces if isinstance(trace, MergedTrace) else [trace]
    remote = [file for file in files if isinstance(file, RemoteTrace)]
    if len(remote) < len(files):
        return None
    far = Far(trace, remote)
    gpus = _placed(trace, far)
    if gpus is None:
        far.forget()
    return gpus


def _placed(trace: Trace, far: Far) -> PerGpu | None:
    counted = far.all("count")
    if isinstance(trace, MergedTrace):
        trace.check_spans([own.span for own in counted])
    files = [_File(trace, number, own) for number, own in enumerate(counted)]
    work = {pair: count for file in files for pair, count in file.work.items()}
    gpus = _by_file(group_gpus(trace, dict(sorted(work.items()))), files)
    if gpus is None:
        return None
    placings = [file.placing(own) for file, own in zip(files, gpus, strict=True)]
    jobs = [Job(number, "place", given=(placing,)) for number, placing in enumerate(placings)]
    return PerGpu(trace, far, far.ask(jobs, changes=True))


class _File:
    """A file of the run, and what it holds of GPUs."""

    def __init__(self, trace: Trace, number: int, census: Census) -> None:
        self._census = census
        self._shift = 0
        if isinstance(trace, MergedTrace):
            own, self._shift = trace.traces[number], trace.shifts[number]
            numbers = trace.processes_of(number)
            self._names = trace.number_names(number, census.names)
        else:
            own, numbers = trace, range(len(trace.processes))
            self._names = census.names.astype(np.int32)
        self._processes = dict(zip(own.processes, numbers, strict=True))

    @property
    def work(self) -> Mapping[tuple[int, int], int]:
        """How many operations each process of the run, and what it calls a GPU by, has in it."""
        return {self._pair(pair): count for pair, count in self._census.work.items()}

    @property
    def together(self) -> set[frozenset[tuple[int, int]]]:
        """The pairs of each GPU as the file alone shows."""
        return {frozenset(map(self._pair, pairs)) for pairs in self._census.together}

    def _pair(self, pair: Pair) -> tuple[int, int]:
        return self._processes[pair[0]], pair[1]

    def placing(self, gpus: Sequence[Gpu]) -> Placing:
        """What its worker is told."""
        return Placing(self._processes, self._census.names, self._names, self._shift, tuple(gpus))


def _by_file(gpus: Sequence[Gpu], files: Sequence[_File]) -> list[list[Gpu]] | None:
    """The GPUs of each file; None where any, or a rank, is in several."""
    number_of = {pairs: number for number, file in enumerate(files) for pairs in file.together}
    found: list[list[Gpu]] = [[] for _ in files]
    of_rank: dict[int, int] = {}
    for gpu in gpus:
        number = number_of.get(frozenset(gpu.pairs))
        if number is None or of_rank.setdefault(gpu.rank, number) != number:
            return None
        found[number].append(gpu)
    return found


class Far(Shards):
    """The shards of a run, each a file that a worker has open.

    A worker may take over from another: it is told all that the shard went through.
    """

    def __init__(self, trace: Trace, files: Sequence[RemoteTrace]) -> None:
        self._trace, self._files = trace, files
        self._large = trace.cut_bytes > LARGE
        self._past: list[list[_Batch]] = [[] for _ in files]

    def __len__(self) -> int:
        return len(self._files)

    def all(self, method: str) -> list[Any]:
        """Has each shard do something that changes it."""
        return self.ask([Job(number, method) for number in range(len(self))], changes=True)

    def ask(self, jobs: Sequence[Job], *, changes: bool = False) -> list[Any]:
        places: dict[int, list[int]] = {}
        batches: dict[int, _Batch] = {}
        for place, job in enumerate(jobs):
            places.setdefault(job.shard, []).append(place)
            batch = batches.setdefault(job.shard, (changes, []))
            batch[1].append((name_of(job.work), job.gpu, job.given))
        tickets = {number: self._send(number, [batch]) for number, batch in batches.items()}
        found: list[Any] = [None] * len(jobs)
        for number, ticket in tickets.items():
            own = self._found(number, ticket, batches[number])
            for place, one in zip(places[number], own, strict=True):
                found[place] = one
        return found

    def _send(self, number: int, batches: Sequence[_Batch], *, anew: bool = False) -> Ticket:
        past = 0 if anew else len(self._past[number])
        return self._files[number].send(Work(to_bytes(batches), past, self._large, anew))

    def _found(self, number: int, ticket: Ticket, batch: _Batch) -> list[Any]:
        file, past = self._files[number], self._past[number]
        raw = file.receive(ticket)
        if raw is None:
            raw = file.receive(self._send(number, [*past, batch], anew=True))
        assert raw is not None
        if batch[0]:
            past.append(batch)
        with understood():
            found: list[Any] = from_bytes(raw)
        return found

    def forget(self) -> None:
        """Has the workers give back what they made."""
        for ticket in [self._send(number, [], anew=True) for number in range(len(self))]:
            ticket.reply()

    @cached_property
    def _whole(self) -> Shard:
        return Shard(self._trace)

    def whole(self, trace: Trace) -> Shard:
        return self._whole

    def calls_within(self, trace: Trace, window: Window) -> HostCalls | None:
        return read_calls(trace, window=window)
