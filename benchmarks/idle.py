"""Cost of a CUPTI that records nothing, on a machine with a GPU and PyTorch.

Runs the same training, whose host's launches fill each step, once for each of `STATES` in turn, and
prints what a step takes and what a launch, in each and in excess of none: how much of the cost of a
control stretch is that of CUPTI's mere presence, of a subscriber, of kernels and of calls that were
recorded before, and what is left when CUPTI was taken out of the process.

    python -m benchmarks idle --runs 3
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.options import Options
from gputrace.collectors.backend import has_driver
from gputrace.native import built

GPU_KINDS: Final = (10, 1, 2, 22, 17, 51)
"""Kinds of the collector: kernels, copies, memsets, copies between GPUs, overhead, graphs."""
CALL_KINDS: Final = (5, 4)
"""Calls of the runtime and of the driver."""
STATES: Final = {
    "bare": "nothing of ours",
    "loaded": "libcupti is in the process; PyTorch has it there in any case",
    "asked": "one call that begins CUPTI: its version, and a place for its records",
    "subscribed": "a subscriber with no callbacks",
    "unsubscribed": "a subscriber that came and went, as the collector's",
    "kernels off": "records of the GPU were on for some steps, and are off",
    "calls off": "records of calls were on for some steps, and are off",
    "all off": "both",
    "taken out": "both, and CUPTI was finalized where a call of the program ends",
    "collector": "the collector without a CUPTI: its thread alone",
    "stretch": "the collector in a control stretch, in which CUPTI stays",
    "all on": "both are on",
}
RECORDED: Final = {
    "kernels off": GPU_KINDS,
    "calls off": CALL_KINDS,
    **dict.fromkeys(("all off", "taken out", "all on"), GPU_KINDS + CALL_KINDS),
}
"""Kinds that are recorded for some steps at least, by state."""
WARMUP, ON, STEPS = 20, 30, 150
LAUNCHES, BATCHES = 400, 40
"""Launches of a tiny kernel: fewer than a stream takes before one waits for the GPU."""
HOLD_NS: Final = 250_000_000
BUFFER: Final = 8 << 20
EXIT: Final = 1
"""Where a callback is: after the call."""
MISSING: Final = "/no-libcupti"

Requested = ctypes.CFUNCTYPE(
    None,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_size_t),
)
Completed = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)
Called = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint32)
)


class Cupti:
    """The few functions that are used of a libcupti; each raises RuntimeError where one fails."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._buffers: dict[int, Any] = {}
        self._subscriber = ctypes.c_void_p()
        self._kept = Requested(self._request), Completed(self._complete), Called(self._call)
        self.finalized = 0

    def _request(self, place: Any, size: Any, most: Any) -> None:
        buffer = ctypes.create_string_buffer(BUFFER)
        self._buffers[ctypes.addressof(buffer)] = buffer
        place[0], size[0], most[0] = ctypes.addressof(buffer), BUFFER, 0

    def _complete(self, context: int, stream: int, place: int, size: int, valid: int) -> None:
        self._buffers.pop(place, None)

    def _call(self, user: int, domain: int, number: int, data: Any) -> None:
        if data[0] == EXIT and not self.finalized:
            self.finalized += 1
            self.do("cuptiFinalize")

    def do(self, name: str, *arguments: Any) -> None:
        """Make a call."""
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed ({code})")

    def ask(self) -> None:
        """Begin CUPTI, with a place for its records."""
        self.do("cuptiGetVersion", ctypes.byref(ctypes.c_uint32()))
        self.do("cuptiActivityRegisterCallbacks", *self._kept[:2])

    def subscribe(self) -> None:
        """Take the place of a subscriber, without a callback."""
        self.do("cuptiSubscribe", ctypes.byref(self._subscriber), self._kept[2], None)

    def unsubscribe(self) -> None:
        """Give it back."""
        self.do("cuptiUnsubscribe", self._subscriber)

    def record(self, kinds: tuple[int, ...], on: bool) -> None:
        """Begin or end the records of some kinds."""
        for kind in kinds:
            self.do("cuptiActivityEnable" if on else "cuptiActivityDisable", kind)
        if not on:
            self.do("cuptiActivityFlushAll", 1)

    def take_out(self, call: Callable[[], object]) -> None:
        """Finalize CUPTI at the end of a call of the program's, which ``call`` makes."""
        self.subscribe()
        for domain in 1, 2:
            self.do("cuptiEnableDomain", 1, self._subscriber, domain)
        call()
        if not self.finalized:
            raise RuntimeError("no call of the program came")


_kept: list[Cupti] = []
"""CUPTI has functions of it until the process ends."""


def put(state: str, libcupti: str, work: Callable[[], object], call: Callable[[], object]) -> None:
    """Bring this process into a state.

    Args:
        state: one of `STATES`.
        libcupti: path of the library.
        work: makes some steps.
        call: makes a CUDA call, and waits for the GPU.
    """
    if state == "stretch":
        _begin_stretch(work, call)
    elif state not in ("bare", "collector"):
        _use(Cupti(libcupti), state, work, call)


