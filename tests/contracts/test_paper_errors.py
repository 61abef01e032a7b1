"""One test for each error of the paper or of its published code. Each fails on that error."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

import hdet
from hdet.control.assignment import multipliers
from hdet.control.controller import Evidence, ScaleState
from hdet.control.paper import decay_rate
from tests import toy
from tests.processes import Processes
from tests.scheduler.test_hdet import TOTAL, Trainer


def test_decay_rate_lowers_the_learning_rate_to_the_floor() -> None:
    """The printed gamma = 1 - exp(-log(f_div / f_final) / K) is negative: x 400 over a run."""
    num_cycles = 100
    printed = 1 - math.exp(-math.log(25 / 1e4) / num_cycles)
    assert (1 - printed) ** num_cycles == pytest.approx(400)
    ours = decay_rate(0.1, 0.1 / (25 * 1e4), num_cycles)
    assert 0.1 * (1 - ours) ** num_cycles == pytest.approx(0.1 / (25 * 1e4))


def rates_before_auto_lr(rank: int) -> float:
    trainer = Trainer(rank)
    return float(trainer.optimizer.param_groups[0]["lr"])


def test_fan_out_sets_different_learning_rates_before_auto_lr_starts(processes: Processes) -> None:
    rates = processes(4, rates_before_auto_lr)
    assert rates == pytest.approx([0.05 / 25 * m for m in multipliers(4, 0.3)])
    assert len(set(rates)) == 4


def without_auto_lr(rank: int) -> list[torch.Tensor]:
    trainer = Trainer(rank, auto_lr=False).train(range(3))
    apart = trainer.weights()
    return [apart, trainer.train(range(3, 4)).weights()]


def test_replicas_are_averaged_at_a_cycle_end_without_auto_lr(processes: Processes) -> None:
    (apart_0, after_0), (apart_1, after_1) = processes(2, without_auto_lr)
    assert not torch.equal(apart_0, apart_1)
    assert torch.equal(after_0, after_1)


def random_states(rank: int, extra_draw: bool) -> Any:
    torch.manual_seed(rank)
    random.seed(rank)
    states = [(random.getstate(), torch.get_rng_state())]
    trainer = Trainer(rank)
    states.append((random.getstate(), torch.get_rng_state()))
    if extra_draw and rank == 1:
        random.random()
        torch.rand(1)
        states = [states[0], states[0]]
    fans = []
    for step in range(TOTAL):
        before = (random.getstate(), torch.get_rng_state())
        trainer.train(range(step, step + 1))
        after = (random.getstate(), torch.get_rng_state())
        assert before[0] == after[0]
        assert torch.equal(before[1], after[1])
        centre = trainer.scheduler.get_base_lr()
        fans.append([lr / c for lr, c in zip(trainer.scheduler.get_last_lr(), centre, strict=True)])
    unchanged = states[0][0] == states[1][0] and torch.equal(states[0][1], states[1][1])
    return unchanged, fans


@pytest.mark.parametrize("extra_draw", [False, True])
def test_scheduler_neither_reads_nor_writes_the_global_random_state(
    processes: Processes, extra_draw: bool
) -> None:
    results = processes(4, random_states, extra_draw)
    assert all(unchanged for unchanged, _ in results)
    want = sorted(multipliers(4, 0.3))
    orders = set()
    for step in range(TOTAL - 1):  # the last step closes the spread
        for group in range(4):
            fan = [fans[step][group] for _, fans in results]
            assert sorted(fan) == pytest.approx(want)
            orders.add(tuple(round(value, 6) for value in fan))
    assert len(orders) > 4


def load_the_first(rank: int, state: dict[str, Any]) -> float:
    trainer = Trainer(rank)
    trainer.scheduler.load_state_dict(state)
    return trainer.scheduler.get_last_lr()[0]


def save_state(rank: int) -> dict[str, Any]:
    trainer = Trainer(rank).train(range(14))
    trainer.scheduler.converge()
    return trainer.scheduler.state_dict()


def test_state_dict_of_one_replica_loads_on_all_replicas(processes: Processes) -> None:
    states = processes(4, save_state)
    assert states[0] == states[1] == states[2] == states[3]
    assert len(set(processes(4, load_the_first, states[0]))) == 4


def test_one_cycle_hdet_accepts_epochs_and_steps_per_epoch() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = hdet.OneCycleHDET(optimizer, 0.1, epochs=3, steps_per_epoch=5, sync_every=5)
    for _ in range(15):
        optimizer.step()
        scheduler.step(1.0)
    assert scheduler.last_epoch == 15


def one_nan(rank: int) -> list[float]:
    trainer = Trainer(rank)
    for step in range(14):
        trainer.optimizer.zero_grad()
        loss = toy.loss_of(trainer.model, step, rank)
        loss.backward()
        trainer.optimizer.step()
        trainer.scheduler.step(math.nan if rank == 1 and step == 11 else loss)
    return trainer.scheduler.get_last_lr()


def test_nan_loss_on_one_replica_keeps_all_learning_rates_finite(processes: Processes) -> None:
    for rates in processes(3, one_nan):
        assert all(math.isfinite(rate) and rate > 0 for rate in rates)


class ManySmall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([torch.zeros(16) for _ in range(560)])


def count_messages(rank: int) -> int:
    from torch.profiler import ProfilerActivity, profile

    model = ManySmall()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    base = CosineAnnealingLR(optimizer, 10)
    scheduler = hdet.HDET(base, model=model, sync_every=1, gradients="local", preset="paper")
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        scheduler.step(1.0)
    return sum("all_reduce" in event.key or "allreduce" in event.key for event in profiler.events())


def test_averaging_560_parameters_needs_at_most_four_all_reduces(processes: Processes) -> None:
    assert all(0 < messages <= 4 for messages in processes(2, count_messages))


@pytest.mark.parametrize("temperature", [0.1, 0.002])
def test_temperature_argument_sets_the_replica_weights_of_paper_controller(
    temperature: float,
) -> None:
    controller = hdet.PaperController(temperature=temperature)
    weights = controller.weigh([1.0, 1.01])
    assert weights[0] / weights[1] == pytest.approx(math.exp(0.01 / temperature))


def gradient_modes(rank: int, gradients: str) -> list[float]:
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hdet.HDET(
        CosineAnnealingLR(optimizer, 10),
        model=model,
        gradients=gradients,  # type: ignore[arg-type]
        sync_every=5,
        preset="paper",
    )
    model(torch.full((1, 1), 1.0 + rank)).sum().backward()
    return [p.grad.item() for p in model.parameters() if p.grad is not None]


def test_gradients_argument_selects_shared_or_local_gradients(processes: Processes) -> None:
    assert processes(2, gradient_modes, "shared") == [[1.5], [1.5]]
    assert processes(2, gradient_modes, "local") == [[1.0], [2.0]]


def warm_start(rank: int) -> torch.Tensor:
    model = toy.toy()
    hdet.perturb_(model, 0.01)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_perturb_gives_each_replica_different_start_weights(processes: Processes) -> None:
    first, second = processes(2, warm_start)
    assert not torch.equal(first, second)


def test_paper_controller_keeps_the_scale_positive() -> None:
    """Eq. 7 as printed crosses zero when 1 - gamma < beta (see test_reference_parity.py)."""
    controller = hdet.PaperController()
    state = ScaleState(decay=decay_rate(1.0, 4e-6, 40))
    for cycle in range(40):
        losses = [1.0 + 0.05 * (cycle < 5) * r for r in range(4)]
        factors = [state.scale * m for m in multipliers(4, 0.3)]
        state = controller.update(state, Evidence(losses, factors)).state
        assert state.scale > 0


def test_record_of_a_run_without_auto_lr_has_all_cycles(
    processes: Processes, tmp_path: Path
) -> None:
    processes(2, record_without_auto_lr, str(tmp_path))
    lines = (tmp_path / "record.jsonl").read_text().splitlines()[1:]
    assert [json.loads(line)["step"] for line in lines] == [4, 8, 12, 16, 20, 24]


def record_without_auto_lr(rank: int, folder: str) -> None:
    Trainer(rank, auto_lr=False, record=folder).train(range(TOTAL))
