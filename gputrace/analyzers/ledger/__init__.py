"""Ledger of lost time: each nanosecond in which a GPU does not compute, charged to one cause.

The partition (`lanes`) says what a GPU did in that time; the ledger says why, by what the host that
feeds it was at, and, where it waits in a collective, by what the GPU was at that came last. Of the
causes that are proven for a nanosecond, the first in the order of the list is charged, and the rest
stays with the general cause of its class.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import ArrayLike

from gputrace.analyzers.collectives import Collectives
from gputrace.analyzers.cuda_api_calls import NOBODY, describe_os_call, longest_os_call
from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu
from gputrace.analyzers.grouping import StepsOf, edges_of
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.ledger.causes import DEFAULTS, Cause, Host, path_of
from gputrace.analyzers.operations import Gpu, OperationClass
from gputrace.analyzers.parallelism import Groups
from gputrace.analyzers.python_samples import SampledLine, read_python_lines
from gputrace.model.events import UNKNOWN, distinct_ids
from gputrace.model.intervals import EMPTY, Intervals, Times, merge_touching, union
from gputrace.model.options import Window
from gputrace.model.results import Breakdown, LedgerRow
from gputrace.model.struct import Struct
from gputrace.model.time_class import BUSY_CLASSES, IDLE_CAUSES

CHARGES: Final = "charges"
"""Name under which the charges of a GPU are kept where its rows are."""
_OF: Final = dict.fromkeys(BUSY_CLASSES, "copy") | {
    "communication": "communication",
    **dict.fromkeys(IDLE_CAUSES, "idle"),
}
AT_EDGES: Final = "before or after its work"
"""Evidence of time at the edges of steps that lies beyond all operations of the GPU."""
_FEWEST_SAMPLES: Final = 5
_NAMED_LINE_SHARE: Final = 0.5
"""Minimum number of samples, and share that a line or its function must have to be named."""
_LOOP_SHARE: Final = 0.9
"""Share of all samples of a thread at a line from which it calls a loop."""
_ROLE_CAUSES: Final = {"pipeline": "pipeline-bubble", "expert": "expert-imbalance"}
"""Causes of waiting that lie in how work is divided, by the role of the group."""
_ONLY_LATE: Final = (
    *("work", "idle-unexplained", "communication-exposed", "kernel-gaps", "memset"),
    *("h2d-exposed", "copies-exposed", ""),
)
"""Causes on the last rank that say no more than that it comes late."""


class Ledger(Struct, frozen=True, dict=True):
    """Charged time of all GPUs."""

    rows: tuple[LedgerRow, ...]
    """The largest first."""
    turns: int
    """Steps of the GPUs that count, one for each without steps."""
    counted: frozenset[tuple[int | None, int]] = frozenset()
    """GPUs that count, each with its rank."""

    @cached_property
    def totals(self) -> Mapping[str, int]:
        """Nanoseconds of the GPUs that count by cause, but of computing."""
        totals: Counter[str] = Counter()
        for row in self.rows:
            if (row.gpu, row.paid_by) in self.counted and row.of != "compute":
                totals[row.cause] += row.ns
        return totals

    def mean(self, *causes: str) -> int:
        """Return the nanoseconds per GPU and step that are charged to some causes."""
        return sum(self.totals.get(cause, 0) for cause in causes) // self.turns

    def mean_on(self, gpus: Collection[Breakdown], *causes: str) -> int:
        """Return the nanoseconds per step that some GPUs lose to causes on their own ranks."""
        whose = {(row.gpu, row.rank) for row in gpus}
        mine = (row for row in self.of(*causes) if (row.gpu, row.paid_by) in whose)
        turns = sum(max(row.steps, 1) for row in gpus)
        return sum(row.ns for row in mine if row.of != "compute") // max(turns, 1)

    def of(self, *causes: str) -> list[LedgerRow]:
        """Return the rows of some causes, the largest first."""
        return [row for row in self.rows if row.cause in causes]

    def ranks(self, *causes: str, least: float = 0.2) -> tuple[int, ...]:
        """Return the ranks on which most of some causes is: those with some part of the largest."""
        by_rank: Counter[int] = Counter()
        for row in self.of(*causes):
            by_rank[row.rank] += row.ns
        most = max(by_rank.values(), default=0)
        return tuple(sorted(rank for rank, ns in by_rank.items() if ns >= least * most > 0))


class _Part(Struct, frozen=True):
    """Part of the time of one GPU: system id of the thread, and line, or None."""

    cause: str
    of: str
    thread: int | None
    line: str | None
    ns: int
    evidence: str = ""
    frame: str | None = None
    call: str | None = None


class _Sums(Struct, frozen=True, dict=True):
    """Charges of one GPU in its measured time."""

    parts: list[_Part]
    waits: dict[tuple[int, str], int]
    """Nanoseconds of exposed waiting, by the GPU that came last (as an index) and the role of the
    group."""


def account(
    groups: Groups,
    causes: Sequence[Cause],
    lanes: Sequence[LaneSummary],
    rows: Sequence[Breakdown],
    late: Mapping[int, str],
    *,
    is_loop: bool,
    repeats: bool,
) -> list[LedgerRow]:
    """Charge the time in which some GPUs do not compute.

    Args:
        groups: all GPUs, and their measured steps.
        causes: in the order in which they are charged.
        lanes, rows: those of the GPUs that the ledger is of, and the breakdown of each.
        late: cause to charge for waiting for a rank that comes late in a way that is no chance.
        is_loop: True if the steps are turns of a loop.
        repeats: True if what a process does once is before them.
    """
    gpus, steps_of = groups.gpus, StepsOf(groups.measured)
    steps = {lane.gpu: edges_of(steps_of(lane.gpu)) for lane in gpus.lanes}
    index_of = {summary.gpu: index for index, summary in enumerate(gpus.operations)}
    times = {lane.gpu: measured_time(lane, steps[lane.gpu]) for lane in lanes}
    all_waits = _waits_by_culprit(groups.collectives, groups.roles)
    waits = {
        gpu: {
            key: all_of.intersection(time)
            for key, all_of in all_waits.get(index_of[gpu], {}).items()
        }
        for gpu, time in times.items()
    }
    feeds = Counter(lane.gpu.process for lane in gpus.lanes)
    counts = [feeds[lane.gpu.process] for lane in gpus.lanes]
    edges = [steps[lane.gpu] if is_loop else np.empty((2, 0), np.int64) for lane in gpus.lanes]
    counted = [(times.get(lane.gpu), waits.get(lane.gpu, {})) for lane in gpus.lanes]
    charged = gpus.each(
        _charge, gpus.lanes, counts, edges, counted, same=(repeats, causes), keeps=True
    )
    sums = [each for each in charged if each is not None]
    reasons = _find_reasons(gpus, list(waits.values()))
    result: list[LedgerRow] = []
    for number, (lane, each, row) in enumerate(zip(lanes, sums, rows, strict=True)):
        parts = [(lane.gpu.rank, part) for part in each.parts]
        for (culprit, role), exposed_ns in each.waits.items():
            rank, at = gpus.operations[culprit].gpu.rank, reasons[number, culprit, role]
            parts += [(rank, part) for part in _parts_of_wait(at, exposed_ns, role, rank, late)]
        # The edges of steps beyond the GPU's operations are in no gap.
        lost = row.total_ns - row.of("compute") - sum(part.ns for _, part in parts)
        if lost:
            rest = _Part("idle-unexplained", "idle", None, None, lost, AT_EDGES)
            parts.append((lane.gpu.rank, rest))
        result += [_row(causes, lane.gpu, rank, part) for rank, part in parts]
    return result


def _parts_of_wait(
    at: Mapping[str, int], exposed_ns: int, role: str, rank: int, late: Mapping[int, str]
) -> Iterable[_Part]:
    """Yield the waiting for a rank by cause, in proportion to what that rank was at meanwhile."""
    why = max(at, key=lambda name: at[name])
    evidence = f"rank {rank} came last" + (f" ({why})" if why else "")
    by_cause: Counter[str] = Counter()
    whole, given, past = max(sum(at.values()), 1), 0, 0
    for reason, share in at.items():
        past += share
        until = exposed_ns * past // whole
        if role in _ROLE_CAUSES:
            cause = _ROLE_CAUSES[role]
        elif rank in late:
            cause = late[rank]
        else:
            cause = "uneven-arrival" if reason in _ONLY_LATE else reason
        by_cause[cause] += until - given
        given = until
    for cause, ns in by_cause.items():
        if ns:
            yield _Part(cause, "communication", None, None, ns, evidence)


def _row(causes: Sequence[Cause], gpu: Gpu, rank: int, part: _Part) -> LedgerRow:
    """Return the row of a part of a GPU's time whose cause is on some rank."""
    path = path_of(part.cause, causes)
    if rank != gpu.rank and "waiting" not in path:
        path = ("communication", "waiting", *path)
    return LedgerRow(
        cause=part.cause,
        path=path,
        of=part.of,
        gpu=gpu.gpu,
        rank=rank,
        thread=part.thread,
        line=part.line,
        ns=part.ns,
        evidence=part.evidence,
        frame=part.frame,
        paid_by=gpu.rank,
        call=part.call,
    )


