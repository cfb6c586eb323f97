"""Late ranks and changes of a run, from sketches of its steps alone.

Where ranks exchange gradients, all their steps are of one length: the late rank is the one whose
own part of a step is longer, or that comes later than the others on the clock of one host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gputrace.model.sketches import Slowdown
from gputrace.store.sketches import PARTS, RankSketch, Steps
from gputrace.units import format_ns

WINDOW: Final = 200
"""Last steps by which a rank is late."""
_FEWEST_STEPS: Final = 24
WARM_UP: Final = 10
"""First steps of a run, in which programs compile and load."""
_BLOCKS: Final = 8
"""Blocks of a window, all but one of which must agree."""
LATE_SHARE: Final = 0.05
"""Part of a step by which a rank is late at least."""
_MOST: Final = 0.8
"""Share of the blocks to the end of a run in which a rank is late, from the first on."""
_SLOWER_RATIO: Final = 1.10
"""Ratio of step times from which a run has become slower."""
_LEVELS: Final = 40
"""Most blocks of a whole run between which it may have changed."""
_BLOCK_STEPS: Final = 10
_FEWEST_LEVELS: Final = 4
"""Blocks before and after a shift: a busy machine may slow one or two of them down."""
_CLEAR: Final = 4.0
"""Difference of two levels, as a multiple of the scatter of blocks around them."""
OWN: Final = ("data", "gc", "compilation", "checkpoint")
"""Parts in which a rank waits for no other."""
_NAMES: Final = {
    "data": "waiting for data",
    "gc": "collecting garbage",
    "compilation": "compiling",
    "checkpoint": "saving checkpoints",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer's step",
    "queued": "waiting for a core",
    "rest": "other work of the host",
}

_Times = NDArray[np.float64]


class _Blocks(NamedTuple):
    """Means of the ranks' steps in blocks of steps: shape (ranks, blocks) each, nanoseconds."""

    ranks: Sequence[RankSketch]
    starts: NDArray[np.int64]
    """Number of the first step of each block: those of the whole run, then `_BLOCKS` recent."""
    of: Mapping[str, _Times]
    """By the name of a field of `STEP`; of its two moments, how much later they are than those of
    the rank that is first on the same host."""
    median: _Times
    """Median length of a step."""
    lines: Sequence[Mapping[str, float]]
    """Share of the recent samples at each line, by rank."""

    @property
    def step_ns(self) -> float:
        return float(np.median(self.median[:, -_BLOCKS:]))


def find_changes(
    ranks: Sequence[RankSketch], loaded: Callable[[RankSketch, Steps], None] = lambda *_: None
) -> list[Slowdown]:
    """Return the late ranks of one job, and whether its steps became slower, the worst first.

    ``loaded`` is called with the steps of the ranks that are read for that.
    """
    blocks = _reduce(ranks, loaded)
    if blocks is None:
        return []
    late = list(_late_ranks(blocks)) or list(_held_up(blocks))
    changes = [*late, *_slower(blocks, {change.rank: change.ns for change in late})]
    return sorted(changes, key=lambda change: -change.ns)


def _reduce(
    ranks: Sequence[RankSketch], loaded: Callable[[RankSketch, Steps], None]
) -> _Blocks | None:
    """Reduce the steps that all ranks have which came as far as most; None for too few steps."""
    least = float(np.median([rank.last for rank in ranks])) - WINDOW if ranks else 0.0
    ranks = [rank for rank in ranks if rank.last >= least]
    first = max((rank.first for rank in ranks), default=0) + WARM_UP
    end = min((rank.last for rank in ranks), default=0) + 1
    if end - first < _FEWEST_STEPS:
        return None
    size, recent = _size(end - first, _LEVELS), min(WINDOW, end - first) // _BLOCKS
    levels = (end - first) // size
    edges = end - np.arange(levels, -1, -1) * size
    recent_edges = end - np.arange(_BLOCKS, -1, -1) * recent
    starts = np.concatenate([edges[:-1], recent_edges[:-1]])
    ends = np.concatenate([edges[1:], recent_edges[1:]])
    of = {name: np.zeros((len(ranks), len(starts))) for name in (*_FIELDS, *_MOMENTS)}
    median, lines = np.zeros((len(ranks), len(starts))), []
    leaders: dict[str, Steps] = {}
    for n, rank in enumerate(ranks):
        steps = rank.load()
        loaded(rank, steps)
        number = steps["step"].astype(np.int64)
        low, high = np.searchsorted(number, starts), np.searchsorted(number, ends)
        count = np.maximum(high - low, 1)
        for name in _FIELDS:
            total = np.append(0, np.cumsum(steps[name].astype(np.float64)))
            of[name][n] = (total[high] - total[low]) / count
        median[n] = [
            *_medians(steps["length"], low[:levels], high[:levels], size),
            *_medians(steps["length"], low[levels:], high[levels:], recent),
        ]
        leader = leaders.setdefault(rank.host, steps)
        if len(leader) == len(steps) and bool((leader["step"] == steps["step"]).all()):
            for name in _MOMENTS:
                known = (steps[name] > 0) & (leader[name] > 0)
                later = np.where(known, steps[name] - leader[name], 0).astype(np.float64)
                total = np.append(0, np.cumsum(later))
                of[name][n] = (total[high] - total[low]) / count
        lines.append(_line_shares(rank, steps[low[levels] : high[-1]]))
    return _Blocks(ranks, starts, of, median, lines)


