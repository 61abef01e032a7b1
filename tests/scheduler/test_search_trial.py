"""A search inside a run: replicas train alone, then the run starts from the restored weights."""

import copy
import json
import math
import warnings
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

import hdet
from hdet.lr_search.constants import GUESS_RATIO, MAX_SWEEPS
from hdet.lr_search.estimator import Estimate, SearchContext, estimate
from hdet.lr_search.grids import SweepGrid
from hdet.lr_search.observations import Observation, Observations
from hdet.lr_search.prior import Prior, prior_of
from hdet.lr_search.scout import AllRatesDiverged
from tests.processes import Processes
from tests.small_run import SmallRun, batch, loss_of

N, STEPS, S, LR, DECADES = 4, 8, 120, 0.02, 4
SWEEP = 2 * STEPS
"""The steps of a sweep: two rounds of four learning rates."""
SCOUT = hdet.Scout(decades=DECADES, steps=STEPS)
HELD = torch.randn(32, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(torch.tanh(self.norm(self.up(x))))
        return output


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net().double()


def score(model: Any) -> Tensor:
    return (model(HELD) - HELD.flip(1)).square().mean(1)


class Run(SmallRun):
    """A small run with a scout, by default with a sweep of eight learning rates."""

    def __init__(
        self, engine: str, rank: int = 0, total: int = S, base_lr: float = LR, **options: Any
    ) -> None:
        settings = {"scout": SCOUT, "probe": hdet.Probe(score, tail=0.0), "sync_every": 10}
        settings |= {"controller": None, "spread": 0.0}
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=base_lr)

        def base(optimizer: Any) -> OneCycleLR:
            return OneCycleLR(optimizer, base_lr, total_steps=total)

        super().__init__(engine, rank, N, model, optimizer, base, **{**settings, **options})

    def go(self, steps: int) -> "Run":
        for _ in range(steps):
            self.step()
        return self

    def search(self) -> "Run":
        """Train until the scout has ended."""
        for _ in range(S):
            if self.scheduler.is_scouting:
                self.step()
        assert not self.scheduler.is_scouting
        return self

    def vectors(self) -> list[Tensor]:
        """Return weights and buffers of the replicas of this process."""
        return [
            torch.cat([t.detach().double().flatten() for t in module.state_dict().values()])
            for module in self.modules()
        ]

    def weights(self) -> list[Tensor]:
        return [
            nn.utils.parameters_to_vector(module.parameters()).detach().clone()
            for module in self.modules()
        ]

    def states(self) -> list[int]:
        each = getattr(self.optimizer, "each", [self.optimizer])
        return [len(optimizer.state) for optimizer in each]


