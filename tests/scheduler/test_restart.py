"""A run that is stuck from its beginning starts again with another learning rate."""

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
RESTART = hdet.Scout(restart=True, share=0.1)  # short runs


def stuck_after(losses: list[float], error: float | None, first: float) -> int | None:
    """The number of cycles after which a run is found to be stuck."""
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
        ([4.026, 3.61, 3.607, 3.60, 3.594], 0.01, 5.5, 4),  # it creeps
    ],
)
def test_a_loss_that_falls_no_more_is_stuck(
    losses: list[float], error: float | None, first: float, after: int
) -> None:
    assert stuck_after(losses, error, first) == after


@pytest.mark.parametrize(
    ("losses", "error"),
    [
        ([4.64, 3.71, 3.11, 2.91, 2.76, 2.68, 2.6], 0.02),
        ([2.0, 2.01, 1.9, 1.92, 1.8], 0.05),  # within the noise, and not twice running
    ],
)
def test_one_that_falls_is_not(losses: list[float], error: float) -> None:
    assert stuck_after(losses, error, 5.0) is None


def test_without_losses_nothing_is_said() -> None:
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
    told = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    return [line for line in told if line["event"] == event]


def ended(rank: int, engine: str, lr: float, folder: Path | None = None) -> Tensor:
    return Run(engine, rank, lr, record=folder).go(S).weights()


def test_a_hopeless_learning_rate_is_seen_at_the_beginning_on_both_engines(
    processes: Processes, tmp_path: Path
) -> None:
    alone = ended(0, "stacked", WILD, tmp_path)
    assert not lines(tmp_path, "guard")
    found = lines(tmp_path, "scout")[-1]
    assert WILD * found["factor"] < 10 * GOOD
    assert found["step"] <= 0.1 * S
    for answer in processes(N, ended, "processes", WILD):
        torch.testing.assert_close(answer, alone, rtol=1e-8, atol=1e-10)


def test_a_run_that_is_stuck_starts_again_on_both_engines(
    processes: Processes, tmp_path: Path
) -> None:
    """One that is far too low is no reason to change it, until the loss does not fall."""
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


def test_it_ends_where_a_good_learning_rate_does() -> None:
    saved, good = Run("stacked").go(S), Run("stacked", lr=GOOD, scout=None).go(S)
    lost = Run("stacked", scout=None, guard=None)
    with pytest.raises(hdet.ReplicasLost):
        lost.go(S)
    assert saved.loss() < 1.5 * good.loss()
    assert saved.scheduler.get_last_lr() == pytest.approx([0.0], abs=1e-3)  # its schedule has ended


def test_a_run_that_gets_on_has_lost_one_look(tmp_path: Path) -> None:
    run = Run("stacked", lr=GOOD / 10, record=tmp_path)  # there is something to gain in every cycle
    before = run.weights()
    while run.scheduler.is_scouting:
        run.step()
    assert torch.equal(run.weights(), before)
    assert run.scheduler.last_epoch <= 0.025 * S  # one sweep
    assert run.scheduler.get_knobs() == {"lr/group0": 1.0}
    assert run.scheduler._search_phase.second_start is not None
    run.go(S - run.scheduler.last_epoch)
    assert run.scheduler.get_knobs() == {"lr/group0": 1.0}
    assert not lines(tmp_path, "guard")
    assert "no reason" in lines(tmp_path, "scout")[-1]["why"]


def test_one_that_is_stuck_for_another_reason_goes_on_where_it_was(tmp_path: Path) -> None:
    """Nothing can be learnt any more at the learning rate of the scout either."""
    run = Run("stacked", lr=GOOD, record=tmp_path, guard=None)
    run.go(3 * SYNC)
    before, scale = run.weights(), run.scheduler.get_knobs()
    second = run.scheduler._search_phase.second_start
    assert second is not None
    run.scheduler._search_phase.restart(second, "by hand", for_good=False)
    for _ in range(S):
        if run.scheduler.is_scouting:
            run.step()
    assert torch.equal(run.weights(), before)
    assert run.scheduler.get_knobs() == scale
    assert "no reason" in lines(tmp_path, "scout")[-1]["why"]
    run.go(S - run.scheduler.last_epoch)
    assert run.scheduler.get_last_lr() == pytest.approx([0.0], abs=1e-5)


def test_what_is_far_worse_than_the_first_weights_is_nothing_to_come_back_to(
    tmp_path: Path,
) -> None:
    run = Run("stacked", lr=WILD, record=tmp_path).go(4 * SYNC)
    assert not any("no reason" in line["why"] for line in lines(tmp_path, "scout"))
    assert run.loss() < 10