def measured_time(lane: LaneSummary, steps: Times) -> Intervals:
    """Return the time that the breakdown of a GPU covers: steps, else its parts with all calls."""
    if steps.size:
        return union(*steps)
    if lane.with_calls is not None and lane.with_calls.total:
        return lane.with_calls
    return union([lane.window.start], [lane.window.end])


def _charge(
    view: GpuShardView,
    feeds: int,
    steps: Times,
    counted: tuple[Intervals | None, Mapping[Any, Intervals]],
    repeats: bool,
    causes: Sequence[Cause],
) -> _Sums | None:
    """Charge the time of one GPU as far as its own host shows why, and keep that with its rows;
    return the sums in its measured time, waits in collectives apart, if it has a row.
    """
    lane, (time, waits) = view.lane, counted
    left = {
        name: lane.timeline.classes[OperationClass[name.upper()]].clip(*lane.window)
        for name in BUSY_CLASSES
        if name != "compute"
    }
    window = lane.window
    if time:  # Steps may begin before the GPU's first operation, and end after its last.
        window = Window(min(window.start, int(time.start[0])), max(window.end, int(time.end[-1])))
    left |= {name: times.clip(*window) for name, times in lane.causes.of.items()}
    host = Host(view, feeds, (steps[0], steps[1]), left, repeats=repeats, window=window)
    charges: dict[tuple[str, str], Intervals] = {}
    for cause in causes:
        names = [name for name in cause.takes if name in left and len(left[name])]
        proof = cause.claim(host) if cause.claim is not None and names else EMPTY
        for name in names if len(proof) else ():
            charged = left[name].intersection(proof)
            if len(charged):
                charges[cause.id, name] = charged
                left[name] = left[name].difference(charged)
    charges |= {(DEFAULTS[name], name): times for name, times in left.items() if len(times)}
    view.keep(CHARGES, charges)
    return None if time is None else _sum(host, time, waits, max(steps.shape[1], 1))


