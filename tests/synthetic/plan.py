"""Plan of a synthetic training run: one frozen dataclass, times in integer nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

DataWait = Literal["os_wait", "python"]
Exchange = Literal["dataparallel", "gpu-server", "cpu-server", "ring"]


@dataclass(frozen=True)
class Plan:
    """A training run; every time is in integer nanoseconds, every share a fraction of 1.

    With several GPUs a process, `streams` and `allocs_per_step` have no effect.
    """

    seed: int = 0
    model_seed: int | None = None  # of the kernels' lengths; `seed` if None
    # Who trains: `ranks` processes with one GPU each (DDP), or one process that feeds
    # `gpus_per_process` GPUs from threads of its own (DataParallel).
    ranks: int = 1
    gpus_per_process: int = 1
    first_gpu: int = 0
    isolated: bool = False  # each process sees only its own GPU, as device 0
    # How long.
    steps: int = 20
    warmup_steps: int = 3
    # The kernels of one step (or micro-batch): layers repeat inside it.
    kernels_per_step: int = 120
    layers: int = 6
    distinct_kernels: int = 24
    named_optimizer: bool = True  # else no kernel's name tells it
    kernel_ns: int = 50_000  # mean over forward and backward
    jitter: float = 0.05  # standard deviation, as a fraction
    streams: int = 1  # compute streams; those after the first overlap in the forward pass
    graph: bool = False  # after warm-up, each part of a step is one CUDA graph launch
    # The host.
    launch_ns: int = 5_000  # inside one launch call
    python_ns: int = 3_000  # between two calls
    loop_ns: int = 10_000  # from one step's last call to the next data wait
    queue_depth: int = 1_000  # launches a GPU holds before the next launch call blocks
    sync_every_step: bool = False  # loss.item()
    hidden_ns: int = 0  # so long the GPU waits for what is not recorded, the host in a cudaMemcpy
    autograd_thread: bool = True  # the backward pass is launched by a second thread
    allocs_per_step: int = 0  # cudaMalloc and cudaFree in turn
    alloc_ns: int = 200_000
    # The input.
    data_wait_ns: int = 0
    data_wait: DataWait = "os_wait"
    hiccup_rate: float = 0.0  # share of steps whose data wait is 10 times as long
    input_copies: int = 1  # 0 to 2: none, the images, the images and their labels
    input_bytes: int = 38_535_168
    labels_first: bool = False  # of two copies, the small one comes first
    uploads: int = 0  # copies of weights from pageable memory before the first step
    upload_ns: int = 20_000_000
    pageable: bool = False
    h2d_ns: int = 700_000
    copy_stream: bool = False  # the input is copied on a stream of its own
    # Between the ranks.
    allreduces: int = 0  # gradient buckets a step, overlapping the backward pass
    allreduce_ns: int = 300_000  # transfer of one bucket once all ranks have arrived
    joined: bool = True  # the optimizer waits for the all-reduces
    slow_rank: int = -1  # this rank's kernels take `slow_factor` times as long
    slow_factor: float = 1.0
    slow_ranks: tuple[tuple[int, float], ...] = ()  # more of them, each with its factor
    late_host_rank: int = -1  # this rank's host needs `late_host_ns` more before each forward pass
    late_host_ns: int = 0
    late_in_loader: bool = False  # the late host spends it waiting for its data
    busy_rank: int = -1  # this rank launches `busy_share` more kernels in each forward pass
    busy_share: float = 0.0
    neighbour_rank: int = -1  # another process takes turns on this rank's card: it has the card
    neighbour_use: float = 0.0  # for this share of the time, in turns of `turn_ns`
    turn_ns: int = 2_000_000
    odd_steps: tuple[int, ...] = ()  # only in these is a rank slow, late, busy or has a neighbour
    collective: str = "AllReduce"  # as the kernels' names say
    begins_late: int = -1  # the GPU of this rank is recorded from the middle of the run on
    group_size: int = 0  # so many ranks at a time have all-reduces of their own; 0: all together
    # Between the GPUs of one process.
    exchange: Exchange = "dataparallel"  # or a parameter server, or a ring
    exchange_bytes: int = 60_000_000  # to the server and back, a GPU
    peer_access: bool = True  # else what goes from GPU to GPU goes through the host
    # Between GPUs: these pairs (physical indices) need `slow_link` times as long.
    slow_pairs: tuple[tuple[int, int], ...] = ()
    slow_link: float = 1.0
    # Beyond plain steps.
    micro_batches: int = 1  # gradient accumulation: forward and backward passes an optimizer step
    validation_after: tuple[int, ...] = ()  # step indices
    validation_batches: int = 0
    validation_on_all: bool = True  # else rank 0 validates while the others wait at a barrier,
    validation_barrier: bool = True  # or go on, and wait in the next step's first all-reduce
    checkpoint_after: tuple[int, ...] = ()
    checkpoint_ns: int = 20_000_000  # writing the file, on rank 0
    epoch_steps: int = 0  # after so many steps the loader begins anew, and the next one waits
    restart_ns: int = 0  # so much longer for its data
    edges_cut: bool = False  # the trace starts and ends in the middle of a step

    def __post_init__(self) -> None:
        if self.gpus_per_process > 1 and (self.ranks > 1 or self.allreduces or self.graph):
            raise ValueError("several GPUs a process: one rank, no all-reduce, no graph")
        if min(self.ranks, self.gpus_per_process, self.layers, self.micro_batches) < 1:
            raise ValueError("ranks, gpus_per_process, layers and micro_batches start at 1")
        if self.kernels_per_step < 12 or not 0 <= self.input_copies <= 2:
            raise ValueError("kernels_per_step starts at 12; input_copies is 0, 1 or 2")
        if self.edges_cut and self.steps < 4:
            raise ValueError("edges_cut needs four steps")

    def slowdown(self, gpus: Sequence[int]) -> float:
        """How many times as long a transfer between these physical GPUs takes."""
        inside = any({*pair} <= {*gpus} for pair in self.slow_pairs)
        return self.slow_link if inside else 1.0

    @property
    def gpus(self) -> int:
        return self.ranks * self.gpus_per_process

    @property
    def optimizer_kernels(self) -> int:
        return max(2, self.kernels_per_step // 20)

    @property
    def forward_kernels(self) -> int:
        return (self.kernels_per_step - self.optimizer_kernels) // 3

    @property
    def backward_kernels(self) -> int:
        return self.kernels_per_step - self.optimizer_kernels - self.forward_kernels
