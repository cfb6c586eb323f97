"""Kinds of recordings that do not train: repeated passes, with what shows that they are no layers,
or one pass.

What repeats in a network's kernels is its layers until an input, a read of the host's or a call of
the network lies between any two repetitions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gputrace.analyzers.cuda_api_calls import NOBODY, Call, CudaApiCalls, by_thread, thread_keys
from gputrace.analyzers.grouping import median, quantile
from gputrace.analyzers.kernel_names import PRODUCTS, family_of, is_optimizer
from gputrace.analyzers.operations import GpuOperations, OperationClass
from gputrace.analyzers.steps.inferred import (
    ALIKE_COSINE,
    BACKWARD,
    FOREIGN_PART,
    LEAST_INPUT_BYTES,
    Rows,
    alike_part,
    lead_of,
    tokens_of,
    window_starts,
)
from gputrace.analyzers.steps.rollouts import (
    BACKWARDS,
    UPDATES,
    NamedRanges,
    begin_turns,
    generates,
)
from gputrace.analyzers.steps.windows import StepWindows
from gputrace.model.events import Column, Kind, Mask, distinct_ids, is_among
from gputrace.model.trace import Trace

_FEWEST_NAMES: Final = 5
"""Fewer different kernels are no network."""
_SHOWING_PART: Final = 0.9
"""Part of the repetitions that must have what shows that they are no layers."""
_REPEATED_KERNELS_PART: Final = 0.6
"""Part of the kernels that repetitions must contain."""
_MOST_INPUTS: Final = 4
"""Copies of a kilobyte and more before each repetition that may bring a batch; more are weights."""
_MOST_LAYERS: Final = 200
_GRAMS: Final = 8
"""Kernels in a row by which layers are found in which each kernel is met several times."""
_ALIKE_PASSES_PART: Final = 0.95
_LATER_PASS_PART: Final = 0.45
_COMMON_TAIL: Final = 16
"""Part of the kernels in which two passes must be alike, least part of a recording that the later
one has, and kernels at its end that the earlier must have too."""
_SAME_PASS_PART: Final = 0.75
"""Part of the kernels in which two windows are alike that hold the same pass."""
_WEIGHT_UPLOADS: Final = 5
"""Copies of a kilobyte and more before the first product from which they upload the weights."""
_FILLS: Final = r"(?i)fill|distribution|random|philox|arange"
"""Kernels that make a network's weights, or nothing: however often they run, they compute none."""
_MOST_READS: Final = 3
"""Copies to the host by which a program reads one token; more read several."""
_PROMPT_NS: Final = 100_000
"""Maximum time from an operation's issue to its start on a GPU that had nothing to do."""
_TORCH: Final = "at::native|^triton_[a-z]+_fused_"

_LAUNCH: Final = "a graph launch"
"""Evidence that repetitions are turns."""


def find_turns(
    trace: Trace,
    gpus: Sequence[GpuOperations],
    calls: CudaApiCalls | None,
    ranges: NamedRanges,
    fed: StepWindows | None,
) -> StepWindows | None:
    """Return what a rank repeats that is not shown to train, or the one pass that it ran.

    ``fed`` is what input copies part.
    """
    busiest, repeated = max(gpus, key=len), fed
    if all(re.search(_FILLS, name) for name in _kernel_names(trace, busiest)):
        return None
    launched = infer_launches(busiest)
    if launched is not None and (fed is None or len(launched) > len(fed)):
        return _of_kind(trace, busiest, launched, _LAUNCH)
    is_network = runs_network(trace, busiest)
    if repeated is None:
        repeated = infer_iterations(busiest, _GRAMS if is_network else 1)
        if repeated is not None and calls is not None:
            repeated = None if _are_layers(trace, busiest, calls, repeated) else repeated
    if not is_network:
        return repeated
    passes = _passes_in_windows(busiest)
    if passes is not None and (repeated is None or len(repeated) <= len(passes)):
        if any(re.search(BACKWARD, name) for name in _kernel_names(trace, busiest)):
            return replace(passes, kind="training", reason="one forward and backward pass a window")
        return _of_kind(trace, busiest, passes, "one window of the recording")
    shown = None if repeated is None else _shown(busiest, calls, repeated)
    if repeated is None or shown is None:
        if (replayed := infer_replays(busiest)) is not None:
            return _of_kind(trace, busiest, replayed, _LAUNCH)
        return _find_pass(trace, gpus, repeated, calls, ranges)
    return _of_kind(trace, busiest, repeated, shown) if shown else None


