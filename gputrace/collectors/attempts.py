"""Lives of recorded processes, and the attempts that a launcher made of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from gputrace.collectors.exit_watch import read_exits
from gputrace.collectors.job_tasks import read_meta
from gputrace.collectors.spool import LATEST
from gputrace.collectors.spool.activity import ON_GPU, Spool
from gputrace.collectors.spool.host_events import HostEvents
from gputrace.model.attempts import Life
from gputrace.model.events import UNKNOWN

_RANKS: Final = (
    *("RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK"),
    *("PMI_RANK", "PMIX_RANK", "SLURM_PROCID"),
)


def rank_of(info: Mapping[str, str]) -> int | None:
    """Return the rank of a process from its environment."""
    return first_number(info, _RANKS)


def first_number(info: Mapping[str, str], keys: Sequence[str]) -> int | None:
    """Return the number under the first of these keys that has one."""
    return next((int(info[key]) for key in keys if info.get(key, "").isdecimal()), None)


@dataclass(frozen=True, slots=True)
class _Known:
    """Life of a process, and what tells a restart from another program."""

    host: str
    life: Life
    group: int | str
    """Equal for the processes that do one rank's work, one after another."""
    reach: int
    """Its last record, which is not later than its end."""
    restarts: int
    """Number of restarts before it, as torchrun counts them; -1 if unknown."""
    script: str
    trains: bool


def read_lives(
    folder: Path,
    spools: Sequence[Spool],
    hosts: Sequence[HostEvents],
) -> dict[tuple[str, int], Life]:
    """Return the lives of a recording's processes by host and pid; times are CLOCK_REALTIME.

    A process begins another attempt if it works on the same rank as one that had ended before, and
    torchrun counts a restart in between, or that one failed and was of the same script. Where the
    recorded program has succeeded, processes that came to the end of its last attempt did not fail:
    Ray ends its workers with exit code 1.
    """
    exits = read_exits(folder)
    files: dict[tuple[str, int], list[HostEvents | Spool]] = {}
    every: list[HostEvents | Spool] = [*hosts, *spools]
    for file in every:
        files.setdefault((file.host, file.pid), []).append(file)
    groups: dict[tuple[str, int | str], list[_Known]] = {}
    known = (_known(key, of, exits.get(key)) for key, of in files.items())
    for each in sorted(known, key=lambda each: each.life.start):
        groups.setdefault((each.host, each.group), []).append(each)
    lives = {
        (each.host, life.process): life
        for group in groups.values()
        for each, life in zip(group, _number(group), strict=True)
    }
    last = max(((life.attempt, life.steps) for life in lives.values()), default=None)
    if read_meta(folder).get("exit_code") == "0":
        for key, life in lives.items():
            if life.exit_code and (life.attempt, life.steps) == last:
                lives[key] = replace(life, exit_code=None)
    return lives


def _known(
    key: tuple[str, int],
    files: Sequence[HostEvents | Spool],
    ended: tuple[int, int] | None,
) -> _Known:
    info: dict[str, str] = {}
    for file in files:
        info |= file.info
    rank, count = rank_of(info), info.get("TORCHELASTIC_RESTART_COUNT", "")
    hosts = [file for file in files if isinstance(file, HostEvents)]
    steps: Any = max((host.records["step"] for host in hosts), key=len, default=())
    stops = np.minimum(steps["end"], LATEST).tolist() if len(steps) else [0]
    events = [int(host.events["end"].max(initial=0)) for host in hosts]
    latest = [file.latest for file in files if isinstance(file, Spool)]
    starts = [file.started for file in files]
    reach = min(max(*starts, *events, *latest, 0), LATEST)
    life = Life(
        process=key[1],
        rank=UNKNOWN if rank is None else rank,
        attempt=0,
        start=min(*starts, LATEST),
        end=min(ended[0], LATEST) if ended else reach,
        steps=int(steps["number"][-1]) + 1 if len(steps) else 0,
        first_step=stops[0],
        last_step=stops[-1],
        exit_code=ended[1] if ended else None,
    )
    script = info.get("script", info.get("program", ""))
    on_gpu = any(len(f.records[tag]) for f in files if isinstance(f, Spool) for tag in ON_GPU)
    return _Known(
        host=key[0],
        life=life,
        group=script if rank is None else rank,
        reach=reach,
        restarts=int(count) if count.isdecimal() else -1,
        script=script,
        trains=bool(life.steps or on_gpu),
    )


def _number(group: Sequence[_Known]) -> list[Life]:
    """Return the lives of a group, in order of start, with the numbers of their attempts.

    A process that does not train belongs to the attempt that had begun when it did.
    """
    number, reach, before, lives = 0, 0, list[_Known](), list[Life]()
    for each in group:
        if each.trains:
            has_failed = any(b.life.exit_code and b.script == each.script for b in before)
            counted = before and each.restarts > max(b.restarts for b in before)
            if not before or counted or (has_failed and each.life.start >= reach):
                # An end is seen a little late, maybe after the next start.
                lives = [replace(life, end=min(life.end, each.life.start)) for life in lives]
                number, before = max(number, each.restarts) + 1, []
            before.append(each)
            reach = max(reach, each.reach)
        lives.append(replace(each.life, attempt=number))
    return lives
