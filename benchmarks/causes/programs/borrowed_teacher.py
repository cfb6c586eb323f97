"""Distillation: the teacher visits the GPU for each batch, since memory was once short."""

from contextlib import contextmanager

import torch
from parts import CURED, Clock, device, encoder, size
from torch.nn import functional as F

WORDS = size(8192, 64)


@contextmanager
def on_device(model, dev):
    model.to(dev)
    yield model
    if not CURED:
        model.to("cpu")


class Distiller:
    def __init__(self):
        self.dev = device()
        self.teacher = encoder(size(1024, 32), size(6, 2), size(16, 2), WORDS).bfloat16().eval()
        self.student = encoder(size(512, 16), size(4, 1), size(8, 2), WORDS).to(self.dev)
        self.optimizer = torch.optim.AdamW(
            self.student.parameters(), 1e-4, fused=self.dev.type == "cuda"
        )

    def soft_targets(self, ids):
        with torch.no_grad(), on_device(self.teacher, self.dev) as teacher:
            return F.softmax(teacher(ids) / 2.0, -1)

    def step(self, ids):
        targets = self.soft_targets(ids)
        with torch.autocast(self.dev.type, torch.bfloat16):
            logits = self.student(ids)
        loss = F.kl_div(F.log_softmax(logits / 2.0, -1), targets.float(), reduction="batchmean")
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def main():
    distiller, clock = Distiller(), Clock()
    while not clock.done():
        ids = torch.randint(0, WORDS, (size(16, 2), size(256, 16)), device=distiller.dev)
        distiller.step(ids)


main()
