"""Two GPUs; predictions of all ranks are gathered as objects in each step. Start it with torchrun."""

import os

import torch
import torch.distributed as dist
from parts import CURED, RANK, Clock, join, size
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Metric:
    """Accuracy over all ranks."""

    def __init__(self, world):
        self.world, self.right, self.seen = world, 0, 0

    def update(self, logits, labels):
        mine = {"logits": logits.float().cpu().numpy(), "labels": labels.cpu().tolist()}
        theirs = [None] * self.world
        dist.all_gather_object(theirs, mine)
        for one in theirs:
            self.right += int((one["logits"].argmax(-1) == one["labels"]).sum())
            self.seen += len(one["labels"])


class LocalMetric(Metric):
    """Metrics that are gathered as two numbers at the end of an epoch."""

    def update(self, logits, labels):
        self.right = self.right + (logits.argmax(-1) == labels).sum()
        self.seen += len(labels)


class Task:
    def __init__(self):
        self.world = int(os.environ["WORLD_SIZE"])
        self.dev = join(RANK, self.world)
        w = size(2048, 16)
        net = nn.Sequential(
            nn.Linear(512, w),
            nn.GELU(),
            *(nn.Sequential(nn.Linear(w, w), nn.GELU()) for _ in range(8)),
            nn.Linear(w, 1000),
        )
        self.net = DistributedDataParallel(net.to(self.dev))
        self.opt = torch.optim.AdamW(self.net.parameters(), 1e-4, fused=self.dev.type == "cuda")
        self.metric = (LocalMetric if CURED else Metric)(self.world)

    def step(self):
        n = size(4096, 16)
        x, y = torch.randn(n, 512, device=self.dev), torch.randint(0, 1000, (n,), device=self.dev)
        with torch.autocast(self.dev.type, torch.bfloat16):
            logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.metric.update(logits.detach(), y)


if __name__ == "__main__":
    task, clock = Task(), Clock()
    while not clock.done():
        task.step()
    dist.destroy_process_group()
