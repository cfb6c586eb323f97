"""Kernels in sketches: families and collectives that take longer, and cards that are slow.

Their times are of short windows, which begin at the same steps on all ranks. Kernels of one name
and size take as long on cards of one model: a card on which they take longer is slow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.communicators import operation_of
from gputrace.analyzers.kernel_names import family_of, short_name
from gputrace.analyzers.sketch_changes import LATE_SHARE, step_or_slope
from gputrace.model.sketches import CardSpeed, KernelTime, Slowdown
from gputrace.store.sketches import COLLECTIVE, FAMILY, KERNEL, RankSketch
from gputrace.units import format_ids, format_ns

_MOST_WINDOWS: Final = 24
"""Windows of a run that are compared, over all of it."""
_MOST_COMPARED: Final = 32
"""Kernels of a run that are compared, the most frequent ones."""
_RECENT: Final = 8
"""Last windows of a run, in most of which a card must be slow."""
_FEWEST: Final = 3
"""Windows or runs in which a card must be compared."""
_MOST: Final = 0.75
"""Share of the recent windows, or of the runs, in which a card must be slow."""
_SLOW_RATIO: Final = 1.05
"""Ratio of kernel times to those of the other cards from which a card is slow in a run."""
_ALWAYS_SLOW_RATIO: Final = 1.03
"""Ratio from which a card is slow over several runs."""
_OUTLIER: Final = 6.0
"""Distance from the median card, in median distances, from which a card is slow there."""

_Floats = NDArray[np.float64]


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
        own = np.unique(sketch.load_kernels()["step"]).tolist()
        seen.update(own)
        ranks += [sketch] if own else []
    steps = np.array(sorted(step for step, n in seen.items() if n > len(ranks) / 2), np.int64)
    steps = steps[np.linspace(0, len(steps) - 1, min(len(steps), _MOST_WINDOWS)).astype(int)]
    numbers: dict[tuple[int, str], int] = {}
    parts, missing = [np.zeros((0, 5))], np.ones((len(ranks), len(steps)), np.bool_)
    for n, sketch in enumerate(ranks):
        rows = sketch.load_kernels()
        rows = rows[np.isin(rows["step"], steps) & (rows["steps"] > 0)]
        at = np.searchsorted(steps, rows["step"])
        missing[n, at] = False
        kinds, which = np.unique(rows[["kind", "name"]], return_inverse=True)
        # Kernels of another model of card are others.
        texts = [
            (kind, sketch.line(id) + (sketch.card if kind == KERNEL else ""))
            for kind, id in kinds.tolist()
        ]
        mine = np.array([numbers.setdefault(text, len(numbers)) for text in texts])
        per_step = rows["total"] / rows["steps"]
        ns = np.where(rows["kind"] == KERNEL, np.maximum(rows["median"], 1), per_step)
        columns = np.full(len(rows), n), at, mine[which.ravel()], ns, rows["count"] / rows["steps"]
        parts.append(np.column_stack(columns) if len(rows) else parts[0])
    table = np.concatenate(parts)
    often = np.bincount(table[:, 2].astype(int), minlength=len(numbers))
    kernels = [number for (kind, _), number in numbers.items() if kind == KERNEL]
    kernels.sort(key=lambda number: -often[number])
    rest, times, counts = set(kernels[_MOST_COMPARED:]), {}, {}
    for key, number in numbers.items():
        if number not in rest:
            mine = table[table[:, 2] == number]
            times[key] = np.where(missing | (key[0] == KERNEL), np.nan, 0.0)
            times[key][mine[:, 0].astype(int), mine[:, 1].astype(int)] = mine[:, 3]
            counts[key] = float(np.median(mine[:, 4]))
    return Windows(ranks, steps, times, counts)


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
    if len(windows.steps) < _FEWEST:
        return
    compute = [
        table
        for (kind, name), table in windows.times.items()
        if kind == FAMILY and name != "communication"
    ]
    for n in np.flatnonzero(is_slow[:, -_RECENT:].mean(axis=1) >= _MOST).tolist():
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
    least = LATE_SHARE * step_ns
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
        found = step_or_slope(levels) if kind == COLLECTIVE or len(grown) else None
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
        message = (
            f"{rank.card or 'card'} {gpu} of {rank.host} is always slow: the same kernels take "
            f"{usual[gpu] - 1:.1%} longer than on the other cards, in {slow} of {len(of)} runs"
        )
        is_slow = len(of) >= _FEWEST and usual[gpu] >= least and slow >= _MOST * len(of)
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
