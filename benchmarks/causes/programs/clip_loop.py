"""A masked language model; gradients are clipped by a Python loop that reads each norm."""

import torch
from parts import CURED, Clock, device, size
from torch import nn


class MaskedLM(nn.Module):
    def __init__(self, words, width, depth):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.where = nn.Parameter(torch.zeros(256, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.out = nn.Linear(width, words)

    def forward(self, ids):
        return self.out(self.layers(self.words(ids) + self.where[: ids.shape[1]]))


def clip_gradients(parameters, largest):
    parameters = [p for p in parameters if p.grad is not None]
    total = 0.0
    for p in parameters:
        total += float(p.grad.norm()) ** 2
    total = total**0.5
    if total > largest:
        for p in parameters:
            p.grad.mul_(largest / (total + 1e-6))
    return total


def main():
    dev = device()
    net = MaskedLM(size(8000, 100), size(768, 64), size(12, 2)).to(dev)
    opt = torch.optim.AdamW(net.parameters(), 1e-4)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1, s / 100))
    clock = Clock()
    while True:
        ids = torch.randint(0, size(8000, 100), (size(24, 2), size(192, 16)), device=dev)
        hidden = torch.where(torch.rand(ids.shape, device=dev) < 0.15, 0, ids)
        with torch.autocast(dev.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(net(hidden).flatten(0, 1), ids.flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        if CURED:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        else:
            clip_gradients(net.parameters(), 1.0)
        opt.step()
        sched.step()
        if clock.done():
            break


if __name__ == "__main__":
    main()
