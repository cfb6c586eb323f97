"""The training that `benchmarks.overhead` records: ResNet on synthetic images.

    torchrun --nproc-per-node 2 benchmarks/overhead_train.py --model resnet18 --batch 8

Prints one JSON line on rank 0: the mean and median time of the steady steps in milliseconds, and
the most memory that the process had resident.
cuDNN's search is off and seeds are fixed, so that every run does the same.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from typing import Any


def main() -> None:
    """Trains, and says how long a step took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--wait-ms", type=float, default=0.0, help="the loader takes so long")
    parser.add_argument("--data-parallel", action="store_true", help="one process, all GPUs")
    parser.add_argument("--profiler", action="store_true", help="under torch.profiler, CUDA only")
    options = parser.parse_args()
    times = _train(options)[options.warmup :]
    if int(os.environ.get("RANK", "0")) == 0:
        mean, median = statistics.mean(times), statistics.median(times)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        measured = {"mean_ms": 1e3 * mean, "median_ms": 1e3 * median, "peak_mib": peak}
        print(json.dumps(measured | {"steps": len(times)}))


def _train(options: argparse.Namespace) -> list[float]:
    import torch
    import torchvision

    rank, world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    torch.cuda.set_device(rank)
    torch.backends.cudnn.benchmark = False
    model: Any = getattr(torchvision.models, options.model)().cuda()
    model = model.to(memory_format=torch.channels_last)
    if world > 1:
        torch.distributed.init_process_group("nccl")
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    if options.data_parallel:
        model = torch.nn.DataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(options.batch, 3, 224, 224).pin_memory()
    labels = torch.randint(0, 1000, (options.batch,)).pin_memory()
    profiler = None
    if options.profiler:
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        profiler.start()
    times = []
    for _ in range(options.steps):
        began = time.perf_counter()
        time.sleep(options.wait_ms / 1e3)
        x = images.cuda(non_blocking=True).to(memory_format=torch.channels_last)
        y = labels.cuda(non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    if profiler is not None:
        profiler.stop()
    if world > 1:
        torch.distributed.destroy_process_group()
    return times


if __name__ == "__main__":
    main()
