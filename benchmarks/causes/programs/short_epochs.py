"""Few pictures, many epochs."""

import torch
from parts import CURED, STEPS, Clock, device, size
from torch import nn
from torch.utils.data import DataLoader, Dataset


class FewShots(Dataset):
    def __init__(self):
        self.index = [
            {"id": i, "tags": [str(i % 7), str(i % 5)]} for i in range(size(300_000, 300))
        ]

    def __len__(self):
        return size(512, 32)

    def __getitem__(self, i):
        row = self.index[i]
        picture = torch.rand(3, size(96, 16), size(96, 16))
        return (picture - 0.5) / 0.25, row["id"] % 10


def network(w):
    return nn.Sequential(
        nn.Conv2d(3, w, 3, 2, 1), nn.ReLU(), nn.Conv2d(w, 2 * w, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(2 * w, 4 * w, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * w, 10),
    )  # fmt: skip


def main():
    dev = device()
    loader = DataLoader(
        FewShots(), batch_size=size(64, 4), shuffle=True, num_workers=size(8, 2), drop_last=True,
        pin_memory=dev.type == "cuda", persistent_workers=CURED,
    )  # fmt: skip
    net = network(size(64, 4)).to(dev)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    clock = Clock()
    for _epoch in range(STEPS):
        for pictures, labels in loader:
            pictures, labels = (
                pictures.to(dev, non_blocking=True),
                labels.to(dev, non_blocking=True),
            )
            loss = nn.functional.cross_entropy(net(pictures), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if clock.done():
                return


if __name__ == "__main__":
    main()
