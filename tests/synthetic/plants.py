"""Runs with one planted cause each: what a diagnosis must find, and where. Times are ns.

To add a cause, add a `Plant` to `PLANTS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tests.synthetic import link_plants as links
from tests.synthetic.nsys import write_nsys
from tests.synthetic.nvml import write_neighbour, write_nvml
from tests.synthetic.plan import Plan
from tests.synthetic.recording import Recording
from tests.synthetic.simulate import simulate
from tests.synthetic.variants import ddp_plan, gpu_step_ns

LEAST_EFFECT = 0.05  # by so much of its time at least a plant makes a run longer
TRIES = 20


@dataclass(frozen=True)
class Plant:
    """A cause, and how to make a run that has it."""

    name: str
    expects: tuple[str, ...]  # ids of findings, one of which must come first; none: no imbalance
    alter: Callable[[np.random.Generator, Plan], Plan]
    pattern: str = ""  # what the finding's evidence must say, if anything
    rank: Callable[[Plan], int] | None = None  # whom the finding must name
    write: Callable[[Recording, Path], object] = write_nsys
    base: Callable[[np.random.Generator, int], Plan] = ddp_plan  # from a seed, before `alter`
    lengthens: bool = True  # whether it costs time at all, which is then made sure


def _nothing(rng: np.random.Generator, plan: Plan) -> Plan:
    """Balanced; one run in eight has a single rank."""
    return replace(plan, ranks=1, allreduces=0) if rng.random() < 1 / 8 else plan


def _odd(rng: np.random.Generator, plan: Plan) -> int:
    return int(rng.integers(plan.ranks))


def _steps(rng: np.random.Generator, plan: Plan, pattern: str) -> tuple[int, ...]:
    """Steps in the middle of the run: none for all, one, or a tenth to a quarter in a row.

    Not so early that they could be taken for warm-up.
    """
    if pattern == "constant":
        return ()
    low = plan.warmup_steps + 5
    count = 1
    if pattern == "burst":
        count = int(rng.integers(max(2, plan.steps // 10), max(3, plan.steps // 4) + 1))
    first = int(rng.integers(low, plan.steps - count - 1))
    return tuple(range(first, first + count))


def _several(rng: np.random.Generator, pattern: str) -> float:
    """How much of a step a rank is late, so that it costs about as much whatever the pattern."""
    low, high = {"constant": (0.1, 0.4), "burst": (0.4, 1.2), "one-step": (1.5, 3.0)}[pattern]
    return float(rng.uniform(low, high))


def _slow(pattern: str) -> Callable[[np.random.Generator, Plan], Plan]:
    def alter(rng: np.random.Generator, plan: Plan) -> Plan:
        return replace(
            plan, slow_rank=_odd(rng, plan), slow_factor=1 + _several(rng, pattern),
            odd_steps=_steps(rng, plan, pattern),
        )  # fmt: skip

    return alter


def _clocked_lower(rng: np.random.Generator, plan: Plan) -> Plan:
    return replace(plan, slow_rank=_odd(rng, plan), slow_factor=float(rng.uniform(1.07, 1.15)))


def _shared(pattern: str) -> Callable[[np.random.Generator, Plan], Plan]:
    """Another process takes turns with one rank, for a third to two thirds of the time."""

    def alter(rng: np.random.Generator, plan: Plan) -> Plan:
        use = float(rng.uniform(0.3, 0.65))
        odd = _steps(rng, plan, pattern)
        return replace(plan, neighbour_rank=_odd(rng, plan), neighbour_use=use, odd_steps=odd)

    return alter


def _write_shared(recording: Recording, path: Path) -> None:
    write_nsys(recording, path)
    write_nvml(recording, path)
    write_neighbour(recording, path)


def _neighbour_rank(plan: Plan) -> int:
    return plan.neighbour_rank


def _busy(rng: np.random.Generator, plan: Plan) -> Plan:
    return replace(plan, busy_rank=_odd(rng, plan), busy_share=float(rng.uniform(0.4, 1.2)))


def _doubled(rng: np.random.Generator, plan: Plan) -> Plan:
    """All kernels of a step once more on one rank, and hosts that are slow on all of them."""
    return replace(_busy(rng, plan), busy_share=3.0, python_ns=plan.kernel_ns // 2)


def _slow_and_late(rng: np.random.Generator, plan: Plan) -> Plan:
    plan = _slow("constant")(rng, plan)
    late = int(gpu_step_ns(plan) * rng.uniform(0.1, 0.3)) // plan.micro_batches
    return replace(plan, late_host_rank=plan.slow_rank, late_host_ns=late)


def _slow_stage(rng: np.random.Generator, plan: Plan) -> Plan:
    return replace(_slow("constant")(rng, plan), collective="SendRecv")


def _begins_late(rng: np.random.Generator, plan: Plan) -> Plan:
    return replace(plan, begins_late=_odd(rng, plan), edges_cut=False)


def _uploads(rng: np.random.Generator, plan: Plan) -> Plan:
    return replace(plan, uploads=int(rng.integers(20, 200)), edges_cut=False)


def _starved(rng: np.random.Generator, plan: Plan) -> Plan:
    """The loader is late, and the small copy of each batch ends the wait."""
    wait = int(gpu_step_ns(plan) * rng.uniform(0.5, 2)) // plan.micro_batches
    return replace(plan, data_wait_ns=wait, data_wait="python", input_copies=2, labels_first=True)


def _starved_unnamed(rng: np.random.Generator, plan: Plan) -> Plan:
    return replace(_starved(rng, plan), named_optimizer=False)


def _blocked(rng: np.random.Generator, plan: Plan) -> Plan:
    share = float(rng.uniform(0.3, 1))
    return replace(plan, hidden_ns=max(2_000_000, int(share * gpu_step_ns(plan))), data_wait_ns=0)


def single_plan(rng: np.random.Generator, seed: int) -> Plan:
    """One rank with one GPU."""
    return replace(ddp_plan(rng, seed), ranks=1, allreduces=0)


def _late(pattern: str, in_loader: bool) -> Callable[[np.random.Generator, Plan], Plan]:
    def alter(rng: np.random.Generator, plan: Plan) -> Plan:
        return replace(
            plan, late_host_rank=_odd(rng, plan), late_in_loader=in_loader,
            late_host_ns=int(gpu_step_ns(plan) * _several(rng, pattern)) // plan.micro_batches,
            odd_steps=_steps(rng, plan, pattern),
        )  # fmt: skip

    return alter


def _slow_rank(plan: Plan) -> int:
    return plan.slow_rank


def _busy_rank(plan: Plan) -> int:
    return plan.busy_rank


def _late_rank(plan: Plan) -> int:
    return plan.late_host_rank


def _straggler(name: str, pattern: str) -> Plant:
    return Plant(name, ("straggler",), _slow(pattern), pattern, _slow_rank)


def _late_host(name: str, pattern: str, in_loader: bool = False) -> Plant:
    return Plant(name, ("late-host",), _late(pattern, in_loader), pattern, _late_rank)


PLANTS = (
    Plant("nothing", (), _nothing, lengthens=False),
    _straggler("slow rank, constant", "constant"),
    _straggler("slow rank, burst", "burst"),
    _straggler("slow rank, one step", "one-step"),
    Plant("clocked lower", ("straggler", "clock-mismatch"), _clocked_lower, "", _slow_rank),
    Plant("more work on one rank", ("straggler",), _busy, "constant", _busy_rank),
    _late_host("late host, constant", "constant"),
    _late_host("late host, burst", "burst"),
    _late_host("late host, one step", "one-step"),
    _late_host("late loader, constant", "constant", in_loader=True),
    Plant("neighbour on a card, constant", ("shared-gpu",), _shared("constant"), "",
          _neighbour_rank, write=_write_shared),
    Plant("neighbour on a card, burst", ("shared-gpu",), _shared("burst"), "", _neighbour_rank,
          write=_write_shared),
    Plant("idle neighbour on all cards", (), _nothing, write=_write_shared, lengthens=False),
    Plant("DataParallel", ("gpu0-skew",), links.as_it_is, base=links.parallel_plan,
          lengthens=False),
    Plant("server on GPU 0", ("gpu0-skew",), links.served, base=links.parallel_plan),
    Plant("copies through the host", ("host-staged-comm",), links.served_through_the_host,
          base=links.parallel_plan),
    Plant("NCCL through the host", ("host-staged-comm",), links.slower_all_reduces,
          write=links.write_without_nvlink),
    Plant("PHB pair, NCCL", ("topology",), links.one_pair_apart, base=links.pairs_plan,
          write=links.write_two_sorts),
    Plant("PHB in a ring", ("topology",), links.switches_apart, base=links.ring_plan,
          write=links.write_switches),
    Plant("PHB as fast as PIX in a ring", (), links.as_it_is, base=links.ring_plan,
          write=links.write_switches, lengthens=False),
    Plant("PHB pair as fast as PIX, NCCL", (), links.as_it_is, base=links.pairs_plan,
          write=links.write_two_sorts, lengthens=False),
    Plant("pageable copies", ("h2d-pageable",), links.pageable),
    Plant("small copy first", ("data-feeding",), _starved, base=single_plan),
    Plant("small copy first, optimizer without a name", ("data-feeding",), _starved_unnamed,
          base=single_plan),
    Plant("uneven spans", (), _begins_late, lengthens=False),
    Plant("slow stage of a pipeline", ("straggler",), _slow_stage, "", _slow_rank),
    Plant("twice the work on one rank, slow hosts", ("straggler",), _doubled, "", _busy_rank),
    Plant("one-off upload", (), _uploads, base=single_plan, lengthens=False),
    Plant("blocking copy", ("sync-bound",), _blocked, base=single_plan),
    Plant("slow kernels and a late host", ("straggler", "late-host"), _slow_and_late, "",
          _slow_rank),
)  # fmt: skip


def planted(plant: Plant, seed: int) -> Recording:
    """A run with the plant; the same seed gives the same run.

    What a host that runs ahead hides is no cause of anything: a plant that lengthens the run by
    less than `LEAST_EFFECT` is drawn again. Raises ValueError where none is found.
    """
    for attempt in range(TRIES):
        rng = np.random.default_rng((seed, attempt, 7))
        base = plant.base(rng, seed * TRIES + attempt)
        recording = simulate(plant.alter(rng, base))
        if not plant.lengthens:
            return recording
        if steady_ns(recording) >= (1 + LEAST_EFFECT) * _simulated_ns(base):
            return recording
    raise ValueError(f"no run in which {plant.name} shows, of seed {seed}")


@functools.cache
def _simulated_ns(base: Plan) -> int:
    """The time of the steady steps; plants of one seed alter the same run."""
    return steady_ns(simulate(base))


def steady_ns(recording: Recording) -> int:
    """The time of the steady steps of the first rank."""
    windows = [w for w in recording.truth.windows if w.rank == 0 and w.phase == "steady"]
    return sum(window.end - window.start for window in windows if window.whole)
