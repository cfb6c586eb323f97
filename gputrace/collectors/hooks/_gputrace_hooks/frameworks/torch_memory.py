"""Counts of torch's CUDA allocator, and the tensors for which it takes segments.

``torch.cuda.memory_stats`` is read at the beginning and the end of some steps and of their phases,
as many as take 0.3 % of the time. Nothing is reset: the peak is the program's, and rises in the
phase that needs most.

Where GPUTRACE_MEMORY names a file, snapshots of the allocator are written beside it (`_Snapshots`).
"""

import os
import pickle
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from .. import steps
from ..host_file import time_ns
from ..load import counter
from ..recorder import note_ours, on_fork, record_of, thread_id, word
from ..wrappers import around, at_bounds


class _Memory:
    """Counts of torch's allocator, on the current device."""

    def __init__(self) -> None:
        self.read: Callable[[], Any] | None = None
        self.due = self.took = 0
        self.is_watched = False
        # Peak so far, when it was read, and the counts at the last step's end with theirs.
        self.peak = self.at = self.counted = 0
        self.counts: dict[str, int] = {}
        self.history: Any = None
        self.requests = _Requests()
        self.snapshots: _Snapshots | None = None

    def step_ended(self, rank: int, end: int) -> None:
        """Record the counts since the last such step, and plan the next one."""
        if not self.is_watched and self.counted <= end < self.due:
            return
        stats = self.look()
        if not stats:
            self.counted, self.due = end, end + _UNTIL_CUDA_NS
            return
        counts = {name: _count(stats, *keys) for name, keys in _COUNTS.items()}
        if self.counts:
            for name, count in counts.items():
                self._record(name, self.counted, end, count - self.counts[name])
        for name, keys in _AMOUNTS.items():
            self._record(name, end, end, _count(stats, *keys))
        grew = bool(self.counts) and counts["segments"] > self.counts["segments"]
        self.counts, self.counted = counts, end
        if self.snapshots is not None:
            self.snapshots.step_ended(self.peak)
        self._watch(not self.is_watched)
        if self.history is not None:
            self.requests.step_ended(self.history, self.is_watched, grew, end)
        if not self.is_watched:
            self.due, self.took = end + _PATIENCE * self.took, 0

    def _watch(self, is_watched: bool) -> None:
        """Read the counts at each bound of a phase, or no longer."""
        self.is_watched = is_watched
        at_bounds[:] = [call for call in at_bounds if call != self.look]
        if is_watched:
            at_bounds.append(self.look)

    def look(self) -> Any:
        """Read the counts; record the peak if it rose.

        It returns nothing where torch has not begun with CUDA.
        """
        if self.read is None:
            return None
        try:
            start = time_ns()
            stats = self.read()
            now = time_ns()
            self.took += max(now - start, 0)
            peak = _count(stats, *_PEAK)
            if peak > self.peak and self.at:
                self._record("memory peak", self.at, start, peak)
            self.peak, self.at = peak, start
            return stats
        except Exception:
            note_ours("reading what torch's allocator counts")
            self.read = None
            return None

    def _record(self, name: str, start: int, end: int, value: int) -> None:
        if value > 0:
            record_of(thread_id(), min(start, end), end, word(name), counter(value))

    def forget(self) -> None:
        """Leave what is known to the parent: CUDA does not survive a fork."""
        self.due = self.took = self.peak = self.at = self.counted = 0
        self.counts = {}
        self._watch(False)
        self.requests = _Requests()
        if self.snapshots is not None and self.snapshots.left:
            self.snapshots = None


class _Requests:
    """Sizes of the tensors for which torch takes segments from the GPU in steady steps.

    In a few steps that are watched, if segments were new in the steps before, torch records what is
    asked of its allocator, without stacks: after a new segment, the next allocation is what it was
    taken for. A program that records that itself is left alone.
    """

    def __init__(self) -> None:
        self.left = 3
        self.grew = self.is_on = False

    def step_ended(self, module: Any, begins: bool, grew: bool, end: int) -> None:
        """Begin with a step that is watched, or look what it asked for."""
        try:
            # Not the wrapper, which notices calls of the program's.
            wrapper = module._record_memory_history
            record_history = getattr(wrapper, "__wrapped__", wrapper)
            if self.is_on:
                self.is_on = False
                try:
                    if grew:
                        self._look(module, end)
                finally:
                    record_history(None)
            elif begins and self.grew and grew and self.left and steps.recorded()[0] >= _STEADY:
                enabled = getattr(sys.modules.get("torch._C"), "_cuda_isHistoryEnabled", None)
                self.left -= 1
                if enabled is None or enabled():
                    self.left = 0
                    return
                record_history("all", context=None, max_entries=_ENTRIES)
                self.is_on = True
            self.grew = grew
        except Exception:
            note_ours("looking at what torch's allocator is asked for")
            self.left, self.is_on = 0, False

    def _look(self, module: Any, end: int) -> None:
        is_new = False
        entries = module._snapshot()["device_traces"][sys.modules["torch.cuda"].current_device()]
        for entry in entries:
            action = entry["action"]
            if action in ("segment_alloc", "segment_map"):
                is_new = True
            elif action == "alloc" and is_new:
                is_new = False
                record_of(thread_id(), end, end, word("segment request"), counter(entry["size"]))


