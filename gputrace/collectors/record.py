"""Recording a program that is ready to, and the trace of that.

While the program runs, each of its processes appends to a file of its own in a folder beside the
output; what is in that folder can be made a trace at any time (`recover`).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from gputrace.collectors.backend import Merged
from gputrace.collectors.backends import BACKENDS
from gputrace.collectors.cuda import has_driver
from gputrace.collectors.cupti import CUPTI
from gputrace.collectors.growth import Growth, Size
from gputrace.collectors.host import HOST, unheeded
from gputrace.collectors.nvml.sampler import Sampler
from gputrace.collectors.prepare import Prepared
from gputrace.collectors.secrets import masked
from gputrace.collectors.tasks.team import assert_ours, ranks_in
from gputrace.units import format_ranges


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
    _write_meta(prepared.folder, _describe(prepared))
    if prepared.backend is HOST and (line := unheeded(prepared.plan)):
        tell(line)
    sampler = Sampler() if prepared.plan.nvml and has_driver() and _samples(prepared) else None
    if sampler is not None:
        prepared.team.let_one("nvml", partial(sampler.start, prepared.folder))
    try:
        growth = Growth(prepared.folder, from_bytes, tell_size)
        meanwhile = growth.look_now_and_then
        return prepared.backend.run(prepared.launch, prepared.folder, tell, meanwhile)
    finally:
        if sampler is not None:
            sampler.stop()
            if sampler.notice:
                tell(sampler.notice)


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


def finish(folder: Path, output: Path, keep: bool = False) -> Merged:
    """Makes the trace of a folder and removes the folder, unless it has what could not be read.

    Raises InputError where nothing in it can be read, OSError where the trace cannot be written;
    the folder stays then.
    """
    assert_ours(folder)
    meta = read_meta(folder)
    if "world_size" in meta:
        meta["ranks"] = format_ranges(ranks_in(folder))
    backend = BACKENDS.get(meta.get("backend", ""), CUPTI)
    merged = backend.merge(folder, output, meta)
    if not keep and not merged.unread:
        shutil.rmtree(folder)
    notes = merged.notes
    if backend is HOST:
        notes += ("only the host's signals were recorded: nothing of a GPU is in the trace",)
    if merged.unread:
        notes += (f"{folder} is kept, for what could not be read",)
    return replace(merged, notes=notes)


def _write_meta(folder: Path, meta: Mapping[str, str]) -> None:
    """At once: other recorders may be at it too."""
    new = folder / f"meta.{os.getpid()}"
    new.write_text(json.dumps(meta), encoding="utf-8")
    new.replace(folder / "meta.json")


def read_meta(folder: Path) -> dict[str, str]:
    """What meta.json says of a recording; nothing where it is not there yet."""
    try:
        loaded = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in loaded.items()}
