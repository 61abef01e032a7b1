"""What trackers and loggers of trainers get of a run."""

from typing import Any

import torch
from torch import nn

import hdet
from hdet.integrations.tracking import scalars_now


def test_learning_rates_of_now_have_a_name_for_each_group_and_replica() -> None:
    model = nn.Linear(2, 1)
    groups: list[dict[str, Any]] = [
        {"params": [model.weight], "name": "weight"},
        {"params": [model.bias], "lr": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    scheduler = hdet.HDET(optimizer, model=model, total_steps=60, scout=None)
    assert scalars_now(scheduler) == {
        "hdet/lr/weight": 0.1,
        "hdet/lr/weight/replica0": 0.1,
        "hdet/lr/group1": 0.5,
        "hdet/lr/group1/replica0": 0.5,
        "hdet/scouting": 0.0,
    }
