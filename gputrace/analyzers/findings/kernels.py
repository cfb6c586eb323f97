"""Findings about kernels: computation that is the limit, that need not be, or that waits.

Activation checkpointing keeps the inputs of blocks and computes the rest anew (T. Chen et al.,
Training Deep Nets with Sublinear Memory Cost, 2016). PyTorch's autograd does that from a thread of
its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from gputrace.analyzers.cuda_api_calls import NOBODY
from gputrace.analyzers.findings.facts import MEDIUM, Facts, severity_of
from gputrace.analyzers.findings.hardware import find_card_use
from gputrace.analyzers.findings.whole_run import runs_almost_nothing
from gputrace.analyzers.gpu_shards import GpuShardView
from gputrace.analyzers.kernel_names import PRODUCTS, SIXTEEN, family_of, is_unaligned, precision_of
from gputrace.model.events import Kind, Mask, distinct_ids, is_among
from gputrace.model.intervals import Intervals
from gputrace.model.kernels import KernelActivity, Kernels, KernelUse
from gputrace.model.results import Finding
from gputrace.model.time_class import CLASSES
from gputrace.units import format_ns

_COMPUTE_SHARE: Final = 0.7
"""Share of the time in which GPUs compute from which their speed is reported as the limit."""
_LATER_COMPUTE_SHARE: Final = 0.9
"""The share of a trace's later half from which what came before counts as the way there."""


def compute_bound(facts: Facts) -> Iterator[Finding]:
    """The GPUs compute 70 % of the time or more (`info`), without kernels that wait; or, in a trace
    without steps, 90 % of its later half, as idle time before that belongs to start-up. The message
    says whether most of that is passes over memory (element-wise kernels, reductions), kernels that
    gather or add by index, or the optimizer.

    Cost: class `compute`, less what `kernel-waits` costs.

    Wrong if: half the batch size takes as long.
    """
    waits_ns = sum(work_waiting(facts).values()) // facts.turns
    share, settled = facts.share("compute") - facts.share_of(waits_ns), _settled_share(facts)
    if max(share, settled) < _COMPUTE_SHARE or runs_almost_nothing(facts):
        return
    whose = "its" if len(facts.rows) == 1 else "their"
    most, part = _most_of_kernels(facts)
    yield facts.finding(
        "compute-bound",
        "info",
        facts.mean("compute") - waits_ns,
        f"{facts.do('compute')} {share:.0%} of the time: {whose} speed is the limit"
        + (f", {part:.0%} of it in {most}" if most else ""),
        "make the kernels cheaper: "
        + (_LESS.get(most, "") if facts.framework else "")
        + _how_to_compute_less(facts),
        {"share": round(share, 4)} | ({"settled_share": round(settled, 4)} if settled else {}),
        [f"in the later half, it is {settled:.0%}" if settled else ""],
    )


_PASSES: Final = "element-wise kernels and reductions"
_UPDATES: Final = "the optimizer"
_BY_INDEX: Final = "kernels that gather or add by index"
_PARTS: Final = {
    _PASSES: ("elementwise", "reduction", "normalisation", "layout"),
    _UPDATES: ("optimizer",),
}
"""Kernels that are limited by memory, not by arithmetic, by families."""
_INDEXES: Final = (
    r"(?i)indexing_backward|index_?(put|add|select|func|elementwise)|scatter_?(add|gather)"
    r"|vectorized_gather|embedding_backward|compute_grad_weight"
)
"""Element-wise kernels that look up where they read or add."""
_LESS: Final = {
    _PASSES: "fewer passes over memory (attention as one kernel, fused operations, fewer casts "
    "between precisions), ",
    _UPDATES: "a fused optimizer, sparse gradients for large tables of embeddings, an update for "
    "several batches, ",
    _BY_INDEX: "sums that need not sort (PyTorch: index_select, embedding and scatter_add instead "
    "of x[indices], and no deterministic algorithms), ",
}
_MOST: Final = 0.5
"""Share of the kernels' time from which a part is called most of it."""


def _most_of_kernels(facts: Facts) -> tuple[str, float]:
    """Return what most of the kernels' time goes to, where memory limits that, and its share."""
    if facts.kernels is None:
        return "", 0.0
    spent: Counter[str] = Counter()
    for row in facts.kernels.families:
        part = next((part for part, families in _PARTS.items() if row.family in families), "")
        spent[part] += row.total_ns
    by_index = sum(use.total_ns for use in facts.kernels.top if re.search(_INDEXES, use.name))
    if by_index >= _MOST * facts.kernels.total_ns:
        return _BY_INDEX, by_index / facts.kernels.total_ns
    most, longest = max(spent.items(), key=lambda item: item[1], default=("", 0))
    # Of all kernels: what whole graphs run belongs to no family.
    share = longest / max(facts.kernels.total_ns, 1)
    return (most, share) if most and share >= _MOST else ("", share)


