"""A GAN: two networks, two losses and two optimizers, with hdet in the lines marked so.

python examples/gan.py

The generator learns to draw points on a circle; it needs no GPU and no download.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim.lr_scheduler import OneCycleLR

import hdet  # hdet

BATCH, NOISE = 256, 4


def points(num: int) -> Tensor:
    """Points near the unit circle, with three quarters of them on its upper half."""
    angle = math.pi * (torch.rand(num) - (torch.rand(num) < 0.25).float())
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(num, 2)


def distance(drawn: Tensor, real: Tensor) -> Tensor:
    """The energy distance of two samples. It falls while the generator improves."""
    own, theirs = torch.cdist(drawn, drawn), torch.cdist(real, real)
    return 2 * torch.cdist(drawn, real).mean() - own.mean() - theirs.mean()


def network(width_in: int, width_out: int) -> nn.Module:
    layers = [nn.Linear(width_in, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(64, width_out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--lr", type=float, default=1e-5, help="far too low, on purpose")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    generator, critic = network(NOISE, 2), network(2, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=arguments.lr, betas=(0.5, 0.9))
    of_critic = torch.optim.Adam(critic.parameters(), lr=2 * arguments.lr, betas=(0.5, 0.9))
    schedules = [
        OneCycleLR(of_generator, arguments.lr, total_steps=arguments.steps, cycle_momentum=False),
        OneCycleLR(of_critic, 2 * arguments.lr, total_steps=arguments.steps, cycle_momentum=False),
    ]
    held_noise, held_points = torch.randn(1000, NOISE), points(1000)

    model = nn.ModuleDict({"generator": generator, "critic": critic})  # hdet: both in one
    scheduler = hdet.HDET(schedules, model=model)  # hdet: around both schedules
    for step in range(arguments.steps):
        real, drawn = points(BATCH), generator(torch.randn(BATCH, NOISE))
        of_critic.zero_grad()
        loss = softplus(-critic(real)).mean() + softplus(critic(drawn.detach())).mean()
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        softplus(-critic(drawn)).mean().backward()
        of_generator.step()
        scheduler.step(distance(drawn.detach(), real))  # hdet: once, with a number that falls
        if (step + 1) % 300 == 0:
            with torch.no_grad():
                apart = distance(generator(held_noise), held_points).item()
            print(f"step {step + 1:4d}  loss of the critic {loss.item():.3f}  distance {apart:.4f}")
    print(f"learning rates: {scheduler.get_knobs()['lr']:.3g} times the given ones")


if __name__ == "__main__":
    main()
