"""Parallel training whose groups are known, played rank by rank and written as an nsys export.

    world = World(8)
    tensor = world.group([0, 1, 2, 3])
    world.compute(0, 50_000)
    world.collective(tensor, "AllReduce", 4 << 20, 100_000)
    world.write(path)

Each rank has a stream that computes and one that communicates, and a host that is always ahead.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.helpers.exports import NVTX, PUSH_POP_RANGE, RUNTIME, Export, global_id

COMPUTE, COMMUNICATION = 7, 19
MESSAGE: Final = 1 << 20
STATIC: Final = 1 << 24
_ID: Final = ("NCCL communicator ID", 18, None)
_SIZE: Final = ("Message size [bytes]", 22, 8)
SCHEMAS: Final = {
    "ncclCommInitRank": (0, [_ID, ("No. of ranks", 5, 8), ("Rank", 5, 12), ("CUDA device", 5, 16)]),
    "ncclAllGather": (4, [_ID, _SIZE]),
    "ncclAllReduce": (5, [_ID, _SIZE, ("Reduction operation", STATIC + 16, 16)]),
    "ncclReduceScatter": (7, [_ID, _SIZE, ("Reduction operation", STATIC + 16, 16)]),
    "ncclSend": (9, [_ID, _SIZE, ("Peer rank", 5, 16)]),
    "ncclRecv": (10, [_ID, _SIZE, ("Peer rank", 5, 16)]),
}
"""Schemas as NCCL 2.27 registers them: number, and name, type and offset of each entry."""
PAYLOADS: Final = {0: "<Qiii4x", 4: "<QQ", 5: "<QQi4x", 7: "<QQi4x", 9: "<QQi4x", 10: "<QQi4x"}


@dataclass
class Group:
    """A communicator of some ranks."""

    id: int
    ranks: Sequence[int]
    free: dict[int, int] = field(default_factory=dict)
    """Until when the stream of each rank that communicates is taken."""


class World:
    """Ranks with a GPU each.

    Their hosts issue work just before it starts; or ``ahead``, 10 µs apart, and wait for the GPU
    at the end of each step.
    """

    def __init__(
        self, ranks: int, *, hosts: int = 1, payloads: bool = True, ahead: bool = False
    ) -> None:
        self.export = Export()
        self.now = [1_000_000] * ranks
        self._host = list(self.now) if ahead else []
        self.ranks, self.payloads = ranks, payloads
        self._correlation = 1_000
        self._groups = 0
        self._hosts = [rank * hosts // ranks for rank in range(ranks)]
        add, give = self.export.add, self.export.give
        give(NVTX, "binaryData")
        give("GPUTRACE_PROCESS", "globalPid", "host", "rank", "worldSize")
        give("NVTX_PAYLOAD_SCHEMA_ENTRIES", "domainId", "schemaId", "idx", "type", "name", "offset")
        for rank in range(ranks):
            pid, host = self._pid(rank), self._hosts[rank]
            place = global_id(pid, host=1 + host)
            add("GPUTRACE_PROCESS", globalPid=place, host=f"n{host}", rank=rank, worldSize=ranks)
            self.export.card(rank, f"0000:{rank // 16:02x}:{rank % 16:02x}.0")
            self.export.ordinal(pid, 0, rank)
        for number, entries in SCHEMAS.values() if payloads else ():
            for index, (name, type_, offset) in enumerate(entries):
                add(
                    "NVTX_PAYLOAD_SCHEMA_ENTRIES", domainId=1, schemaId=STATIC + number, idx=index,
                    type=type_, name=name, offset=offset,
                )  # fmt: skip

    def _pid(self, rank: int) -> int:
        return 1_000 + rank

    def _thread(self, rank: int) -> int:
        pid = self._pid(rank)
        return global_id(pid, host=1 + self._hosts[rank], thread=pid)

    def group(self, ranks: Sequence[int]) -> Group:
        """Make a communicator."""
        self._groups += 1
        made = Group(0xF000_0000_0000_0000 + self._groups, ranks)
        for place, rank in enumerate(ranks):
            payload = (made.id, len(ranks), place, 0)
            self._range(rank, "ncclCommInitRank", 1_000 * self._groups, 500, payload)
        return made

    def _range(
        self, rank: int, name: str, start: int, length: int, payload: Sequence[int] = ()
    ) -> None:
        blob = None
        if payload and self.payloads:
            number = SCHEMAS[name][0]
            data = struct.pack(PAYLOADS[number], *payload)
            blob = (
                struct.pack("<IIIIQQ", 1, 0, STATIC + number, 0, len(data), 32 + len(data)) + data
            )
        self.export.add(
            NVTX, start=start, end=start + length, eventType=PUSH_POP_RANGE,
            globalTid=self._thread(rank), textId=self.export.string(name),
            domainId=1 if name.startswith("nccl") else 0, binaryData=blob,
        )  # fmt: skip

    def _kernel(
        self, rank: int, start: int, end: int, name: str, stream: int, lead: int = 6_000
    ) -> None:
        self._correlation += 1
        self.export.add(
            RUNTIME, start=start - lead, end=start - lead + 900, eventClass=0,
            globalTid=self._thread(rank), correlationId=self._correlation,
            nameId=self.export.string("cudaLaunchKernel"),
        )  # fmt: skip
        self.export.kernel(
            start, end, name, globalPid=global_id(self._pid(rank), host=1 + self._hosts[rank]),
            streamId=stream, correlationId=self._correlation,
        )  # fmt: skip

    def _issue(self, rank: int, start: int) -> int:
        """Return when the host issues what starts at a moment."""
        if not self._host:
            return start - 6_000
        self._host[rank] += 10_000
        return self._host[rank] - 10_000

    def compute(self, rank: int, ns: int, name: str = "sm90_xmma_gemm_bf16") -> None:
        """Compute for so long, in two kernels."""
        start = self.now[rank]
        for part in (ns // 2, ns - ns // 2):
            lead = start - self._issue(rank, start)
            self._kernel(rank, start, start + part, name, COMPUTE, lead)
            start += part
        self.now[rank] = start

    def collective(
        self, group: Group, operation: str, size: int, ns: int, *, waits: bool = True,
        ahead: int = 0, kernel: str = "",
    ) -> None:  # fmt: skip
        """Run a collective once all ranks are there; compute goes on unless it waits for it.

        ``ahead`` is how long before that it may begin, ``kernel`` one that is none of NCCL's.

        ``size`` is what NCCL calls so: of all-gathers and reduce-scatters, the part of one rank.
        """
        free = group.free
        starts = {rank: max(self.now[rank] - ahead, free.get(rank, 0)) for rank in group.ranks}
        end = max(starts.values()) + ns
        for rank, start in starts.items():
            name = f"ncclDevKernel_{operation}_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096>)"
            payload = (group.id, size) + (0,) * (operation != "AllGather")
            at = self._issue(rank, start)
            if not kernel:
                self._range(rank, f"nccl{operation}", at - 1_000, 5_000, payload)
            self._kernel(rank, start, end, kernel or name, COMMUNICATION, start - at)
            group.free[rank] = end
            if waits:
                self.now[rank] = end

    def exchange(
        self, group: Group, rank: int, halves: Sequence[tuple[bool, int]], size: int,
        start: int, end: int,
    ) -> None:  # fmt: skip
        """Send to and receive from peers (ranks of the group) in one kernel of one rank."""
        # A send is issued before a receive that begins at the same moment.
        lead = 11_000 if halves[0][0] else 6_000
        at = start - lead - 1_000 - 400 * len(halves)
        for sends, peer in halves:
            name = "ncclSend" if sends else "ncclRecv"
            self._range(rank, name, at, 300, (group.id, size, peer))
            at += 400
        kernel = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096>)"
        self._kernel(rank, start, end, kernel, COMMUNICATION + 1 + halves[0][0], lead)

    def all_to_all(self, group: Group, size: int, ns: int) -> None:
        """Exchange parts among all ranks of a group, as PyTorch does with sends and receives."""
        starts = {rank: self.now[rank] for rank in group.ranks}
        end = max(starts.values()) + ns
        peers = range(len(group.ranks))
        halves = [(sends, peer) for peer in peers for sends in (True, False)]
        for rank, start in starts.items():
            self.exchange(group, rank, halves, size, start, end)
            self.now[rank] = end

    def join(self, group: Group) -> None:
        """Let compute wait for the group's collectives."""
        for rank in group.ranks:
            self.now[rank] = max(self.now[rank], group.free.get(rank, 0))

    def step(self, number: int, begins: Sequence[int]) -> None:
        """Mark a step that began on each rank at some moment, and ends now."""
        for rank, begin in enumerate(begins):
            self._range(rank, f"step {number}", begin - 9_000, self.now[rank] - begin)
            if self._host:
                self._wait(rank)

    def _wait(self, rank: int) -> None:
        """Let a host wait for its GPU, which has nothing to do until the host goes on."""
        self.export.add(
            RUNTIME, start=self._host[rank], end=self.now[rank], eventClass=0,
            globalTid=self._thread(rank), correlationId=0,
            nameId=self.export.string("cudaDeviceSynchronize"),
        )  # fmt: skip
        self._host[rank] = self.now[rank] + 5_000
        self.now[rank] += 15_000

    def write(self, path: Path) -> Path:
        return self.export.write(path)


