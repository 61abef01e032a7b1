"""Restarts: a run that stalls, or whose data changes, searches for another learning rate."""

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
from hdet.control.stall_detector import StallDetector
from hdet.lr_search.plan import Search
from tests.processes import Processes
from tests.small_run import SmallRun, batch, loss_of

N, S, SYNC = 4, 400, 20
LOW, GOOD, WILD = 1e-5, 0.03, 300.0
HELD = batch(10**6, 0)
RESTART = hdet.Scout(restart=True, share=0.1)  # the tests are short


def stuck_after(losses: list[float], error: float | None, first: float) -> int | None:
    """Return the number of cycles after which the detector reports a stall."""
    watch = StallDetector()
    watch.set_first_loss(first)
    found = (n for n, loss in enumerate(losses, start=1) if watch.reason(loss, error))
    return next(found, None)


@pytest.mark.parametrize(
    ("losses", "error", "first", "after"),
    [  # from runs at ten times the largest stable learning rate
        ([3.745, 3.593, 3.63, 3.617, 3.617], 0.01, 5.5, 3),
        ([0.689, 0.828, 0.926], 0.02, 1.52, 2),
        ([2.35, 2.61, 2.536], 0.02, 2.42, 2),
        ([5.77, 3.3], 0.1, 1.4, 1),
        ([2.0, math.nan], None, 3.0, 2),
        ([2.0, 2.0, 2.0], None, 3.0, 3),
        ([4.026, 3.61, 3.607, 3.60, 3.594], 0.01, 5.5, 4),  # the loss falls too slowly
    ],
)
def test_stall_detector_reports_a_loss_that_stops_falling(
    losses: list[float], error: float | None, first: float, after: int
) -> None:
    assert stuck_after(losses, error, first) == after


@pytest.mark.parametrize(
    ("losses", "error"),
    [
        ([4.64, 3.71, 3.11, 2.91, 2.76, 2.68, 2.6], 0.02),
        ([2.0, 2.01, 1.9, 1.92, 1.8], 0.05),  # rises within the noise, never twice in a row
    ],
)
def test_stall_detector_accepts_a_falling_loss(losses: list[float], error: float) -> None:
    assert stuck_after(losses, error, 5.0) is None


def test_reason_of_a_stall_names_the_loss_before() -> None:
    watch = StallDetector()
    watch.set_first_loss(2.1)
    assert watch.reason(2.3, 0.01) == "loss 2.3 is higher than 2.1 before"
    watch = StallDetector()
    watch.set_first_loss(2.31)
    assert watch.reason(2.3, None) is None
    assert watch.reason(2.3, None) is None
    assert watch.reason(2.3, None) == "loss 2.3 hardly falls any more (2.3 before)"


def test_stall_detector_reports_nothing_without_losses() -> None:
    watch = StallDetector()
    watch.set_first_loss(None)
    assert watch.reason(None, None) is None


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


def test_scout_replaces_a_divergent_learning_rate_at_the_start_on_both_engines(
    processes: Processes, tmp_path: Path
) -> None:
    alone = ended(0, "stacked", WILD, tmp_path)
    assert not lines(tmp_path, "guard")
    found = lines(tmp_path, "scout")[-1]
    assert WILD * found["factor"] < 10 * GOOD
    assert found["step"] <= 0.1 * S
    for answer in processes(N, ended, "processes", WILD):
        torch.testing.assert_close(answer, alone, rtol=1e-8, atol=1e-10)


def test_stalled_run_restarts_with_a_higher_learning_rate_on_both_engines(
    processes: Processes, tmp_path: Path
) -> None:
    """The first sweep keeps a far too low learning rate. The stall triggers the restart."""
    alone = ended(0, "stacked", LOW, tmp_path)
    first, *_, found = [line for line in lines(tmp_path, "scout") if line["factor"] is not None]
    assert first["factor"] == 1.0
    (guard,) = [line for line in lines(tmp_path, "guard") if "scouting" in line["reason"]]
    assert guard["back_to"] == 0
    assert first["step"] < guard["step"] <= 5 * SYNC
    assert GOOD / 10 < LOW * found["factor"] < 10 * GOOD
    assert found["step"] > guard["step"]
    for answer in processes(N, ended, "processes", LOW):
        torch.testing.assert_close(answer, alone, rtol=1e-8, atol=1e-10)


