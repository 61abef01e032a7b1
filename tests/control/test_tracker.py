"""The noise-aware update: as far as the evidence goes, within its bounds, or not at all."""

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

import hdet
from hdet.control.controller import Evidence, Move, ScaleState
from hdet.control.controller_loop import move_against_each_other
from hdet.control.knob_bank import KnobBank
from hdet.control.knob_state import KnobInfo
from hdet.control.regression import Slope
from hdet.control.space import Space

SPACE = Space("log", 1e-3, 1e3)
WIDTH = math.log(1.5)


def update(state: ScaleState, slope: Slope | None, space: Space = SPACE, **settings: float) -> Move:
    evidence = Evidence([1.0, 1.0], [0.9, 1.1], (), space, WIDTH, slope)
    return hdet.Tracker(**settings).update(state, evidence)  # type: ignore[arg-type]


def test_tracker_moves_against_the_slope_by_the_strength_of_the_evidence() -> None:
    move = update(ScaleState(), Slope(-0.6, 0.2), momentum=0.0)
    assert move.state.scale == pytest.approx(math.exp(WIDTH * math.tanh(3 / 2)))
    assert (move.decision, move.hypergradient, move.error) == ("up", 0.6, 0.2)
    assert "-0.6 ± 0.2: +3.0 standard errors" in move.reason
    down = update(ScaleState(), Slope(+0.6, 0.2), momentum=0.0)
    assert down.state.scale == pytest.approx(1 / move.state.scale)


@pytest.mark.parametrize(
    ("slope", "words"),
    [
        (Slope(0.3, 0.2), "abstained: slope +0.3 ± 0.2: -1.5 standard errors, fewer than 2"),
        (Slope(0.3, None), "abstained: nothing is known about the noise yet"),
        (None, "abstained: no spread of its own to compare"),
    ],
)
def test_tracker_abstains_and_gives_the_reason(slope: Slope | None, words: str) -> None:
    move = update(ScaleState(scale=2.0), slope)
    assert (move.decision, move.reason, move.state.scale) == ("abstain", words, 2.0)


def test_weak_evidence_of_several_cycles_adds_up() -> None:
    state, decisions = ScaleState(), []
    for _ in range(6):
        move = update(state, Slope(-1.6, 1.0), momentum=0.8)
        decisions.append(move.decision)
        state = move.state
    assert decisions[0] == "abstain"
    assert decisions[-1] == "up"


def test_confirmed_moves_grow_to_the_trust_region_and_reversals_shrink_them() -> None:
    state, positions = ScaleState(), [0.0]
    for _ in range(8):
        state = update(state, Slope(-9.0, 1.0), momentum=0.0).state
        positions.append(math.log(state.scale))
    steps = [b - a for a, b in pairwise(positions)]
    assert all(b > a for a, b in pairwise(steps) if b < 2 * WIDTH * 0.99)
    assert max(steps) <= 2 * WIDTH
    back = update(state, Slope(9.0, 1.0), momentum=0.0).state
    assert math.log(back.scale) - math.log(state.scale) == pytest.approx(-steps[-1] / 2, rel=0.01)
    assert state.narrow == 1.0
    for sign in [1, -1] * 6:
        back = update(back, Slope(9.0 * sign, 1.0), momentum=0.0).state
    assert back.narrow == 0.25


def test_tracker_keeps_a_knob_within_its_bounds() -> None:
    state = ScaleState(scale=900.0)
    for _ in range(5):
        move = update(state, Slope(-9.0, 1.0))
        state = move.state
    assert state.scale == 1e3
    assert move.reason.endswith("at its bound")


def test_tracker_abstains_without_slope_and_noise() -> None:
    assert update(ScaleState(), Slope(0.0, 0.0)).decision == "abstain"
    assert math.isfinite(update(ScaleState(), Slope(-1e-30, 0.0)).state.scale)


