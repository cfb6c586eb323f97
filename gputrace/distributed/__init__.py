"""Runs whose files the workers of a Dask cluster read and analyze, where the files are.

Rows stay on the workers, one file a `Shard`; summaries travel, by Dask's own ``submit`` and
``gather``. A worker may take over from another: it is given all that the shard went through.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gputrace.analyzers.cuda_api_calls import CudaApiCalls, read_calls
from gputrace.analyzers.gpu_shards import HasGpu, PerGpu, Shard
from gputrace.analyzers.lanes import AnyGpu
from gputrace.analyzers.operations import Gpu, group_gpus
from gputrace.distributed import worker
from gputrace.distributed.scheduler import HINT, connected
from gputrace.distributed.worker import Batch, Census, File, Reply, Request, RunNumbering
from gputrace.errors import GputraceError, InputError, MissingError
from gputrace.model.attempts import Life
from gputrace.model.events import Column, Events, Kind, concatenate
from gputrace.model.nvml import Nvml
from gputrace.model.options import Window
from gputrace.model.trace import Coverage, Device, Process, Selection, Session, Trace
from gputrace.store.merge import MergedTrace
from gputrace.store.spill_file import LARGE
from gputrace.version import __version__

if TYPE_CHECKING:
    from distributed import Client, Future


_TOGETHER: Final = 16
"""Maximum number of requests in a task: a task each doubled the time for 48 small files."""
_TASKS_EACH: Final = 4
"""Minimum number of tasks per worker, so that none waits long for another's last."""
_LOOKED_AFTER_S: Final = 2.0
"""Seconds after which a task is checked for being stuck."""
_WORKERS_GONE_S: Final = 60.0
"""Seconds without any worker after which no other is waited for; a new one takes a few to start."""
_PARTING_S: Final = 1.0
"""Seconds that workers get to close their files."""


class Ticket:
    """Pending request."""

    def __init__(self, cluster: Cluster, request: Request) -> None:
        self.request, self.path = request, request.file.path
        self.task: _Task | None = None
        self.answer: bytes | None = None
        self.error: BaseException | None = None
        self._cluster = cluster

    def reply(self) -> Reply:
        """Return the answer; raises the error that kept the file from being read."""
        if self.answer is None and self.error is None:
            self._cluster.fetch(self)
        return self._cluster.read(self)


class _Task:
    """Requests that one worker answers, one after the other."""

    def __init__(self, tickets: Sequence[Ticket], future: Future, home: str) -> None:
        """``home`` is the worker that has the files open, if any has."""
        self.tickets, self.future, self.home = tickets, future, home
        for ticket in tickets:
            ticket.task = self


