"""Images are augmented by numpy in the main process: the loader has no workers."""

import numpy as np
import torch
from parts import CURED, Clock, device, size
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self):
        self.raw = np.random.default_rng(0).integers(0, 255, (256, 192, 192, 3), dtype=np.uint8)

    def __len__(self):
        return 1 << 16

    def __getitem__(self, i):
        rng = np.random.default_rng(i)
        top, left = rng.integers(0, 32, 2)
        x = self.raw[i % 256, top : top + 160, left : left + 160].astype(np.float32) / 255
        if rng.random() < 0.5:
            x = x[:, ::-1]
        x = np.clip(
            (x - x.mean()) * rng.uniform(0.6, 1.4) + x.mean() + rng.uniform(-0.2, 0.2), 0, 1
        )
        x = x + rng.normal(0, 0.02, x.shape).astype(np.float32)
        a, b = rng.integers(0, 120, 2)
        x[a : a + 40, b : b + 40] = 0
        return torch.from_numpy(
            np.ascontiguousarray(x.transpose(2, 0, 1), dtype=np.float32)
        ), i % 200


class Residual(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.f = nn.Sequential(
            nn.Conv2d(c, c, 3, 1, 1, bias=False),
            nn.BatchNorm2d(c),
            nn.ReLU(),
            nn.Conv2d(c, c, 3, 1, 1, bias=False),
            nn.BatchNorm2d(c),
        )

    def forward(self, x):
        return torch.relu(x + self.f(x))


def main():
    dev = device()
    c = size(128, 8)
    net = nn.Sequential(
        nn.Conv2d(3, c, 7, 4, 3),
        Residual(c),
        Residual(c),
        nn.Conv2d(c, 2 * c, 3, 2, 1),
        Residual(2 * c),
        Residual(2 * c),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * c, 200),
    ).to(dev)
    opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, nesterov=True)
    how = {"num_workers": size(12, 1), "persistent_workers": True} if CURED else {}
    clock = Clock()
    for x, y in DataLoader(
        Pictures(), size(48, 4), shuffle=True, pin_memory=dev.type == "cuda", **how
    ):
        x, y = x.to(dev, non_blocking=True), y.to(dev, non_blocking=True)
        with torch.autocast(dev.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(net(x), y, label_smoothing=0.1)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if clock.done():
            break


if __name__ == "__main__":
    main()
