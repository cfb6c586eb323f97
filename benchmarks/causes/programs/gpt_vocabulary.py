"""A small GPT with the usual vocabulary, and a width that somebody liked."""

import torch
from parts import CURED, Clock, device, encoder, size
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS = (50304, 768, 12) if CURED else (50257, 765, 15)

dev = device()
model = encoder(WIDTH, size(6, 1), HEADS, VOCABULARY).to(dev).to(torch.bfloat16)
opt = torch.optim.SGD(model.parameters(), 0.01)
clock = Clock()
while True:
    ids = torch.randint(0, 50257, (size(16, 1), size(513, 9)), device=dev)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if clock.done():
        break
