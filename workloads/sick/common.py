"""Loop, options and changes by hand that the six programs share.

PROGRAM                      train as it is, until it is stopped
PROGRAM --cured [CURES]      train with the changes made by hand
PROGRAM --turns 3 --cured    as it is and changed, in turn, in this process; prints a line of JSON

Under ``torchrun`` the ranks train under DistributedDataParallel, each on a GPU.
"""

import argparse
import gc
import json
import os
import statistics
import time

import torch
from torch import nn

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
RANK = int(os.environ.get("RANK", "0"))
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def synchronize():
    if GPU:
        torch.cuda.synchronize()


def main(build, expected):
    """Train what ``build(cures, tiny)`` returns: model, batches, loss and optimizer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cured", nargs="?", const=expected, default="")
    parser.add_argument("--turns", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10**6)
    parser.add_argument("--warmup", type=int, default=12)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    cured = {}
    for word in filter(None, args.cured.split("+")):
        name, _, value = word.partition("=")
        cured[name] = int(value) if value.isdigit() else value or True
    if RANKS > 1:
        if GPU:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl" if GPU else "gloo")
    if args.turns:
        compare(build, cured, args)
    else:
        train(build, cured, args.tiny, args.steps, args.warmup, True)
    if RANKS > 1:
        torch.distributed.destroy_process_group()


def compare(build, cured, args):
    """Train as it is and changed, in turn, and print what a step takes."""
    pairs = []
    for turn in range(args.turns):
        pair = {}
        for which in ("sick", "cured") if turn % 2 == 0 else ("cured", "sick"):
            cures = dict(cured) if which == "cured" else {}
            pair[which] = train(build, cures, args.tiny, args.steps, args.warmup, False)
            gc.collect()
            if GPU:
                torch.cuda.empty_cache()
        pairs.append(pair)
        if not RANK:
            sick, better = 1e3 * pair["sick"], 1e3 * pair["cured"]
            print(
                f"  by hand {turn + 1}: {sick:.2f} ms as it is, {better:.2f} ms with {args.cured}"
            )
    if not RANK:
        print(json.dumps({"cure": args.cured, "pairs": pairs}))


def train(build, cures, tiny, steps, warmup, talk):
    """Return the mean step after the warm-up, in seconds."""
    model, batches, loss_of, optimizer = prepare(build, cures, tiny, talk)
    pace = Pace(steps, warmup, talk)
    while True:
        for batch in staged(batches) if "staging" in cures else batches:
            batch = [part.to(DEVICE, non_blocking="non-blocking" in cures) for part in batch]
            inputs = batch[0]
            if "channels-last" in cures and inputs.dim() == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled="bf16" in cures):
                output = model(inputs)
            loss = loss_of(output.float() if "bf16" in cures else output, batch)
            loss.backward()
            optimizer.step()
            if pace.over(loss):
                return pace.mean


def prepare(build, cures, tiny, talk):
    """Return the model, batches, loss and optimizer, with all changes that are made once."""
    torch.manual_seed(0)
    if "tf32" in cures or not talk:
        torch.backends.cuda.matmul.allow_tf32 = "tf32" in cures
    if "cudnn-benchmark" in cures or not talk:
        torch.backends.cudnn.benchmark = "cudnn-benchmark" in cures
    model, batches, loss_of, optimizer = build(cures, tiny)
    model.train()
    if "channels-last" in cures:
        model.to(memory_format=torch.channels_last)
    if "graphs" in cures:
        # In its place, and before DistributedDataParallel, whose nodes end a capture.
        torch.cuda.make_graphed_callables(model, (next(iter(batches))[0].to(DEVICE),))
    if RANKS > 1:
        model = nn.parallel.DistributedDataParallel(
            model,
            bucket_cap_mb=cures.get("bucket-cap"),
            gradient_as_bucket_view="bucket-view" in cures,
            static_graph="static-graph" in cures,
        )
    if "compile" in cures:
        torch._dynamo.reset()
        model.compile(mode=None if cures["compile"] is True else cures["compile"])
    return model, batches, loss_of, optimizer


class Pace:
    """Counts steps; prints the median of each 20, and has the mean of all after the warm-up."""

    def __init__(self, steps, warmup, talk):
        self.steps, self.warmup, self.talk = steps, warmup, talk
        self.count, self.laps, self.began, self.lap = 0, [], 0.0, 0.0
        self.mean = None

    def over(self, loss):
        self.count += 1
        past = self.count - self.warmup
        if past == 0:
            synchronize()
            self.began = self.lap = time.perf_counter()
        elif past > 0 and (past % 20 == 0 or past == self.steps):
            synchronize()
            now = time.perf_counter()
            self.laps.append((now - self.lap) / (past % 20 or 20))
            self.lap, self.mean = now, (now - self.began) / past
            if self.talk and not RANK:
                median = 1e3 * statistics.median(self.laps)
                print(f"step {self.count}: {median:.2f} ms, loss {loss.item():.4f}", flush=True)
        return past >= self.steps


def staged(batches):
    """Copy each next batch on a stream of its own while the program trains."""
    if not GPU:
        yield from batches
        return
    stream = torch.cuda.Stream()
    iterator = iter(batches)

    def ahead():
        batch = next(iterator, None)
        if batch is None:
            return None
        with torch.cuda.stream(stream):
            return [part.cuda(non_blocking=True) for part in batch]

    following = ahead()
    while following is not None:
        torch.cuda.current_stream().wait_stream(stream)
        for part in following:
            part.record_stream(torch.cuda.current_stream())
        current, following = following, ahead()
        yield current


class Fixed:
    """Yield one batch again and again, which is on the GPU already."""

    def __init__(self, *parts):
        self.parts = [part.to(DEVICE) for part in parts]

    def __iter__(self):
        for _ in range(1000):
            yield self.parts


class Block(nn.Module):
    """Block of a transformer."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        shape = batch, length, 3, self.heads, width // self.heads
        q, k, v = self.qkv(self.before(x)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))
