"""Held-out batches: they score stacked replicas in a search without a probe."""

import copy
import json
import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.lr_search.constants import MIN_ROUND_STEPS, NUM_HELD_OUT_PARTS, SWEEP_POINTS
from hdet.replicas.protocol import HeldOutBatches
from hdet.replicas.stacked.held_out import MAX_CALLS
from tests.scheduler.test_search_trial import LR, STEPS, N, Run, S, net
from tests.small_run import batch, loss_of

KEPT = NUM_HELD_OUT_PARTS // N
SCOUT = hdet.Scout(decades=2, steps=STEPS, share=0.3)  # two rounds of four learning rates


def outset_of(held: HeldOutBatches, num: int = NUM_HELD_OUT_PARTS) -> float:
    """While all replicas stand there."""
    (row,) = {tuple(row.tolist()) for row in held.rows(num, alike=True)[:, :-2].nan_to_num(-1)}
    scores = [score for score in row if score != -1]
    return sum(scores) / len(scores)


def run(engine: str = "stacked", **options: Any) -> Run:
    return Run(engine, **{"probe": None, "scout": SCOUT, **options})


def scores(model: nn.Module, steps: Sequence[int] = range(KEPT)) -> Tensor:
    """As in training: BatchNorm takes the statistics of the batch."""
    parts = [batch(step, replica) for step in steps for replica in range(N)]
    with torch.no_grad():
        return torch.stack([loss_of(copy.deepcopy(model), part) for part in parts])


def alone(
    replica: int, factor: float, begin: int = KEPT, steps: Sequence[int] = range(KEPT)
) -> Tensor:
    """A plain loop; what its mean weights score on the batches of some steps."""
    model = net()
    mean = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR * factor, betas=(0.95, 0.999))
    iterates = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(begin + step, replica)).backward()
        optimizer.step()
        iterates.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    tail = torch.stack(iterates[-math.ceil(STEPS / 2) :]).mean(0)
    nn.utils.vector_to_parameters(tail, mean.parameters())
    return scores(mean, steps).mean()


def test_every_replica_is_scored_on_the_same_held_out_batches(tmp_path: Path) -> None:
    one = run(record=tmp_path).go(KEPT + STEPS)
    trial = one.scheduler._run.progress.trial
    assert trial is not None
    assert trial.search.start_score == pytest.approx(float(scores(net()).mean()), rel=1e-12)
    points = trial.search.observations.points
    assert len(points) == N
    for replica, point in enumerate(points):
        assert point.score == pytest.approx(float(alone(replica, point.factor)), rel=1e-9)
    # The better one of the two that define the common score may be better on every batch.
    assert sum(point.error > 0 for point in points) >= N - 1


def test_held_out_batches_are_not_trained_on_and_scoring_changes_nothing() -> None:
    one = run()
    before = one.vectors()
    torch.manual_seed(7)
    state = torch.get_rng_state()
    for step in range(KEPT):
        one.step()
        assert all(map(torch.equal, one.vectors(), before)), step
        assert one.states() == [0] * N
    one.go(STEPS)
    assert all(map(torch.equal, one.vectors(), before))
    assert torch.equal(torch.get_rng_state(), state)
    while one.scheduler.is_scouting:
        one.step()
    assert all(map(torch.equal, one.vectors(), before))
    assert one.scheduler.get_knobs()["lr/group0"] != 1


def test_first_batch_of_a_round_is_scored_in_later_rounds_up_to_the_limit() -> None:
    """All replicas are restored after a round, so none has trained on it."""
    ensemble = hdet.StackedReplicas(net(), N)
    held = ensemble.hold_out(NUM_HELD_OUT_PARTS, NUM_HELD_OUT_PARTS + N)
    for step in range(KEPT):
        ensemble.losses(loss_of, global_batch(step))
        held.end_step()
    for first in (KEPT, KEPT + STEPS):
        ensemble.losses(loss_of, global_batch(first))
        held.begin_round()
        ensemble.losses(loss_of, global_batch(first + 1))  # replicas train on it
        held.end_round()
    want = scores(net(), range(KEPT + 1))
    assert outset_of(held, 99) == pytest.approx(float(want.mean()), rel=1e-12)
    assert held.rows(99)[0, : len(want)].tolist() == pytest.approx(want.tolist(), rel=1e-12)


