"""Requests to the workers of a cluster, batched into Dask tasks, and their answers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

from gputrace.cluster.messages import File, Reply, Request, encode, error_of, read_reply
from gputrace.cluster.remote import RemoteTrace
from gputrace.cluster.scheduler import HINT, connected
from gputrace.cluster.worker import answer, forget
from gputrace.errors import GputraceError, InputError, MissingError
from gputrace.model.trace import Trace
from gputrace.version import __version__

if TYPE_CHECKING:
    from distributed import Client, Future

_TOGETHER: Final = 16
"""Maximum requests in a task: each task costs the scheduler a millisecond."""
_LARGE: Final = 1 << 20
"""Bytes of requests at which a task is full: Dask warns about very large tasks."""
_TASKS_EACH: Final = 4
"""Minimum tasks per worker, for load balance at the end."""
_LOOKED_AFTER_S: Final = 2.0
"""Interval at which a long task is checked for a dead worker."""
_PARTING_S: Final = 1.0
"""Timeout for the workers to close their files."""


class Ticket:
    """Pending request, and its answer once fetched."""

    def __init__(self, cluster: Cluster, request: Request) -> None:
        self.path, self.raw = request.file.path, encode(request)
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
    """Requests that one worker answers in order."""

    def __init__(self, tickets: Sequence[Ticket], future: Future, home: str) -> None:
        """Link the tickets to this task; ``home`` is the worker with the files open, or empty."""
        self.tickets, self.future, self.home = tickets, future, home
        for ticket in tickets:
            ticket.task = self


class Cluster:
    """Cluster whose workers answer requests; close it, or use a ``with`` statement.

    Attributes:
        received: bytes of answers so far.
    """

    def __init__(self, where: str) -> None:
        """Connect to a scheduler's address, or start a cluster: ``local:N`` or ``slurm:N``.

        Raises UsageError for anything else, MissingError if there is no such cluster.
        """
        self.received = 0
        self._run, self._where = uuid.uuid4().hex, where
        self._waiting: list[Ticket] = []
        self._homes: dict[str, str] = {}
        """The worker that has each file open."""
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
        """Open files like `decode_pool.open_each`, on the cluster; ``workers`` is ignored."""
        asked = [File(self._run, str(file), keep_going, windows) for file in files]
        tickets = [self.ask(Request(file, about=True)) for file in asked]
        for file, ticket in zip(asked, tickets, strict=True):
            opened: Trace | GputraceError
            try:
                opened = RemoteTrace(self, file, ticket.reply())
            except MissingError:
                raise
            except GputraceError as error:
                opened = error
            yield opened
            if not keep_going and not isinstance(opened, Trace):
                return

    def ask(self, request: Request) -> Ticket:
        """Queue a request for the worker that has its file open, or for any."""
        ticket = Ticket(self, request)
        self._waiting.append(ticket)
        return ticket

    def fetch(self, ticket: Ticket) -> None:
        """Submit all queued requests, and fetch the answers of the ticket's task."""
        with _told(self._where):
            self._send()
            assert ticket.task is not None
            self._collect(ticket.task)

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        waiting.sort(key=self._home)
        each = min(_TOGETHER, -(-len(waiting) // (_TASKS_EACH * self._workers)))
        for home, tickets in groupby(waiting, self._home):
            batch: list[Ticket] = []
            for ticket in tickets:
                if len(batch) == each or sum(len(queued.raw) for queued in batch) > _LARGE:
                    self._submit(batch, home)
                    batch = []
                batch.append(ticket)
            self._submit(batch, home)

    def _home(self, ticket: Ticket) -> str:
        return self._homes.get(ticket.path, "")

    def _submit(self, tickets: Sequence[Ticket], home: str) -> _Task:
        future = self._client.submit(
            answer,
            [ticket.raw for ticket in tickets],
            workers=[home] if home else None,
            allow_other_workers=bool(home),
            pure=False,
        )
        return _Task(tickets, future, home)

    def _collect(self, task: _Task, alone: bool = False) -> None:
        """Store the answers of a task.

        A worker that dies fails all tasks queued there: then each request is repeated in a task of
        its own, which shows which one is the cause.
        """
        from distributed.scheduler import KilledWorker

        error = self._outcome(task)
        if error is None:
            for ticket, raw in zip(task.tickets, task.future.result(), strict=True):
                ticket.answer = raw
                self.received += len(raw)
        elif isinstance(error, KilledWorker) and not alone:
            for ticket in task.tickets:
                self._collect(self._submit([ticket], ""), alone=True)
        else:
            for ticket in task.tickets:
                ticket.error = _error_of(error, ticket.path, self._where)
        task.future.release()

    def _outcome(self, task: _Task) -> Any:
        """Wait for a task, and return the error it raised, if any."""
        while True:
            try:
                return task.future.exception(timeout=_LOOKED_AFTER_S)
            except TimeoutError:
                if self._is_stuck(task):
                    again = self._submit(task.tickets, "")
                    task.future.release()
                    task.future, task.home = again.future, ""

    def _is_stuck(self, task: _Task) -> bool:
        """Return whether a task waits for a dead worker although there are others.

        Dask reschedules a task while other workers live; if all died at once, it no longer offers
        the task to new ones.
        """
        running = self._client.processing() if task.home else {}
        if not running or task.home in running:
            return False
        return not any(task.future.key in keys for keys in running.values())

    def read(self, ticket: Ticket) -> Reply:
        """Return the answer of a fetched ticket; raises the error that it reports."""
        if ticket.error is not None:
            raise ticket.error
        assert ticket.answer is not None
        reply, ticket.answer = read_reply(ticket.answer), None
        if reply.version != __version__:
            raise MissingError(
                f"the workers of {self._where} have gputrace {reply.version}, and this is "
                f"{__version__}: install one version on all"
            )
        self._homes[ticket.path] = reply.worker
        if reply.problem is not None:
            raise error_of(reply.problem)
        return reply

    def close(self) -> None:
        """Close the files on the workers, and stop what was started for the cluster."""
        forgetting = Thread(target=self._forget, daemon=True)
        forgetting.start()
        forgetting.join(_PARTING_S)
        self._closing.close()

    def _forget(self) -> None:
        with suppress(Exception):
            self._client.run(forget, self._run)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Turn the errors that Dask raises without a scheduler into a MissingError."""
    from distributed.client import FutureCancelledError

    try:
        yield
    except (FutureCancelledError, TimeoutError, OSError) as error:
        raise _gone(where) from error


def _gone(where: str) -> MissingError:
    return MissingError(f"the scheduler of {where} does not answer any more; look at its log")


def _error_of(error: Any, path: str, where: str) -> BaseException:
    """Convert an error of a worker to a user-facing one."""
    from distributed.scheduler import KilledWorker

    if isinstance(error, KilledWorker):
        problem = "the workers that read it died, several in turn; there may be too little memory"
        return InputError(path, problem)
    if isinstance(error, MemoryError):
        return InputError(path, "not enough memory on the worker that reads it")
    if isinstance(error, ImportError):
        return MissingError(f"the workers of {where} lack what it takes ({error}); {HINT}")
    if isinstance(error, OSError):
        return InputError(path, f"the worker cannot read it: {error.strerror or error}")
    assert isinstance(error, BaseException)
    return error
