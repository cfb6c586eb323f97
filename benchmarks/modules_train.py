"""The training that `benchmarks.modules` records: GPT-2 in bfloat16, which counts for itself.

Prints one JSON line: what a step takes after the warm-up, tokens a second, FLOPs a second as
PyTorch's FlopCounterMode counts them and their part of the card's peak by its data sheet, the
energy that NVML's counter of the card grew by, and the most memory that tensors had. With
--profile, torch.profiler (with_stack) is on in three steps, and writes them into a file; with
--graph, a step is one CUDA graph.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils.flop_counter import FlopCounterMode

import gputrace
from benchmarks.gpt2 import Gpt2

PEAKS: Final = {"H100 PCIe": 756e12, "H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}
"""Dense products in bfloat16, FLOP a second, by data sheets: the first name that fits."""


def main() -> None:
    """Trains, and says what was counted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--profile", metavar="FILE", help="three steps under torch.profiler")
    parser.add_argument("--graph", action="store_true", help="a step as one CUDA graph")
    parser.add_argument("--cpu", action="store_true", help="a tiny model, to try the program")
    options = parser.parse_args()
    device = "cpu" if options.cpu else "cuda"
    torch.manual_seed(0)
    model = Gpt2("tiny" if options.cpu else "gpt2").to(device)
    tokens = torch.randint(0, model.words, (options.batch, model.length), device=device)
    step = _step(model, tokens, device)
    with FlopCounterMode(display=False) as counter:
        step()
    flop = counter.get_total_flops()
    if options.graph:
        step = _captured(step)
    profiler = _profiler(options.profile)
    energy = _energy(device)
    began, before = 0.0, energy()
    for number in range(options.steps):
        if number == options.warmup:
            _wait(device)
            began, before = time.perf_counter(), energy()
        if options.profile and number == options.steps - 3:
            profiler.start()
        step()
        gputrace.step(tokens=tokens.numel(), samples=options.batch, flop=flop)
    _wait(device)
    seconds = time.perf_counter() - began
    result: dict[str, Any] = {"step": seconds / (options.steps - options.warmup)}
    result |= {"tokens_per_s": tokens.numel() / result["step"], "flop_per_s": flop / result["step"]}
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    peak = next((peak for known, peak in PEAKS.items() if known in name), None)
    result["mfu"] = peak and result["flop_per_s"] / peak
    after = energy()
    result["peak_bytes"] = torch.cuda.max_memory_allocated() if device == "cuda" else None
    result["watts"] = None
    if after is not None and before is not None:
        result["watts"] = 1e-3 * (after - before) / seconds
    if options.profile:
        profiler.stop()
        profiler.export_chrome_trace(options.profile)
    print(json.dumps(result))


def _step(model: Any, tokens: Any, device: str) -> Callable[[], None]:
    on_gpu = device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=on_gpu, capturable=on_gpu)
    wanted = tokens.roll(-1, 1).flatten()

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(tokens), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """Return what replays a step as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay  # type: ignore[no-any-return]


def _profiler(wanted: str | None) -> Any:
    return torch.profiler.profile(with_stack=True) if wanted else contextlib.nullcontext()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _energy(device: str) -> Callable[[], int | None]:
    """Return what reads the card's counter of energy in millijoules; None where it has none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return lambda: None
    card, count = ctypes.c_void_p(), ctypes.c_ulonglong()
    identity = str(torch.cuda.get_device_properties(0).uuid) if device == "cuda" else ""
    name = f"GPU-{identity.removeprefix('GPU-')}".encode()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(card)):
        return lambda: None

    def read() -> int | None:
        failed = library.nvmlDeviceGetTotalEnergyConsumption(card, ctypes.byref(count))
        return None if failed else count.value

    return read


if __name__ == "__main__":
    main()