def test_later_rounds_of_a_search_are_scored_on_the_same_batches() -> None:
    one = run(total=400).go(KEPT + STEPS)
    trial = one.scheduler._run.progress.trial
    assert trial is not None
    start_score, begin, factors = trial.search.start_score, KEPT + STEPS, trial.search.factors
    one.go(STEPS)
    for replica, factor in enumerate(factors):
        (point,) = [p for p in trial.search.observations.points if p.factor == factor]
        assert point.score == pytest.approx(float(alone(replica, factor, begin)), rel=1e-9)
    assert trial.search.start_score == pytest.approx(start_score, rel=1e-12)


@pytest.mark.parametrize("mode", ["vmap", "loop"])
def test_vmap_and_loop_give_the_same_held_out_scores(mode: Any) -> None:
    torch.manual_seed(0)
    model = net()
    ensemble = hdet.StackedReplicas(model, N, mode=mode)
    held = ensemble.hold_out(NUM_HELD_OUT_PARTS, NUM_HELD_OUT_PARTS)
    for step in range(KEPT):
        ensemble.losses(loss_of, torch.cat([batch(step, replica) for replica in range(N)]))
        held.end_step()
    assert held.steps_left == 0
    rows = held.rows(NUM_HELD_OUT_PARTS)[:, :NUM_HELD_OUT_PARTS]
    want = scores(net())
    assert outset_of(held) == pytest.approx(float(want.mean()), rel=1e-12)
    for row in rows:
        assert row.tolist() == pytest.approx(want.tolist(), rel=1e-12)


def test_many_replicas_score_eight_parts_of_one_batch() -> None:
    num = 2 * NUM_HELD_OUT_PARTS
    ensemble = hdet.StackedReplicas(net(), num)
    held = ensemble.hold_out(NUM_HELD_OUT_PARTS, NUM_HELD_OUT_PARTS)
    assert held.steps_left == 1
    ensemble.losses(loss_of, torch.cat([batch(0, replica) for replica in range(num)]))
    held.end_step()
    assert held.rows(NUM_HELD_OUT_PARTS)[:, :NUM_HELD_OUT_PARTS].isfinite().all()
    assert held.rows(NUM_HELD_OUT_PARTS)[:, NUM_HELD_OUT_PARTS].isnan().all()  # padding
    assert outset_of(held) == pytest.approx(
        float(
            torch.stack(
                [loss_of(net(), batch(0, r)).detach() for r in range(NUM_HELD_OUT_PARTS)]
            ).mean()
        )
    )


class Elsewhere(Run):
    """Its loop calls the replicas itself."""

    def backward(self, step: int) -> Tensor:
        pairs = enumerate(self.modules())
        losses = torch.stack([loss_of(module, batch(step, r)) for r, module in pairs])
        losses.sum().backward()
        return losses.detach()

    def step(self) -> None:
        for module in self.modules()[1:]:
            module.zero_grad()
        super().step()


def test_losses_computed_outside_the_engine_replace_held_out_scores() -> None:
    one = Elsewhere("stacked", probe=None, scout=SCOUT)
    one.go(KEPT)
    trial = one.scheduler._run.progress.trial
    assert trial is not None
    assert trial.held_out is None
    assert one.ensemble is not None
    assert one.ensemble._forward.call_recorder is None
    while one.scheduler.is_scouting:
        one.step()
    assert one.scheduler.get_knobs()["lr/group0"] != 1


@pytest.mark.filterwarnings("ignore:the scout found its best learning rate at the end")
def test_scout_without_spare_steps_compares_training_losses() -> None:
    sweep = math.ceil(SWEEP_POINTS / N) * MIN_ROUND_STEPS  # and no step to hold out
    short = hdet.Scout(decades=2, share=(sweep + 0.5) / S)
    one, other = (run(engine, scout=short) for engine in ("stacked", "unheard"))
    for ours, theirs in zip(one.go(40).vectors(), other.go(40).vectors(), strict=True):
        assert torch.equal(ours, theirs)


class Bad(Run):
    """Some of its first batches have no finite loss."""

    first = 0

    def backward(self, step: int) -> Tensor:
        assert self.ensemble is not None
        x = torch.cat([batch(step, replica) for replica in range(self.num)])
        x[0] = math.nan if step < self.first else x[0]
        losses = self.ensemble.losses(loss_of, x)
        losses.sum().backward()
        return losses.detach()


