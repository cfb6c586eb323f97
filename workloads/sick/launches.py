"""Many small kernels: a deep and narrow transformer with small batches."""

import torch
from common import DEVICE, Block, Fixed, main
from torch import nn


def build(cures, tiny):
    with torch.device(DEVICE):
        model = nn.Sequential(*(Block(64, 4) for _ in range(2 if tiny else 24)), nn.Linear(64, 64))
        model.to(DEVICE)
        batches = Fixed(torch.randn(4, 32, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, batches, lambda output, batch: output.square().mean(), optimizer


if __name__ == "__main__":
    main(build, "graphs")
