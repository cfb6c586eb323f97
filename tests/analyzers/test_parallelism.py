"""Groups of ranks are told apart, and what each is for: data, tensor, pipeline, expert parallel."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import gputrace
from gputrace.analyzers import pipelines
from gputrace.analyzers.collectives import match_collectives
from gputrace.analyzers.findings import Facts
from gputrace.analyzers.findings.stragglers import _where
from gputrace.analyzers.parallelism import role_of_name
from gputrace.api import Report
from gputrace.model.communication import Pipeline
from gputrace.readers.registry import open_trace
from tests.helpers.exports import NVTX, PUSH_POP_RANGE, Value, global_id
from tests.helpers.kineto import kernel, write
from tests.helpers.per_gpu import gpus_with_lanes
from tests.helpers.sentences import words_of
from tests.synthetic.nvml import pcie
from tests.synthetic.parallel import (
    PAYLOADS,
    SCHEMAS,
    STATIC,
    Chunk,
    Group,
    Stages,
    World,
    gpipe,
    interleaved,
    one_f_one_b,
)

STEPS = 6
LAYERS = 4
US = 1_000


def analyzed(world: World, path: Path) -> Report:
    with gputrace.open(world.write(path / "run.sqlite")) as trace:
        return trace.analyze()


def trained(world: World, step: Callable[[int], object]) -> World:
    """Play and mark steps."""
    for number in range(STEPS):
        begins = list(world.now)
        step(number)
        world.step(number, begins)
    return world


def pairs(count: int) -> list[list[int]]:
    return [[2 * n, 2 * n + 1] for n in range(count)]


def test_groups_in_lockstep_are_told_apart_by_their_communicators(tmp_path: Path) -> None:
    """Four pairs that start and end all at once: nothing but the communicator says who is who."""
    world = World(8)
    groups = [world.group(ranks) for ranks in pairs(4)]

    def step(_: int) -> None:
        for _layer in range(LAYERS):
            for rank in range(8):
                world.compute(rank, 200 * US)
            for n, group in enumerate(groups):
                world.collective(group, "AllReduce", (n + 1) << 20, 50 * US)

    report = analyzed(trained(world, step), tmp_path)
    found = {total.ranks: total for total in report.collectives}
    assert sorted(found) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    for n, (_, total) in enumerate(sorted(found.items())):
        assert total.bytes == (n + 1) << 20
        assert total.communicator == f"{groups[n].id:#x}"
        assert total.group_size == 2
        assert total.count == LAYERS * report.steps.steady_count


@pytest.mark.parametrize("payloads", [True, False])
def test_pairs_in_lockstep_behind_a_host_bridge_are_found(tmp_path: Path, payloads: bool) -> None:
    """Four of eight cards are joined in pairs over PHB, where an all-reduce takes 1.2 times as
    long; that is too little to tell the pairs from the others by the kernels' ends.
    """
    world = World(8, payloads=payloads)
    groups = [world.group(ranks) for ranks in pairs(4)]
    rows = [pcie("PHB" if min(a, b) >= 4 else "PIX")(a, b) for a in range(8) for b in range(8)]
    world.export.give("GPUTRACE_TOPOLOGY", *rows[0])
    for row in rows:
        world.export.add("GPUTRACE_TOPOLOGY", **row)

    def step(_: int) -> None:
        for _layer in range(2 * LAYERS):
            for rank in range(8):
                world.compute(rank, 100 * US)
            for n, group in enumerate(groups):
                world.collective(group, "AllReduce", 8 << 20, (60 if n >= 2 else 50) * US)
            world.now = [max(world.now)] * 8

    report = analyzed(trained(world, step), tmp_path)
    found = [each for each in report.findings if each.id == "topology"]
    assert len(report.collectives) == (4 if payloads else 1)
    assert [each.evidence["ratio"] for each in found] == ([1.2] if payloads else [])
    assert [set(each.gpus) <= {4, 5, 6, 7} for each in found] == [True] * payloads


def tensor_step(world: World, groups: Sequence[Group]) -> None:
    """Two all-reduces a layer, in both passes, that the compute waits for."""
    for _ in range(4 * LAYERS):
        for rank in range(world.ranks):
            world.compute(rank, 100 * US)
        for group in groups:
            world.collective(group, "AllReduce", 8 << 20, 30 * US)


def data_step(world: World, groups: Sequence[Group]) -> None:
    """Buckets of gradients beside the backward pass."""
    for part in range(3 * LAYERS):
        for rank in range(world.ranks):
            world.compute(rank, 100 * US)
        if part >= LAYERS:
            for group in groups:
                world.collective(group, "AllReduce", 25 << 20, 60 * US, waits=False)
    for group in groups:
        world.join(group)


def sharded_step(world: World, groups: Sequence[Group]) -> None:
    """Parameters gathered for each layer in both passes, gradients scattered in the backward."""
    for backward in (False, True):
        for _ in range(LAYERS):
            for group in groups:
                world.collective(group, "AllGather", 16 << 20, 50 * US)
            for rank in range(world.ranks):
                world.compute(rank, (200 if backward else 100) * US)
            for group in groups if backward else ():
                world.collective(group, "ReduceScatter", 16 << 20, 60 * US, waits=False)
    for group in groups:
        world.join(group)


def sequence_step(world: World, groups: Sequence[Group]) -> None:
    """Tensor parallel with activations gathered before and scattered after each block."""
    for _ in range(4 * LAYERS):
        for operation in ("AllGather", "ReduceScatter"):
            for group in groups:
                world.collective(group, operation, 4 << 20, 30 * US)
            for rank in range(world.ranks):
                world.compute(rank, 100 * US)


def expert_step(world: World, groups: Sequence[Group]) -> None:
    """Tokens go to their experts and back, not equally many in each layer."""
    for layer in range(2 * LAYERS):
        for _ in ("dispatch", "combine"):
            for rank in range(world.ranks):
                world.compute(rank, 100 * US)
            for group in groups:
                world.all_to_all(group, (4 << 20) + layer * 65_536, 40 * US)


@pytest.mark.parametrize(
    ("step", "role"),
    [
        (tensor_step, "tensor"),
        (data_step, "data"),
        (sharded_step, "sharded data"),
        (sequence_step, "tensor"),
        (expert_step, "expert"),
    ],
)
@pytest.mark.parametrize("payloads", [True, False], ids=["with payloads", "without"])
def test_the_role_of_a_group_shows_in_what_it_exchanges(
    tmp_path: Path, step: Callable[[World, Sequence[Group]], None], role: str, payloads: bool
) -> None:
    if role == "expert" and not payloads:
        pytest.skip("a fused exchange does not say with whom")
    world = World(4, payloads=payloads)
    groups = [world.group([0, 1, 2, 3])]
    report = analyzed(trained(world, lambda _: step(world, groups)), tmp_path)
    assert {total.role for total in report.collectives} == {role}
    assert {total.group_size for total in report.collectives} == ({4} if payloads else {None})


def test_sizes_are_those_of_nccl_tests(tmp_path: Path) -> None:
    """Of a gather and a scatter, all ranks' parts."""
    world = World(4)
    groups = [world.group([0, 1, 2, 3])]
    report = analyzed(trained(world, lambda _: sharded_step(world, groups)), tmp_path)
    assert {t.operation: t.bytes for t in report.collectives} == {
        "AllGather": 64 << 20,
        "ReduceScatter": 64 << 20,
    }