class Cluster:
    """Workers that open files and run functions on them; a context manager.

    Attributes:
        received: bytes of the answers so far.
    """

    def __init__(self, where: str) -> None:
        """``where`` is a scheduler's address, ``local:N`` or ``slurm:N``.

        Raises UsageError for anything else, MissingError if it is not available.
        """
        self.received = 0
        self._run, self._where = uuid.uuid4().hex, where
        self._waiting: list[Ticket] = []
        self._homes: dict[str, str] = {}
        """Address of the worker that has each file open."""
        self._closing = ExitStack()
        self._client: Client = self._closing.enter_context(connected(where))
        self._workers = len(self._client.nthreads())

    def open_each(
        self,
        files: Sequence[Path],
        keep_going: bool = False,
        workers: int | None = None,
        windows: bool = False,
    ) -> Iterator[Trace | GputraceError]:
        """Open files as `gputrace.readers.open.open_each` does, on the cluster's workers."""
        asked = [File(self._run, str(file), keep_going, windows) for file in files]
        tickets = [self.ask(Request(file, worker.about)) for file in asked]
        for file, ticket in zip(asked, tickets, strict=True):
            trace: Trace | GputraceError
            try:
                trace = RemoteTrace(self, file, ticket.reply())
            except MissingError:
                raise
            except GputraceError as error:
                trace = error
            yield trace
            if not keep_going and not isinstance(trace, Trace):
                return

    def ask(self, request: Request) -> Ticket:
        """Queue a request; it goes with others to the worker that has its file open, or to any."""
        ticket = Ticket(self, request)
        self._waiting.append(ticket)
        return ticket

    def fetch(self, ticket: Ticket) -> None:
        """Send the queue and fetch the answers of one task."""
        from distributed.client import FutureCancelledError

        try:
            self._send()
            assert ticket.task is not None
            self._collect(ticket.task)
        except (FutureCancelledError, TimeoutError, OSError) as error:
            raise MissingError(
                f"the scheduler of {self._where} does not answer any more; look at its log"
            ) from error

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        together = min(_TOGETHER, -(-len(waiting) // (_TASKS_EACH * self._workers)))
        by_home: dict[str, list[Ticket]] = {}
        for ticket in waiting:
            by_home.setdefault(self._homes.get(ticket.path, ""), []).append(ticket)
        for home, tickets in sorted(by_home.items()):
            for first in range(0, len(tickets), together):
                self._submit(tickets[first : first + together], home)

    def _submit(self, tickets: Sequence[Ticket], home: str) -> _Task:
        future = self._client.submit(
            worker.answer,
            [ticket.request for ticket in tickets],
            workers=[home] if home else None,
            allow_other_workers=bool(home),
            pure=False,
        )
        return _Task(tickets, future, home)

    def _collect(self, task: _Task, alone: bool = False) -> None:
        """Store the answers of a task.

        If its worker died, the requests are repeated one by one, which isolates the deadly file.
        """
        from distributed.scheduler import KilledWorker

        error, answers = self._outcome(task)
        if error is None:
            for ticket, raw in zip(task.tickets, answers, strict=True):
                ticket.answer = raw
                self.received += len(raw)
        elif isinstance(error, KilledWorker) and not alone:
            for ticket in task.tickets:
                self._collect(self._submit([ticket], ""), alone=True)
        else:
            for ticket in task.tickets:
                ticket.error = _error_of(error, ticket.path, self._where)
        task.future.release()

    def _outcome(self, task: _Task) -> tuple[Any, Sequence[bytes]]:
        """Wait for a task and return its exception, or else its answers, which a worker that dies
        may take with it.

        Raises:
            MissingError: if all workers are gone, and no other comes.
        """
        last_seen = monotonic()
        while True:
            try:
                if (error := task.future.exception(timeout=_LOOKED_AFTER_S)) is not None:
                    return error, ()
                return None, task.future.result(timeout=_LOOKED_AFTER_S)
            except TimeoutError:
                running = self._client.processing()
                if running:
                    last_seen = monotonic()
                elif monotonic() - last_seen > _WORKERS_GONE_S:
                    raise MissingError(f"{self._where} has no worker left: start some") from None
                if _is_stuck(task, running):
                    again = self._submit(task.tickets, "")
                    task.future.release()
                    task.future, task.home = again.future, ""

    def read(self, ticket: Ticket) -> Reply:
        """Decode the answer of a fetched ticket; raises the error that it carries."""
        if ticket.error is not None:
            raise ticket.error
        assert ticket.answer is not None
        reply: Reply = worker.load(ticket.answer)
        ticket.answer = None
        if reply.version != __version__:
            raise MissingError(
                f"the workers of {self._where} have gputrace {reply.version}, and this is "
                f"{__version__}: install one version on all"
            )
        self._homes[ticket.path] = reply.worker
        if reply.problem is not None:
            raise reply.problem
        return reply

    def close(self) -> None:
        """Close the workers' files, and what was started for this."""
        forgetting = Thread(target=self._forget, daemon=True)
        forgetting.start()
        forgetting.join(_PARTING_S)
        self._closing.close()

    def _forget(self) -> None:
        with suppress(Exception):
            self._client.run(worker.forget, self._run)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_stuck(task: _Task, running: Mapping[str, Collection[str]]) -> bool:
    """Return whether a task waits for a worker that is gone although there are others.

    Dask moves it while other workers exist; if all died at once, it forgets that it may, and new
    workers do not get it.
    """
    if not task.home or not running or task.home in running:
        return False
    return not any(task.future.key in keys for keys in running.values())


def _error_of(error: Any, path: str, where: str) -> BaseException:
    """Convert an error of a worker to one for people."""
    from distributed.scheduler import KilledWorker

    if isinstance(error, ImportError | AttributeError):
        return MissingError(f"the workers of {where} lack what it takes ({error}); {HINT}")
    if isinstance(error, KilledWorker):
        problem = "the workers that read it died, several in turn; there may be too little memory"
    elif isinstance(error, MemoryError):
        problem = "not enough memory on the worker that reads it"
    elif isinstance(error, OSError):
        problem = f"the worker cannot read it: {error.strerror or error}"
    else:
        assert isinstance(error, BaseException)
        return error
    return InputError(path, problem)


class RemoteTrace(Trace):
    """Trace whose file is open on a worker.

    Numbers stay stable if another worker takes over: processes are identified by their attributes,
    not by their index on a worker.
    """

    elsewhere = True

    def __init__(self, cluster: Cluster, file: File, reply: Reply) -> None:
        """``reply`` is the answer to `worker.about`."""
        super().__init__(Path(file.path))
        self._cluster, self._file = cluster, file
        self._about: worker.About = reply.value
        self.source, self.origin = self._about.source, self._about.origin
        self.no_gpu, self.held = self._about.no_gpu, self._about.held
        self.idle_unknown, self.attempt = self._about.idle_unknown, self._about.attempt
        self._names: dict[int, str] = {}
        self._devices: dict[tuple[int, int], Device] = {}
        self._coverage: dict[int, Coverage] = {}
        self._ahead: tuple[Selection, Ticket] | None = None
        self._nvml: Nvml | Ticket | None = None
        self._take(reply)

    def send(self, function: Callable[..., Any], *arguments: Any) -> Ticket:
        """Queue a call of a function of `worker` with the open file."""
        return self._cluster.ask(Request(self._file, function, arguments))

    def receive(self, ticket: Ticket) -> Any:
        """Return the function's result, and store what came with it."""
        reply = ticket.reply()
        self._take(reply)
        return reply.value

    @property
    def session(self) -> Session:
        return self._about.session

    @property
    def kinds(self) -> frozenset[Kind]:
        return self._about.kinds

    @property
    def lives(self) -> Sequence[Life]:
        return self._about.lives

    def cover(self, attempt: int) -> None:
        if attempt != self.attempt:
            super().cover(attempt)
            self.receive(self.send(worker.call, "cover", attempt))

    @property
    def cut_bytes(self) -> int:
        return self._about.cut_bytes

    def part(self, window: Window) -> Trace:
        if self.held and not self.cut_bytes:
            return self  # The worker already has it in memory.
        file = replace(self._file, part=window)
        reply = self._cluster.ask(Request(file, worker.about)).reply()
        return RemoteTrace(self._cluster, file, reply)

    def ask(self, wanted: Selection) -> None:
        if wanted.kinds & self.kinds:
            wanted = replace(wanted, progress=None)
            self._ahead = wanted, self.send(worker.read, wanted)

    def read(self, wanted: Selection) -> Events:
        if not wanted.kinds & self.kinds:
            return concatenate([], wanted.columns)
        progress, wanted = wanted.progress, replace(wanted, progress=None)
        ahead, self._ahead = self._ahead, None
        is_same = ahead is not None and ahead[0] == wanted
        ticket = ahead[1] if ahead and is_same else self.send(worker.read, wanted)
        reply = ticket.reply()
        numbers = self._take(reply)
        rows: worker.Rows = reply.value
        events = rows.events
        self._learn_names(rows.names)
        if progress is not None:
            progress(len(events), len(events))
        if "process" not in events.columns or (numbers == np.arange(len(numbers))).all():
            return events
        arrays = {name: getattr(events, name) for name in events.columns}
        return Events(arrays | {"process": numbers[events.process]})

    def _take(self, reply: Reply) -> Column:
        """Store what comes with an answer; return our number of each process of the worker."""
        known = {process: number for number, process in enumerate(self.processes)}
        for process in reply.processes:
            if process not in known:
                known[process] = len(self.processes)
                self.processes.append(process)
        numbers = [known[process] for process in reply.processes]
        self._coverage |= zip(numbers, reply.coverage, strict=False)
        quality, news = self.quality, reply.news
        for ours, theirs in ((quality.warnings, news.warnings), (quality.notes, news.notes)):
            # A file that was opened again repeats what is known.
            ours += [text for text in theirs if not (reply.again and text in ours)]
        quality.left_out += [item for item in news.left_out if item not in quality.left_out]
        for (reason, where), rows in news.places.items():
            quality.drop(reason, rows, where)
        return np.array(numbers, np.int64)

    def coverage(self, process: int) -> Coverage:
        return self._coverage.get(process, Coverage())

    def names(self, ids: Collection[int] | Column) -> dict[int, str]:
        wanted = [int(id) for id in ids]
        if lacking := tuple(id for id in wanted if id not in self._names):
            self._learn_names(self.receive(self.send(worker.call, "names", lacking)))
        return {id: self._names[id] for id in wanted}

    def search(self, ids: Collection[int] | Column, pattern: str) -> dict[int, str]:
        wanted = tuple(int(id) for id in ids)
        if all(id in self._names for id in wanted):
            return super().search(wanted, pattern)
        texts: dict[int, str] = self.receive(
            self.send(worker.call, "search", np.array(wanted, np.int64), pattern)
        )
        self._learn_names(texts)
        return texts

    def _learn_names(self, texts: Mapping[int, str]) -> None:
        self._names |= {id: sys.intern(text) for id, text in texts.items()}

    def device(self, process: int, device: int) -> Device:
        if (process, device) not in self._devices:
            asked = self.send(worker.device_of, self.processes[process], device)
            self._devices[process, device] = replace(self.receive(asked), process=process)
        return self._devices[process, device]

    def learn(
        self, devices: Mapping[tuple[Process, int], Device], names: Mapping[int, str]
    ) -> None:
        """Store devices and names that need not be requested any more."""
        for (process, ordinal), device in devices.items():
            number = self.processes.index(process)
            self._devices[number, ordinal] = replace(device, process=number)
        self._learn_names(names)

    def ask_nvml(self) -> None:
        if self._nvml is None:
            self._nvml = self.send(worker.call, "read_nvml")

    def read_nvml(self) -> Nvml:
        self.ask_nvml()
        nvml, self._nvml = self._nvml, None
        self._nvml = self.receive(nvml) if isinstance(nvml, Ticket) else nvml
        assert isinstance(self._nvml, Nvml)
        return self._nvml

    def close(self) -> None:
        """Do nothing: the worker closes the file when the run is done."""


def spread(trace: Trace) -> PerGpu | None:
    """Return the GPUs of a run, analyzed where its files are.

    None if a GPU or a rank spans several files, whose rows must be merged.
    """
    traces = trace.traces if isinstance(trace, MergedTrace) else [trace]
    remote = [each for each in traces if isinstance(each, RemoteTrace)]
    if len(remote) < len(traces):
        return None
    gpus = RemoteGpus(trace, remote)
    with ExitStack() as undone:
        undone.callback(gpus.close)
        counted: list[Census] = gpus.each_shard(worker.RemoteShard.count, changes=True)
        if isinstance(trace, MergedTrace):
            trace.check_spans([census.span for census in counted])
        numberings = [_numbering(trace, remote[n], n, census) for n, census in enumerate(counted)]
        work: dict[tuple[int, int], int] = {}
        file_of: dict[frozenset[tuple[int, int]], int] = {}
        for number, (numbering, census) in enumerate(zip(numberings, counted, strict=True)):
            work |= {numbering.pair(pair): count for pair, count in census.work.items()}
            # Pairs of each GPU, as far as the file alone shows.
            file_of |= {frozenset(map(numbering.pair, gpu)): number for gpu in census.together}
        by_file = _by_file(group_gpus(trace, dict(sorted(work.items()))), file_of, len(remote))
        if by_file is None:
            return None
        whole = [
            replace(each, gpus=tuple(part)) for each, part in zip(numberings, by_file, strict=True)
        ]
        gpus.take(
            gpus.each_shard(
                worker.RemoteShard.renumber, [(numbering,) for numbering in whole], changes=True
            )
        )
        undone.pop_all()
    return gpus


def _numbering(trace: Trace, remote: RemoteTrace, number: int, census: Census) -> RunNumbering:
    """Return the mapping of a file, without its GPUs."""
    remote.learn(census.devices, census.texts)
    processes: Sequence[int] = range(len(remote.processes))
    names, shift = census.names.astype(np.int32), 0
    if isinstance(trace, MergedTrace):
        shift, processes = trace.shifts[number], trace.processes_of(number)
        names = trace.number_names(number, census.names)
    by_process = dict(zip(remote.processes, processes, strict=True))
    return RunNumbering(by_process, census.names, names, shift)


def _by_file(
    gpus: Sequence[Gpu], file_of: Mapping[frozenset[tuple[int, int]], int], files: int
) -> list[list[Gpu]] | None:
    """Group the GPUs by file; None if a GPU or a rank is in several."""
    by_file: list[list[Gpu]] = [[] for _ in range(files)]
    of_rank: dict[int, int] = {}
    for gpu in gpus:
        number = file_of.get(frozenset(gpu.pairs))
        if number is None or of_rank.setdefault(gpu.rank, number) != number:
            return None
        by_file[number].append(gpu)
    return by_file


class ShardTask(NamedTuple):
    """Task for a shard: a function of a `GpuShardView`, or of the `Shard` without a GPU."""

    shard: int
    work: Callable[..., Any]
    gpu: AnyGpu | None
    arguments: tuple[Any, ...]


class RemoteGpus(PerGpu):
    """GPUs whose shards are each a file that a worker has open.

    If another worker takes over, all batches that changed the shard are replayed there.
    """

    def __init__(self, trace: Trace, files: Sequence[RemoteTrace]) -> None:
        super().__init__(Shard(trace))
        self.files, self.shards = files, len(files)
        self._large = trace.cut_bytes > LARGE
        self._past: list[list[Batch]] = [[] for _ in files]

    def each(
        self,
        work: Callable[..., Any],
        of: Iterable[HasGpu],
        *given: Iterable[Any],
        same: Sequence[Any] = (),
        keeps: bool = False,
    ) -> list[Any]:
        tasks = [
            ShardTask(self._shard.get(item.gpu, 0), work, item.gpu, (*arguments, *same))
            for item, *arguments in zip(of, *given, strict=True)
        ]
        return self._ask(tasks, keeps)

    def each_shard(
        self,
        work: Callable[..., Any],
        given: Iterable[tuple[Any, ...]] | None = None,
        *,
        changes: bool = False,
    ) -> list[Any]:
        given = [()] * self.shards if given is None else given
        tasks = [ShardTask(n, work, None, arguments) for n, arguments in enumerate(given)]
        return self._ask(tasks, changes)

    def _ask(self, tasks: Sequence[ShardTask], changes: bool) -> list[Any]:
        """Run tasks where their shards are, and return the results in order."""
        batches = _batches(tasks, changes)
        tickets = {number: self._send(number, [batch]) for number, batch in batches.items()}
        results: list[Any] = [None] * len(tasks)
        errors = []
        for number, ticket in tickets.items():
            try:
                file, past = self.files[number], self._past[number]
                values: list[Any] | None = file.receive(ticket)
                if values is None:  # Another worker has taken over.
                    values = file.receive(self._send(number, [*past, batches[number]], anew=True))
                assert values is not None
                if batches[number].changes:
                    past.append(batches[number])
            except GputraceError as error:
                errors.append(error)  # All shards answer first, for `close`.
                continue
            for index, value in zip(batches[number].indices, values, strict=True):
                results[index] = value
        if errors:
            raise errors[0]
        if isinstance(self.trace, MergedTrace):
            self.trace.take_over()
        return results

    def _send(self, number: int, batches: Sequence[Batch], *, anew: bool = False) -> Ticket:
        past = 0 if anew else len(self._past[number])
        return self.files[number].send(worker.run_batches, batches, past, self._large, anew)

    def close(self) -> None:
        """Release what the workers have computed."""
        used = [number for number, past in enumerate(self._past) if past]
        for ticket in [self._send(number, [], anew=True) for number in used]:
            with suppress(GputraceError):
                ticket.reply()

    def calls_within(self, window: Window) -> CudaApiCalls | None:
        return read_calls(self.trace, window=window)


def _batches(tasks: Sequence[ShardTask], changes: bool) -> dict[int, Batch]:
    batches: dict[int, Batch] = {}
    # Values that tasks share are serialized once; the tasks keep them, so ids are unique.
    dumped: dict[int, bytes] = {}

    def dump(value: Any) -> bytes:
        if id(value) not in dumped:
            dumped[id(value)] = worker.dump(value)
        return dumped[id(value)]

    for index, task in enumerate(tasks):
        batch = batches.setdefault(task.shard, Batch(changes))
        batch.tasks.append((dump(task.work), dump(task.gpu), [*map(dump, task.arguments)]))
        batch.indices.append(index)
    return batches
