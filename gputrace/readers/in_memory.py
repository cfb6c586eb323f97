"""In-memory traces, for file formats that must be read completely."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from gputrace.errors import InputError
from gputrace.model.events import (
    COLUMN_TYPES,
    GPU_KINDS,
    UNKNOWN,
    Column,
    Events,
    Kind,
    Mask,
    concatenate,
    distinct_ids,
    is_among,
)
from gputrace.model.impossible_times import CHECKED, find_launches, find_possible
from gputrace.model.options import Window
from gputrace.model.trace import (
    Coverage,
    Device,
    NoGpu,
    Process,
    Selection,
    Session,
    Trace,
    drop_invalid_rows,
)
from gputrace.sanitize import bounded

_ISSUED: Final = (*GPU_KINDS, Kind.API, Kind.SYNC)
"""Kinds whose correlation ids link operations to calls."""
_DEFAULTS: Final[Mapping[str, int]] = dict.fromkeys(COLUMN_TYPES, UNKNOWN) | {"process": 0}


class Names:
    """String table: equal texts share an id."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._ids: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Return the id of a text, adding it if it is new."""
        id = self._ids.setdefault(text, len(self.texts))
        if id == len(self.texts):
            self.texts.append(text)
        return id


class MemoryTrace(Trace):
    """Trace of event columns in memory, in one part per source of rows."""

    def __init__(
        self,
        path: Path,
        source: str,
        parts: Sequence[Events],
        names: Sequence[str],
        processes: Sequence[Process],
        devices: Sequence[Device] = (),
        session: Session | None = None,
        no_gpu: NoGpu | None = None,
    ) -> None:
        """Create a trace from the results of a reader.

        Args:
            path: the file.
            source: the recorder, as in the JSON key ``source``.
            parts: columns with at least start, end and kind; missing ones are unknown. Rows with
                invalid times are dropped and counted.
            names: texts of the name ids 0, 1, 2….
            processes: targets of the column ``process``; at least one.
            devices: the cards behind the CUDA ordinals.
            session: metadata of the run; its epoch refers to the clock of the columns.
            no_gpu: the reason for missing GPU activity, for traces whose host side may still be
                useful.

        Raises InputError if there is no GPU activity, unless ``no_gpu`` is given.
        """
        super().__init__(path)
        self.source = source
        for process in processes:
            self.add_process(process)
        # Lone surrogates, which JSON may contain, cannot be encoded.
        whole_names = (bounded(name).encode("utf-8", "replace").decode() for name in names)
        self._names, self._session = list(whole_names), session or Session()
        self._devices = {(device.process, device.device): device for device in devices}
        whole = [drop_invalid_rows(part, self.quality, str(i)) for i, part in enumerate(parts)]
        self._parts = self._possible([part for part in whole if len(part)])
        self._kinds = [
            frozenset(map(Kind, distinct_ids(part.kind).tolist())) for part in self._parts
        ]
        if self.kinds & set(GPU_KINDS):
            return
        self.no_gpu = no_gpu
        if no_gpu is None:
            raise InputError(path, f"no GPU activity in this {source} trace, only the host's")

    def _possible(self, parts: Sequence[Events]) -> list[Events]:
        """Return the rows without those of GPUs at impossible times."""
        of_gpus = [is_among(part.kind, GPU_KINDS) for part in parts]
        possible = find_possible(
            _rows(parts, of_gpus),
            self.quality,
            "",
            lambda operations: find_launches(
                _rows(parts, [part.kind == Kind.API for part in parts]), operations
            ),
        )
        if possible is None:
            return list(parts)
        counts = [int(np.count_nonzero(on_gpu)) for on_gpu in of_gpus]
        for on_gpu, kept in zip(of_gpus, np.split(possible, np.cumsum(counts)[:-1]), strict=True):
            on_gpu[on_gpu] = ~kept
        return [part.select(~lost) for part, lost in zip(parts, of_gpus, strict=True)]

    @property
    def session(self) -> Session:
        return self._session

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset[Kind]().union(*self._kinds)

    @property
    def wall_clock_window(self) -> Window:
        """The time from its first to its last row, in nanoseconds since 1970 where known."""
        epoch = self._session.epoch_ns or 0
        starts = (int(part.start.min()) for part in self._parts)
        ends = (int(part.end.max()) for part in self._parts)
        return Window(epoch + min(starts, default=0), epoch + max(ends, default=0))

    def names(self, ids: Collection[int] | Column) -> dict[int, str]:
        known = range(len(self._names))
        return {int(i): self._names[i] if i in known else f"<name {i}>" for i in ids}

    def device(self, process: int, device: int) -> Device:
        return self._devices.get((process, device), Device(process, device))

    def read(self, wanted: Selection) -> Events:
        kinds, window, parts = wanted.kinds, wanted.window, []
        for part, part_kinds in zip(self._parts, self._kinds, strict=True):
            if not part_kinds & kinds:
                continue
            rows = np.ones(len(part), bool)
            if not part_kinds <= kinds:
                rows &= is_among(part.kind, kinds)
            if window is not None:
                rows &= (part.start < window.end) & (part.end > window.start)
            selected = part if rows.all() else part.select(rows)
            arrays = {}
            for name in wanted.columns:
                if name in part.columns:
                    arrays[name] = getattr(selected, name)
                else:
                    arrays[name] = np.full(len(selected), _DEFAULTS[name])
            parts.append(Events(arrays))
        return concatenate(parts, wanted.columns)

    def close(self) -> None:
        self._parts, self._kinds = [], []


