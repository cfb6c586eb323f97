"""Two GPUs under FSDP; every single layer is sharded by itself. Start it with torchrun."""

import os

import torch
import torch.distributed as dist
from parts import CURED, RANK, Clock, encoder, join, size
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F


def shard(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    leaves = (nn.Linear, nn.LayerNorm)
    units = model.blocks if CURED else [m for m in model.blocks.modules() if isinstance(m, leaves)]
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def main():
    world = int(os.environ["WORLD_SIZE"])
    dev = join(RANK, world)
    model = encoder(size(768, 32), size(16, 1), size(12, 4), 8192).to(dev)
    shard(model, init_device_mesh(dev.type, (world,)))
    opt = torch.optim.AdamW(model.parameters(), 3e-4)
    clock = Clock()
    while not clock.done():
        ids = torch.randint(0, 8192, (size(8, 2), size(513, 17)), device=dev)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.destroy_process_group()


main()