def test_knob_without_effect_stays_near_its_start() -> None:
    ends = []
    for seed in range(60):
        draw, state = random.Random(seed), ScaleState()
        for _ in range(80):
            state = update(state, Slope(draw.gauss(0, 1), 1.0)).state
        ends.append(math.log(state.scale))
    mean = math.fsum(ends) / len(ends)
    deviation = math.sqrt(math.fsum((end - mean) ** 2 for end in ends) / len(ends))
    assert abs(mean) < 3 * deviation / math.sqrt(len(ends))
    assert deviation < 3 * WIDTH


def test_tracker_finds_the_optimum_of_a_noisy_parabola() -> None:
    """d loss / d position = position - 2, seen with an error of 0.1, from 10x off on both sides."""
    for start in (-4.3, 4.3):
        for seed in range(20):
            draw, state = random.Random(seed), ScaleState(scale=math.exp(start))
            for _ in range(60):
                slope = math.log(state.scale) - 2 + draw.gauss(0, 0.1)
                state = update(state, Slope(slope, 0.1)).state
            assert abs(math.log(state.scale) - 2) < math.log(1.5)


def against_each_other(knobs: list[KnobInfo]) -> KnobBank:
    return KnobBank(
        knobs,
        num_replicas=8,
        design="orthogonal",
        sync_every=1,
        seed=0,
        controller=hdet.Tracker(relative=True),
        total_steps=None,
    )


def test_relative_moves_keep_the_mean_of_all_groups_at_a_bound() -> None:
    knobs = [KnobInfo(f"lr/{n}", Space("log", 0.5, 10.0), 0.2, 1.0, (n,)) for n in range(3)]
    knob_bank = against_each_other(knobs)
    for _ in range(30):
        moves = [
            Move(knob.state._replace(scale=knob.state.scale * by), 0.0, "up", "by hand")
            for knob, by in zip(knob_bank.knobs, (1.5, 1.0, 1.2), strict=True)
        ]
        for knob, move in zip(
            knob_bank.knobs, move_against_each_other(knob_bank.knobs, moves), strict=True
        ):
            knob.state = move.state
    scales = [knob.state.scale for knob in knob_bank.knobs]
    assert math.prod(scales) == pytest.approx(1.0)
    assert min(scales) == 0.5


MEMBERS = [((0,), (1,), (2,)), ((0,), (1,), ()), ((0, 1, 2), (), ())]
"""Three groups; two and another knob; one learning rate for all groups."""


@pytest.mark.parametrize("members", MEMBERS)
def test_relative_tracker_moves_groups_only_against_each_other(
    members: Sequence[tuple[int, ...]],
) -> None:
    """Scores are better the lower the first and the last are, and do not answer to the second."""
    space = Space("log", 1e-6, 1e6)
    knobs = [KnobInfo(f"knob{n}", space, 0.2, 1.0, groups) for n, groups in enumerate(members)]
    chance, pull = random.Random(0), (1.0, 0.0, 1.0)
    knob_bank = against_each_other(knobs)
    knob_bank.start_if_due(0, [1.0] * 3)
    for _ in range(6):
        knob_bank.fan_out()
        places = [[math.log(factor) for factor in knob.factors()] for knob in knob_bank.knobs]
        means = [math.fsum(by * p[r] for by, p in zip(pull, places, strict=True)) for r in range(8)]
        scores = [[mean + chance.gauss(0, 0.01) for _ in range(8)] for mean in means]
        steered = knob_bank.move_knobs([None] * 8, range(8), scores=scores)
        knob_bank.cycle += 1
    scales = [knob.state.scale for knob in knob_bank.knobs]
    rates = [scale for scale, groups in zip(scales, members, strict=True) if groups]
    assert math.prod(rates) == pytest.approx(1.0)
    assert members[2] or scales[2] < 0.8  # any other knob moves as ever
    if len(rates) > 1:
        assert rates[1] > 1.05 > 0.99 > rates[0]
    results = [move.reason for move, groups in zip(steered.moves, members, strict=True) if groups]
    assert all("against the other groups" in reason for reason in results)


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 1.0},
        {"threshold": -1.0},
        {"trust": 0.0},
        {"cooldown": 1.0},
        {"warmup_steps": -1},
    ],
)
def test_tracker_refuses_bad_settings(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(settings))}`"):
        hdet.Tracker(**settings)  # type: ignore[arg-type]