class HostTimes(Struct, frozen=True, dict=True):
    """Time for which the host of a GPU is at something else than launching."""

    inside: dict[str, Intervals]
    """Within a window, by cause; disjoint."""
    spent: dict[str, int]
    """Nanoseconds in the measured time."""
    data: dict[tuple[int, int], Intervals]
    """Waits for data within the window, by process and thread."""


def find_host_times(
    view: GpuShardView, time: Intervals, causes: Sequence[Cause], window: Window
) -> HostTimes:
    """Return when the host of a GPU is at each of some causes, whether or not the GPU waits.

    Of two causes at a time, the first of the list counts, and one of the host that can claim waits
    for data instead of these. ``time`` is the measured one.
    """
    host, known, inside, spent = Host(view), EMPTY, dict[str, Intervals](), dict[str, int]()
    proven = EMPTY
    for cause in causes:
        active = EMPTY if cause.claim is None else cause.claim(host).difference(known)
        if len(active):
            inside[cause.id] = active.clip(*window)
            spent[cause.id] = active.intersection(time).total
            known = merge_touching(known, active)
            if cause.parent == "host" and "data_feeding" in cause.takes:
                proven = merge_touching(proven, active)
    data = {
        thread: waits.difference(proven).clip(*window) for thread, waits in view.lane.data.items()
    }
    return HostTimes(inside, spent, data)


def charges_of(view: GpuShardView) -> Mapping[tuple[str, str], Intervals]:
    """Return when a GPU loses time, by cause and class; waiting for other ranks is communication.

    The intervals are disjoint, and all of its window in which it does not compute.
    """
    charges: Mapping[tuple[str, str], Intervals] = view.kept(CHARGES)
    return charges


