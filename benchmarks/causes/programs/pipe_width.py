"""Two stages of a pipeline; the first has wider layers than the second."""

import torch
import torch.distributed as dist
from parts import CURED, RANK, Clock, join, size
from torch import nn

D, PARTS = size(2048, 16), 6


def send(t, to):
    return dist.P2POp(dist.isend, t, to)


def get(t, of):
    return dist.P2POp(dist.irecv, t, of)


def do(op):
    for w in dist.batch_isend_irecv([op]):
        w.wait()


def layer(hidden):
    return nn.Sequential(nn.LayerNorm(D), nn.Linear(D, hidden), nn.GELU(), nn.Linear(hidden, D))


def main():
    dev = join()
    hidden = size(6144, 32) if CURED else (size(9216, 48), size(3072, 16))[RANK]
    kind = torch.bfloat16 if dev.type == "cuda" else torch.float32
    net = nn.Sequential(*[layer(hidden) for _ in range(4)]).to(dev, kind)
    opt = torch.optim.SGD(net.parameters(), 1e-3)
    clock, rows = Clock(), size(2048, 4)
    while True:
        given, made = [], []
        for _ in range(PARTS):
            if RANK == 0:
                x = torch.randn(rows, D, device=dev, dtype=kind)
                y = net(x)
                do(send(y.detach(), 1))
            else:
                x = torch.empty(rows, D, device=dev, dtype=kind)
                do(get(x, 0))
                x.requires_grad_()
                y = net(x)
            given.append(x)
            made.append(y)
        for x, y in zip(given, made):
            if RANK == 1:
                y.float().square().mean().backward()
                do(send(x.grad, 0))
            else:
                g = torch.empty_like(y)
                do(get(g, 1))
                y.backward(g)
        opt.step()
        opt.zero_grad()
        if clock.done():
            break
    dist.destroy_process_group()


main()
