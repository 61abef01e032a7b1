"""The options of the demo, and the runs that it makes one after another."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from hdet._validation import check_choice, check_integer, check_positive
from hdet.cli.demo_data import CONV_NET, TASKS, Task
from hdet.cli.demo_sweep import sweep_of
from hdet.scheduler.presets import NUM_CYCLES

FAR = 1000
"""The runs start so many times too low, and too high."""
PAPER_STEPS, PAPER_CYCLES = 240, 12
"""The paper has cycles of 1000 steps, in longer runs."""
ENGINES = ("stacked", "processes")


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The options of `hdet demo`.

    Attributes:
        replicas: The number of replicas; it must divide the batches.
        steps: The number of optimizer steps of each run; None takes those of the task.
        lr: The learning rate that each run starts with; None starts far too low and far too high.
        engine: `stacked` for all replicas on one device, `processes` for one process each.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: An option is out of range.
    """

    replicas: int = 8
    steps: int | None = None
    lr: float | None = None
    engine: Literal["stacked", "processes"] = "stacked"

    def __post_init__(self) -> None:
        check_integer("--replicas", self.replicas, at_least=1)
        if self.steps is not None:
            check_integer("--steps", self.steps, at_least=1)
        if self.lr is not None:
            check_positive("--lr", self.lr)
        check_choice("--engine", self.engine, ENGINES)
        smallest = min(task.batch_size for task in TASKS)
        if smallest % self.replicas:
            raise ValueError(f"`--replicas` must divide {smallest}, got {self.replicas}.")


class Act(NamedTuple):
    """A run of the demo.

    Attributes:
        name: The name of its folder.
        start: How its learning rate lies, for people.
        task: What it trains.
        lr: The learning rate that it is given.
        steps: The number of optimizer steps.
        sync_every: The length of a cycle.
        is_paper: Whether it trains as the paper does, and not with a scout and a guard.
    """

    name: str
    start: str
    task: Task
    lr: float
    steps: int
    sync_every: int
    is_paper: bool = False

    @property
    def title(self) -> str:
        """The run, for people."""
        return f"{self.task.title}: {self.start}"


def acts(settings: DemoSettings) -> list[Act]:
    """The runs of the demo, in their order."""
    steps = min(settings.steps or PAPER_STEPS, PAPER_STEPS)
    lr = sweep_of(CONV_NET.name).lr
    paper = "the paper's method, at a good learning rate"
    every = max(steps // PAPER_CYCLES, 1)
    first = Act("paper", paper, CONV_NET, lr, steps, every, is_paper=True)
    return [first, *(act for task in TASKS for act in _searches(task, settings))]


def _searches(task: Task, settings: DemoSettings) -> list[Act]:
    best, steps = sweep_of(task.name).lr, settings.steps or task.steps
    every = max(steps // NUM_CYCLES, 1)
    if settings.lr is not None:
        return [Act(task.name, f"from {settings.lr:g}", task, settings.lr, steps, every)]
    starts = [("too-low", best / FAR), ("too-high", best * FAR)]
    return [
        Act(
            f"{task.name}-{name}",
            f"{FAR} times {name.replace('-', ' ')}",
            task,
            float(f"{lr:.3g}"),
            steps,
            every,
        )
        for name, lr in starts
    ]