def _medians(lengths: NDArray[np.int64], low: Any, high: Any, size: int) -> list[float]:
    """Return the median of each block; blocks have ``size`` steps, unless some were not seen."""
    if bool((high - low == size).all()):
        return list(np.median(lengths[low[0] : high[-1]].reshape(-1, size), axis=1))
    parts = (lengths[a:b] for a, b in zip(low.tolist(), high.tolist(), strict=True))
    return [float(np.median(part)) if len(part) else 0.0 for part in parts]


def _size(steps: int, most: int) -> int:
    """Return how many steps are in a block, of at most so many blocks."""
    return max(-(-steps // most), min(_BLOCK_STEPS, steps))


_MOMENTS: Final = ("forward_end", "end")
_FIELDS: Final = ("length", *PARTS, "queued")


def _beyond_others(times: _Times) -> _Times:
    """Return by how much each rank's times exceed those of the median rank, or the other of two."""
    return times - (times[::-1] if len(times) == 2 else np.median(times, axis=0))


def _late_ranks(blocks: _Blocks) -> Iterator[Slowdown]:
    """Yield the ranks whose own parts, or the moments that they pass, are late in recent blocks."""
    ranks, step_ns = blocks.ranks, blocks.step_ns
    if len(ranks) < 2:
        return
    parts = {part: _beyond_others(blocks.of[part]) for part in OWN}
    own = np.sum(list(parts.values()), axis=0)
    later = np.zeros_like(own)
    hosts: dict[str, list[int]] = defaultdict(list)
    for n, rank in enumerate(ranks):
        hosts[rank.host].append(n)
    for here in hosts.values():
        for moment in _MOMENTS if len(here) > 1 else ():
            times = blocks.of[moment][here]
            # Where ranks do not wait for each other, their clocks tell nothing.
            if np.ptp(times[:, -1]) < 2 * step_ns:
                later[here] = np.maximum(later[here], _beyond_others(times))
    parts["rest"] = np.maximum(later - np.maximum(own, 0), 0)
    total = np.maximum(own, later)
    is_late = total > LATE_SHARE * step_ns
    for n in np.flatnonzero(is_late[:, -_BLOCKS:].sum(axis=1) >= _BLOCKS - 1).tolist():
        recent = {part: float(times[n, -_BLOCKS:].mean()) for part, times in parts.items()}
        # The first block from which most are late: a checkpoint of another rank hides one.
        so_far = is_late[n, :-_BLOCKS]
        share = np.cumsum(so_far[::-1])[::-1] / np.arange(len(so_far), 0, -1)
        since = blocks.starts[np.append(np.flatnonzero(so_far & (share >= _MOST)), -_BLOCKS)[0]]
        part, ns = max(recent, key=recent.__getitem__), float(total[n, -_BLOCKS:].mean())
        near = [*blocks.lines[max(n - 1, 0) : n], *blocks.lines[n + 1 : n + 2]]
        there = {line: max(each.get(line, 0.0) for each in near) for each in near for line in each}
        line = _most_grown(blocks.lines[n], there)
        yield _late(ranks[n], int(since), ns, step_ns, part, line)


def _held_up(blocks: _Blocks) -> Iterator[Slowdown]:
    """Yield the rank that works at a line while all others are at another one, where they wait.

    Of two ranks, it is unknown which of them waits.
    """
    if len(blocks.ranks) < 3:
        return
    lines = sorted({line for each in blocks.lines for line in each})
    table = np.array([[each.get(line, 0.0) for line in lines] for each in blocks.lines])
    # Of the others, the most and the least of each line.
    order = np.sort(table, axis=0)
    for n, rank in enumerate(blocks.ranks) if lines else ():
        most = np.where(table[n] == order[-1], order[-2], order[-1])
        least = np.where(table[n] == order[0], order[1], order[0])
        works, waits = table[n] - most, least - table[n]
        if (share := min(works.max(), waits.max())) >= _GROWN:
            since, line = int(blocks.starts[-_BLOCKS]), lines[int(works.argmax())]
            yield _late(rank, since, share * blocks.step_ns, blocks.step_ns, "rest", line)


def _late(
    rank: RankSketch, since: int, ns: float, step_ns: float, part: str, line: str
) -> Slowdown:
    return Slowdown(
        kind="late-rank",
        job=rank.job,
        rank=rank.rank,
        since_step=since,
        ns=round(ns),
        step_ns=round(step_ns),
        part=part,
        line=line,
        message=f"rank {rank.rank} is late by {format_ns(round(ns))} of each step of "
        f"{format_ns(round(step_ns))}: {_NAMES[part]}{line and f' at {line}'}; seen since step "
        f"{since}",
    )


_GROWN: Final = 0.1
"""Share of the samples by which a line must exceed what it is compared with, to be named."""


def _line_shares(sketch: RankSketch, steps: Steps) -> dict[str, float]:
    """Return the share of the steps whose sample is at each line."""
    numbers = steps["line"]
    counts = np.bincount(numbers[numbers <= len(sketch.lines)], minlength=1)
    sampled = max(int(counts[1:].sum()), 1)
    met = (np.flatnonzero(counts[1:]) + 1).tolist()
    return {sketch.line(n): float(counts[n]) / sampled for n in met}


def _most_grown(now: Mapping[str, float], before: Mapping[str, float]) -> str:
    grown = {line: share - before.get(line, 0.0) for line, share in now.items()}
    most = max(grown, key=grown.__getitem__, default="")
    return most if most and grown[most] >= _GROWN else ""


def _slower(blocks: _Blocks, late: Mapping[int | None, int]) -> Iterator[Slowdown]:
    """Yield the change by which the steps of a run became slower, if they did.

    ``late`` has the nanoseconds by which ranks are late: where they explain half of the change, the
    latest rank says what it comes from, and else the one whose steps are longest.
    """
    levels = np.median(blocks.median[:, :-_BLOCKS], axis=0)
    found = step_or_slope(levels)
    if found is None:
        return
    kind, at, before, after = found
    count = len(levels)
    now = slice(at or count - max(count // 4, 1), count)
    early = slice(0, at or max(count // 4, 1))
    of = {name: times[:, :-_BLOCKS] for name, times in blocks.of.items()}
    worst = max(late, key=late.__getitem__, default=None)
    n = int(np.argmax(of["length"][:, now].mean(axis=1)))
    if worst is not None and late[worst] >= (after - before) / 2:
        n = next(index for index, rank in enumerate(blocks.ranks) if rank.rank == worst)
    grown = {
        name: float(times[n, now].mean() - times[n, early].mean()) for name, times in of.items()
    }
    whole = grown.pop("length")
    parts = {part: grown[part] for part in (*PARTS, "queued")}
    parts["rest"] = whole - sum(parts.values())
    part = max(parts, key=parts.__getitem__)
    rank, since = blocks.ranks[n], int(blocks.starts[at])
    line = _line_grown(rank, int(blocks.starts[now.start]), since, of["length"][n], now, early)
    how = "take" if kind == "shift" else "grow: they take"
    yield Slowdown(
        kind=kind,
        job=rank.job,
        rank=None,
        since_step=since,
        ns=round(after - before),
        step_ns=round(after),
        part=part,
        line=line,
        message=f"steps {how} {format_ns(round(after))} instead of {format_ns(round(before))} "
        f"since step {since}: {_NAMES[part]}{line and f' at {line}'}",
    )


def _line_grown(
    rank: RankSketch, begin: int, since: int, lengths: _Times, now: slice, early: slice
) -> str:
    """Return the line at which a rank spends most of what its steps are longer now, by samples."""
    steps = rank.load()
    is_now = steps["step"] >= begin
    is_early = steps["step"] < (since if since > steps["step"][0] + WARM_UP else begin)
    more = max(float(lengths[now].mean() - lengths[early].mean()), 1.0)
    shares = (
        {line: share * float(lengths[when].mean()) / more for line, share in there.items()}
        for when, there in (
            (now, _line_shares(rank, steps[is_now])),
            (early, _line_shares(rank, steps[is_early])),
        )
    )
    return _most_grown(*shares)


def step_or_slope(levels: _Times) -> tuple[str, int, float, float] | None:
    """Return whether levels of a run have a step up or slope upwards, where that begins, and the
    time before and after; None for neither.
    """
    count, best = len(levels), (np.inf, 0)
    for at in range(_FEWEST_LEVELS, count - _FEWEST_LEVELS + 1):
        left, right = levels[:at], levels[at:]
        error = float(np.abs(left - np.median(left)).sum() + np.abs(right - np.median(right)).sum())
        best = min(best, (error, at))
    error, at = best
    if not at:
        return None
    before, after = float(np.median(levels[:at])), float(np.median(levels[at:]))
    # Of repeated medians, which a few slow blocks do not move (Siegel 1982).
    x = np.arange(count)
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = (levels[:, None] - levels) / (x[:, None] - x)
    slope = float(np.median(np.nanmedian(slopes, axis=1)))
    along = float(np.median(levels - slope * x)) + slope * x
    off = float(np.abs(levels - along).sum())
    if off < error and along[-1] >= _SLOWER_RATIO * along[0] and along[0] > 0:
        rise = along[-1] - along[0]
        return ("drift", 0, along[0], along[-1]) if rise >= _CLEAR * off / count else None
    is_clear = after - before >= _CLEAR * error / count
    return ("shift", at, before, after) if after >= _SLOWER_RATIO * before and is_clear else None