def _rows(parts: Sequence[Events], chosen: Sequence[Mask]) -> Events:
    """Return the columns `CHECKED` of rows of all parts, given a mask for each."""
    columns = {}
    for name in CHECKED:
        pieces: list[Column] = [np.empty(0, COLUMN_TYPES[name])]
        for part, rows in zip(parts, chosen, strict=True):
            if name in part.columns:
                pieces.append(getattr(part, name)[rows])
            else:
                pieces.append(np.full(np.count_nonzero(rows), _DEFAULTS[name]))
        columns[name] = np.concatenate(pieces)
    return Events(columns)


class JoinedWindows(MemoryTrace):
    """Files of one process, each of another window of time, as one trace."""

    def __init__(self, traces: Sequence[MemoryTrace]) -> None:
        """Join traces in the order of time, which are then owned by the result."""
        names, parts, processes = Names(), [], list[Process]()
        self._paths, self._windows = tuple(trace.path for trace in traces), list[Window]()
        issued, epoch = 0, traces[0].session.epoch_ns or 0
        for trace in traces:
            shift = (trace.session.epoch_ns or 0) - epoch
            number = np.array([*map(names.number, trace._names), UNKNOWN])
            processes += [process for process in trace.processes if process not in processes]
            process = np.array([processes.index(process) for process in trace.processes])
            self._windows.append(Window(*(time - epoch for time in trace.wall_clock_window)))
            most = issued
            for part in trace._parts:
                arrays: dict[str, Column] = {name: getattr(part, name) for name in part.columns}
                arrays |= {edge: arrays[edge] + shift for edge in ("start", "end")}
                arrays["name"] = number[arrays["name"]]
                if "process" in arrays:
                    arrays["process"] = process[arrays["process"]]
                if "correlation" in arrays:
                    # Each window may count its calls from the beginning.
                    calls = is_among(part.kind, _ISSUED) & (part.correlation != UNKNOWN)
                    arrays["correlation"] = part.correlation + np.where(calls, issued, 0)
                    most = max(most, int(arrays["correlation"][calls].max(initial=0)))
                parts.append(Events(arrays))
            issued = most + 1
        first = traces[0]
        devices = [device for trace in traces for device in trace._devices.values()]
        reason = next((trace.no_gpu for trace in traces if trace.no_gpu is None), first.no_gpu)
        session = first.session
        super().__init__(
            first.path, first.source, parts, names.texts, processes, devices, session, reason
        )
        self.origin = first.origin
        self.quality.notes.append(f"{len(traces)} files of one process, from different times")
        for trace in traces:
            self.quality.warnings += trace.quality.warnings
            self.quality.notes += trace.quality.notes
            self.quality.left_out += trace.quality.left_out
            for (problem, where), rows in trace.quality.places.items():
                self.quality.drop(problem, rows, f"{trace.path}/{where}")

    @property
    def paths(self) -> tuple[Path, ...]:
        return self._paths

    def coverage(self, process: int) -> Coverage:
        return Coverage(self._windows, has_edges=True)


def join_windows(traces: Iterable[Trace]) -> list[Trace]:
    """Join the files of each process that was recorded in several windows of time."""
    files: dict[object, list[Trace]] = {}
    for trace in traces:
        is_of_process = isinstance(trace, MemoryTrace) and trace.session.epoch_ns is not None
        known = is_of_process and all(process.pid > 0 for process in trace.processes)
        key = (trace.source, *trace.processes) if known else trace
        files.setdefault(key, []).append(trace)
    joined: list[Trace] = []
    for group in files.values():
        of_memory = [trace for trace in group if isinstance(trace, MemoryTrace)]
        ordered = sorted(of_memory, key=lambda trace: trace.wall_clock_window)
        windows = [trace.wall_clock_window for trace in ordered]
        apart = all(end <= start for (_, end), (start, _) in pairwise(windows))
        joined += [JoinedWindows(ordered)] if len(ordered) > 1 and apart else group
    return joined
