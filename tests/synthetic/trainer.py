"""One training process at work: what its threads call and what its GPUs then run. Times are ns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.synthetic import names
from tests.synthetic.machine import LATENCY_NS, WAKE_NS, Gpu, Host, Log, Thread
from tests.synthetic.model import Model, Work
from tests.synthetic.plan import Plan
from tests.synthetic.recording import OP, SYNC, Ints, Kind, State, Unit

Floats = npt.NDArray[np.floating[Any]]
COMPUTE, COMMUNICATION, COPIES, SIDE = 7, 19, 23, 31  # stream ids; SIDE is the first of several


class Trainer:
    """A process of the run: its main and autograd threads, and the GPUs that it feeds."""

    def __init__(self, plan: Plan, log: Log, rank: int, model: Model) -> None:
        self.plan, self.model, self.rank = plan, model, rank
        self.host = Host(log, rank, correlation=1_000 + 10 * rank)
        self.rng = np.random.default_rng((plan.seed, 2, rank))
        self.pid = 4_000 + 3 * rank
        self.main = Thread(self.host, self.pid, 1_000_000_000 + int(self.rng.integers(2_000_000)))
        self.named_threads: dict[int, str] = {}
        self.autograd = self._thread(2_000, "pt_autograd_0")
        self.gpus = [self._gpu(device) for device in range(plan.gpus_per_process)]
        self.gpu = self.gpus[0]
        self.units: list[Unit] = []
        self.warming = 0.0  # how much longer things take while warming up, as a fraction

    def _gpu(self, index: int) -> Gpu:
        card = self.rank * self.plan.gpus_per_process + index
        device = index if self.plan.isolated else card
        return Gpu(device, self.plan.first_gpu + card, self.plan.queue_depth)

    def _thread(self, offset: int, name: str) -> Thread:
        self.named_threads[self.pid + offset] = name
        return Thread(self.host, self.pid + offset, 0)

    def fresh_thread(self) -> Thread:
        """A thread that has not been before, as DataParallel starts for each forward pass."""
        return self._thread(10_000 + len(self.named_threads), "python")

    def autograd_of(self, gpu: Gpu) -> Thread:
        """The thread that launches the backward pass on one GPU."""
        index = self.gpus.index(gpu)
        return self._thread(2_000 + index, f"pt_autograd_{index}")

    def begin(self, unit: Unit) -> None:
        """Turn to the next step or phase."""
        self.host.unit = len(self.units)
        self.units.append(unit)
        warm = unit.phase != "step" or unit.step >= self.plan.warmup_steps
        self.warming = 0.0 if warm else 2.0 * 0.5**unit.step

    def is_odd(self, rank: int) -> bool:
        """Return true on the rank that something is planted on, in a step that has it."""
        unit = self.units[-1]
        odd = not self.plan.odd_steps or (unit.phase == "step" and unit.step in self.plan.odd_steps)
        return self.rank == rank and odd

    def around(self, ns: Ints | Floats | float, jitter: float | None = None) -> Ints:
        """Durations that scatter about `ns` by the plan's jitter."""
        spread = self.plan.jitter if jitter is None else jitter
        if not isinstance(ns, np.ndarray):  # mostly, and numpy takes long for one number
            scatter = min(max(1 + spread * self.rng.standard_normal(), 0.3), 3)
            return np.asarray(ns * scatter, np.int64)
        scatters = 1 + spread * self.rng.standard_normal(ns.shape)
        return (ns * np.minimum(np.maximum(scatters, 0.3), 3)).astype(np.int64)

    def python(self, ns: int) -> None:
        """Let the main thread run Python for about that long."""
        self.main.now += int(self.around(float(ns)))

    def wait_for_data(self, times: int = 1, more_ns: int = 0) -> None:
        """Wait for, or make, the next batch; `times` as long as planned, and `more_ns`."""
        self.python(self.plan.loop_ns)
        start, ns = self.main.now, int(self.around(float(self.plan.data_wait_ns * times))) + more_ns
        if self.plan.data_wait == "python":
            self.main.now += ns
        elif ns:
            call = ("poll", "sem_wait", "clock_nanosleep")[self.plan.seed % 3]
            for share in (ns // 3, ns - ns // 3):
                self.main.os_call(call, share)
        self.main.mark(State.DATA, start)
        if ns:
            self.main.range("data", start)

    def copy_in(self) -> None:
        """Issue the copies of the next batch to the first GPU."""
        plan, gpu = self.plan, self.gpu
        stream = COPIES if plan.copy_stream else COMPUTE
        parts = range(plan.input_copies)
        for index in reversed(parts) if plan.labels_first else parts:
            size, ns = (2_048, 1_500.0) if index else (plan.input_bytes, float(plan.h2d_ns))
            self.copy(Kind.H2D, size, int(self.around(ns)), stream, pageable=plan.pageable)
            self.python(plan.python_ns)
        if plan.copy_stream and plan.input_copies:
            gpu.free[COMPUTE] = max(gpu.free.get(COMPUTE, 0), gpu.free[COPIES])

    def copy(self, kind: Kind, size: int, ns: int, stream: int, pageable: bool = False) -> None:
        """Issue one copy; a large one from pageable memory holds the caller until it is done."""
        start, end = self.gpu.run(stream, np.array([self.main.now + LATENCY_NS]), np.array([ns]))
        until = int(end[0]) + WAKE_NS if pageable and size > 65_536 else 0
        call = self.main.call(names.COPY, 2 * self.plan.launch_ns, until)
        self.ran(
            self.gpu, self.main, stream, kind, call.start, start, end, call.correlation,
            bytes=size, pageable=pageable,
        )  # fmt: skip

    def upload(self) -> None:
        """Copy the weights from pageable memory, each in a call that returns when it is done."""
        for _ in range(self.plan.uploads):
            self.copy(Kind.H2D, 67_108_864, self.plan.upload_ns, COMPUTE, pageable=True)
            self.python(self.plan.python_ns)

    def wait_unseen(self) -> None:
        """Read 256 bytes that the GPU has only once something unrecorded is done."""
        free = self.gpu.free
        free[COMPUTE] = max(free.get(COMPUTE, 0), self.main.now) + self.plan.hidden_ns
        start, end = self.gpu.run(COMPUTE, np.array([self.main.now]), np.array([1_500]))
        call = self.main.call(names.COPY_BLOCKING, self.plan.launch_ns, int(end[0]) + WAKE_NS)
        self.ran(
            self.gpu, self.main, COMPUTE, Kind.D2H, call.start, start, end, call.correlation,
            bytes=256,
        )  # fmt: skip

    def memset(self) -> None:
        call = self.main.call(names.SET, self.plan.launch_ns)
        start, end = self.gpu.run(COMPUTE, np.array([call.start + LATENCY_NS]), np.array([900]))
        self.ran(
            self.gpu, self.main, COMPUTE, Kind.MEMSET, call.start, start, end, call.correlation,
            bytes=4,
        )  # fmt: skip

    def ran(
        self, gpu: Gpu, thread: Thread, stream: Ints | int, kind: Kind, issue: Ints | int,
        start: Ints | int, end: Ints | int, correlation: Ints | int, **more: object,
    ) -> None:  # fmt: skip
        """Note what a GPU did: scalars, or one entry an operation."""
        count = len(start) if isinstance(start, np.ndarray) else 1
        self.host.log.add(
            OP, count, rank=self.rank, thread=thread.id, device=gpu.device, gpu=gpu.gpu,
            stream=stream, kind=kind, issue=issue, start=start, end=end, correlation=correlation,
            unit=self.host.unit, **({"peer": -1} | more),
        )  # fmt: skip

    def launch(self, work: Work, thread: Thread, gpu: Gpu, streams: int = 1) -> None:
        """Launch kernels on one GPU, by turns on several streams that fork and join there."""
        slow = self.plan.slow_factor if self.is_odd(self.plan.slow_rank) else 1.0
        slow *= dict(self.plan.slow_ranks).get(self.rank, 1.0)
        ns = self.around(work.ns * (slow * (1 + self.warming)))
        if self.is_odd(self.plan.neighbour_rank):
            use, turn = self.plan.neighbour_use, self.plan.turn_ns
            turns = self.rng.poisson(ns * use / ((1 - use) * turn))
            ns = ns + turns * self.around(np.full(len(ns), turn), 0.2)
        if self.plan.graph and self.units[-1].phase == "step" and not self.warming:
            self._launch_graph(work, ns, thread, gpu)
            return
        for low in range(0, len(ns), gpu.queue_depth):
            part = slice(low, low + gpu.queue_depth)
            self._launch(work.names[part], ns[part], thread, gpu, streams)

    def _launch(self, ids: Ints, ns: Ints, thread: Thread, gpu: Gpu, streams: int) -> None:
        """At most a queue full of kernels."""
        count, log = len(ns), self.host.log
        slowly = 1 + self.warming / 2
        in_call = self.around(np.full(count, self.plan.launch_ns * slowly), 0.2)
        between = self.around(np.full(count, self.plan.python_ns * slowly), 0.3)
        issue, correlation = thread.calls(
            log.name(names.LAUNCH), in_call, between, gpu.slots[:count]
        )
        lanes = np.arange(count) % streams
        forked = gpu.free.get(COMPUTE, 0) if streams > 1 else 0
        start, end = np.empty(count, np.int64), np.empty(count, np.int64)
        for lane in range(min(streams, count)):
            mine = lanes == lane
            ready = np.maximum(issue[mine] + LATENCY_NS, forked)
            start[mine], end[mine] = gpu.run(SIDE + lane if lane else COMPUTE, ready, ns[mine])
        gpu.free[COMPUTE] = max(gpu.free[COMPUTE], int(end.max()) if streams > 1 else 0)
        gpu.queue(start)
        stream = np.where(lanes > 0, SIDE + lanes, COMPUTE)
        self.ran(gpu, thread, stream, Kind.KERNEL, issue, start, end, correlation, name=ids)

    def _launch_graph(self, work: Work, ns: Ints, thread: Thread, gpu: Gpu) -> None:
        """Launch the kernels as one graph."""
        thread.now += int(self.around(float(self.plan.python_ns), 0.3))
        call = thread.call(names.LAUNCH_GRAPH, 3 * self.plan.launch_ns, int(gpu.slots[0]))
        start, end = gpu.run(COMPUTE, np.array([call.start + LATENCY_NS]), ns.sum(keepdims=True))
        gpu.queue(start)
        self.ran(
            gpu, thread, COMPUTE, Kind.GRAPH, call.start, start, end, call.correlation,
            name=work.names[:1],
        )  # fmt: skip

    def allocate(self, count: int, first: int = 0) -> None:
        """Call cudaMalloc and cudaFree in turn; cudaFree waits until the GPU has drained."""
        for index in range(first, first + count):
            start, free = self.main.now, index % 2
            ns = int(self.around(float(self.plan.alloc_ns)))
            drained = self.gpu.drained + WAKE_NS if free else 0
            self.main.call(names.FREE if free else names.MALLOC, ns, drained)
            self.main.mark(State.ALLOC, start)
            self.python(self.plan.python_ns)

    def synchronize(self, stream: int = COMPUTE) -> None:
        """cudaStreamSynchronize: wait until a stream has drained."""
        until = self.gpu.free.get(stream, 0) + WAKE_NS
        call = self.main.call(names.SYNC_STREAM, 2_000, until)
        self.main.mark(State.SYNC, call.start)
        self.host.log.add(
            SYNC, rank=self.rank, thread=self.main.id, device=self.gpu.device, gpu=self.gpu.gpu,
            stream=stream, correlation=call.correlation, kind=3,
            start=call.start + 400, end=call.end - 400,
        )  # fmt: skip

    def read_loss(self) -> None:
        """loss.item(): a copy of 4 bytes, then a wait for it."""
        self.copy(Kind.D2H, 4, 1_100, COMPUTE)
        self.synchronize()
