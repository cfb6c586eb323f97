"""Host threads that issue work, GPUs that do it in turn: training loops written as programs.

    run = Run()
    for _ in range(20):
        run.input_copy()
        run.model()
        run.optimizer()

A thread spends 3 µs before each call and 5 µs in it; what it issues starts when the GPU is free,
2.5 µs into the call at the earliest. So lengths can be worked out by hand.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

import gputrace
from gputrace.api import Report
from tests.helpers.exports import (
    D2D,
    D2H,
    GRAPH_TRACE,
    H2D,
    KERNEL,
    MEMCPY,
    MEMSET,
    NVTX,
    PUSH_POP_RANGE,
    RUNTIME,
    SAMPLE,
    Export,
    Value,
    global_id,
)

US: Final = 1_000
MS: Final = 1_000_000

BEFORE_CALL: Final = 3 * US
CALL: Final = 5 * US
LATENCY: Final = CALL // 2

MULTI_TENSOR: Final = "void at::native::multi_tensor_apply_kernel"
ADAM: Final = f"{MULTI_TENSOR}<FusedAdamMathFunctor>"
BATCH_BYTES: Final = 38_000_000
STEP: Final = 300 * US + 40 * 50 * US + 3 * 30 * US
"""GPU work of a step of `train`."""


class Run:
    """One thread of one process, and the GPU that it feeds.

    Attributes:
        export: what is recorded; several runs may share one.
        device: the GPU that the next call is for.
        now: the host thread's clock.
        gpu_free: when each GPU will have done all that was issued.
    """

    def __init__(
        self, export: Export | None = None, *, pid: int = 100, device: int = 0, thread: int = 0
    ) -> None:
        self.export = export or Export()
        self.device = device
        self.now = 0
        self.gpu_free: dict[int, int] = {}
        self._pid, self._thread = pid, thread or pid
        self._calls = 10_000 if thread else 0  # ids are a process's: threads must not share them

    def wait(self, nanoseconds: int) -> None:
        """The host does something that no row shows."""
        self.now += nanoseconds

    def kernel(self, length: int, name: str) -> None:
        text = self.export.string(name)
        self._issue(KERNEL, length, "cudaLaunchKernel", demangledName=text, shortName=text)

    def kernels(self, count: int, name: str, length: int = 50 * US) -> None:
        """Kernels of five names that begin alike."""
        for index in range(count):
            self.kernel(length, f"void at::native::{name}_{index % 5}")

    def input_copy(
        self, size: int = BATCH_BYTES, length: int = 300 * US, *, pageable: bool = False
    ) -> int:
        """A batch to the GPU; gives back when it has arrived."""
        source = 0 if pageable else 1
        values = {"bytes": size, "copyKind": H2D, "srcKind": source, "dstKind": 2}
        return self._issue(MEMCPY, length, "cudaMemcpyAsync", **values)

    def model(self, kernels: int = 40, name: str = "gemm") -> None:
        """A forward and a backward pass of 50 µs a kernel."""
        self.kernels(kernels // 2, f"{name}_forward")
        self.kernels(kernels // 2, f"{name}_backward")

    def optimizer(self, kernels: int = 3) -> None:
        for _ in range(kernels):
            self.kernel(30 * US, ADAM)

    def item(self) -> None:
        """``.item()``: a reduction, four bytes to the host, and a wait for them."""
        self.kernel(20 * US, "void at::native::reduce_kernel")
        values = {"bytes": 4, "copyKind": D2H, "srcKind": 2, "dstKind": 1}
        self._issue(MEMCPY, 2 * US, "cudaMemcpyAsync", **values)
        self.synchronize()

    def copy(self, length: int, *, to_host: bool) -> None:
        """A copy into pinned memory of the host, or within the GPU's."""
        kind, target = (D2H, 1) if to_host else (D2D, 2)
        values = {"bytes": BATCH_BYTES, "copyKind": kind, "srcKind": 2, "dstKind": target}
        self._issue(MEMCPY, length, "cudaMemcpyAsync", **values)

    def memset(self) -> None:
        self._issue(MEMSET, US, "cudaMemsetAsync", bytes=64)

    def graph(self, length: int) -> None:
        """A CUDA graph recorded as a whole."""
        self._issue(GRAPH_TRACE, length, "cudaGraphLaunch", graphId=1)

    def allocate(self, length: int, name: str = "cudaMalloc") -> None:
        self.now += BEFORE_CALL
        self._call(self.now, self.now + length, name)

    def synchronize(self) -> None:
        """Waits until the GPU has done all, and 4 µs more."""
        self.now += BEFORE_CALL
        done = max(self.gpu_free.get(self.device, 0), self.now)
        self._call(self.now, done + 4 * US, "cudaStreamSynchronize")

    def range(self, start: int, end: int, text: str) -> None:
        """An NVTX range of this thread."""
        thread = global_id(self._pid, thread=self._thread)
        values = {"eventType": PUSH_POP_RANGE, "globalTid": thread, "domainId": 0}
        self.export.add(NVTX, start=start, end=end, text=text, **values)

    def wait_at(self, *lines: str, thread: int = 0, inner: str = "") -> None:
        """The host spends 1 ms at each line, and a sample in its middle says so, and in which frame
        of a library that the line calls.
        """
        for line in lines:
            name = self.export.string(line)
            who = global_id(self._pid, thread=thread or self._thread)
            inside = self.export.string(inner or line)
            values = {"globalTid": who, "nameId": name, "innerNameId": inside}
            self.export.add(SAMPLE, start=self.now + MS // 2, **values)
            self.wait(MS)

    def _issue(self, table: str, length: int, call: str, **values: Value) -> int:
        self.now += BEFORE_CALL
        start = max(self.gpu_free.get(self.device, 0), self.now + LATENCY)
        self._call(self.now, self.now + CALL, call)
        self.gpu_free[self.device] = start + length
        place: dict[str, Value] = {"deviceId": self.device, "contextId": 1, "streamId": 7}
        place |= {"correlationId": self._calls, "globalPid": global_id(self._pid)}
        self.export.add(table, start=start, end=start + length, **place, **values)
        return start + length

    def _call(self, start: int, end: int, name: str) -> None:
        self._calls += 1
        thread = global_id(self._pid, thread=self._thread)
        values = {"correlationId": self._calls, "nameId": self.export.string(name)}
        self.export.add(RUNTIME, start=start, end=end, eventClass=0, globalTid=thread, **values)
        self.now = end


def train(run: Run, steps: int = 20, *, wait: int = 0, kernels: int = 40) -> None:
    """Steps that wait for data, copy it, compute, and wait for the GPU: 2.39 ms without a wait."""
    for _ in range(steps):
        run.wait(wait)
        run.input_copy()
        run.model(kernels)
        run.optimizer()
        run.synchronize()


def analyze(run: Run | Export, folder: Path, time: tuple[int, int] | None = None) -> Report:
    """Writes what was recorded, and analyzes it."""
    path = folder / "run.sqlite"
    path.unlink(missing_ok=True)
    (run.export if isinstance(run, Run) else run).write(path)
    with gputrace.open(path) as trace:
        return trace.analyze(time=time)


def ids(report: Report) -> list[str]:
    return [finding.id for finding in report.findings]


def share(report: Report, name: str, row: int = 0) -> float:
    return report.breakdown[row].share(name)


def assert_training(report: Report, steps: int) -> None:
    """Steps of the number given; without interludes they follow each other without a hole."""
    assert (report.steps.kind, report.steps.count) == ("training", steps)
    if not report.phases:
        first = [s for s in report.step_list if s.gpu == report.step_list[0].gpu]
        assert all(a.end_ns == b.start_ns for a, b in pairwise(first))


def assert_steps_of(report: Report, length: int) -> None:
    lengths = [step.end_ns - step.start_ns for step in report.step_list]
    assert lengths == pytest.approx([length] * len(lengths), rel=0.01)
