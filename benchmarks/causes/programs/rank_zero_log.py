"""Two GPUs by mp.spawn; rank 0 writes samples to a web page while the other one waits."""

import html
import os
import random
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from parts import CURED, Clock, encoder, join, size
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class SamplePage:
    def __init__(self):
        self.path = Path(tempfile.mkdtemp()) / "samples.html"
        words = random.Random(3)
        self.names = ["".join(words.choices("abcdefghij", k=6)) for _ in range(8192)]

    def write(self, ids):
        rows = []
        for text in ids:
            cells = (f"<td title='{i}'>{html.escape(self.names[i])}</td>" for i in text)
            rows.append(f"<tr>{''.join(cells)}</tr>")
        self.path.write_text(f"<table>{''.join(rows)}</table>")


def worker(rank, world):
    dev = join(rank, world)
    model = DistributedDataParallel(encoder(size(768, 32), size(12, 1), size(12, 4), 8192).to(dev))
    opt = torch.optim.AdamW(model.parameters(), 3e-4, fused=dev.type == "cuda")
    page, clock = SamplePage(), Clock(rank)
    generator = torch.Generator().manual_seed(rank)
    while True:
        texts = torch.randint(0, 8192, (size(16, 2), size(513, 17)), generator=generator)
        ids = texts.to(dev)
        with torch.autocast(dev.type, torch.bfloat16):
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and not CURED:
            page.write(texts.repeat(12, 1).tolist())
        if clock.done():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
    mp.spawn(worker, args=(2,), nprocs=2)
