"""Hooks of a restore point on the user's model."""

import copy
import io

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet


def test_model_is_saved_whole_and_copied_while_a_scout_waits_for_its_first_step() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = hdet.HDET(OneCycleLR(optimizer, 0.1, total_steps=4000), model=model)
    assert scheduler.is_scouting
    file = io.BytesIO()
    torch.save(model, file)
    assert b"hdet.weights" not in file.getvalue()  # it loads where hdet is not installed
    file.seek(0)
    for copied in (torch.load(file, weights_only=False), copy.deepcopy(model)):
        copied.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        assert copied.weight.equal(model.weight + 1)