def lost_time(view: GpuShardView) -> dict[str, Intervals]:
    """Return when a GPU loses time by cause, whatever its class."""
    lost: dict[str, Intervals] = {}
    for (cause, _), times in charges_of(view).items():
        lost[cause] = merge_touching(lost.get(cause, EMPTY), times)
    return lost


def charges_within(view: GpuShardView, starts: ArrayLike, ends: ArrayLike) -> list[dict[str, int]]:
    """Return the nanoseconds of each of some windows by cause, the largest first."""
    lost = lost_time(view)
    columns = [times.within(starts, ends).tolist() for times in lost.values()]
    rows = (zip(lost, row, strict=True) for row in zip(*columns, strict=True))
    return [{cause: ns for cause, ns in Counter(dict(row)).most_common() if ns} for row in rows]


def _sum(host: Host, time: Intervals, waits: Mapping[Any, Intervals], turns: int) -> _Sums:
    """Sum the charges of one GPU in some time, so many steps; waits in collectives apart."""
    parts: list[_Part] = []
    exposed: dict[tuple[int, str], int] = {}
    merged: dict[tuple[str, str], Intervals] = {}
    for (cause, name), charged in charges_of(host.view).items():
        inside = charged.intersection(time)
        if name == "communication":
            for key, waiting in waits.items():
                apart = inside.intersection(waiting)
                if len(apart):
                    exposed[key] = apart.total
                    inside = inside.difference(apart)
        key_of = cause, _OF[name]
        merged[key_of] = merge_touching(merged.get(key_of, EMPTY), inside)
    for (cause, of), inside in merged.items():
        if len(inside):
            parts += _by_thread(host, cause, of, inside, turns)
    return _Sums(parts, exposed)


def _by_thread(host: Host, cause: str, of: str, time: Intervals, turns: int) -> Iterable[_Part]:
    """Yield the time of a cause by the thread that feeds the GPU, with the line it is at, and the
    system call, by its time in each of so many steps: of idle time, and of copies for which the
    host waits.
    """
    view = host.view
    waits = (
        of == "copy"
        and 2 * max(held.intersection(time).total for held in (host.blocked, host.copying))
        > time.total
    )
    if view.calls is None or not (waits or of == "idle"):
        yield _Part(cause, of, None, None, time.total)
        return
    feeders, trace = host.feeders(time), view.trace
    if (unknown := time.select(feeders == NOBODY)).total:
        yield _Part(cause, of, None, None, unknown.total)
    for feeder in distinct_ids(feeders[feeders != NOBODY]).tolist():
        mine = time.select(feeders == feeder)
        pair = view.calls.threads[feeder]
        place = _line_of(view, pair, mine)
        line, frame, samples = None, None, ""
        if place is not None:
            line, frame = place.line, place.frame
            samples = str(place)
        name, spent = longest_os_call(trace, host.os_calls(pair[0]), pair, mine)
        call = name if 2 * spent > mine.total else None
        text = ", ".join(filter(None, (samples, name and describe_os_call(name, spent / turns))))
        yield _Part(cause, of, pair[1] & 0xFFFFFFFF, line, mine.total, text, frame, call)


def _line_of(view: GpuShardView, thread: tuple[int, int], time: Intervals) -> SampledLine | None:
    """Return the line, or the most sampled line of the function, at which most samples of a thread
    met it in some time; None if none has most of them, or there are few.

    If nearly all samples are at that line, it calls a library's loop: the library's frame is named.
    """
    lines = view.once(read_python_lines)
    teller = None if lines is None else lines.teller(thread)
    if lines is None or teller is None:
        return None
    place = lines.place({teller: lines.within(teller, time)}, _NAMED_LINE_SHARE)
    if place is None or place.samples < _FEWEST_SAMPLES or place.share < _NAMED_LINE_SHARE:
        return None
    whole = lines.place({teller: np.arange(len(lines.times[teller]))})
    is_loop = whole is not None and whole.line == place.line and whole.share >= _LOOP_SHARE
    if not is_loop or place.frame is None:
        return place
    return replace(place, line=f"{place.frame}, called from {place.line}")


