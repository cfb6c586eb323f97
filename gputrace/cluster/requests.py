"""Requests on their way to the workers of a cluster, several in one task, and their answers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

from gputrace import __version__
from gputrace.cluster.messages import File, Reply, Request, encode, error_of, read_reply
from gputrace.cluster.remote import RemoteTrace
from gputrace.cluster.scheduler import HINT, connected
from gputrace.cluster.worker import answer, forget
from gputrace.errors import GputraceError, InputError, MissingError
from gputrace.traces.trace import Trace

if TYPE_CHECKING:
    from distributed import Client, Future

_TOGETHER: Final = 16
"""Requests in one task at most: a task costs the scheduler a millisecond, whatever is in it."""
_LARGE: Final = 1 << 20
"""Bytes of requests from which on a task takes no more: Dask warns of very large ones."""
_TASKS_EACH: Final = 4
"""Tasks for each worker at least, so that none waits long for another's last."""
_LOOKED_AFTER_S: Final = 2.0
"""A task that takes longer is looked after."""
_PARTING_S: Final = 1.0
"""For workers to close what is open; later, they are left to themselves."""


class Ticket:
    """A request under way, and its answer once that was fetched."""

    def __init__(self, cluster: Cluster, request: Request) -> None:
        self.path, self.raw = request.file.path, encode(request)
        self.task: _Task | None = None
        self.answer: bytes | None = None
        self.error: BaseException | None = None
        self._cluster = cluster

    def reply(self) -> Reply:
        """The answer; raises what kept the file from being read."""
        if self.answer is None and self.error is None:
            self._cluster.fetch(self)
        return self._cluster.read(self)


class _Task:
    """Requests that one worker answers, one after the other."""

    def __init__(self, tickets: Sequence[Ticket], future: Future, home: str) -> None:
        """``home`` is the worker that has the files, if any has."""
        self.tickets, self.future, self.home = tickets, future, home
        for ticket in tickets:
            ticket.task = self


class Cluster:
    """Workers that answer requests about files; close it, or use it in a ``with`` statement.

    Attributes:
        received: bytes of the answers so far.
    """

    def __init__(self, where: str) -> None:
        """``where`` is a scheduler's address, ``local:N`` or ``slurm:N``.

        Raises UsageError for anything else, MissingError where it cannot be had.
        """
        self.received = 0
        self._run, self._where = uuid.uuid4().hex, where
        self._waiting: list[Ticket] = []
        self._homes: dict[str, str] = {}
        """By file, the worker that has it open."""
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
        """As `gputrace.traces.workers.open_each`; how many workers there are, the cluster says."""
        asked = [File(self._run, str(file), keep_going, windows) for file in files]
        tickets = [self.ask(Request(file, about=True)) for file in asked]
        for file, ticket in zip(asked, tickets, strict=True):
            own: Trace | GputraceError
            try:
                own = RemoteTrace(self, file, ticket.reply())
            except MissingError:
                raise
            except GputraceError as error:
                own = error
            yield own
            if not keep_going and not isinstance(own, Trace):
                return

    def ask(self, request: Request) -> Ticket:
        """A request that goes with others, to the worker that has its file open, or to any."""
        ticket = Ticket(self, request)
        self._waiting.append(ticket)
        return ticket

    def fetch(self, ticket: Ticket) -> None:
        """Sends what waits, and fetches the answers of one task."""
        with _told(self._where):
            self._send()
            assert ticket.task is not None
            self._collect(ticket.task)

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        waiting.sort(key=self._home)
        each = min(_TOGETHER, -(-len(waiting) // (_TASKS_EACH * self._workers)))
        for home, tickets in groupby(waiting, self._home):
            own: list[Ticket] = []
            for ticket in tickets:
                if len(own) == each or sum(len(one.raw) for one in own) > _LARGE:
                    self._submit(own, home)
                    own = []
                own.append(ticket)
            self._submit(own, home)

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
        """Takes the answers.

        A worker that dies takes with it what waits there, too: then each is asked for again, one
        after the other, and what is the cause shows.
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
        """What a task raised, once it is done."""
        while True:
            try:
                return task.future.exception(timeout=_LOOKED_AFTER_S)
            except TimeoutError:
                if self._is_stuck(task):
                    again = self._submit(task.tickets, "")
                    task.future.release()
                    task.future, task.home = again.future, ""

    def _is_stuck(self, task: _Task) -> bool:
        """Whether it waits for a worker that is gone, though there are others.

        Dask places it elsewhere while there are any; where all died at once, it forgets that it
        may, and new ones do not get it.
        """
        running = self._client.processing() if task.home else {}
        if not running or task.home in running:
            return False
        return not any(task.future.key in keys for keys in running.values())

    def read(self, ticket: Ticket) -> Reply:
        """The answer of a ticket that was fetched; raises what it says is wrong."""
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
        """Has the workers close the files, and ends what was started for this."""
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
    """What Dask raises when the scheduler is gone, in the words of a person."""
    from distributed.client import FutureCancelledError

    try:
        yield
    except (FutureCancelledError, TimeoutError, OSError) as error:
        raise _gone(where) from error


def _gone(where: str) -> MissingError:
    return MissingError(f"the scheduler of {where} does not answer any more; look at its log")


def _error_of(error: Any, path: str, where: str) -> BaseException:
    """An error of a worker as a person may see it."""
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
