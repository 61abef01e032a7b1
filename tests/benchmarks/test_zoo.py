"""Small tasks of the zoo: they train, alone and stacked, and their curves are read correctly."""

import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from benchmarks.zoo.small import data, finetuning
from benchmarks.zoo.small.catalogue import GIVEN, REPORTING, SETTING, TASKS, drawn_setting
from benchmarks.zoo.small.curve import best_lr, lr_at, place_of, regret
from benchmarks.zoo.small.task import SmallTask, factor_at, make_schedule
from benchmarks.zoo.small.train import train
from benchmarks.zoo.zoo_curves import Book, Job, grown
from hdet.replicas.stacked.vmap_compat import safe_attention


@pytest.fixture(params=list(TASKS))
def task(request: pytest.FixtureRequest, short_pretraining: None) -> SmallTask:
    chosen = TASKS[request.param]
    try:
        chosen.batches(0)
        chosen.make_model(0)
    except FileNotFoundError:
        if "HDET_DATA" in os.environ:
            raise
        pytest.skip("needs $HDET_DATA")
    return chosen


@pytest.fixture
def short_pretraining(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(finetuning, "PRETRAINING_STEPS", 4)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.getbasetemp()))


def test_a_run_has_finite_losses_and_gradients(task: SmallTask) -> None:
    model, batch = task.make_model(0), task.batches(0)(0)
    task.loss(model, *batch).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(g is not None and bool(g.isfinite().all()) for g in gradients)
    outcome = train(replace(task, steps=4), 0.1 * task.middle, 0)
    assert all(math.isfinite(value) for value in outcome.values())
    assert {"loss", "outset", "train_loss"} <= set(outcome)
    assert outcome["loss"] != outcome["outset"]


