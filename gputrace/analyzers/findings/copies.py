"""Copies of each GPU, by direction and memory of the host, and findings about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from gputrace.analyzers.device_metrics import memory_peak_of
from gputrace.analyzers.findings.facts import Facts, severity_of
from gputrace.analyzers.gpu_links import bandwidth, slot_rate
from gputrace.analyzers.gpu_shards import GpuShardView
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.operations import Gpu, OperationClass
from gputrace.analyzers.steps.kinds import runs_network
from gputrace.model.events import Events, Kind, Mask, Memory, distinct_ids
from gputrace.model.intervals import Intervals, union
from gputrace.model.results import CopyUse, Finding
from gputrace.model.struct import Struct
from gputrace.model.trace import Trace
from gputrace.units import format_ns

_OVERLAP_COPIES: Final = {
    "pytorch": "copy the next batch while this one computes: {pin}"
    ".to(device, non_blocking=True) on a side stream",
    "tensorflow": "prefetch to the GPU (tf.data.experimental.prefetch_to_device)",
    "jax": "put the next batch on the device (jax.device_put) while this one computes",
}
_COPY_LESS: Final = "copy less: smaller types, decoding on the GPU, weights that stay on the GPU"


def h2d_exposed(facts: Facts) -> Iterator[Finding]:
    """Host-to-device copies run with nothing beside them.

    Cost: class `h2d`, less what `h2d-pageable` costs; without steps, less copies of weights before
    the first kernel.

    Wrong if: the step is no shorter with the copies removed (one batch kept on the GPU).
    """
    pinned = is_pinned(facts, "h2d")
    source = "" if pinned else " from pinned memory"
    if facts.trains:
        how = _OVERLAP_COPIES.get(
            facts.framework, f"copy the next batch{source} while this one computes"
        ).format(pin="" if pinned else "pin_memory=True, ")
    else:
        how = f"copy the next data{source} on a side stream during computation"
    if pinned:
        how += " (its memory is pinned already)"
    yield from facts.costly(
        "h2d-exposed",
        "host-to-device copies not hidden by other work take {cost}",
        f"{how}; {_COPY_LESS}",
    )


_READ_LESS: Final = (
    "read back less: reduce on the GPU first, read rarely{pinned}, on a side stream "
    "(non_blocking=True)"
)
_MOVE_LESS: Final = (
    "copy less within a GPU: views and in-place operations instead of clone, contiguous and cat; "
    "write outputs where they are needed"
)


def copies_exposed(facts: Facts) -> Iterator[Finding]:
    """Copies to the host, or within a GPU's memory, run with nothing beside them.

    Cost: class `other_copy`, less exchanges between GPUs through host memory (`host-staged-comm`).

    Wrong if: the step is no shorter with the copies removed (results left on the GPU).
    """
    spent = np.reshape(facts.per_gpu.each(_spent_on_copies, facts.working), (-1, 2)).sum(axis=0)
    to_host = bool(spent[0] >= spent[1])
    yield from facts.costly(
        "copies-exposed",
        f"copies {'to the host' if to_host else 'within GPU memory'} not hidden by other work take "
        "{cost}",
        _READ_LESS.format(pinned="" if is_pinned(facts, "d2h") else ", into pinned memory")
        if to_host
        else _MOVE_LESS,
    )


def _spent_on_copies(gpu: GpuShardView) -> tuple[int, int]:
    """Return the nanoseconds that a GPU copies to the host, and within its memory."""
    kinds, lengths = gpu.operations.events.kind, gpu.operations.end - gpu.operations.start
    to_host, within = (int(lengths[kinds == k].sum()) for k in (Kind.COPY_D2H, Kind.COPY_D2D))
    return to_host, within


def amount_pageable(facts: Facts) -> dict[int | None, int]:
    """Return the time of a step that pinned memory would save each GPU in copies of input."""
    saving_ns = facts.once(find_pageable).saving_ns
    return {None: saving_ns // facts.turns} if saving_ns else {}


_PAGEABLE_SHARE: Final = 0.01
"""Share of the time from which pageable copies are reported."""
_PINNED: Final = {
    "pytorch": "pin_memory=True in the DataLoader, .to(device, non_blocking=True)",
    "mxnet": "gluon's DataLoader(pin_memory=True)",
    "chainer": "cuda.pinned_memory",
}


def h2d_pageable(facts: Facts) -> Iterator[Finding]:
    """Copies from pageable memory cost 1 % of the time.

    Cost: their exposed part, less the time that the same bytes would take from pinned memory: at
    the speed of the trace's own large pinned copies, or else of the card's slot, if either is
    known.

    Wrong if: the step is no shorter with `pin_memory` and `non_blocking`.
    """
    pageable = facts.once(find_pageable)
    total = sum(row.total_ns for row in facts.rows)
    saving = pageable.saving_ns
    if not saving or saving < _PAGEABLE_SHARE * total:
        return
    count, share = facts.turns, saving / total
    back_ns = _copied_back(facts)
    back = f"as many bytes come back to the host, for another {format_ns(back_ns // count)}"
    keep = "keep the data on the GPU between its kernels, or else " if back_ns else ""
    rate = pageable.bytes / max(pageable.copy_ns, 1)
    pinned = pageable.pinned_rate
    instead = f" instead of {pinned / 1e9:.1f} GB/s from pinned memory" if pinned else ""
    yield facts.finding(
        "h2d-pageable",
        severity_of(share) or "low",
        saving // count,
        f"copies from pageable instead of pinned memory cost {facts.of_step(saving // count)}",
        f"{keep}copy from pinned memory ({_PINNED.get(facts.framework, 'cudaHostAlloc')}): it is "
        "faster, the host need not wait, and copies can run beside kernels",
        {
            "copies": pageable.copies,
            "bytes": pageable.bytes,
            "copy_ns": pageable.copy_ns // count,
            "exposed_ns": pageable.exposed_ns // count,
            "pinned_bandwidth": None if pinned is None else round(pinned),
            "share": round(share, 4),
        },
        [
            f"they run at {rate:.1f} GB/s{instead}",
            back if back_ns else "",
            facts.host_is_at("h2d-pageable"),
        ],
    )


_FEWEST_ROUND_TRIPS: Final = 5
_SAME_BYTES: Final = 0.9
"""Copies to the GPU and back from which their bytes are compared; and the ratio of their bytes from
which the same data goes back and forth.
"""


def _copied_back(facts: Facts) -> int:
    """Return how long copies to the host take that bring back what copies to the GPU sent, as
    around each kernel of a program that keeps nothing on the GPU; 0 without.
    """
    there, back = (
        [use for use in facts.once(find_copies) if use.kind == kind] for kind in ("h2d", "d2h")
    )
    sizes = sorted(sum(use.bytes for use in uses) for uses in (there, back))
    counts = [sum(use.count for use in uses) for uses in (there, back)]
    is_same = min(counts) >= _FEWEST_ROUND_TRIPS and sizes[0] >= _SAME_BYTES * sizes[1]
    return sum(use.total_ns for use in back) if is_same else 0


class Pageable(Struct, frozen=True, dict=True):
    """Input copies from pageable memory in the measured steps of all GPUs, or in their spans."""

    copies: int
    bytes: int
    copy_ns: int
    """Sum of their durations."""
    exposed_ns: int
    """Part of these durations without a concurrent operation of a higher class on the GPU."""
    pinned_rate: float | None
    """Bytes per second of copies from pinned memory; None if unknown."""

    @property
    def saving_ns(self) -> int:
        """Return the exposed time that pinned memory would save."""
        if not self.pinned_rate or not self.copy_ns:
            return self.exposed_ns
        pinned = self.bytes * 1e9 / self.pinned_rate
        return round(self.exposed_ns * max(0.0, 1 - pinned / self.copy_ns))


_MOST_INPUTS: Final = 4
"""More copies than this before the first kernel: weights, which are copied once, not an input."""


def weights_until(view: GpuShardView) -> int:
    """Return when a network's weights have been copied to a GPU: when its first kernel starts, if
    copies other than of an input precede it, else when its first operation does.
    """
    operations = view.operations
    if not runs_network(view.trace, operations):
        return view.lane.window.start
    computing = np.flatnonzero(operations.classes == OperationClass.COMPUTE)
    first = int(operations.start[computing[0]]) if len(computing) else view.lane.window.start
    copies = operations.start[operations.events.kind == Kind.COPY_H2D]
    weights = np.count_nonzero(copies < first) > _MOST_INPUTS
    return first if weights else view.lane.window.start


def find_pageable(facts: Facts) -> Pageable:
    """Sum up the pageable input copies of the GPUs; without steps, none of weights."""
    gpus, lanes = facts.per_gpu, facts.working
    copies = gpus.trace.once(read_copies)
    every = copies.select(copies.kind == Kind.COPY_H2D)
    copies = every.select(every.source_memory == Memory.PAGEABLE)
    windows = facts.working_times if len(copies) else []
    if windows and not facts.measured:
        begins = gpus.each(weights_until, lanes)
        windows = [
            w.clip(start, lane.window.end)
            for w, start, lane in zip(windows, begins, lanes, strict=True)
        ]
    mine = [
        copies.select(
            window.contains(copies.start)
            & window.contains(copies.end - 1)
            & is_on(copies, lane.gpu)
        )
        for lane, window in zip(lanes, windows, strict=False)
    ]
    busy = [union(copied.start, copied.end) for copied in mine]
    return Pageable(
        sum(map(len, mine)),
        sum(int(copied.bytes.sum()) for copied in mine),
        sum(int((copied.end - copied.start).sum()) for copied in mine),
        sum(gpus.each(_alone, lanes, busy)) if busy else 0,
        _pinned_rate(gpus.trace, every, lanes),
    )


def _alone(view: GpuShardView, copies: Intervals) -> int:
    """Return the nanoseconds of copies without a concurrent operation of a higher class."""
    return copies.intersection(view.lane.timeline.of_class(OperationClass.H2D)).total


_DIRECTIONS: Final = {
    Kind.COPY_H2D: "h2d",
    Kind.COPY_D2H: "d2h",
    Kind.COPY_D2D: "d2d",
    Kind.COPY_PEER: "peer",
}
_OF_HOST: Final[Mapping[int, str]] = {
    Memory.PAGEABLE: "pageable",
    Memory.PINNED: "pinned",
    Memory.MANAGED: "managed",
}


def read_copies(trace: Trace) -> Events:
    """Read the copies of all GPUs with a known direction."""
    memory = ("source_memory", "destination_memory")
    columns = ("start", "end", "kind", "bytes", *memory, "process", "device")
    return trace.events(list(_DIRECTIONS), columns)


def find_copies(facts: Facts) -> tuple[CopyUse, ...]:
    """Return the copies of the measured steps of each GPU, by direction and the host's memory, most
    time first.
    """
    copies = facts.trace.once(read_copies)
    copies = copies.select((copies.bytes > 0) & (copies.end > copies.start))
    memory = np.where(copies.kind == Kind.COPY_H2D, copies.source_memory, copies.destination_memory)
    memory = np.where(copies.kind <= Kind.COPY_D2H, memory, Memory.UNKNOWN)
    sort = copies.kind.astype(np.int64) << 8 | (memory & 0xFF)
    rows, nvml = [], facts.trace.nvml
    for lane in facts.per_gpu.lanes if len(copies) else ():
        gpu = lane.gpu
        inside = is_on(copies, gpu) & facts.time_of(lane).contains(copies.start)
        card = nvml.card(gpu.host, gpu.gpu) if gpu.gpu_known else None
        slot, peak = None if card is None else slot_rate(card), memory_peak_of(gpu.name)
        for number in distinct_ids(sort[inside]).tolist():
            mine = copies.select(inside & (sort == number))
            kind, total = Kind(number >> 8), int((mine.end - mine.start).sum())
            within = None if peak is None else peak / 2
            limit = {Kind.COPY_D2D: within, Kind.COPY_PEER: None}.get(kind, slot)
            rows.append(
                CopyUse(
                    gpu.gpu,
                    gpu.rank,
                    _DIRECTIONS[kind],
                    _OF_HOST.get(number & 0xFF, ""),
                    len(facts.measured_of(gpu)),
                    count=len(mine),
                    bytes=int(mine.bytes.sum()),
                    total_ns=total,
                    bytes_per_s=round(int(mine.bytes.sum()) * 1e9 / total),
                    limit_bytes_per_s=round(limit) if limit else None,
                )
            )
    return tuple(sorted(rows, key=lambda row: -row.total_ns))


_PINNED_PART: Final = 0.9
"""Part of the copies' time from which the memory of all of them is called pinned."""


