"""Plants in what GPUs exchange: by a server, through the host, over links of two sorts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.synthetic.nsys import write_nsys
from tests.synthetic.nvml import Row, Values, pcie, write_nvml
from tests.synthetic.plan import Plan
from tests.synthetic.recording import Recording
from tests.synthetic.variants import ddp_plan, gpu_step_ns

SLOW_PAIR = (0, 1)  # the one that no switch joins


def parallel_plan(rng: np.random.Generator, seed: int) -> Plan:
    """One process with 2 to 8 GPUs."""
    plan = replace(ddp_plan(rng, seed), ranks=1, allreduces=0, isolated=False, micro_batches=1)
    plan = replace(plan, gpus_per_process=int(rng.integers(2, 9)))
    return replace(plan, input_copies=max(1, plan.input_copies))


def pairs_plan(rng: np.random.Generator, seed: int) -> Plan:
    """Pairs of ranks that all-reduce among themselves, for a good part of the step."""
    plan = ddp_plan(rng, seed)
    share = float(rng.uniform(0.2, 0.6)) / plan.allreduces
    return replace(
        plan, ranks=2 * int(rng.integers(2, 9)), group_size=2, isolated=False,
        allreduce_ns=int(gpu_step_ns(plan) * share),
    )  # fmt: skip


def ring_plan(rng: np.random.Generator, seed: int) -> Plan:
    """One process with 4, 6 or 8 GPUs, each of which gives to the next for a tenth of a step."""
    plan = replace(parallel_plan(rng, seed), gpus_per_process=2 * int(rng.integers(2, 5)))
    share = float(rng.uniform(0.1, 0.3))
    return replace(plan, exchange="ring", exchange_bytes=int(40 * share * gpu_step_ns(plan)))


def as_it_is(rng: np.random.Generator, plan: Plan) -> Plan:
    """The plan alone is what is sick, or well."""
    return plan


def served(rng: np.random.Generator, plan: Plan) -> Plan:
    """A parameter server on the first GPU: a tenth of a step or more to each GPU and back."""
    share = float(rng.uniform(0.1, 0.3))
    return replace(plan, exchange="gpu-server", exchange_bytes=int(40 * share * gpu_step_ns(plan)))


def served_through_the_host(rng: np.random.Generator, plan: Plan) -> Plan:
    """Return a plan in which no GPU can reach another's memory."""
    return replace(served(rng, plan), peer_access=False)


def one_pair_apart(rng: np.random.Generator, plan: Plan) -> Plan:
    """One pair of ranks is joined by a link that is slower: by 17 %, or up to three times."""
    return replace(plan, slow_pairs=(SLOW_PAIR,), slow_link=float(rng.uniform(1.17, 3)))


def switches_apart(rng: np.random.Generator, plan: Plan) -> Plan:
    """Every second link of a ring crosses a host bridge, and is slower for it."""
    count = plan.gpus_per_process
    crossings = tuple((gpu, (gpu + 1) % count) for gpu in range(1, count, 2))
    return replace(plan, slow_pairs=crossings, slow_link=float(rng.uniform(1.17, 3)))


def slower_all_reduces(rng: np.random.Generator, plan: Plan) -> Plan:
    """NCCL takes much longer through the host's memory."""
    return replace(plan, allreduce_ns=int(plan.allreduce_ns * rng.uniform(4, 10)))


def pageable(rng: np.random.Generator, plan: Plan) -> Plan:
    """The input comes from pageable memory, and takes 4 to 10 times as long."""
    slower = float(rng.uniform(4, 10))
    return replace(
        plan,
        input_copies=max(1, plan.input_copies),
        pageable=True,
        h2d_ns=int(plan.h2d_ns * slower),
    )


def write_two_sorts(recording: Recording, path: Path) -> None:
    """With a topology: one pair of cards under no switch, all other neighbours under one."""
    write_nsys(recording, path)
    write_nvml(recording, path, link=_two_sorts, every_ns=20_000_000)


def write_switches(recording: Recording, path: Path) -> None:
    """With a topology: two cards under each switch."""
    write_nsys(recording, path)
    write_nvml(recording, path, link=switches, every_ns=20_000_000)


def write_without_nvlink(recording: Recording, path: Path) -> None:
    """With counters of NVLink that stand still while PCIe's go on."""
    write_nsys(recording, path)
    write_nvml(recording, path, value=_by_pcie, every_ns=20_000_000)


def _two_sorts(gpu: int, peer: int) -> Row:
    apart = {gpu, peer} == {*SLOW_PAIR} or gpu // 2 != peer // 2
    return pcie("PHB" if apart else "PIX")(gpu, peer)


def switches(gpu: int, peer: int) -> Row:
    """Two cards under each PCIe switch."""
    return pcie("PIX" if gpu // 2 == peer // 2 else "PHB")(gpu, peer)


def _by_pcie(gpu: int, time: int, row: Row) -> Values:
    return {"nvlinkTx": 5_000_000, "pcieTx": 10 * time}
