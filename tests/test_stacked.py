"""Replicas stacked on one device: the same numbers as the reference, whichever way they are run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet
from hdet.stacked import StackedReplicas
from tests import toy
from tests.test_reference_parity import PEAKS, SETTINGS, WARMUP, N, S, T, check_cycle, expected


def loss_function(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def global_batch(step: int, num: int) -> tuple[Tensor, Tensor]:
    parts = [toy.batch(step, replica) for replica in range(num)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


@pytest.mark.parametrize("mode", ["vmap", "loop"])
@pytest.mark.parametrize("gradients", ["shared", "local"])
@pytest.mark.parametrize("name", sorted(toy.OPTIMIZERS))
def test_every_number_equals_the_reference(
    tmp_path: Path, name: str, gradients: str, mode: str
) -> None:
    settings: dict[str, Any] = {**SETTINGS, "gradients": gradients}
    model = toy.toy()
    ensemble = StackedReplicas(model, N, mode=mode)  # type: ignore[arg-type]
    optimizer = ensemble.optimizer(toy.OPTIMIZERS[name])
    scheduler = hdet.OneCycleHDET(
        optimizer, PEAKS, total_steps=S, cycle_momentum=False, sync_every=T, warmup_steps=WARMUP,
        model=model, replicas=ensemble, record=tmp_path, seed=5,
        **settings,
    )  # fmt: skip
    for step in range(S):
        optimizer.zero_grad()
        losses = ensemble.losses(loss_function, *global_batch(step, N))
        losses.sum().backward()
        optimizer.step()
        scheduler.step(losses)
    want = expected(name, gradients)
    for module, parameters in zip(ensemble.modules(None), want.parameters, strict=True):
        for ours, theirs in zip(module.parameters(), parameters, strict=True):
            torch.testing.assert_close(ours.detach(), theirs, rtol=1e-12, atol=1e-12)
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    cycles = [line for line in lines if line["event"] == "cycle"]
    held = want.cycles[WARMUP // T - 1].centres
    for line, cycle in zip(cycles, want.cycles, strict=True):
        check_cycle(line, cycle, held)


class Stubborn(nn.Module):
    """Looks at a value on its way: vmap cannot run it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.linear(x))
        return hidden * 2 if hidden.sum().item() > 1e9 else hidden


def test_what_vmap_cannot_run_is_run_in_a_loop_with_one_notice() -> None:
    ensemble = StackedReplicas(Stubborn(), 2)
    plain = StackedReplicas(Stubborn(), 2, mode="loop")
    plain.load_state_dict(ensemble.state_dict())
    x, y = torch.randn(8, 2), torch.randint(2, (8,))
    with pytest.warns(UserWarning, match="replicas run one after another: vmap cannot run"):
        first = ensemble.losses(loss_function, x, y)
    torch.testing.assert_close(first, plain.losses(loss_function, x, y))
    torch.testing.assert_close(
        ensemble.losses(loss_function, x, y), plain.losses(loss_function, x, y)
    )
    for ours, theirs in zip(ensemble.modules(None), plain.modules(None), strict=True):
        for name, buffer in ours.named_buffers():
            torch.testing.assert_close(buffer, theirs.get_buffer(name))


def test_batch_norm_keeps_the_statistics_of_every_replica() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    state = network.state_dict()
    single = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    single.load_state_dict(state)
    ensemble = StackedReplicas(network, 2, mode="vmap")
    x, y = torch.randn(12, 3), torch.randint(2, (12,))
    losses = ensemble.losses(loss_function, x, y)
    torch.testing.assert_close(losses[1], loss_function(single, x[6:], y[6:]))
    for name, buffer in single.named_buffers():
        torch.testing.assert_close(ensemble.modules(None)[1].get_buffer(name), buffer)


def test_dropout_differs_between_replicas_and_can_be_repeated() -> None:
    ensemble = StackedReplicas(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), 2, mode="vmap")
    x = torch.ones(2, 4)

    def draw() -> Tensor:
        torch.manual_seed(7)
        return ensemble.losses(lambda model, part: model(part).sum(), x)

    first = draw()
    assert first[0] != first[1]
    assert torch.equal(first, draw())


def test_gradients_are_clipped_for_every_replica() -> None:
    ensemble = StackedReplicas(nn.Linear(1, 1, bias=False), 2, mode="vmap")
    ensemble.share_gradients(None, False)
    optimizer = ensemble.optimizer(lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    ensemble.losses(lambda model, x: model(x).sum(), torch.tensor([[3.0], [0.5]])).sum().backward()
    norms = optimizer.clip_grad_norm_(1.0)
    torch.testing.assert_close(norms, torch.tensor([3.0, 0.5]))
    gradients = [module.get_parameter("weight").grad for module in ensemble.modules(None)]
    torch.testing.assert_close(gradients, [torch.tensor([[1.0]]), torch.tensor([[0.5]])])


def test_all_can_take_one_replicas_place_and_the_consensus_is_an_ordinary_module() -> None:
    ensemble = StackedReplicas(nn.Linear(1, 1), 3)
    hdet.perturb_(ensemble.modules(None)[0], 0.5, replicas=ensemble)
    weights = [module.get_parameter("weight").detach().clone() for module in ensemble.modules(None)]
    consensus = ensemble.consensus()
    torch.testing.assert_close(consensus.get_parameter("weight").detach(), sum(weights) / 3)
    ensemble.select_(1)
    for module in ensemble.modules(None):
        assert torch.equal(module.get_parameter("weight"), weights[1])


def test_a_batch_that_does_not_split_is_refused() -> None:
    ensemble = StackedReplicas(nn.Linear(1, 1), 3)
    with pytest.raises(ValueError, match="must split evenly over 3 replicas, got 4 samples"):
        ensemble.losses(loss_function, torch.ones(4, 1), torch.zeros(4))