@pytest.mark.parametrize("ranks", [8, 64])
def test_tensor_and_data_parallel_groups_of_one_run_each_have_their_rows(
    tmp_path: Path, ranks: int
) -> None:
    """Hosts of four GPUs: tensor parallel within, data parallel across them."""
    hosts = ranks // 4
    world = World(ranks, hosts=hosts)
    tensor = [world.group(range(first, first + 4)) for first in range(0, ranks, 4)]
    data = [world.group(range(rank, ranks, 4)) for rank in range(4)]

    def step(_: int) -> None:
        for part in range(3 * LAYERS):
            for rank in range(ranks):
                world.compute(rank, 100 * US)
            for group in tensor:
                world.collective(group, "AllReduce", 8 << 20, 30 * US)
            for group in data if part >= LAYERS else ():
                world.collective(group, "AllReduce", 25 << 20, 60 * US, waits=False)
        for group in data:
            world.join(group)

    report = analyzed(trained(world, step), tmp_path)
    found = sorted((total.role, total.ranks, total.hosts) for total in report.collectives)
    assert found == [
        *(("data", tuple(range(rank, ranks, 4)), hosts) for rank in range(4)),
        *(("tensor", tuple(range(first, first + 4)), 1) for first in range(0, ranks, 4)),
    ]


