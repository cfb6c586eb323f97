"""Interface of an open trace, independent of its file format, and its data quality."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from gputrace.errors import InputError
from gputrace.model.attempts import Life
from gputrace.model.events import (
    COLUMN_TYPES,
    UNKNOWN,
    Column,
    Events,
    Kind,
    Mask,
    distinct_ids,
    is_among,
    number_ids,
)
from gputrace.model.nvml import Nvml, merge_nvml
from gputrace.model.options import Window
from gputrace.model.results import LeftOut
from gputrace.model.struct import Struct


class Quality(msgspec.Struct):
    """Quality problems of a trace, collected while it is read."""

    warnings: list[str] = []
    """Warnings of the recorder."""
    notes: list[str] = []
    """Limits of the figures although the recording is complete."""
    left_out: list[LeftOut] = []
    """Skipped files."""
    _dropped: dict[tuple[str, str], int] = {}

    def drop(self, reason: str, rows: int, where: str = "") -> None:
        """Count dropped rows; repeated reads of the same ``where`` count once."""
        if rows:
            key = (reason, where)
            self._dropped[key] = max(rows, self._dropped.get(key, 0))

    @property
    def places(self) -> dict[tuple[str, str], int]:
        """Numbers of dropped rows by reason and place."""
        return dict(self._dropped)

    @property
    def dropped(self) -> dict[str, int]:
        """Numbers of dropped rows by reason."""
        totals: dict[str, int] = {}
        for (reason, _), rows in self._dropped.items():
            totals[reason] = totals.get(reason, 0) + rows
        return totals


_LATEST_NS: Final = 1 << 62
"""Nanoseconds beyond any clock: 146 years."""
_MOST_TIMES_LONGER: Final = 2
"""Ratio to the longest duration beyond which a start at 0 is not believed."""


def drop_invalid_rows(events: Events, quality: Quality, where: str) -> Events:
    """Drop rows with invalid times, and count them in ``quality`` under ``where``.

    CUPTI writes 0 for a timestamp it could not take (``CUpti_ActivityKernel9::start``). Rows of
    zero duration are kept: they happened, and add nothing to any sum.
    """
    start, end = events.start, events.end
    if len(events) and start.min() > 0 and end.max() <= _LATEST_NS and (end >= start).all():
        return events
    beyond = (start < -_LATEST_NS) | (start > _LATEST_NS) | (end > _LATEST_NS)
    null = (start == UNKNOWN) | (end == UNKNOWN)
    negative = (end < start) & ~beyond & ~null
    # A row that starts at 0 and would be far longer than all others has lost its start.
    timed = ~beyond & ~null & (start != 0)
    is_long = end > _MOST_TIMES_LONGER * int((end - start)[timed].max()) if timed.any() else False
    lost = (start == 0) & ((end == 0) | is_long)
    without_time = (null | lost) & ~beyond & ~negative
    quality.drop("end before start", int(np.count_nonzero(negative)), where)
    quality.drop("no timestamp", int(np.count_nonzero(without_time)), where)
    quality.drop("impossible time", int(np.count_nonzero(beyond)), where)
    bad = negative | without_time | beyond
    return events.select(~bad) if bad.any() else events


MOST_PROCESSES: Final = 1 << 15
"""Maximum number of processes of a trace: that of the column's values."""
Progress = Callable[[int, int], None]
"""Callback with the rows read so far and the total; called from any thread."""

FROM_THE_START: Final = -(1 << 62)


class Selection(Struct, frozen=True):
    """Rows and columns to read from a trace."""

    kinds: frozenset[Kind]
    columns: Sequence[str]
    """Never derived ones: `Trace.events` computes these."""
    window: Window | None = None
    """Time that rows overlap, unclipped; None for all of it."""
    progress: Progress | None = None

    def moved(self, shift: int) -> Selection:
        """Return the selection for a clock that shows so many nanoseconds more."""
        if self.window is None or not shift:
            return self
        return replace(self, window=Window(self.window.start + shift, self.window.end + shift))


