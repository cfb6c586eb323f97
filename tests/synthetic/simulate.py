"""From a plan to a recording: the run is played step by step, in integer nanoseconds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.synthetic.machine import Log, Thread
from tests.synthetic.model import Model
from tests.synthetic.plan import Plan
from tests.synthetic.recording import (
    API,
    COLLECTIVES,
    NVTX,
    OP,
    OSRT,
    STATES,
    SYNC,
    Process,
    Recording,
    Table,
    Truth,
    Window,
)
from tests.synthetic.steps import phase, step
from tests.synthetic.trainer import Trainer
from tests.synthetic.truth import truth_of, windows_of

IDLE_THREADS = (("pt_nccl_watchdg", "pthread_cond_timedwait", 100_000_000),
                ("cuda-EvtHandlr", "poll", 500_000_000))  # fmt: skip


def simulate(plan: Plan) -> Recording:
    """Play the plan; the same plan gives the same recording."""
    log = Log()
    model = Model.of(plan, log)
    trainers = [Trainer(plan, log, rank, model) for rank in range(plan.ranks)]
    for trainer in trainers:
        trainer.upload()
    for index in range(plan.steps):
        step(trainers, index)
        if index in plan.checkpoint_after:
            phase(trainers, "checkpoint", index)
        if index in plan.validation_after and plan.validation_batches:
            phase(trainers, "validation", index)
    processes = tuple(_process(trainer) for trainer in trainers)
    recording = Recording(
        plan, processes, tuple(log.names), log.table(OP), log.table(API), log.table(SYNC),
        log.table(OSRT), log.table(NVTX), log.table(STATES), log.table(COLLECTIVES),
        Truth((), {}, {}, {}),
    )  # fmt: skip
    windows = windows_of(recording, [trainer.units for trainer in trainers])
    if plan.begins_late >= 0:
        recording = _begun_late(recording)
    if plan.edges_cut:
        recording, windows = _cut(recording, windows)
    return replace(recording, truth=truth_of(recording, windows))


def _begun_late(recording: Recording) -> Recording:
    """Keep of one rank what it does from the middle of the run on."""
    ops, api = recording.ops, recording.api
    middle = (int(ops["start"].min()) + int(ops["end"].max())) // 2

    def late(table: Table) -> Table:
        kept: Table = table[
            (table["rank"] != recording.plan.begins_late) | (table["start"] >= middle)
        ]
        return kept

    return replace(recording, ops=late(ops), api=late(api))


def _process(trainer: Trainer) -> Process:
    """Describe a process, and let its other threads sleep beside the training."""
    end = max(trainer.main.now, max(gpu.drained for gpu in trainer.gpus))
    begin, threads = 900_000_000, {trainer.pid: "python", **trainer.named_threads}
    for index, (name, call, ns) in enumerate(IDLE_THREADS):
        thread = Thread(trainer.host, trainer.pid + 1_000 + index, begin + 7_000_000 * index)
        threads[thread.id] = name
        while thread.now < end:
            thread.os_call(call, ns)
            thread.now += 4_000
    devices = tuple((gpu.device, gpu.gpu) for gpu in trainer.gpus)
    return Process(trainer.rank, trainer.pid, devices, tuple(threads.items()))


def _cut(recording: Recording, windows: list[Window]) -> tuple[Recording, list[Window]]:
    """Keep what lies between the middles of the second and of the last step."""
    early = [w for w in windows if (w.step, w.phase in ("warmup", "steady")) == (1, True)]
    last = [w for w in windows if w.step == recording.plan.steps - 1]
    begin = min((w.start + w.end) // 2 for w in early)
    end = max((w.start + w.end) // 2 for w in last)

    def inside(table: Table) -> Table:
        return table[(table["start"] >= begin) & (table["end"] <= end)]

    cut = replace(
        recording,
        ops=inside(recording.ops),
        api=inside(recording.api),
        sync=inside(recording.sync),
        osrt=inside(recording.osrt),
        nvtx=inside(recording.nvtx),
    )
    spans = {p.rank: cut.ops[cut.ops["rank"] == p.rank] for p in recording.processes}
    limits = {
        rank: (int(ops["start"].min()), int(np.max(ops["end"]))) for rank, ops in spans.items()
    }
    kept = []
    for window in windows:
        low, high = limits[window.rank]
        start, stop = max(window.start, low), min(window.end, high)
        whole = (start, stop) == (window.start, window.end)
        if start < stop:
            kept.append(replace(window, start=start, end=stop, whole=whole))
    return cut, kept