def alone(replica: int, factor: float) -> Tensor:
    """Train one model in a plain loop at one learning rate and return its score."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR * factor, betas=(0.95, 0.999))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step, replica)).backward()
        optimizer.step()
    with torch.no_grad():
        return score(model).mean()


def scouted(rank: int, engine: str, folder: Path | None = None) -> dict[str, Any]:
    run = Run(engine, rank, record=folder)
    before = run.vectors()
    lrs = run.scheduler.get_replica_lrs()
    assert run.scheduler.found_lr is None
    run.go(STEPS)
    back = all(map(torch.equal, run.vectors(), before))
    assert run.scheduler.found_lr is None
    run.search()
    after = {
        "lrs": lrs,
        "back": back and all(map(torch.equal, run.vectors(), before)),
        "states": run.states(),
        "scale": run.scheduler.get_knobs()["lr/group0"],
        "found": run.scheduler.found_lr,
        "step": run.scheduler.last_epoch,
    }
    run.go(3)
    alike = run.weights()
    run.go(S - run.scheduler.last_epoch)
    assert run.scheduler.found_lr == after["found"]  # also when the schedule has decayed
    return {**after, "alike": alike, "end": run.weights()}


def results(folder: Path) -> list[dict[str, Any]]:
    """Return the scout events of the record, one for each round."""
    lines = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "scout"]


def usual() -> Prior:
    """The usual learning rate of the small run, in units of the given one."""
    size = sum(parameter.numel() for parameter in net().parameters())
    known = prior_of("AdamW", num_parameters=size)
    assert known is not None
    return known._replace(mean=known.mean - math.log10(LR))


def factors_of_round(number: int, lr: float = LR) -> list[float]:
    """The factors of the replicas in a round of the first sweep."""
    grid = SweepGrid(DECADES, N, usual().mean + math.log10(LR / lr))
    return [grid.factor(place) for place in grid.places(0, number)]


def expected_of(points: list[Observation], context: SearchContext) -> Estimate:
    with torch.no_grad():
        start = float(score(net()).mean())
    return estimate(Observations(sorted(points), start), context)


def on(processes: Processes, engine: str, *arguments: Any) -> list[dict[str, Any]]:
    if engine == "processes":
        return processes(N, scouted, engine, *arguments)
    return [scouted(0, engine, *arguments)]


@pytest.mark.parametrize("engine", ["stacked", "processes"])
def test_search_trains_replicas_alone_then_restores_the_start_and_sets_the_scale(
    engine: str, processes: Processes, tmp_path: Path
) -> None:
    answers = on(processes, engine, tmp_path)
    factors = factors_of_round(0)
    for answer in answers:
        assert answer["lrs"] == [[pytest.approx(LR * factor)] for factor in factors]
        assert answer["back"]
        assert set(answer["states"]) == {0}
        assert answer["step"] == SWEEP
        assert answer["scale"] == answers[0]["scale"]
        assert answer["found"] == pytest.approx(LR * answer["scale"], rel=1e-12)
    # After the search gradients are shared: with one learning rate all weights stay equal.
    first, *others = [vector for answer in answers for vector in answer["alike"]]
    assert len(others) == N - 1
    assert all(torch.equal(first, other) for other in others)
    begun, line = results(tmp_path)
    want = [float(alone(replica, factor)) for replica, factor in enumerate(factors)]
    assert [point["score"] for point in begun["points"]] == pytest.approx(want, rel=1e-9)
    assert begun["factor"] is None
    points = [Observation(*point.values()) for point in line["points"]]
    assert len(points) == 2 * N
    found = expected_of(points, SearchContext(usual(), peak=S * LR / sum(one_cycle(S)[:S])))
    assert answers[0]["scale"] == pytest.approx(found.factor, rel=1e-6)
    assert (line["factor"], line["factor_reason"]) == (answers[0]["scale"], found.text)
    assert line["within"] == pytest.approx(found.stated_within)
    assert line["shares"] == pytest.approx(found.shares)


def one_cycle(steps: int) -> list[float]:
    """Return the learning rates of OneCycleLR, one for each step and one after the end."""
    plain = torch.optim.AdamW(net().parameters(), lr=LR)
    schedule = OneCycleLR(plain, LR, total_steps=steps)
    course = [float(schedule.get_last_lr()[0])]
    for _ in range(steps):
        plain.step()
        schedule.step()
        course.append(float(schedule.get_last_lr()[0]))
    return course


class Only:
    """A user-defined schedule that process 0 cannot preview to the end."""

    def __init__(self, rank: int) -> None:
        self._known = 20 if rank == 0 else S

    def factor(self, step: int) -> float:
        if step > self._known:
            raise LookupError("not known yet")
        return 1 - step / S


def disagreeing(rank: int) -> float:
    model = net()
    run = SmallRun(
        "processes",
        rank,
        N,
        model,
        torch.optim.AdamW(model.parameters(), lr=LR),
        lambda optimizer: LambdaLR(optimizer, Only(rank).factor),
        scout=SCOUT,
        probe=hdet.Probe(score, tail=0.0),
        controller=None,
        spread=0.0,
        total_steps=S,
        sync_every=10,
    )
    while run.scheduler.is_scouting:
        run.step()
    return run.scheduler.get_knobs()["lr/group0"]


def test_all_processes_choose_the_same_scale_when_some_cannot_preview_the_schedule(
    processes: Processes,
) -> None:
    assert len(set(processes(N, disagreeing))) == 1


def test_run_with_a_search_ends_with_equal_weights_on_both_engines(processes: Processes) -> None:
    (stacked,), each = on(processes, "stacked"), on(processes, "processes")
    assert stacked["scale"] == pytest.approx(each[0]["scale"], rel=1e-9)
    for ours, theirs in zip(stacked["end"], each, strict=True):
        torch.testing.assert_close(ours, theirs["end"][0], rtol=1e-6, atol=1e-8)


def test_schedule_is_compressed_into_the_steps_after_the_search() -> None:
    run = Run("stacked").search()
    scale, course = run.scheduler.get_knobs()["lr/group0"], one_cycle(S)
    left = S - run.scheduler.last_epoch
    for step in range(left):
        share = course[round(step * S / left)]
        assert run.scheduler.get_base_lr() == [pytest.approx(scale * share)]
        run.go(1)
    assert run.scheduler.get_base_lr() == [pytest.approx(scale * course[S])]


def mean_after_a_scout(rise: float) -> float:
    """Return the mean learning rate after the search; the schedule rises to `1 + rise` times LR."""
    model = net()
    given: Any = {"scout": SCOUT, "probe": hdet.Probe(score, tail=0.0), "total_steps": S}
    run = SmallRun(
        "stacked",
        0,
        N,
        model,
        torch.optim.AdamW(model.parameters(), lr=LR),
        lambda optimizer: LambdaLR(optimizer, lambda step: 1 + rise * min(step / 40, 1.0)),
        **{"controller": None, "spread": 0.0, "sync_every": 10, **given},
    )
    lrs = []
    for _ in range(S):
        if not run.scheduler.is_scouting:
            lrs.append(run.scheduler.get_base_lr()[0])
        run.step()
    return fmean(lrs)


def test_mean_lr_after_a_search_does_not_depend_on_how_far_the_schedule_rises() -> None:
    assert mean_after_a_scout(7.0) == pytest.approx(mean_after_a_scout(0.0), rel=0.05)


@pytest.mark.parametrize("rise", [1.0, 200.0])
def test_peak_of_a_rising_schedule_stays_below_half_the_divergence_threshold(
    rise: float, tmp_path: Path
) -> None:
    """The limit applies to the highest learning rate of the schedule, not to the given one."""
    model = net()
    run = SmallRun(
        "stacked",
        0,
        N,
        model,
        torch.optim.AdamW(model.parameters(), lr=LR),
        lambda optimizer: LambdaLR(optimizer, lambda step: rise if step == S // 2 else 1.0),
        controller=None,
        spread=0.0,
        sync_every=10,
        total_steps=S,
        scout=hdet.Scout(decades=6, steps=STEPS),
        probe=score,
        record=tmp_path,
    )
    while run.scheduler.is_scouting:
        run.step()
    line = results(tmp_path)[-1]
    assert line["factor"] * rise <= line["divergence"] / 2 * 1.0001
    assert line["factor"] * rise > line["divergence"] / 100


def test_search_without_a_probe_scores_the_losses_of_the_second_half_of_a_round(
    tmp_path: Path,
) -> None:
    Run("unheard", probe=None, record=tmp_path).go(STEPS)
    (line,) = results(tmp_path)
    for replica, point in enumerate(line["points"]):
        model = net()
        betas = (0.95, 0.999)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR * point["factor"], betas=betas)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, batch(step, replica))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert point["score"] == pytest.approx(fmean(losses[STEPS // 2 :]), rel=1e-9)


def test_checkpoint_in_mid_search_holds_the_start_weights_and_resumes_equally() -> None:
    run = Run("stacked")
    before = run.vectors()
    run.go(3)
    with run.scheduler.consensus():
        assert all(map(torch.equal, run.vectors(), before))
    assert not torch.equal(run.vectors()[0], run.vectors()[1])
    run.scheduler.converge()
    assert all(map(torch.equal, run.vectors(), before))
    saved = copy.deepcopy((run.bare.state_dict(), run.scheduler.state_dict()))
    other = Run("stacked")
    other.bare.load_state_dict(saved[0])
    other.scheduler.load_state_dict(saved[1])
    for one in (run, other):
        one.search()
        assert one.scheduler.last_epoch == 3 + SWEEP
    assert run.scheduler.get_knobs() == other.scheduler.get_knobs()
    for ours, theirs in zip(run.go(20).vectors(), other.go(20).vectors(), strict=True):
        assert torch.equal(ours, theirs)


def test_search_scored_by_losses_resumes_like_the_uninterrupted_search() -> None:
    options: Any = {"scout": hdet.Scout(decades=4, steps=6, share=0.5), "probe": None}
    run = Run("unheard", **options).go(6 + 3)  # in the middle of the second round
    run.scheduler.converge()
    other = Run("unheard", **options)
    other.bare.load_state_dict(copy.deepcopy(run.bare.state_dict()))
    other.scheduler.load_state_dict(copy.deepcopy(run.scheduler.state_dict()))
    for ours, theirs in zip(run.go(40).vectors(), other.go(40).vectors(), strict=True):
        assert torch.equal(ours, theirs)
    assert run.scheduler.get_knobs() == other.scheduler.get_knobs()


class Counting(Net):
    """A model whose forward replaces a buffer instead of changing it in place."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return super().forward(x)