def test_a_seed_makes_the_same_model_and_batches_and_another_seed_others(task: SmallTask) -> None:
    weights = [nn.utils.parameters_to_vector(task.make_model(0).parameters()) for _ in range(2)]
    assert torch.equal(*weights)
    first, again, other = (task.batches(seed)(3) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert all(len(tensor) == task.batch for tensor in first)
    assert task.batch % 16 == 0


def test_stacked_models_have_the_losses_that_each_has_alone(task: SmallTask) -> None:
    models = [task.make_model(seed) for seed in (0, 1)]
    parts = [tensor.unflatten(0, (2, -1)) for tensor in task.batches(0)(0)]
    weights = _stacked(models, lambda model: dict(model.named_parameters()))
    buffers = _stacked(models, lambda model: dict(model.named_buffers()))

    def loss(weights: dict[str, Tensor], buffers: dict[str, Tensor], *part: Tensor) -> Tensor:
        return task.loss(
            lambda *inputs: functional_call(models[0], (weights, buffers), inputs), *part
        )

    for weight in weights.values():
        weight.requires_grad_()
    with safe_attention("cpu"):
        losses = vmap(loss, randomness="different")(weights, buffers, *parts)
    gradients = torch.autograd.grad(losses.sum(), list(weights.values()))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    alone = [task.loss(models[r], *(part[r] for part in parts)) for r in range(2)]
    torch.testing.assert_close(losses, torch.stack(alone), rtol=1e-4, atol=1e-5)
    for name, buffer in buffers.items():  # batch norm has counted in place
        expected = torch.stack([dict(model.named_buffers())[name] for model in models])
        torch.testing.assert_close(buffer, expected, rtol=1e-4, atol=1e-5)


def _stacked(
    models: list[nn.Module], tensors: Callable[[nn.Module], dict[str, Tensor]]
) -> dict[str, Tensor]:
    own = [tensors(model) for model in models]
    return {name: torch.stack([one[name] for one in own]).detach() for name in own[0]}


def test_split_of_the_tasks_is_the_stratified_draw() -> None:
    assert drawn_setting(TASKS) == SETTING
    assert set(SETTING) >= GIVEN
    assert sorted(SETTING + REPORTING) == sorted(TASKS)
    assert len(SETTING) == len(REPORTING) == 14
    for family in {task.family for task in TASKS.values()}:
        shares = [
            sum(TASKS[name].family == family for name in part) for part in (SETTING, REPORTING)
        ]
        assert abs(shares[0] - shares[1]) <= 1, family


def test_tasks_have_names_and_plans_of_their_own() -> None:
    listed = [*finetuning.FINETUNING, finetuning.FIRST_GPT, *TASKS.values()]
    assert len({task.name for task in listed}) == len(TASKS) + 1
    assert all(name == task.name for name, task in TASKS.items())
    assert all(600 <= task.steps <= 1000 for task in TASKS.values())


def test_schedules_end_low_and_keep_the_ratio_of_groups() -> None:
    for task in TASKS.values():
        weights = [nn.Parameter(torch.zeros(())) for _ in range(2)]
        groups = [{"params": [weights[0]], "lr": 0.1}, {"params": [weights[1]], "lr": 0.3}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        schedule = make_schedule(replace(task, steps=40), optimizer, 0.2)
        rates = []
        for _ in range(40):
            optimizer.step()
            rates.append([group["lr"] for group in optimizer.param_groups])
            schedule.step()
        assert max(low for low, _ in rates) == pytest.approx(0.2, rel=0.01), task.name
        assert all(high == pytest.approx(3 * low) for low, high in rates)
        assert task.schedule == "constant" or rates[-1][0] < 0.02


def test_factors_of_schedules() -> None:
    assert [factor_at("wsd", part) for part in (0.025, 0.05, 0.5, 0.9, 1.0)] == [0.5, 1, 1, 0.5, 0]
    assert factor_at("cosine", 0.525) == pytest.approx(0.5)


def test_a_run_whose_loss_is_not_finite_reports_nan() -> None:
    outcome = train(replace(TASKS["mlp_digits_adam"], steps=10), math.inf, 0)
    assert math.isfinite(outcome["outset"])
    assert all(math.isnan(value) for key, value in outcome.items() if key != "outset")


def test_missing_data_says_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HDET_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"Set \$HDET_DATA"):
        data.folder("a.txt")
    monkeypatch.setenv("HDET_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"needs a\.txt or b\.txt"):
        data.folder("a.txt", "b.txt")
    (tmp_path / "b.txt").touch()
    assert data.folder("a.txt", "b.txt") == tmp_path


# Curves ---------------------------------------------------------------------------------------


def row(lr: float, seed: int, loss: float | None) -> dict[str, Any]:
    return {"task": "a", "lr": lr, "seed": seed, "loss": loss}


def test_regret_is_interpolated_between_learning_rates(tmp_path: Path) -> None:
    losses = {0.01: (4.0, 4.0), 0.1: (1.0, 3.0), 1.0: (3.0, 5.0), 10.0: (1.0, None)}
    rows = [row(lr, seed, loss) for lr, pair in losses.items() for seed, loss in enumerate(pair)]
    path = tmp_path / "curves.json"
    path.write_text(json.dumps({"rows": rows[::-1]}))
    assert best_lr("a", path) == 0.1
    costs = {0.001: 1.0, 0.01: 1.0, 0.1**1.5: 0.5, 0.1: 0.0, 1.0: 1.0, 2.0: math.inf, 99: math.inf}
    assert {lr: regret("a", lr, path) for lr in costs} == pytest.approx(costs)


def test_grid_grows_by_two_while_its_best_is_near_an_end() -> None:
    def curve(best: int, places: range) -> dict[tuple[int, int], float]:
        return {(place, seed): abs(place - best) for place in places for seed in (0, 1)}

    assert grown({}, (0, 1)) == range(-4, 5)
    assert grown(curve(2, range(-4, 5)), (0, 1)) == range(-4, 5)
    assert grown(curve(3, range(-4, 5)), (0, 1)) == range(-4, 7)
    assert grown(curve(-4, range(-4, 5)), (0, 1)) == range(-6, 5)
    assert grown(curve(-4, range(-6, 5)), (0, 1)) == range(-6, 5)
    assert grown(curve(99, range(-60, 60)), (0, 1)) == range(-4, 37)


def test_book_goes_on_from_its_file(tmp_path: Path) -> None:
    path, name = tmp_path / "curves.json", "mlp_digits_adam"
    middle = TASKS[name].middle
    book = Book(path, (0,), quick=False)
    jobs = book.missing([name])
    assert jobs == [Job(name, place, 0) for place in range(-4, 5)]
    for job in jobs[:3]:
        loss = math.nan if job.place == -4 else 1.0
        book.add(row(lr_at(middle, job.place), 0, loss) | {"task": name, "seconds": 1.0})
    again = Book(path, (0,), quick=False)
    assert again.missing([name]) == jobs[3:]
    assert [one["loss"] for one in again.rows] == [None, 1.0, 1.0]
    assert [place_of(middle, one["lr"]) for one in again.rows] == [-4, -3, -2]
