"""The GPUs of a run as analyzers take them, for tests of single analyzers."""

from __future__ import annotations

from collections.abc import Sequence

from gputrace.analyzers.gpu_shards import PerGpu, Shard
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.steps import FoundSteps
from gputrace.model.trace import Trace
from tests.helpers.memory_traces import MemoryTrace


def gpus_of(trace: Trace) -> PerGpu:
    """Return the GPUs of a trace, with their operations."""
    return PerGpu.here(Shard(trace))


def handmade(trace: Trace, operations: Sequence[GpuOperations]) -> PerGpu:
    """Return GPUs with these operations, whatever the trace."""
    shard = Shard(trace)
    return PerGpu(shard, [shard.take(operations)])


def no_gpus() -> PerGpu:
    """Return the GPUs of a run that did nothing."""
    return PerGpu.of_hosts(MemoryTrace([]), [])


def gpus_with_lanes(trace: Trace) -> tuple[PerGpu, FoundSteps]:
    """Return the GPUs of a trace with their lanes, and the steps of all ranks."""
    gpus = gpus_of(trace)
    found = gpus.find_steps()
    gpus.build_lanes(None, found)
    return gpus, found
