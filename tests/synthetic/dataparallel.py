"""DataParallel: one process, a fresh thread for each GPU in each forward pass. Times are ns."""

from __future__ import annotations

from tests.synthetic.exchange import copy_between
from tests.synthetic.machine import Thread
from tests.synthetic.trainer import COMPUTE, Trainer

SPAWN_NS = 30_000  # to start a thread


def run_parallel(trainer: Trainer, train: bool = True) -> None:
    """One batch: scattered from the first GPU, through the model on each, and gathered there."""
    first, others = trainer.gpus[0], trainer.gpus[1:]
    share = trainer.plan.input_bytes // len(trainer.gpus)
    for gpu in others:
        copy_between(trainer, first, gpu, share)
    on_all(trainer, [trainer.fresh_thread() for _ in trainer.gpus], forward=True)
    for gpu in others:
        copy_between(trainer, gpu, first, 65_536)
    if not train:
        return
    for gpu in others:
        gpu.free[COMPUTE] = max(gpu.free[COMPUTE], first.free[COMPUTE])
    on_all(trainer, [trainer.autograd_of(gpu) for gpu in trainer.gpus], forward=False)
    for gpu in others:
        copy_between(trainer, gpu, first, share)


def on_all(trainer: Trainer, threads: list[Thread], forward: bool) -> None:
    """A pass on every GPU, each fed by its thread, while the main thread waits for them."""
    work = trainer.model.forward if forward else trainer.model.backward
    for index, (thread, gpu) in enumerate(zip(threads, trainer.gpus, strict=True)):
        thread.now = trainer.main.now + SPAWN_NS * (index + 1)
        trainer.launch(work, thread, gpu)
    trainer.main.os_wait_until("pthread_cond_wait", max(thread.now for thread in threads) + 9_000)
