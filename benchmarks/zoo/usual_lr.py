"""The usual learning rate of an optimizer, as the library's prior has it, as the peak of a task."""

import torch
from torch import nn

from benchmarks.zoo.small.task import SmallTask, make_schedule
from hdet.lr_search.prior import prior_of
from hdet.scheduler.search_result import peak_over_mean


def usual_lr(task: SmallTask) -> float:
    """The prior's learning rate for the mean of the task's schedule."""
    optimizer = task.make_optimizer(task.make_model(0), 1.0)
    momentum = float(optimizer.param_groups[0].get("momentum", 0.0) or 0.0)
    prior = prior_of(type(optimizer).__name__, momentum=momentum)
    assert prior is not None, f"no prior for {task.optimizer}"
    return float(10**prior.mean * peak_over_mean(mean_share(task)))


def mean_share(task: SmallTask) -> float:
    """The mean of a task's schedule, in units of its peak."""
    probe = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    schedule = make_schedule(task, probe, 1.0)
    rates = []
    for _ in range(task.steps):
        rates.append(float(probe.param_groups[0]["lr"]))
        probe.step()
        schedule.step()
    return sum(rates) / len(rates)
