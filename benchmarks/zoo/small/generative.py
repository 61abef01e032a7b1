"""Images made anew: of noise, of a code, and beside another view of themselves."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.small import data
from benchmarks.zoo.small.networks import VAE, Denoiser, Embedder, autoencoder
from benchmarks.zoo.small.optimizers import adam, adamw, sgd
from benchmarks.zoo.small.task import Batch, accuracy, call, from_table, generator, make_task

CODE, SHIFT, TEMPERATURE = 8, 2, 0.2
HELD_SEED = 77

# Diffusion --------------------------------------------------------------------------------------


def with_noise(seed: int, rows: Batch) -> Batch:
    """Images, noise for them, and the angle between an image and its noise."""
    (x,) = rows
    draw = generator(seed)
    noise = torch.randn(x.shape, generator=draw)
    return x, noise, 0.5 * math.pi * torch.rand(len(x), generator=draw)


def denoising_loss(model: Any, x: Tensor, noise: Tensor, angle: Tensor) -> Tensor:
    mixed = angle.cos()[:, None] * x + angle.sin()[:, None] * noise
    return F.mse_loss(call(model, mixed, angle), noise)


def denoising_score(model: nn.Module) -> Mapping[str, Tensor]:
    held = data.digits().x_test.flatten(1).repeat(4, 1)
    return {"loss": denoising_loss(model, *with_noise(HELD_SEED, (held,)))}


# Variational autoencoder ------------------------------------------------------------------------


def with_code_noise(seed: int, rows: Batch) -> Batch:
    return rows[0], torch.randn(len(rows[0]), CODE, generator=generator(seed))


def evidence_loss(model: Any, x: Tensor, noise: Tensor) -> Tensor:
    """The negative evidence bound of an image, in nats."""
    logits, mean, log_variance = model(x, noise)
    pixels = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
    return (pixels + divergence).mean()


def evidence_score(model: nn.Module) -> Mapping[str, Tensor]:
    held = data.half_mnist().x_test.flatten(1)
    return {"loss": evidence_loss(model, *with_code_noise(HELD_SEED, (held,)))}


# Autoencoder ------------------------------------------------------------------------------------


def copy_loss(model: Any, x: Tensor) -> Tensor:
    return F.mse_loss(call(model, x), x)


# Contrast ---------------------------------------------------------------------------------------


def two_views(seed: int, rows: Batch) -> Batch:
    """Images, shifted and with some noise, twice."""
    (x,) = rows
    draw = generator(seed)
    height, width = x.shape[2:]
    padded = F.pad(x[:, 0], [SHIFT] * 4)
    views = []
    for _ in range(2):
        down, right = torch.randint(2 * SHIFT + 1, (2, len(x), 1), generator=draw)
        ys, xs = down + torch.arange(height), right + torch.arange(width)
        view = padded[torch.arange(len(x))[:, None, None], ys[:, :, None], xs[:, None, :]]
        views.append((view + 0.2 * torch.randn(view.shape, generator=draw))[:, None])
    return tuple(views)


def similarities(model: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Of every view with all others, [2 batch, 2 batch], and the place of its partner."""
    codes = call(model, torch.cat([first, second]))
    num = len(first)
    itself = torch.eye(2 * num, dtype=torch.bool)
    logits = (codes @ codes.T / TEMPERATURE).masked_fill(itself, -1e9)
    return logits, (torch.arange(2 * num) + num) % (2 * num)


def contrast_loss(model: Any, first: Tensor, second: Tensor) -> Tensor:
    return F.cross_entropy(*similarities(model, first, second))


def contrast_score(model: nn.Module) -> Mapping[str, Tensor]:
    """Over groups as large as a batch."""
    losses, rights = [], []
    for seed, part in enumerate(data.half_mnist().x_test[:896].split(128)):
        logits, partners = similarities(model, *two_views(HELD_SEED + seed, (part,)))
        losses.append(F.cross_entropy(logits, partners))
        rights.append(accuracy(logits, partners))
    return {"loss": torch.stack(losses).mean(), "accuracy": torch.stack(rights).mean()}


GENERATIVE = (
    make_task(
        "diffusion_digits_adamw",
        "generative",
        adamw(),
        steps=1000,
        batch=128,
        schedule="cosine",
        model=Denoiser,
        loss=denoising_loss,
        batches=from_table(lambda: (data.digits().x.flatten(1),), with_noise),
        score=denoising_score,
    ),
    make_task(
        "vae_mnist_adam",
        "generative",
        adam(),
        steps=1000,
        batch=64,
        schedule="onecycle",
        model=lambda: VAE(CODE),
        loss=evidence_loss,
        batches=from_table(lambda: (data.half_mnist().x.flatten(1),), with_code_noise),
        score=evidence_score,
    ),
    make_task(
        "autoencoder_cifar_sgd",
        "generative",
        sgd(weight_decay=5e-4),
        steps=700,
        batch=32,
        schedule="cosine",
        model=autoencoder,
        loss=copy_loss,
        batches=from_table(lambda: (data.half_cifar().x,)),
        score=lambda model: {"loss": copy_loss(model, data.half_cifar().x_test)},
    ),
    make_task(
        "contrastive_mnist_adamw",
        "generative",
        adamw(),
        steps=600,
        batch=128,
        schedule="cosine",
        model=Embedder,
        loss=contrast_loss,
        batches=from_table(lambda: (data.half_mnist().x,), two_views),
        score=contrast_score,
    ),
)