@pytest.mark.parametrize(("first", "is_kept"), [(1, True), (2, True), (60, False)])
def test_batch_with_losses_that_are_not_finite_is_not_held_out(first: int, is_kept: bool) -> None:
    one = Bad("stacked", probe=None, scout=SCOUT)
    one.first = first
    trial = one.scheduler._run.progress.trial
    assert trial is not None
    while trial.is_held_out_step:
        one.step()
    assert one.scheduler.last_epoch <= first + KEPT
    assert (trial.held_out is not None) == is_kept
    if is_kept:
        while one.scheduler.is_scouting:
            one.step()
        assert one.scheduler.get_knobs()["lr/group0"] > 1


def test_resumed_scout_holds_out_new_batches_and_ends() -> None:
    one = run().go(KEPT + STEPS + 2)  # in the middle of the second round
    one.scheduler.converge()
    other = run()
    other.bare.load_state_dict(copy.deepcopy(one.bare.state_dict()))
    other.scheduler.load_state_dict(copy.deepcopy(one.scheduler.state_dict()))
    trial = other.scheduler._run.progress.trial
    assert trial is not None
    seen, start_score = trial.search.observations.points, trial.search.start_score
    assert len(seen) == N
    while other.scheduler.is_scouting:
        other.step()
    while one.scheduler.is_scouting:
        one.step()
    assert set(seen) <= set(trial.search.observations.points)  # what was seen counts
    assert trial.search.start_score == start_score
    found = [each.scheduler.get_knobs()["lr/group0"] for each in (one, other)]
    assert 1 / 3 < found[0] / found[1] < 3


def test_scores_of_new_batches_are_shifted_to_those_before_a_resume() -> None:
    """All batches of a resumed run are harder: that must not look like a loss."""
    one = run().go(KEPT)
    trial = one.scheduler._run.progress.trial
    assert trial is not None
    assert trial.held_out is not None
    before = outset_of(trial.held_out)
    trial.search._log.start_scores = [before - 5.0]  # as if the first rounds had easier ones
    one.go(STEPS)
    for replica, point in enumerate(trial.search.observations.points):
        want = float(alone(replica, point.factor)) - 5.0
        assert point.score == pytest.approx(want, rel=1e-9)
    assert trial.search.start_score == before - 5.0


def small(mode: Any = "auto") -> tuple[hdet.StackedReplicas, Any]:
    ensemble = hdet.StackedReplicas(net(), N, mode=mode)
    held = ensemble.hold_out(NUM_HELD_OUT_PARTS, NUM_HELD_OUT_PARTS)
    return ensemble, held


def global_batch(step: int) -> Tensor:
    return torch.cat([batch(step, replica) for replica in range(N)])


def test_held_out_micro_batches_of_a_step_are_averaged() -> None:
    ensemble, held = small()
    x = torch.empty_like(global_batch(0))
    for step in range(KEPT):
        for micro in range(2):
            x.copy_(global_batch(2 * step + micro))  # always the same place
            ensemble.losses(loss_of, x)
        held.end_step()
    parts = [(2 * step, 2 * step + 1, r) for step in range(KEPT) for r in range(N)]
    with torch.no_grad():
        pairs = [[loss_of(net(), batch(step, r)) for step in (a, b)] for a, b, r in parts]
    want = [float(a + b) / 2 for a, b in pairs]
    assert held.rows(NUM_HELD_OUT_PARTS)[0, :NUM_HELD_OUT_PARTS].tolist() == pytest.approx(
        want, rel=1e-12
    )


def test_evaluation_during_a_held_out_step_is_not_recorded() -> None:
    ensemble, held = small()
    model = ensemble.modules(None)[0]
    model.eval()
    ensemble.losses(loss_of, global_batch(0))
    model.train()
    with torch.no_grad():
        ensemble.losses(loss_of, global_batch(0))
    held.end_step()
    assert held.is_empty


def test_recording_is_limited_if_the_loop_never_calls_step() -> None:
    ensemble, held = small()
    for _ in range(MAX_CALLS + 2):
        ensemble.losses(loss_of, global_batch(0))
    assert ensemble._forward.call_recorder is None
    held.end_step()
    assert held.is_empty


