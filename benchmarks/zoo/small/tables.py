"""Answers and numbers of the rows of tables."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.data import Table
from benchmarks.zoo.small import data
from benchmarks.zoo.small.data import Rows
from benchmarks.zoo.small.networks import TableNet, mlp
from benchmarks.zoo.small.optimizers import Rule, adafactor, adam, adamw, sgd
from benchmarks.zoo.small.task import Schedule, SmallTask, call, from_table, make_task


def answers_loss(model: Any, categories: Tensor, numbers: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(call(model, categories, numbers), labels)


def squared_loss(model: Any, *row: Tensor) -> Tensor:
    return F.mse_loss(call(model, *row[:-1]), row[-1])


def huber_loss(model: Any, *row: Tensor) -> Tensor:
    return F.huber_loss(call(model, *row[:-1]), row[-1])


def table_task(
    name: str,
    rule: Rule,
    rows: Callable[[], Rows],
    model: Callable[[], nn.Module],
    loss: Callable[..., Tensor],
    schedule: Schedule,
    *,
    steps: int,
    batch: int,
) -> SmallTask:
    def score(model: nn.Module) -> Mapping[str, Tensor]:
        scores = {"loss": loss(model, *rows().held)}
        if loss is answers_loss:
            says_yes = call(model, *rows().held[:-1]) > 0
            scores["accuracy"] = (says_yes == (rows().held[-1] > 0)).float().mean()
        return scores

    return make_task(
        name,
        "tables",
        rule,
        steps=steps,
        batch=batch,
        schedule=schedule,
        model=model,
        loss=loss,
        batches=from_table(lambda: rows().train),
        score=score,
    )


def network(table: Callable[[], Table], rows: Callable[[], Rows]) -> Callable[[], nn.Module]:
    """A network for a table, with its embeddings."""

    def make() -> nn.Module:
        categories, numbers, answers = rows().train
        sizes = (tensor.shape[1] for tensor in (categories, numbers, answers))
        return TableNet(table().vocabulary, *sizes)

    return make


TABLES = (
    table_task(
        "tabular_census_adamw",
        adamw(),
        data.census_rows,
        network(data.census, data.census_rows),
        answers_loss,
        "onecycle",
        steps=740,  # one epoch
        batch=128,
    ),
    table_task(
        "ranking_feed_adam",
        adam(),
        data.feed_rows,
        network(data.feed, data.feed_rows),
        answers_loss,
        "onecycle",
        steps=780,  # one epoch
        batch=48,
    ),
    table_task(
        "regression_adam",
        adam(),
        data.ages,
        network(data.census, data.ages),
        squared_loss,
        "cosine",
        steps=800,
        batch=64,
    ),
    table_task(
        "regression_sgd",
        sgd(),
        data.temperatures,
        lambda: mlp([9, 64, 64, 1]),
        squared_loss,
        "cosine",
        steps=1000,
        batch=64,
    ),
    table_task(
        "regression_outliers_adafactor",
        adafactor(),
        data.play_times,
        network(data.feed, data.play_times),
        huber_loss,
        "wsd",
        steps=780,
        batch=48,
    ),
)