def looked_at(rank: int) -> bool:
    model = Counting().double()
    model.load_state_dict(net().state_dict(), strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = hdet.HDET(
        OneCycleLR(optimizer, LR, total_steps=S),
        model=model,
        replicas=hdet.ProcessReplicas(keep_out=["down.*"]),
        scout=hdet.Scout(decades=2, steps=STEPS),
        gradients="local",
        guard=None,
    )
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step, rank))
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
    before = copy.deepcopy(model.state_dict())
    with scheduler.consensus(), torch.no_grad():
        assert not torch.equal(model.up.weight, before["up.weight"])
        model(HELD)
    return all(map(torch.equal, model.state_dict().values(), before.values()))


def test_consensus_in_mid_search_restores_kept_out_parameters_and_replaced_buffers(
    processes: Processes,
) -> None:
    """`keep_out` parameters are not averaged. The forward replaces a buffer in the consensus."""
    assert processes(2, looked_at) == [True] * 2


@pytest.mark.parametrize("made", [STEPS, SWEEP])
def test_resumed_search_does_not_repeat_finished_rounds(made: int) -> None:
    whole, cut = Run("stacked").search(), Run("stacked").go(made)
    cut.scheduler.converge()
    other = Run("stacked")
    other.bare.load_state_dict(cut.bare.state_dict())
    other.scheduler.load_state_dict(cut.scheduler.state_dict())
    other.search()
    assert other.scheduler.last_epoch == whole.scheduler.last_epoch
    assert other.scheduler.get_knobs() == whole.scheduler.get_knobs()
    assert other.scheduler.found_lr == whole.scheduler.found_lr
    assert other.scheduler.get_knobs()["lr/group0"] != 1.0


