"""Large matrix products in FP32, without TF32."""

import torch
from common import DEVICE, Fixed, main
from torch import nn


def build(cures, tiny):
    with torch.device(DEVICE):
        width, layers, batch = (64, 2, 16) if tiny else (4096, 3, 4096)
        parts = []
        for _ in range(layers):
            parts += [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Dropout(0.1)]
            parts += [nn.SiLU(), nn.LayerNorm(width)]
        model = nn.Sequential(*parts)
        model.to(DEVICE)
        batches = Fixed(torch.randn(batch, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return model, batches, lambda output, batch: output.square().mean(), optimizer


if __name__ == "__main__":
    main(build, "tf32")