def test_replicas_that_were_apart_come_back_as_one() -> None:
    run = Run("stacked", lr=GOOD, spread=0.3, scout="restart", total=1200)
    second = run.scheduler._search_phase.second_start
    assert second is not None
    second.stall_detector.reason = lambda loss, error: "by hand"  # type: ignore[method-assign]
    run.go(2 * SYNC)  # the first is cut short by the look
    assert run.scheduler.is_scouting
    for _ in range(100):
        if run.scheduler.is_scouting:
            run.step()
    first, *others = [nn.utils.parameters_to_vector(m.parameters()) for m in run.modules()]
    assert all(torch.equal(first, other) for other in others)


def test_late_in_a_run_nothing_goes_back() -> None:
    """However long its cycles are."""
    run = Run("stacked", lr=GOOD, sync_every=150)
    second = run.scheduler._search_phase.second_start
    assert second is not None
    second.stall_detector.reason = lambda loss, error: "by hand"  # type: ignore[method-assign]
    run.go(S)
    assert not run.scheduler.is_scouting
    assert run.scheduler._search_phase.second_start is None


def test_a_run_too_short_for_its_scout_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="must fit in its `share`"):
        Run("stacked", scout="restart", total=150)


def test_it_can_be_resumed_in_the_middle_of_its_scout() -> None:
    run = Run("stacked")
    while not run.scheduler.is_scouting:
        run.step()
    run.go(1)
    run.scheduler.converge()
    told, weights = run.scheduler.state_dict(), run.modules()[0].state_dict()
    other = Run("stacked")
    for module in other.modules():
        module.load_state_dict(weights)
    other.scheduler.load_state_dict(told)
    assert other.scheduler.is_scouting
    other.go(S - other.scheduler.last_epoch)
    assert other.loss() < 0.5


@pytest.mark.parametrize("made", [1, 3])
def test_it_can_be_resumed_in_the_middle_of_its_first_look(made: int) -> None:
    """It holds the first weights: if the run is stuck later, it can still come back to them."""
    first = Run("stacked", lr=LOW).go(made)
    first.scheduler.converge()
    told, weights = first.scheduler.state_dict(), first.modules()[0].state_dict()
    other = Run("stacked", lr=LOW)
    other.modules()[0].load_state_dict(weights)
    other.scheduler.load_state_dict(told)
    for run in (first, other):
        run.go(S - made)
    assert other.weights().equal(first.weights())
    assert other.scheduler.get_knobs()["lr/group0"] > 100


def test_a_scout_of_a_stuck_run_is_one_after_a_resume_too() -> None:
    run = Run("stacked", lr=LOW)
    for scouts in (True, False):  # the look, and the cycles after it
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