def test_run_with_a_divergent_first_lr_ends_near_the_loss_of_a_good_lr() -> None:
    saved, good = Run("stacked").go(S), Run("stacked", lr=GOOD, scout=None).go(S)
    lost = Run("stacked", scout=None, guard=None)
    with pytest.raises(hdet.ReplicasLost):
        lost.go(S)
    assert saved.loss() < 1.5 * good.loss()
    assert saved.scheduler.get_last_lr() == pytest.approx([0.0], abs=1e-3)  # the schedule has ended


def test_run_with_a_falling_loss_spends_one_sweep_and_keeps_its_learning_rate(
    tmp_path: Path,
) -> None:
    run = Run("stacked", lr=GOOD / 10, record=tmp_path)  # the loss falls in every cycle
    before = run.weights()
    while run.scheduler.is_scouting:
        run.step()
    assert torch.equal(run.weights(), before)
    assert run.scheduler.last_epoch <= 0.025 * S  # one sweep
    assert run.scheduler.get_knobs() == {"lr/group0": 1.0}
    assert run.scheduler._phases.search.second_start is not None
    run.go(S - run.scheduler.last_epoch)
    assert run.scheduler.get_knobs() == {"lr/group0": 1.0}
    assert not lines(tmp_path, "guard")
    assert "is kept" in lines(tmp_path, "scout")[-1]["factor_reason"]


def test_restart_search_without_a_better_lr_restores_weights_and_scale(tmp_path: Path) -> None:
    """The run has converged, so no learning rate of the search improves the loss."""
    run = Run("stacked", lr=GOOD, record=tmp_path, guard=None)
    run.go(3 * SYNC)
    before, scale = run.weights(), run.scheduler.get_knobs()
    second = run.scheduler._phases.search.second_start
    assert second is not None
    run.scheduler._phases.search.restart(second, "by hand", drop_present=False)
    for _ in range(S):
        if run.scheduler.is_scouting:
            run.step()
    assert torch.equal(run.weights(), before)
    assert run.scheduler.get_knobs() == scale
    assert "is kept" in lines(tmp_path, "scout")[-1]["factor_reason"]
    run.go(S - run.scheduler.last_epoch)
    assert run.scheduler.get_last_lr() == pytest.approx([0.0], abs=1e-5)


def test_run_far_worse_than_its_first_weights_does_not_keep_its_learning_rate(
    tmp_path: Path,
) -> None:
    run = Run("stacked", lr=WILD, record=tmp_path).go(4 * SYNC)
    assert not any("no reason" in line["factor_reason"] for line in lines(tmp_path, "scout"))
    assert run.loss() < 10


def test_restart_search_leaves_all_replicas_with_equal_weights() -> None:
    run = Run("stacked", lr=GOOD, spread=0.3, scout="restart", total=1200)
    second = run.scheduler._phases.search.second_start
    assert second is not None
    second.stall_detector.reason = lambda loss, error: "by hand"  # type: ignore[method-assign]
    run.go(2 * SYNC)  # the first sweep shortens the first cycle
    assert run.scheduler.is_scouting
    for _ in range(100):
        if run.scheduler.is_scouting:
            run.step()
    first, *others = [nn.utils.parameters_to_vector(m.parameters()) for m in run.modules()]
    assert all(torch.equal(first, other) for other in others)


def test_stall_late_in_a_run_triggers_no_restart() -> None:
    """The cycles of this run are long."""
    run = Run("stacked", lr=GOOD, sync_every=150)
    second = run.scheduler._phases.search.second_start
    assert second is not None
    second.stall_detector.reason = lambda loss, error: "by hand"  # type: ignore[method-assign]
    run.go(S)
    assert not run.scheduler.is_scouting
    assert run.scheduler._phases.search.second_start is None


def test_restart_scout_rejects_a_run_that_is_too_short() -> None:
    with pytest.raises(ValueError, match="must fit in its `share`"):
        Run("stacked", scout="restart", total=150)


