"""Copies of one process between its GPUs, straight or through the host. Times are ns."""

from __future__ import annotations

import numpy as np

from tests.synthetic import names
from tests.synthetic.machine import LATENCY_NS, Gpu
from tests.synthetic.recording import Kind
from tests.synthetic.trainer import COMPUTE, Trainer

PEER_BYTES_NS = 40  # bytes a nanosecond between two GPUs
HOST_BYTES_NS = 12  # and between a GPU and pinned memory of the host


def copy_between(trainer: Trainer, source: Gpu, target: Gpu, size: int) -> None:
    """Copy between two GPUs; it occupies the compute streams of both."""
    plan = trainer.plan
    if not plan.peer_access:
        copy_host(trainer, source, Kind.D2H, size)
        copy_host(trainer, target, Kind.H2D, size, source.free[COMPUTE])
        return
    slower = plan.slowdown([source.gpu, target.gpu])
    ns = np.array([2_000 + round(size // PEER_BYTES_NS * slower)])
    ready = max(trainer.main.now + LATENCY_NS, target.free.get(COMPUTE, 0))
    start, end = source.run(COMPUTE, np.array([ready]), ns)
    target.free[COMPUTE] = int(end[0])
    call = trainer.main.call(names.COPY_PEER, 2 * plan.launch_ns)
    trainer.ran(
        source, trainer.main, COMPUTE, Kind.PEER, call.start, start, end, call.correlation,
        bytes=size, peer=target.gpu,
    )  # fmt: skip
    trainer.python(plan.python_ns)


def copy_host(trainer: Trainer, gpu: Gpu, kind: Kind, size: int, ready: int = 0) -> None:
    """Copy between a GPU and pinned memory, `ready` to start at the earliest."""
    ns = trainer.around(np.array([2_000 + size // HOST_BYTES_NS]))
    ready = max(trainer.main.now + LATENCY_NS, ready + 2_000)
    start, end = gpu.run(COMPUTE, np.array([ready]), ns)
    call = trainer.main.call(names.COPY, 2 * trainer.plan.launch_ns)
    trainer.ran(
        gpu, trainer.main, COMPUTE, kind, call.start, start, end, call.correlation, bytes=size
    )
    trainer.python(trainer.plan.python_ns)
