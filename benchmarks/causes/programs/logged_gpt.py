"""Healthy: a GPT that fills the card; it logs its loss and the norm of gradients in each step."""

import torch
from parts import Clock, device, encoder, size
from torch.nn import functional as F


class Meter:
    def __init__(self):
        self.rows = []

    def add(self, **values):
        self.rows.append({name: float(value) for name, value in values.items()})


def main():
    dev = device()
    model = encoder(size(1536, 32), size(12, 2), size(12, 2), 32768).to(dev)
    opt = torch.optim.AdamW(model.parameters(), 3e-4, fused=dev.type == "cuda")
    plan = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 1000)
    meter, clock = Meter(), Clock()
    while True:
        ids = torch.randint(0, 32768, (size(16, 2), size(1025, 17)), device=dev)
        with torch.autocast(dev.type, torch.bfloat16):
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        plan.step()
        meter.add(loss=loss.item(), norm=norm, rate=plan.get_last_lr()[0])
        if clock.done():
            break


main()