def test_found_lr_of_a_run_without_a_search_is_none() -> None:
    run = Run("stacked", scout=None).go(3)
    assert run.scheduler.found_lr is None
    old = {k: v for k, v in run.scheduler.state_dict().items() if k != "found_lr"}
    other = Run("stacked", scout=None)
    other.scheduler.load_state_dict(old)
    assert other.scheduler.found_lr is None


@pytest.mark.filterwarnings("ignore:the scout was interrupted by a `converge")
def test_frequent_checkpoints_end_the_search_and_let_the_run_train() -> None:
    run = Run("stacked")
    before = run.weights()
    for _ in range(10):
        run.go(5)
        run.scheduler.converge()
        lrs = {group["lr"] for one in run.optimizer.each for group in one.param_groups}
        assert (run.scheduler._run.progress.trial is None) == (len(lrs) == 1)
    assert run.scheduler._run.progress.trial is None
    assert not torch.equal(run.weights()[0], before[0])


def test_run_saved_without_a_scout_starts_no_search_when_resumed_with_a_scout() -> None:
    run = Run("stacked", scout=None).go(20)
    run.scheduler.converge()
    other = Run("stacked")
    other.scheduler.load_state_dict(run.scheduler.state_dict())
    assert other.scheduler._run.progress.trial is None


def test_run_resumed_after_its_search_does_not_search_again() -> None:
    run = Run("stacked").go(SWEEP + 5)
    assert not run.scheduler.is_scouting
    run.scheduler.converge()
    other = Run("stacked")
    other.bare.load_state_dict(run.bare.state_dict())
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    other.scheduler.load_state_dict(run.scheduler.state_dict())
    assert other.scheduler.get_base_lr() == run.scheduler.get_base_lr()
    assert other.scheduler.found_lr == run.scheduler.found_lr
    for ours, theirs in zip(run.go(30).vectors(), other.go(30).vectors(), strict=True):
        assert torch.equal(ours, theirs)


def test_run_resumed_with_more_total_steps_stretches_the_rest_of_its_schedule() -> None:
    run = Run("stacked").go(60)
    run.scheduler.converge()
    other = Run("stacked", total=2 * S)
    other.scheduler.load_state_dict(run.scheduler.state_dict())
    assert other.scheduler._run.clock.base_step == run.scheduler._run.clock.base_step
    other.go(2 * S - 60)
    assert other.scheduler._run.clock.base_step == 2 * S


def loaded() -> tuple[Run, list[Tensor]]:
    """Return a run that loaded weights and buffers after its creation, and those values."""
    run = Run("stacked")
    run.bare.load_state_dict({name: 0.5 * value for name, value in net().state_dict().items()})
    return run, run.vectors()


def test_search_restores_weights_that_were_loaded_after_the_scheduler_was_created() -> None:
    run, before = loaded()
    run.go(STEPS)
    assert all(map(torch.equal, run.vectors(), before))


