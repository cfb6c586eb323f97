"""Policy gradients; the environment's pure Python moves 64 carts one by one, sixteen moves a step."""

import math

import torch
from parts import CURED, Clock, device, size
from torch import nn

N, MOVES = size(64, 4), size(16, 3)


class Cart:
    def __init__(self):
        self.x = self.v = self.w = 0.0
        self.a = 0.05

    def move(self, push):
        for _ in range(20):
            c, s = math.cos(self.a), math.sin(self.a)
            f = (10.0 if push else -10.0) + 0.05 * self.w * self.w * s
            aa = (9.8 * s - c * f / 1.1) / (0.5 * (4 / 3 - 0.1 * c * c / 1.1))
            self.x += 0.001 * self.v
            self.v += 0.001 * (f - 0.05 * aa * c) / 1.1
            self.a += 0.001 * self.w
            self.w += 0.001 * aa
        if abs(self.a) > 0.4 or abs(self.x) > 2.4:
            self.__init__()
        return [self.x, self.v, self.a, self.w]


class Fast:
    """All carts at once, on the GPU."""

    def __init__(self, dev):
        self.s = torch.zeros(N, 4, device=dev)

    def move(self, push):
        x, v, a, w = self.s.unbind(1)
        c, s = a.cos(), a.sin()
        f = push * 20.0 - 10 + 0.05 * w * w * s
        aa = (9.8 * s - c * f / 1.1) / (0.5 * (4 / 3 - 0.1 * c * c / 1.1))
        self.s = torch.stack(
            [x + 0.02 * v, v + 0.02 * f / 1.1, a + 0.02 * w, w + 0.02 * aa], 1
        ).clamp(-3, 3)
        return self.s


def main():
    dev = device()
    w = size(2048, 16)
    policy = nn.Sequential(
        nn.Linear(4, w),
        nn.Tanh(),
        nn.Linear(w, w),
        nn.Tanh(),
        nn.Linear(w, w),
        nn.Tanh(),
        nn.Linear(w, 2),
    ).to(dev)
    opt = torch.optim.Adam(policy.parameters(), 1e-4)
    carts, fast, clock = [Cart() for _ in range(N)], Fast(dev), Clock()
    seen = torch.zeros(N, 4, device=dev)
    while True:
        states, actions = [], []
        for _ in range(MOVES):
            with torch.no_grad():
                act = (policy(seen).softmax(1)[:, 1] > torch.rand(N, device=dev)).long()
            states.append(seen)
            actions.append(act)
            if CURED:
                seen = fast.move(act)
            else:
                seen = torch.tensor([c.move(a) for c, a in zip(carts, act.tolist())], device=dev)
        s, a = torch.cat(states), torch.cat(actions)
        for _ in range(4):
            logp = policy(s).log_softmax(1).gather(1, a[:, None])
            loss = -(logp * (0.4 - s[:, 2:3].abs())).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        if clock.done():
            break


main()