def _begin_stretch(work: Callable[[], object], call: Callable[[], object]) -> None:
    collector = ctypes.CDLL(os.environ["CUDA_INJECTION64_PATH"])
    work()
    call()
    if collector.gputrace_begin_stretch(ctypes.c_uint64(HOLD_NS), 1):
        raise RuntimeError("the collector begins no stretch")
    # It looks each second.
    time.sleep(HOLD_NS / 1e9 + 2)


def _use(cupti: Cupti, state: str, work: Callable[[], object], call: Callable[[], object]) -> None:
    _kept.append(cupti)
    if state != "loaded":
        cupti.ask()
    if "subscribed" in state:
        cupti.subscribe()
    if state == "unsubscribed":
        cupti.unsubscribe()
    kinds = RECORDED.get(state, ())
    if kinds:
        cupti.record(kinds, True)
        work()
        call()
    if kinds and state != "all on":
        cupti.record(kinds, False)
    if state == "taken out":
        cupti.take_out(call)


def run(options: Options) -> int:
    """Prints a line for each run and a table; 1 where a run fails. Without a GPU it runs none."""
    if options.check or not has_driver():
        print("idle: needs a GPU and PyTorch; see docs/benchmarks.md for measured figures")
        return 0
    found: dict[str, list[tuple[float, float]]] = {state: [] for state in STATES}
    for turn in range(options.runs):
        names = list(STATES)
        first = turn * len(names) // max(options.runs, 1)
        for state in (*names[first:], *names[:first]):
            measured = _measure(state)
            if measured is None:
                return 1
            found[state].append(measured)
            print(f"round {turn} {state}: step {measured[0]:.3f} ms, launch {measured[1]:.3f} µs")
    show(found)
    return 0


def show(found: dict[str, list[tuple[float, float]]]) -> None:
    """Print medians of the rounds, and of what each has in excess of the same round's bare run."""
    print("\n| state | step ms | more | launch µs | more | what it is |")
    print("| :-- | --: | --: | --: | --: | :-- |")
    for state, runs in found.items():
        cells = []
        for which in 0, 1:
            more = [run[which] - bare[which] for run, bare in zip(runs, found["bare"], strict=True)]
            cells += [
                f"{statistics.median(run[which] for run in runs):.3f}",
                f"{statistics.median(more):+.3f} ({min(more):+.3f} to {max(more):+.3f})",
            ]
        print(f"| {state} | {' | '.join(cells)} | {STATES[state]} |")


def _measure(state: str) -> tuple[float, float] | None:
    """Return the median step in ms and launch in µs of one process; None where it failed."""
    command = [sys.executable, "-m", "benchmarks.idle", state]
    with _environment(state) as environment:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if ran.returncode:
        # As of a crash, whose signal this names.
        print(f"idle: {state} failed ({ran.returncode}):\n{ran.stderr.strip()[-2000:]}")
        return None
    result = json.loads(ran.stdout.splitlines()[-1])
    return result["step_ms"], result["launch_us"]


@contextmanager
def _environment(state: str) -> Iterator[dict[str, str]]:
    """Yield the environment of a process: only of some, the driver loads the collector."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUTRACE")}
    kept.pop("CUDA_INJECTION64_PATH", None)
    if state not in ("collector", "stretch"):
        yield kept
        return
    library = built("_collector")
    with tempfile.TemporaryDirectory() as folder:
        kept |= {"CUDA_INJECTION64_PATH": str(library), "GPUTRACE_DIR": folder}
        yield kept | ({"GPUTRACE_CUPTI": MISSING} if state == "collector" else {})


def _libcupti() -> str:
    """Return the path of the libcupti that PyTorch has loaded, or else its usual name."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if "/libcupti.so" in line:
            return line.split(maxsplit=5)[-1]
    import torch

    return f"libcupti.so.{str(torch.version.cuda).partition('.')[0]}"


def main() -> None:
    """Trains in one state, and says what a step and a launch took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("state", choices=STATES)
    state: str = parser.parse_args().state
    import torch

    torch.manual_seed(0)
    layers: list[Any] = [torch.nn.Linear(64, 64) for _ in range(40)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batch = torch.randn(32, 64).pin_memory()

    def train(count: int) -> list[float]:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            optimizer.zero_grad()
            model(batch.cuda(non_blocking=True)).square().mean().backward()
            optimizer.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return times

    def launch() -> float:
        began = time.perf_counter()
        for _ in range(LAUNCHES):
            number.add_(1)
        took = time.perf_counter() - began
        torch.cuda.synchronize()
        return took / LAUNCHES

    number = torch.zeros(1, device="cuda")
    train(WARMUP)
    put(state, _libcupti(), lambda: train(ON), torch.cuda.synchronize)
    train(WARMUP)
    step = statistics.median(train(STEPS))
    launches = statistics.median(launch() for _ in range(BATCHES))
    print(json.dumps({"step_ms": 1e3 * step, "launch_us": 1e6 * launches}), flush=True)
    # Neither CUPTI nor what it calls of ours is to see the end of the interpreter.
    os._exit(0)


if __name__ == "__main__":
    main()
