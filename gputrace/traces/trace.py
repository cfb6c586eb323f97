"""A trace as analyzers see it, whatever file it came from."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from gputrace.traces.derived import derive, to_read
from gputrace.traces.events import UNKNOWN, Column, Events, Kind
from gputrace.traces.nvml.model import Nvml, together
from gputrace.traces.quality import Quality
from gputrace.traces.sqlite import Database
from gputrace.traces.tables import Tables

Progress = Callable[[int, int], None]
"""Called with rows read so far and rows in all, from any thread."""

FROM_THE_START: Final = -(1 << 62)


class Window(NamedTuple):
    """A stretch of the trace's clock in nanoseconds, the end not included."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Process:
    """A process that was recorded."""

    pid: int
    host: int = 0
    """Tells machines apart where several were recorded."""
    rank: int = UNKNOWN
    name: str = ""
    host_name: str = ""
    """The machine's own name; nothing where it is not known."""


@dataclass(frozen=True, slots=True)
class Device:
    """What one process calls by one CUDA ordinal."""

    process: int
    device: int
    gpu: int = UNKNOWN
    """Index of the physical card, as NVML counts."""
    name: str = ""
    uuid: str = ""
    """Of the card; files of one machine may count its cards differently."""


@dataclass(frozen=True, slots=True)
class Session:
    """What a file says of the run that it is a part of; asked before files are merged."""

    epoch_ns: int | None = None
    """The machine's wall clock at 0 of the columns' clock: nanoseconds since 1970 UTC."""
    job: str = ""
    """The scheduler's name of the run."""
    hosts: frozenset[str] = frozenset()
    ranks: frozenset[int] = frozenset()
    """Of the processes that were recorded."""
    world_size: int | None = None
    utc_offset_ns: int | None = None
    """How far ahead of UTC the machine's local time was; None where that is not known."""
    cards: frozenset[str] = frozenset()
    """The uuids of the cards that its processes saw; tells machines apart that have no name."""


class NoGpu(NamedTuple):
    """Why a trace holds no GPU activity."""

    why: str
    remedy: str
    """What to do to record some."""


class Trace(ABC):
    """An open trace. Readers subclass it; use it as a context manager.

    Attributes:
        path: the file; of several, the first.
        source: the recorder, in the words of the JSON key ``source``.
        origin: the moment that a person calls 0, on the clock of the event columns.
        processes: the processes met so far; the column ``process`` counts into it.
        quality: what reading found wrong so far.
        logged: what logs of nvidia-smi told that were joined to it.
        no_gpu: why nothing of a GPU is in it, where the host's side may still tell something.
        held: whether its rows are at hand; else a window is read by `part`, without the rest.
        elsewhere: whether another process reads the file, which `part` is then for, too.
    """

    source: str
    held = True
    elsewhere = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.origin = 0
        self.processes: list[Process] = []
        self.quality = Quality()
        self.no_gpu: NoGpu | None = None
        self.logged = Nvml()

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files; more than one where traces were merged."""
        return (self.path,)

    @property
    def title(self) -> str:
        """What a message calls it."""
        more = len(self.paths) - 1
        return f"{self.path} and {more} more" if more else str(self.path)

    @property
    def session(self) -> Session:
        """What is known of the run; nothing, unless a reader says more."""
        return Session()

    def shift_hosts(self, shifts: Mapping[int, int], how: str) -> None:
        """Adds nanoseconds to the times of each host (`Process.host`), from the next read on.

        ``how`` says what told them. Only a trace of several files has several clocks.
        """
        raise NotImplementedError

    @property
    def tables(self) -> Tables | None:
        """The file as `cut` takes it; None where no part can be cut out of it."""
        return None

    @property
    def cut_bytes(self) -> int:
        """The size of the file that `tables` are of; 0 where there are none."""
        return self.tables.database.path.stat().st_size if self.tables is not None else 0

    def ask(self, kinds: frozenset[Kind], columns: Sequence[str], window: Window | None) -> None:
        """Says what will be read next, for another process to begin with it."""
        return

    def ask_nvml(self) -> None:
        """The same before `read_nvml`."""
        return

    def on(self, database: Database) -> Self:
        """The same trace, with the same clock, whose rows are those of a part cut out of `tables`.

        Nothing must have been read from it yet that is not closed with it.
        """
        raise NotImplementedError

    def part(self, window: Window) -> Trace:
        """The same trace with the rows that touch a window, where they are not held.

        Raises UsageError where none does.
        """
        raise NotImplementedError

    @property
    def nvml(self) -> Nvml:
        """What NVML said of the cards meanwhile; an empty one where nobody asked it.

        Reads it each time: the clocks of hosts may be shifted in between.
        """
        return together([self.read_nvml(), self.logged])

    def recorded(self, process: int) -> Sequence[Window]:
        """When the GPUs of a process were recorded, in order; nothing where that is not told.

        A window begins at `FROM_THE_START` where the process had not used a GPU before it.
        """
        return ()

    def calls_recorded(self, process: int) -> Sequence[Window] | None:
        """When all CUDA calls of a process were recorded, in order; None where they always were.

        Between these stretches, no call in the trace does not mean that none was made.
        """
        return None

    def read_nvml(self) -> Nvml:
        """What is recorded of NVML in the trace itself; nothing, unless a reader knows of it."""
        return Nvml()

    @property
    @abstractmethod
    def kinds(self) -> frozenset[Kind]:
        """The kinds of which the file may hold rows."""

    @abstractmethod
    def names(self, ids: Collection[int] | Column) -> dict[int, str]:
        """The text of each name id; an id that the file does not explain gets ``<name 17>``."""

    def search(self, ids: Collection[int] | Column, pattern: re.Pattern[str]) -> dict[int, str]:
        """The text of those name ids in which a pattern is found.

        The pattern must take every digit alike: readers try names that differ in digits once.
        """
        return {id: text for id, text in self.names(ids).items() if pattern.search(text)}

    @abstractmethod
    def device(self, process: int, device: int) -> Device:
        """What is known of a process's CUDA ordinal."""

    @abstractmethod
    def read(
        self,
        kinds: frozenset[Kind],
        columns: Sequence[str],
        window: Window | None,
        progress: Progress | None,
    ) -> Events:
        """Reads rows of the kinds; `events` has made sure that the columns are not derived."""

    def read_parts(
        self, kinds: frozenset[Kind], columns: Sequence[str], progress: Progress | None
    ) -> Iterator[Events]:
        """The rows of the kinds in the order of `read`, some at a time where that is possible."""
        yield self.read(kinds, columns, None, progress)

    def events(
        self,
        kinds: Iterable[Kind],
        columns: Sequence[str],
        window: Window | None = None,
        progress: Progress | None = None,
    ) -> Events:
        """The rows of some kinds, in any order, with just the columns asked for.

        With a window, only rows that touch it, whole. Rows whose times make no sense are left out
        and counted in `quality`. Raises InputError where the file is broken.
        """
        events = self.read(frozenset(kinds), to_read(columns), window, progress)
        return derive(self, events, columns)

    def parts(
        self, kinds: Iterable[Kind], columns: Sequence[str], progress: Progress | None = None
    ) -> Iterator[Events]:
        """The same rows of the whole trace, some at a time where the file can be read so.

        Needs no memory in proportion to the file then.
        """
        for events in self.read_parts(frozenset(kinds), to_read(columns), progress):
            yield derive(self, events, columns)

    @abstractmethod
    def close(self) -> None:
        """Gives back files and threads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