def _waits_by_culprit(
    collectives: Collectives, roles: Sequence[str]
) -> dict[int, dict[tuple[int, str], Intervals]]:
    """Return when each GPU (by index) waits in collectives, by the last to come and the role."""
    rows = np.flatnonzero(collectives.known & (collectives.wait > 0))
    if not len(rows):
        return {}
    lane, last = collectives.lane[rows], collectives.last_lane[rows]
    group, start, wait = (
        column[rows] for column in (collectives.group, collectives.start, collectives.wait)
    )
    named = [*roles, ""]
    key = (lane.astype(np.int64) << 40) | (last << 20) | (group.astype(np.int64) & 0xFFFFF)
    waits: dict[int, dict[tuple[int, str], Intervals]] = defaultdict(dict)
    for number in distinct_ids(key).tolist():
        mine = key == number
        first = int(np.argmax(mine))
        waiter, culprit, of = int(lane[first]), int(last[first]), int(group[first])
        if waiter == culprit:
            continue
        role = "" if of == UNKNOWN else named[of]
        time = union(start[mine], start[mine] + wait[mine])
        known = waits[waiter].get((culprit, role), EMPTY)
        waits[waiter][culprit, role] = merge_touching(known, time)
    return waits


def _find_reasons(
    gpus: PerGpu, waits: Sequence[Mapping[tuple[int, str], Intervals]]
) -> dict[tuple[int, int, str], dict[str, int]]:
    """Return what the last to come was at while each GPU waited for it: nanoseconds by cause, by
    the number of the GPU, the index of the last one, and the role of the group.
    """
    asked: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for number, of_gpu in enumerate(waits):
        for culprit, role in of_gpu:
            asked[culprit].append((number, role))
    lane_of = gpus.lane_of
    culprits = [culprit for culprit in asked if culprit in lane_of]
    times = ([waits[n][culprit, role] for n, role in asked[culprit]] for culprit in culprits)
    answers = gpus.each(_reasons, [lane_of[culprit] for culprit in culprits], times)
    found = {
        (number, culprit, role): answer
        for culprit, of_culprit in zip(culprits, answers, strict=True)
        for (number, role), answer in zip(asked[culprit], of_culprit, strict=True)
    }
    return {
        (number, culprit, role): found.get((number, culprit, role)) or {"": 1}
        for culprit, pairs in asked.items()
        for number, role in pairs
    }


def _reasons(view: GpuShardView, asked: Sequence[Intervals]) -> list[dict[str, int]]:
    """Return for each of some times the nanoseconds that a GPU spends by cause; ``work`` is when it
    computes, and an empty name what is not known.
    """
    computing = view.lane.timeline.of_class(OperationClass.COMPUTE)
    answers = []
    for time in asked:
        reasons: Counter[str] = Counter()
        for (cause, _), charged in charges_of(view).items():
            reasons[cause] += charged.intersection(time).total
        reasons["work"] += computing.intersection(time).total
        reasons[""] += time.total - reasons.total()
        answers.append({reason: ns for reason, ns in reasons.items() if ns})
    return answers


def move_amounts(
    rows: Sequence[LedgerRow],
    cause: Cause,
    amounts: Mapping[int | None, int],
    turns: Mapping[tuple[int | None, int], int],
    path: tuple[str, ...],
) -> list[LedgerRow]:
    """Return the rows with a part of some moved to a cause that is known by its amount alone.

    Args:
        rows: of all causes.
        cause: takes from the rows of the causes in `Cause.takes`.
        amounts: nanoseconds of a step by the rank that has the cause; of None, for each GPU.
        turns: steps of each GPU, at least 1.
        path: that of the cause.
    """
    moved: list[LedgerRow] = []
    left: dict[Any, int] = {}
    for row in rows:
        key = row.rank if row.rank in amounts else None
        if row.cause not in cause.takes or key not in amounts:
            moved.append(row)
            continue
        whose = row.gpu, row.paid_by
        rest = left.setdefault((key, *whose), amounts[key] * turns[whose])
        amount = max(0, min(row.ns, rest))
        left[key, *whose] = rest - amount
        if amount:
            moved.append(replace(row, cause=cause.id, path=path, ns=amount))
        if amount < row.ns:
            moved.append(replace(row, ns=row.ns - amount))
    return moved