Chunk = tuple[bool, int, int]
"""Part of a pipeline's step on a stage: whether backward, which part of the model, micro-batch."""


@dataclass(frozen=True)
class Stages:
    """A pipeline: for each stage, the order of its chunks, and how long things take (ns)."""

    orders: Sequence[Sequence[Chunk]]
    forward_ns: Sequence[int]
    """Of each stage; the backward pass takes twice as long."""
    transfer_ns: int = 0
    gap_ns: Sequence[int] = ()
    """For which the host of each stage is late with each chunk."""

    def run(self, world: World | None = None, group: Group | None = None, first: int = 0) -> int:
        """Play one step, nowhere or on ranks of a world from the first on; return when it ends."""
        count = len(self.orders)
        now = [0] * count if world is None else world.now[first : first + count]
        left, sent = [0] * count, dict[tuple[bool, int, int], int]()
        parts = 1 + max(part for order in self.orders for _, part, _ in order)
        while any(at < len(order) for at, order in zip(left, self.orders, strict=True)):
            for stage, order in enumerate(self.orders):
                while left[stage] < len(order):
                    backward, part, batch = order[left[stage]]
                    place = part * count + stage
                    source = place + 1 if backward else place - 1
                    if 0 <= source < parts * count:
                        key = backward, source, batch
                        if key not in sent:
                            break
                        end = max(sent[key], now[stage]) + self.transfer_ns
                        ends = (source % count, sent[key]), (stage, now[stage])
                        _show(world, group, first, ends, end + 1)
                        now[stage] = end + 1
                    now[stage] += self.gap_ns[stage] if self.gap_ns else 0
                    ns = self.forward_ns[stage] * (2 if backward else 1) // parts
                    if world is not None:
                        world.now[first + stage] = now[stage]
                        world.compute(first + stage, ns)
                    now[stage] += ns
                    sent[backward, place, batch] = now[stage]
                    left[stage] += 1
        return max(now)


