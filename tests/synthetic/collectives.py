"""All-reduces: each rank comes in its own time, all leave together. Times are ns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.synthetic import names
from tests.synthetic.machine import LATENCY_NS, STREAM_GAP_NS, Thread
from tests.synthetic.recording import COLLECTIVES, Kind
from tests.synthetic.trainer import COMMUNICATION, COMPUTE, Trainer


@dataclass(frozen=True)
class Pending:
    """An all-reduce that one rank has issued."""

    trainer: Trainer
    thread: Thread
    issue: int
    correlation: int
    ready: int  # when the gradients are there

    @property
    def arrival(self) -> int:
        """When its kernel starts on this rank's GPU."""
        free = self.trainer.gpu.free.get(COMMUNICATION, 0) + STREAM_GAP_NS
        return max(self.issue + LATENCY_NS, self.ready, free)


def issue(trainer: Trainer, thread: Thread) -> Pending:
    """Launch an all-reduce of what the compute stream has been given so far."""
    thread.now += trainer.plan.python_ns
    entered = thread.now
    call = thread.call(names.LAUNCH_NCCL, 2 * trainer.plan.launch_ns)
    thread.now += 1_000
    thread.range(f"nccl{trainer.plan.collective}", entered, domain=1)
    ready = trainer.gpu.free.get(COMPUTE, 0) + STREAM_GAP_NS
    return Pending(trainer, thread, call.start, call.correlation, ready)


def complete(group: Sequence[Pending], transfer_ns: int) -> None:
    """Run one all-reduce, one entry a rank."""
    kernel = names.ALLREDUCE.replace("AllReduce", group[0].trainer.plan.collective)
    starts = [pending.arrival for pending in group]
    arrived = max(starts)
    end = arrived + transfer_ns
    for pending, start in zip(group, starts, strict=True):
        trainer = pending.trainer
        gpu, log = trainer.gpu, trainer.host.log
        gpu.free[COMMUNICATION] = end
        trainer.ran(
            gpu, pending.thread, COMMUNICATION, Kind.COMMUNICATION, pending.issue, start, end,
            pending.correlation, name=log.name(kernel),
        )  # fmt: skip
        log.add(
            COLLECTIVES, start=start, end=end, rank=trainer.rank, arrived=arrived,
            unit=trainer.host.unit,
        )  # fmt: skip


def join(trainer: Trainer) -> None:
    """Let the compute stream wait for the all-reduces."""
    free = trainer.gpu.free
    free[COMPUTE] = max(free.get(COMPUTE, 0), free.get(COMMUNICATION, 0))