def test_run_resumed_in_mid_search_ends_with_a_low_loss() -> None:
    run = Run("stacked")
    while not run.scheduler.is_scouting:
        run.step()
    run.go(1)
    run.scheduler.converge()
    results, weights = run.scheduler.state_dict(), run.modules()[0].state_dict()
    other = Run("stacked")
    for module in other.modules():
        module.load_state_dict(weights)
    other.scheduler.load_state_dict(results)
    assert other.scheduler.is_scouting
    other.go(S - other.scheduler.last_epoch)
    assert other.loss() < 0.5


@pytest.mark.parametrize("made", [1, 3])
def test_run_resumed_in_its_first_sweep_can_restart_from_the_first_weights(made: int) -> None:
    """The checkpoint holds the first weights, so a later stall can restore them."""
    first = Run("stacked", lr=LOW).go(made)
    first.scheduler.converge()
    results, weights = first.scheduler.state_dict(), first.modules()[0].state_dict()
    other = Run("stacked", lr=LOW)
    other.modules()[0].load_state_dict(weights)
    other.scheduler.load_state_dict(results)
    for run in (first, other):
        run.go(S - made)
    assert other.weights().equal(first.weights())
    assert other.scheduler.get_knobs()["lr/group0"] > 100


def test_restart_search_resumed_midway_still_raises_the_learning_rate() -> None:
    run = Run("stacked", lr=LOW)
    for scouts in (True, False):  # the first sweep, then the cycles until the restart
        while run.scheduler.is_scouting == scouts:
            run.step()
    run.go(1)
    run.scheduler.converge()
    other = Run("stacked", lr=LOW)
    for module in other.modules():
        module.load_state_dict(run.modules()[0].state_dict())
    other.scheduler.load_state_dict(run.scheduler.state_dict())
    other.go(S - other.scheduler.last_epoch)
    assert other.scheduler.get_knobs()["lr/group0"] > 100


def test_stall_is_detected_when_converge_cuts_every_cycle(tmp_path: Path) -> None:
    run = Run("stacked", lr=LOW, record=tmp_path)
    for step in range(S // 3):
        run.step()
        if step % SYNC == 5 and not run.scheduler.is_scouting:
            run.scheduler.converge()
    assert any("scouting" in line["reason"] for line in lines(tmp_path, "guard"))


def test_stalled_run_restarts_while_an_overlapped_average_is_in_progress() -> None:
    run = Run("stacked", lr=LOW, overlap=5, gradients="local").go(S)
    assert run.scheduler.get_knobs()["lr/group0"] > 100
    first, *others = [nn.utils.parameters_to_vector(m.parameters()) for m in run.modules()]
    assert all(torch.equal(first, other) for other in others)
    assert run.loss() < 0.5


def test_brief_search_stays_brief_when_loaded_with_fewer_replicas() -> None:
    search = Search(RESTART, num_replicas=4, total_steps=S, brief=True)
    other = Search(RESTART, num_replicas=2, total_steps=S)
    other.load_state_dict(search.state_dict())
    assert other.state_dict()["brief"]


def test_run_resumed_after_its_first_sweep_has_no_second_start() -> None:
    run = Run("stacked", lr=GOOD).go(SYNC)
    run.scheduler.load_state_dict(run.scheduler.state_dict())
    assert run.scheduler._phases.search.second_start is None


def test_restart_scout_with_one_replica_warns_and_keeps_the_learning_rate() -> None:
    with pytest.warns(UserWarning, match="needs several replicas"):
        run = Run("one", lr=GOOD)
    assert run.go(3 * SYNC).scheduler.get_knobs() == {"lr/group0": 1.0}


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
    assert "raised again" in believed["reason"]
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
    believed, left_out = lines(tmp_path, "guard")[-2:]
    assert believed["factor"] == 32768.0
    assert "must fit in its `share`" in left_out["reason"]
    assert looks(tmp_path) == []


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
    assert "no reason" not in lines(tmp_path, "scout")[-1]["factor_reason"]


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
    believed, left_out = lines(tmp_path, "guard")[-2:]
    assert believed["factor"] == 32768.0
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