def test_loss_that_computes_gradients_can_be_scored() -> None:
    def penalised(model: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = loss_of(model, x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()

    ensemble, held = small("loop")
    for step in range(KEPT):
        ensemble.losses(penalised, global_batch(step))
        held.end_step()
    assert float(held.rows(NUM_HELD_OUT_PARTS)[0, 0]) == pytest.approx(
        float(penalised(net(), batch(0, 0)).detach())
    )


def test_held_out_scores_use_the_autocast_of_the_training_loop() -> None:
    """But what that remembers are casts of other weights, in a loop that calls `step()` inside."""
    seen = []

    def noted(model: Any, x: Tensor) -> Tensor:
        is_on, remembers = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
        seen.append((is_on and torch.get_autocast_dtype("cpu"), remembers))
        return loss_of(model, x)

    ensemble, held = small()
    for step in range(KEPT):
        with torch.autocast("cpu", torch.bfloat16):  # everything here is float64, and stays so
            ensemble.losses(noted, global_batch(step))
        held.end_step()
    seen.clear()
    with torch.autocast("cpu", torch.float16):
        held.rows(NUM_HELD_OUT_PARTS)
    assert set(seen) == {(torch.bfloat16, False)}


def test_search_during_a_run_holds_out_its_own_batches() -> None:
    one = run(scout=None, total=400).go(20)
    weights = one.vectors()
    one.scheduler.scout_again(hdet.Scout(decades=2, steps=STEPS, share=0.3))
    one.go(KEPT)
    trial = one.scheduler._run.progress.trial
    assert trial is not None
    assert trial.held_out is not None
    assert all(map(torch.equal, one.vectors(), weights))
    while one.scheduler.is_scouting:
        one.step()
    assert all(map(torch.equal, one.vectors(), weights))
    assert one.ensemble is not None
    assert one.ensemble._forward.call_recorder is None


def test_default_scout_of_stacked_replicas_needs_no_probe(tmp_path: Path) -> None:
    model = net()
    ensemble = hdet.StackedReplicas(model, 8)
    optimizer = ensemble.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-6))
    base = OneCycleLR(optimizer, 1e-6, total_steps=900)
    scheduler = hdet.HDET(base, model=model, replicas=ensemble, record=tmp_path)
    for step in range(60):
        optimizer.zero_grad()
        losses = ensemble.losses(loss_of, torch.cat([batch(step, r) for r in range(8)]))
        losses.sum().backward()
        optimizer.step()
        scheduler.step(losses)
    assert not scheduler.is_scouting
    assert scheduler.get_knobs()["lr/group0"] > 100
    lines = map(json.loads, (tmp_path / "record.jsonl").read_text().splitlines())
    assert {line["compared_by"] for line in lines if line["event"] == "scout"} == {"held out"}


# Whatever may differ between then and now -----------------------------------------------------


def loop(ensemble: hdet.StackedReplicas, scheduler: Any, optimizer: Any, losses: Any) -> None:
    while scheduler.is_scouting:
        optimizer.zero_grad()
        now = losses(scheduler.last_epoch)
        now.sum().backward()
        optimizer.step()
        scheduler.step(now.detach())


def started(
    model: nn.Module, scout: hdet.Scout = SCOUT, total: int = 120, **options: Any
) -> tuple[hdet.StackedReplicas, Any, Any]:
    ensemble = hdet.StackedReplicas(model, N)
    optimizer = ensemble.optimizer(torch.optim.AdamW(model.parameters(), lr=LR))
    base = OneCycleLR(optimizer, LR, total_steps=total)
    options = {"scout": scout, "guard": None, "sync_every": 10, **options}
    return ensemble, optimizer, hdet.HDET(base, model=model, replicas=ensemble, **options)


