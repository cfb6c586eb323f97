"""Classify reviews of very different lengths."""

import random

import torch
from parts import CURED, Clock, device, encoder, size
from torch.nn import functional as F

LONGEST = size(1024, 64)


def reviews():
    while True:
        yield [
            random.randint(1, 999)
            for _ in range(min(LONGEST, int(random.expovariate(8 / LONGEST)) + 8))
        ]


def batches(source, n):
    while True:
        texts = [next(source) for _ in range(n)]
        width = max(map(len, texts)) if CURED else LONGEST
        if CURED:
            width = min(LONGEST, -(-width // 64) * 64)
        ids = torch.zeros(n, width, dtype=torch.long)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
        yield ids


def main():
    dev = device()
    model = encoder(size(1024, 32), size(8, 1), size(16, 4), 1000).to(dev)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=dev.type == "cuda")
    clock = Clock()
    for ids in batches(reviews(), size(16, 4)):
        ids = ids.to(dev)
        keep = ids != 0
        with torch.autocast(dev.type, torch.bfloat16):
            logits = model(ids)[..., :2]
        pooled = (logits.float() * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)
        loss = F.cross_entropy(pooled, ids[:, 0] % 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if clock.done():
            break


main()
