# /// script
# requires-python = ">=3.10"
# dependencies = ["torch==2.13.0", "torchvision==0.28.0", "numpy>=2", "pillow>=11"]
# ///
"""Trains a small transformer with PyTorch as large models are trained, on two devices or one.

    python torch_parallel.py --update fsdp2              # parameters sharded layer by layer
    python torch_parallel.py --update pipeline           # two stages, four micro-batches, 1F1B
    python torch_parallel.py --update tensor             # each matrix split between the ranks
    python torch_parallel.py --update accumulate         # DDP, four micro-batches a step
    python torch_parallel.py --update compile --gpus 1   # torch.compile

It starts torchrun itself. With `--device cpu`, ranks of gloo stand in for GPUs. The last line on
stdout is the result, as JSON: the steps that were run, and the groups of ranks with their roles.
"""

import argparse
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

UPDATES = ["fsdp2", "pipeline", "tensor", "accumulate", "compile"]
ROLES = {"fsdp2": "sharded data", "pipeline": "pipeline", "tensor": "tensor", "accumulate": "data"}
MICRO_BATCHES = 4
TOKENS, WIDTH, LAYERS, LENGTH = 96, 64, 4, 32


def main():
    options = parse()
    if options.gpus > 1 and "RANK" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.gpus}"]
        os.execv(sys.executable, [sys.executable, *run, *sys.argv])
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
    torch.manual_seed(0)
    losses, seconds = train(options, device, rank, world)
    groups = [{"role": ROLES[options.update], "ranks": list(range(world))}] if world > 1 else []
    result = {
        "framework": "torch",
        "model": "transformer",
        "version": torch.__version__,
        **{name: getattr(options, name) for name in ("update", "device", "batch", "warmup")},
        "gpus": world,
        "steps": options.steps,
        "groups": groups,
        "tokens_per_step": options.batch * world * LENGTH,
        "samples_per_second": options.batch * world * len(seconds) / max(sum(seconds), 1e-9),
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
    }
    # The last stage of a pipeline alone knows the loss.
    if rank == (world - 1 if options.update == "pipeline" else 0):
        print(json.dumps(result), flush=True)
    if world > 1:
        dist.destroy_process_group()


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--update", choices=UPDATES, default="fsdp2")
    add("--batch", type=int, default=8, help="sequences per device and step")
    add("--steps", type=int, default=20)
    add("--warmup", type=int, default=5, help="steps left out of the figures")
    add("--gpus", type=int, help="devices on this machine; default: 2, and 1 of compile")
    add("--device", choices=["auto", "cuda", "cpu"], default="auto")
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.gpus is None:
        options.gpus = 1 if options.update == "compile" else 2
    if not 0 <= options.warmup < options.steps:
        parser.error("--warmup must be less than --steps")
    if options.update != "compile" and options.gpus < 2:
        parser.error(f"--gpus: {options.update} needs two devices or more")
    if options.batch < 1 or options.batch % MICRO_BATCHES:
        parser.error(f"--batch must be a multiple of {MICRO_BATCHES}")
    return options


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        # The width of a head is fixed; with split matrices, a rank has fewer heads.
        parts = (part(x).unflatten(-1, (-1, 16)) for part in (self.query, self.key, self.value))
        query, key, value = (part.transpose(1, 2) for part in parts)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def build():
    blocks = [Block() for _ in range(LAYERS)]
    return nn.Sequential(nn.Embedding(TOKENS, WIDTH), *blocks, nn.Linear(WIDTH, TOKENS))


def cross_entropy(scores, tokens):
    """Loss of predicting the token at each place from those before it."""
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(options, device, rank, world):
    """Return the losses, and the seconds of the steps after the warm-up."""
    model = build().to(device)
    step = {
        "fsdp2": whole_step,
        "tensor": whole_step,
        "compile": whole_step,
        "accumulate": accumulated_step,
        "pipeline": None,
    }[options.update]
    if options.update == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    elif options.update == "tensor":
        split(model, device, world)
    elif options.update == "accumulate":
        model = nn.parallel.DistributedDataParallel(model)
    elif options.update == "compile":
        model = torch.compile(model, backend="aot_eager" if device.type == "cpu" else "inductor")
    else:
        model, step = staged(model, device, rank, world, options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    # What one model is spread over sees all sequences; each copy of it, its part of them.
    spread = options.update in ("pipeline", "tensor")
    random = torch.Generator().manual_seed(0 if spread else rank)
    sequences = options.batch * (world if spread else 1)
    losses, seconds = [], []
    for number in range(options.steps):
        begin = time.perf_counter()
        first = torch.randint(TOKENS, (sequences, 1), generator=random)
        tokens = (first + torch.arange(LENGTH)) % TOKENS
        loss = step(model, tokens.to(device))
        optimizer.step()
        optimizer.zero_grad()
        losses += [] if loss is None else [float(loss)]
        seconds += [time.perf_counter() - begin] if number >= options.warmup else []
    return losses, seconds


def whole_step(model, tokens):
    loss = cross_entropy(model(tokens), tokens)
    loss.backward()
    return loss.detach()


def accumulated_step(model, tokens):
    parts = tokens.chunk(MICRO_BATCHES)
    for part in parts[:-1]:
        with model.no_sync():
            (cross_entropy(model(part), part) / len(parts)).backward()
    loss = cross_entropy(model(parts[-1]), parts[-1])
    (loss / len(parts)).backward()
    return loss.detach()


def split(model, device, world):
    """Split the matrices of each block by columns, and those after them by rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(device.type, (world,))
    columns = ("attention.query", "attention.key", "attention.value", "up")
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("attention.out", "down")}
    for layer in model:
        if isinstance(layer, Block):
            parallelize_module(layer, mesh, plan)


def staged(model, device, rank, world, options):
    """Return this rank's part of the model, and the function of a step of the pipeline."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    each = -(-len(model) // world)
    part = model[rank * each : (rank + 1) * each]
    stage = PipelineStage(part, rank, world, device)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=cross_entropy)

    def step(_model, tokens):
        losses = []
        inputs = (tokens,) if rank == 0 else ()
        wanted = {"target": tokens, "losses": losses} if rank == world - 1 else {}
        schedule.step(*inputs, **wanted)
        return torch.stack(losses).mean().detach() if losses else None

    return part, step


if __name__ == "__main__":
    main()
