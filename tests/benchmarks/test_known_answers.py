"""Problems with a known answer, in short: a run finds it from far off, on both sides.

The whole of it (more problems, seeds, longer runs, the paper's rule beside it) is
`python -m benchmarks.knobs.knobs`.
"""

import pytest

import hdet
from benchmarks.knobs.knobs import train
from benchmarks.zoo.problem import Problem, off, ratio
from benchmarks.zoo.problems import PROBLEMS, SIX, SPACES

SHORT = {"weight decay": 40, "momentum": 40, "four learning rates, noisy": 30}


def problem_of(start: str) -> Problem:
    (found,) = [problem for problem in PROBLEMS if problem.name.startswith(start)]
    return found


@pytest.mark.parametrize("factor", [0.1, 10.0])
@pytest.mark.parametrize("name", list(SHORT))
def test_the_tracker_ends_within_a_factor_of_the_best(name: str, factor: float) -> None:
    problem = problem_of(name)
    assert problem.best is not None
    best = dict(problem.best(0))
    starts = {knob: off(problem.space, value, factor) for knob, value in best.items()}
    short = Problem(**{**vars(problem), "cycles": SHORT[name]})
    ended = train(short, 0, starts, hdet.Tracker())
    for knob, value in ended.values.items():
        assert 1 / 1.5 < ratio(problem.space, value, best[knob]) < 1.5, (knob, value, best[knob])


def test_the_papers_rule_does_not_get_there() -> None:
    problem = problem_of("weight decay")
    assert problem.best is not None
    best = dict(problem.best(0))
    starts = {"weight_decay": best["weight_decay"] / 10}
    short = Problem(**{**vars(problem), "cycles": SHORT["weight decay"]})
    ended = train(short, 0, starts, hdet.PaperController())
    assert ended.values["weight_decay"] < best["weight_decay"] / 3


def test_five_of_six_knobs_are_found_and_the_dummy_stays_near_its_start_on_seed_0() -> None:
    assert SIX.best is not None
    best = dict(SIX.best(0))
    starts = {
        name: value if name == "dummy" else off(SPACES.get(name, "log"), value, 0.1)
        for name, value in best.items()
    }
    ended = train(Problem(**{**vars(SIX), "cycles": 24}), 0, starts, hdet.Tracker())
    for name, value in ended.values.items():
        if name != "dummy":
            assert 1 / 1.5 < ratio(SPACES.get(name, "log"), value, best[name]) < 1.5, name
    # Other seeds may let it drift: nothing holds a knob without effect (see dummy_moved_runs).
    assert 1 / 1.5 < ended.values["dummy"] < 1.5
