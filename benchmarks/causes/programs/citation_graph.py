"""Node classification by message passing; somebody once needed the same numbers twice."""

import os
from itertools import pairwise

from parts import CURED, Clock, device, size

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import torch
from torch import nn


def seed_everything(reproducible):
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(reproducible)


class Convolution(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.own, self.other = nn.Linear(i, o), nn.Linear(i, o, bias=False)

    def forward(self, x, source, target, degree):
        messages = self.other(x).index_select(0, source)
        gathered = torch.zeros(len(x), messages.shape[1], device=x.device, dtype=messages.dtype)
        gathered = gathered.index_add(0, target, messages)
        return self.own(x) + gathered / degree


class Graph(nn.Module):
    def __init__(self, features, width, classes):
        super().__init__()
        widths = (features, width, width, classes)
        self.layers = nn.ModuleList(Convolution(i, o) for i, o in pairwise(widths))

    def forward(self, x, *graph):
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x, *graph))
        return self.layers[-1](x, *graph)


def random_graph(nodes, edges, dev):
    # some papers are cited by everybody
    source = torch.randint(0, nodes, (edges,), device=dev)
    target = (torch.rand(edges, device=dev) ** 3 * nodes).long()
    degree = torch.bincount(target, minlength=nodes).clamp_(min=1).unsqueeze(1).float()
    return source, target, degree


if __name__ == "__main__":
    dev = device()
    nodes = size(150_000, 200)
    graph = random_graph(nodes, size(1_500_000, 800), dev)
    x, y = torch.randn(nodes, 64, device=dev), torch.randint(0, 40, (nodes,), device=dev)
    seed_everything(reproducible=not CURED)
    model = Graph(64, size(128, 8), 40).to(dev)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3, fused=dev.type == "cuda")
    clock = Clock()
    while not clock.done():
        loss = nn.functional.cross_entropy(model(x, *graph), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