@pytest.mark.parametrize("drift", [-3e-3, 3e-3])
def test_loss_that_drifts_over_time_does_not_change_the_choice(drift: float) -> None:
    found = []
    for slope in (0.0, drift):
        ensemble, optimizer, scheduler = started(net())

        def losses(step: int, slope: float = slope, ensemble: Any = ensemble) -> Tensor:
            x = torch.cat([batch(step, r) for r in range(N)])
            added = slope * step  # what a function reads from outside
            now: Tensor = ensemble.losses(lambda model, x: loss_of(model, x) + added, x)
            return now

        loop(ensemble, scheduler, optimizer, losses)
        found.append(scheduler.get_knobs()["lr/group0"])
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_knobs_are_neutral_while_held_out_batches_are_scored() -> None:
    """Smoothing raises every loss: the start is scored with the same smoothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.3)
    knobs = [hdet.lr(), hdet.label_smoothing(criterion)]
    ensemble, optimizer, scheduler = started(model, knobs=knobs, gradients="local")

    def smooth(model: Any, x: Tensor) -> Tensor:
        loss: Tensor = criterion(model(x), (x[:, :2] > 0).long().sum(1))
        return loss

    def losses(step: int) -> Tensor:
        return ensemble.losses(smooth, torch.cat([batch(step, r) for r in range(N)]))

    loop(ensemble, scheduler, optimizer, losses)
    assert scheduler.get_knobs()["lr/group0"] > 1


def test_held_out_scores_use_the_training_flags_of_the_recorded_call() -> None:
    """Also by a loop that evaluates before `step()`, and leaves the model so."""
    found = []
    for leaves in (False, True):
        model = net()
        ensemble, optimizer, scheduler = started(model)
        while scheduler.is_scouting:
            model.train()
            optimizer.zero_grad()
            x = torch.cat([batch(scheduler.last_epoch, r) for r in range(N)])
            losses = ensemble.losses(loss_of, x)
            losses.sum().backward()
            optimizer.step()
            model.train(not leaves)
            scheduler.step(losses.detach())
            assert all(module.training != leaves for module in model.modules())
        found.append(scheduler.get_knobs()["lr/group0"])
    assert found[0] == found[1]


def test_random_batches_are_not_drawn_twice_while_scouting() -> None:
    torch.manual_seed(5)
    ensemble, optimizer, scheduler = started(net(), total=400)
    seen, states = [], []

    def losses(step: int) -> Tensor:
        x = torch.randn(16 * N, 3, dtype=torch.float64)
        seen.append(float(x[0, 0]))
        states.append(torch.get_rng_state())
        return ensemble.losses(loss_of, x)

    loop(ensemble, scheduler, optimizer, losses)
    assert len(set(seen)) == len(seen)
    assert torch.equal(torch.get_rng_state(), states[0])  # as before the first step


def test_after_a_resume_with_losses_only_gains_are_compared() -> None:
    """Batches of another signal lie somewhere else: the first rounds were scored far below."""
    one = run().go(KEPT + STEPS)
    one.scheduler.converge()
    results = copy.deepcopy(one.scheduler.state_dict())
    other = run("unheard")
    other.bare.load_state_dict(one.bare.state_dict())
    other.scheduler.load_state_dict(results)
    trial = other.scheduler._run.progress.trial
    assert trial is not None
    assert trial.compares_gains
    assert trial.compared_by == "losses"
    start_score = trial.search.start_score
    while other.scheduler.is_scouting:
        other.step()
    assert trial.search.start_score == start_score


class Rebinding(nn.Module):
    """It makes a new buffer, and computes with it."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        output: Tensor = self.linear(x) + 0.1 * self.seen
        return output


def test_every_held_out_part_is_scored_with_the_current_buffers() -> None:
    torch.manual_seed(0)
    model = Rebinding().double()
    twin = copy.deepcopy(model)
    ensemble = hdet.StackedReplicas(model, N, mode="loop")
    held = ensemble.hold_out(NUM_HELD_OUT_PARTS, NUM_HELD_OUT_PARTS)
    for step in range(KEPT):
        ensemble.losses(loss_of, global_batch(step))
        held.end_step()
    rows = held.rows(NUM_HELD_OUT_PARTS)
    assert [float(module.seen) for module in ensemble.modules(None)] == [KEPT] * N  # type: ignore[arg-type]
    twin.seen.fill_(KEPT)
    want = scores(twin)
    assert rows[0, :NUM_HELD_OUT_PARTS].tolist() == pytest.approx(want.tolist(), rel=1e-12)