def test_search_restores_loaded_weights_after_a_consensus_and_a_skipped_first_step() -> None:
    run, before = loaded()
    with run.scheduler.consensus():
        assert all(map(torch.equal, run.vectors(), before))
    run.scheduler.converge()
    assert all(map(torch.equal, run.vectors(), before))
    weights = run.weights()
    for step in range(STEPS):
        losses = run.backward(step)
        if step:  # as GradScaler does
            run.optimizer.step()
        run.optimizer.zero_grad()
        run.scheduler.step(losses)
    assert all(map(torch.equal, run.weights(), weights))


def test_search_restores_an_optimizer_state_loaded_after_the_scheduler_was_created() -> None:
    warm, run = Run("stacked", scout=None).go(7), Run("stacked")
    run.optimizer.load_state_dict(warm.optimizer.state_dict())
    run.go(STEPS)
    first = next(iter(run.optimizer.each[0].state.values()))
    assert int(first["step"]) == 7


def test_other_knobs_have_no_spread_during_a_search() -> None:
    knobs = [hdet.lr(), hdet.weight_decay(spread=0.5)]
    run = Run("stacked", knobs=knobs, controller=hdet.Tracker(), design="latin")
    assert {g["weight_decay"] for one in run.optimizer.each for g in one.param_groups} == {0.01}
    run.search()
    assert len({g["weight_decay"] for one in run.optimizer.each for g in one.param_groups}) == N


def test_replicas_stay_equal_after_a_search_when_the_loop_calls_model_zero_grad() -> None:
    run = Run("stacked")
    for step in range(SWEEP + 3):
        run.bare.zero_grad()
        losses = run.backward(step)
        run.optimizer.step()
        run.scheduler.step(losses)
    first, *others = run.weights()
    assert all(torch.equal(first, other) for other in others)


def test_error_in_the_probe_of_a_search_restores_weights_and_learning_rates() -> None:
    calls = []

    def fails(model: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("of its own")
        return score(model)

    run = Run("stacked", probe=hdet.Probe(fails, tail=0.0))
    before = run.vectors()
    with pytest.raises(KeyError):
        run.go(STEPS)
    assert all(map(torch.equal, run.vectors(), before))
    rates = {group["lr"] for one in run.optimizer.each for group in one.param_groups}
    assert rates == set(run.scheduler.get_base_lr())  # no learning rate of the trial is left
    run.go(3)
    assert run.scheduler.get_knobs()["lr/group0"] == 1.0


def test_search_scores_the_common_start_weights_once() -> None:
    calls = []

    def progress_state(model: Any) -> Tensor:
        calls.append(1)
        return score(model)

    Run("stacked", probe=hdet.Probe(progress_state, tail=0.0)).search()
    assert len(calls) == 2 * N + 1


def test_scout_without_rewind_continues_from_the_best_replica(tmp_path: Path) -> None:
    scout = hdet.Scout(decades=DECADES, steps=STEPS, rewind=False)
    model = net()
    run = SmallRun(
        "stacked",
        0,
        6,  # all learning rates of a sweep are tried in one round
        model,
        torch.optim.AdamW(model.parameters(), lr=LR),
        lambda optimizer: OneCycleLR(optimizer, LR, total_steps=S),
        scout=scout,
        probe=hdet.Probe(score, tail=0.0),
        controller=None,
        spread=0.0,
        sync_every=10,
        record=tmp_path,
    )
    while run.scheduler.is_scouting:
        run.step()
    line = results(tmp_path)[-1]
    best = min(point["score"] for point in line["points"])
    for module in run.modules():
        with torch.no_grad():  # in training mode, like the probe
            assert float(score(module).mean()) == pytest.approx(best, rel=1e-9)
    assert {len(optimizer.state) for optimizer in run.optimizer.each} == {6}


def test_scout_without_rewind_restores_the_start_if_an_earlier_round_was_the_best() -> None:
    scout = hdet.Scout(decades=DECADES, steps=STEPS, rewind=False)
    run = Run("stacked", scout=scout)
    before = run.vectors()
    trial = run.scheduler._run.progress.trial
    assert trial is not None
    run.search()
    points = trial.search.observations.points
    best = min((point.score, point.factor) for point in points if point.score is not None)[1]
    was_last = best in trial.search.last_factors
    assert all(map(torch.equal, run.vectors(), before)) != was_last


def test_search_restores_the_random_state_of_torch() -> None:
    torch.manual_seed(11)
    run = Run("stacked")
    before = torch.get_rng_state()
    for _ in range(STEPS):
        torch.rand(3)
        run.go(1)
    draws = torch.rand(2)
    torch.set_rng_state(before)
    torch.rand(3)
    assert torch.equal(draws, torch.rand(2))


def test_search_restores_weights_when_every_learning_rate_diverges() -> None:
    run = Run("stacked", probe=lambda model: score(model) * float("nan"))
    before = run.vectors()
    with pytest.raises(AllRatesDiverged, match="diverges at every learning rate"):
        run.go(S)
    assert run.scheduler.last_epoch == MAX_SWEEPS * SWEEP
    assert all(map(torch.equal, run.vectors(), before))
    run.go(3)  # with the learning rate that was given
    assert run.scheduler.get_knobs()["lr/group0"] == 1.0


def test_bad_scout_settings_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"`scout` must be hdet.Scout\(\), None, 'auto' or .* 4"):
        Run("stacked", scout=4)
    with pytest.raises(ValueError, match=r"`scout` needs hdet\.lr"):
        Run("stacked", knobs=[hdet.weight_decay()])
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="`scout` needs `model=`, got None"):
        hdet.HDET(OneCycleLR(optimizer, 0.1, total_steps=10), scout=SCOUT, preset="paper")
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(net())
    with pytest.raises(ValueError, match="does not support SyncBatchNorm"):
        hdet.HDET(
            OneCycleLR(torch.optim.SGD(synchronised.parameters()), 0.1, total_steps=10),
            model=synchronised,
            scout=SCOUT,
            preset="paper",
        )
    with pytest.raises(ValueError, match="does not support ReduceLROnPlateau"):
        hdet.HDET(ReduceLROnPlateau(optimizer), model=model, scout=SCOUT, preset="paper")


