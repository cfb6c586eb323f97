"""A loader of two workers whose samples take 3.5 ms of a core each."""

import time

import torch
from common import DEVICE, Block, main
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Texts(Dataset):
    def __init__(self, length, seconds):
        self.length, self.seconds = length, seconds

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass
        return torch.randint(0, 1000, (self.length,)), index % 10


class Model(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.blocks = nn.Sequential(*(Block(width, 8) for _ in range(layers)))
        self.head = nn.Linear(width, 10)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)).mean(1))


def build(cures, tiny):
    model = (Model(32, 2) if tiny else Model(1024, 8).bfloat16()).to(DEVICE)
    more = {"prefetch_factor": cures["prefetch"]} if "prefetch" in cures else {}
    loader = DataLoader(
        Texts(8 if tiny else 512, 0.0035),
        batch_size=16,
        num_workers=cures.get("workers", 2),
        persistent_workers="persistent" in cures,
        pin_memory="pinned" in cures,
        **more,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss = nn.functional.cross_entropy
    return model, loader, lambda output, batch: loss(output.float(), batch[1]), optimizer


if __name__ == "__main__":
    main(build, "workers=8")
