"""The next byte of a text, and where a text comes from."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.models import GPT, Size
from benchmarks.zoo.small import data
from benchmarks.zoo.small.networks import GRU, LSTM, TextConv
from benchmarks.zoo.small.optimizers import Rule, adam, adamw, muon
from benchmarks.zoo.small.task import (
    Batches,
    Schedule,
    SmallTask,
    accuracy,
    call,
    generator,
    make_task,
)

CONTEXT, WINDOW = 32, 64
SIZE = Size(256, CONTEXT, 2, 4, 32)
NUM_HELD = 256


def byte_loss(model: Any, text: Tensor) -> Tensor:
    """The mean cross-entropy of the next byte."""
    logits = call(model, text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def byte_batches(name: str) -> Callable[[int, int, int], Batches]:
    def batches(seed: int, steps: int, batch: int) -> Batches:
        text = data.text(name)
        num = data.num_trained(name) - CONTEXT
        starts = torch.randint(num, (steps, batch, 1), generator=generator(seed))
        return lambda step: (text[starts[step] + torch.arange(CONTEXT + 1)].long(),)

    return batches


def byte_score(name: str) -> Callable[[nn.Module], Mapping[str, Tensor]]:
    def score(model: nn.Module) -> Mapping[str, Tensor]:
        text = data.text(name)
        first = data.num_trained(name)
        starts = torch.linspace(first, len(text) - CONTEXT - 1, NUM_HELD).long()[:, None]
        held = text[starts + torch.arange(CONTEXT + 1)].long()
        logits = call(model, held[:, :-1])
        return {
            "loss": F.cross_entropy(logits.flatten(0, 1), held[:, 1:].flatten()),
            "accuracy": accuracy(logits, held[:, 1:]),
        }

    return score


def byte_task(
    name: str,
    rule: Rule,
    text: str,
    model: Callable[[], nn.Module],
    schedule: Schedule,
    *,
    steps: int = 600,
    batch: int = 32,
    clip: float | None = None,
) -> SmallTask:
    return make_task(
        name,
        "text",
        rule,
        steps=steps,
        batch=batch,
        schedule=schedule,
        model=model,
        loss=byte_loss,
        batches=byte_batches(text),
        score=byte_score(text),
        clip=clip,
    )


# Where a window of bytes comes from -------------------------------------------------------------


def source_loss(model: Any, windows: Tensor, sources: Tensor) -> Tensor:
    return F.cross_entropy(call(model, windows), sources)


def source_batches(seed: int, steps: int, batch: int) -> Batches:
    train, _ = data.packages()
    draw = generator(seed)
    sources = torch.randint(len(train), (steps, batch), generator=draw)
    places = torch.rand(steps, batch, generator=draw)
    starts = torch.randint(data.CHUNK - WINDOW, (steps, batch, 1), generator=draw)
    sizes = torch.tensor([len(chunks) for chunks in train])
    firsts = sizes.cumsum(0) - sizes
    every = torch.cat(train)

    def at(step: int) -> tuple[Tensor, Tensor]:
        chosen = sources[step]
        chunks = firsts[chosen] + (places[step] * sizes[chosen]).long()
        window = every[chunks[:, None], starts[step] + torch.arange(WINDOW)]
        return window.long(), chosen

    return at


def source_score(model: nn.Module) -> Mapping[str, Tensor]:
    """The mean over sources: some are much longer than others."""
    _, held = data.packages()
    losses, rights = [], []
    for source, chunks in enumerate(held):
        windows = chunks[:, : 256 // WINDOW * WINDOW].reshape(-1, WINDOW)[:256].long()
        truth = torch.full((len(windows),), source)
        logits = call(model, windows)
        losses.append(F.cross_entropy(logits, truth))
        rights.append(accuracy(logits, truth))
    return {"loss": torch.stack(losses).mean(), "accuracy": torch.stack(rights).mean()}


TEXTS = (
    byte_task("byte_gpt_adamw", adamw(0.1), "mdn", lambda: GPT(SIZE), "onecycle"),
    byte_task("lstm_adam_clip", adam(), "mdn", LSTM, "onecycle", clip=1.0),
    byte_task("gpt_shakespeare_muon", muon(), "shakespeare", lambda: GPT(SIZE), "wsd"),
    byte_task("gru_stdlib_adamw", adamw(), "stdlib", GRU, "cosine", batch=16, clip=1.0),
    make_task(
        "text_conv_classifier_adam",
        "text",
        adam(),
        steps=700,
        batch=64,
        schedule="onecycle",
        model=lambda: TextConv(len(data.PACKAGES)),
        loss=source_loss,
        batches=source_batches,
        score=source_score,
    ),
)
