"""AdamW that updates 290 parameters one by one."""

import torch
from common import DEVICE, Block, Fixed, main
from torch import nn


def build(cures, tiny):
    with torch.device(DEVICE):
        width, layers, batch, length = (32, 2, 2, 8) if tiny else (256, 24, 64, 256)
        model = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        dtype = torch.float32 if tiny else torch.bfloat16
        model.to(DEVICE, dtype)
        batches = Fixed(torch.randn(batch, length, width, dtype=dtype))
    if "fused" in cures:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach="foreach" in cures)
    return model, batches, lambda output, batch: output.float().square().mean(), optimizer


if __name__ == "__main__":
    main(build, "fused")
