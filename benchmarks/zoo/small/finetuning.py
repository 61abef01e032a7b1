"""Training that starts from weights that were trained on something else.

The weights are trained once, from a fixed seed, and kept in a file in the temporary folder. All
seeds start from the same weights; they differ in what they see.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.data import Images
from benchmarks.zoo.models import GPT
from benchmarks.zoo.small import data
from benchmarks.zoo.small.images import MNIST_WIDTHS, class_loss, class_score, image_task
from benchmarks.zoo.small.networks import conv_net, mlp
from benchmarks.zoo.small.optimizers import adam, adamw, sgd
from benchmarks.zoo.small.task import SmallTask, from_table, generator, make_task
from benchmarks.zoo.small.texts import SIZE, byte_batches, byte_loss, byte_score, byte_task
from benchmarks.zoo.small.train import fit, one_thread

PRETRAINING_STEPS, PRETRAINING_SEED = 600, 1234
LR_FACTOR = 0.25
"""The typical learning rate of fine-tuning, in units of that of training."""
COPIES, MOST_SHIFT, MOST_TURN = 3, 2, 0.5


def starting_from(task: SmallTask, *, new_head: int | None = None) -> Callable[[], nn.Module]:
    """Make models that were trained on a task.

    Args:
        task: What the model is trained on first, with a quarter of its typical learning rate.
        new_head: The number of answers of a last layer that replaces the trained one.
    """

    def make() -> nn.Module:
        model = task.make_model(0)
        model.load_state_dict(pretrained(replace(task, steps=PRETRAINING_STEPS)))
        if new_head is not None:
            assert isinstance(model, nn.Sequential)
            old = model[-1]
            assert isinstance(old, nn.Linear)
            model[-1] = nn.Linear(old.in_features, new_head)
        return model

    return make


@cache
def pretrained(task: SmallTask) -> dict[str, Tensor]:
    """The weights of a model that was trained on a task, from the file that keeps them."""
    recipe = f"{task.name} {task.steps} {task.batch} {task.middle} {torch.__version__}"
    name = f"{task.name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}.pt"
    path = Path(tempfile.gettempdir()) / "hdet-zoo" / name
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        with one_thread():
            model = task.make_model(PRETRAINING_SEED)
            fit(task, model, LR_FACTOR * task.middle, PRETRAINING_SEED)
        new = path.with_suffix(f".{os.getpid()}")
        torch.save(model.state_dict(), new)
        new.replace(path)  # at once: other processes read it
    weights: dict[str, Tensor] = torch.load(path, weights_only=True)
    return weights


@cache
def low_digits() -> Images:
    """The images of 0 to 4."""
    full = data.half_mnist()
    train, held = full.y < 5, full.y_test < 5
    return Images(full.x[train], full.y[train], full.x_test[held], full.y_test[held])


@cache
def turned_digits() -> Images:
    """All images, each shifted and turned in several ways."""
    full = data.half_mnist()
    draw = generator(5)
    x = torch.cat([_turned(full.x, draw) for _ in range(COPIES)])
    return Images(x, full.y.repeat(COPIES), _turned(full.x_test, draw), full.y_test)


def _turned(x: Tensor, draw: torch.Generator) -> Tensor:
    angle = MOST_TURN * (2 * torch.rand(len(x), generator=draw) - 1)
    shift = MOST_SHIFT / 7 * (2 * torch.rand(len(x), 2, generator=draw) - 1)
    rows = [
        torch.stack([angle.cos(), -angle.sin(), shift[:, 0]], 1),
        torch.stack([angle.sin(), angle.cos(), shift[:, 1]], 1),
    ]
    places = F.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
    return F.grid_sample(x, places, align_corners=False)


@cache
def relabelled_digits() -> Images:
    """Whether a digit is odd, and whether it is above four, as one of four classes."""
    full = data.digits()
    y, y_test = (part % 2 + 2 * (part > 4).long() for part in (full.y, full.y_test))
    return full._replace(y=y, y_test=y_test)


FIRST_GPT = byte_task("mdn_gpt", adamw(0.1), "mdn", lambda: GPT(SIZE), "onecycle")
FIRST_CONV = image_task(
    "low_digits_conv",
    "conv",
    sgd(),
    low_digits,
    lambda: conv_net(1, MNIST_WIDTHS, 4, norm="batch"),
    "onecycle",
)
FIRST_MLP = image_task(
    "digits_mlp", "dense", adam(), data.digits, lambda: mlp([64, 128, 128, 10]), "onecycle"
)

FINETUNING = (
    make_task(
        "finetune_gpt_adamw",
        "finetuning",
        adamw(0.1),
        steps=600,
        batch=32,
        schedule="onecycle",
        model=starting_from(FIRST_GPT),
        loss=byte_loss,
        batches=byte_batches("shakespeare"),
        score=byte_score("shakespeare"),
        lr_factor=LR_FACTOR,
    ),
    make_task(
        "finetune_conv_sgd",
        "finetuning",
        sgd(),
        steps=700,
        batch=128,
        schedule="cosine",
        model=starting_from(FIRST_CONV),
        loss=class_loss,
        batches=from_table(lambda: (turned_digits().x, turned_digits().y)),
        score=class_score(turned_digits),
        lr_factor=LR_FACTOR,
    ),
    make_task(
        "finetune_head_adam",
        "finetuning",
        adam(),
        steps=600,
        batch=32,
        schedule="constant",
        model=starting_from(FIRST_MLP, new_head=4),
        loss=class_loss,
        batches=from_table(lambda: (relabelled_digits().x, relabelled_digits().y)),
        score=class_score(relabelled_digits),
        lr_factor=LR_FACTOR,
    ),
)