def runs_network(trace: Trace, operations: GpuOperations) -> bool:
    """Return whether a network's kernels run: products of matrices among several others."""
    names = _kernel_names(trace, operations)
    families = {family_of(name) for name in names}
    return len(names) >= _FEWEST_NAMES and not families.isdisjoint(PRODUCTS)


def _passes_in_windows(operations: GpuOperations) -> StepWindows | None:
    """Return the windows of a recording as steps, where nearly all run the same kernels, as windows
    of one pass each do; None if they do not, or there is only one.

    What lies before the first operation of a window is not known.
    """
    recorded = operations.recorded
    place = np.searchsorted(operations.start, (recorded.start, recorded.end))
    if len(recorded) < 2 or (place[0] >= place[1]).any():
        return None
    kernels, names = operations.events.kind == Kind.KERNEL, operations.events.name
    runs = [
        Counter(names[begin:end][kernels[begin:end]].tolist()) for begin, end in place.T.tolist()
    ]
    middle = sorted(runs, key=Counter.total)[len(runs) // 2]
    same = [
        (run & middle).total() >= _SAME_PASS_PART * max(run.total(), middle.total()) for run in runs
    ]
    if not middle or np.mean(same) < _SHOWING_PART:
        return None
    return StepWindows(
        rank=operations.gpu.rank,
        start=operations.start[place[0]],
        end=operations.reach[place[1] - 1],
        busy_from=operations.start[place[0]],
        source="inferred",
        kind="iterations",
        confidence=0.6,
        reason="",
    )


def _kernel_names(trace: Trace, operations: GpuOperations) -> list[str]:
    return list(trace.names(operations.kernel_names).values())


def _shown(
    operations: GpuOperations, calls: CudaApiCalls | None, windows: StepWindows
) -> str | None:
    """Return what shows that repetitions of a network's kernels are no layers; nothing if they may
    be, None if they are within a pass.
    """
    events, count = operations.events, len(windows)
    turn = np.searchsorted(windows.start, operations.start, "right") - 1
    inside = (turn >= 0) & (operations.start < windows.end[np.maximum(turn, 0)])
    kernels = is_among(events.kind, (Kind.KERNEL, Kind.GRAPH))
    work = (events.end - events.start) * kernels
    if work[inside].sum() < _REPEATED_KERNELS_PART * work.sum():
        return None

    def each(rows: Mask) -> NDArray[np.intp]:
        return np.bincount(turn[rows & inside], minlength=count)

    inputs = each((events.kind == Kind.COPY_H2D) & (events.bytes >= LEAST_INPUT_BYTES))
    if np.mean((inputs > 0) & (inputs <= _MOST_INPUTS)) >= _SHOWING_PART:
        return "an input copy"
    if np.mean(each(events.kind == Kind.GRAPH) > 0) >= _SHOWING_PART:
        return _LAUNCH
    middle = int(np.argsort(windows.lengths)[count // 2])
    names = events.name[kernels & inside & (turn == middle)]
    if find_loop(names, _GRAMS) is None:
        return None
    # What repeats around layers is a pass if the host takes part in each,
    joined = each(is_among(events.kind, (Kind.COPY_H2D, Kind.COPY_D2H))) > 0
    if calls is not None:
        waits = np.sort(calls.end[calls.sort == Call.SYNC])
        joined |= np.diff(np.searchsorted(waits, np.append(windows.start, windows.end[-1]))) > 0
    if np.mean(joined) >= _SHOWING_PART:
        return "layers within, and a copy or wait of the host,"
    # or if nothing comes after the last, as a head does after the last layer.
    last = events.name[kernels & (operations.start >= windows.start[-1])]
    before = events.name[kernels & (turn == count - 2)]
    return "layers within, and nothing beside," if np.array_equal(last, before) else ""


def _of_kind(
    trace: Trace, operations: GpuOperations, windows: StepWindows, shown: str
) -> StepWindows:
    names = _kernel_names(trace, operations)
    reason = f"{shown} once an iteration; no optimizer and no backward pass shows"
    kind = "iterations"
    tokens = 0
    if generates(trace, operations, np.array([len(operations)]))[0]:
        kind, reason = "generation", f"{shown} once an iteration, and products for a token each"
        reads = operations.start[operations.events.kind == Kind.COPY_D2H]
        each = median(np.diff(np.searchsorted(reads, windows.start)))
        tokens = 1 if 0 < each <= _MOST_READS else 0
    elif shown == _LAUNCH and any(map(is_optimizer, names)):
        kind, reason = "training", f"{shown} once an iteration, and an optimizer before its capture"
    elif any(re.search(_TORCH, name) for name in names):
        kind = "evaluation"
    return replace(windows, kind=kind, reason=reason, tokens=tokens)


def _are_layers(
    trace: Trace, operations: GpuOperations, calls: CudaApiCalls, windows: StepWindows
) -> bool:
    """Return whether what repeats lies within one iteration of the program: in one launch of a CUDA
    graph, in one call of a network, or in one marked step without a copy or a graph for each
    repetition.
    """
    first, last = np.searchsorted(operations.start, (windows.start[0], windows.end[-1]))
    events = operations.events.select(slice(first, last))
    issued_by = calls.issued_by(events)
    by, counts = np.unique(issued_by[issued_by != NOBODY], return_counts=True)
    if not len(by) or counts.max() >= _SHOWING_PART * counts.sum():
        return bool(len(by))
    if np.bincount(_calls_of_networks(trace, calls, by)).max(initial=0) >= _SHOWING_PART * len(by):
        return True
    copies = np.count_nonzero(events.kind == Kind.COPY_H2D)
    if Kind.STEP not in trace.kinds or max(copies, counts.sum() - len(by)) >= len(windows):
        return False
    steps = trace.events([Kind.STEP], ["start", "end"])
    steps = steps.select(np.argsort(steps.start, kind="stable"))
    place = np.searchsorted(steps.start, calls.start[by], "right") - 1
    place = place[(place >= 0) & (calls.start[by] < steps.end[place])]
    return bool(np.bincount(place, minlength=1).max() >= _SHOWING_PART * len(by))


def _calls_of_networks(trace: Trace, calls: CudaApiCalls, by: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the number of the network's call in which each CUDA call was made that was in one.

    Stretches within modules follow one another without a pause until the network returns.
    """
    if Kind.MODULE not in trace.kinds:
        return np.empty(0, np.intp)
    stretches = by_thread(trace.events([Kind.MODULE], ("start", "end", "process", "thread")))
    keys = thread_keys(stretches)
    begins = (np.diff(keys) != 0) | (stretches.start[1:] > stretches.end[:-1])
    around = calls.ranges_around(by, stretches)
    numbers: NDArray[np.intp] = np.append(0, np.cumsum(begins))[around[around != NOBODY]]
    return numbers


def _find_pass(
    trace: Trace,
    gpus: Sequence[GpuOperations],
    layers: StepWindows | None,
    calls: CudaApiCalls | None,
    ranges: NamedRanges,
) -> StepWindows | None:
    """Return the one pass that a rank ran, with the repeated layers in it, if there are some.

    None if all of it may have run twice.
    """
    operations = max(gpus, key=len)
    kernels = operations.events.name[operations.events.kind == Kind.KERNEL]
    if layers is None and _is_double(kernels):
        return None
    if layers is not None:
        halves = 2 * (find_seams(np.searchsorted(operations.start, layers.busy_from)) + 1)
        if len(layers) > _MOST_LAYERS or (np.abs(halves - len(layers)) <= 1).any():
            return None
    begin = _after_uploads(trace, operations)
    first = int(operations.start[begin])
    start = first if begin or calls is None else _begin_of_mark(trace, operations, calls)
    names = _kernel_names(trace, operations)
    texts = ranges.training
    parts = ["forward pass"]
    if any(re.search(BACKWARD, name) for name in names) or any(
        re.search(f"(?i){BACKWARDS}", text) for text in texts
    ):
        parts = ["forward and backward pass"]
    if any(map(is_optimizer, names)) or any(re.search(f"(?i){UPDATES}", text) for text in texts):
        parts = ["training step"]
    within = (
        ""
        if layers is None or len(layers) < 3
        else f"; what repeats {len(layers)} times in it is a part of it"
    )
    return StepWindows(
        rank=operations.gpu.rank,
        start=np.array([start]),
        end=np.array([max(int(gpu.reach[-1]) for gpu in gpus)]),
        busy_from=np.array([first]),
        source="inferred" if start == first else "profiler",
        kind="pass",
        confidence=0.6,
        reason=f"one {parts[0]}: no input, update or mark parts the kernels{within}",
    )


def _begin_of_mark(trace: Trace, operations: GpuOperations, calls: CudaApiCalls) -> int:
    """Return when the first operation starts; or the only marked step that it was issued in, if it
    started as soon as it was issued: until then the GPU waited for the host.
    """
    first = int(operations.start[0])
    marks = trace.events([Kind.STEP], ["start", "end"])
    by = int(calls.issued_by(operations.events, slice(1))[0])
    if len(marks) != 1 or by == NOBODY or first > calls.end[by] + _PROMPT_NS:
        return first
    start, end = int(marks.start[0]), int(marks.end[0])
    return start if start <= calls.start[by] < end else first


def settle_kind(
    trace: Trace, operations: GpuOperations, windows: StepWindows, ranges: NamedRanges
) -> StepWindows:
    """Return steps that are named as training by what ran in them: reinforcement learning if it is
    named, or if most generate; and no training where a network of PyTorch shows, but nothing of a
    backward pass or an update.
    """
    if windows.kind in ("training", "rl") and ranges.reinforces:
        return replace(windows, kind="rl", reason=f"{windows.reason}; ranges of rollouts")
    if windows.kind != "training":
        return windows
    names = _kernel_names(trace, operations)
    trains = bool(ranges.training) or any(
        re.search(BACKWARD, name) or is_optimizer(name) for name in names
    )
    turns = generates(trace, operations, np.searchsorted(operations.start, windows.end))
    if trains and begin_turns(turns) is not None and turns.mean() >= _SHOWING_PART:
        return replace(windows, kind="rl", reason=f"{windows.reason}; tokens are generated in each")
    is_whole = not is_among(operations.events.kind, (Kind.GRAPH,)).any()
    is_known = is_whole and runs_network(trace, operations)
    if trains or windows.source not in ("nvtx", "profiler") or not is_known:
        return windows
    if not any(re.search(_TORCH, name) for name in names):
        return windows
    reason = f"{windows.reason}; no optimizer and no backward pass shows"
    return replace(_of_kind(trace, operations, windows, ""), reason=reason)


def _is_double(names: Column) -> bool:
    """Return whether the later of two passes has the kernels of the earlier, one by one."""
    for length in range(max(int(_LATER_PASS_PART * len(names)), _COMMON_TAIL), len(names) // 2 + 1):
        earlier, later = names[-2 * length : -length], names[-length:]
        if (
            np.array_equal(earlier[-_COMMON_TAIL:], later[-_COMMON_TAIL:])
            and np.mean(earlier == later) >= _ALIKE_PASSES_PART
        ):
            return True
    return False


def _after_uploads(trace: Trace, operations: GpuOperations) -> int:
    """Return the row after the copies that upload a network before its first product, 0 without."""
    events = operations.events
    kernels = np.flatnonzero(operations.classes == OperationClass.COMPUTE)
    names = trace.names(distinct_ids(events.name[kernels]))
    products = [id for id, name in names.items() if family_of(name) in PRODUCTS]
    first = int(np.argmax(np.isin(events.name, products)))
    copies = (events.kind == Kind.COPY_H2D) & (events.bytes >= LEAST_INPUT_BYTES)
    rows = np.flatnonzero(copies[:first])
    return int(rows[-1]) + 1 if len(rows) >= _WEIGHT_UPLOADS else 0


_LEAST_REPEATS: Final = 3
_LEAST_ALIKE: Final = 10
"""Turns of a loop; and of one that runs a single kernel, which may be a test repeated by hand."""
_MOST_NAMES: Final = 200
_MOST_TRIED: Final = 20
_UNEVEN_PART: Final = 0.25
"""Usual deviation of the distances from their median, as a part of it, that is no loop."""
_LOOP_KERNELS_PART: Final = 0.6
"""Part of the kernels that the loop must contain."""


def infer_iterations(operations: GpuOperations, grams: int = 1) -> StepWindows | None:
    """Find the outermost loop in the stream of kernels; of one kernel, by what is between."""
    is_kernel = is_among(operations.events.kind, (Kind.KERNEL, Kind.GRAPH))
    kernels = np.flatnonzero(is_kernel)
    names = operations.events.name[kernels]
    if len(kernels) >= _LEAST_ALIKE and (names == names[0]).all():
        kinds = np.where(is_kernel, Kind.KERNEL, operations.events.kind).astype(np.intp)
        likeness = _likeness(kinds, kernels, int(kinds.max()) + 1) if _is_even(kernels) else 0.0
        return _repeat_windows(operations, kernels, likeness) if likeness >= ALIKE_COSINE else None
    loop = find_loop(names, grams)
    return None if loop is None else _repeat_windows(operations, kernels[loop[0]], loop[1])


_LAUNCHED_PART: Final = 0.5
"""Part of the GPU's work that graphs must do to be the loop."""


def infer_launches(operations: GpuOperations) -> StepWindows | None:
    """Find turns that launch graphs after the host has read what the turn before computed."""
    events = operations.events
    graphs = np.flatnonzero(events.kind == Kind.GRAPH)
    lengths = events.end - events.start
    reads = np.cumsum(events.kind == Kind.COPY_D2H)[graphs]
    cuts = graphs[np.diff(reads, prepend=-1) > 0]
    if len(cuts) < _LEAST_REPEATS or lengths[graphs].sum() < _LAUNCHED_PART * lengths.sum():
        return None
    return _repeat_windows(operations, cuts, 1.0)


def infer_replays(operations: GpuOperations) -> StepWindows | None:
    """Find the launches of one graph that does most of the work from the first of them on."""
    events = operations.events
    graphs = np.flatnonzero(events.kind == Kind.GRAPH)
    if len(graphs) < _LEAST_REPEATS:
        return None
    lengths = events.end - events.start
    numbers = np.unique(events.name[graphs], return_inverse=True)[1]
    cuts = graphs[numbers == np.bincount(numbers, lengths[graphs]).argmax()]
    least = _LAUNCHED_PART * lengths[cuts[0] :].sum()
    if len(cuts) < _LEAST_REPEATS or lengths[cuts].sum() < least:
        return None
    return _repeat_windows(operations, cuts, 1.0)


def find_loop(ids: Column, grams: int = 1) -> tuple[Rows, float] | None:
    """Return where the rarest kernel cuts a stream of name ids into equal stretches, and how alike
    these are; None if none does.

    If none does by itself, one may with the kernels before it, up to as many as ``grams`` in all.
    """
    names = np.unique(ids, return_inverse=True)[1]
    tokens, length = names, 1
    while len(names) >= 2 * _LEAST_REPEATS * length:
        cuts, likeness = _cut_evenly(names, tokens)
        if len(cuts):
            seams = find_seams(cuts)
            period = int(seams[1] - seams[0]) if len(seams) > 1 else 0
            if 1 < period == seams[0] + 1 and (np.diff(seams) == period).all():
                cuts = cuts[np.append(0, seams + 1)]
            return cuts, likeness
        if length >= grams:
            break
        pairs = np.append(np.full(length, -1), tokens[:-length]) * (int(tokens.max()) + 1) + tokens
        tokens, length = np.unique(pairs, return_inverse=True)[1], 2 * length
    return None


def _cut_evenly(names: Rows, tokens: Rows) -> tuple[Rows, float]:
    """Return where the rarest token cuts a stream into stretches of the same names; nowhere if none
    does.
    """
    nowhere, tried = np.empty(0, np.intp), 0
    counts, kinds = np.bincount(tokens), int(names.max()) + 1
    candidates = np.argsort(counts, kind="stable")
    for token in candidates[counts[candidates] >= _LEAST_REPEATS][:_MOST_NAMES].tolist():
        cuts = np.flatnonzero(tokens == token)
        if not _is_even(cuts):
            continue
        tried += 1
        if tried > _MOST_TRIED:
            break
        likeness = _likeness(names, cuts, kinds)
        if likeness >= ALIKE_COSINE:
            return cuts, likeness
    return nowhere, 0.0


def find_seams(cuts: Rows) -> Rows:
    """Return the stretches between cuts that are longer or shorter than usual, as those are that
    hold the end of one pass over all layers and the beginning of the next.
    """
    between = np.diff(cuts)
    usual = median(between)
    return np.flatnonzero(np.abs(between - usual) > FOREIGN_PART * usual + 1)


def _is_even(cuts: Rows) -> bool:
    """Return whether the distances are mostly alike: a cheap check before looking inside."""
    between = np.diff(cuts)
    usual = median(between)
    return bool(usual > 1 and median(np.abs(between - usual)) <= _UNEVEN_PART * usual)


def _likeness(names: NDArray[np.intp], cuts: Rows, kinds: int) -> float:
    """Return how alike the segments between the cuts are, 0 to 1; 0 if they cover too little."""
    inside = names[cuts[0] : cuts[-1]]
    if len(inside) < _LOOP_KERNELS_PART * len(names) or len(inside) < 2 * (len(cuts) - 1):
        return 0.0
    stretch = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
    table = np.bincount(stretch * kinds + inside, minlength=(len(cuts) - 1) * kinds)
    table = table.reshape(len(cuts) - 1, kinds).astype(float)
    usual = median(table, axis=0)
    norms = np.linalg.norm(table, axis=1) * np.linalg.norm(usual)
    cosines = np.divide(table @ usual, norms, out=np.zeros(len(table)), where=norms > 0)
    return quantile(cosines.tolist(), 0.1)


def _repeat_windows(operations: GpuOperations, cuts: Rows, likeness: float) -> StepWindows:
    """Return the windows from cut to cut, and from the last one if the loop ends in the recording.

    Windows begin where the loop does, if other work follows it. Else the last of them ends with the
    recording, if the loop began early enough before the first cut.
    """
    tokens = tokens_of(operations)
    stop = int(cuts[-1]) + int(median(np.diff(cuts)))
    lead = lead_of(tokens, cuts)
    if not is_among(operations.events.kind[stop:], (Kind.KERNEL, Kind.GRAPH)).any():
        # What came before the loop may have ended as its turns do.
        missing = max(stop - len(tokens), 0)
        lead = missing if missing <= lead else 0
    cuts, stop = cuts - lead, stop - lead
    starts = window_starts(operations, cuts)
    ends, last = starts[1:], tokens[cuts[-1] : stop]
    if stop <= len(tokens) and alike_part(tokens[cuts[-2] : cuts[-1]], last) >= ALIKE_COSINE:
        ends = np.append(ends, operations.reach[cuts[-1] + len(last) - 1])
    count = len(ends)
    reason = "one kernel cuts the stream into stretches alike; no optimizer, no input copy shows"
    return StepWindows(
        rank=operations.gpu.rank,
        start=starts[:count],
        end=ends,
        busy_from=operations.start[cuts[:count]],
        source="inferred",
        kind="iterations",
        confidence=round(0.5 * likeness, 2),
        reason=reason,
    )
