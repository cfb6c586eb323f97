"""Spool files of all processes into one trace file, on one clock."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gputrace.collectors.backend import Merged
from gputrace.collectors.files.chunks import read_all
from gputrace.collectors.files.host_events import HostEvents, join_hosts, read_host_file
from gputrace.collectors.files.spool import Spool, join_spools, read_spool
from gputrace.collectors.files.steady import make_steady
from gputrace.collectors.rows.activity import ProcessRows
from gputrace.collectors.rows.cards import write_cards
from gputrace.collectors.rows.host import write_signals
from gputrace.collectors.rows.losses import hold_something, write_unreadable
from gputrace.collectors.rows.processes import write_processes
from gputrace.collectors.rows.session import write_session
from gputrace.errors import InputError
from gputrace.traces.writer import TraceWriter

LEAD_NS: Final = 1000
"""The trace's clock starts before the first file, so that nothing is at 0: that means no time."""


def merge(folder: Path, output: Path, meta: Mapping[str, str]) -> Merged:
    """Writes the trace of a recording's folder.

    Raises InputError where nothing of what the folder holds can be read, OSError where the file
    cannot be written.
    """
    problems: list[InputError] = []
    spools: list[Spool] = read_all(folder, "*.spool", read_spool, join_spools, problems)
    hosts: list[HostEvents] = read_all(folder, "*.host", read_host_file, join_hosts, problems)
    if hold_something(problems) and not spools and not hosts:
        raise problems[0]
    make_steady(spools, hosts)
    starts = [spool.started for spool in spools] + [host.started for host in hosts]
    start = min(starts, default=time.time_ns()) - LEAD_NS
    with TraceWriter(output) as writer:
        processes = write_all(writer, spools, hosts, start, meta)
        steps = write_signals(writer, folder, hosts, start)
        lost = write_unreadable(writer, problems)
    return Merged(
        processes=processes,
        kernels=sum(len(spool.records[b"KERN"]) for spool in spools),
        steps=steps,
        cut=sum(not spool.whole and not spool.stopped for spool in spools),
        notes=(*_notes(spools, hosts, start, meta), *lost),
        unread=hold_something(problems),
    )


def write_all(
    writer: TraceWriter,
    spools: Sequence[Spool],
    hosts: Sequence[HostEvents],
    start: int,
    meta: Mapping[str, str],
) -> int:
    """Writes the session, its processes and what the collector saw of each; how many there are.

    ``start`` is the session's on CLOCK_REALTIME. What the hooks and NVML saw is not in it.
    """
    write_session(writer, start, meta)
    cards = write_cards(writer, spools)
    processes = write_processes(writer, spools, hosts)
    for spool in spools:
        ProcessRows(writer, spool, start).write(cards)
    return processes


def _notes(
    spools: Sequence[Spool], hosts: Sequence[HostEvents], start: int, meta: Mapping[str, str]
) -> list[str]:
    """Why processes have no GPU activity, each reason once; and whose files end early."""
    reasons = {spool.info.get("no_gpu_activity", "") for spool in spools}
    if not spools and meta.get("backend") != "host":
        reasons.add("no process of the program started CUDA")
    stops = [(spool.pid, loss) for spool in spools if spool.stopped for loss in spool.losses[:1]]
    stops += [(host.pid, host.stopped) for host in hosts if host.stopped]
    ends = {
        f"process {pid}, {why}; all after {(at - start) / 1e9:.1f} s is missing"
        for pid, (at, _, why) in stops
    }
    return [*sorted(reasons - {""}), *sorted(ends)]
