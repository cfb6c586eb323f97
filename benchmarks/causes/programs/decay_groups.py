"""Fine-tune a vision transformer with a rate and a weight decay for each parameter, by its name."""

import torch
from parts import CURED, Clock, device, size
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c)
        x = x + self.proj(y)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, width, depth, heads, patch=16, side=224, classes=100):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.zeros(1, (side // patch) ** 2, width))
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


def depth_of(name, layers):
    if name.startswith(("patches", "places")):
        return 0
    return int(name.split(".")[1]) + 1 if name.startswith("layers") else layers + 1


def groups_of(model, rate, decay=0.05, factor=0.75):
    layers = len(model.layers)
    groups = {}
    for name, parameter in model.named_parameters():
        plain = parameter.ndim < 2
        depth = depth_of(name, layers)
        key = (depth, plain) if CURED else name
        group = groups.setdefault(
            key,
            {
                "params": [],
                "lr": rate * factor ** (layers + 1 - depth),
                "weight_decay": 0.0 if plain else decay,
            },
        )
        group["params"].append(parameter)
    return list(groups.values())


def train():
    dev = device()
    model = ViT(size(384, 16), size(24, 2), size(6, 2)).to(dev)
    optimizer = torch.optim.AdamW(groups_of(model, 1e-3))
    images = torch.randn(size(64, 2), 3, 224, 224, device=dev)
    labels = torch.randint(0, 100, (len(images),), device=dev)
    clock = Clock()
    while not clock.done():
        with torch.autocast(dev.type, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


train()