class Process(Struct, frozen=True):
    """A recorded process."""

    pid: int
    host: int = 0
    """Number of the machine, where several were recorded."""
    rank: int = UNKNOWN
    name: str = ""
    host_name: str = ""
    """Host name of the machine; empty if unknown."""


class Device(Struct, frozen=True):
    """A CUDA device ordinal of one process, and the card behind it."""

    process: int
    device: int
    gpu: int = UNKNOWN
    """NVML index of the physical card."""
    name: str = ""
    uuid: str = ""
    """UUID of the card; files of one machine may number its cards differently."""


class Session(Struct, frozen=True):
    """Metadata of the run that a file belongs to, used to merge files."""

    epoch_ns: int | None = None
    """Wall clock at time 0 of the column clock: nanoseconds since 1970 UTC."""
    job: str = ""
    """Job name given by the scheduler."""
    hosts: frozenset[str] = frozenset()
    ranks: frozenset[int] = frozenset()
    """Ranks of the recorded processes."""
    world_size: int | None = None
    utc_offset_ns: int | None = None
    """Offset of local time from UTC in nanoseconds; None if unknown."""
    cards: frozenset[str] = frozenset()
    """UUIDs of the cards visible to its processes; identifies machines without a name."""


class Coverage(Struct, frozen=True):
    """Times in which a process was recorded, each as ordered windows."""

    windows: Sequence[Window] = ()
    """Windows in which its GPUs were recorded; empty if unknown. One begins at `FROM_THE_START` if
    the process had not used a GPU before it."""
    calls: Sequence[Window] | None = None
    """Windows with all its API calls; None if always complete. Outside of these, a missing call
    does not mean that none was made."""
    control: Sequence[Window] = ()
    """Stretches in which the recorder recorded nothing. Steps marked there are the program's
    without the recorder, but for what its idle CUPTI costs."""
    idle: Sequence[Window] = ()
    """Stretches of ``control`` in which CUPTI stayed in the process."""
    has_edges: bool = False
    """True if the GPU is known to have run nothing else from edge to edge of ``windows``."""

    @property
    def from_the_start(self) -> bool:
        """True unless the process is known to have used a GPU before it was recorded."""
        # Clocks of merged files may have been shifted.
        return not self.windows or self.windows[0].start <= FROM_THE_START // 2

    @property
    def is_whole(self) -> bool:
        """True unless GPU work or API calls are known to be lacking."""
        return self.calls is None and len(self.windows) < 2 and self.from_the_start

    def moved(self, shift: int) -> Coverage:
        """Return the windows with nanoseconds added to their times."""
        calls = None if self.calls is None else moved(self.calls, shift)
        control, idle = moved(self.control, shift), moved(self.idle, shift)
        return Coverage(moved(self.windows, shift), calls, control, idle, self.has_edges)


def moved(windows: Sequence[Window], shift: int) -> list[Window]:
    """Return windows with nanoseconds added to their times."""
    return [Window(start + shift, end + shift) for start, end in windows]


GIVES_WORK: Final = "Launch|Memcpy|Memset"
"""Names of CUDA calls that give a GPU something to run."""


class NoGpu(NamedTuple):
    """Reason for the absence of GPU activity in a trace."""

    why: str
    remedy: str
    """Advice for recording GPU activity."""


_Result = TypeVar("_Result")