def grouped(rank: int, ranks: str, **more: Any) -> dict[str, Any]:
    """A kernel of PyTorch's profiler with the arguments of its process group."""
    group: dict[str, Any] = {"Process Group Name": "7", "Process Group Description": "mesh_tp"}
    group |= {"Process Group Ranks": ranks, "Group size": 2, "Collective name": "allreduce"}
    name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096>)"
    return kernel(100, 50, name, **group, **more)


def test_pytorchs_process_groups_are_communicators_with_names(tmp_path: Path) -> None:
    """Two groups of one name, each of two ranks, whose kernels run at the same time."""
    paths = []
    for rank in range(4):
        ranks = "[0, 1]" if rank < 2 else "[2, 3]"
        event = grouped(rank, ranks, **{"In msg nelems": 1024, "dtype": "BFloat16"})
        around = {"rank": rank, "world_size": 4, "backend": "nccl"}
        path = tmp_path / f"rank{rank}.pt.trace.json"
        epoch = {"baseTimeNanoseconds": 10**18, "host_name": "n0"}
        paths.append(write(path, event, distributedInfo=around, **epoch))
    with gputrace.open(*paths) as trace:
        found = trace.analyze().collectives
    assert sorted(total.ranks for total in found) == [(0, 1), (2, 3)]
    for total in found:
        assert (total.role, total.group, total.group_size) == ("tensor", "mesh_tp", 2)
        assert (total.bytes, total.wait_ns) == (2048, 0)


@pytest.mark.parametrize(
    ("told", "operation"),
    [("allreduce", "AllReduce"), ("_allgather_base", "AllGather"), ("send", "SendRecv")],
)
def test_a_kernel_of_rccl_does_what_its_arguments_say(
    tmp_path: Path, told: str, operation: str
) -> None:
    """RCCL runs one kernel whatever the operation; PyTorch's profiler adds which it is."""
    group: dict[str, Any] = {"Process Group Name": "0", "Process Group Description": "undefined"}
    group |= {"Process Group Ranks": "[0, 1]", "Group size": 2, "Collective name": told}
    group |= {"In msg nelems": 1024, "dtype": "Float", "Dst Rank": 1}
    path = write(
        tmp_path / "rank0.pt.trace.json",
        kernel(100, 50, "ncclDevKernel_Generic(ncclDevKernelArgs)", **group),
        distributedInfo={"rank": 0, "world_size": 2, "backend": "nccl"},
    )
    with gputrace.open(path) as trace:
        report = trace.analyze()
    (total,) = report.collectives
    assert (total.operation, total.group, total.group_size) == (operation, "", 2)
    assert f"{operation}, gpu 0 of 2" in report.render("text")


def test_a_rank_that_was_not_recorded_is_missing_from_its_communicator(tmp_path: Path) -> None:
    event = grouped(0, "[0, 1]", **{"In msg nelems": 8, "dtype": "Float"})
    with gputrace.open(write(tmp_path / "rank0.pt.trace.json", event)) as trace:
        (total,) = trace.analyze().collectives
    assert (total.ranks, total.group_size, total.wait_ns) == ((0,), 2, None)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("mesh_dp", "data"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "data"),
        ("mesh_fsdp", "sharded data"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "expert"),
        ("EXPERT_DATA_PARALLEL_GROUP", "data"),
        ("mesh_cp", "context"),
        ("default_pg", ""),
        ("undefined", ""),
    ],
)
def test_a_name_may_say_what_a_group_is_for(name: str, role: str) -> None:
    assert role_of_name(name) == role


def bubbles(stages: Stages, path: Path) -> Pipeline:
    """Play and analyze a pipeline."""
    world = World(len(stages.orders))
    group = world.group(range(world.ranks))
    report = analyzed(trained(world, lambda _: stages.run(world, group)), path)
    assert {total.role for total in report.collectives} == {"pipeline"}
    (found,) = report.pipelines
    return found


