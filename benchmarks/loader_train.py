"""The training that `benchmarks.loaders` records: convolutions on pictures that workers make.

    python benchmarks/loader_train.py --samples decoding --workers 1,2,4,8

Samples sleep, or are JPEG files in memory that Pillow decodes and resizes, or are both waited for
and decoded, and large. Prints one JSON line: the mean milliseconds of the steady steps with each
number of workers, by the wall clock and without a synchronisation in between.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIZE: Final = 224
PICTURES: Final = 64
PREFETCH: Final = 2
"""Batches that each worker makes ahead."""
ROUNDS: Final = {1: 24, 2: 16, 4: 12, 8: 8}
"""Measured batches of each worker, by their number: they may all come at once, and then none."""


class Compose:
    """Transforms one after the other."""

    def __init__(self, *transforms: Callable[[Any], Any]) -> None:
        self.transforms = list(transforms)

    def __call__(self, sample: Any) -> Any:
        for transform in self.transforms:
            sample = transform(sample)
        return sample


class Pictures(Dataset[Any]):  # type: ignore[misc, unused-ignore]  # torch may be absent
    """So many samples, each made anew from one of a few."""

    def __init__(self, count: int, sources: list[Any], transform: Compose) -> None:
        self.count, self.sources, self.transform = count, sources, transform

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.sources[index % len(self.sources)]), index % 10


class Sleep:
    """Wait, as for a disk."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, sample: Any) -> Any:
        time.sleep(self.seconds)
        return sample


def decode(file: bytes) -> Any:
    """Return the picture that a JPEG file holds."""
    from PIL import Image

    return Image.open(io.BytesIO(file)).convert("RGB")


def resize(picture: Any) -> Any:
    """Return the picture in the size of the network's input."""
    from PIL import Image

    return picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR)


def to_bytes(picture: Any) -> Any:
    """Return a tensor of a picture, a byte for each channel of a pixel."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def to_floats(picture: Any) -> Any:
    """Return a tensor of a picture, of four times the size."""
    return to_bytes(picture).float() / 255


def files() -> list[bytes]:
    """Return JPEG files of 640 by 480 pixels: gradients with noise, always the same."""
    from PIL import Image

    random = np.random.default_rng(0)
    down, right = np.mgrid[0:480, 0:640]
    made = []
    for _ in range(PICTURES):
        slopes = random.uniform(0, 0.3, (2, 3))
        smooth = down[..., None] * slopes[0] + right[..., None] * slopes[1]
        pixels = np.clip(smooth + random.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8)
        kept = io.BytesIO()
        Image.fromarray(pixels).save(kept, "JPEG", quality=90)
        made.append(kept.getvalue())
    return made


def blanks() -> list[Any]:
    """Return a tensor as decoded pictures have it."""
    return [torch.zeros(3, SIZE, SIZE, dtype=torch.uint8)]


SAMPLES: Final[dict[str, tuple[Callable[[], list[Any]], Compose]]] = {
    "sleeping": (blanks, Compose(Sleep(0.002), Sleep(0.001))),
    "decoding": (files, Compose(decode, resize, to_bytes)),
    "mixed": (files, Compose(Sleep(0.002), decode, resize, to_floats)),
}
"""Kinds of samples: what they are made from, and how."""


def main() -> None:
    """Trains with each number of workers, and says how long a step took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", choices=SAMPLES, default="sleeping")
    parser.add_argument("--workers", default="2", metavar="N,…")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--cpu", action="store_true", help="a tiny network and a sleep")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    step = _step("cpu" if options.cpu else "cuda")
    sources, transform = SAMPLES[options.samples]
    made = sources()
    found = {}
    for workers in map(int, options.workers.split(",")):
        steps = workers * ROUNDS.get(workers, 8)
        first = 2 * PREFETCH * workers + 4
        loader = DataLoader(
            Pictures((first + steps) * options.batch, made, transform),
            batch_size=options.batch,
            num_workers=workers,
            pin_memory=not options.cpu,
            prefetch_factor=PREFETCH,
        )
        found[str(workers)] = 1e3 * _train(loader, step, first, options.cpu) / steps
    print(json.dumps({"step_ms": found}), flush=True)


def _step(device: str) -> Callable[[Any, Any], None]:
    """Return a training step of some 10 ms; a sleep stands in for a GPU that is at work."""
    width, layers, every = (4, 1, 8) if device == "cpu" else (256, 24, 1)
    blocks = [
        block for _ in range(layers) for block in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
    ]
    model: Any = nn.Sequential(
        nn.Conv2d(3, width, 4, 4),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    )
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(images: Any, labels: Any) -> None:
        images = images[..., ::every, ::every].to(device, non_blocking=True).float()
        images = images.to(memory_format=torch.channels_last)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.010 * (device == "cpu"))

    return step


def _train(loader: Any, step: Callable[[Any, Any], None], first: int, is_cpu: bool) -> float:
    """Return the seconds that the steps after the first ones took."""
    began, took, last = 0.0, 0.0, len(loader) - 1
    for number, (images, labels) in enumerate(loader):
        if number == first:
            began = _now(is_cpu)
        step(images, labels)
        if number == last:  # Before the workers are ended.
            took = _now(is_cpu) - began
    return took


def _now(is_cpu: bool) -> float:
    if not is_cpu:
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
