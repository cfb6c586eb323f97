"""Batches of 100 MB from pageable memory, each of which the program waits for."""

import shutil

import torch
from common import DEVICE, Block, main
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Batches(Dataset):
    """Whole batches that are in memory."""

    def __init__(self, tiny):
        shape = (4, 3, 64, 64) if tiny else (128, 3, 256, 256)
        self.images = [torch.randn(shape) for _ in range(4)]
        self.labels = torch.arange(shape[0]) % 10

    def __len__(self):
        return 2000

    def __getitem__(self, index):
        return self.images[index % 4], self.labels


class Patches(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.Sequential(*(Block(width, 8) for _ in range(layers)))
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        tokens = self.patches(images.to(self.patches.weight.dtype)).flatten(2).transpose(1, 2)
        return self.head(self.blocks(tokens).mean(1))


def build(cures, tiny):
    model = (Patches(32, 2) if tiny else Patches(512, 6).bfloat16()).to(DEVICE)
    roomy = shutil.disk_usage("/dev/shm").free > 8e9
    loader = DataLoader(
        Batches(tiny),
        batch_size=None,
        num_workers=cures.get("workers", 4 if roomy or tiny else 0),
        pin_memory="pinned" in cures,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss = nn.functional.cross_entropy
    return model, loader, lambda output, batch: loss(output.float(), batch[1]), optimizer


if __name__ == "__main__":
    main(build, "pinned")
