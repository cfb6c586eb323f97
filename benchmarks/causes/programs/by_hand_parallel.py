"""Two GPUs; gradients are averaged by hand after the backward pass. Start it with torchrun."""

import os

import torch
import torch.distributed as dist
from parts import CURED, RANK, Clock, encoder, join, size
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def average_gradients(model, world):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world


def main():
    world = int(os.environ["WORLD_SIZE"])
    dev = join(RANK, world)
    model = encoder(size(1536, 32), size(12, 1), size(16, 4), 8192).to(dev)
    if CURED:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    opt = torch.optim.AdamW(model.parameters(), 1e-4, fused=dev.type == "cuda")
    clock = Clock()
    while not clock.done():
        ids = torch.randint(0, 8192, (size(4, 2), size(513, 17)), device=dev)
        with torch.autocast(dev.type, torch.bfloat16):
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        if not CURED:
            average_gradients(model, world)
        opt.step()
    dist.destroy_process_group()


main()
