"""Spools of recorded processes, given to all their readers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gputrace.collectors.finalize import merge
from gputrace.collectors.live import RecentHost, RecentSpool
from gputrace.collectors.spool import HEADER, copy_since
from gputrace.collectors.spool.activity import join_spools, read_spool, windows_of
from gputrace.collectors.spool.host_events import join_hosts, read_host_file
from tests.fuzz.looking import LOOK, look

if TYPE_CHECKING:
    from tests.fuzz.targets import Place

_FAR = 1 << 62


def give_spool(path: Path, depth: int, place: Place) -> str:
    """A spool: read, read as it grows, copied from a point on, and made a trace of."""
    spool = read_spool(path)
    windows = windows_of(spool)
    assert all(start <= end for start, end in windows)
    twice = join_spools([spool, read_spool(path)])
    assert all(len(rows) <= 2 * len(spool.records[tag]) for tag, rows in twice.records.items())
    recent = RecentSpool(path)
    recent.read()
    recent.last_ends(_FAR, 3)
    recent.between(0, _FAR)
    _copy(path, place)
    if depth >= LOOK:
        _recover(path, place)
    empty = [tag for tag, rows in spool.records.items() if not len(rows)]
    return f"{empty[:2]} {len(windows)} {spool.whole} {len(spool.losses)} {spool.stopped}"


def give_host(path: Path, depth: int, place: Place) -> str:
    """A file of the hooks, likewise."""
    host = join_hosts([read_host_file(path)])
    join_hosts([read_host_file(path), read_host_file(path)])
    recent = RecentHost(path)
    recent.read()
    _copy(path, place)
    if depth >= LOOK:
        _recover(path, place)
    empty = [kind for kind, rows in host.records.items() if not len(rows)]
    return f"{empty} {host.whole} {host.stopped is None}"


def _copy(path: Path, place: Place) -> None:
    copy_since(path, place.out / path.name, HEADER.size + 200, (1, 1))
    copy = place.out / path.name
    if path.suffix == ".spool":
        read_spool(copy)
    else:
        join_hosts([read_host_file(copy)])


def _recover(path: Path, place: Place) -> None:
    target = place.out / "run.sqlite"
    target.unlink(missing_ok=True)
    merge(path.parent, target, {})
    look((target,), LOOK, place.out)
