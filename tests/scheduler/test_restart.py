"""`scout="restart"`: the given learning rate is kept unless it is far off; also for new data."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.control.guard_monitor import ABSTENTION
from hdet.lr_search.estimator import Estimate
from hdet.lr_search.reasons import Reason
from hdet.scheduler.search_result import is_far_off
from tests.processes import Processes
from tests.small_run import SmallRun, batch, loss_of

N, S, SYNC = 4, 400, 20
LOW, GOOD, WILD = 1e-5, 0.15, 300.0
HELD = batch(10**6, 0)
RESTART = hdet.Scout(restart=True, share=0.1)  # the tests are short


def score(model: Any) -> Tensor:
    return (model(HELD) - HELD.flip(1)).square().mean(1)


class Run(SmallRun):
    def __init__(
        self, engine: str, rank: int = 0, lr: float = WILD, total: int = S, **options: Any
    ) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

        def base(optimizer: Any) -> OneCycleLR:
            return OneCycleLR(optimizer, lr, total_steps=total)

        settings = {"scout": RESTART, "guard": hdet.Guard(), "sync_every": SYNC, "probe": score}
        settings |= {"controller": None, "spread": 0.0}
        super().__init__(engine, rank, N, model, optimizer, base, **{**settings, **options})

    def go(self, steps: int) -> "Run":
        for _ in range(steps):
            self.step()
        return self

    def search(self) -> "Run":
        """Train until the scout has ended."""
        while self.scheduler.is_scouting:
            self.step()
        return self

    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.modules()[0].parameters()).detach().clone()

    def loss(self) -> float:
        with torch.no_grad():
            return float(loss_of(self.modules()[0], HELD))


def lines(folder: Path, event: str) -> list[dict[str, Any]]:
    results = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    return [line for line in results if line["event"] == event]


def ended(rank: int, engine: str, lr: float, folder: Path | None = None) -> Tensor:
    return Run(engine, rank, lr, record=folder).go(S).weights()


@pytest.mark.parametrize(
    ("factor", "within", "is_far"),
    [
        (1.0, 1.5, False),
        (3.9, 1.1, False),  # below a factor of 4
        (4.1, 1.1, True),
        (1 / 4.1, 1.1, True),
        (8.0, 3.0, False),  # within two errors
        (9.5, 3.0, True),
        (1 / 9.5, 3.0, True),
    ],
)
def test_given_lr_is_far_off_beyond_a_factor_of_four_and_two_errors(
    factor: float, within: float, is_far: bool
) -> None:
    assert is_far_off(Estimate(factor, Reason.FOUND, within, {})) == is_far
    assert not is_far_off(Estimate(factor, Reason.NOTHING_FOUND, within, {}))


@pytest.mark.parametrize("lr", [WILD, LOW])
def test_restart_replaces_a_learning_rate_that_is_far_off_on_both_engines(
    lr: float, processes: Processes, tmp_path: Path
) -> None:
    alone = ended(0, "stacked", lr, tmp_path)
    assert not lines(tmp_path, "guard")
    found = lines(tmp_path, "scout")[-1]
    assert GOOD / 10 < lr * found["factor"] < 10 * GOOD
    assert found["step"] <= 0.1 * S
    for answer in processes(N, ended, "processes", lr):
        torch.testing.assert_close(answer, alone, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("lr", [WILD, LOW])
def test_run_with_a_first_lr_that_is_far_off_ends_near_the_loss_of_a_good_lr(lr: float) -> None:
    saved, good = Run("stacked", lr=lr).go(S), Run("stacked", lr=GOOD, scout=None).go(S)
    assert saved.loss() < 1.5 * good.loss()
    assert saved.scheduler.get_last_lr() == pytest.approx([0.0], abs=1e-3)  # the schedule has ended


def test_restart_keeps_a_good_learning_rate_and_the_first_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run("stacked", lr=GOOD, record=tmp_path)
    before = run.weights()
    run.search()
    assert torch.equal(run.weights(), before)
    assert run.scheduler.last_epoch <= 0.1 * S
    assert run.scheduler.get_knobs() == {"lr/group0": 1.0}
    assert run.scheduler.found_lr == GOOD
    run.go(S - run.scheduler.last_epoch)
    assert run.scheduler.get_knobs() == {"lr/group0": 1.0}
    assert not lines(tmp_path, "guard")
    found = lines(tmp_path, "scout")[-1]
    assert found["factor"] == 1.0
    assert found["factor_reason"].startswith("the given learning rate is kept: ")
    assert found["within"] > 1
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    assert f"scout chose {GOOD:.3g} (1 x the given {GOOD:.3g})" in capsys.readouterr().err


def test_plain_scout_replaces_the_learning_rate_that_restart_keeps() -> None:
    kept = Run("stacked", lr=GOOD).search().scheduler.found_lr
    found = Run("stacked", lr=GOOD, scout=hdet.Scout(share=0.1)).search().scheduler.found_lr
    assert kept == GOOD
    assert found is not None
    assert found != GOOD


def test_requested_search_in_mid_run_takes_what_it_finds(tmp_path: Path) -> None:
    """The option keeps a given learning rate. A user who asks for a search wants another one."""
    run = Run("stacked", lr=GOOD, total=4 * S, record=tmp_path).search()
    run.scheduler.scout_again()
    run.search()
    last = lines(tmp_path, "scout")[-1]
    assert last["mid_run"]
    assert "is kept" not in last["factor_reason"]
    assert last["factor"] != 1.0


def test_restart_scout_rejects_a_run_that_is_too_short() -> None:
    with pytest.raises(ValueError, match="must fit in its `share`"):
        Run("stacked", scout="restart", total=150)


def test_run_resumed_in_mid_search_equals_the_uninterrupted_run() -> None:
    run = Run("stacked").go(3)
    run.scheduler.converge()
    state, weights = copy.deepcopy((run.scheduler.state_dict(), run.modules()[0].state_dict()))
    other = Run("stacked")
    for module in other.modules():
        module.load_state_dict(weights)
    other.scheduler.load_state_dict(state)
    assert other.scheduler.is_scouting
    for each in (run, other):
        each.go(S - each.scheduler.last_epoch)
    assert other.weights().equal(run.weights())
    assert other.scheduler.found_lr == run.scheduler.found_lr
    assert other.loss() < 0.5


@pytest.mark.filterwarnings("ignore:the scout saw too little difference")
def test_restart_with_one_replica_keeps_a_good_learning_rate_and_replaces_a_wild_one() -> None:
    kept = Run("one", lr=GOOD).search()
    assert kept.scheduler.found_lr == GOOD
    assert kept.scheduler.get_knobs() == {"lr/group0": 1.0}
    found = Run("one", lr=WILD).search().scheduler.found_lr
    assert found is not None
    assert GOOD / 10 < found < 10 * GOOD


@pytest.mark.parametrize("bounds", [(2 * GOOD, 10 * GOOD), (GOOD / 10, GOOD / 2)])
def test_restart_does_not_keep_a_good_learning_rate_beyond_the_bounds(
    bounds: tuple[float, float], tmp_path: Path
) -> None:
    low, high = bounds
    run = Run("stacked", lr=GOOD, lr_bounds=bounds, record=tmp_path).search()
    assert run.scheduler.found_lr is not None
    assert low * (1 - 1e-9) <= run.scheduler.found_lr <= high * (1 + 1e-9)
    assert "is kept" not in lines(tmp_path, "scout")[-1]["factor_reason"]
    within = Run("stacked", lr=GOOD, lr_bounds=(GOOD / 2, 2 * GOOD)).search()
    assert within.scheduler.found_lr == GOOD


@pytest.mark.parametrize("scout", ["again", 3])
def test_hdet_rejects_a_bad_scout_argument(scout: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="scout"):
        Run("stacked", scout=scout)


# A change of the data -----------------------------------------------------------------------------

CHANGE, LONG = 30 * SYNC, 80 * SYNC


class Changed(Run):
    """From step `at` on, losses are `worth` times as high plus `more`.

    A learning rate that was good is then `worth` times too high.
    """

    def __init__(
        self,
        engine: str,
        rank: int = 0,
        worth: float = 1000.0,
        more: float = 0.0,
        at: int = CHANGE,
        **options: Any,
    ) -> None:
        self._now, self._then, self._at = (1.0, 0.0), (worth, more), at
        super().__init__(engine, rank, GOOD, LONG, probe=self._score, **options)

    def _score(self, model: Any) -> Tensor:
        worth, more = self._now
        return worth * score(model) + more

    def backward(self, step: int) -> Tensor:
        self._now = worth, more = self._then if step >= self._at else (1.0, 0.0)
        losses = super().backward(step)
        for module in self.modules():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad *= worth
        return worth * losses + more

    def until_it_looks(self) -> "Changed":
        self.go(CHANGE)
        while not self.scheduler.is_scouting:
            self.step()
        return self


def looks(folder: Path) -> list[float]:
    """Return the factors that searches after the change of data have chosen."""
    results = [line for line in lines(folder, "scout") if line["step"] > CHANGE]
    return [line["factor"] for line in results if line["factor"] is not None]


def test_search_after_new_data_replaces_a_learning_rate_that_diverges(tmp_path: Path) -> None:
    run = Changed("stacked", record=tmp_path).until_it_looks()
    believed = lines(tmp_path, "guard")[-1]
    assert believed["reason"] == ABSTENTION
    assert run.scheduler.get_knobs() == {"lr/group0": pytest.approx(1.0)}
    run.go(LONG - run.scheduler.last_epoch)
    (found,) = looks(tmp_path)
    assert 1e-4 < found < 0.03
    assert lines(tmp_path, "guard")[-1] == believed  # no spike after the search
    assert run.loss() < 0.01


def test_search_after_new_data_keeps_a_learning_rate_that_is_still_good(tmp_path: Path) -> None:
    run = Changed("stacked", worth=1.0, more=6.0, record=tmp_path).go(LONG)
    assert looks(tmp_path) == [1.0]
    assert run.scheduler.get_knobs() == {"lr/group0": pytest.approx(1.0)}
    assert run.loss() < 0.01


def test_search_after_new_data_counts_the_bounds_from_the_peak(tmp_path: Path) -> None:
    """A present rate that the schedule has lowered below the bounds is no reason to leave it."""
    bounds = (GOOD / 2, 2 * GOOD)
    run = Changed("stacked", worth=1.0, more=6.0, record=tmp_path, lr_bounds=bounds).go(LONG)
    assert looks(tmp_path) == [1.0]
    (line,) = [line for line in lines(tmp_path, "scout") if line["step"] > CHANGE][-1:]
    assert line["reference_lrs"]["group0"] < bounds[1]
    assert run.scheduler.get_knobs() == {"lr/group0": pytest.approx(1.0)}


@pytest.mark.filterwarnings("ignore:the scout found no")
def test_search_after_new_data_lowers_a_divergent_lr_without_a_measurable_gain(
    tmp_path: Path,
) -> None:
    """Good weights gain little, so differences of scores are noise. Divergence still counts."""
    options: dict[str, Any] = {"gradients": "local", "record": tmp_path, "at": CHANGE + 200}
    run = Changed("stacked", worth=1e4, **options).go(LONG)
    (found,) = looks(tmp_path)
    assert found < 1e-3
    (last,) = [line["step"] for line in lines(tmp_path, "scout") if line["factor"] == found]
    assert all(line["step"] <= last for line in lines(tmp_path, "guard"))
    assert run.loss() < 0.1


def test_search_after_new_data_is_skipped_when_its_rounds_exceed_the_share(tmp_path: Path) -> None:
    """`Scout.steps` sets the length of the rounds. The automatic search has no room for them."""
    scout = hdet.Scout(restart=True, steps=11)
    late = LONG - 8 * SYNC
    run = Changed("stacked", worth=1.0, more=6.0, at=late, record=tmp_path, scout=scout)
    run.go(LONG)
    *lowered, believed, left_out = lines(tmp_path, "guard")
    assert believed["reason"] == ABSTENTION
    assert believed["factor"] == pytest.approx(1 / math.prod(line["factor"] for line in lowered))
    assert "must fit in its `share`" in left_out["reason"]
    assert looks(tmp_path) == []


@pytest.mark.filterwarnings("ignore:the scout saw too little difference")
def test_requested_search_stays_requested_after_loading_an_old_state(tmp_path: Path) -> None:
    """The old state has no entry for automatic searches."""
    run = Run("stacked", lr=GOOD, total=LONG, record=tmp_path).go(40 * SYNC)
    run.scheduler.scout_again()
    run.go(1)
    run.scheduler.converge()
    results = run.scheduler.state_dict()
    del results["search"]["unasked"]
    run.scheduler.load_state_dict(results)
    while run.scheduler.is_scouting:
        run.step()
    assert "is kept" not in lines(tmp_path, "scout")[-1]["factor_reason"]


def ended_after_a_change(rank: int, engine: str) -> Tensor:
    return Changed(engine, rank).go(LONG).weights()


def test_run_with_new_data_ends_with_equal_weights_on_both_engines(processes: Processes) -> None:
    alone = ended_after_a_change(0, "stacked")
    for answer in processes(N, ended_after_a_change, "processes"):
        torch.testing.assert_close(answer, alone, rtol=1e-6, atol=1e-8)


def test_run_resumed_in_its_search_after_new_data_equals_the_uninterrupted_run() -> None:
    first = Changed("stacked").until_it_looks().go(3)
    first.scheduler.converge()
    other = Changed("stacked")
    other.modules()[0].load_state_dict(first.modules()[0].state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    other.scheduler.load_state_dict(first.scheduler.state_dict())
    for run in (first, other):
        run.go(LONG - run.scheduler.last_epoch)
    assert other.weights().equal(first.weights())
    assert other.scheduler.get_knobs()["lr/group0"] < 0.03


def test_new_data_shortly_before_the_end_triggers_no_search(tmp_path: Path) -> None:
    """No steps are left for a search. The guard continues alone."""
    late = LONG - 8 * SYNC
    run = Changed("stacked", worth=1.0, more=6.0, at=late, record=tmp_path, scout="restart")
    run.go(LONG)
    *lowered, believed, left_out = lines(tmp_path, "guard")
    assert believed["reason"] == ABSTENTION
    assert believed["factor"] == pytest.approx(1 / math.prod(line["factor"] for line in lowered))
    assert "must fit in its `share`" in left_out["reason"]
    assert looks(tmp_path) == []
    assert run.scheduler.get_knobs() == {"lr/group0": pytest.approx(1.0)}


def test_run_continues_when_every_learning_rate_diverges_on_new_data(tmp_path: Path) -> None:
    run = Changed("stacked", worth=1.0, more=6.0, record=tmp_path).until_it_looks()
    run._then = (1e20, 0.0)
    with pytest.warns(UserWarning, match="diverges at every learning rate .* change of the data"):
        while run.scheduler.is_scouting:
            run.step()
    assert math.isfinite(run.loss())
    assert run.scheduler.get_knobs() == {"lr/group0": pytest.approx(1.0)}
