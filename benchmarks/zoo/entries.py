"""The six tasks of the settling benchmark, in full and in short."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from benchmarks.zoo import tasks
from benchmarks.zoo.models import Size
from benchmarks.zoo.tasks import Plan, Task


class Entry(NamedTuple):
    """A task of the benchmark, in full and in short."""

    make: Callable[..., Task]
    full: Plan
    quick: Plan
    rows: int
    """Of a fleet at most, on a GPU."""
    half: bool = False
    """Whether a GPU computes it in bfloat16."""


GPT_SIZE, TINY = Size(256, 128, 7, 6, 192), Size(256, 48, 2, 4, 64)
ENTRIES = {
    "language, AdamW": Entry(
        tasks.language,
        Plan("AdamW", 1500, 16, 2e-3, GPT_SIZE),
        Plan("AdamW", 500, 16, 8e-3, TINY),
        96,
        half=True,
    ),
    "fine-tuning, AdamW": Entry(
        partial(tasks.language, text="text"),
        Plan("AdamW", 800, 16, 1e-3, GPT_SIZE),
        Plan("AdamW", 400, 16, 4e-3, TINY),
        96,
        half=True,
    ),
    "vision, AdamW": Entry(
        tasks.vision, Plan("AdamW", 1000, 128, 8e-3, 16), Plan("AdamW", 300, 32, 8e-3, 4), 64
    ),
    "vision, SGD": Entry(
        tasks.vision, Plan("SGD", 1000, 128, 0.2, 16), Plan("SGD", 300, 32, 0.1, 4), 64
    ),
    "ranking, census": Entry(
        partial(tasks.ranker, table="census"),
        Plan("AdamW", 1240, 64, 4e-3, 16),
        Plan("AdamW", 400, 32, 4e-3, 8),
        192,
    ),
    "ranking, feed": Entry(
        partial(tasks.ranker, table="feed"),
        Plan("AdamW", 1040, 32, 4e-3, 16),
        Plan("AdamW", 400, 32, 4e-3, 8),
        192,
    ),
}
