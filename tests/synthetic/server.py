"""A parameter server, on the first GPU or on the CPU, in one process with several GPUs."""

from __future__ import annotations

from tests.synthetic.dataparallel import on_all
from tests.synthetic.exchange import copy_between, copy_host
from tests.synthetic.recording import Kind
from tests.synthetic.trainer import COMPUTE, Trainer


def run_server(trainer: Trainer) -> None:
    """One batch: a part for each GPU, and the gradients added up where the server is."""
    plan, first, others = trainer.plan, trainer.gpus[0], trainer.gpus[1:]
    for gpu in others:
        copy_host(trainer, gpu, Kind.H2D, plan.input_bytes)
    on_all(trainer, [trainer.fresh_thread() for _ in trainer.gpus], forward=True)
    on_all(trainer, [trainer.autograd_of(gpu) for gpu in trainer.gpus], forward=False)
    if plan.exchange == "gpu-server":
        for gpu in others:
            copy_between(trainer, gpu, first, plan.exchange_bytes)
        trainer.launch(trainer.model.optimizer, trainer.main, first)
        for gpu in others:
            copy_between(trainer, first, gpu, plan.exchange_bytes)
        return
    for gpu in trainer.gpus:
        copy_host(trainer, gpu, Kind.D2H, plan.exchange_bytes)
    trainer.main.now = max(trainer.main.now, max(gpu.free[COMPUTE] for gpu in trainer.gpus))
    trainer.python(plan.exchange_bytes // 50)
    for gpu in trainer.gpus:
        copy_host(trainer, gpu, Kind.H2D, plan.exchange_bytes)