def _settled_share(facts: Facts) -> float:
    """Return the share of the later half of a trace without steps that the GPUs compute in, if it
    is most of that, and start-up is most of what they lose before; else 0.
    """
    if facts.repeats:
        return 0.0
    halves = facts.per_gpu.each(_computes_in_halves, facts.working)
    before, after = (sum(times[half] for times in halves) for half in (0, 1))
    length = sum(lane.window.end - lane.window.start for lane in facts.working) / 2
    share, once = after / max(length, 1), facts.ledger.mean("warmup") * facts.turns
    is_settled = share >= _LATER_COMPUTE_SHARE and before < (1 - MEDIUM) * after
    return share if is_settled and 2 * once > length - before else 0.0


def _computes_in_halves(gpu: GpuShardView) -> tuple[int, int]:
    """Return the nanoseconds of class `compute` in both halves of a GPU's time."""
    start, end = gpu.lane.window
    middle = (start + end) // 2
    parts = gpu.lane.split(np.array([start, middle]), np.array([middle, end]))
    first, second = parts[:, CLASSES.index("compute")].tolist()
    return first, second


_WIDE: Final = ("fp32", "tf32", "fp64")
_WIDE_PART: Final = 0.5
"""Precisions of products without tensor cores that can be lowered; and the share of the time in
products, and in graphs recorded as a whole, that must be known to have them.
"""
_COMPILED: Final = r"triton_[a-z]{3}_fused_"
"""Kernels of torch.compile."""


def _how_to_compute_less(facts: Facts) -> str:
    """Return what the kernels show that the program does not do yet."""
    kernels, is_torch = facts.kernels, facts.framework == "pytorch"
    if not facts.framework and kernels is not None and not kernels.products:
        return (
            "single precision where it suffices, fewer passes over memory (Nsight Compute says "
            "what limits a kernel), faster cards, or more of them"
        )
    advice = []
    products = () if kernels is None else kernels.products
    wide = sum(p.total_ns for p in products if p.precision in _WIDE and p.tensor_cores != "yes")
    known = sum(family.total_ns for family in kernels.families) if kernels is not None else 0
    unknown = max(sum(row.of("compute") for row in facts.rows) - known, 0)
    if wide >= _WIDE_PART * (sum(product.total_ns for product in products) + unknown):
        advice.append("mixed precision")
        if kernels is None or any(use.family == "convolution" for use in kernels.top):
            advice.append("the layout that tensor cores prefer")
            advice[1] += " (channels_last)" if is_torch else ""
    if kernels is None or not any(re.search(_COMPILED, row.name) for row in kernels.top):
        advice += ["compiled or fused operations" + (" (torch.compile)" if is_torch else "")]
    return ", ".join([*advice, "smaller inputs or models, faster cards, or more of them"])


_LAYOUT_SHARE: Final = 0.02
"""Share of the time from which layout conversions are reported."""
_PRODUCTS_SHARE: Final = MEDIUM
"""Share of the time in products without tensor cores from which they are reported."""
_TENSOR_CORES_SPEED_UP: Final = 2
"""Assumed speed-up of products on tensor cores; every card promises more."""
_DOUBLE_TO_SINGLE: Final = 2
"""Assumed speed-up of products in fp32 over fp64; most cards promise more."""
_KERNELS_NAMED: Final = 2
_KEEP_LAYOUT: Final = {
    "pytorch": "keep one layout: model and batches .to(memory_format=torch.channels_last), with "
    "mixed precision; no permute and contiguous between layers",
    "tensorflow": "keep one layout: data_format='channels_last' in all layers with mixed precision",
    "jax": "keep one layout: NHWC and HWIO as dimension numbers of convolutions",
    "mxnet": "keep one layout: layout='NHWC' in all layers with fp16 (multi_precision)",
}
_AS_TF32: Final = {
    "pytorch": 'torch.set_float32_matmul_precision("high") and '
    "torch.backends.cudnn.allow_tf32 = True for TF32",
    "tensorflow": "tf.config.experimental.enable_tensor_float_32_execution(True) for TF32",
    "jax": 'jax.config.update("jax_default_matmul_precision", "tensorfloat32") for TF32',
}
_AS_HALF: Final = {
    "pytorch": "torch.autocast with {type}",
    "tensorflow": "tf.keras.mixed_precision.set_global_policy('mixed_{type}')",
    "jax": "computing in {type} (jnp.{type}) with fp32 parameters",
    "mxnet": "amp.init() for fp16",
    "chainer": "chainer.global_config.dtype = chainer.mixed16 for fp16",
}


