"""Findings about time in which the GPUs are busy, and about their kernels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

from gputrace.analyzers.copies import Pageable, find_pageable
from gputrace.analyzers.findings.facts import MEDIUM, Facts, severity_of
from gputrace.analyzers.findings.idle import work_waiting
from gputrace.analyzers.findings.whole_run import runs_almost_nothing
from gputrace.analyzers.gpu_shards import GpuShardView
from gputrace.analyzers.kernel_names import SIXTEEN, is_unaligned, precision_of
from gputrace.analyzers.parallelism import find_experts, find_sharded, total_collectives
from gputrace.analyzers.pipelines import find_pipelines
from gputrace.model.events import Kind
from gputrace.model.kernels import Kernels, KernelUse
from gputrace.model.results import Finding
from gputrace.model.time_class import CLASSES
from gputrace.units import format_bytes, format_ns, format_pair

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
    is_pinned = facts.is_pinned("h2d")
    source = "" if is_pinned else " from pinned memory"
    if facts.trains:
        how = _OVERLAP_COPIES.get(
            facts.framework, f"copy the next batch{source} while this one computes"
        ).format(pin="" if is_pinned else "pin_memory=True, ")
    else:
        how = f"copy the next data{source} on a side stream during computation"
    if is_pinned:
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
        _READ_LESS.format(pinned="" if facts.is_pinned("d2h") else ", into pinned memory")
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
    saving_ns = facts.once(_pageable).saving_ns
    return {None: saving_ns // facts.turns} if saving_ns else {}


def _pageable(facts: Facts) -> Pageable:
    return find_pageable(facts.per_gpu, facts.working, facts.measured)


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
    pageable = facts.once(_pageable)
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
    there, back = ([use for use in facts.copies if use.kind == kind] for kind in ("h2d", "d2h"))
    sizes = sorted(sum(use.bytes for use in uses) for uses in (there, back))
    counts = [sum(use.count for use in uses) for uses in (there, back)]
    is_same = min(counts) >= _FEWEST_ROUND_TRIPS and sizes[0] >= _SAME_BYTES * sizes[1]
    return sum(use.total_ns for use in back) if is_same else 0


_WAIT_LESS: Final = (
    "make the ranks arrive at the same time ({who} last): hosts that launch sooner, "
    "batches of equal size, loaders without stalls; sending less gains little"
)
_ALWAYS_LAST: Final = 0.9
"""Share of the waiting that must be for one rank to say that this one comes last."""


def communication_exposed(facts: Facts) -> Iterator[Finding]:
    """Communication runs with no computation beside it. Waiting in it counts too, where no rank is
    late by more than chance and nothing on it says why.

    Cost: class `communication`, less what is charged to a cause on the rank that came last, to the
    division of work (`pipeline-bubble`, `expert-imbalance`) or to links.

    Wrong if: the step is no shorter without the exchange (DDP's `no_sync` for some steps).
    """
    cost = facts.ledger.mean("communication-exposed", "uneven-arrival")
    wait = facts.ledger.mean("uneven-arrival")
    known, share = facts.waits_known, facts.share_of(cost)
    severity = severity_of(share)
    if severity is None:
        return
    unseen = "" if known else "record all ranks, which shows how much of it is waiting; then "
    role, part = _costliest_role(facts)
    waiting = ""
    if not known:
        waiting = "waiting for other ranks is included, as not all ranks were recorded"
    elif wait >= MEDIUM * cost:
        waiting = f"{format_ns(wait)} of it is waiting for other ranks"
    yield facts.finding(
        "communication-exposed",
        severity,
        cost,
        f"communication not hidden by compute takes {facts.of_step(cost)}",
        _WAIT_LESS.format(who=_who_is_last(facts))
        if known and 2 * wait > cost
        else unseen + _less(facts, role),
        {
            "share": round(share, 4),
            "communication_ns": facts.mean("communication"),
            "wait_ns": wait if known else None,
            "total_ns": facts.mean_ns,
            "role": role or None,
            "role_share": round(part, 4) if role else None,
        },
        [f"most of it is in {_ROLE_NAMES[role]}" if role else "", waiting],
    )


def _who_is_last(facts: Facts) -> str:
    """Return the rank that others wait for where none is known to be late, as advice calls it."""
    waited: Counter[int] = Counter()
    for row in facts.ledger.of("uneven-arrival"):
        waited[row.rank] += row.ns
    (rank, longest), *_ = waited.most_common(1)
    is_one = longest >= _ALWAYS_LAST * waited.total()
    return f"rank {rank} comes" if is_one else "none is always"


_COSTLIEST_ROLE_SHARE: Final = 0.5
"""Share of the exposed communication that one role must have to be named."""
_ROLE_NAMES: Final = {
    "sharded data": "gathering parameters and scattering gradients (sharded data parallel)",
    "tensor": "tensor-parallel groups",
    "pipeline": "messages between pipeline stages",
    "expert": "sending tokens to experts and back",
    "context": "context-parallel groups",
}
"""Groups by role; that of data-parallel gradients goes without saying."""
_LESS_BY_ROLE: Final = {
    "tensor": "overlap it with the matrix products (Megatron: --tp-comm-overlap with "
    "--sequence-parallel; PyTorch: async tensor parallelism), or use smaller groups, on one host",
    "expert": "overlap dispatch and combine with the shared experts or another micro-batch, "
    "balance the routing (auxiliary loss, capacity), keep groups of experts on one host",
    "context": "overlap the exchange with attention (a ring), or use fewer ranks a group",
}


_PREFETCH_PARAMETERS: Final = (
    "prefetch the next layer's parameters (FSDP2: set_modules_to_forward_prefetch and "
    "set_modules_to_backward_prefetch; FSDP: forward_prefetch=True and "
    "backward_prefetch=BACKWARD_PRE; DeepSpeed: a larger stage3_prefetch_bucket_size): {share:.0%} "
    "of the gathers begin beside kernels, and {hideable} of the others would fit there, too"
)
_KEEP_PARAMETERS: Final = (
    "keep parameters between the passes where memory allows (FSDP2: reshard_after_forward=False; "
    "FSDP: SHARD_GRAD_OP; DeepSpeed: stage 2): the backward pass gathers {count} times again"
)
_SHARD_WITHIN_HOST: Final = (
    "shard within a host (HSDP), or wrap more layers together: larger messages"
)


_SEND_LESS: Final = (
    "overlap it with the backward pass (bucket size), send less (bf16 gradients, gradient "
    "accumulation with no_sync)"
)
_EXCHANGE_LESS: Final = (
    "run the model on fewer GPUs, neighbours on one host, or overlap it with the computation of "
    "another batch"
)
"""Advice for inference, which has no gradients."""


def _less(facts: Facts, role: str) -> str:
    """Return how to expose less communication in groups of a role."""
    sharded = facts.by_group(find_sharded) if role == "sharded data" else ()
    if not sharded:
        return _LESS_BY_ROLE.get(role, _EXCHANGE_LESS if facts.infers else _SEND_LESS)
    most = max(sharded, key=lambda group: group.gather_exposed_ns)
    advice = []
    if most.hideable_ns >= _HIDEABLE_PART * most.gather_exposed_ns:
        hideable = format_ns(most.hideable_ns)
        advice.append(_PREFETCH_PARAMETERS.format(share=most.prefetched, hideable=hideable))
    if most.gathered_again:
        size = most.unsharded_bytes
        room = "" if size is None else f", which would take {format_bytes(size)} to spare"
        advice.append(_KEEP_PARAMETERS.format(count=most.gathered_again) + room)
    return "; ".join([*advice, _SHARD_WITHIN_HOST])


_HIDEABLE_PART: Final = 0.1
"""Minimum part of the exposed gathers that prefetching could hide, if it is advised."""


def _costliest_role(facts: Facts) -> tuple[str, float]:
    """Return the role whose groups have most of the exposed communication, and its share of it;
    empty if that is data parallel, or not clear.
    """
    exposed: dict[str, int] = {}
    for total in facts.by_group(total_collectives):
        spent = total.exposed_ns * len(total.gpus)
        exposed[total.role] = exposed.get(total.role, 0) + spent
    role = max(exposed, key=lambda name: exposed[name], default="")
    share = exposed.get(role, 0) / max(sum(exposed.values()), 1)
    return (role, share) if role in _ROLE_NAMES and share >= _COSTLIEST_ROLE_SHARE else ("", 0.0)


_BUBBLE_SHARE: Final = 0.02
"""Share of the time from which a bubble is reported."""
_FILL_IT: Final = {
    "schedule": "fill the pipeline: more micro-batches per step, or several model chunks per "
    "stage (interleaved 1F1B, zero-bubble schedules)",
    "imbalance": "move layers from the slowest stage to the others",
    "transfer": "overlap the transfers: receive the next micro-batch while this one computes, "
    "neighbours in the pipeline on the fastest links",
    "host": "let the hosts launch sooner: CUDA graphs, torch.compile, fewer and larger kernels",
}


def pipeline_bubble(facts: Facts) -> Iterator[Finding]:
    """The stages of a pipeline idle for 2 % of the time, including waits for each other's messages;
    `low` if the schedule accounts for it.

    Cost: the mean bubble of a stage.

    Wrong if: with twice as many micro-batches of half the size, the schedule's part does not halve.
    """
    for pipeline in facts.by_group(find_pipelines):
        share = pipeline.bubble_ns / max(pipeline.step_ns, 1)
        if share < _BUBBLE_SHARE:
            continue
        causes = {name: getattr(pipeline, f"{name}_ns") for name in _FILL_IT}
        avoidable = (pipeline.bubble_ns - pipeline.schedule_ns) / max(pipeline.step_ns, 1)
        slow, count = pipeline.stages[pipeline.slowest], len(pipeline.stages)
        largest = sorted(causes, key=lambda name: -causes[name])
        parts = [
            f"{format_ns(causes[name])} for {_BUBBLE_CAUSES[name]}"
            for name in largest
            if causes[name] >= _NAMED_BUBBLE_PART * pipeline.bubble_ns
        ]
        schedule = "" if pipeline.schedule == "unknown" else f"{pipeline.schedule}, "
        details = [f"{schedule}{pipeline.micro_batches} micro-batches: {', '.join(parts)}"]
        if pipeline.imbalance_ns >= _NAMED_BUBBLE_PART * pipeline.bubble_ns:
            longer = format_ns(pipeline.excess_ns)
            details.append(
                f"stage {slow.stage} (rank {slow.rank}) works {longer} longer than the mean"
            )
        idle = format_pair(pipeline.bubble_ns, "of", pipeline.step_ns)
        yield Finding(
            "pipeline-bubble",
            severity_of(avoidable) or "low",
            tuple(stage.gpu for stage in pipeline.stages),
            tuple(stage.rank for stage in pipeline.stages),
            pipeline.bubble_ns,
            f"the {count} stages of the pipeline idle {share:.0%} of each step ({idle})",
            "; ".join(_FILL_IT[name] for name in largest[:2] if causes[name] > 0),
            {
                "share": round(share, 4),
                "schedule": pipeline.schedule,
                "stages": count,
                "micro_batches": pipeline.micro_batches,
                **{f"{name}_ns": value for name, value in causes.items()},
                "slowest_rank": slow.rank,
                "excess_ns": pipeline.excess_ns,
            },
            tuple(details),
        )


_NAMED_BUBBLE_PART: Final = 0.05
_BUBBLE_CAUSES: Final = {
    "schedule": "the schedule",
    "imbalance": "unequal stages",
    "transfer": "transfers",
    "host": "host gaps",
}


_EXPERT_EXCESS: Final = 0.1
"""Minimum excess of the busiest rank's experts, as a fraction of their mean work."""
_EXPERT_SHARE: Final = 0.02
"""Share of the time that the excess must cost."""
_ALWAYS_BUSIEST_SHARE: Final = 0.5
"""Share of the exchanges in which a rank must have most work to be named."""


def expert_imbalance(facts: Facts) -> Iterator[Finding]:
    """The busiest rank's experts have 10 % more work than the mean, exchange by exchange, and that
    costs 2 % of the time.

    Cost: that excess, for which the mean rank waits.

    Wrong if: the step is no shorter when tokens go to experts round-robin, ignoring the router.
    """
    for experts in facts.by_group(find_experts):
        share = facts.share_of(experts.imbalance_ns)
        excess = experts.imbalance_ns / max(experts.work_ns, 1)
        if share < _EXPERT_SHARE or excess < _EXPERT_EXCESS:
            continue
        most = max(experts.ranks, key=lambda rank: rank.work_ns)
        always = most.busiest >= _ALWAYS_BUSIEST_SHARE
        who = (
            f"the experts of rank {most.rank} work {most.ratio:.2f} times as long as the mean"
            if always
            else "which rank has them varies from layer to layer"
        )
        yield Finding(
            "expert-imbalance",
            severity_of(share) or "low",
            (most.gpu,) if always else tuple(rank.gpu for rank in experts.ranks),
            (most.rank,) if always else tuple(rank.rank for rank in experts.ranks),
            experts.imbalance_ns,
            f"ranks wait {facts.of_step(experts.imbalance_ns)} for the busiest experts",
            "balance the routing (auxiliary loss, router bias, capacity factor), or spread busy "
            "experts over the ranks (redundant experts)",
            {
                "share": round(share, 4),
                "excess": round(excess, 4),
                "rank": most.rank if always else None,
                "ratio": most.ratio,
                "busiest_share": most.busiest,
                "wait_ns": experts.wait_ns,
            },
            (who,),
        )


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
    if kernels.has_tf32:
        ways.insert(0, _AS_TF32.get(facts.framework, "TF32 for fp32 products"))
    scaled = "" if kernels.has_tf32 or facts.infers else ", with loss scaling"
    return f"where accuracy allows it: {'; or '.join(ways)}{scaled}"
