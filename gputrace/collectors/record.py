"""Recording a program that is ready to, and the trace of that.

While the program runs, each of its processes appends to a file of its own in a folder beside the
output; what is in that folder can be made a trace at any time (`recover`).
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gputrace.collectors.backend import Backend, Merged
from gputrace.collectors.backends import backend_named
from gputrace.collectors.bounds import Bounds
from gputrace.collectors.cuda import has_driver
from gputrace.collectors.cupti import CUPTI
from gputrace.collectors.growth import Growth, Size
from gputrace.collectors.host import HOST, unheeded
from gputrace.collectors.nvml.sampler import Sampler
from gputrace.collectors.prepare import Prepared
from gputrace.collectors.program.quiet import load_numpy
from gputrace.collectors.record_meta import read_meta, write_meta
from gputrace.collectors.secrets import masked
from gputrace.collectors.tasks.team import assert_ours, ranks_in
from gputrace.units import format_ranges

if TYPE_CHECKING:
    from gputrace.collectors.slow import SlowSteps


def record(
    prepared: Prepared,
    tell: Callable[[str], object],
    tell_size: Callable[[Size], None],
    from_bytes: int,
) -> int:
    """Runs the program to its end; its exit code.

    ``tell`` tells a person a line, ``tell_size`` is called when the recording has so many bytes,
    and each time they have doubled.

    Raises CannotRun where the program does not start, MissingError where what records it does not.
    """
    write_meta(prepared.folder, _describe(prepared))
    if prepared.backend is HOST and (line := unheeded(prepared.plan)):
        tell(line)
    sampler = Sampler() if prepared.plan.nvml and has_driver() and _samples(prepared) else None
    if sampler is not None:
        start = partial(sampler.start, prepared.folder, limits=prepared.plan.limits)
        prepared.team.let_one("nvml", start)
    try:
        with _watched(prepared, tell, Growth(prepared.folder, from_bytes, tell_size)) as meanwhile:
            return prepared.backend.run(prepared.launch, prepared.folder, tell, meanwhile)
    finally:
        if sampler is not None:
            sampler.stop()
            if sampler.notice:
                tell(sampler.notice)


@contextmanager
def _watched(
    prepared: Prepared, tell: Callable[[str], object], growth: Growth
) -> Iterator[Callable[[], None]]:
    """What is to be done now and then while the program runs."""
    plan, folder = prepared.plan, prepared.folder
    bounds = Bounds(folder, plan.limits, tell)
    slow: list[SlowSteps] = []
    if plan.when_slow:
        load_numpy()
        from gputrace.collectors.slow import SlowSteps

        ring_ns = plan.limits.longest_ns
        steps = SlowSteps(folder, plan.output, plan.when_slow, ring_ns, tell)
        prepared.team.let_one("slow", lambda: slow.append(steps))

    def look() -> None:
        growth.look_now_and_then()
        bounds.look()
        for own in slow:
            own.look()

    yield look
    for own in slow:
        own.look()
        own.finish()


def _describe(prepared: Prepared) -> dict[str, str]:
    """What GPUTRACE_META is to say of the recording."""
    meta = {
        "command": json.dumps(masked(prepared.command)),
        "hostname": socket.gethostname(),
        "backend": prepared.backend.name,
        "driver": "yes" if has_driver() else "no",
    }
    if (task := prepared.task) is not None:
        meta |= {"job": task.job, "world_size": str(task.tasks)}
    return meta


def _samples(prepared: Prepared) -> bool:
    """Whether this recorder may sample the GPUs: of tasks that share no folder, the first."""
    return prepared.task is None or prepared.team.shares or prepared.task.local_rank == 0


def conclude(prepared: Prepared, has_run: bool = True) -> Merged | None:
    """Makes the trace, if this recorder is the last of its machine's; None if it is not.

    Where the program did not start and nobody else recorded, nothing is made. Raises InputError
    where nothing recorded can be read, OSError where the trace cannot be written; the folder stays.
    """
    team = prepared.team
    with team.leave() as is_last:
        if not is_last:
            return None
        merged = None
        if has_run or len(ranks_in(team.folder)) > 1:
            merged = finish(team.folder, prepared.plan.output, keep=True)
        if merged is None or not merged.unread:
            team.dissolve()
        return merged


def can_be_read_meanwhile(folder: Path) -> bool:
    """Whether processes write what is recorded as it comes; some tools do at the end alone."""
    return _backend_of(read_meta(folder)).shares


def _backend_of(meta: Mapping[str, str]) -> Backend:
    """What recorded; raises MissingError where that was a plugin which is not here."""
    return backend_named(meta.get("backend", CUPTI.name))


def finish(folder: Path, output: Path, keep: bool = False) -> Merged:
    """Makes the trace of a folder and removes the folder, unless it has what could not be read.

    Raises InputError where nothing in it can be read, OSError where the trace cannot be written;
    the folder stays then.
    """
    load_numpy()
    from gputrace.traces.writer import remove_unfinished

    assert_ours(folder)
    meta = read_meta(folder)
    if "world_size" in meta:
        meta["ranks"] = format_ranges(ranks_in(folder))
    backend = _backend_of(meta)
    remove_unfinished(output)
    merged = backend.merge(folder, output, meta)
    if not keep and not merged.unread:
        shutil.rmtree(folder)
    notes = merged.notes
    if backend is HOST:
        notes += ("only the host's signals were recorded: nothing of a GPU is in the trace",)
    if merged.unread:
        notes += (f"{folder} is kept, for what could not be read",)
    return replace(merged, notes=notes)
