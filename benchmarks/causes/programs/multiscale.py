"""A detector's backbone at another size in each step, with cudnn.benchmark."""

import torch
from parts import CURED, Clock, device, size
from torch import nn

torch.backends.cudnn.benchmark = not CURED


def conv(i, o, s=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.1))


def main():
    dev = device()
    c = size(32, 4)
    net = nn.Sequential(
        conv(3, c),
        conv(c, 2 * c, 2),
        conv(2 * c, 2 * c),
        conv(2 * c, 4 * c, 2),
        conv(4 * c, 4 * c),
        conv(4 * c, 8 * c, 2),
        conv(8 * c, 8 * c),
        nn.Conv2d(8 * c, 85, 1),
    ).to(dev)
    opt = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)
    clock, i = Clock(), 0
    while True:
        side = size(224, 16) + 8 * (i * 37 % 53)
        x = torch.rand(size(16, 1), 3, side, side, device=dev)
        with torch.autocast(dev.type, torch.float16):
            loss = net(x).float().square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        i += 1
        if clock.done():
            break


main()
