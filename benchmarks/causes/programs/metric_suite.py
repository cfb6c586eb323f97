"""Classify pictures; a suite of torchmetrics follows the training batch by batch."""

import torch
import torchmetrics.classification as tm
from parts import CURED, Clock, device, size
from torch import nn
from torchmetrics import MetricCollection

CLASSES = 50
EVERY = 30 if CURED else 1


class Scores:
    """Values of each batch for the curves, and of the epoch."""

    def __init__(self, dev):
        kinds = (
            tm.MulticlassAccuracy, tm.MulticlassF1Score, tm.MulticlassPrecision, tm.MulticlassRecall,
            tm.MulticlassCalibrationError, tm.MulticlassCohenKappa, tm.MulticlassMatthewsCorrCoef,
        )  # fmt: skip
        self.suite = MetricCollection({kind.__name__: kind(CLASSES) for kind in kinds}).to(dev)
        self.curves, self.seen = [], 0

    def add(self, logits, labels):
        self.seen += 1
        if self.seen % EVERY == 0:
            self.curves.append(self.suite(logits.float(), labels))


class Net(nn.Module):
    def __init__(self, w):
        super().__init__()
        stages = []
        for i, o in ((3, w), (w, 2 * w), (2 * w, 4 * w)):
            stages += [nn.Conv2d(i, o, 3, 2, 1), nn.BatchNorm2d(o), nn.ReLU(True)]
            stages += [nn.Conv2d(o, o, 3, 1, 1), nn.BatchNorm2d(o), nn.ReLU(True)]
        self.body = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(4 * w, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))


def main():
    dev = device()
    net = Net(size(64, 4)).to(dev, memory_format=torch.channels_last)
    opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, nesterov=True)
    scores, clock = Scores(dev), Clock()
    pool = torch.randn(size(1024, 16), 3, size(128, 16), size(128, 16), device=dev)
    pool = pool.contiguous(memory_format=torch.channels_last)
    while not clock.done():
        picked = torch.randint(0, len(pool), (size(128, 8),), device=dev)
        x, y = pool[picked], picked % CLASSES
        with torch.autocast(dev.type, torch.bfloat16):
            logits = net(x)
            loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        scores.add(logits.detach(), y)


main()
