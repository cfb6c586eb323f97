"""A small GAN; every five steps a figure of samples is drawn and saved."""

import tempfile

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from parts import CURED, Clock, device, size
from torch import nn


def picture(samples, step, folder):
    figure, axes = plt.subplots(4, 4, figsize=(6, 6))
    for axis, sample in zip(axes.flat, samples):
        axis.imshow(sample.squeeze(), cmap="gray")
        axis.set_axis_off()
    figure.suptitle(f"step {step}")
    figure.savefig(f"{folder}/samples-{step:05d}.png", dpi=100)
    plt.close(figure)


def main():
    dev = device()
    f = size(64, 8)
    maker = nn.Sequential(
        nn.ConvTranspose2d(64, 4 * f, 4),
        nn.BatchNorm2d(4 * f),
        nn.ReLU(),
        nn.ConvTranspose2d(4 * f, 2 * f, 4, 2, 1),
        nn.BatchNorm2d(2 * f),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * f, f, 4, 2, 1),
        nn.BatchNorm2d(f),
        nn.ReLU(),
        nn.ConvTranspose2d(f, 1, 4, 2, 1),
        nn.Tanh(),
    ).to(dev)
    critic = nn.Sequential(
        nn.Conv2d(1, f, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(f, 2 * f, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * f, 4 * f, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(4 * f, 1, 4),
    ).to(dev)
    opt_m, opt_c = (
        torch.optim.Adam(maker.parameters(), 2e-4),
        torch.optim.Adam(critic.parameters(), 2e-4),
    )
    clock, step, folder = Clock(), 0, tempfile.mkdtemp()
    fixed = torch.randn(16, 64, 1, 1, device=dev)
    while True:
        real = torch.rand(size(512, 4), 1, 32, 32, device=dev)
        fake = maker(torch.randn(len(real), 64, 1, 1, device=dev))
        loss_c = (
            nn.functional.softplus(-critic(real)).mean()
            + nn.functional.softplus(critic(fake.detach())).mean()
        )
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
        loss_m = nn.functional.softplus(-critic(fake)).mean()
        opt_m.zero_grad()
        loss_m.backward()
        opt_m.step()
        step += 1
        if step % (500 if CURED else 5) == 0:
            with torch.no_grad():
                picture(maker(fixed).cpu().numpy(), step, folder)
        if clock.done():
            break


main()
