"""Classes of images: convolutional and dense networks."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.data import Images
from benchmarks.zoo.small import data
from benchmarks.zoo.small.networks import Mixer, VisionTransformer, conv_net, mlp
from benchmarks.zoo.small.optimizers import Rule, adam, adamw, lion, sgd
from benchmarks.zoo.small.task import (
    Family,
    Schedule,
    SmallTask,
    accuracy,
    call,
    from_table,
    make_task,
)

MNIST_WIDTHS, CIFAR_WIDTHS = (8, 16, 32), (16, 32, 64)


def class_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(call(model, x), y)


def class_score(images: Callable[[], Images]) -> Callable[[nn.Module], Mapping[str, Tensor]]:
    def score(model: nn.Module) -> Mapping[str, Tensor]:
        truth = images().y_test
        logits = call(model, images().x_test)
        return {"loss": F.cross_entropy(logits, truth), "accuracy": accuracy(logits, truth)}

    return score


def image_task(
    name: str,
    family: Family,
    rule: Rule,
    images: Callable[[], Images],
    model: Callable[[], nn.Module],
    schedule: Schedule,
    *,
    steps: int = 800,
    batch: int = 64,
    clip: float | None = None,
) -> SmallTask:
    return make_task(
        name,
        family,
        rule,
        steps=steps,
        batch=batch,
        schedule=schedule,
        model=model,
        loss=class_loss,
        batches=from_table(lambda: (images().x, images().y)),
        score=class_score(images),
        clip=clip,
    )


CONV = (
    image_task(
        "conv_mnist_sgd",
        "conv",
        sgd(),
        data.mnist,
        lambda: conv_net(1, MNIST_WIDTHS, 16),
        "onecycle",
    ),
    image_task(
        "conv_mnist_adamw",
        "conv",
        adamw(),
        data.mnist,
        lambda: conv_net(1, MNIST_WIDTHS, 16),
        "onecycle",
    ),
    image_task(
        "conv_mnist_batchnorm_sgd",
        "conv",
        sgd(weight_decay=5e-4),
        data.half_mnist,
        lambda: conv_net(1, MNIST_WIDTHS, 4, norm="batch"),
        "cosine",
        batch=128,
    ),
    image_task(
        "conv_cifar_batchnorm_adamw",
        "conv",
        adamw(0.05),
        data.half_cifar,
        lambda: conv_net(3, CIFAR_WIDTHS, 4, norm="batch"),
        "cosine",
        batch=128,
        steps=600,
    ),
    image_task(
        "conv_cifar_scaled_init_sgd",
        "conv",
        sgd(0.0),
        data.half_cifar,
        lambda: conv_net(3, CIFAR_WIDTHS, 4, he=True),
        "wsd",
        steps=1000,
    ),
    image_task(
        "conv_cifar_groupnorm_sgd_tiny_batch",
        "conv",
        sgd(nesterov=True, weight_decay=5e-4),
        data.half_cifar,
        lambda: conv_net(3, CIFAR_WIDTHS, 4, norm="group"),
        "cosine",
        batch=16,
        steps=1000,
    ),
    image_task(
        "conv_digits_default_init_adam",
        "conv",
        adam(),
        data.digits,
        lambda: conv_net(1, (16, 16, 16, 32, 32, 32), 4, strides=(1, 1, 2, 1, 1, 2)),
        "constant",
        batch=48,
    ),
)

DENSE = (
    image_task(
        "mlp_mnist_sgd",
        "dense",
        sgd(),
        data.half_mnist,
        lambda: mlp([196, 64, 64, 64, 64, 10]),
        "onecycle",
        steps=1000,
    ),
    image_task(
        "vit_cifar_adamw",
        "dense",
        adamw(0.05),
        data.cifar,
        VisionTransformer,
        "wsd",
        steps=600,
        clip=1.0,
    ),
    image_task(
        "mlp_digits_adam",
        "dense",
        adam(),
        data.digits,
        lambda: mlp([64, 128, 128, 10]),
        "cosine",
        batch=256,
    ),
    image_task("mixer_mnist_lion", "dense", lion(), data.mnist, Mixer, "cosine", steps=600),
)