@pytest.mark.parametrize(
    ("schedule", "orders"),
    [
        ("1F1B", one_f_one_b(2, 6)),
        ("GPipe", gpipe(4, 8)),
        ("1F1B", one_f_one_b(4, 8)),
        ("interleaved", interleaved(4, 8, 2)),
        ("1F1B", one_f_one_b(8, 8)),
        ("1F1B", one_f_one_b(16, 16)),
    ],
    ids=lambda value: str(len(value)) if isinstance(value, list) else value,
)
def test_the_bubble_is_split_as_it_was_planted(
    schedule: str, orders: list[list[Chunk]], tmp_path: Path
) -> None:
    """Truth: the same pipeline played without gaps, without transfers, and with even stages."""
    count = len(orders)
    forward = [400_000 + 40_000 * (stage == 1) for stage in range(count)]
    planted = Stages(orders, forward, 30_000, [15_000] * count)
    found = bubbles(planted, tmp_path)
    quick = replace(planted, gap_ns=())
    at_once = replace(quick, transfer_ns=0)
    even = replace(at_once, forward_ns=[sum(forward) // count] * count)
    lengths = [each.run() for each in (planted, quick, at_once, even)]
    batches = max(batch for _, _, batch in orders[0]) + 1
    work = 3 * batches * sum(forward) // count
    true = [a - b for a, b in pairwise([*lengths, work])]
    parts = [found.host_ns, found.transfer_ns, found.imbalance_ns, found.schedule_ns]
    assert parts == pytest.approx(true, abs=0.02 * (lengths[0] - work))
    assert (found.schedule, found.micro_batches) == (schedule, batches)
    assert [stage.rank for stage in found.stages] == list(range(count))
    assert found.slowest == 1
    assert found.excess_ns == pytest.approx(
        3 * batches * (440_000 - sum(forward) / count), rel=0.02
    )
    # All sums are exact.
    assert sum(parts) == found.bubble_ns == found.step_ns - found.work_ns
    for stage in found.stages:
        causes = stage.schedule_ns, stage.imbalance_ns, stage.transfer_ns, stage.host_ns
        assert sum(causes) == stage.bubble_ns == found.step_ns - stage.work_ns


def ids(report: Report) -> dict[str, str]:
    return {finding.id: words_of(finding) for finding in report.findings}


def test_a_pipelines_finding_says_which_stage_to_lighten_by_how_much(tmp_path: Path) -> None:
    orders = one_f_one_b(4, 16)
    stages = Stages(orders, [400_000, 400_000, 520_000, 400_000], 10_000)
    world = World(4)
    group = world.group(range(4))
    report = analyzed(trained(world, lambda _: stages.run(world, group)), tmp_path)
    message = ids(report)["pipeline-bubble"]
    # Stage 2 works 16 * 3 * 120 µs longer than the others, and that less a quarter than the mean.
    assert "stage 2 (rank 2) works 4.32 ms longer than the mean" in message
    assert "1F1B" in message
    found = next(each for each in report.findings if each.id == "pipeline-bubble")
    assert (found.severity, found.evidence["slowest_rank"]) == ("medium", 2)
    assert "move layers" in found.advice
    text = report.render("text")
    assert "Pipeline (1F1B, 16 micro-batches" in text
    assert "stage 2, rank 2" in text
    assert not {"straggler", "late-host", "communication-exposed"} & set(ids(report))


def test_a_balanced_pipeline_accuses_nobody(tmp_path: Path) -> None:
    stages = Stages(one_f_one_b(4, 16), [400_000] * 4, 5_000)
    world = World(4)
    group = world.group(range(4))
    report = analyzed(trained(world, lambda _: stages.run(world, group)), tmp_path)
    found = next(each for each in report.findings if each.id == "pipeline-bubble")
    assert found.severity == "low"
    assert "stage" not in words_of(found).partition("micro-batches")[2]
    assert not {"straggler", "late-host", "communication-exposed"} & set(ids(report))


def test_a_step_whose_messages_wait_in_a_circle_counts_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth step takes half as long, and cannot be replayed."""
    long, short = (Stages(one_f_one_b(2, 4), [ns, ns], 5_000) for ns in (400_000, 200_000))
    world = World(2)
    group = world.group(range(2))
    trained(world, lambda number: (short if number == 3 else long).run(world, group))
    split = pipelines._split
    monkeypatch.setattr(
        pipelines, "_split", lambda turn: split(turn) if turn.work[0] > 4 * 800_000 else None
    )
    (pipeline,) = analyzed(world, tmp_path).pipelines
    assert pipeline.work_ns == 4 * 3 * 400_000
    assert (pipeline.imbalance_ns, pipeline.host_ns) == (0, 0)
    parts = pipeline.schedule_ns + pipeline.transfer_ns
    assert pipeline.bubble_ns == parts == pipeline.step_ns - pipeline.work_ns


def test_replicas_of_a_pipeline_are_pipelines_of_their_own(tmp_path: Path) -> None:
    """Two pipelines of two stages, whose stages reduce their gradients together at the end."""
    worlds = World(4)
    pipes = [worlds.group([0, 1]), worlds.group([2, 3])]
    data = [worlds.group([0, 2]), worlds.group([1, 3])]
    stages = Stages(one_f_one_b(2, 4), [300_000, 300_000], 5_000)

    def step(_: int) -> None:
        for number, pipe in enumerate(pipes):
            stages.run(worlds, pipe, first=2 * number)
        for group in data:
            worlds.collective(group, "AllReduce", 64 << 20, 200 * US)

    report = analyzed(trained(worlds, step), tmp_path)
    assert {total.role for total in report.collectives} == {"pipeline", "data"}
    assert [[stage.rank for stage in each.stages] for each in report.pipelines] == [[0, 1], [2, 3]]
    for pipeline in report.pipelines:
        assert pipeline.work_ns == 4 * 3 * 300_000 + 200_000


def test_exposed_communication_names_the_groups_that_have_most_of_it(tmp_path: Path) -> None:
    world = World(4)
    groups = [world.group(range(4))]
    report = analyzed(trained(world, lambda _: sharded_step(world, groups)), tmp_path)
    found = next(each for each in report.findings if each.id == "communication-exposed")
    assert "gathering parameters" in words_of(found)
    assert found.evidence["role"] == "sharded data"
    assert "set_modules_to_forward_prefetch" in found.advice
    assert "the backward pass gathers 4 times again, which would take 268 MB" in found.advice
    (sharded,) = report.sharded
    assert (sharded.gathers, sharded.scatters, sharded.gathered_again) == (8, 4, 4)
    assert (sharded.prefetched, sharded.unsharded_bytes) == (0, 4 * 64 << 20)
    # Each gather takes 50 µs, beside which fits the 100 or 200 µs of compute before it.
    assert sharded.gather_exposed_ns == 8 * 50_000
    assert sharded.hideable_ns in range(6 * 50_000, 8 * 50_000 + 1)


def test_prefetched_parameters_are_not_to_be_prefetched(tmp_path: Path) -> None:
    """Each gather runs beside the compute of the layer before, on a stream of its own."""
    world = World(4)
    group = world.group(range(4))

    def step(_: int) -> None:
        for backward in (False, True):
            for _layer in range(LAYERS):
                for rank in range(4):
                    world.compute(rank, 20 * US)
                world.collective(group, "AllGather", 16 << 20, 50 * US, waits=False, ahead=10 * US)
                for rank in range(4):
                    world.compute(rank, 100 * US)
                if backward:
                    world.collective(group, "ReduceScatter", 16 << 20, 60 * US, waits=False)
            world.join(group)

    (sharded,) = analyzed(trained(world, step), tmp_path).sharded
    assert sharded.prefetched == 1
    assert sharded.hideable_ns == 0


def test_prefetching_parameters_brings_what_it_brings(tmp_path: Path) -> None:
    """Hosts run ahead; then each gather begins beside the compute of the layer before."""
    plain, ahead = World(4, ahead=True), World(4, ahead=True)
    groups = plain.group(range(4)), ahead.group(range(4))
    passes = [False] * LAYERS + [True] * LAYERS

    def prefetched(_: int) -> None:
        ahead.collective(groups[1], "AllGather", 16 << 20, 50 * US)
        for layer, backward in enumerate(passes):
            gathered = ahead.now
            if layer + 1 < len(passes):
                ahead.collective(groups[1], "AllGather", 16 << 20, 50 * US, waits=False)
                gathered = [groups[1].free[rank] for rank in range(4)]
            for rank in range(4):
                ahead.compute(rank, (200 if backward else 100) * US)
            if backward:
                ahead.collective(groups[1], "ReduceScatter", 16 << 20, 60 * US, waits=False)
            ahead.now = [max(pair) for pair in zip(ahead.now, gathered, strict=True)]
        ahead.join(groups[1])

    report = analyzed(trained(plain, lambda _: sharded_step(plain, groups[:1])), tmp_path)
    (tmp_path / "cured").mkdir()
    truth = analyzed(trained(ahead, prefetched), tmp_path / "cured").steps.mean_ns
    assert truth is not None
    (found,) = [row for row in report.what_if if row.id == "gathers"]
    assert found.step_ns == pytest.approx(truth, rel=0.02)
    assert found.low_ns <= truth <= found.high_ns
    # Four layers of 100 and 200 µs compute whatever is gathered when.
    assert found.low_ns >= 4 * 300 * US


def routed(path: Path, busy: Callable[[int], int], factor: float = 1.5) -> Report:
    """Eight ranks with experts, of which in each layer one has more tokens than the others."""
    world = World(8)
    group = world.group(range(8))

    def step(_: int) -> None:
        for layer in range(2 * LAYERS):
            for rank in range(8):
                world.compute(rank, 200 * US)
            world.all_to_all(group, 4_000_000 + 100_000 * layer, 20 * US)
            for rank in range(8):
                world.compute(rank, round(100 * US * (factor if rank == busy(layer) else 1)))
            world.all_to_all(group, 4_000_000 + 100_000 * layer, 20 * US)

    return analyzed(trained(world, step), path)


@pytest.mark.parametrize(
    ("range_name", "role"), [("moe_train_step", ""), ("train_step", "context")]
)
def test_exchanges_of_equal_size_are_of_no_sequence_where_experts_are_named(
    tmp_path: Path, range_name: str, role: str
) -> None:
    world = World(2)
    group = world.group(range(2))

    def step(_: int) -> None:
        for _layer in range(LAYERS):
            for rank in range(2):
                world.compute(rank, 200 * US)
            world.all_to_all(group, 4_000_000, 20 * US)

    thread, kind = global_id(100), PUSH_POP_RANGE
    world.export.add(NVTX, start=1, end=2, text=range_name, eventType=kind, globalTid=thread)
    (total,) = analyzed(trained(world, step), tmp_path).collectives
    assert total.role == role


def test_a_rank_with_busy_experts_is_named(tmp_path: Path) -> None:
    report = routed(tmp_path, lambda _: 5)
    (experts,) = report.experts
    assert experts.exchanges == 2 * LAYERS
    # Of 150 µs in each of 8 layers, all others wait for 50; the mean of all is 106.25.
    assert experts.work_ns == 8 * 106_250
    assert experts.imbalance_ns == 8 * (150_000 - 106_250)
    assert experts.wait_ns == 8 * 50_000 * 7 // 8
    assert [rank.rank for rank in experts.ranks if rank.busiest == 1] == [5]
    assert experts.ranks[5].ratio == pytest.approx(150 / 106.25, abs=1e-4)
    message = ids(report)["expert-imbalance"]
    assert "the experts of rank 5 work 1.41 times as long as the mean" in message
    assert "rank 5" in report.render("text").partition("Experts (a step")[2]


def test_deepeps_kernels_exchange_tokens(tmp_path: Path) -> None:
    """Without any payload: their names say what they do. Some only say how many tokens follow."""
    world = World(4, payloads=False)
    group = world.group(range(4))

    def step(_: int) -> None:
        for _layer in range(2 * LAYERS):
            for name, ns in (("dispatch", 100), ("combine", 200)):
                for kind in (f"notify_{name}", name):
                    kernel = f"void deep_ep::intranode::{kind}<4, 768, 8192>(int4*, float*)"
                    world.collective(group, kind, 0, 20 * US, kernel=kernel)
                for rank in range(4):
                    world.compute(rank, (2 if rank == 3 and ns == 100 else 1) * ns * US)

    report = analyzed(trained(world, step), tmp_path)
    assert {total.role for total in report.collectives} == {"expert"}
    (experts,) = report.experts
    assert [rank.work_ns for rank in experts.ranks] == [8 * 100_000] * 3 + [8 * 200_000]
    assert experts.wait_ns == 8 * 100_000 * 3 // 4


def test_busy_experts_that_change_from_layer_to_layer_accuse_no_rank(tmp_path: Path) -> None:
    report = routed(tmp_path, lambda layer: layer % 8)
    assert "which rank has them varies from layer to layer" in ids(report)["expert-imbalance"]
    assert not {"straggler", "late-host"} & set(ids(report))


def test_balanced_experts_accuse_nobody(tmp_path: Path) -> None:
    report = routed(tmp_path, lambda _: 5, factor=1.02)
    assert not {"expert-imbalance", "straggler", "late-host"} & set(ids(report))
    assert {total.role for total in report.collectives} == {"expert"}


def test_payloads_that_make_no_sense_are_left_out(tmp_path: Path) -> None:
    world = World(2)
    group = world.group([0, 1])
    trained(world, lambda _: data_step(world, [group]))
    head = struct.pack("<IIIIQQ", 1, 0, STATIC + 5, 0, 24, 56)
    strange: list[Value] = [
        b"",
        b"short",
        head,
        head + b"x" * 7,
        b"\xff" * 56,
        "no hex",
        "ff" * 56,
        7,
    ]
    rows = [row for row in world.export.rows[NVTX] if row.get("binaryData")]
    for row, blob in zip(rows[4:], strange, strict=False):
        row["binaryData"] = blob
    entry = world.export.rows["NVTX_PAYLOAD_SCHEMA_ENTRIES"][0]
    for wrong in ({"type": "x"}, {"offset": -9}, {"offset": 1 << 40}, {"offset": "far"}):
        world.export.add("NVTX_PAYLOAD_SCHEMA_ENTRIES", **(entry | {"schemaId": 99} | wrong))
    report = analyzed(world, tmp_path)
    assert {total.operation for total in report.collectives} == {"AllReduce"}
    assert (25 << 20) in {total.bytes for total in report.collectives}


def _as_json(world: World, separator: str, by_id: bool) -> None:
    """Write the payloads as nsys exports them in JSON, without the blobs."""
    labels = {number: [name for name, _, _ in of] for number, of in SCHEMAS.values()}
    for row in world.export.rows[NVTX]:
        blob = row.pop("binaryData", None)
        if isinstance(blob, bytes):
            number = struct.unpack_from("<IIII", blob)[2] - STATIC
            values = struct.unpack(PAYLOADS[number], blob[32:])
            given = zip(labels[number], values, strict=True)
            text = json.dumps({label: f"{n:{separator}}" for label, n in given} | {"Op": "Sum"})
            row |= {"jsonTextId": world.export.string(text)} if by_id else {"jsonText": text}
    world.export.strip(NVTX, "binaryData").give(NVTX, "jsonText", "jsonTextId")
    world.export.rows.pop("NVTX_PAYLOAD_SCHEMA_ENTRIES")


@pytest.mark.parametrize(("separator", "by_id"), [("", False), (",", False), ("", True)])
def test_payloads_in_json_say_the_same(tmp_path: Path, separator: str, by_id: bool) -> None:
    said = []
    for is_json in (False, True):
        world = World(2)
        group = world.group([0, 1])
        for _ in range(STEPS):
            data_step(world, [group])
        if is_json:
            _as_json(world, separator, by_id)
        (tmp_path / str(is_json)).mkdir()
        said.append(analyzed(world, tmp_path / str(is_json)).collectives)
    assert said[0] == said[1]
    assert (25 << 20) in {total.bytes for total in said[0]}


@pytest.mark.parametrize(
    "strange",
    [
        "{",
        "[1]",
        '{"NCCL communicator ID": 1e99, "Message size [bytes]": -4}',
        '{"x": "' + "y" * 9999,
    ],
)
def test_payloads_in_json_that_make_no_sense_are_left_out(tmp_path: Path, strange: str) -> None:
    world = World(2)
    group = world.group([0, 1])
    trained(world, lambda _: data_step(world, [group]))
    _as_json(world, "", by_id=False)
    rows = [row for row in world.export.rows[NVTX] if row.get("jsonText")]
    for row in rows[4:9]:
        row["jsonText"] = strange.replace("{", '{"NCCL communicator ID": ', 1)
    report = analyzed(world, tmp_path)
    assert {total.operation for total in report.collectives} == {"AllReduce"}


@pytest.mark.parametrize("peers", [True, False])
def test_messages_count_whether_or_not_the_profiler_names_their_peers(
    tmp_path: Path, peers: bool
) -> None:
    """PyTorch before 2.3 says neither who sends nor who receives."""
    paths = []
    for rank, (name, peer) in enumerate((("send", "Dst Rank"), ("recv", "Src Rank"))):
        message = grouped(rank, "[0, 1]")
        message["args"] |= {"Collective name": name} | ({peer: 1 - rank} if peers else {})
        message["name"] = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096>)"
        around = {"rank": rank, "world_size": 2, "backend": "nccl"}
        path = tmp_path / f"rank{rank}.pt.trace.json"
        epoch = {"baseTimeNanoseconds": 10**18, "host_name": "n0"}
        paths.append(write(path, message, distributedInfo=around, **epoch))
    with gputrace.open(*paths) as trace:
        (total,) = trace.analyze().collectives
    assert (total.operation, total.ranks, total.count) == ("SendRecv", (0, 1), 1)
    assert total.total_ns == 50 * US


@pytest.mark.parametrize(
    "strange",
    [
        {"Process Group Name": 7, "Process Group Ranks": [0, 1]},
        {"Process Group Ranks": "[0, 1, ..., 511]", "Group size": 512},
        {"Process Group Ranks": None, "Group size": "many"},
        {"Group size": -3, "Src Rank": "x", "Dst Rank": 1 << 70},
        {"Process Group Description": {"a": 1}},
    ],
)
def test_process_groups_that_make_no_sense_break_nothing(
    tmp_path: Path, strange: dict[str, Any]
) -> None:
    event = grouped(0, "[0, 1]", **{"In msg nelems": 8, "dtype": "Float"})
    event["args"] |= strange
    path = write(tmp_path / "rank0.pt.trace.json", event, kernel(10, 20))
    with gputrace.open(path) as trace:
        assert len(trace.analyze().collectives) <= 1


def test_tensor_parallel_groups_say_what_is_exposed_and_what_products_hide(tmp_path: Path) -> None:
    """Each all-reduce begins 10 of its 30 µs before the product ahead of it is done."""
    world = World(4)
    group = world.group(range(4))

    def step(_: int) -> None:
        for _part in range(4 * LAYERS):
            for rank in range(4):
                world.compute(rank, 100 * US)
            world.collective(group, "AllReduce", 8 << 20, 30 * US, ahead=10 * US)

    report = analyzed(trained(world, step), tmp_path)
    (tensor,) = report.tensor
    assert tensor.collectives == 4 * LAYERS
    assert tensor.total_ns == 4 * LAYERS * 30_000
    assert tensor.exposed_ns == 4 * LAYERS * 20_000
    assert tensor.beside_products_ns == 4 * LAYERS * 10_000
    assert "Tensor parallel (a step" in report.render("text")


def test_a_late_rank_is_named_with_the_group_that_waits_for_it(tmp_path: Path) -> None:
    """Rank 2 computes longer: its tensor-parallel group waits for it all the time, the ranks of
    other groups only once, for the gradients.
    """
    world = World(8)
    tensor = [world.group(ranks) for ranks in ([0, 1, 2, 3], [4, 5, 6, 7])]
    data = [world.group([rank, rank + 4]) for rank in range(4)]

    def step(_: int) -> None:
        for _part in range(4 * LAYERS):
            for rank in range(8):
                world.compute(rank, (150 if rank == 2 else 100) * US)
            for group in tensor:
                world.collective(group, "AllReduce", 8 << 20, 30 * US)
        for group in data:
            world.collective(group, "AllReduce", 25 << 20, 60 * US)

    with open_trace(trained(world, step).write(tmp_path / "run.sqlite")) as trace:
        gpus, _ = gpus_with_lanes(trace)
        collectives = match_collectives(gpus)
        roles = tuple("data" if len(g.lanes) == 2 else "tensor" for g in collectives.groups)
        facts = SimpleNamespace(collectives=collectives, per_gpu=gpus, roles=roles)
        where = _where(cast(Facts, facts), gpus.operations[2].gpu)
    assert where == ", mostly of its tensor group (ranks 0-3)"
