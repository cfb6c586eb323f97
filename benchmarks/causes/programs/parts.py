"""Parts that the programs share: the switch, the clock of the steps, and a small transformer.

CURED=1 trains without the fault; STEPS and WARM count steps; TINY=1 is for machines without a GPU.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

CURED = os.environ.get("CURED", "") not in ("", "0")
TINY = bool(os.environ.get("TINY"))
STEPS = int(os.environ.get("STEPS", "60"))
WARM = int(os.environ.get("WARM", "15"))
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def size(usual, tiny):
    """Return the first of two sizes, or the second one where there is no GPU."""
    return tiny if TINY else usual


class Clock:
    """Counts steps; prints their times as a line of JSON once STEPS are done."""

    def __init__(self, rank=RANK):
        self.rank, self.laps, self.last, self.began = rank, [], None, 0.0

    def done(self):
        """Call this at the end of each step; true when it was the last one."""
        if len(self.laps) + 1 in (WARM, STEPS):
            synchronize()
        now = time.perf_counter()
        self.laps.append(now - (self.last or now))
        self.last = now
        if len(self.laps) == WARM:
            self.began = now
        if len(self.laps) < STEPS:
            return False
        leave()
        if self.rank == 0:
            after = sorted(self.laps[WARM:])
            figures = {
                "program": Path(sys.argv[0]).stem,
                "cured": CURED,
                "seed": SEED,
                "steps": STEPS,
                "median_ms": round(1e3 * after[len(after) // 2], 3),
                "mean_ms": round(1e3 * (now - self.began) / (STEPS - WARM), 3),
            }
            print(json.dumps(figures), flush=True)
        return True


def synchronize():
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


SEED = int(os.environ.get("SEED") or random.SystemRandom().randrange(2**31))
random.seed(SEED)


held = []


def turn(rank=0):
    """Wait until no other program holds a file of CAUSES_LOCK: start-ups overlap, training does not.

    The files are those of the GPUs that the program trains on. Its other ranks wait for rank 0.
    """
    if rank:
        return
    import fcntl

    for path in filter(None, os.environ.get("CAUSES_LOCK", "").split(os.pathsep)):
        held.append(open(path, "w"))
        fcntl.flock(held[-1], fcntl.LOCK_EX)


def leave():
    """Let the next program train."""
    import fcntl

    # A worker that was forked has the file open as well.
    for file in held:
        fcntl.flock(file, fcntl.LOCK_UN)


def device(rank=0):
    """Return the GPU of a rank, or the CPU; seeds PyTorch."""
    import torch

    torch.manual_seed(SEED)
    if not torch.cuda.is_available():
        turn(rank)
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    # The driver's start takes as long as some trainings.
    torch.cuda.synchronize()
    turn(rank)
    return torch.device("cuda", rank)


def join(rank=RANK, world=WORLD):
    """Join the process group of the ranks on this machine; gives back the rank's device."""
    import torch.distributed as dist

    where = device(rank)
    if where.type == "cuda":
        dist.init_process_group("nccl", rank=rank, world_size=world, device_id=where)
    else:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    return where


def encoder(width, layers, heads, vocabulary, positions=2048):
    """Return a transformer from token numbers to logits of the vocabulary."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            b, t, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, heads, -1).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(b, t, width))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, width)
            self.places = nn.Embedding(positions, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

        def forward(self, ids):
            x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return Encoder()
