"""Kernels of the measured steps: time by name and family, what launching them costs, and the
launches that a kernel profiler should look at.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gputrace.analyzers.breakdown import range_of
from gputrace.analyzers.cuda_api_calls import NOBODY, are_of_hip, by_thread, read_calls, read_host
from gputrace.analyzers.device_metrics import roofline
from gputrace.analyzers.gpu_shards import GpuShardView, HasGpu, PerGpu, Shard, same_names
from gputrace.analyzers.grouping import StepsOf, median, time_of
from gputrace.analyzers.host_state import read_host_state
from gputrace.analyzers.kernel_activity import measure_activity, time_alone
from gputrace.analyzers.kernel_names import (
    PRODUCTS,
    converts_layout,
    family_of,
    generation,
    on_tensor_cores,
    precision_of,
    short_name,
)
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.operations import read_operations
from gputrace.analyzers.python_samples import read_python_lines, read_sources
from gputrace.errors import InputError, UsageError
from gputrace.model.events import Events, Kind, Mask, distinct_ids, number_ids, sort_numbers
from gputrace.model.intervals import Intervals, Times, union
from gputrace.model.kernels import (
    CountedFlop,
    Family,
    KernelOnGpu,
    Kernels,
    KernelUse,
    LaunchCost,
    LongestLaunch,
    Product,
)
from gputrace.model.names import short, words_of_mangled
from gputrace.model.options import Window
from gputrace.model.results import Analysis, Finding, Step
from gputrace.model.struct import Struct
from gputrace.model.trace import Progress, Trace
from gputrace.units import format_ns

_MOST_LISTED: Final = 50
_MOST_OF_FIRST_GPU: Final = 20
_MOST_EXPLAINED: Final = 24
"""Maximum number of kernels whose activity is told apart."""
_STRAY_KERNELS_PART: Final = 0.01
"""Minimum number of kernels of a GPU that counts, as a fraction of the busiest one's."""


class _Measured(NamedTuple):
    """Kernels of the measured steps of one GPU."""

    lane: LaneSummary
    steps: Sequence[Step]
    windows: Intervals
    """The measured steps; where there are none, the lane's window."""
    codes: dict[int, int]
    """Codes of the names, by id."""
    counted: Counted


