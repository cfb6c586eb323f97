"""In-memory traces, for file formats that must be read completely."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
    concatenate,
    distinct_ids,
    is_among,
)
from gputrace.model.names import bounded
from gputrace.model.options import Window
from gputrace.model.trace import Device, NoGpu, Process, Progress, Session, Trace, drop_invalid_rows

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
        self.processes = list(processes)
        # Lone surrogates, which JSON may contain, cannot be encoded.
        whole_names = (bounded(name).encode("utf-8", "replace").decode() for name in names)
        self._names, self._session = list(whole_names), session or Session()
        self._devices = {(device.process, device.device): device for device in devices}
        whole = [drop_invalid_rows(part, self.quality, str(i)) for i, part in enumerate(parts)]
        self._parts = [part for part in whole if len(part)]
        self._kinds = [
            frozenset(map(Kind, distinct_ids(part.kind).tolist())) for part in self._parts
        ]
        if self.kinds & set(GPU_KINDS):
            return
        self.no_gpu = no_gpu
        if no_gpu is None:
            raise InputError(path, f"no GPU activity in this {source} trace, only the host's")

    @property
    def session(self) -> Session:
        return self._session

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset[Kind]().union(*self._kinds)

    def names(self, ids: Collection[int] | Column) -> dict[int, str]:
        known = range(len(self._names))
        return {int(i): self._names[i] if i in known else f"<name {i}>" for i in ids}

    def device(self, process: int, device: int) -> Device:
        return self._devices.get((process, device), Device(process, device))

    def read(
        self,
        kinds: frozenset[Kind],
        columns: Sequence[str],
        window: Window | None,
        progress: Progress | None,
    ) -> Events:
        parts = []
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
            for name in columns:
                if name in part.columns:
                    arrays[name] = getattr(selected, name)
                else:
                    arrays[name] = np.full(len(selected), _DEFAULTS[name])
            parts.append(Events(arrays))
        return concatenate(parts, columns)

    def close(self) -> None:
        self._parts, self._kinds = [], []
