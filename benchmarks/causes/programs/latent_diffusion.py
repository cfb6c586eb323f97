"""Denoise latents; the noise comes from a generator of the CPU, to be the same on every card."""

import math

import torch
from parts import CURED, SEED, Clock, device, size
from torch import nn
from torch.nn import functional as F


def times(t, width):
    rates = torch.exp(-math.log(1e4) * torch.arange(width // 2, device=t.device) / (width // 2))
    angles = t[:, None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


class Residual(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.a, self.b = nn.Conv2d(w, w, 3, 1, 1), nn.Conv2d(w, w, 3, 1, 1)
        self.time = nn.Linear(128, w)
        self.na, self.nb = nn.GroupNorm(8, w), nn.GroupNorm(8, w)

    def forward(self, x, t):
        h = self.a(F.silu(self.na(x))) + self.time(t)[:, :, None, None]
        return x + self.b(F.silu(self.nb(h)))


class Denoiser(nn.Module):
    def __init__(self, w, depth):
        super().__init__()
        self.first, self.last = nn.Conv2d(4, w, 8, 8), nn.ConvTranspose2d(w, 4, 8, 8)
        self.blocks = nn.ModuleList(Residual(w) for _ in range(depth))

    def forward(self, x, t):
        x, t = self.first(x), times(t, 128)
        for block in self.blocks:
            x = block(x, t)
        return self.last(x)


class Diffusion:
    def __init__(self, dev, steps=1000):
        self.dev, self.steps = dev, steps
        self.kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), 0).to(dev)
        self.generator = torch.Generator(dev if CURED else "cpu").manual_seed(SEED)

    def noise_like(self, latents):
        where = self.generator.device
        return torch.randn(latents.shape, generator=self.generator, device=where).to(self.dev)

    def loss(self, model, latents):
        noise = self.noise_like(latents)
        t = torch.randint(0, self.steps, (len(latents),), device=self.dev)
        kept = self.kept[t].view(-1, 1, 1, 1)
        noisy = kept.sqrt() * latents + (1 - kept).sqrt() * noise
        return F.mse_loss(model(noisy, t).float(), noise)


def main():
    dev = device()
    diffusion = Diffusion(dev)
    model = Denoiser(size(256, 8), size(6, 1)).to(dev, memory_format=torch.channels_last)
    ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=dev.type == "cuda")
    latents = torch.randn(size(64, 2), 4, size(256, 16), size(256, 16), device=dev)
    clock = Clock()
    while not clock.done():
        with torch.autocast(dev.type, torch.bfloat16):
            loss = diffusion.loss(model, latents)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update_parameters(model)


main()