class Trace(ABC):
    """Abstract base of open traces, which readers subclass; use it as a context manager.

    Attributes:
        path: the file; of several, the first.
        source: the recorder, as in the JSON key ``source``.
        origin: the time shown to users as 0, on the clock of the event columns.
        processes: the processes seen so far; the column ``process`` indexes into it.
        quality: the problems found so far while reading.
        logged: NVML data from nvidia-smi logs that were joined to the trace.
        no_gpu: why there is no GPU activity, where the host side may still be useful.
        cut: the window that it was cut to, on its clock; rows beyond it are its context.
        held: whether all rows are accessible; else `part` reads a window alone.
        elsewhere: whether another process reads the file; `part` is then used, too.
        is_card_log: whether samples of cards are all that it has.
        is_host_timeline: whether ranges of the host are all that it has.
        idle_unknown: why idle time of the GPUs says nothing of the program, as if only some kernels
            were recorded; empty if it does.
        attempt: number of the attempt whose rows are read; 0 if nothing was restarted.
        has_one_clock: whether times of all its files can be compared; of merged traces that do not
            say when they were recorded, only after `shift_clocks`.
    """

    source: str
    held = True
    elsewhere = False
    is_card_log = False
    is_host_timeline = False
    has_one_clock = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.origin = 0
        self.processes: list[Process] = []
        self.quality = Quality()
        self.no_gpu: NoGpu | None = None
        self.logged = Nvml()
        self.cut: Window | None = None
        self.idle_unknown = ""
        self.attempt = 0
        self._once: dict[Any, Any] = {}

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files; more than one for merged traces."""
        return (self.path,)

    @property
    def title(self) -> str:
        """Name of the trace in messages."""
        more = len(self.paths) - 1
        return f"{self.path} and {more} more" if more else str(self.path)

    def add_process(self, process: Process) -> int:
        """Add a process and return its index; raise InputError beyond `MOST_PROCESSES`."""
        if len(self.processes) == MOST_PROCESSES:
            raise InputError(
                self.title,
                f"rows of more than {MOST_PROCESSES:,} processes; if they are real, "
                "analyze files with fewer of them",
            )
        self.processes.append(process)
        return len(self.processes) - 1

    @property
    def session(self) -> Session:
        """Metadata of the run; empty unless a reader overrides it."""
        return Session()

    def clock_of(self, process: int) -> int:
        """Return the number of the clock of a process's times: that of its host."""
        return self.processes[process].host

    def shift_clocks(self, shifts: Mapping[int, int], how: str) -> None:
        """Shift the times of each clock (`clock_of`) by nanoseconds, from the next read on.

        ``how`` names the source of the shifts. Only merged traces have several clocks.
        """
        raise NotImplementedError

    @property
    def cut_bytes(self) -> int:
        """Size in bytes of the SQLite files that windows can be sliced from; 0 without any."""
        return 0

    def ask(self, wanted: Selection) -> None:
        """Announce the next `read`, so that another process can start on it."""
        return

    def ask_nvml(self) -> None:
        """Announce the next `read_nvml`."""
        return

    def part(self, window: Window) -> Trace:
        """Return a trace of the rows that overlap a window, where rows are not held.

        Raises UsageError if there are none.
        """
        raise NotImplementedError

    @property
    def nvml(self) -> Nvml:
        """NVML data recorded during the trace, empty if there are none."""
        return merge_nvml([self.once(type(self).read_nvml), self.logged])

    def coverage(self, process: int) -> Coverage:
        """Return when a process was recorded; of most formats it is not known."""
        return Coverage()

    @property
    def lives(self) -> Sequence[Life]:
        """When its processes began and ended, and how, as far as that was recorded."""
        return ()

    def cover(self, attempt: int) -> None:
        """Read the rows of one attempt of `lives` from now on."""
        self.attempt = attempt
        self._once.clear()

    def once(self, work: Callable[[Self], _Result]) -> _Result:
        """Return a function's result for the whole trace, computed once: not for each rank."""
        if work not in self._once:
            self._once[work] = work(self)
        result: _Result = self._once[work]
        return result

    def node_stretches(self) -> Sequence[Window]:
        """Return the ordered stretches in which any process had the nodes of CUDA graphs recorded.

        Replays take longer there.
        """
        return ()

    def read_nvml(self) -> Nvml:
        """Return the NVML data in the trace file; empty unless a reader overrides it."""
        return Nvml()

    @property
    @abstractmethod
    def kinds(self) -> frozenset[Kind]:
        """Kinds of which the file may contain rows."""

    @abstractmethod
    def names(self, ids: Collection[int] | Column) -> dict[int, str]:
        """Return the text of each name id; ids unknown to the file become ``<name 17>``."""

    def search(self, ids: Collection[int] | Column, pattern: str) -> dict[int, str]:
        """Return the texts, by id, in which a regular expression is found.

        The pattern must treat all digits alike: readers test names that differ only in digits
        once.
        """
        return {id: text for id, text in self.names(ids).items() if contains(text, pattern)}

    def matches(self, names: Column, pattern: str) -> Mask:
        """Return whether a regular expression is found in the text of each of some name ids."""
        return is_among(names, self.search(distinct_ids(names), pattern))

    @abstractmethod
    def device(self, process: int, device: int) -> Device:
        """Return the card behind a CUDA ordinal of a process."""

    @abstractmethod
    def read(self, wanted: Selection) -> Events:
        """Read the wanted rows, in any order."""

    def read_parts(self, wanted: Selection) -> Iterator[Events]:
        """Yield the wanted rows in the order of `read`, in chunks where possible."""
        yield self.read(wanted)

    def events(
        self,
        kinds: Iterable[Kind],
        columns: Sequence[str],
        window: Window | None = None,
        progress: Progress | None = None,
    ) -> Events:
        """Return the rows of some kinds, in any order, with only the requested columns.

        With a window, return only rows that overlap it, unclipped. Rows with invalid times are
        dropped and counted in `quality`. Raises InputError if the file is broken.
        """
        wanted = Selection(frozenset(kinds), base_columns(columns), window, progress)
        return add_derived_columns(self, self.read(wanted), columns)

    def events_of(
        self, process: int, kinds: Iterable[Kind], columns: Sequence[str], window: Window
    ) -> Events:
        """Return rows as `events` does; those of other processes than one may be lacking."""
        return self.events(kinds, columns, window)

    def parts(
        self, kinds: Iterable[Kind], columns: Sequence[str], progress: Progress | None = None
    ) -> Iterator[Events]:
        """Yield the rows of the whole trace, in chunks where the file format allows it.

        Memory is then bounded, independent of the file size.
        """
        wanted = Selection(frozenset(kinds), base_columns(columns), progress=progress)
        for events in self.read_parts(wanted):
            yield add_derived_columns(self, events, columns)

    @abstractmethod
    def close(self) -> None:
        """Release files and threads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@lru_cache(1 << 14)
def contains(text: str, pattern: str) -> bool:
    """Return whether a regular expression is found in a text; each rank asks for the same ones."""
    return re.search(pattern, text) is not None


DERIVED: Final = {"gpu": ("process", "device"), "rank": ("process",)}
"""Columns that each derived column is computed from."""


def base_columns(wanted: Sequence[str]) -> list[str]:
    """Return the columns to read in order to provide the wanted ones."""
    read = set(wanted).union(*(DERIVED.get(name, ()) for name in wanted)) - DERIVED.keys()
    return [name for name in COLUMN_TYPES if name in read]


def add_derived_columns(trace: Trace, events: Events, wanted: Sequence[str]) -> Events:
    """Return the wanted columns, computing derived ones from the columns read."""
    if not DERIVED.keys() & set(wanted):
        return events
    arrays: dict[str, Column] = {
        name: getattr(events, name) for name in events.columns if name in wanted
    }
    if "gpu" in wanted:
        pairs = events.process.astype(np.int32) << 16 | (events.device.astype(np.int32) & 0xFFFF)
        distinct, where = number_ids(pairs)
        devices = distinct.astype(np.int16).tolist()
        processes = (distinct >> 16).tolist()
        gpus = [trace.device(*pair).gpu for pair in zip(processes, devices, strict=True)]
        arrays["gpu"] = np.array(gpus or [UNKNOWN]).take(where)
    if "rank" in wanted:
        ranks = np.array([process.rank for process in trace.processes] or [UNKNOWN])
        arrays["rank"] = ranks[events.process]
    return Events(arrays)
