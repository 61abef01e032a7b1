"""The knobs of a run: warm-up, cool-down, and how well their sensitivity is known."""

from collections.abc import Sequence

import pytest

import hdet
from hdet.control.controller import (
    Controller,
    Evidence,
    Move,
    ScaleState,
    complete_controller,
)
from hdet.control.knob_bank import KnobBank
from hdet.control.knob_state import KnobInfo, KnobState, Sensitivity, first_state
from hdet.control.regression import Slope
from hdet.control.space import Space

NUM, CYCLES, SYNC_EVERY = 4, 20, 5
KNOB = KnobInfo("lr", Space("log", 1e-6, 1e6), 0.2, 1.0, (0,))


class PlainController:
    """A controller without a base class, which has the required members alone."""

    warmup_steps = 0

    def weigh(self, losses: Sequence[float]) -> list[float] | None:
        return None

    def update(self, state: ScaleState, evidence: Evidence) -> Move:
        return Move(state._replace(scale=2 * state.scale), 0.0, "up", "always")


def bank_of(controller: Controller | None, design: str = "orthogonal") -> KnobBank:
    return KnobBank(
        [KNOB],
        num_replicas=NUM,
        design=design,
        sync_every=SYNC_EVERY,
        seed=0,
        controller=controller,
        total_steps=CYCLES * SYNC_EVERY,
    )


def explored_cycles(bank: KnobBank) -> list[int]:
    """The cycles in which replicas use different values, over a whole run."""
    explored = []
    bank.start_if_due(0, [1.0])
    for cycle in range(CYCLES):
        bank.fan_out()
        if bank.is_spread():
            explored.append(cycle)
        bank.move_knobs([1.0, 2.0, 3.0, 4.0], range(NUM))
        bank.cycle += 1
    return explored


@pytest.mark.parametrize("design", ["orthogonal", "latin", "permutation"])
@pytest.mark.parametrize(("cooldown", "last"), [(0.0, 20), (0.1, 18), (0.5, 10)])
def test_tracker_explores_nothing_in_its_cool_down(cooldown: float, last: int, design: str) -> None:
    bank = bank_of(hdet.Tracker(cooldown=cooldown), design)
    assert explored_cycles(bank) == list(range(last))


def test_tracker_cools_down_in_the_last_tenth_by_default() -> None:
    assert explored_cycles(bank_of(hdet.Tracker())) == list(range(18))


def test_knob_does_not_move_in_the_cool_down() -> None:
    bank = bank_of(hdet.Tracker())
    bank.start_if_due(0, [1.0])
    bank.cycle = 18
    bank.fan_out()
    (move,) = bank.move_knobs([1.0, 2.0, 3.0, 4.0], range(NUM)).moves
    assert (move.state.scale, move.reason.split(":")[0]) == (1.0, "cool-down")


@pytest.mark.parametrize("controller", [hdet.PaperController(), PlainController(), None])
def test_controller_without_cool_down_explores_to_the_end(controller: Controller | None) -> None:
    assert explored_cycles(bank_of(controller, "permutation")) == list(range(CYCLES))


def test_controller_of_a_plain_class_moves_knobs() -> None:
    bank = bank_of(PlainController())
    bank.start_if_due(0, [1.0])
    bank.fan_out()
    bank.move_knobs([1.0, 2.0, 3.0, 4.0], range(NUM))
    assert bank.scales() == {"lr": 2.0}


@pytest.mark.parametrize("controller", [hdet.PaperController(), hdet.Tracker()])
def test_controller_takes_over_at_the_first_sync_by_default(controller: Controller) -> None:
    assert controller.warmup_steps == 0
    bank = bank_of(controller)
    bank.start_if_due(0, [1.0])
    assert bank.started


def test_controller_waits_for_its_warm_up() -> None:
    bank = bank_of(hdet.PaperController(warmup_steps=7))
    started = []
    for step in (0, 5, 6, 7, 10):
        bank.start_if_due(step, [1.0])
        started.append(bank.started)
    assert started == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("controller", "design"),
    [
        (hdet.PaperController(), "permutation"),
        (hdet.Tracker(), "orthogonal"),
        (PlainController(), "orthogonal"),
    ],
)
def test_controller_names_the_default_design(controller: Controller, design: str) -> None:
    assert complete_controller(controller).default_design == design


def test_sensitivity_interval_covers_95_percent_of_a_normal_distribution() -> None:
    low, high = Sensitivity(slope=3.0, error=0.5, cycles=1.0).interval
    # The quantiles of a normal distribution at 2.5 and 97.5 percent.
    assert low == pytest.approx(3.0 - 0.5 * 1.959964, rel=1e-4)
    assert high == pytest.approx(3.0 + 0.5 * 1.959964, rel=1e-4)


def test_sensitivity_of_one_cycle_is_its_slope_and_error() -> None:
    knob = KnobState(KNOB, first_state(KNOB))
    assert knob.sensitivity() is None
    knob.note_slope(Slope(0.4, 0.1, freedom=5))
    found = knob.sensitivity()
    assert found is not None
    assert found == pytest.approx((0.4, 0.1, 1.0))
    assert found.interval == pytest.approx((0.4 - 0.196, 0.4 + 0.196), rel=1e-3)
