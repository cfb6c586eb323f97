"""Course of training: steps, validation and checkpoints, on all ranks at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.synthetic import collectives, names
from tests.synthetic.collectives import Pending
from tests.synthetic.dataparallel import run_parallel
from tests.synthetic.recording import Kind, Unit
from tests.synthetic.server import run_server
from tests.synthetic.trainer import COMMUNICATION, COMPUTE, Trainer

BARRIER_NS = 15_000
WAKE_THREAD_NS = 8_000


def step(trainers: Sequence[Trainer], index: int) -> None:
    """One optimizer step of every rank, of one or more micro-batches."""
    plan = trainers[0].plan
    entered = []
    for trainer in trainers:
        trainer.begin(Unit("step", index))
        entered.append(trainer.main.now)
        begins = plan.epoch_steps and index and index % plan.epoch_steps == 0
        restart = [plan.restart_ns if begins else 0, *[0] * (plan.micro_batches - 1)]
        for more_ns in restart[:-1]:
            _batch(trainer, 0, more_ns)
    groups = [_batch(trainer, plan.allreduces, restart[-1]) for trainer in trainers]
    for group in zip(*groups, strict=True):
        complete_ns = max(1, int(trainers[0].around(float(plan.allreduce_ns))))
        size = plan.group_size or len(group)
        for first in range(0, len(group), size):
            team = group[first : first + size]
            slower = plan.slowdown([pending.trainer.gpu.gpu for pending in team])
            ns = complete_ns * slower
            collectives.complete(team, int(trainers[first].around(ns)) if first else round(ns))
    for trainer, start in zip(trainers, entered, strict=True):
        if plan.joined:
            collectives.join(trainer)
        trainer.launch(trainer.model.optimizer, trainer.main, trainer.gpu)
        if plan.sync_every_step:
            trainer.read_loss()
        trainer.main.range(f"step {index}", start)


def _batch(trainer: Trainer, buckets: int, more_ns: int = 0) -> list[Pending]:
    """Fetch one batch, `more_ns` late, and take it through the model, forward and backward."""
    plan = trainer.plan
    late = plan.late_host_ns if trainer.is_odd(plan.late_host_rank) else 0
    times = 10 if trainer.rng.random() < plan.hiccup_rate else 1
    trainer.wait_for_data(times, more_ns + (late if plan.late_in_loader else 0))
    trainer.copy_in()
    if late and not plan.late_in_loader:
        trainer.python(late)
    _warm_up(trainer)
    if plan.gpus_per_process > 1:
        (run_parallel if plan.exchange == "dataparallel" else run_server)(trainer)
        return []
    _forward(trainer, plan.allocs_per_step)
    if plan.hidden_ns:
        trainer.wait_unseen()
    if trainer.is_odd(plan.busy_rank):
        trainer.launch(trainer.model.forward.share(plan.busy_share), trainer.main, trainer.gpu)
    trainer.memset()
    return _backward(trainer, buckets)


def _warm_up(trainer: Trainer) -> None:
    """Do what only the first steps do: load libraries, try algorithms, allocate memory."""
    if not trainer.warming:
        return
    if trainer.warming >= 2:
        for _ in range(3):
            trainer.main.call(names.LOAD, 400_000)
            trainer.python(20_000)
    tried = trainer.model.autotune.parts(4)[: max(1, round(2 * trainer.warming))]
    for part in tried:
        trainer.allocate(2)
        trainer.launch(part, trainer.main, trainer.gpu)


def _forward(trainer: Trainer, allocs: int = 0) -> None:
    """The forward pass; allocations come before each quarter of it."""
    plan = trainer.plan
    count = 1 if plan.graph else 4
    for index, part in enumerate(trainer.model.forward.parts(count)):
        done, upto = (allocs * i // count for i in (index, index + 1))
        trainer.allocate(upto - done, done)
        if len(part.ns):
            streams = plan.streams if index in (1, 2) else 1
            trainer.launch(part, trainer.main, trainer.gpu, streams)


def _backward(trainer: Trainer, buckets: int) -> list[Pending]:
    """The backward pass, with an all-reduce issued after each of the `buckets` parts."""
    main, thread = trainer.main, trainer.main
    if trainer.plan.autograd_thread:
        thread = trainer.autograd
        thread.now = main.now + WAKE_THREAD_NS
    pending = []
    for part in trainer.model.backward.parts(max(1, buckets)):
        if len(part.ns):
            trainer.launch(part, thread, trainer.gpu)
        if buckets:
            pending.append(collectives.issue(trainer, thread))
    if thread is not main:
        main.os_wait_until("pthread_cond_wait", thread.now + WAKE_THREAD_NS)
    return pending


def phase(trainers: Sequence[Trainer], name: str, index: int) -> None:
    """Validation or a checkpoint after step `index`; ranks with no part in it wait at a barrier."""
    plan = trainers[0].plan
    work: Callable[[Trainer], None] = _validate if name == "validation" else _save
    everyone = name == "validation" and plan.validation_on_all
    if not everyone and not plan.validation_barrier:
        trainers = trainers[:1]
    for trainer in trainers:
        trainer.begin(Unit(name, index))
        if everyone or trainer.rank == 0:
            work(trainer)
    if not everyone and len(trainers) > 1:
        barrier = [collectives.issue(trainer, trainer.main) for trainer in trainers]
        collectives.complete(barrier, BARRIER_NS)
        for trainer in trainers:
            collectives.join(trainer)
            trainer.synchronize(COMMUNICATION)
    for trainer in trainers:
        trainer.units[-1] = replace(trainer.units[-1], host_end=trainer.main.now)


def _validate(trainer: Trainer) -> None:
    for _ in range(trainer.plan.validation_batches):
        trainer.wait_for_data()
        trainer.copy_in()
        if trainer.plan.gpus_per_process > 1:
            run_parallel(trainer, train=False)
        else:
            _forward(trainer)
        trainer.read_loss()


def _save(trainer: Trainer) -> None:
    """Copy the parameters to the host and write them to a file."""
    for _ in range(6):
        trainer.copy(Kind.D2H, 16_777_216, 700_000, COMPUTE, pageable=True)
        trainer.python(trainer.plan.python_ns)
    for _ in range(4):
        trainer.main.os_call("write", trainer.plan.checkpoint_ns // 4)
        trainer.main.now += 2_000
