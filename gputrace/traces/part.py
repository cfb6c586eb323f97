"""One of several traces that are merged: its clock, its processes, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence

from gputrace.traces.trace import Process, Trace, Window


class Part:
    """One of the traces, and how its numbers become those of all."""

    def __init__(self, number: int, trace: Trace, shift: int, machine: int, name: str) -> None:
        """``machine`` is the number of the first trace of its machine, ``name`` what that has."""
        self.number, self.trace, self.shift = number, trace, shift
        self.machine, self.machine_name = machine, name
        self.processes: list[int] = []
        """The merged number of each of its processes."""
        self.own_process: dict[int, int] = {}
        """The same the other way round."""
        self.told: list[str] = []
        """Warnings and notes, as the merged trace has them."""
        self._told = (0, 0, 0)

    def tell(self, merged: Trace) -> bool:
        """Adds what is wrong with this trace, once, and says which it is; whether that is news."""
        quality, where = self.trace.quality, self.trace.path.name
        warnings, notes, left_out = self._told
        self._told = len(quality.warnings), len(quality.notes), len(quality.left_out)
        merged.quality.left_out += quality.left_out[left_out:]
        new = [f"{where}: {text}" for text in quality.warnings[warnings:]]
        noted = [f"{where}: {text}" for text in quality.notes[notes:]]
        merged.quality.warnings += new
        merged.quality.notes += noted
        self.told += new + noted
        for reason, rows in quality.dropped.items():
            merged.quality.drop(reason, rows, str(self.number))
        return bool(new or noted)

    def host_key(self, process: Process) -> tuple[str, int]:
        """Tells machines apart: by their name in all files, or by whose cards they saw."""
        if process.host_name:
            return process.host_name, 0
        return f"/{self.machine}", process.host

    def on_own_clock(self, window: Window | None) -> Window | None:
        """A window of the merged trace's clock."""
        return window and Window(window.start - self.shift, window.end - self.shift)

    def on_our_clock(self, windows: Sequence[Window]) -> list[Window]:
        """Windows of its own clock, on the merged trace's."""
        return [Window(start + self.shift, end + self.shift) for start, end in windows]