def is_pinned(facts: Facts, kind: str) -> bool:
    """Return whether the host's memory is pinned in the copies of a kind of `CopyUse`."""
    rows = [row for row in facts.once(find_copies) if row.kind == kind]
    pinned = sum(row.total_ns for row in rows if row.memory == "pinned")
    return pinned > _PINNED_PART * sum(row.total_ns for row in rows)


def is_on(copies: Events, gpu: Gpu) -> Mask:
    """Return a mask of the rows on a GPU."""
    on_gpu = np.zeros(len(copies), bool)
    for process, device in gpu.pairs:
        on_gpu |= (copies.process == process) & (copies.device == device)
    return on_gpu


def _pinned_rate(trace: Trace, copies: Events, lanes: Sequence[LaneSummary]) -> float | None:
    """Return the median rate of large copies from pinned memory, else the capacity of the slots."""
    pinned = copies.select(copies.source_memory == Memory.PINNED)
    if (rate := bandwidth(pinned)) is not None:
        return rate
    nvml = trace.nvml
    cards = [nvml.card(lane.gpu.host, lane.gpu.gpu) for lane in lanes if lane.gpu.gpu_known]
    rates = [rate for card in cards if card is not None and (rate := slot_rate(card))]
    return float(min(rates)) if rates else None