def work_on_layouts(facts: Facts) -> Mapping[tuple[int, int], int]:
    """Return the nanoseconds in which each GPU, with its rank, only converts between layouts."""
    return spent_by_gpu(facts, lambda use: use.converts_layout)


def work_beside_tensor_cores(facts: Facts) -> Mapping[tuple[int, int], int]:
    """Return the nanoseconds that tensor cores would save each GPU, with its rank."""
    if facts.kernels is None or not facts.kernels.has_tensor_cores:
        return {}
    spent = spent_by_gpu(facts, _is_beside_tensor_cores)
    return {
        gpu: ns * (_TENSOR_CORES_SPEED_UP - 1) // _TENSOR_CORES_SPEED_UP
        for gpu, ns in spent.items()
    }


def spent_by_gpu(
    facts: Facts, is_meant: Callable[[KernelUse], bool]
) -> Mapping[tuple[int, int], int]:
    """Return the nanoseconds of some kernels on each GPU, of those that take most time."""
    spent: Counter[tuple[int, int]] = Counter()
    for use in facts.kernels.top if facts.kernels is not None else ():
        for on in use.by_gpu if is_meant(use) else ():
            spent[on.gpu, on.rank] += on.total_ns
    return spent


def layout_transposes(facts: Facts) -> Iterator[Finding]:
    """Kernels that only convert between layouts (NCHW, NHWC) take 2 % of the time.

    Cost: their duration.

    Wrong if: the kernels remain in a run with one layout throughout.
    """
    kernels = facts.kernels
    if kernels is None:
        return
    conversions = [use for use in kernels.top if use.converts_layout]
    spent, count = sum(use.total_ns for use in conversions), sum(use.count for use in conversions)
    share = spent / max(kernels.total_ns, 1)
    if share < _LAYOUT_SHARE:
        return
    steps = kernels.steps or facts.turns
    names = ", ".join(dict.fromkeys(use.short for use in conversions[:_KERNELS_NAMED]))
    advice = _KEEP_LAYOUT.get(facts.framework, "keep one layout, NHWC where tensor cores multiply")
    yield facts.finding(
        "layout-transposes",
        severity_of(share) or "low",
        spent // steps,
        f"converting between layouts takes {facts.of_step(spent // steps)}",
        advice,
        {"share": round(share, 4), "layout_ns": spent // steps, "kernels": count // steps},
        [f"{count // steps:,} kernels do nothing else ({names})"],
    )


def _is_unaligned(use: KernelUse) -> bool:
    return use.tensor_cores == "yes" and is_unaligned(use.name, precision_of(use.name))


def _is_beside_tensor_cores(use: KernelUse) -> bool:
    return _is_unaligned(use) or (use.tensor_cores == "no" and not _is_double(use))


def no_tensor_cores(facts: Facts) -> Iterator[Finding]:
    """On cards with tensor cores, 5 % of the time goes to matrix products and convolutions known
    not to use them, or to use them badly: fp32, or half precision with unsuitable sizes.

    Cost: half of their duration, assuming that tensor cores are twice as fast.

    Wrong if: the products take as long in TF32 or bf16.
    """
    kernels = facts.kernels
    if kernels is None or not kernels.has_tensor_cores:
        return
    missing = [product for product in kernels.products if product.tensor_cores == "no"]
    single, half = (
        sum(product.total_ns for product in missing if product.precision in precisions)
        for precisions in (("fp32",), SIXTEEN)
    )
    unaligned = sum(use.total_ns for use in kernels.top if _is_unaligned(use))
    touched = single + half + unaligned
    share = touched / max(kernels.total_ns, 1)
    if share < _PRODUCTS_SHARE:
        return
    steps = kernels.steps or facts.turns
    what = "half-precision" if half + unaligned > single else "fp32"
    sizes = "whose sizes are not multiples of 8" if unaligned > single + half else ""
    yield facts.finding(
        "no-tensor-cores",
        severity_of(share * (_TENSOR_CORES_SPEED_UP - 1) / _TENSOR_CORES_SPEED_UP) or "low",
        touched // steps * (_TENSOR_CORES_SPEED_UP - 1) // _TENSOR_CORES_SPEED_UP,
        f"matrix products and convolutions in {what.replace('-', ' ')}, "
        f"{sizes or 'without tensor cores'}, take {facts.of_step(touched // steps)}",
        _how_to_use_them(facts, kernels, what),
        {
            "share": round(share, 4),
            "touched_ns": touched // steps,
            "fp32_ns": single // steps,
            "half_ns": half // steps,
            "unaligned_ns": unaligned // steps,
            "on_tensor_cores_ns": _of_sort(kernels, "yes") // steps,
            "unknown_ns": _of_sort(kernels, "unknown") // steps,
        },
        [f"they are {_names(kernels, _is_beside_tensor_cores)}"],
    )


_IN_SINGLE: Final = (
    "compute in fp32, or in bf16 under autocast, which leaves fp64 alone: {source} bring fp64 in"
)
_DOUBLES: Final = {
    "pytorch": "numpy's arrays (torch.from_numpy(x).float()), .double() and set_default_dtype",
    "jax": "jax_enable_x64 and dtypes given by name",
}


def work_in_double(facts: Facts) -> Mapping[tuple[int, int], int]:
    """Return the nanoseconds that fp32 would save each GPU, with its rank, in products in fp64."""
    spent = spent_by_gpu(facts, _is_double) if facts.trains else {}
    return {gpu: ns // _DOUBLE_TO_SINGLE for gpu, ns in spent.items()}


def double_precision(facts: Facts) -> Iterator[Finding]:
    """In training, 5 % of the time goes to matrix products and convolutions in fp64.

    Cost: half of their duration, as fp32 moves half of the bytes.

    Wrong if: the results need fp64, or the products take as long in fp32.
    """
    kernels = facts.kernels
    if kernels is None or not facts.trains:
        return
    spent = sum(product.total_ns for product in kernels.products if product.precision == "fp64")
    share = spent / max(kernels.total_ns, 1)
    if share < _PRODUCTS_SHARE:
        return
    spent //= kernels.steps or facts.turns
    source = _DOUBLES.get(facts.framework, "numpy's arrays and Python's floats")
    yield facts.finding(
        "double-precision",
        severity_of(share / _DOUBLE_TO_SINGLE) or "low",
        spent // _DOUBLE_TO_SINGLE,
        f"fp64 products and convolutions take {facts.of_step(spent)}",
        _IN_SINGLE.format(source=source),
        {"share": round(share, 4), "fp64_ns": spent},
        [f"they are {_names(kernels, _is_double)}"],
    )


def _is_double(use: KernelUse) -> bool:
    return use.tensor_cores is not None and precision_of(use.name) == "fp64"


def _of_sort(kernels: Kernels, sort: str) -> int:
    return sum(product.total_ns for product in kernels.products if product.tensor_cores == sort)


def _names(kernels: Kernels, is_meant: Callable[[KernelUse], bool]) -> str:
    shown = list(dict.fromkeys(use.short for use in kernels.top if is_meant(use)))[:_KERNELS_NAMED]
    return f"in {', '.join(shown)}" if shown else "not among the longest kernels"


def _how_to_use_them(facts: Facts, kernels: Kernels, what: str) -> str:
    if what != "fp32":
        return (
            "use matrix sizes that suit tensor cores: batch, channels and features in multiples "
            "of 8; newer libraries"
        )
    small = "bfloat16" if kernels.has_tf32 else "float16"
    ways = [_AS_HALF.get(facts.framework, "mixed precision in {type}").format(type=small)]
    # Where some use TF32, it is on for their kind: the library chose fp32 for the others' sizes.
    on = {use.family for use in kernels.top if precision_of(use.name) == "tf32"}
    spent = Counter[bool]()
    for use in filter(_is_beside_tensor_cores, kernels.top):
        spent[use.family in on] += use.total_ns
    if kernels.has_tf32 and spent[False] >= spent[True]:
        ways.insert(0, _AS_TF32.get(facts.framework, "TF32 for fp32 products"))
    scaled = "" if kernels.has_tf32 or facts.infers else ", with loss scaling"
    return f"where accuracy allows it: {'; or '.join(ways)}{scaled}"


_LONG_NS: Final = 500_000
"""Minimum median of a kernel: of shorter ones, most is start and end."""
_WAITING_SHARE: Final = 0.02
"""Share of the time from which such kernels are reported."""
_MOST_NAMED: Final = 3
_MEANING: Final = {
    "waits": "in which next to nothing is computed ({}): a wait (spin), or work on integers and "
    "caches alone",
    "few SMs": "in which most of the GPU is without work ({}): a wait, or too few blocks",
}
"""Descriptions of kernels by `KernelActivity.does`: what is seen, and what it means."""


def work_waiting(facts: Facts) -> Mapping[tuple[int, int], int]:
    """Return the nanoseconds in which such a kernel is alone on each GPU, with its rank."""
    spent: Counter[tuple[int, int]] = Counter()
    for use, _ in _waiting(facts):
        for on in use.by_gpu:
            spent[on.gpu, on.rank] += on.alone_ns or 0
    return spent


def _waiting(facts: Facts) -> list[tuple[KernelUse, KernelActivity]]:
    """Return these kernels, most time alone first; waiting in collectives is told elsewhere."""
    uses = [
        (use, use.activity)
        for use in (facts.kernels.top if facts.kernels is not None else ())
        if use.activity is not None and use.activity.does in _MEANING
        if use.median_ns >= _LONG_NS and use.family != "communication"
    ]
    return sorted(uses, key=lambda pair: -_alone(pair[0]))


def _alone(use: KernelUse) -> int:
    return sum(on.alone_ns or 0 for on in use.by_gpu)


def kernel_waits(facts: Facts) -> Iterator[Finding]:
    """For 2 % of the time only kernels of 0.5 ms and longer (median) run that wait, by the card's
    counters: arithmetic on floats is at most 2 % of the activity of their SMs, and memory traffic
    2 % of the bandwidth; or they leave 95 % of the SMs without work. Each within three standard
    errors, and with less than 1 GB/s over NVLink and PCIe. Nothing is said without counters, and of
    communication.

    Cost: the time in which such a kernel runs and nothing else.

    Wrong if: the step is no shorter without the kernel, or its integer arithmetic is the work.
    """
    waiting, kernels = _waiting(facts), facts.kernels
    spent = sum(_alone(use) for use, _ in waiting)
    if kernels is None or not waiting or spent < _WAITING_SHARE * kernels.total_ns:
        return
    steps, share = kernels.steps or facts.turns, spent / max(kernels.total_ns, 1)
    details: list[str] = []
    for does in dict.fromkeys(activity.does or "" for _, activity in waiting):
        alike = [(use, activity) for use, activity in waiting if activity.does == does]
        names = ", ".join(dict.fromkeys(use.short for use, _ in alike[:_MOST_NAMED]))
        time = format_ns(sum(_alone(use) for use, _ in alike) // steps)
        meaning = _MEANING[does].format(alike[0][1].text)
        details.append(f"{time} of it goes to {names} alone, {meaning}")
    activity = waiting[0][1]
    yield facts.finding(
        "kernel-waits",
        severity_of(share) or "low",
        spent // steps,
        f"kernels that wait, or leave most of the GPU idle, take {facts.of_step(spent // steps)}",
        "find what it waits for: a flag of another kernel, rank or the host, or a delay; end the "
        "kernel instead, or let other work run beside it (streams); a single block: spread its "
        "work over more",
        {
            "share": round(share, 4),
            "alone_ns": spent // steps,
            "kernels": len(waiting),
            "sms": activity.sms,
            "arithmetic": activity.arithmetic,
            "memory": activity.memory,
        },
        details,
    )


_IN_A_ROW: Final = 6
_DISTINCT: Final = 4
"""Kernels in a row, and how many of them must differ, to be a part of a network that is known when
met again."""
_LEAST_SHARE: Final = 0.1
"""Share of the launches that other threads must have to be a backward pass."""
_MOST_SHARE: Final = 0.9
"""Share of what other threads launch from which they do the same as the first, and nothing else."""
_FACTORS: Final = np.array(
    [0x9E3779B97F4A7C15 ** (2 * n + 1) % 2**64 for n in range(_IN_A_ROW)], np.uint64
)


def launched_again(names: NDArray[Any], threads: NDArray[Any], first: int) -> Mask:
    """Return which launches of other threads repeat a part of what the first thread launches.

    Args:
        names: ids of the kernels' names, thread by thread in the order of launch.
        threads: thread of each.
        first: the thread that launches the forward pass.
    """
    again, is_other = np.zeros(len(names), np.bool_), threads != first
    others = int(np.count_nonzero(is_other))
    if len(names) < _IN_A_ROW or others < _LEAST_SHARE * len(names):
        return again
    parts = sliding_window_view(names, _IN_A_ROW)
    numbers = names.astype(np.uint64)
    summands = (numbers[n : n + len(parts)] * factor for n, factor in enumerate(_FACTORS))
    keys = sum(summands, np.zeros(len(parts), np.uint64)).view(np.int64)
    whole = threads[: len(parts)] == threads[_IN_A_ROW - 1 :]
    forward = np.flatnonzero(whole & ~is_other[: len(parts)])
    backward = np.flatnonzero(whole & is_other[: len(parts)])
    met = backward[is_among(keys[backward], keys[forward])]
    in_order = np.sort(parts[met], axis=1)
    distinct = (in_order[:, 1:] != in_order[:, :-1]).sum(axis=1) + 1
    met = met[distinct >= _DISTINCT]
    for n in range(_IN_A_ROW):
        again[met + n] = True
    return again if np.count_nonzero(again) <= _MOST_SHARE * others else np.zeros_like(again)


_LOOKED_AT: Final = 20_000
"""Kernels of a GPU that are compared; the share of these holds for all."""
_FULL_MEMORY: Final = 0.8
"""Part of a card's memory in use from which recomputation is taken to be needed."""
_KEEP_MORE: Final = {
    "pytorch": "call fewer blocks through torch.utils.checkpoint "
    "(gradient_checkpointing_disable() of transformers), or only those with the largest activations"
}


def work_recomputed(facts: Facts) -> Mapping[tuple[int, int], int]:
    """Return the nanoseconds in which each GPU, with its rank, computes something again."""
    return facts.once(_recomputed) if facts.trains and facts.per_gpu.has_calls else {}


def _recomputed(facts: Facts) -> dict[tuple[int, int], int]:
    spent = facts.each(_recomputed_on)
    lanes = zip(facts.working, spent, strict=True)
    return {(lane.gpu.gpu, lane.gpu.rank): ns for lane, ns in lanes if ns}


def _recomputed_on(view: GpuShardView, time: Intervals) -> int:
    """Return the nanoseconds of kernels in some time that the backward pass launches anew."""
    operations, calls = view.operations, view.calls
    rows = np.flatnonzero((operations.events.kind == Kind.KERNEL) & time.contains(operations.start))
    lengths = operations.end[rows] - operations.start[rows]
    if calls is None or not len(rows):
        return 0
    issued_by = calls.issued_by(operations.events, rows[:_LOOKED_AT])
    # Calls lie thread by thread, in the order of their start.
    order = np.argsort(issued_by, kind="stable")
    order = order[issued_by[order] != NOBODY]
    if not len(order):
        return 0
    threads = calls.thread[issued_by[order]]
    names = operations.events.name[rows[order]]
    again = launched_again(names, threads, int(calls.thread[issued_by[order.min()]]))
    known = view.trace.names(distinct_ids(names[again])).values()
    if not any(family_of(name) in PRODUCTS for name in known):
        return 0  # As of sums that sort in both passes: a part of a network multiplies.
    share = float(lengths[order[again]].sum()) / max(int(lengths[order].sum()), 1)
    return round(share * int(lengths.sum()))


def recomputation(facts: Facts) -> Iterator[Finding]:
    """The backward pass launches kernels in the order of the forward pass for 5 % of the time,
    products of matrices among them: it computes parts of the network again, to save memory (`low`
    if a card's memory is 80 % full).

    Cost: the duration of these kernels.

    Wrong if: the step is no shorter without activation checkpointing.
    """
    cost = sum(work_recomputed(facts).values()) // facts.turns
    severity = severity_of(facts.share_of(cost))
    if severity is None:
        return
    full = [
        card.memory_used_bytes / card.memory_bytes
        for card in facts.once(find_card_use)
        if card.memory_used_bytes and card.memory_bytes
    ]
    fullest = max(full, default=0.0)
    advice = _KEEP_MORE.get(facts.framework, "keep the activations of more layers")
    yield facts.finding(
        "recomputation",
        "low" if fullest >= _FULL_MEMORY else severity,
        cost,
        f"computing parts of the forward pass again takes {facts.of_step(cost)}",
        f"{advice}, as far as memory allows",
        {"share": round(facts.share_of(cost), 4), "memory_used_share": round(fullest, 4)},
        [f"at most {fullest:.0%} of a card's memory is in use" if full else ""],
    )
