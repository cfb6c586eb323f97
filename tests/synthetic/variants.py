"""Random but realistic plans: the variants that steps and causes are benchmarked on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.synthetic.plan import Exchange, Plan


def random_plan(seed: int) -> Plan:
    """A plan drawn at random; the same seed gives the same plan."""
    rng = np.random.default_rng((seed, 4))
    plan = _model(rng, Plan(seed=seed))
    plan = _host(rng, _input(rng, plan))
    plan = _ranks(rng, plan)
    return _phases(rng, plan)


def _chance(rng: np.random.Generator, share: float) -> bool:
    return bool(rng.random() < share)


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> int:
    return int(np.exp(rng.uniform(np.log(low), np.log(high))))


def _model(rng: np.random.Generator, plan: Plan) -> Plan:
    """12 to 60 steps of 30 to 300 kernels of 8 to 200 µs."""
    return replace(
        plan,
        steps=int(rng.integers(12, 61)),
        warmup_steps=int(rng.integers(0, 4)),
        kernels_per_step=int(rng.integers(30, 301)),
        layers=int(rng.integers(2, 13)),
        distinct_kernels=int(rng.integers(6, 41)),
        kernel_ns=_log_uniform(rng, 8_000, 200_000),
        jitter=float(rng.uniform(0, 0.15)),
        streams=int(rng.choice([1, 1, 1, 2, 3])),
        micro_batches=int(rng.choice([1, 1, 1, 1, 2, 4])),
        graph=_chance(rng, 0.06),
    )


def gpu_step_ns(plan: Plan) -> int:
    """About how long the GPU needs for one step with nothing in its way (ns)."""
    kernels = plan.kernels_per_step * (plan.kernel_ns + 1_000)
    copies = plan.h2d_ns if plan.input_copies else 0
    return plan.micro_batches * (kernels + copies) + plan.allreduce_ns * bool(plan.allreduces)


def _input(rng: np.random.Generator, plan: Plan) -> Plan:
    """Input copies of 1 to 15 % of a step, none in a tenth of the plans; data waits up to 60 %."""
    h2d = max(20_000, int(gpu_step_ns(replace(plan, h2d_ns=0)) * rng.uniform(0.01, 0.15)))
    plan = replace(
        plan,
        input_copies=int(rng.choice([0, 1, 1, 1, 1, 1, 2, 2, 2, 2])),
        h2d_ns=h2d // plan.micro_batches,
        input_bytes=max(200_000, h2d // plan.micro_batches * 50),
        pageable=_chance(rng, 0.2),
    )
    share = float(rng.choice([0.0, rng.uniform(0.02, 0.2), rng.uniform(0.2, 0.6)]))
    wait = gpu_step_ns(plan) // plan.micro_batches * share / (1 - share)
    return replace(
        plan,
        data_wait_ns=int(wait),
        data_wait="os_wait" if _chance(rng, 0.7) else "python",
        hiccup_rate=float(rng.choice([0, 0, 0.05])),
    )


def _host(rng: np.random.Generator, plan: Plan) -> Plan:
    """A host that waits for the loss, or one that runs ahead."""
    return replace(
        plan,
        sync_every_step=_chance(rng, 0.6),
        launch_ns=int(rng.integers(3_000, 9_000)),
        python_ns=int(rng.integers(1_000, 12_000)),
        autograd_thread=_chance(rng, 0.8),
        allocs_per_step=int(rng.choice([0, 0, 0, 0, 2, 6])),
        alloc_ns=_log_uniform(rng, 20_000, 400_000),
    )


def _ranks(rng: np.random.Generator, plan: Plan) -> Plan:
    """One GPU, DDP on 2 to 4, or DataParallel."""
    way = rng.choice(["one", "one", "ddp", "ddp", "ddp", "dataparallel"])
    if way == "dataparallel":
        return replace(plan, gpus_per_process=int(rng.integers(2, 5)), graph=False)
    if way == "one":
        return replace(plan, first_gpu=int(rng.integers(0, 4)), isolated=_chance(rng, 0.5))
    ranks, odd = int(rng.integers(2, 5)), rng.choice(["", "", "slow", "late"])
    step = gpu_step_ns(plan)
    return replace(
        plan,
        ranks=ranks,
        isolated=_chance(rng, 0.3),
        allreduces=int(rng.integers(1, 6)),
        allreduce_ns=int(step * rng.uniform(0.01, 0.08)),
        slow_rank=int(rng.integers(ranks)) if odd == "slow" else -1,
        slow_factor=float(rng.uniform(1.1, 1.5)) if odd == "slow" else 1.0,
        late_host_rank=int(rng.integers(ranks)) if odd == "late" else -1,
        late_host_ns=int(step * rng.uniform(0.05, 0.2)) if odd == "late" else 0,
    )


def _phases(rng: np.random.Generator, plan: Plan) -> Plan:
    """Validation in a quarter of the plans, a checkpoint in a tenth, cut edges in a seventh."""
    middle = int(rng.integers(plan.steps // 2, plan.steps - 2))
    validated = _chance(rng, 0.25)
    return replace(
        plan,
        validation_after=(middle,) if validated else (),
        validation_batches=int(rng.integers(3, 11)) if validated else 0,
        validation_on_all=_chance(rng, 0.6),
        checkpoint_after=(middle,) if _chance(rng, 0.1) else (),
        checkpoint_ns=2 * gpu_step_ns(plan),
        edges_cut=_chance(rng, 0.15),
    )


def ddp_plan(rng: np.random.Generator, seed: int) -> Plan:
    """A balanced run of 2 to 16 ranks that all-reduce: no hiccups, no pageable copies."""
    plan = replace(_model(rng, Plan(seed=seed)), steps=int(rng.integers(14, 36)), graph=False)
    plan = replace(plan, kernels_per_step=int(rng.integers(30, 121)))
    plan = replace(_host(rng, _input(rng, plan)), hiccup_rate=0.0, pageable=False)
    plan = _phases(rng, plan)
    return replace(
        plan,
        ranks=int(rng.integers(2, 17)),
        isolated=_chance(rng, 0.3),
        allreduces=int(rng.integers(1, 6)),
        allreduce_ns=int(gpu_step_ns(plan) * rng.uniform(0.01, 0.08)),
    )


def mixed_plan(seed: int) -> Plan:
    """A short run on 1, 2, 4 or 8 GPUs with several causes at once, drawn at random."""
    rng = np.random.default_rng((seed, 11))
    plan = replace(
        random_plan(seed),
        steps=int(rng.integers(9, 40)),
        kernels_per_step=int(rng.integers(24, 121)),
        validation_after=(),
        checkpoint_after=(),
        graph=False,
    )
    gpus = int(rng.choice([1, 2, 4, 8]))
    if gpus > 1 and _chance(rng, 0.3):
        plan = _one_process(rng, plan, gpus)
    else:
        plan = _several_ranks(rng, plan, gpus)
    return _late_work(rng, plan)


_EXCHANGES: tuple[Exchange, ...] = ("dataparallel", "gpu-server", "cpu-server", "ring")


def _one_process(rng: np.random.Generator, plan: Plan, gpus: int) -> Plan:
    """One process for all GPUs, which exchange in any way."""
    plan = replace(plan, ranks=1, isolated=False, allreduces=0, micro_batches=1)
    plan = replace(plan, slow_rank=-1, late_host_rank=-1, gpus_per_process=gpus)
    return replace(
        plan,
        input_copies=max(1, plan.input_copies),
        exchange=_EXCHANGES[int(rng.choice(len(_EXCHANGES)))],
        exchange_bytes=int(40 * rng.uniform(0.05, 0.5) * gpu_step_ns(plan)),
        peer_access=_chance(rng, 0.6),
    )


def _several_ranks(rng: np.random.Generator, plan: Plan, ranks: int) -> Plan:
    """A process for each GPU, some of them slow, late or busy, most that all-reduce."""
    step, buckets = gpu_step_ns(plan), int(rng.integers(1, 6)) * (ranks > 1 and _chance(rng, 0.85))
    one = int(rng.integers(ranks))
    slow = rng.permutation(ranks)[: int(rng.integers(ranks))] if _chance(rng, 0.4) else ()
    return replace(
        plan,
        ranks=ranks,
        gpus_per_process=1,
        allreduces=buckets,
        allreduce_ns=int(step * rng.uniform(0.01, 0.6)) // max(buckets, 1),
        joined=_chance(rng, 0.8),
        collective=str(rng.choice(["AllReduce", "AllReduce", "SendRecv"])),
        group_size=2 if ranks > 2 and _chance(rng, 0.2) else 0,
        slow_rank=one if ranks > 1 and _chance(rng, 0.25) else -1,
        slow_factor=float(rng.uniform(1.05, 3)),
        slow_ranks=tuple((int(rank), float(rng.uniform(1.03, 2.5))) for rank in slow),
        busy_rank=int(rng.integers(ranks)) if ranks > 1 and _chance(rng, 0.25) else -1,
        busy_share=float(rng.uniform(0.3, 3)),
        late_host_rank=int(rng.integers(ranks)) if ranks > 1 and _chance(rng, 0.3) else -1,
        late_host_ns=int(step * rng.uniform(0.05, 1)) // plan.micro_batches,
        late_in_loader=_chance(rng, 0.4),
        odd_steps=tuple(range(4, 4 + int(rng.integers(1, 5)))) if _chance(rng, 0.2) else (),
        begins_late=one if ranks > 1 and _chance(rng, 0.1) else -1,
        edges_cut=False,
        graph=plan.streams == 1 and _chance(rng, 0.4),
    )


def _late_work(rng: np.random.Generator, plan: Plan) -> Plan:
    """Waits of every sort for the host, alone or together."""
    step = gpu_step_ns(plan) // plan.micro_batches
    changes: tuple[dict[str, Any], ...] = (
        {"pageable": True, "input_copies": 2, "h2d_ns": int(step * rng.uniform(0.05, 0.6))},
        {"copy_stream": True},
        {"data_wait_ns": int(step * rng.uniform(0.1, 3))},
        {"hiccup_rate": float(rng.uniform(0.05, 0.3))},
        {
            "python_ns": int(rng.integers(5_000, 80_000)),
            "launch_ns": int(rng.integers(3_000, 40_000)),
        },
        {"hidden_ns": int(step * rng.uniform(0.1, 0.6))},
        {"epoch_steps": int(rng.integers(3, 9)), "restart_ns": int(step * rng.uniform(0.5, 4))},
        {"jitter": float(rng.uniform(0.2, 0.6))},
        {"queue_depth": int(rng.integers(20, 200))},
        {"checkpoint_after": (plan.steps // 2,)},
    )
    for change in changes:
        if _chance(rng, 0.2):
            plan = replace(plan, **change)
    return plan
