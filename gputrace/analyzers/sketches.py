"""Sketches of runs: late ranks, changes of the steps and of kernels, and slow cards.

Where ranks exchange gradients, all their steps are of one length: the late rank is the one whose
own part of a step is longer, or that comes later than the others on the clock of one host.

Times of kernels are of short windows, which begin at the same steps on all ranks. Kernels of one
name and size take as long on cards of one model: a card on which they take longer is slow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.communicators import operation_of
from gputrace.analyzers.kernel_names import family_of, short_name
from gputrace.model.sketches import CardSpeed, KernelTime, RankSummary, SketchReport, Slowdown
from gputrace.store.sketches import (
    COLLECTIVE,
    COLUMN,
    FAMILY,
    KERNEL,
    KERNELS,
    PARTS,
    Kernels,
    RankSketch,
    Steps,
    latest_of_each_rank,
    step_table,
)
from gputrace.units import format_ids, format_ns

WINDOW: Final = 200
"""Last steps by which a rank is late."""
_FEWEST_STEPS: Final = 24
_WARM_UP: Final = 10
"""First steps of a run, in which programs compile and load."""
_BLOCKS: Final = 8
"""Blocks of a window, all but one of which must agree."""
_LATE_SHARE: Final = 0.05
"""Part of a step by which a rank is late at least."""
_LATE_BLOCKS: Final = 0.8
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
_OWN: Final = ("data", "gc", "compilation", "checkpoint")
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

_MOMENTS: Final = ("forward_end", "end")
_FIELDS: Final = ("length", *PARTS, "queued", *_MOMENTS)
_Floats = NDArray[np.float64]


class _Blocks(NamedTuple):
    """Means of the ranks' steps in blocks of steps: shape (ranks, blocks) each, nanoseconds."""

    ranks: Sequence[RankSketch]
    starts: NDArray[np.int64]
    """Number of the first step of each block: those of the whole run, then `_BLOCKS` recent."""
    of: Mapping[str, _Floats]
    """By the name of a field of `STEP`; of its two moments, how much later they are than those of
    the rank that is first on the same host."""
    median: _Floats
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
    first = max((rank.first for rank in ranks), default=0) + _WARM_UP
    end = min((rank.last for rank in ranks), default=0) + 1
    if (count := end - first) < _FEWEST_STEPS:
        return None
    size, recent = max(-(-count // _LEVELS), _BLOCK_STEPS), min(WINDOW, count) // _BLOCKS
    levels = count // size
    edges = end - np.arange(levels, -1, -1) * size
    recent_edges = end - np.arange(_BLOCKS, -1, -1) * recent
    starts = np.concatenate([edges[:-1], recent_edges[:-1]])
    ends = np.concatenate([edges[1:], recent_edges[1:]])
    columns, moments = ([COLUMN[name] for name in names] for names in (_FIELDS, _MOMENTS))
    means = np.zeros((len(columns), len(ranks), len(starts)))
    median, lines = np.zeros((len(ranks), len(starts))), []
    leaders: dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
    for n, rank in enumerate(ranks):
        steps = rank.load()
        loaded(rank, steps)
        table, number = step_table(steps).copy(), steps["step"].astype(np.int64)
        passed = table[:, moments]
        leader, first_there = leaders.setdefault(rank.host, (number, passed))
        table[:, moments] = 0
        if np.array_equal(leader, number):
            known = (passed > 0) & (first_there > 0)
            table[:, moments] = np.where(known, passed - first_there, 0)
        low, high = np.searchsorted(number, starts), np.searchsorted(number, ends)
        for part, each in (slice(levels), size), (slice(levels, None), recent):
            of, median[n, part] = _means_and_medians(table, low[part], high[part], each)
            means[:, n, part] = of[columns]
        lines.append(_line_shares(rank, steps[low[levels] : high[-1]]))
    return _Blocks(ranks, starts, dict(zip(_FIELDS, means, strict=True)), median, lines)


def _means_and_medians(
    table: NDArray[np.int64], low: Any, high: Any, size: int
) -> tuple[_Floats, _Floats]:
    """Return the means of all columns in each block of rows, shape (columns, blocks), and the
    median lengths; blocks have ``size`` steps, unless some were not seen.
    """
    lengths = table[:, COLUMN["length"]]
    if bool((high - low == size).all()):
        blocks = table[low[0] : high[-1]].reshape(len(low), size, -1)
        ordered = np.sort(lengths[low[0] : high[-1]].reshape(-1, size), axis=1)
        medians = (ordered[:, (size - 1) // 2].astype(np.float64) + ordered[:, size // 2]) / 2
        # A quarter of the time of `sum`.
        return np.einsum("bsc->cb", blocks) / size, medians
    total = np.zeros((len(table) + 1, table.shape[1]), np.int64)
    np.cumsum(table, axis=0, out=total[1:])
    means = (total[high] - total[low]).T / np.maximum(high - low, 1)
    parts = (lengths[a:b] for a, b in zip(low.tolist(), high.tolist(), strict=True))
    return means, np.array([float(np.median(part)) if len(part) else 0.0 for part in parts])


def _beyond_others(times: _Floats) -> _Floats:
    """Return by how much each rank's times exceed those of the median rank, or the other of two."""
    return times - (times[::-1] if len(times) == 2 else np.median(times, axis=0))


def _late_ranks(blocks: _Blocks) -> Iterator[Slowdown]:
    """Yield the ranks whose own parts, or the moments that they pass, are late in recent blocks."""
    ranks, step_ns = blocks.ranks, blocks.step_ns
    if len(ranks) < 2:
        return
    parts = {part: _beyond_others(blocks.of[part]) for part in _OWN}
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
    # Hosts that run ahead of their GPUs are late for nobody: then no part of a step differs.
    rest = blocks.of["length"] - np.sum([blocks.of[part] for part in PARTS], axis=0)
    differ = [_beyond_others(times) for times in (rest, *(blocks.of[part] for part in PARTS))]
    later = np.minimum(later, np.max(differ, axis=0))
    parts["rest"] = np.maximum(later - np.maximum(own, 0), 0)
    total = np.maximum(own, later)
    is_late = total > _LATE_SHARE * step_ns
    for n in np.flatnonzero(is_late[:, -_BLOCKS:].sum(axis=1) >= _BLOCKS - 1).tolist():
        recent = {part: float(times[n, -_BLOCKS:].mean()) for part, times in parts.items()}
        # The first block from which most are late: a checkpoint of another rank hides one.
        so_far = is_late[n, :-_BLOCKS]
        share = np.cumsum(so_far[::-1])[::-1] / np.arange(len(so_far), 0, -1)
        first = np.append(np.flatnonzero(so_far & (share >= _LATE_BLOCKS)), -_BLOCKS)[0]
        part, ns = max(recent, key=recent.__getitem__), float(total[n, -_BLOCKS:].mean())
        near = [*blocks.lines[max(n - 1, 0) : n], *blocks.lines[n + 1 : n + 2]]
        there = {line: max(each.get(line, 0.0) for each in near) for each in near for line in each}
        line = _most_grown(blocks.lines[n], there)
        yield _late(ranks[n], int(blocks.starts[first]), ns, step_ns, part, line)


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
    counts = sorted(Counter(steps["line"].tolist()).items())
    met = [(sketch.line(n), count) for n, count in counts if 0 < n <= len(sketch.lines)]
    sampled = sum(count for _, count in met)
    return {line: count / sampled for line, count in met}


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
    found = _step_or_slope(levels)
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
    rank: RankSketch, begin: int, since: int, lengths: _Floats, now: slice, early: slice
) -> str:
    """Return the line at which a rank spends most of what its steps are longer now, by samples."""
    steps = rank.load()
    is_now = steps["step"] >= begin
    is_early = steps["step"] < (since if since > steps["step"][0] + _WARM_UP else begin)
    more = max(float(lengths[now].mean() - lengths[early].mean()), 1.0)
    shares = (
        {line: share * float(lengths[when].mean()) / more for line, share in there.items()}
        for when, there in (
            (now, _line_shares(rank, steps[is_now])),
            (early, _line_shares(rank, steps[is_early])),
        )
    )
    return _most_grown(*shares)


def _step_or_slope(levels: _Floats) -> tuple[str, int, float, float] | None:
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


_MOST_WINDOWS: Final = 24
"""Windows of a run that are compared, over all of it."""
_MOST_COMPARED: Final = 32
"""Kernels of a run that are compared, the most frequent ones."""
_RECENT: Final = 8
"""Last windows of a run, in most of which a card must be slow."""
_FEWEST_WINDOWS: Final = 3
"""Windows or runs in which a card must be compared."""
_SLOW_WINDOWS: Final = 0.75
"""Share of the recent windows, or of the runs, in which a card must be slow."""
_SLOW_RATIO: Final = 1.05
"""Ratio of kernel times to those of the other cards from which a card is slow in a run."""
_ALWAYS_SLOW_RATIO: Final = 1.03
"""Ratio from which a card is slow over several runs."""
_OUTLIER: Final = 6.0
"""Distance from the median card, in median distances, from which a card is slow there."""


def classify(name: str) -> tuple[str, str]:
    """Return the family of a kernel by its name, and its collective operation or a short name."""
    family = family_of(name)
    return family, operation_of(name) if family == "communication" else short_name(name)


class Windows(NamedTuple):
    """Windows that most ranks of a job have."""

    ranks: Sequence[RankSketch]
    """Ranks with any kernels."""
    steps: NDArray[np.int64]
    """First step of each."""
    times: dict[tuple[int, str], _Floats]
    """By kind and name, nanoseconds: of a step, or of one kernel of the kind `KERNEL`; shape
    (ranks, windows), NaN where unknown."""
    counts: dict[tuple[int, str], float]
    """How many there are in a step of the median rank."""

    @property
    def speeds(self) -> _Floats:
        """Kernel times relative to the median rank's: shape (ranks, windows), NaN where no other
        rank has the same kernels.
        """
        ratios = [np.full((len(self.ranks), len(self.steps)), np.nan)]
        for (kind, _), table in self.times.items():
            if kind == KERNEL:
                is_shared = np.isfinite(table).sum(axis=0) > 1
                ratios.append(table / np.where(is_shared, _middle(table), np.nan))
        return _middle(np.stack(ratios))

    def ends(self, table: _Floats) -> tuple[_Floats, _Floats]:
        """Return each rank's median in the first and in the last quarter of the windows."""
        quarter = max(len(self.steps) // 4, 1)
        return _middle(table[:, :quarter].T), _middle(table[:, -quarter:].T)


def _middle(table: _Floats) -> _Floats:
    """Return the lower median along the first axis, NaN where nothing is known."""
    at = np.maximum(np.isfinite(table).sum(axis=0) - 1, 0) // 2
    found: _Floats = np.take_along_axis(np.sort(table, axis=0), at[None], axis=0)[0]
    return found


def read_windows(sketches: Sequence[RankSketch]) -> Windows:
    """Read the windows of the ranks of one job."""
    seen, ranks = Counter[int](), []
    for sketch in sketches:
        own = {*sketch.load_kernels()["step"].tolist()}
        seen.update(own)
        ranks += [sketch] if own else []
    steps = np.array(sorted(step for step, n in seen.items() if n > len(ranks) / 2), np.int64)
    steps = steps[np.linspace(0, len(steps) - 1, min(len(steps), _MOST_WINDOWS)).astype(int)]
    parts, at = [np.zeros(0, KERNELS)], [np.zeros(0, np.int64)]
    for sketch in ranks:
        rows = sketch.load_kernels()
        window = np.searchsorted(steps, rows["step"])
        kept = (np.append(steps, -1)[window] == rows["step"]) & (rows["steps"] > 0)
        kept &= rows["kind"] <= KERNEL
        parts.append(rows[kept])
        at.append(window[kept])
    rows, window = np.concatenate(parts, dtype=KERNELS), np.concatenate(at)
    rank = np.repeat(np.arange(len(ranks)), [len(part) for part in parts[1:]])
    del parts, at
    missing = np.ones((len(ranks), len(steps)), np.bool_)
    missing[rank, window] = False
    keys, number = _named(ranks, rank, rows)
    is_kernel, per_step = rows["kind"] == KERNEL, rows["total"] / rows["steps"]
    ns = np.where(is_kernel, np.maximum(rows["median"], 1), per_step)
    count = rows["count"] / rows["steps"]
    often = np.bincount(number, minlength=len(keys))
    kernels = [n for n, (kind, _) in enumerate(keys) if kind == KERNEL]
    kernels.sort(key=lambda n: -often[n])
    rest, times, counts = set(kernels[_MOST_COMPARED:]), {}, {}
    for n, key in enumerate(keys):
        if n not in rest:
            those = np.flatnonzero(number == n)
            times[key] = np.where(missing | (key[0] == KERNEL), np.nan, 0.0)
            times[key][rank[those], window[those]] = ns[those]
            counts[key] = float(np.median(count[those]))
    return Windows(ranks, steps, times, counts)


def _named(
    ranks: Sequence[RankSketch], rank: NDArray[np.int64], rows: Kernels
) -> tuple[list[tuple[int, str]], NDArray[np.int64]]:
    """Return the kinds and names that rows of ranks have, as they are met rank by rank, and the
    number of each row's.
    """
    # A place for each kind and text of each rank, of which only those in use are looked up.
    texts = np.array([len(sketch.lines) + 1 for sketch in ranks], np.int64)
    places = len((FAMILY, COLLECTIVE, KERNEL)) * texts
    begin = np.cumsum(places) - places
    own = texts[rank]
    text = np.where(rows["name"] < own, rows["name"], 0)
    place = begin[rank] + rows["kind"] * own + text
    used = np.zeros(int(places.sum()), np.bool_)
    used[place] = True
    met = np.flatnonzero(used)
    owners = np.searchsorted(begin, met, "right") - 1
    numbers: dict[tuple[int, str], int] = {}
    number = np.zeros(len(used), np.int64)
    kinds, ids = np.divmod(met - begin[owners], texts[owners])
    number[met] = [
        # Kernels of another model of card are others.
        numbers.setdefault(
            (kind, ranks[n].line(id) + (ranks[n].card if kind == KERNEL else "")), len(numbers)
        )
        for n, kind, id in zip(owners.tolist(), kinds.tolist(), ids.tolist(), strict=True)
    ]
    return list(numbers), number[place]


def kernel_times(windows: Windows) -> list[KernelTime]:
    """Return what each family and collective takes, the longest first."""
    found = []
    for (kind, name), table in windows.times.items():
        if kind != KERNEL:
            first, now = map(np.nan_to_num, windows.ends(table))
            most = int(np.argmax(now))
            found.append(
                KernelTime(
                    job=windows.ranks[0].job,
                    name=name,
                    kind="family" if kind == FAMILY else "collective",
                    count=round(windows.counts[kind, name]),
                    first_ns=round(float(_middle(first))),
                    ns=round(float(_middle(now))),
                    most_ns=round(float(now[most])),
                    most_rank=windows.ranks[most].rank,
                )
            )
    return sorted(found, key=lambda row: (row.kind != "family", -row.ns))


def slow_cards(windows: Windows, step_ns: int) -> Iterator[Slowdown]:
    """Yield the ranks on whose cards the same kernels take longer than on the others'."""
    speeds = windows.speeds
    is_slow = speeds >= _SLOW_RATIO
    if len(windows.steps) < _FEWEST_WINDOWS:
        return
    compute = [
        table
        for (kind, name), table in windows.times.items()
        if kind == FAMILY and name != "communication"
    ]
    for n in np.flatnonzero(is_slow[:, -_RECENT:].mean(axis=1) >= _SLOW_WINDOWS).tolist():
        rank, ratio = windows.ranks[n], float(_middle(speeds[n, -_RECENT:]))
        at = int(np.append(-1, np.flatnonzero(~is_slow[n, :-1])).max()) + 1
        work = sum(float(_middle(table[n, -_RECENT:])) for table in compute)
        ns, where = round(work * (1 - 1 / ratio)), [rank.card, rank.gpu, f"in {rank.host}"]
        since = int(windows.steps[at])
        message = (
            f"rank {rank.rank} has a slow card: its kernels take {ratio - 1:.1%} longer than the "
            f"same on the others, {format_ns(ns)} of each step; seen since step {since} "
            f"({' '.join(filter(None, where))})"
        )
        yield Slowdown("slow-card", rank.job, rank.rank, since, ns, step_ns, "kernels", "", message)


def grown_kernels(windows: Windows, step_ns: int) -> Iterator[Slowdown]:
    """Yield the families and collectives that take longer than at first, by 5 % of a step.

    A collective waits for the last rank: it takes longer if it does on the rank that waits least.
    """
    least = _LATE_SHARE * step_ns
    for (kind, name), table in windows.times.items():
        is_whole = np.isfinite(table).all(axis=1)
        if kind == KERNEL or name == "communication" or not is_whole.any():
            continue
        first, now = windows.ends(table)
        grown = np.flatnonzero(is_whole & (now - first >= least))
        is_all = kind == COLLECTIVE or len(grown) > is_whole.sum() / 2
        if kind == COLLECTIVE:
            levels = table[is_whole].min(axis=0)
        elif len(grown):
            levels = np.median(table[grown], axis=0)
        found = _step_or_slope(levels) if kind == COLLECTIVE or len(grown) else None
        if found is None or found[3] - found[2] < least:
            continue
        _, at, before, after = found
        ranks = [windows.ranks[n].rank for n in grown.tolist()]
        since, job = int(windows.steps[at]), windows.ranks[0].job
        message = (
            f"{name} kernels take {format_ns(round(after))} of each step instead of "
            f"{format_ns(round(before))} since step {since}"
        )
        message += "" if is_all else f" on {format_ids('rank', ranks)}"
        rank, ns = None if is_all or len(ranks) > 1 else ranks[0], round(after - before)
        yield Slowdown("kernels", job, rank, since, ns, step_ns, name, "", message)


def compare_cards(runs: Sequence[Windows]) -> list[CardSpeed]:
    """Return how fast each card was over some runs, the slowest first.

    A card is compared with those of its model in the same run. Ranks of runs of one card each may
    be given as one run: they are compared where they have the same kernels.
    """
    by_card: dict[str, list[tuple[float, RankSketch]]] = defaultdict(list)
    for run in runs:
        for rank, ratio in zip(run.ranks, _middle(run.speeds[:, -_RECENT:].T), strict=True):
            if rank.gpu and np.isfinite(ratio):
                by_card[rank.gpu].append((float(ratio), rank))
    usual = {gpu: float(np.median([ratio for ratio, _ in of])) for gpu, of in by_card.items()}
    middles = np.array(list(usual.values()) or [1.0])
    scatter = float(np.median(np.abs(middles - np.median(middles))))
    least, cards = max(_ALWAYS_SLOW_RATIO, 1 + _OUTLIER * scatter), []
    for gpu, of in by_card.items():
        rank, slow = of[-1][1], sum(ratio >= _ALWAYS_SLOW_RATIO for ratio, _ in of)
        is_slow = len(of) >= _FEWEST_WINDOWS and usual[gpu] >= least
        is_slow &= slow >= _SLOW_WINDOWS * len(of)
        message = (
            f"{rank.card or 'card'} {gpu} of {rank.host} is always slow: the same kernels take "
            f"{usual[gpu] - 1:.1%} longer than on the other cards, in {slow} of {len(of)} runs"
        )
        cards.append(
            CardSpeed(
                host=rank.host,
                gpu=gpu,
                card=rank.card,
                runs=len(of),
                slow_runs=slow,
                ratio=round(usual[gpu], 4),
                message=message if is_slow else "",
            )
        )
    return sorted(cards, key=lambda card: -card.ratio)


def report_sketches(sketches: Sequence[RankSketch]) -> SketchReport:
    """Return what each rank's steps took, and what changed; ``sketches`` are of any jobs."""
    latest = latest_of_each_rank(sketches)
    jobs: dict[str, list[RankSketch]] = defaultdict(list)
    for sketch in latest:
        jobs[sketch.job].append(sketch)
    rows: dict[tuple[str, int], RankSummary] = {}

    def keep(sketch: RankSketch, steps: Steps) -> None:
        rows[sketch.host, sketch.pid] = _summary(sketch, steps)

    changes: list[Slowdown] = []
    summaries: list[RankSummary] = []
    kernels: list[KernelTime] = []
    # Ranks that train alone are compared with each other.
    runs = [read_windows([ranks[0] for ranks in jobs.values() if len(ranks) == 1])]
    for ranks in jobs.values():
        rows.clear()
        found = find_changes(ranks, keep)
        those = [rows.get((rank.host, rank.pid)) or _summary(rank, rank.load()) for rank in ranks]
        windows = read_windows(ranks)
        if windows.ranks:
            step_ns = round(float(np.median([row.median_ns for row in those])))
            found += [*slow_cards(windows, step_ns), *grown_kernels(windows, step_ns)]
            kernels += kernel_times(windows)
            runs += [windows] if len(ranks) > 1 else []
        changes += sorted(found, key=lambda change: -change.ns)
        summaries += those
    cards = compare_cards(runs) if len(jobs) > 1 else ()
    results = tuple(summaries), tuple(changes), tuple(kernels), tuple(cards)
    return SketchReport(1, "sketches", *results)


def _summary(sketch: RankSketch, steps: Steps) -> RankSummary:
    steps = steps[_WARM_UP:] if len(steps) > 2 * _WARM_UP else steps
    table = step_table(steps)
    # `quantile` takes as long as reading the steps does.
    at, ordered = np.arange(len(table)), np.sort(table[:, COLUMN["length"]])
    middle, late = np.interp(np.array([0.5, 0.95]) * at[-1], at, ordered).tolist()
    means = np.einsum("sc->c", table) / len(table)
    mean_of = dict(zip(COLUMN, map(round, means.tolist()), strict=False))
    return RankSummary(
        job=sketch.job,
        rank=sketch.rank,
        host=sketch.host,
        pid=sketch.pid,
        steps=sketch.last + 1,
        median_ns=round(middle),
        p95_ns=round(late),
        mean_ns=mean_of["length"],
        data_ns=mean_of["data"],
        gc_ns=mean_of["gc"],
        compilation_ns=mean_of["compilation"],
        checkpoint_ns=mean_of["checkpoint"],
        queued_ns=mean_of["queued"],
        resident_bytes=int(steps["resident_bytes"][-1]),
    )