def looked_again(rank: int, engine: str, folder: Path | None = None) -> dict[str, Any]:
    """Train at a learning rate a thousand times too low, then call `scout_again`."""
    run = Run(engine, rank, 300, scout=None, record=folder, base_lr=LR / 1000, guard=hdet.Guard())
    run.go(85)
    run.scheduler.scout_again(hdet.Scout(share=0.4))
    before = run.vectors()
    assert run.scheduler.is_scouting
    for _ in range(100):
        if run.scheduler.is_scouting:
            run.step()
    back = all(map(torch.equal, run.vectors(), before))
    scale = run.scheduler.get_knobs()["lr/group0"]
    run.go(300 - run.scheduler.last_epoch)
    return {"back": back, "scale": scale, "end": run.weights(), "lr": run.scheduler.get_last_lr()}


def test_scout_again_raises_a_too_low_learning_rate_in_mid_run(
    processes: Processes, tmp_path: Path
) -> None:
    alone = looked_again(0, "stacked", tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    results = [line for line in lines if line["event"] == "scout"][-1]
    assert results["step"] > 85
    assert results["factor"] == pytest.approx(alone["scale"])
    assert alone["scale"] > 20
    assert alone["back"]
    assert alone["lr"] == pytest.approx([0.0], abs=1e-5)  # the schedule has ended with the run
    for answer in processes(N, looked_again, "processes"):
        assert answer["back"]
        torch.testing.assert_close(answer["end"][0], alone["end"][0], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("base_lr", [LR / 100, LR, 30 * LR])
def test_scout_again_searches_around_the_mean_that_the_rest_of_the_run_would_train_with(
    base_lr: float,
) -> None:
    """The run has come far with its own learning rate. What is usual does not count."""
    run = Run("stacked", total=600, base_lr=base_lr, scout=None, guard=None).go(300)
    (now,), course = run.scheduler.get_last_lr(), one_cycle(600)
    assert now == pytest.approx(course[300] / LR * base_lr)
    run.scheduler.scout_again(SCOUT)
    middle = fmean(course[300:600]) / LR * base_lr
    grid = SweepGrid(DECADES, N, math.log10(middle))
    expected = [grid.factor(place) for place in grid.places(0, 0)]
    assert [lrs[0] for lrs in run.scheduler.get_replica_lrs()] == pytest.approx(expected)


def test_scout_again_that_sees_no_difference_goes_on_with_nearly_the_present_lr(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"probe": lambda model: 0 * score(model) + 1, "record": tmp_path}
    run = Run("stacked", total=600, base_lr=LR / 1000, scout=None, guard=None, **options).go(300)
    (now,) = run.scheduler.get_last_lr()
    run.scheduler.scout_again(SCOUT)
    run.search()
    line = results(tmp_path)[-1]
    assert line["reference_lrs"] == {"group0": pytest.approx(now)}
    assert line["shares"]["prior"] > 0.9
    assert 1 / GUESS_RATIO < line["factor"] <= 1
    assert run.scheduler.get_knobs()["lr/group0"] == pytest.approx(line["factor"])


def test_found_lr_of_scout_again_is_the_peak_of_the_schedule() -> None:
    run = Run("stacked", total=600, guard=None).go(300)
    run.scheduler.scout_again(SCOUT)
    run.search()
    scale = run.scheduler.get_knobs()["lr/group0"]
    assert run.scheduler.found_lr == pytest.approx(LR * scale)


def test_search_of_scout_again_resumes_with_its_own_settings() -> None:
    asked = hdet.Scout(decades=2, steps=STEPS, share=0.2)
    run = Run("stacked", total=600, scout=None).go(100)
    run.scheduler.scout_again(asked)
    run.go(3)
    run.scheduler.converge()
    results, weights = run.scheduler.state_dict(), run.modules()[0].state_dict()
    other = Run("stacked", total=600, scout=None)
    for module in other.modules():
        module.load_state_dict(weights)
    other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    other.scheduler.load_state_dict(json.loads(json.dumps(results)))
    for each in (run, other):
        assert each.scheduler.get_replica_lrs() == run.scheduler.get_replica_lrs()
    for _ in range(100):
        for each in (run, other):
            if each.scheduler.is_scouting:
                each.step()
    assert other.scheduler.last_epoch == run.scheduler.last_epoch < 200
    assert other.scheduler.get_knobs() == run.scheduler.get_knobs()


def test_scout_again_says_why_a_search_is_impossible() -> None:
    run = Run("stacked", total=600)
    with pytest.raises(RuntimeError, match="while the scout is running"):
        run.scheduler.scout_again()
    run.go(590)
    weights = run.vectors()
    with pytest.raises(ValueError, match="scout"):
        run.scheduler.scout_again(hdet.Scout())  # ten steps are left
    assert all(map(torch.equal, run.vectors(), weights))
    with pytest.raises(RuntimeError, match="does not support ReduceLROnPlateau"):
        model = net()
        plateau = ReduceLROnPlateau(torch.optim.SGD(model.parameters(), lr=0.1))
        hdet.HDET(plateau, model=model, scout=None, preset="paper").scout_again()


# Bad batches -------------------------------------------------------------------------------------


class Struck(Run):
    """A run in which the replicas `who` get a batch without finite loss at step `at`."""

    def __init__(self, engine: str, rank: int, at: int, who: set[int], **options: Any) -> None:
        super().__init__(engine, rank, **options)
        self._at, self._who = at, who

    def backward(self, step: int) -> Tensor:
        if self.ensemble is not None:
            parts = [self._seen(step, replica) for replica in range(self.num)]
            losses = self.ensemble.losses(loss_of, torch.cat(parts))
        else:
            losses = loss_of(self.model, self._seen(step, self.rank))
        losses.sum().backward()
        return losses.detach()

    def _seen(self, step: int, replica: int) -> Tensor:
        bad = step == self._at and replica in self._who
        return batch(step, replica) * (math.nan if bad else 1.0)


def struck(rank: int, engine: str, at: int, who: set[int], probe: bool) -> float:
    given: Any = {"scout": hdet.Scout(decades=3, steps=STEPS, share=0.5)}
    given |= {} if probe else {"probe": None}
    run = Struck(engine, rank, at, who, **given)
    with warnings.catch_warnings(record=True) as results:
        warnings.simplefilter("always")
        while run.scheduler.is_scouting:
            run.step()
    everyone = len(who) == N
    assert any("is repeated" in str(one.message) for one in results) == (everyone and rank == 0)
    return run.scheduler.get_knobs()["lr/group0"]


@pytest.mark.parametrize(
    ("at", "who", "probe"),
    [
        (5, {1}, True),
        (1, {0}, False),
        (0, set(range(N)), False),
        (STEPS - 1, set(range(N)), True),
    ],
)
def test_bad_batch_in_a_search_does_not_distort_the_chosen_learning_rate(
    at: int, who: set[int], probe: bool
) -> None:
    engine = "stacked" if probe else "unheard"
    clean = struck(0, engine, -1, {1}, probe)
    found = struck(0, engine, at, who, probe)
    assert 1 / 3 < found / clean < 3


def test_bad_batch_in_a_search_does_not_distort_the_chosen_lr_on_processes(
    processes: Processes,
) -> None:
    clean = struck(0, "stacked", -1, {1}, True)
    for who in ({1}, set(range(N))):
        (found,) = set(processes(N, struck, "processes", 5, who, True))
        assert 1 / 3 < found / clean < 3


def accumulated(rank: int, writes: bool) -> float:
    """Search in a loop that sets the gradient sync of DDP, as gradient accumulation does."""
    run = Run("processes", rank)
    while run.scheduler.is_scouting:
        if writes:
            setattr(run.model, "require_backward_grad_sync", True)  # noqa: B010 (it is no module)
        run.step()
    return float(run.scheduler.get_knobs()["lr/group0"])


def test_loop_that_sets_gradient_sync_of_ddp_does_not_change_the_search(
    processes: Processes,
) -> None:
    assert processes(N, accumulated, True) == processes(N, accumulated, False)


class Branches(nn.Module):
    """A model with two heads; each forward uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        output: Tensor = self.heads[which](x)
        return output


def ddp_of(make: Any, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = DistributedDataParallel(make().double(), **options)
    return model, torch.optim.AdamW(model.parameters(), lr=LR)


def apart(model: nn.Module) -> float:
    """Return the largest difference between the gradients of the processes."""
    own = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    rows = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return max(float((row - own).abs().max()) for row in rows)


def branched(rank: int) -> tuple[bool, float]:
    model, optimizer = ddp_of(Branches, find_unused_parameters=True)
    base = OneCycleLR(optimizer, LR, total_steps=S)
    scheduler = hdet.HDET(base, model=model, scout=SCOUT, controller=None, spread=0.0)
    for step in range(S):
        optimizer.zero_grad()
        x = batch(step, rank)
        loss = (model(x, step % 2) - x).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
    return scheduler.is_scouting, apart(model)


def test_ddp_model_with_alternating_heads_shares_gradients_after_a_search(
    processes: Processes,
) -> None:
    assert processes(2, branched) == [(False, 0.0)] * 2


def twice(rank: int) -> list[float]:
    """Use schedulers with local and then with shared gradients on the same DDP module."""
    model, optimizer = ddp_of(lambda: nn.Linear(3, 3))
    found = []
    for gradients in ("local", "shared"):
        base = OneCycleLR(optimizer, LR, total_steps=S)
        given: Any = {"gradients": gradients, "scout": None, "guard": None, "controller": None}
        scheduler = hdet.HDET(base, model=model, **given)
        for step in range(3):
            optimizer.zero_grad()
            x = batch(step, rank)
            loss = (model(x) - x).square().mean()
            loss.backward()
            found.append(apart(model))
            optimizer.step()
            scheduler.step(loss.detach())
        scheduler.converge()
        del scheduler
    return found


def test_ddp_shares_gradients_again_after_a_scheduler_with_local_gradients(
    processes: Processes,
) -> None:
    for found in processes(2, twice):
        assert min(found[:3]) > 0
        assert max(found[3:]) == 0


def bare(rank: int) -> str:
    """Give the module inside DDP: the scout cannot switch off the gradient sync of its wrapper."""
    model, optimizer = ddp_of(lambda: nn.Linear(3, 3))
    base = OneCycleLR(optimizer, LR, total_steps=S)
    with pytest.raises(ValueError, match="needs a model wrapped in DDP or FSDP2") as results:
        hdet.HDET(base, model=model.module, scout=SCOUT, controller=None, spread=0.0)
    return str(results.value)


def test_scout_rejects_the_bare_module_inside_ddp(processes: Processes) -> None:
    assert "Pass the wrapped model" in processes(2, bare)[0]


def test_search_resumed_with_fewer_replicas_ends_when_too_few_steps_are_left() -> None:
    def run_of(num: int) -> SmallRun:
        model = net()
        return SmallRun(
            "stacked",
            0,
            num,
            model,
            torch.optim.AdamW(model.parameters(), lr=LR),
            lambda optimizer: OneCycleLR(optimizer, LR, total_steps=400),
            controller=None,
            spread=0.0,
            sync_every=10,
        )

    many, few = run_of(8), run_of(2)
    for _ in range(200):
        many.step()
    many.scheduler.scout_again()
    many.step()
    many.scheduler.converge()
    with pytest.warns(UserWarning, match="scout stopped: .* The given learning rate is kept"):
        few.scheduler.load_state_dict(many.scheduler.state_dict())
    assert not few.scheduler.is_scouting
    few.step()
