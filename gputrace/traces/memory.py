"""A trace that its reader has taken in whole, as the formats ask for that have no index."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from gputrace.errors import InputError
from gputrace.traces.broken import drop_broken
from gputrace.traces.events import (
    COLUMN_TYPES,
    GPU_KINDS,
    UNKNOWN,
    Column,
    Events,
    Kind,
    concatenate,
)
from gputrace.traces.names import bounded
from gputrace.traces.trace import Device, NoGpu, Process, Progress, Session, Trace, Window

_DEFAULTS: Final[Mapping[str, int]] = dict.fromkeys(COLUMN_TYPES, UNKNOWN) | {"process": 0}


class Names:
    """Numbers for texts: equal texts share one."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._ids: dict[str, int] = {}

    def number(self, text: str) -> int:
        """The id of a text."""
        id = self._ids.setdefault(text, len(self.texts))
        if id == len(self.texts):
            self.texts.append(text)
        return id


class Held(NamedTuple):
    """What a trace in memory consists of, beside what every trace tells."""

    parts: Sequence[Events]
    names: Sequence[str]
    devices: Sequence[Device]


class MemoryTrace(Trace):
    """Event columns in memory, a part for each thing that the reader read."""

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
        """Takes over what a reader read.

        Args:
            path: the file.
            source: the recorder, a word of the JSON key ``source``.
            parts: columns with at least start, end and kind; what lacks is unknown. Times that make
                no sense are left out and counted.
            names: the texts of the name ids 0, 1, 2….
            processes: what the column ``process`` counts into; at least one.
            devices: what is known of the CUDA ordinals.
            session: what is known of the run; the epoch in it is that of the columns' clock.
            no_gpu: what to say where nothing of a GPU is in it, and the host's side may still tell
                something.

        Raises InputError where nothing of a GPU is in it, unless ``no_gpu`` is given.
        """
        super().__init__(path)
        self.source = source
        self.processes = list(processes)
        self._names, self._session = list(map(_sound, names)), session or Session()
        self._devices = {(device.process, device.device): device for device in devices}
        whole = [drop_broken(part, self.quality, str(i)) for i, part in enumerate(parts)]
        self._parts = [part for part in whole if len(part)]
        self._kinds = [frozenset(map(Kind, np.unique(part.kind).tolist())) for part in self._parts]
        if self.kinds & set(GPU_KINDS):
            return
        self.no_gpu = no_gpu
        if no_gpu is None:
            raise InputError(path, f"no GPU activity in this {source} trace, only the host's")

    def held_columns(self) -> Held:
        """What it consists of, to travel to another process."""
        return Held(self._parts, self._names, list(self._devices.values()))

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
        parts = [
            _cut(part, own, kinds, columns, window)
            for part, own in zip(self._parts, self._kinds, strict=True)
            if own & kinds
        ]
        return concatenate(parts, columns)

    def close(self) -> None:
        self._parts, self._kinds = [], []


def _sound(text: str) -> str:
    """A text that can be written: JSON may name halves of letters, which are none."""
    text = bounded(text)
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _cut(
    part: Events,
    own: frozenset[Kind],
    kinds: frozenset[Kind],
    columns: Sequence[str],
    window: Window | None,
) -> Events:
    """The rows of some kinds that touch a window; columns that the part lacks are unknown."""
    rows = np.ones(len(part), bool)
    if not own <= kinds:
        rows &= np.isin(part.kind, sorted(kinds))
    if window is not None:
        rows &= (part.start < window.end) & (part.end > window.start)
    if not rows.all():
        part = part.select(rows)
    here = set(part.columns)
    return Events(
        {
            name: getattr(part, name) if name in here else np.full(len(part), _DEFAULTS[name])
            for name in columns
        }
    )