def _show(
    world: World | None, group: Group | None, first: int, ends: Sequence[tuple[int, int]], end: int
) -> None:
    """Let a stage send and another receive, each from a moment on, until the message is there."""
    if world is not None and group is not None:
        (sender, sent), (receiver, posted) = ends
        world.exchange(group, first + sender, [(True, receiver)], MESSAGE, sent, end)
        world.exchange(group, first + receiver, [(False, sender)], MESSAGE, posted, end)


def gpipe(stages: int, batches: int) -> list[list[Chunk]]:
    """All micro-batches forward, then all backward."""
    return [[(b, 0, m) for b in (False, True) for m in range(batches)] for _ in range(stages)]


def one_f_one_b(stages: int, batches: int) -> list[list[Chunk]]:
    """One forward, one backward, once the pipeline is full."""
    orders: list[list[Chunk]] = []
    for stage in range(stages):
        ahead = min(batches, stages - stage - 1)
        order: list[Chunk] = [(False, 0, m) for m in range(ahead)]
        for m in range(batches):
            order += [(False, 0, m + ahead)] if m + ahead < batches else []
            order.append((True, 0, m))
        orders.append(order)
    return orders


def interleaved(stages: int, batches: int, parts: int) -> list[list[Chunk]]:
    """Megatron's order of stages with several parts of the model each; batches in full rounds."""
    total, orders = batches * parts, []
    for stage in range(stages):
        ahead = min(total, 2 * (stages - stage - 1) + (parts - 1) * stages)

        def chunk(k: int, backward: bool) -> Chunk:
            part = k % (stages * parts) // stages
            batch = k // (stages * parts) * stages + k % stages
            return backward, parts - 1 - part if backward else part, batch

        order = [chunk(k, False) for k in range(ahead)]
        for k in range(total):
            order += [chunk(k + ahead, False)] if k + ahead < total else []
            order.append(chunk(k, True))
        orders.append(order)
    return orders