def test_recorded_calls_hold_no_autograd_graph() -> None:
    encoder = nn.Linear(3, 3).double()
    ensemble, held = small()
    for step in range(KEPT):
        ensemble.losses(loss_of, encoder(global_batch(step)))
        held.end_step()
    ((x,), _) = held._steps[0][0].parts
    assert x.grad_fn is None
    assert x.requires_grad
    assert held.rows(NUM_HELD_OUT_PARTS)[:, :NUM_HELD_OUT_PARTS].isfinite().all()


def test_recorded_batches_are_freed_with_their_run() -> None:
    ensemble, held = small()
    kept = weakref.ref(held)
    del held
    assert kept() is None
    ensemble.losses(loss_of, global_batch(0))


def test_dropout_draws_new_masks_for_every_held_out_part() -> None:
    """The luck of a replica must not be the same on all of them: that would look like skill."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).double()
    ensemble = hdet.StackedReplicas(model, 8)
    held = ensemble.hold_out(NUM_HELD_OUT_PARTS, NUM_HELD_OUT_PARTS)
    x = batch(0, 0).repeat(8, 1)  # all parts are the same
    ensemble.losses(loss_of, x)
    held.end_step()
    rows = held.rows(NUM_HELD_OUT_PARTS)[:, :NUM_HELD_OUT_PARTS]
    assert all(len(set(row.tolist())) == NUM_HELD_OUT_PARTS for row in rows)
    again = held.rows(NUM_HELD_OUT_PARTS)[:, :NUM_HELD_OUT_PARTS]
    assert torch.equal(rows, again)  # and no draw is the run's


def test_loss_that_writes_into_its_batch_does_not_change_the_recorded_batch() -> None:
    def writes(model: Any, x: Tensor) -> Tensor:
        return loss_of(model, x.mul_(0.5))

    ensemble, held = small()
    for step in range(KEPT):
        ensemble.losses(writes, global_batch(step))
        held.end_step()
    first = outset_of(held)
    assert [outset_of(held), outset_of(held)] == [first] * 2
    with torch.no_grad():
        parts = [batch(step, r) for step in range(KEPT) for r in range(N)]
        want = torch.stack([writes(net(), part) for part in parts])
    assert first == pytest.approx(float(want.mean()), rel=1e-12)


def test_state_knows_what_scored_the_start_after_any_number_of_resumes() -> None:
    one = run().go(KEPT + STEPS)
    for _ in range(2):
        one.scheduler.converge()
        other = run("unheard")
        other.bare.load_state_dict(one.bare.state_dict())
        other.scheduler.load_state_dict(copy.deepcopy(one.scheduler.state_dict()))
        one = other
        trial = one.scheduler._run.progress.trial
        assert trial is not None
        assert trial.compares_gains


def test_loss_that_cannot_be_repeated_falls_back_to_training_losses() -> None:
    class Once:
        def __init__(self) -> None:
            self.left: Any = None

        def __call__(self, model: Any, x: Tensor) -> Tensor:
            next(self.left)
            return loss_of(model, x)

    once = Once()
    ensemble = hdet.StackedReplicas(net(), N, mode="loop")
    model = ensemble.modules(None)[0]
    optimizer = ensemble.optimizer(torch.optim.AdamW(model.parameters(), lr=LR))
    base = OneCycleLR(optimizer, LR, total_steps=120)
    scheduler = hdet.HDET(base, model=model, replicas=ensemble, scout=SCOUT, guard=None)
    with pytest.warns(UserWarning, match="instead of held-out losses"):
        while scheduler.is_scouting:
            once.left = iter(range(N))
            optimizer.zero_grad()
            losses = ensemble.losses(once, global_batch(scheduler.last_epoch))
            losses.sum().backward()
            optimizer.step()
            scheduler.step(losses.detach())
    assert scheduler.get_knobs()["lr/group0"] != 1


def test_inputs_that_require_gradients_have_them_while_scored() -> None:
    def sloped(model: Any, x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()

    ensemble, held = small("loop")
    for step in range(KEPT):
        ensemble.losses(sloped, global_batch(step).requires_grad_())
        held.end_step()
    with torch.no_grad():
        assert held.rows(NUM_HELD_OUT_PARTS)[:, :NUM_HELD_OUT_PARTS].isfinite().all()


def test_replicas_can_be_copied_while_calls_are_recorded() -> None:
    ensemble, held = small()
    assert copy.deepcopy(ensemble).size == N
    assert held.is_empty
