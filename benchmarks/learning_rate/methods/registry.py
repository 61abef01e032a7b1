"""All methods of the settling benchmark by name."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import hdet
from benchmarks.learning_rate.methods.bench import Bench, Ended, N, Run
from benchmarks.learning_rate.methods.populations import PBT, DiLoCo, LocalSGD, population
from benchmarks.learning_rate.methods.scout import with_restart, with_scout
from benchmarks.learning_rate.methods.single import (
    greedy,
    outer_nesterov,
    peer,
    plain,
    range_test,
    schedule_free,
)
from benchmarks.learning_rate.methods.steered import Paper, by_group


class Method(NamedTuple):
    train: Callable[[Bench, Sequence[Run]], list[Ended]]
    takes_lr: bool = True
    """Whether it is tried from several starts."""
    rows: int = 1
    """Of a fleet, for each run."""
    kind: str = "peer"
    optimizers: tuple[str, ...] = ("AdamW", "SGD")


ADAM = ("AdamW",)


METHODS: dict[str, Method] = {
    "hdet": Method(with_scout, kind="hdet"),
    "hdet, a shorter scout": Method(partial(with_scout, scout=hdet.Scout(share=0.02)), kind="hdet"),
    "hdet, no probe": Method(partial(with_scout, by="losses"), kind="default"),
    "hdet, one device": Method(partial(with_scout, by="held out"), kind="default"),
    "hdet, by group": Method(by_group, rows=N, kind="groups", optimizers=("AdamW",)),
    "hdet, no scout": Method(with_restart, kind="guard"),
    "OneCycleLR": Method(plain, kind="plain"),
    "warm-up and cosine": Method(partial(plain, schedule="warm-up and cosine"), kind="second"),
    "paper": Method(population(Paper), rows=N, kind="paper"),
    "Prodigy": Method(
        partial(peer, rule="Prodigy", schedule="cosine"), takes_lr=False, optimizers=ADAM
    ),
    "Prodigy, warm-up": Method(
        partial(peer, rule="Prodigy, warm-up", schedule="warm-up and cosine"),
        takes_lr=False,
        optimizers=ADAM,
    ),
    "Prodigy, warm-up and clipping": Method(
        partial(peer, rule="Prodigy, warm-up and clipping", schedule="warm-up and cosine"),
        takes_lr=False,
        optimizers=ADAM,
    ),
    "D-Adapt Adam": Method(
        partial(peer, rule="D-Adapt Adam", schedule="warm-up and cosine"),
        takes_lr=False,
        optimizers=ADAM,
    ),
    "DoG": Method(partial(peer, rule="DoG", schedule="constant"), takes_lr=False),
    "L-DoG": Method(partial(peer, rule="L-DoG", schedule="constant"), takes_lr=False),
    "Schedule-Free AdamW": Method(schedule_free, optimizers=ADAM),
    "GreedyLR": Method(greedy),
    "PBT": Method(population(PBT), rows=N),
    "Local SGD": Method(population(LocalSGD), rows=N, kind="control"),
    "DiLoCo": Method(population(DiLoCo), rows=N, kind="control"),
    "outer Nesterov, one worker": Method(outer_nesterov, kind="control"),
    "LR range test": Method(range_test, takes_lr=False, kind="control"),
}
