"""The trainings that `benchmarks.overhead` records: ResNet on synthetic images, and GPT-2.

    torchrun --nproc-per-node 2 benchmarks/overhead_train.py --model resnet18 --batch 8

Prints one JSON line on rank 0: the mean and median time of the steady steps in milliseconds, the
mean of each tenth of them, and the most memory that the process had resident. With --turns, a
recorder is off and on in turn within the run, and the line has the median step of each turn; with
--hooks it is the hooks of gputrace that are, of a run that it records. With
--minutes, a line comes every ten seconds: the median step with the recorder, and without it.
With --block, the GPU is waited for after so many steps, and not after each.
cuDNN's search is off and seeds are fixed, so that every run does the same.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from types import FunctionType
from typing import Any, Final

SETTLE: Final = 2
"""Steps after a recorder was turned on or off that are left out."""
ON, OFF = 80, 16
"""Steps with a recorder, and then without it, of a run of --minutes."""
LINE_S: Final = 10.0
TENTHS: Final = 10


def main() -> None:
    """Trains, and says how long a step took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--micro", type=int, default=1, help="batches a step, whose gradients add up"
    )
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--block", type=int, default=1, help="steps between waits for the GPU")
    parser.add_argument("--seconds", type=float, default=0.0, help="in place of --steps")
    parser.add_argument("--graph", action="store_true", help="a step is one CUDA graph")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, to try the program")
    parser.add_argument("--wait-ms", type=float, default=0.0, help="the loader takes so long")
    parser.add_argument("--data-parallel", action="store_true", help="one process, all GPUs")
    parser.add_argument("--profiler", action="store_true", help="under torch.profiler, CUDA only")
    parser.add_argument("--hooks", action="store_true", help="turns of gputrace's hooks")
    parser.add_argument("--turns", type=int, default=0, help="turns of each kind, an even number")
    parser.add_argument("--turn-steps", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=0.0, help="with short turns without it")
    options = parser.parse_args()
    if options.turns:
        options.steps = options.warmup + 2 * options.turns * (options.turn_steps + SETTLE)
    if options.minutes:
        _train(options)
        return
    times = _train(options)
    if int(os.environ.get("RANK", "0")) == 0 and options.turns:
        print(json.dumps(_by_turn(times, options.turn_steps)))
    elif int(os.environ.get("RANK", "0")) == 0:
        mean, median = statistics.mean(times), statistics.median(times)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        measured = {"mean_ms": 1e3 * mean, "median_ms": 1e3 * median, "peak_mib": peak}
        ends = [len(times) * tenth // TENTHS for tenth in range(TENTHS + 1)]
        tenths = [1e3 * statistics.mean(times[a:b] or times) for a, b in pairwise(ends)]
        steps = options.block * len(times)
        print(json.dumps(measured | {"tenths_ms": tenths, "steps": steps}))


def _by_turn(times: list[float], steps: int) -> dict[str, list[float]]:
    """The median step of each turn in milliseconds; those that follow a change do not count."""
    each = steps + SETTLE
    found = [
        1e3 * statistics.median(times[start + SETTLE : start + each])
        for start in range(0, len(times), each)
    ]
    on = [_is_on(turn) for turn in range(len(found))]
    return {
        "off_ms": [step for step, recorded in zip(found, on, strict=True) if not recorded],
        "on_ms": [step for step, recorded in zip(found, on, strict=True) if recorded],
    }


def _is_on(turn: int) -> bool:
    """Off, on, on, off: what grows slower or faster meanwhile falls on both alike."""
    return turn % 4 in (1, 2)


def _switch(options: argparse.Namespace) -> Callable[[bool], None]:
    """Turns what records this process on or off: torch.profiler, gputrace's collector or hooks."""
    import torch

    if options.hooks:
        return partial(_switch_hooks, found={})
    if not options.profiler:
        library = ctypes.CDLL(os.environ["CUDA_INJECTION64_PATH"])
        return lambda on: library.gputrace_capture(int(on))
    running: list[Any] = []

    def switch(on: bool) -> None:
        if on and not running:
            activities = [torch.profiler.ProfilerActivity.CUDA]
            running.append(torch.profiler.profile(activities=activities))
            running[-1].start()
        elif running and not on:
            running.pop().stop()

    return switch


def _switch_hooks(on: bool, found: dict[tuple[Any, str], Any]) -> None:
    """Put all that gputrace's hooks have around functions on or off; ``found`` has it."""
    import torch.optim.optimizer as optimizers

    called: Any = optimizers._global_optimizer_post_hooks
    if not found:
        modules = list(sys.modules.values())
        held = [held for module in modules for held in list(vars(module).values())]
        for holder in (*modules, *{held for held in held if isinstance(held, type)}):
            for name, function in list(vars(holder).items()):
                is_ours = isinstance(function, FunctionType) and _HOOKS in _file(function)
                if is_ours and hasattr(function, "__wrapped__"):
                    found[holder, name] = function
        found[optimizers, _HOOKS] = dict(called)
    for (holder, name), function in found.items():
        if name == _HOOKS:
            called.clear()
            called.update(function if on else {})
        else:
            setattr(holder, name, function if on else function.__wrapped__)


_HOOKS: Final = "_gputrace_hooks"


def _file(function: FunctionType) -> str:
    return function.__code__.co_filename


def _before_steps(options: argparse.Namespace) -> Callable[[int], None]:
    """Return a function to call before each step with its number, and at the end with -1."""
    import torch

    if not options.turns and not options.profiler and not options.minutes:
        return lambda step: None
    switch = _switch(options)
    if options.minutes:
        return lambda step: _turn(step - options.warmup, switch)
    if not options.turns:
        switch(True)
        return lambda step: switch(step >= 0)

    def before(step: int) -> None:
        turn, into = divmod(step - options.warmup, options.turn_steps + SETTLE)
        if step < 0:
            switch(False)
        elif step >= options.warmup and into == 0:
            switch(_is_on(turn))
            if torch.distributed.is_initialized():
                torch.distributed.barrier()

    return before


def _turn(step: int, switch: Callable[[bool], None]) -> None:
    if step >= 0 and step % (ON + OFF) in (0, ON):
        switch(step % (ON + OFF) == 0)


class _Lines:
    """Medians that a run of --minutes prints from time to time."""

    def __init__(self) -> None:
        self._on: list[float] = []
        self._off: list[float] = []
        self._begin()

    def _begin(self) -> None:
        self._until = time.monotonic() + LINE_S
        self._on.clear()
        self._off.clear()

    def add(self, step: int, took: float) -> None:
        into = step % (ON + OFF)
        if step >= 0 and into not in (*range(SETTLE), *range(ON, ON + SETTLE)):
            (self._on if into < ON else self._off).append(1e3 * took)
        if time.monotonic() >= self._until and self._on and self._off:
            on, off = statistics.median(self._on), statistics.median(self._off)
            print(json.dumps({"on_ms": on, "off_ms": off, "steps": step}), flush=True)
            self._begin()


def _steps(options: argparse.Namespace) -> Iterator[int]:
    """Yield step numbers, as many as were asked for or for as long."""
    seconds = 60 * options.minutes or options.seconds
    end = time.monotonic() + seconds
    step = 0
    while time.monotonic() < end if seconds else step < options.steps:
        yield step
        step += 1


def _workload(options: argparse.Namespace, device: str) -> tuple[Any, Any, Any]:
    """Return the model, and a batch of inputs and labels on the host."""
    import torch

    model: Any
    if options.model in ("gpt2", "tiny"):
        from benchmarks.gpt2 import Gpt2

        model = Gpt2(options.model)
        tokens = torch.randint(0, model.words, (options.batch, model.length))
        return model.to(device), tokens, tokens.roll(-1, 1).flatten()
    import torchvision

    model = getattr(torchvision.models, options.model)().to(device)
    images = torch.randn(options.batch, 3, 224, 224)
    labels = torch.randint(0, 1000, (options.batch,))
    return model.to(memory_format=torch.channels_last), images, labels


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """Return the step as one CUDA graph, whose replays are marked as steps."""
    import torch

    try:
        from gputrace import step as ended
    except ImportError:
        ended = None  # type: ignore[assignment]
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        graph.replay()
        if ended is not None:
            ended()

    return replay


def _prepare(options: argparse.Namespace) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return what trains one step, and what waits for the GPU."""
    import torch

    rank, world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = "cpu" if options.cpu else "cuda"
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = False
    if not options.cpu:
        torch.cuda.set_device(rank)
    model, inputs, labels = _workload(options, device)
    if world > 1:
        torch.distributed.init_process_group("gloo" if options.cpu else "nccl")
        ranks = None if options.cpu else [rank]
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=ranks)
    if options.data_parallel:
        model = torch.nn.DataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if options.graph:
        inputs, labels = inputs.to(device), labels.to(device)
    elif not options.cpu:
        inputs, labels = inputs.pin_memory(), labels.pin_memory()
    layout = torch.channels_last if inputs.dim() == 4 else torch.preserve_format

    def step() -> None:
        optimizer.zero_grad(set_to_none=not options.graph)
        for _ in range(options.micro):
            x, y = inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            with torch.autocast(device, torch.bfloat16, cache_enabled=not options.graph):
                loss = torch.nn.functional.cross_entropy(model(x.to(memory_format=layout)), y)
            loss.backward()
        optimizer.step()

    wait = (lambda: None) if options.cpu else torch.cuda.synchronize
    return _captured(step) if options.graph else step, wait


def _train(options: argparse.Namespace) -> list[float]:
    """Return the seconds of each step after the warm-up, or the mean of each block's."""
    step, wait = _prepare(options)
    before = _before_steps(options)
    times: list[float] = []
    lines = _Lines()
    began = time.perf_counter()
    for number in _steps(options):
        before(number)
        if options.block == 1 or number == options.warmup:
            began = time.perf_counter()
        time.sleep(options.wait_ms / 1e3)
        step()
        past = number - options.warmup + 1
        if past > 0 and past % options.block == 0:
            wait()
            now = time.perf_counter()
            times.append((now - began) / options.block)
            began = now
            if options.minutes:
                lines.add(past - 1, times[-1])
        elif past == 0 or options.block == 1:
            wait()
    before(-1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import torch

        torch.distributed.destroy_process_group()
    return times


if __name__ == "__main__":
    main()
