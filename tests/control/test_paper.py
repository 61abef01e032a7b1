"""The paper's update, from closed forms (eqs. 4 to 8)."""

import math

import pytest
import torch

import hdet
from hdet.control.controller import Evidence, ScaleState
from hdet.control.paper import decay_rate, hypergradient, softmax_weights


def test_weights_are_a_softmax_of_the_standardised_losses() -> None:
    losses, sigma = [2.0, 2.1, 1.9], 0.1
    raw = [math.exp((2.0 - loss) / sigma) for loss in losses]
    assert softmax_weights(losses, sigma) == pytest.approx([value / sum(raw) for value in raw])


@pytest.mark.parametrize("losses", [[1e308, -1e308], [0.0, 1e300, -1e300], [5.0, 5.0]])
def test_weights_never_overflow(losses: list[float]) -> None:
    weights = softmax_weights(losses, 1e-3)
    assert sum(weights) == pytest.approx(1)
    assert weights[losses.index(min(losses))] == max(weights)


def test_equal_losses_have_no_hypergradient() -> None:
    weights = softmax_weights([3.0] * 4, 0.1)
    assert hypergradient(weights, [0.7, 0.9, 1.1, 1.3]) == pytest.approx(0, abs=1e-15)


def test_decay_without_signal_ends_at_the_floor() -> None:
    peak, floor, num_cycles = 9e-4, 9e-4 / (25 * 1e4), 57
    gamma = decay_rate(peak, floor, num_cycles)
    assert 0 < gamma < 1
    assert peak * (1 - gamma) ** num_cycles == pytest.approx(floor)


def test_update_is_equation_7_of_the_paper() -> None:
    controller = hdet.PaperController(momentum=0.8, temperature=0.2, step_size=0.3)
    state = ScaleState(scale=0.5, velocity=0.01, decay=0.1)
    losses, factors = [1.0, 1.2], [0.45, 0.55]
    weight = 1 / (1 + math.exp(-1.0))
    delta = weight * 0.45 + (1 - weight) * 0.55 - 0.5
    velocity = 0.8 * 0.01 + 0.2 * delta
    move = controller.update(state, Evidence(losses, factors))
    assert move.hypergradient == pytest.approx(delta)
    assert move.state.velocity == pytest.approx(velocity)
    assert move.state.scale == pytest.approx(0.5 * 0.9 + 0.3 * velocity)
    assert (move.decision, "0.45" in move.reason) == ("up", True)


def test_old_velocity_cannot_make_the_scale_negative() -> None:
    controller = hdet.PaperController()
    state = ScaleState(scale=1e-3, velocity=-0.5)
    for _ in range(50):
        move = controller.update(state, Evidence([1.0, 1.0], [0.9, 1.1]))
        assert move.state.scale >= state.scale / 2
        state = move.state
    assert state.scale > 0
    assert "bounded" in controller.update(ScaleState(1e-3, -0.5), Evidence([1, 1], [1, 1])).reason


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("temperature", 0.0, "`temperature` must be a finite number above 0, got 0.0."),
        ("temperature", math.nan, "`temperature` must be a finite number above 0, got nan."),
        ("momentum", 1.0, "`momentum` must be in [0, 1), got 1.0."),
        ("step_size", -1.0, "`step_size` must be a finite number above 0, got -1.0."),
        ("warmup_steps", -1, "`warmup_steps` must be at least 0, got -1."),
    ],
)
def test_error_names_the_bad_argument_of_paper_controller(
    argument: str, value: float, words: str
) -> None:
    with pytest.raises(ValueError) as error:
        hdet.PaperController(**{argument: value})  # type: ignore[arg-type]
    assert str(error.value) == words


def test_the_error_of_the_hypergradient_follows_the_losses_to_first_order() -> None:
    controller = hdet.PaperController(temperature=0.2)
    losses, factors, errors = [1.0, 1.1, 0.9], [0.8, 1.0, 1.3], [0.02, 0.05, 0.01]
    move = controller.update(ScaleState(), Evidence(losses, factors, errors))
    small = 1e-6
    slopes = []
    for replica in range(3):
        shifted_by = [loss + small * (r == replica) for r, loss in enumerate(losses)]
        other = controller.update(ScaleState(), Evidence(shifted_by, factors))
        slopes.append((other.hypergradient - move.hypergradient) / small)
        assert other.error is None
    want = sum((slope * error) ** 2 for slope, error in zip(slopes, errors, strict=True)) ** 0.5
    assert move.error == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "warmup_steps"),
    [({}, 30), ({"pct_start": 0.25}, 25), ({"pct_start": 1.0}, 99), ({"warmup_steps": 7}, 7)],
)
def test_one_cycle_hands_over_to_the_controller_at_its_peak_by_default(
    options: dict[str, float], warmup_steps: int
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = hdet.OneCycleHDET(optimizer, max_lr=0.1, total_steps=100, sync_every=10, **options)  # type: ignore[arg-type]
    controller = scheduler._run.settings.controller
    assert controller is not None
    assert controller.warmup_steps == warmup_steps
