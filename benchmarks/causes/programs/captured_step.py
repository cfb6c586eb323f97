"""Healthy: small networks in large batches; the whole step is one CUDA graph."""

import torch
from parts import Clock, device, size
from torch import nn


def step(net, opt, x, y):
    opt.zero_grad(set_to_none=True)
    with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
        loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    opt.step()
    return loss


def captured(net, opt, x, y):
    """Return a function that replays a step; its inputs stay in x and y."""
    if x.device.type != "cuda":
        return lambda: step(net, opt, x, y)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(net, opt, x, y)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(net, opt, x, y)
    return graph.replay


def main():
    dev = device()
    n, w = size(65536, 32), size(1024, 16)
    layers = [nn.Linear(64, w), nn.GELU()]
    for _ in range(8):
        layers += [nn.Linear(w, w), nn.LayerNorm(w), nn.GELU()]
    net = nn.Sequential(*layers, nn.Linear(w, 8)).to(dev)
    opt = torch.optim.Adam(net.parameters(), 1e-3, capturable=dev.type == "cuda")
    pool = torch.randn(4 * n, 64, device=dev)
    x, y = torch.zeros(n, 64, device=dev), torch.zeros(n, 8, device=dev)
    replay, clock, at = captured(net, opt, x, y), Clock(), 0
    while not clock.done():
        x.copy_(pool[at : at + n])
        y.copy_(x[:, :8].sin())
        replay()
        at = (at + n) % len(pool)


main()