def count_kernels(gpus: PerGpu, measured: Sequence[Step]) -> Kernels | None:
    """Count the kernels that start in the measured steps, or in the lanes' windows without any.

    Counts the GPUs that do the work; None where no kernel does.
    """
    names, codes = same_names(gpus, [summary.kernels for summary in gpus.operations])
    codes_of = dict(zip((summary.gpu for summary in gpus.operations), codes, strict=True))
    steps_of = StepsOf(measured)
    steps = [steps_of(lane.gpu) for lane in gpus.lanes]
    windows = [steps_of.time(lane.gpu, lane.window) for lane in gpus.lanes]
    codes = [codes_of[lane.gpu] for lane in gpus.lanes]
    most = min(_MOST_OF_ONE, _MOST_OF_ALL // max(len(gpus.lanes), 1))
    counted = gpus.each(count_by_name, gpus.lanes, windows, codes, same=(most,), keeps=True)
    rows = list(map(_Measured, gpus.lanes, steps, windows, codes, counted))
    # Only GPUs with measured steps count, if any has some, and with a relevant amount of work.
    rows = [row for row in rows if row.steps] or rows
    least = max(_STRAY_KERNELS_PART * max((row.counted.kernels for row in rows), default=0), 1)
    rows = [row for row in rows if row.counted.kernels >= least]
    kernels = _kernels_of(gpus, rows, names) if rows else None
    gpus.each(forget_counts, gpus.lanes, keeps=True)
    return kernels


def _kernels_of(gpus: PerGpu, rows: Sequence[_Measured], names: Sequence[str]) -> Kernels:
    """Return the kernels of some GPUs; ``names`` are by code."""
    span = sum(row.windows.total for row in rows)
    uses, flop = _add_work(gpus, _uses(gpus, rows, names, span), rows, names)
    uses = _add_activity(gpus, uses, rows, names)
    longest = _longest(rows, names, {use.name for use in uses})
    assert longest is not None
    computing = {use.name for use in uses if use.family != "communication"}
    longest_compute = _longest(rows, names, computing)
    peaks = {launch.name for launch in (longest, longest_compute) if launch is not None}
    listed = sorted(range(len(uses)), key=lambda at: (uses[at].name not in peaks, at))
    top = [uses[at] for at in sorted(listed[:_MOST_LISTED])]
    count = sum(use.count for use in uses)
    generations = [generation(row.lane.gpu.name, names) for row in rows]
    first = rows[0].lane.gpu.gpu, rows[0].lane.gpu.rank
    alone = [use for use in uses if {(on.gpu, on.rank) for on in use.by_gpu} == {first}]
    products = [use for use in uses if use.tensor_cores is not None]
    by_family = _summed(uses, span, lambda use: (use.family,))
    launches = zip(*(row.counted.launches for row in rows), strict=True)
    tiny, calls, delays = map(np.concatenate, launches)
    middles = [int(median(times)) if len(times) else None for times in (calls, delays)]
    by_precision = _summed(
        products, span, lambda use: (use.tensor_cores or "", precision_of(use.name))
    )
    return Kernels(
        steps=sum(len(row.steps) for row in rows),
        total_ns=span,
        count=count,
        distinct=len(uses),
        top=tuple(top),
        rest_count=count - sum(use.count for use in top),
        rest_ns=sum(use.total_ns for use in uses) - sum(use.total_ns for use in top),
        families=tuple(Family(*sums) for sums in by_family),
        products=tuple(Product(*sums) for sums in by_precision),
        has_tensor_cores=_all_have(generations, 7),
        has_tf32=_all_have(generations, 8),
        first_gpu_only=tuple(alone[:_MOST_OF_FIRST_GPU]) if len(rows) > 1 else (),
        launches=LaunchCost(_TINY_NS, len(tiny), int(tiny.sum()), *middles),
        longest=longest,
        longest_compute=longest_compute,
        flop=flop,
    )


def _longest(
    rows: Sequence[_Measured], names: Sequence[str], of: Collection[str]
) -> LongestLaunch | None:
    """Return the longest launch of some kernels; None where there are none."""
    found: list[LongestLaunch] = []
    for row in rows:
        gpu, by = row.lane.gpu, row.counted
        counts = np.array([names[code] in of for code in by.code.tolist()], bool)
        if not counts.any():
            continue
        at = int(np.where(counts, by.longest, -1).argmax())
        start, length = int(by.longest_start[at]), int(by.longest[at])
        step = next((s.step for s in row.steps if s.start_ns <= start < s.end_ns), None)
        name = names[int(by.code[at])]
        found.append(LongestLaunch(name, gpu.gpu, gpu.rank, start, length, step))
    return max(found, key=lambda launch: launch.duration_ns, default=None)


def _all_have(cards: Sequence[int | None], least: int) -> bool | None:
    """Return whether all cards are of a generation or later; None if unknown."""
    if any(card is not None and card < least for card in cards):
        return False
    return None if None in cards else True


def _uses(
    gpus: PerGpu, rows: Sequence[_Measured], names: Sequence[str], span: int
) -> list[KernelUse]:
    """Return every kernel, most time first."""
    on_gpus: dict[int, list[KernelOnGpu]] = defaultdict(list)
    sources = gpus.whole.once(read_sources)
    for row in rows:
        gpu, by = row.lane.gpu, row.counted
        columns = (by.code, by.count, by.total, by.median, by.longest)
        for code, *figures in zip(*(column.tolist() for column in columns), strict=True):
            on_gpus[code].append(KernelOnGpu(gpu.gpu, gpu.rank, *figures))
    middle = medians(gpus, [row.lane for row in rows], [row.counted for row in rows])
    uses = []
    for code, by_gpu in sorted(on_gpus.items()):
        name = names[code]
        family, total = family_of(name), sum(on.total_ns for on in by_gpu)
        uses.append(
            KernelUse(
                name=name,
                short=short_name(name),
                family=family,
                tensor_cores=on_tensor_cores(name, family),
                converts_layout=converts_layout(name),
                count=sum(on.count for on in by_gpu),
                total_ns=total,
                median_ns=middle[code],
                max_ns=max(on.max_ns for on in by_gpu),
                share=round(total / max(span, 1), 6),
                by_gpu=tuple(by_gpu),
                line=sources.get(name, ""),
            )
        )
    return sorted(uses, key=lambda use: (-use.total_ns, use.name))


def _add_work(
    gpus: PerGpu, uses: list[KernelUse], rows: Sequence[_Measured], names: Sequence[str]
) -> tuple[list[KernelUse], tuple[CountedFlop, ...]]:
    """Add the work of kernels that operators of known shapes launched; return it by GPU, too."""
    if Kind.OPERATOR not in gpus.trace.kinds:
        return uses, ()
    families = {use.name: use.family for use in uses}
    is_product = np.array([families.get(name) in PRODUCTS for name in names], np.bool_)
    lanes, _, windows, codes, _ = zip(*rows, strict=True)
    done = gpus.each(measure_work, lanes, windows, codes, same=(is_product,))
    code_of = {name: code for code, name in enumerate(names)}
    cards = {lane.gpu.name for lane in lanes}
    card = cards.pop() if len(cards) == 1 else ""
    work_of = {(lane.gpu.gpu, lane.gpu.rank): work for lane, work in zip(lanes, done, strict=True)}
    added = []
    for use in uses:
        code, by_gpu = code_of[use.name], []
        for on in use.by_gpu:
            work = work_of[on.gpu, on.rank]
            flop, traffic = float(work.flop[code]), float(work.traffic[code])
            by_gpu.append(replace(on, flop=flop or None, traffic_bytes=traffic or None))
        flop = sum(on.flop or 0 for on in by_gpu)
        traffic = sum(on.traffic_bytes or 0 for on in by_gpu)
        known = sum(int(work.known[code]) for work in done)
        # Of launches by other operators neither work nor time counts.
        is_known = known and (flop or traffic)
        line = roofline(flop, traffic, known, precision_of(use.name), card) if is_known else None
        added.append(replace(use, by_gpu=tuple(by_gpu), roofline=line))
    return added, tuple(
        CountedFlop(
            row.lane.gpu.gpu,
            row.lane.gpu.rank,
            len(row.steps),
            flop=float(work.flop.sum()),
            known=round(
                float(work.known[is_product].sum() / max(work.time[is_product].sum(), 1)), 4
            ),
        )
        for row, work in zip(rows, done, strict=True)
    )


def _add_activity(
    gpus: PerGpu, uses: list[KernelUse], rows: Sequence[_Measured], names: Sequence[str]
) -> list[KernelUse]:
    """Add what the card does during the kernels that take most time, where counters show it."""
    if not len(gpus.trace.nvml.activity):
        return uses
    lanes, _, windows, codes, _ = zip(*rows, strict=True)
    code_of = {name: code for code, name in enumerate(names)}
    chosen = [code_of[use.name] for use in uses[:_MOST_EXPLAINED]]
    found = measure_activity(gpus, lanes, codes, chosen)
    idle = [code for code, activity in found.items() if activity.does in ("waits", "few SMs")]
    alone: dict[tuple[int, int, int], int] = {}
    if idle:
        times = gpus.each(time_alone, lanes, windows, codes, same=(idle,))
        for lane, of_lane in zip(lanes, times, strict=True):
            for code, ns in zip(idle, of_lane, strict=True):
                alone[lane.gpu.gpu, lane.gpu.rank, code] = ns
    added = []
    for use in uses:
        code = code_of[use.name]
        by_gpu = (replace(on, alone_ns=alone.get((on.gpu, on.rank, code))) for on in use.by_gpu)
        added.append(replace(use, by_gpu=tuple(by_gpu), activity=found.get(code)))
    return added if found else uses


class KernelWork(Struct, frozen=True):
    """Work of the kernels of one GPU that start in some intervals, by code of the name."""

    flop: NDArray[np.float64]
    traffic: NDArray[np.float64]
    """Least bytes."""
    time: NDArray[np.int64]
    """Nanoseconds of all."""
    known: NDArray[np.int64]
    """Nanoseconds of those whose work is known."""


def measure_work(
    view: GpuShardView, windows: Intervals, codes: dict[int, int], is_product: Mask
) -> KernelWork:
    """Share the work of each operator among the kernels that were launched in it, by their time.

    Kernels that multiply matrices (``is_product``, by code of the name) share the work alone; the
    others of an operator, which convert or add, only where it has no such kernel.
    """
    ops, operators = view.operations, view.once(_read_operators)
    rows = np.flatnonzero(ops.events.kind == Kind.KERNEL)
    distinct, where = number_ids(ops.events.name[rows])
    code = np.array([codes.get(id, 0) for id in distinct.tolist()], np.int64).take(where)
    lengths = ops.end[rows] - ops.start[rows]
    operator = np.full(len(rows), NOBODY)
    if view.calls is not None and len(rows):
        issued_by = view.calls.issued_by(ops.events, rows)
        operator = view.calls.ranges_around(issued_by, operators)
    launched = operator != NOBODY
    chosen = np.where(launched, operator, 0)
    count = max(len(operators), 1)
    products = np.bincount(chosen, lengths * (launched & is_product[code]), count)
    weight = lengths * (launched & (is_product[code] | (products[chosen] == 0)))
    share = weight / np.maximum(np.bincount(chosen, weight, count), 1)[chosen]
    inside = windows.contains(ops.start[rows])
    size = len(is_product)

    def by_code(values: NDArray[Any]) -> NDArray[np.float64]:
        return np.bincount(code, values * inside, size).astype(np.float64)

    flop, traffic = operators.correlation, operators.bytes
    return KernelWork(
        flop=by_code(flop[chosen] * share if len(flop) else share),
        traffic=by_code(traffic[chosen] * share if len(traffic) else share),
        time=by_code(lengths).astype(np.int64),
        known=by_code(lengths * (weight > 0)).astype(np.int64),
    )


def _read_operators(shard: Shard) -> Events:
    """Read the operators whose work is known, in order of thread and start."""
    columns = ("start", "end", "process", "thread", "correlation", "bytes")
    return by_thread(shard.trace.events([Kind.OPERATOR], columns))


def _summed(
    uses: Sequence[KernelUse], span: int, key: Callable[[KernelUse], tuple[str, ...]]
) -> list[tuple[Any, ...]]:
    """Return keys, launches, nanoseconds and their share of the span, most time first."""
    sums: dict[tuple[str, ...], list[int]] = {}
    for use in uses:
        sums_of = sums.setdefault(key(use), [0, 0])
        sums_of[0] += use.count
        sums_of[1] += use.total_ns
    ordered = sorted(sums.items(), key=lambda item: -item[1][1])
    return [(*words, n, total, round(total / max(span, 1), 6)) for words, (n, total) in ordered]


_LENGTH_BITS: Final = 40
"""Number of bits for a kernel's nanoseconds: 18 minutes."""
_LONGEST: Final = (1 << _LENGTH_BITS) - 1
_PACKED: Final = "packed kernels"
_NOTHING: Final = np.empty(0, np.int64)
_ASKED: Final = 16
"""Number of lengths of each name in a query."""
_GPUS_AT_ONCE: Final = 512
"""GPUs that are asked at once."""

Codes = NDArray[np.int64]


class Counted(Struct, frozen=True, dict=True):
    """Kernels of one GPU that start in some intervals, by name; arrays of equal length.

    Attributes:
        code: of each name, in order.
        count: how many there are.
        total: nanoseconds of all.
        median: nanoseconds of the (lower) middle one.
        longest: nanoseconds of the longest one.
        longest_start: when that starts.
        launches: what their launching cost.
    """

    code: Codes
    count: NDArray[np.int64]
    total: Times
    median: Times
    longest: Times
    longest_start: Times
    launches: LaunchTimes

    @property
    def kernels(self) -> int:
        """Return the number of kernels over all names."""
        return int(self.count.sum())


def count_by_name(
    view: GpuShardView, windows: Intervals, codes: dict[int, int], most: int
) -> Counted:
    """Count the kernels of a GPU.

    Those that start in ``windows`` count; ``codes`` are by name id. The calls of ``most`` of them
    are looked up at most.
    """
    ops = view.operations
    rows = np.flatnonzero((ops.events.kind == Kind.KERNEL) & windows.contains(ops.start))
    lengths, launches = ops.end[rows] - ops.start[rows], _launch_times(view, rows, most)
    # The code of each kernel's name, and in the lower bits its length; in order.
    distinct, where = number_ids(ops.events.name[rows])
    code_of = np.array([codes[id] for id in distinct.tolist()], np.int64)
    packed = (code_of << _LENGTH_BITS).take(where)
    packed |= np.minimum(lengths, _LONGEST)
    sort_numbers(packed)
    packed = view.keep(_PACKED, packed)
    if not len(packed):
        return Counted(_NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, launches)
    edges = np.searchsorted(
        packed, np.arange((int(packed[-1]) >> _LENGTH_BITS) + 2) << _LENGTH_BITS
    )
    code = np.flatnonzero(np.diff(edges))
    first, counts = edges[code], np.diff(edges)[code]
    totals = np.add.reduceat(packed & _LONGEST, first)
    middle, last = (packed[first + at] & _LONGEST for at in ((counts - 1) // 2, counts - 1))
    peak = last[np.searchsorted(code, code_of)]
    at = np.flatnonzero(lengths >= peak.take(where))
    _, first = np.unique(code_of[where[at]], return_index=True)
    return Counted(code, counts, totals, middle, last, ops.start[rows[at[first]]], launches)


def medians(gpus: PerGpu, of: Sequence[HasGpu], counted: Sequence[Counted]) -> dict[int, int]:
    """Return the lower median of the nanoseconds of all kernels of some GPUs, by code."""
    codes, number = np.unique(np.concatenate([part.code for part in counted]), return_inverse=True)
    known = np.concatenate([part.median for part in counted])
    low, high = np.full(len(codes), _LONGEST), np.zeros(len(codes), np.int64)
    np.minimum.at(low, number, known)
    np.maximum.at(high, number, known)
    count = np.zeros(len(codes), np.int64)
    np.add.at(count, number, np.concatenate([part.count for part in counted]))
    wanted = (count - 1) // 2 + 1
    while len(left := np.flatnonzero(low < high)):
        asked = low[left, None] + (high - low)[left, None] * np.arange(_ASKED) // _ASKED
        no_longer = np.zeros(asked.shape, np.int64)
        for at in range(0, len(of), _GPUS_AT_ONCE):
            for part in gpus.each(
                _no_longer, of[at : at + _GPUS_AT_ONCE], same=(codes[left], asked)
            ):
                no_longer += part
        # A median lies above the last length of too few kernels, up to the next one.
        enough = no_longer >= wanted[left, None]
        first = np.where(enough.any(axis=1), enough.argmax(axis=1), _ASKED)
        rows = np.arange(len(left))
        above = np.where(first < _ASKED, asked[rows, np.minimum(first, _ASKED - 1)], high[left])
        below = asked[rows, np.maximum(first - 1, 0)] + 1
        low[left], high[left] = np.where(first > 0, below, asked[:, 0]), above
    return dict(zip(codes.tolist(), low.tolist(), strict=True))


def _no_longer(view: GpuShardView, codes: Codes, lengths: Times) -> NDArray[np.int64]:
    """Count the kernels of each name that are no longer than some lengths."""
    packed, names = view.kept(_PACKED), codes[:, None] << _LENGTH_BITS
    upto: NDArray[np.int64] = np.searchsorted(packed, names | lengths, "right")
    return upto - np.searchsorted(packed, names)


def forget_counts(view: GpuShardView) -> None:
    """Release what `count` keeps for `medians`."""
    view.keep(_PACKED, None)


_TINY_NS: Final = 5_000
"""Usual duration of a launching call: shorter kernels cannot keep a GPU fed."""
_MOST_OF_ONE: Final = 20_000
_MOST_OF_ALL: Final = 160_000
"""Maximum number of kernels whose calls are looked up, evenly spaced."""

Rows = NDArray[np.intp]


class LaunchTimes(NamedTuple):
    """Launch times of the kernels of one GPU."""

    tiny: Times
    """Nanoseconds of kernels too short to keep a GPU fed."""
    calls: Times
    """Nanoseconds of the calls that launched a sample of them."""
    delays: Times
    """Nanoseconds from those calls to kernels that a GPU started that was idle before the call."""


def _launch_times(view: GpuShardView, rows: Rows, most: int) -> LaunchTimes:
    """Measure the launches of kernels of a GPU; the calls of ``most`` of them are looked up."""
    ops, calls = view.operations, view.calls
    lengths = ops.end[rows] - ops.start[rows]
    tiny = lengths[lengths < _TINY_NS]
    if calls is None or not len(rows):
        return LaunchTimes(tiny, _NOTHING, _NOTHING)
    rows = rows[:: len(rows) // most + 1]
    issued_by = calls.issued_by(ops.events, rows)
    known = issued_by != NOBODY
    rows, issued_by = rows[known], issued_by[known]
    began = calls.start[issued_by]
    done = np.where(rows > 0, ops.reach[np.maximum(rows - 1, 0)], 0)
    delay = ops.start[rows] - began
    return LaunchTimes(tiny, calls.end[issued_by] - began, delay[(done <= began) & (delay > 0)])


_MOST_WORDS: Final = 12
_WORD: Final = r"\b(?:[A-Za-z_]\w*|[0-9]+)"
_PARAMETERS: Final = r"\([^()]*\)"
_WRITTEN_DIFFERENTLY: Final = {
    *("void", "const", "volatile", "true", "false", "0", "1", "auto", "std", "__1", "operator"),
    *("anonymous", "namespace", "unnamed", "lambda", "instance"),
}
"""Words of a C++ name that depend on the demangler."""


class Launches(Struct, frozen=True):
    """Kernel, and two launches of it: one in a steady step, to look at, and the longest.

    They are on its busiest GPU, or on that of the longest launch of all kernels if that is its.
    """

    kernel: KernelUse
    place: int
    """Rank by time, from 1."""
    gpu: int
    rank: int
    device: int
    """CUDA ordinal in that rank's process."""
    pattern: str
    """Regular expression that matches the kernel in the output of any demangler."""
    alike: int
    """Number of different kernels of the trace that it matches, this one included."""
    skip: int
    """Number of launches on that device that it matches before the one to look at."""
    step: int | None
    """Step that contains the launch; None without steps."""
    is_usual: bool
    """True if that step is about as long as the median."""
    from_start: bool
    """True if the trace holds the run from its beginning, so that all launches are counted."""
    why_not: str
    """Reason why Nsight Compute cannot profile it alone; empty if it can."""
    longest: LongestLaunch | None
    """Longest launch in the measured steps; ``start_ns`` counts from the trace's origin."""
    longest_skip: int | None
    """Number of launches before it, like ``skip``."""
    longest_compute: LongestLaunch | None
    """Longest launch of all kernels that compute, likewise, if this kernel has the longest of all
    and communicates."""
    compute_place: int | None
    """Rank by time of the kernel of ``longest_compute``."""
    issued: str = ""
    """Call that issued the longest launch: when, on which thread, in which phase, range and line;
    empty where calls were not recorded."""
    findings: tuple[Finding, ...] = ()
    """Findings that name the kernel; of one that communicates, what its GPUs wait for."""


def find_launches(
    trace: Trace, analysis: Analysis, which: str, progress: Progress | None = None
) -> Launches:
    """Find a kernel by its name, a part of it, or its rank by time (``1`` takes most).

    Raises UsageError where there is none.
    """
    index, use = _choose(analysis, trace.title, which)
    why_not = ""
    if are_of_hip(trace, trace.events([Kind.API], ["name"]).name):
        why_not = "ran on an AMD GPU, which Nsight Compute cannot profile; rocprof-compute can"
    elif use.family == "communication":
        why_not = (
            "waits for other GPUs and cannot be profiled alone: ncu would hang; gputrace analyze "
            "says which rank it waits for"
        )
    assert analysis.kernels is not None
    launch, computing = analysis.kernels.longest, analysis.kernels.longest_compute
    has_longest, named = launch.name == use.name, [use.name for use in analysis.kernels.top]
    if not has_longest or computing == launch:
        computing = None
    of_all = (launch.gpu, launch.rank) if has_longest else None
    busiest = max(use.by_gpu, key=lambda on: ((on.gpu, on.rank) == of_all, on.total_ns))
    totals = next(t for t in analysis.gpus if (t.gpu, t.rank) == (busiest.gpu, busiest.rank))
    key = totals.gpu, totals.rank
    operations = read_operations(trace, progress)
    ops = next(gpu for gpu in operations if (gpu.gpu.gpu, gpu.gpu.rank) == key)
    pattern = pattern_of(use.name)
    of_process = ops.events.process == ops.gpu.process
    kernels = ops.events.select((ops.events.kind == Kind.KERNEL) & of_process)
    names = trace.names(distinct_ids(kernels.name))
    alike = {id for id, name in names.items() if re.search(pattern, _in_words(name))}
    ours = {id for id, name in names.items() if name == use.name}
    launches = kernels.select(np.isin(kernels.name, sorted(alike)))
    mine = np.flatnonzero(np.isin(launches.name, sorted(ours)))
    steady = [s for s in analysis.step_list if (s.gpu, s.rank, s.phase) == (*key, "steady")]
    steady.sort(key=lambda step: step.start_ns)
    place, step, is_usual = _typical_launch(launches.start[mine], steady)
    measured = time_of(steady) if steady else union([0], [np.iinfo(np.int64).max])
    is_longest = launches.end[mine] - launches.start[mine] == busiest.max_ns
    peak = mine[is_longest & measured.contains(launches.start[mine])][:1]
    longest = None
    if len(peak):
        start = int(launches.start[peak[0]])
        within = next((s.step for s in steady if s.start_ns <= start < s.end_ns), None)
        longest = LongestLaunch(use.name, *key, start, busiest.max_ns, within)

    def from_origin(launch: LongestLaunch | None) -> LongestLaunch | None:
        return launch and replace(launch, start_ns=launch.start_ns - analysis.origin_ns)

    return Launches(
        kernel=use,
        place=index,
        gpu=busiest.gpu,
        rank=busiest.rank,
        device=totals.device,
        pattern=pattern,
        alike=len({names[id] for id in alike}),
        skip=int(mine[place]) if len(mine) else 0,
        step=step,
        is_usual=is_usual,
        from_start=ops.coverage.from_the_start,
        why_not=why_not,
        longest=from_origin(longest),
        longest_skip=int(peak[0]) if len(peak) else None,
        longest_compute=from_origin(computing),
        compute_place=1 + named.index(computing.name) if computing else None,
        issued=_issued(trace, launches.having("process", "correlation").select(peak), analysis),
        findings=tuple(_concerning(analysis, use)),
    )


def _concerning(analysis: Analysis, use: KernelUse) -> Iterator[Finding]:
    """Yield the findings about a kernel, and that about what its GPUs mostly wait for in it."""
    waits = Counter[str]()
    for row in analysis.ledger if use.family == "communication" else ():
        waits[row.cause] += row.ns * row.waits
    most = max(waits, key=lambda cause: waits[cause], default="")
    for finding in analysis.findings:
        if finding.id == most or use.short in "; ".join(finding.details):
            yield finding


_USUAL_RANGE: Final = 0.1
"""Difference of a step from the median, as a fraction of it, up to which it is a typical one."""


def _typical_launch(starts: Times, steady: Sequence[Step]) -> tuple[int, int | None, bool]:
    """Return the first of some launches in a measured step of a GPU that is about as long as their
    median, the number of that step, and True: near the start, so that few launches are skipped.
    Else the first in any measured step, or the very first one and None.
    """
    lengths = np.array([step.end_ns - step.start_ns for step in steady])
    at = np.searchsorted([step.start_ns for step in steady], starts, "right") - 1
    usual = median(lengths) if steady else 0
    is_usual = np.append(abs(lengths - usual) <= _USUAL_RANGE * usual, False)
    for rows in (np.flatnonzero(is_usual[at]), np.flatnonzero(at >= 0)):
        if len(rows):
            row = int(rows[0])
            return row, steady[int(at[row])].step, bool(is_usual[at[row]])
    return 0, None, False


_NEAR_NS: Final = 1_000_000
"""Time from a launch within which a sample in the same phase says where the program was."""


def _issued(trace: Trace, launched: Events, analysis: Analysis) -> str:
    """Say which call issued one kernel, if any, and where the host was."""
    calls = read_calls(trace)
    if calls is None or not len(launched) or (call := int(calls.issued_by(launched)[0])) == NOBODY:
        return ""
    start, end, name = int(calls.start[call]), int(calls.end[call]), int(calls.name[call])
    pair, shard = calls.threads[int(calls.thread[call])], Shard(trace)
    at = (start - analysis.origin_ns) / 1e9
    text = trace.names([name])[name].partition("_v")[0]
    text += f" at {at:.6f} s (thread {pair[1] & 0xFFFFFFFF})"
    host = read_host_state(shard)
    text = ", ".join([text, *host.during(pair, start, end)])
    ranges = read_host(trace, pair[0], Kind.RANGE, Window(start, end))
    text += range_of(trace, ranges, pair, start, end)
    lines = read_python_lines(shard)
    thread = None if lines is None else lines.teller(pair)
    if lines is None or thread is None:
        return f"{text}; record with --python to name the line"
    nearest = int(np.argmin(abs(lines.times[thread] - start)))
    sampled = int(lines.times[thread][nearest])
    apart, phases = sampled - start, host.phases.get(pair[0])
    parted = phases and any(np.diff(of.contains([start, sampled]))[0] for of in phases.of.values())
    if not start <= sampled <= end and (parted or abs(apart) > _NEAR_NS):
        return text
    when = f"{format_ns(abs(apart))} {'later' if apart > 0 else 'earlier'}"
    line = lines.text[int(lines.names[thread][nearest])]
    return f"{text}; the nearest sample of the program, {when}, is at {line}"


def pattern_of(name: str) -> str:
    """Return an expression for a kernel's name, followed by the words of its template arguments.

    What is in parentheses is left out: different tools write parameters differently (ncu has
    ``const T2 *`` where others have ``c10::BFloat16 const*``), and numbers, as ``(int)4``. It needs
    nothing that any two kinds of regular expressions disagree on.
    """
    function = short(name)
    clear = _in_words(name)
    rest, nested = clear[clear.find(function) + len(function) :], 1
    while nested:  # Parentheses within others are taken out first.
        rest, nested = re.subn(_PARAMETERS, "", rest)
    words = [word for word in re.findall(_WORD, rest) if word not in _WRITTEN_DIFFERENTLY]
    whole = f"(^|[^A-Za-z0-9_]){re.escape(function)}([^A-Za-z0-9_]|$)"
    return ".*".join([whole, *words[:_MOST_WORDS]])


def _in_words(name: str) -> str:
    """Return a name in which a pattern matches what it matches in the demangled one."""
    return " ".join(words_of_mangled(name)) if name.startswith("_Z") else name


def _choose(analysis: Analysis, title: str, which: str) -> tuple[int, KernelUse]:
    top = analysis.kernels.top if analysis.kernels is not None else ()
    if not top:
        raise InputError(title, "no kernels in it; record a run on a GPU")
    if which == "longest":
        matches = [max(enumerate(top, 1), key=lambda pair: pair[1].max_ns)]
    elif which.isdecimal():
        matches = [(i, use) for i, use in enumerate(top, 1) if i == int(which)]
    else:
        # Kernels of exactly that name, else those that contain it; the longest first. Tables may
        # cut names in the middle.
        pairs, part = list(enumerate(top, 1)), ".*".join(map(re.escape, which.split("…")))
        matches = [pair for pair in pairs if which in (pair[1].name, pair[1].short)]
        matches = matches or [
            (i, use) for i, use in pairs if re.search(part, f"{use.short} {use.name}", re.I)
        ]
    if not matches:
        shown = ", ".join(f"{i} {use.short}" for i, use in enumerate(top[:5], 1))
        raise UsageError(
            f"{title}: no kernel {which!r} among the {len(top)} that take most time: {shown}, …"
        )
    return matches[0]
