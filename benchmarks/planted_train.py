"""Training with a fault planted, or its cure: what the diagnosis and its predictions are tried on.

    torchrun --nproc-per-node 4 benchmarks/planted_train.py --slow-rank 2

ResNet on synthetic pictures that a DataLoader makes. Prints one JSON line on rank 0: the mean time
of the steady steps in milliseconds, by the wall clock and without a synchronisation in between.
cuDNN's search is off and seeds are fixed, so that every run does the same.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

RANK, WORLD = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Batches(Dataset[Any]):  # type: ignore[misc, unused-ignore]  # torch may be absent
    """Batches of random pictures, each made in a given time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.count: int = options.steps
        self.wait = options.wait_ms / 1e3
        kind = torch.float32 if options.float_input else torch.uint8
        self.images = torch.zeros(options.batch, 3, 224, 224, dtype=kind)
        self.labels = torch.randint(0, 1000, (options.batch,))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        time.sleep(self.wait)
        return self.images, self.labels


def main() -> None:
    """Trains, and says how long a step took."""
    options = _options()
    torch.manual_seed(0)
    torch.cuda.set_device(RANK)
    if WORLD > 1:
        torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", RANK))
    times = _train(options, _step(options))
    if RANK == 0:
        print(json.dumps({"mean_ms": 1e3 * times / (options.steps - options.warmup)}), flush=True)
    if WORLD > 1:
        torch.distributed.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--warmup", type=int, default=12)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--wait-ms", type=float, default=0.0, help="a batch is made in so long")
    parser.add_argument("--float-input", action="store_true", help="four times the bytes to copy")
    parser.add_argument("--pageable", action="store_true", help="the batches are not pinned")
    parser.add_argument("--slow-rank", type=int, default=-1, help="does more work on its GPU")
    parser.add_argument("--extra-products", type=int, default=24)
    parser.add_argument("--late-rank", type=int, default=-1, help="its host comes late")
    parser.add_argument("--late-ms", type=float, default=12.0)
    parser.add_argument("--late-steps", default="0:1000000", help="the steps that are late, A:B")
    parser.add_argument("--validate-every", type=int, default=0, help="on rank 0 alone")
    parser.add_argument("--data-parallel", action="store_true", help="one process, all GPUs")
    parser.add_argument("--items", type=int, default=0, help="norms of gradients read a step")
    parser.add_argument("--graphs", action="store_true", help="launched as CUDA graphs")
    parser.add_argument("--whole-graph", action="store_true", help="a step is one CUDA graph")
    return parser.parse_args()


def _step(options: argparse.Namespace) -> Callable[[Any, Any, bool], None]:
    """One training step, or with ``False`` a validation batch."""
    model: Any = getattr(torchvision.models, options.model)().cuda()
    model = model.to(memory_format=torch.channels_last)
    if options.graphs:
        sample = torch.zeros(options.batch, 3, 224, 224, device="cuda")
        sample = sample.to(memory_format=torch.channels_last)
        model = torch.cuda.make_graphed_callables(model, (sample,))
    local = model
    if WORLD > 1:
        with torch.cuda.stream(torch.cuda.Stream()):  # Else it cannot be captured.
            model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[RANK])
    if options.data_parallel:
        model = torch.nn.DataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    parameters = list(model.parameters())

    def step(images: Any, labels: Any, training: bool) -> None:
        images = images.cuda(non_blocking=True).float().to(memory_format=torch.channels_last)
        labels = labels.cuda(non_blocking=True)
        if not training:
            with torch.no_grad():
                local(images)
            return
        mixed = torch.autocast(
            "cuda", torch.bfloat16, not options.graphs, cache_enabled=not options.whole_graph
        )
        with mixed:
            loss = cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=not (options.graphs or options.whole_graph))
        loss.backward()
        for parameter in parameters[: options.items]:
            parameter.grad.norm().item()
        optimizer.step()

    return _captured(options, step) if options.whole_graph else step


def _captured(
    options: argparse.Namespace, step: Callable[[Any, Any, bool], None]
) -> Callable[[Any, Any, bool], None]:
    """The step as one CUDA graph; DistributedDataParallel wants eleven steps before."""
    images = torch.zeros(options.batch, 3, 224, 224, dtype=torch.uint8, device="cuda")
    labels = torch.zeros(options.batch, dtype=torch.int64, device="cuda")
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(11):
            step(images, labels, True)
    torch.cuda.current_stream().wait_stream(beside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(images, labels, True)

    def replay(new_images: Any, new_labels: Any, training: bool) -> None:
        images.copy_(new_images, non_blocking=True)
        labels.copy_(new_labels, non_blocking=True)
        graph.replay()

    return replay


def _train(options: argparse.Namespace, step: Callable[[Any, Any, bool], None]) -> float:
    """Seconds that the steps after the first ones took."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    first, end = map(int, options.late_steps.split(":"))
    loader = DataLoader(
        Batches(options),
        batch_size=None,
        num_workers=options.workers,
        pin_memory=not options.pageable,
    )
    began = 0.0
    for number, (images, labels) in enumerate(loader):
        if number == options.warmup:
            torch.cuda.synchronize()
            began = time.perf_counter()
        if options.late_rank == RANK and first <= number < end:
            time.sleep(options.late_ms / 1e3)
        for _ in range(options.extra_products * (options.slow_rank == RANK)):
            a @ a
        step(images, labels, True)
        if options.validate_every and number % options.validate_every == 11 and RANK == 0:
            for _ in range(12):
                step(images, labels, False)
    torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