def test_a_run_that_is_saved_in_every_cycle_is_watched_all_the_same(tmp_path: Path) -> None:
    run = Run("stacked", lr=LOW, record=tmp_path)
    for step in range(S // 3):
        run.step()
        if step % SYNC == 5 and not run.scheduler.is_scouting:
            run.scheduler.converge()
    assert any("scouting" in line["reason"] for line in lines(tmp_path, "guard"))


def test_a_stuck_run_starts_again_while_a_mean_is_under_way() -> None:
    run = Run("stacked", lr=LOW, overlap=5, gradients="local").go(S)
    assert run.scheduler.get_knobs()["lr/group0"] > 100
    first, *others = [nn.utils.parameters_to_vector(m.parameters()) for m in run.modules()]
    assert all(torch.equal(first, other) for other in others)
    assert run.loss() < 0.5


def test_a_look_stays_one_with_other_replicas() -> None:
    search = Search(RESTART, num_replicas=4, total_steps=S, brief=True)
    other = Search(RESTART, num_replicas=2, total_steps=S)
    other.load_state_dict(search.state_dict())
    assert other.state_dict()["brief"]


def test_a_resumed_run_has_no_first_weights_to_go_back_to() -> None:
    run = Run("stacked", lr=GOOD).go(SYNC)
    run.scheduler.load_state_dict(run.scheduler.state_dict())
    assert run.scheduler._search_phase.second_start is None


def test_one_replica_says_that_it_cannot() -> None:
    with pytest.warns(UserWarning, match="needs several replicas"):
        run = Run("one", lr=GOOD)
    assert run.go(3 * SYNC).scheduler.get_knobs() == {"lr/group0": 1.0}


@pytest.mark.parametrize("scout", ["again", 3])
def test_bad_input_is_refused(scout: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="scout"):
        Run("stacked", scout=scout)


# A change of the data -----------------------------------------------------------------------------

CHANGE, LONG = 30 * SYNC, 80 * SYNC


class Changed(Run):
    """From some step on losses are `worth` times as high, and `more` besides: whatever was a good
    learning rate is so many times too high."""

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
    """What the scouts after the change have come to."""
    told = [line for line in lines(folder, "scout") if line["step"] > CHANGE]
    return [line["factor"] for line in told if line["factor"] is not None]


def test_a_learning_rate_that_new_data_makes_hopeless_is_found_anew(tmp_path: Path) -> None:
    run = Changed("stacked", record=tmp_path).until_it_looks()
    believed = lines(tmp_path, "guard")[-1]
    assert "raised again" in believed["reason"]
    assert run.scheduler.get_knobs() == {"lr/group0": pytest.approx(1.0)}
    run.go(LONG - run.scheduler.last_epoch)
    (found,) = looks(tmp_path)
    assert 1e-4 < found < 0.03
    assert lines(tmp_path, "guard")[-1] == believed  # nothing spikes any more
    assert run.loss() < 0.01


def test_one_that_new_data_leaves_as_good_is_kept(tmp_path: Path) -> None:
    run = Changed("stacked", worth=1.0, more=6.0, record=tmp_path).go(LONG)
    assert looks(tmp_path) == [1.0]
    assert run.scheduler.get_knobs() == {"lr/group0": pytest.approx(1.0)}
    assert run.loss() < 0.01


@pytest.mark.filterwarnings("ignore:the scout found no")
def test_what_explodes_is_left_also_where_nothing_is_better(tmp_path: Path) -> None:
    """Good weights have little to gain: that all differ by chance alone does not excuse it."""
    options: dict[str, Any] = {"gradients": "local", "record": tmp_path, "at": CHANGE + 200}
    run = Changed("stacked", worth=1e4, **options).go(LONG)
    (found,) = looks(tmp_path)
    assert found < 1e-3
    (last,) = [line["step"] for line in lines(tmp_path, "scout") if line["factor"] == found]
    assert all(line["step"] <= last for line in lines(tmp_path, "guard"))
    assert run.loss() < 0.1


def test_a_look_that_nobody_asked_for_keeps_to_its_share(tmp_path: Path) -> None:
    """Whatever the length of rounds that was set for the beginning."""
    scout = hdet.Scout(restart=True, steps=11)
    late = LONG - 8 * SYNC
    run = Changed("stacked", worth=1.0, more=6.0, at=late, record=tmp_path, scout=scout)
    run.go(LONG)
    believed, left_out = lines(tmp_path, "guard")[-2:]
    assert believed["factor"] == 32768.0
    assert "must fit in its `share`" in left_out["reason"]
    assert looks(tmp_path) == []


def test_a_scout_that_was_asked_for_is_believed_also_after_a_resume(tmp_path: Path) -> None:
    """As saved by a library that knew of no looks."""
    run = Run("stacked", lr=GOOD, total=LONG, record=tmp_path).go(40 * SYNC)
    run.scheduler.scout_again()
    run.go(1)
    run.scheduler.converge()
    told = run.scheduler.state_dict()
    del told["search"]["unasked"]
    run.scheduler.load_state_dict(told)
    while run.scheduler.is_scouting:
        run.step()
    assert "no reason" not in lines(tmp_path, "scout")[-1]["why"]


def ended_after_a_change(rank: int, engine: str) -> Tensor:
    return Changed(engine, rank).go(LONG).weights()


def test_new_data_is_the_same_to_processes(processes: Processes) -> None:
    alone = ended_after_a_change(0, "stacked")
    for answer in processes(N, ended_after_a_change, "processes"):
        torch.testing.assert_close(answer, alone, rtol=1e-6, atol=1e-8)


def test_a_look_at_new_data_can_be_resumed() -> None:
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


def test_new_data_shortly_before_the_end_is_not_looked_at(tmp_path: Path) -> None:
    """No steps are left for it; the guard goes on alone."""
    late = LONG - 8 * SYNC
    run = Changed("stacked", worth=1.0, more=6.0, at=late, record=tmp_path, scout="restart")
    run.go(LONG)
    believed, left_out = lines(tmp_path, "guard")[-2:]
    assert believed["factor"] == 32768.0
    assert "must fit in its `share`" in left_out["reason"]
    assert looks(tmp_path) == []
    assert run.scheduler.get_knobs() == {"lr/group0": pytest.approx(1.0)}


def test_new_data_that_blows_up_every_learning_rate_does_not_end_the_run(tmp_path: Path) -> None:
    run = Changed("stacked", worth=1.0, more=6.0, record=tmp_path).until_it_looks()
    run._then = (1e20, 0.0)
    with pytest.warns(UserWarning, match="change of the data.*every learning rate blows up"):
        while run.scheduler.is_scouting:
            run.step()
    assert math.isfinite(run.loss())
    assert run.scheduler.get_knobs() == {"lr/group0": pytest.approx(1.0)}
