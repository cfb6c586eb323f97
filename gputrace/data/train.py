"""A small training that waits for its data: what ``gputrace demo`` records.

It runs PyTorch where that is installed, on a GPU if there is one, and numpy alone where not. In
either, loading a batch takes 20 ms more than it should.
"""

from __future__ import annotations

import os
import time
from typing import Any

STEPS, BATCH, CLASSES = 60, 32, 10
LOADING_S = 0.020
"""Seconds that reading and decoding the images of a batch would take."""


def train_with_torch(torch: Any) -> tuple[float, float]:
    """A convolution net. The first loss and the last.

    Nothing here knows of gputrace, which sees the loader's waits and the optimizer's steps itself.
    """
    from torch.utils.data import DataLoader, Dataset

    class Images(Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return STEPS * BATCH

        def __getitem__(self, index: int) -> tuple[Any, int]:
            time.sleep(LOADING_S / BATCH)
            label = index % CLASSES
            return torch.randn(3, 32, 32) + label / CLASSES, label

    nn = torch.nn
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = [nn.Conv2d(3, 32, 3, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 7 * 7, CLASSES)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for images, labels in DataLoader(Images(), batch_size=BATCH):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return float(losses[0]), float(losses[-1])


def train_with_numpy() -> tuple[float, float]:
    """A net of two layers, which marks its steps and its waits for data. First and last loss."""
    # One thread multiplies matrices this small as fast as many do, and shares the machine better.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    import numpy as np

    import gputrace

    random = np.random.default_rng(0)
    first = random.normal(size=(3072, 512)) / 55
    second = random.normal(size=(512, CLASSES)) / 23
    losses = []

    @gputrace.annotate("data")
    def load() -> Any:
        time.sleep(LOADING_S)
        labels = random.integers(CLASSES, size=BATCH)
        return random.normal(size=(BATCH, 3072)) + labels[:, None] / CLASSES, labels

    for _ in range(STEPS):
        images, labels = load()
        hidden = np.maximum(images @ first, 0)
        scores = hidden @ second
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        losses.append(float(-np.log(chances[range(BATCH), labels]).mean()))
        chances[range(BATCH), labels] -= 1
        to_hidden = (chances @ second.T) * (hidden > 0)
        second -= 0.01 / BATCH * hidden.T @ chances
        first -= 0.01 / BATCH * images.T @ to_hidden
        gputrace.step()
    return losses[0], losses[-1]


def main() -> None:
    """Trains, and says with what."""
    try:
        import torch
    except (ImportError, OSError):
        tool, losses = "numpy (PyTorch is not installed here)", train_with_numpy()
    else:
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
        tool, losses = f"PyTorch {torch.__version__} on {where}", train_with_torch(torch)
    print(f"{STEPS} steps with {tool}: loss {losses[0]:.2f}, then {losses[1]:.2f}")


if __name__ == "__main__":
    main()
