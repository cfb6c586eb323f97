"""DataParallel: one process, a fresh thread for each GPU in each forward pass. Times are ns."""

from __future__ import annotations

import numpy as np

from tests.synthetic import names
from tests.synthetic.machine import LATENCY_NS, Gpu, Thread
from tests.synthetic.recording import Kind
from tests.synthetic.trainer import COMPUTE, Trainer

SPAWN_NS = 30_000  # to start a thread
PEER_BYTES_NS = 40  # bytes a nanosecond between two GPUs


def run_parallel(trainer: Trainer, train: bool = True) -> None:
    """One batch: scattered from the first GPU, through the model on each, and gathered there."""
    first, others = trainer.gpus[0], trainer.gpus[1:]
    share = trainer.plan.input_bytes // len(trainer.gpus)
    for gpu in others:
        _copy_peer(trainer, first, gpu, share)
    _on_all(trainer, [trainer.fresh_thread() for _ in trainer.gpus], forward=True)
    for gpu in others:
        _copy_peer(trainer, gpu, first, 65_536)
    if not train:
        return
    for gpu in others:
        gpu.free[COMPUTE] = max(gpu.free[COMPUTE], first.free[COMPUTE])
    _on_all(trainer, [trainer.autograd_of(gpu) for gpu in trainer.gpus], forward=False)
    for gpu in others:
        _copy_peer(trainer, gpu, first, share)


def _on_all(trainer: Trainer, threads: list[Thread], forward: bool) -> None:
    """A pass on every GPU, each fed by its thread, while the main thread waits for them."""
    work = trainer.model.forward if forward else trainer.model.backward
    for index, (thread, gpu) in enumerate(zip(threads, trainer.gpus, strict=True)):
        thread.now = trainer.main.now + SPAWN_NS * (index + 1)
        trainer.launch(work, thread, gpu)
    trainer.main.os_wait_until("pthread_cond_wait", max(thread.now for thread in threads) + 9_000)


def _copy_peer(trainer: Trainer, source: Gpu, target: Gpu, size: int) -> None:
    """Copy between two GPUs; it occupies the compute streams of both."""
    ns = np.array([2_000 + size // PEER_BYTES_NS])
    ready = max(trainer.main.now + LATENCY_NS, target.free.get(COMPUTE, 0))
    start, end = source.run(COMPUTE, np.array([ready]), ns)
    target.free[COMPUTE] = int(end[0])
    call = trainer.main.call(names.COPY_PEER, 2 * trainer.plan.launch_ns)
    trainer.ran(
        source, trainer.main, COMPUTE, Kind.PEER, call.start, start, end, call.correlation,
        bytes=size, peer=target.gpu,
    )  # fmt: skip
    trainer.python(trainer.plan.python_ns)