class _Snapshots:
    """Snapshots for ``record --memory``: at the peak, and when memory runs out.

    From the moment on at which torch begins with CUDA, its allocator keeps its last 100,000 events
    with stacks of Python. A snapshot is written at the end of a step that is found to have raised
    the peak by a hundredth, and by the observer that torch calls before it raises OutOfMemoryError,
    four times each at the most; the last one stays. That may take seconds.
    """

    def __init__(self, module: Any, path: str) -> None:
        self.module, self.path = module, path
        self.peak = 0
        self.left: dict[str, int] = {}

    def begin(self) -> None:
        """Have torch keep the history, in place of what is asked of it in some steps."""
        if memory.snapshots is not self:
            return
        try:
            wrapper = self.module._record_memory_history
            keep = getattr(wrapper, "__wrapped__", wrapper)
            keep("all", context="all", stacks="python", max_entries=_HISTORY)
            self.left = {"peak": _MOST_WRITTEN, "oom": _MOST_WRITTEN}
            memory.requests.left = 0
            observe = getattr(sys.modules["torch._C"], "_cuda_attach_out_of_memory_observer", None)
            if observe is not None:
                observe(lambda *_: self.write("oom"))
        except Exception:
            note_ours("having torch's allocator keep its history")
            self.left = {}

    def step_ended(self, peak: int) -> None:
        """Write a snapshot if the peak rose."""
        if peak > self.peak * _RISE:
            self.peak = peak
            self.write("peak")

    def write(self, name: str) -> None:
        """Write a snapshot; never raises."""
        if not self.left.get(name) or memory.snapshots is not self:
            return
        self.left[name] -= 1
        target = f"{self.path}.{os.getpid()}.{name}.pickle"
        try:
            private = partial(os.open, mode=0o600)
            with open(f"{target}.tmp", "wb", opener=private) as file:
                pickle.dump(self.module._snapshot(), file, 4)
            os.replace(f"{target}.tmp", target)
        except Exception:
            note_ours("writing a snapshot of torch's allocator")
            self.left = {}


_MOST_WRITTEN, _HISTORY, _RISE = 4, 100000, 1.01
_STEADY, _ENTRIES = 8, 4000
_PATIENCE = 300
_UNTIL_CUDA_NS = 100000000
_PEAK = "allocated_bytes", "all", "peak"
_COUNTS = {
    "allocation retries": ("num_alloc_retries",),
    "segments": ("segment", "all", "allocated"),
    "segment bytes": ("reserved_bytes", "all", "allocated"),
    "segments freed": ("segment", "all", "freed"),
}
_AMOUNTS = {
    "memory allocated": ("allocated_bytes", "all", "current"),
    "memory reserved": ("reserved_bytes", "all", "current"),
    "memory split": ("inactive_split_bytes", "all", "current"),
}


def _count(stats: Any, *keys: str) -> int:
    for key in keys:
        stats = stats.get(key, {})
    return stats if isinstance(stats, int) else 0


memory = _Memory()
on_fork.append(memory.forget)
steps.on_step.append(memory.step_ended)


def cuda_memory(module: Any) -> None:
    """Read the allocator's counts from here on, and time the calls that empty its cache."""
    memory.read = getattr(module, "memory_stats_as_nested_dict", None)
    if hasattr(module, "_record_memory_history") and hasattr(module, "_snapshot"):
        memory.history = module

        @around(module, "_record_memory_history")
        def by_program(original: Any, *args: Any, **keywords: Any) -> Any:
            memory.requests.left, memory.requests.is_on = 0, False
            memory.snapshots = None
            return original(*args, **keywords)

    @around(module, "empty_cache")
    def empty(original: Any) -> None:
        start = time_ns()
        try:
            original()
        finally:
            record_of(thread_id(), start, time_ns(), word("cache emptied"), counter(1))


def cuda(module: Any) -> None:
    """Have snapshots written, if they are asked for, from the moment on at which CUDA begins."""
    path = os.environ.get("GPUTRACE_MEMORY")
    if path and memory.history is not None and hasattr(module, "_lazy_call"):
        memory.snapshots = _Snapshots(memory.history, path)
        module._lazy_call(memory.snapshots.begin)


PATCHES = [("torch.cuda.memory", cuda_memory), ("torch.cuda", cuda)]
