"""AdamW that updates 320 parameters one by one."""

import torch
from common import DEVICE, Fixed, main
from torch import nn


class Layer(nn.Module):
    """Residual layer whose weight is in parts of a few rows each."""

    def __init__(self, width, parts):
        super().__init__()
        self.rows = nn.ParameterList(
            torch.randn(width // parts, width) / width**0.5 for _ in range(parts)
        )

    def forward(self, x):
        weight = torch.cat([*self.rows])
        x_normal = nn.functional.layer_norm(x, x.shape[-1:])
        return x + nn.functional.gelu(nn.functional.linear(x_normal, weight))


def build(cures, tiny):
    with torch.device(DEVICE):
        width, layers, parts, batch = (32, 2, 4, 8) if tiny else (512, 40, 8, 4096)
        model = nn.Sequential(*(Layer(width, parts) for _ in range(layers)))
        dtype = torch.float32 if tiny else torch.bfloat16
        model.to(DEVICE, dtype)
        batches = Fixed(torch.randn(batch, width, dtype=dtype))
    if "fused" in cures:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach="foreach" in cures)
    return model, batches, lambda output, batch: output.float().square().mean(), optimizer


if __name__ == "__main__":
    main(build, "fused")
