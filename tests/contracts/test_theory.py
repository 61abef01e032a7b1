"""Each formula of docs/explanation/theory.md, on quadratics, against runs of hdet."""

import math
from collections.abc import Mapping
from statistics import fmean, stdev
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import hdet
from hdet.control.assignment import multipliers
from hdet.control.controller import Evidence, ScaleState
from hdet.control.paper import hypergradient, softmax_weights

NUM = 8
CURVATURE = 0.5
NOISE = 0.3
SIZE = 20_000
"""Independent directions of equal curvature: their mean is an expectation."""


class NoisyQuadratic(nn.Module):
    """The mean over directions of h w^2 / 2 + noise w, whose gradient is h w + noise."""

    def __init__(self, start: Tensor, curvature: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(start.clone())
        self.curvature = curvature

    def forward(self, noise: Tensor) -> Tensor:
        return (0.5 * self.curvature * self.weight**2 + noise.mean(0) * self.weight).sum()


class Events:
    """A sink that keeps all events."""

    def __init__(self) -> None:
        self.kept: list[Mapping[str, Any]] = []

    def write(self, event: Mapping[str, Any]) -> None:
        self.kept.append(event)

    def close(self) -> None:
        """Do nothing."""


class FannedOut:
    """Stacked replicas with a fixed spread, before their first converge."""

    def __init__(
        self,
        start: Tensor,
        lr: float,
        *,
        spread: float,
        curvature: float = CURVATURE,
        gradients: Literal["shared", "local"] = "shared",
    ) -> None:
        self.model = NoisyQuadratic(start, curvature)
        self.ensemble = hdet.StackedReplicas(self.model, NUM)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.optimizer = self.ensemble.optimizer(optimizer)
        self.events = Events()
        self.scheduler = hdet.HDET(
            self.optimizer,
            model=self.model,
            replicas=self.ensemble,
            spread=spread,
            gradients=gradients,
            sync_every=100,
            total_steps=100,
            scout=None,
            guard=None,
            controller=None,
            record=self.events,
        )

    def train(self, noises: Tensor) -> None:
        """One step for each entry of the noise. Every replica gets the same batch."""
        for noise in noises:
            self.optimizer.zero_grad()
            losses = self.losses(noise)
            losses.sum().backward()
            self.optimizer.step()
            self.scheduler.step(losses)

    def losses(self, noise: Tensor | None = None) -> Tensor:
        """The loss of each replica; without noise the true one."""
        batch = torch.zeros_like(self.model.weight) if noise is None else noise
        return self.ensemble.losses(lambda model, x: model(x), batch.repeat(NUM, 1))

    def positions(self) -> list[float]:
        """The multipliers of the replicas."""
        centre = self.scheduler.get_base_lr()[0]
        return [lrs[0] / centre for lrs in self.scheduler.get_replica_lrs()]

    def mean_weights(self) -> Tensor:
        with self.scheduler.consensus():
            return self.model.weight.detach().clone()


def noise_of(steps: int, seed: int = 0) -> Tensor:
    return NOISE * torch.randn(steps, SIZE, generator=torch.Generator().manual_seed(seed))


def stationary(lr: float) -> Tensor:
    """Weights from the stationary distribution of SGD: variance lr s^2 / (h (2 - lr h))."""
    scale = NOISE * math.sqrt(lr / (CURVATURE * (2 - lr * CURVATURE)))
    return scale * torch.randn(SIZE, generator=torch.Generator().manual_seed(1))


def lowest_point(positions: list[float], losses: list[float]) -> float:
    """Where the parabola through the losses is lowest."""
    x = torch.tensor(positions, dtype=torch.float64)
    powers = torch.stack([x**0, x, x**2], dim=1)
    _, slope, bend = torch.linalg.lstsq(powers, torch.tensor(losses).double()[:, None])[0][:, 0]
    return float(-slope / (2 * bend))


@pytest.mark.parametrize("spread", [1 / 9, 0.5, 0.9])
@pytest.mark.parametrize("lr", [0.4, 4.4])  # 4.4 is above the largest stable 2 / h = 4
def test_mean_of_shared_gradients_is_the_run_at_the_mean_learning_rate(
    spread: float, lr: float
) -> None:
    noises, plain = noise_of(12)[:, :10], torch.ones(10, dtype=torch.float64)
    run = FannedOut(torch.ones(10), lr, spread=spread)
    run.train(noises)
    for noise in noises.double():
        plain = plain - lr * (CURVATURE * plain + noise)
    torch.testing.assert_close(run.mean_weights().double(), plain, rtol=1e-4, atol=1e-5)
    if lr > 2 / CURVATURE:
        assert plain.norm() > 8 * 10**0.5  # it diverges, spread or not


@pytest.mark.parametrize("lr", [0.4, 4.4])
def test_mean_of_local_gradients_contracts_by_the_mean_of_the_factors(lr: float) -> None:
    """The mean over r of (1 - rho_r lr h)^T, which is never smaller in size where it diverges."""
    steps = 10
    run = FannedOut(torch.ones(1), lr, spread=0.5, gradients="local")
    factors = [1 - position * lr * CURVATURE for position in run.positions()]
    run.train(torch.zeros(steps, 1))
    expected = fmean(factor**steps for factor in factors)
    assert run.mean_weights().item() == pytest.approx(expected, rel=1e-4)
    assert abs(expected) >= abs(1 - lr * CURVATURE) ** steps


@pytest.mark.parametrize("lr", [0.2, 1.0, 3.0])
def test_loss_of_a_stationary_run_is_lowest_at_half_of_the_step(lr: float) -> None:
    steps = 12
    run = FannedOut(stationary(lr), lr, spread=0.9)
    before = run.losses().mean().item()
    run.train(noise_of(steps))
    positions, losses = run.positions(), run.losses().tolist()
    assert lowest_point(positions, losses) == pytest.approx(0.5, abs=0.02)
    kept = (1 - lr * CURVATURE) ** steps
    for position, loss in zip(positions, losses, strict=True):
        expected = 1 - 2 * position * (1 - position) * (1 - kept)
        assert loss / before == pytest.approx(expected, abs=0.06)


def test_training_losses_on_equal_batches_have_the_same_lowest_point() -> None:
    run = FannedOut(stationary(1.0), 1.0, spread=0.9)
    positions = run.positions()
    run.train(noise_of(100))  # a whole cycle, with the same batch for all replicas
    losses = next(event["losses"] for event in run.events.kept if event["event"] == "cycle")
    assert lowest_point(positions, losses) == pytest.approx(0.5, abs=0.05)


def test_lowest_point_moves_up_where_the_start_is_far_away() -> None:
    """rho* = (A - C) / (A + B - 2 C), with the second moments of start and end."""
    steps, lr, far = 3, 0.2, 4.0
    noise_variance = NOISE**2 * lr / (CURVATURE * (2 - lr * CURVATURE))
    kept = (1 - lr * CURVATURE) ** steps
    first = far**2
    last = kept**2 * far**2 + (1 - kept**2) * noise_variance
    both = kept * far**2
    run = FannedOut(torch.full((SIZE,), far), lr, spread=0.9)
    run.train(noise_of(steps))
    expected = (first - both) / (first + last - 2 * both)
    assert expected > 3  # the comparison asks for a higher learning rate
    found = lowest_point(run.positions(), run.losses().tolist())
    assert found == pytest.approx(expected, rel=0.02)


def test_signal_of_shared_gradients_does_not_see_the_largest_stable_learning_rate() -> None:
    """At stationarity d loss / d rho = 2 (1 - kept) E loss > 0 at every stable learning rate."""
    for lr in (0.05, 0.5, 2.0, 3.5):
        run = FannedOut(stationary(lr), lr, spread=1 / 9)
        run.train(noise_of(40))
        losses = run.losses().tolist()
        weights = softmax_weights(losses, temperature=0.1 * fmean(losses))
        assert hypergradient(weights, run.positions()) < 0


@pytest.mark.parametrize("negative", [0.1, 2.0])
def test_average_of_two_points_exceeds_their_mean_by_at_most_an_eighth_of_the_curvature(
    negative: float,
) -> None:
    """Equality on -c w^2 / 2: f(middle) - mean f = c d^2 / 8, with d = 2 alpha |D|."""
    spread, steps, lr = 0.5, 4, 0.1
    run = FannedOut(torch.ones(1), lr, spread=spread, curvature=-negative)
    run.train(torch.zeros(steps, 1))
    travelled = (1 + lr * negative) ** steps - 1
    distance = 2 * spread * travelled
    ends = [run.losses().tolist()[place] for place in (0, -1)]
    middle = -negative / 2 * run.mean_weights().square().sum().item()
    assert middle - fmean(ends) == pytest.approx(negative * distance**2 / 8, rel=1e-4, abs=1e-7)


def test_average_of_replicas_on_a_convex_loss_is_never_above_both() -> None:
    run = FannedOut(stationary(1.0), 1.0, spread=0.9)
    run.train(noise_of(20))
    losses = run.losses().tolist()
    middle = (CURVATURE / 2 * run.mean_weights().square()).sum().item()
    assert middle <= max(losses[0], losses[-1])
    assert middle <= fmean(losses)


def test_replicas_are_no_further_apart_than_spread_steps_and_update_allow() -> None:
    spread, steps, lr = 0.5, 10, 0.2
    run = FannedOut(torch.ones(10), lr, spread=spread)
    largest = 0.0
    for noise in noise_of(steps)[:, :10]:
        with run.scheduler.consensus():
            gradient = CURVATURE * run.model.weight.detach() + noise
        largest = max(largest, gradient.norm().item())
        run.train(noise[None])
    modules = run.ensemble.modules(run.model)
    first, last = (modules[place].get_parameter("weight") for place in (0, -1))
    assert 0 < (first - last).norm().item() <= 2 * spread * lr * steps * largest


@pytest.mark.parametrize("num", [2, 4, 8, 16])
def test_signal_and_noise_of_the_hypergradient_follow_from_slope_spread_and_replicas(
    num: int,
) -> None:
    """Mean -alpha^2 v L' / sigma and deviation alpha s sqrt(v / N) / sigma, v = (N+1) / 3(N-1)."""
    spread, slope, noise, temperature = 1 / 9, 0.03, 0.01, 1.0
    factors = multipliers(num, spread)
    draws = noise * torch.randn(20_000, num, generator=torch.Generator().manual_seed(0)).double()
    losses = draws + slope * torch.tensor(factors).double()
    found = [hypergradient(softmax_weights(row, temperature), factors) for row in losses.tolist()]
    variance = (num + 1) / (3 * (num - 1))
    assert fmean(found) == pytest.approx(-(spread**2) * variance * slope / temperature, rel=0.05)
    expected = spread * noise * math.sqrt(variance / num) / temperature
    assert stdev(found) == pytest.approx(expected, rel=0.05)


def test_velocity_delays_noise_and_does_not_average_it_out() -> None:
    """The sum of all velocities is the sum of all signals, each times 1 - beta^(cycles left)."""
    controller = hdet.PaperController(momentum=0.9, temperature=100.0, step_size=1e-6)
    state = ScaleState(scale=1.0)
    factors = [1 - 1 / 9, 1 + 1 / 9]
    draw = torch.Generator().manual_seed(0)
    pairs = torch.randn(60, 2, generator=draw).tolist()
    pulls, total = [], 0.0
    for losses in pairs:
        evidence = Evidence(losses=losses, factors=factors)
        state = controller.update(state, evidence).state
        pulls.append(hypergradient(softmax_weights(losses, 100.0), factors))
        total += state.velocity
    left = range(len(pulls), 0, -1)
    expected = math.fsum(p * (1 - 0.9**n) for p, n in zip(pulls, left, strict=True))
    assert total == pytest.approx(expected, rel=1e-6)


def test_one_cycle_moves_the_scale_by_no_more_than_spread_and_step_size_allow() -> None:
    """|Delta| <= alpha scale: a learning rate 100 times too low needs 86 perfect cycles."""
    controller = hdet.PaperController(momentum=0.0, temperature=1e-3, step_size=0.5)
    state, cycles = ScaleState(scale=0.01), 0
    while state.scale < 1:
        factors = [state.scale * (1 + place / 9) for place in (-1, 0, 1)]
        evidence = Evidence(losses=[2.0, 1.0, 0.0], factors=factors)
        state, cycles = controller.update(state, evidence).state, cycles + 1
    assert cycles == math.ceil(math.log(100) / math.log(1 + 0.5 / 9)) == 86
