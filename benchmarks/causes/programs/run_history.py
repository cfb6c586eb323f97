"""Keep the history of a run in a file that anyone can read at any time."""

import json
import math
import random
import tempfile
from pathlib import Path

import torch
from parts import CURED, Clock, device, encoder, size
from torch.nn import functional as F


class History:
    def __init__(self, path, earlier):
        self.path, self.fresh = path, []
        # The run was resumed, and has the history of its earlier parts.
        self.rows = [
            {"step": i, "loss": random.random(), "lr": 3e-4, "grad_norm": 1.0}
            for i in range(earlier)
        ]

    def log(self, **row):
        self.rows.append(row)
        self.fresh.append(row)
        if not CURED:
            self.path.write_text(json.dumps(self.rows, indent=1))
        elif len(self.fresh) >= 20:
            with self.path.open("a") as file:
                file.writelines(json.dumps(one) + "\n" for one in self.fresh)
            self.fresh.clear()


def main():
    dev = device()
    history = History(Path(tempfile.mkdtemp()) / "history.json", size(6000, 100))
    model = encoder(size(768, 32), size(6, 1), size(12, 4), 4096).to(dev)
    opt = torch.optim.AdamW(model.parameters(), 3e-4, fused=dev.type == "cuda")
    clock, step = Clock(), 0
    while True:
        ids = torch.randint(0, 4096, (size(16, 2), size(257, 17)), device=dev)
        with torch.autocast(dev.type, torch.bfloat16):
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        lr = 3e-4 * (1 + math.cos(step / 100)) / 2
        history.log(step=step, lr=lr, batch=list(ids.shape))
        if clock.done():
            break


main()
