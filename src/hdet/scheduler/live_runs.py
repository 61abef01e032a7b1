"""The runs of this process that still train: no two may write the same parameters."""

import gc
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from hdet.scheduler.progress import Progress
from hdet.tensors.joined_optimizer import kinds_of, parameter_ids


class _LiveRun(NamedTuple):
    optimizer: Optimizer
    progress: Progress


_RUNS: WeakKeyDictionary[object, _LiveRun] = WeakKeyDictionary()
"""Scheduler -> its run. An entry disappears with its scheduler."""


def register(scheduler: object, optimizer: Optimizer, progress: Progress) -> None:
    """Note that a scheduler trains an optimizer, until its last step or its deletion."""
    _RUNS[scheduler] = _LiveRun(optimizer, progress)


def forget(scheduler: object) -> None:
    """Note that a scheduler no longer trains its optimizer."""
    _RUNS.pop(scheduler, None)


def check_alone(optimizer: Optimizer) -> None:
    """Refuse an optimizer that the run of another scheduler trains.

    Raises:
        ValueError: If a run that is not over has one of its parameters.
    """
    if _clash(optimizer):
        gc.collect()  # a scheduler that the user deleted may wait for this
    if clash := _clash(optimizer):
        raise ValueError(
            f"`base` must belong to one HDET at a time, got one whose parameters another one "
            f"trains with {clash}. Give the schedules of all optimizers in one HDET([...]). To "
            "start anew, delete the other scheduler first: `del scheduler`."
        )


def _clash(optimizer: Optimizer) -> str:
    """Describe a run with the same parameters; empty without one.

    A text, since an error keeps the variables of its frames alive, and with them a run.
    """
    mine = parameter_ids(optimizer)
    for run in list(_RUNS.values()):
        if not run.progress.is_over() and mine & parameter_ids(run.optimizer):
            return f"{kinds_of(run.optimizer)}, now at step {run.progress.step}"
    return ""
