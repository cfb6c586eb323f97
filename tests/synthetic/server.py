"""One process with several GPUs: a parameter server on the first or on the CPU, or a ring."""

from __future__ import annotations

from tests.synthetic.dataparallel import on_all
from tests.synthetic.exchange import copy_between, copy_host
from tests.synthetic.recording import Kind
from tests.synthetic.trainer import COMPUTE, Trainer


def run_server(trainer: Trainer) -> None:
    """One batch: a part for each GPU, and the gradients to where they are added up."""
    for gpu in trainer.gpus[1:]:
        copy_host(trainer, gpu, Kind.H2D, trainer.plan.input_bytes)
    on_all(trainer, [trainer.fresh_thread() for _ in trainer.gpus], forward=True)
    on_all(trainer, [trainer.autograd_of(gpu) for gpu in trainer.gpus], forward=False)
    {"gpu-server": _by_gpu, "cpu-server": _by_cpu, "ring": _round}[trainer.plan.exchange](trainer)


def _by_gpu(trainer: Trainer) -> None:
    """The first GPU gathers, adds up, and gives to all."""
    first, others, size = trainer.gpus[0], trainer.gpus[1:], trainer.plan.exchange_bytes
    for gpu in others:
        copy_between(trainer, gpu, first, size)
    trainer.launch(trainer.model.optimizer, trainer.main, first)
    for gpu in others:
        copy_between(trainer, first, gpu, size)


def _round(trainer: Trainer) -> None:
    """Each GPU gives to the next, and does its own part of the rest."""
    first, others = trainer.gpus[0], trainer.gpus[1:]
    for gpu, following in zip(trainer.gpus, [*others, first], strict=True):
        copy_between(trainer, gpu, following, trainer.plan.exchange_bytes)
    for gpu in others:
        trainer.launch(trainer.model.optimizer, trainer.main, gpu)


def _by_cpu(trainer: Trainer) -> None:
    """All give to the CPU, which takes a moment, and get back from it."""
    size = trainer.plan.exchange_bytes
    for gpu in trainer.gpus:
        copy_host(trainer, gpu, Kind.D2H, size)
    trainer.main.now = max(trainer.main.now, max(gpu.free[COMPUTE] for gpu in trainer.gpus))
    trainer.python(size // 50)
    for gpu in trainer.gpus:
        copy_host(trainer, gpu, Kind.H2D, size)
