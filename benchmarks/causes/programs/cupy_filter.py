"""Radar pictures are filtered with CuPy and learned with PyTorch, by way of numpy."""

import torch
from parts import CURED, Clock, device, size
from torch import nn

try:
    import cupy as xp
except ImportError:
    import numpy as xp


def smooth(spectrum, cut):
    """Low-pass filter of complex pictures, in the frequency domain."""
    side = spectrum.shape[-1]
    f = xp.fft.fftfreq(side).astype("float32")
    keep = xp.exp(-((f[:, None] ** 2 + f[None, :] ** 2) / cut**2))
    return xp.abs(xp.fft.ifft2(xp.fft.fft2(spectrum) * keep)).astype("float32")


def to_torch(array, dev):
    if CURED:
        return torch.from_dlpack(array)
    host = array.get() if hasattr(array, "get") else array
    return torch.from_numpy(host).to(dev)


class Despeckle(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, w, 5, 2, 2), nn.ReLU(), nn.Conv2d(w, w, 3, 1, 1), nn.ReLU(),
            nn.Conv2d(w, w, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(w, 1, 2, 2),
        )  # fmt: skip

    def forward(self, x):
        return x - self.net(x)


def main():
    dev = device()
    n, side = size(64, 2), size(512, 16)
    shape = (n, side, side)
    clean = xp.random.standard_normal(shape).astype("float32")
    model = Despeckle(size(64, 4)).to(dev, memory_format=torch.channels_last)
    opt = torch.optim.RMSprop(model.parameters(), 1e-4)
    clock = Clock()
    while not clock.done():
        phase = xp.random.standard_normal(shape).astype("float32")
        noisy = to_torch(smooth(clean + 1j * phase, 0.3), dev)[:, None]
        target = to_torch(smooth(clean, 0.1), dev)[:, None]
        with torch.autocast(dev.type, torch.bfloat16):
            out = model(noisy)
        loss = nn.functional.l1_loss(out.float(), target)
        opt.zero_grad()
        loss.backward()
        opt.step()


main()
