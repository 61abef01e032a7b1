"""Writes docs/reference/compatibility.md from the rules that every run is checked against.

    python -m tools.compatibility_page

Each cell of the table is the answer of the rules for one engine and one feature.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import hdet
from hdet.replicas.protocol import SingleReplica
from hdet.scheduler.base_schedule import BaseSchedule
from hdet.scheduler.compatibility import RULES
from hdet.scheduler.rules import Rule, Setup, first_broken
from hdet.scheduler.scout_rules import DEFAULT_SCOUT_RULES, SCOUT_RULES
from hdet.scheduler.settings import Settings
from hdet.signals.probe import as_probe

NUM_REPLICAS = 8
PAGE = Path(__file__).parent.parent / "docs" / "reference" / "compatibility.md"

INTRODUCTION = """\
<!-- Written by `python -m tools.compatibility_page`. Do not edit. -->
# Compatibility

hdet checks each run before its first step. A combination that does not work raises an error with
the value and the remedy. A combination without effect gives a warning.

## Engines and features

The table assumes a model, a learning-rate knob and a run that is long enough for a scout. A link
leads to the rule that forbids the combination.

With one replica, hdet has no weights to average and no knobs to compare. The scout and the guard
work: the scout tries its learning rates one after the other.
"""


@dataclass(frozen=True)
class Engine:
    """The facts about one engine that rules ask for."""

    title: str
    is_elastic: bool = False
    spans_processes: bool = False
    can_compress: bool = False
    is_under_ddp: bool = False
    is_under_fsdp: bool = False


@dataclass(frozen=True)
class EngineSetup(Setup):
    """A setup that needs no running engine: it takes the facts from a description."""

    engine: Engine

    @property
    def num_replicas(self) -> int:
        return NUM_REPLICAS

    @property
    def is_elastic(self) -> bool:
        return self.engine.is_elastic

    @property
    def spans_processes(self) -> bool:
        return self.engine.spans_processes

    @property
    def can_compress(self) -> bool:
        return self.engine.can_compress

    @property
    def is_under_ddp(self) -> bool:
        return self.engine.is_under_ddp

    @property
    def is_under_fsdp(self) -> bool:
        return self.engine.is_under_fsdp

    @property
    def torchft_gradients(self) -> str:
        return self.settings.gradients  # the model is wrapped to fit


ENGINES = (
    Engine(
        "`ProcessReplicas` with DDP", spans_processes=True, can_compress=True, is_under_ddp=True
    ),
    Engine(
        "`ProcessReplicas` with FSDP2", spans_processes=True, can_compress=True, is_under_fsdp=True
    ),
    Engine("`StackedReplicas`"),
    Engine("`TorchftReplicas`", is_elastic=True),
)


@dataclass(frozen=True)
class Feature:
    """A row of the table: what a user passes, and the rules that decide about it."""

    title: str
    options: dict[str, Any]
    rules: Sequence[Rule] = RULES


def features() -> Iterator[Feature]:
    """Yield the rows of the table."""
    yield Feature("`scout='auto'`", {"scout": hdet.Scout()}, DEFAULT_SCOUT_RULES)
    yield Feature("`scout=hdet.Scout()`", {"scout": hdet.Scout()})
    yield Feature("`guard=hdet.Guard()`", {"guard": hdet.Guard()})
    yield Feature("`probe=`", {"probe": as_probe(lambda _: 0.0)})
    yield Feature("`knobs=[hdet.weight_decay()]`", {"knobs": (hdet.weight_decay(),)})
    yield Feature("`gradients='shared'`", {})
    yield Feature("`gradients='local'`", {"gradients": "local"})
    yield Feature("`optimizer_state='average'`", {"optimizer_state": "average"})
    yield Feature("`optimizer_state='reset'`", {"optimizer_state": "reset"})
    yield Feature("`outer=`", {"outer": partial(torch.optim.SGD, lr=0.7)})
    yield Feature("`overlap=`", {"overlap": 5})
    yield Feature("`compress=`", {"compress": "bf16"})


def setup_of(engine: Engine, feature: Feature) -> Setup:
    """Return a run of 10000 steps on this engine that uses this feature."""
    model = nn.Linear(1, 1)
    base = BaseSchedule(LambdaLR(torch.optim.SGD(model.parameters(), lr=0.1), lambda _: 1.0))
    options = {
        "spread": 0.1,
        "sync_every": 100,
        "controller": None,
        "gradients": "shared",
        "optimizer_state": "keep",
        "total_steps": 10_000,
        "on_overrun": "hold",
        "seed": 0,
    }
    return EngineSetup(
        Settings(**{**options, **feature.options}), base, SingleReplica(), model, engine
    )


def cell(engine: Engine, feature: Feature) -> str:
    """Return what the rules say about one feature on one engine."""
    broken = first_broken(feature.rules, setup_of(engine, feature))
    if broken is None:
        return "yes"
    return f"[{'no effect' if broken.is_warning else 'no'}](#{broken.name})"


def table() -> str:
    """Return the table of features and engines."""
    rows = [["", *(engine.title for engine in ENGINES)], ["---"] * (len(ENGINES) + 1)]
    rows += [[each.title, *(cell(engine, each) for engine in ENGINES)] for each in features()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def section(title: str, rules: Sequence[Rule]) -> str:
    """Return a heading and one list item for each rule."""
    items = [
        f'- <a id="{rule.name}"></a>{rule.limit} {rule.remedy}'
        + (" *(warning)*" if rule.is_warning else "")
        for rule in rules
    ]
    return "\n".join([f"\n## {title}\n", *items, ""])


def page() -> str:
    """Return the text of the page."""
    of_scouts = {rule.name for rule in SCOUT_RULES}
    return (
        INTRODUCTION
        + "\n"
        + table()
        + section("Options", [rule for rule in RULES if rule.name not in of_scouts])
        + section("Scouts", SCOUT_RULES)
        + section(
            "The default scout",
            [rule for rule in DEFAULT_SCOUT_RULES if rule.name not in of_scouts],
        )
    )


if __name__ == "__main__":
    PAGE.write_text(page())
