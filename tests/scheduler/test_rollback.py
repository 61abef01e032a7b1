"""Rollback: after a failure the guard restores the best weights and caps the learning rate."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR

import hdet
from hdet.control.guard_monitor import ABSTENTION, NEW_DATA_AFTER
from hdet.replicas.protocol import SingleReplica
from hdet.weights.replica_weights import ReplicaWeights
from tests.processes import Processes
from tests.small_run import SmallRun, batch, loss_of

T, N = 4, 3


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


class Run(SmallRun):
    """A run whose weights are scaled at given steps, like damage by a bad batch."""

    def __init__(self, engine: str, rank: int = 0, num: int = N, **options: Any) -> None:
        settings = {"guard": hdet.Guard(), "spread": 0.1, "controller": None, "sync_every": T}
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

        def base(optimizer: Any) -> ConstantLR:
            return ConstantLR(optimizer, factor=1.0)

        super().__init__(engine, rank, num, model, optimizer, base, **{**settings, **options})

    def strike(self, by: float) -> None:
        with torch.no_grad():
            for module in self.modules():
                for parameter in module.parameters():
                    parameter.mul_(by)

    def go(self, steps: int, strikes: dict[int, float] | None = None) -> "Run":
        for _ in range(steps):
            if by := (strikes or {}).get(self.scheduler.last_epoch):
                self.strike(by)
            self.step()
        return self

    def state(self) -> list[Tensor]:
        """Return weights, buffers and optimizer states of the replicas of this process."""
        each = getattr(self.optimizer, "each", [self.optimizer])
        tensors = [t for module in self.modules() for t in module.state_dict().values()]
        moments = [
            value
            for optimizer in each
            for group in optimizer.param_groups
            for p in group["params"]
            for value in optimizer.state[p].values()
        ]
        return [tensor.detach().clone() for tensor in [*tensors, *moments]]


def results(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "record.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == "guard"]


def guarded(rank: int, engine: str, strike: float, folder: Path | None) -> dict[str, Any]:
    run = Run(engine, rank, record=folder).go(5 * T)
    good = run.state()
    run.go(T, {5 * T + 1: strike})
    back = all(map(torch.equal, run.state(), good))
    spared = run.scheduler.get_knobs()["lr/group0"]
    run.go(T, {6 * T + 1: strike})
    back = back and all(map(torch.equal, run.state(), good))
    scale = run.scheduler.get_knobs()["lr/group0"]
    run.go(4 * T)
    with torch.no_grad():
        loss = float(loss_of(run.bare, batch(0, 0)))
    scales = (spared, scale, run.scheduler.get_knobs()["lr/group0"])
    return {"back": back, "scales": scales, "loss": loss}


@pytest.mark.parametrize("strike", [30.0, math.nan])
@pytest.mark.parametrize("engine", ["one", "stacked", "processes"])
def test_guard_restores_the_last_good_weights_on_all_replicas_after_a_spike(
    engine: str, strike: float, processes: Processes, tmp_path: Path
) -> None:
    arguments = (engine, strike, tmp_path)
    answers = processes(N, guarded, *arguments) if engine == "processes" else None
    for answer in answers or [guarded(0, *arguments)]:
        assert answer["back"]
        assert answer["scales"] == (1.0, 0.25, 0.25)
        assert answer["loss"] < 1.0
    lines = results(tmp_path)
    rows = [(line["step"], line["back_to"], line["factor"]) for line in lines]
    assert rows == [(6 * T, 5 * T, 1.0), (7 * T, 5 * T, 0.25)]
    want = "no replica has finite weights and a finite loss" if math.isnan(strike) else "mean loss "
    assert all(line["reason"].startswith(want) for line in lines)


def test_nan_weights_without_a_guard_raise_replicas_lost() -> None:
    with pytest.raises(hdet.ReplicasLost):
        Run("stacked", guard=None).go(6 * T, {5 * T + 1: math.nan})


def test_guard_restores_the_start_weights_after_a_spike_in_the_first_cycle(tmp_path: Path) -> None:
    run = Run("stacked", record=tmp_path)
    before = [p.detach().clone() for module in run.modules() for p in module.parameters()]
    run.go(T, {1: 30.0})
    after = [p.detach() for module in run.modules() for p in module.parameters()]
    assert all(map(torch.equal, after, before))
    (line,) = results(tmp_path)
    assert line["back_to"] == 0


def test_guard_with_offload_restores_the_same_state_as_without_offload() -> None:
    here, there = Run("stacked"), Run("stacked", guard=hdet.Guard(offload=True))
    for run in (here, there):
        run.go(8 * T, {5 * T + 1: 30.0})
    assert all(map(torch.equal, here.state(), there.state()))


def test_guard_lowers_the_lr_more_at_each_retry_and_then_stops_with_good_weights(
    tmp_path: Path,
) -> None:
    run = Run("stacked", guard=hdet.Guard(retries=2), record=tmp_path).go(5 * T)
    good = run.state()
    strikes = {5 * T + 1 + T * turn: 30.0 for turn in range(3)}
    run.go(2 * T, strikes)
    assert run.scheduler.get_knobs()["lr/group0"] == 0.25
    with pytest.raises(hdet.ReplicasLost, match=r"2 times in a row.*weights of step 20"):
        run.go(T, strikes)
    assert all(map(torch.equal, run.state(), good))
    assert [line["factor"] for line in results(tmp_path)] == [1.0, 0.25, None]
    rates = [[group["lr"] for group in one.param_groups] for one in run.optimizer.each]
    assert rates == run.scheduler.get_replica_lrs()  # the lowered learning rates
    assert results(tmp_path)[-1]["reason"].startswith("stopped: mean loss")


def test_guard_changes_nothing_in_a_run_without_spikes() -> None:
    guarded, plain = Run("stacked"), Run("stacked", guard=None)
    for run in (guarded, plain):
        run.go(10 * T)
    assert all(map(torch.equal, guarded.state(), plain.state()))


def test_guard_restores_the_resumed_weights_after_a_spike() -> None:
    run = Run("one").go(5 * T)
    other = Run("one")
    other.bare.load_state_dict(run.bare.state_dict())
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    other.scheduler.load_state_dict(run.scheduler.state_dict())
    good = other.state()
    other.go(2 * T, {5 * T + 1: 30.0, 6 * T + 1: 30.0})
    assert other.scheduler.get_knobs()["lr/group0"] == 0.25
    assert all(map(torch.equal, other.state(), good))


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_run_resumed_in_its_first_cycle_has_the_guard_state_of_the_uninterrupted_run(
    engine: str,
) -> None:
    run = Run(engine).go(T - 2)
    run.scheduler.converge()
    other = Run(engine)
    other.bare.load_state_dict(run.bare.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    other.scheduler.load_state_dict(run.scheduler.state_dict())
    states = [one.go(T + 2).scheduler.state_dict()["guard"] for one in (run, other)]
    assert states[0] == states[1]


@pytest.mark.parametrize("guard", [hdet.Guard(), None])
def test_step_skipped_with_a_nan_loss_does_not_lower_the_learning_rate(
    guard: hdet.Guard | None,
) -> None:
    """GradScaler skips a step in this way: the loss is not finite and no weight moves."""
    run = Run("stacked", guard=guard).go(5 * T + 1)
    run.scheduler.step(torch.full((N,), math.nan))
    run.go(T)
    assert run.scheduler.get_knobs()["lr/group0"] == 1.0


def test_guard_raises_the_learning_rate_again_when_the_data_has_changed(tmp_path: Path) -> None:
    """No learning rate brings the old loss back. After a few rollbacks the guard accepts that."""
    run = Run("stacked", record=tmp_path)
    noise = torch.Generator().manual_seed(0)
    for cycle in range(25):
        level = 1.0 + 2.0 / (1 + cycle) if cycle < 10 else 6.0
        for _ in range(T):
            run.optimizer.step()
            run.scheduler.step(level + 0.01 * torch.randn(N, generator=noise))
    assert run.scheduler.get_knobs() == {"lr/group0": pytest.approx(1.0)}
    lines = results(tmp_path)
    assert len(lines) == NEW_DATA_AFTER + 1
    assert lines[-1]["reason"] == ABSTENTION
    assert math.prod(line["factor"] for line in lines) == pytest.approx(1.0)


def test_bad_guard_settings_are_rejected() -> None:
    with pytest.raises(
        TypeError, match=r"`guard` must be hdet.Guard\(\), None or 'auto', got True"
    ):
        Run("one", guard=True)
    with pytest.raises(ValueError, match=r"`guard` needs hdet\.lr\(\) among the knobs"):
        Run("one", knobs=[hdet.weight_decay()])
    for options in ({"lower": 1.0}, {"retries": 0}, {"deviations": -1}, {"share": math.nan}):
        with pytest.raises(ValueError, match=f"`{next(iter(options))}` must be"):
            hdet.Guard(**options)


def test_replica_with_a_loss_far_above_the_others_is_excluded_from_the_average(
    tmp_path: Path,
) -> None:
    """The weights of the replica are finite, and would dominate the mean."""
    run = Run("stacked", num=4, record=tmp_path, spread=0.1).go(4 * T)
    with torch.no_grad():
        for parameter in run.modules()[2].parameters():
            parameter.mul_(100.0)
    run.go(T)
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    (excluded,) = [line["excluded"] for line in lines if "excluded" in line][-1]
    assert excluded["replica"] == 2
    assert "the others" in excluded["reason"]
    assert results(tmp_path) == []  # the guard saw no spike of the run
    weights = [nn.utils.parameters_to_vector(module.parameters()) for module in run.modules()]
    assert all(torch.equal(each, weights[0]) for each in weights)
    assert float(weights[0].detach().abs().max()) < 10


@pytest.mark.parametrize("offload", [False, True])
def test_snapshot_keeps_weights_and_buffers_that_replicas_share_only_once(offload: bool) -> None:
    """Optimizer states are kept for each replica. Under `overlap` the weights differ too."""
    run = Run("stacked", guard=hdet.Guard(offload=offload), gradients="local").go(5 * T)
    kept = run.scheduler._run.good_point.snapshot  # type: ignore[union-attr]
    assert kept is not None
    assert (len(kept.weights), len(kept.buffers), len(kept.states)) == (1, 1, N)
    before = [tensor.clone() for tensor in run.state()]
    run.go(T, {5 * T: math.inf})
    for now, then in zip(run.state(), before, strict=True):
        assert torch.equal(now, then)
    late = Run("stacked", overlap=2).go(5 * T).scheduler._run.good_point
    assert len(late.snapshot.weights) == N  # type: ignore[union-attr]


class Named(dict[str, Any]):
    """A custom class for an optimizer state."""

    @property
    def moment(self) -> Tensor:
        moment: Tensor = self["moment"]
        return moment


class Own(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if not self.state[parameter]:
                self.state[parameter] = Named(moment=torch.zeros_like(parameter))
            moment = self.state[parameter].moment.mul_(0.9).add_(parameter.grad)
            parameter.sub_(self.param_groups[0]["lr"] * moment)


@pytest.mark.parametrize("offload", [False, True])
def test_rollback_keeps_the_type_of_custom_optimizer_states(offload: bool) -> None:
    model = net()
    run = SmallRun(
        "one",
        0,
        1,
        model,
        Own(model.parameters()),
        lambda optimizer: ConstantLR(optimizer, factor=1.0),
        guard=hdet.Guard(offload=offload),
        sync_every=T,
    )
    for step in range(10 * T):
        if step in (6 * T, 7 * T):
            with torch.no_grad():
                next(model.parameters()).mul_(math.inf)
        run.step()
    assert run.scheduler.get_knobs() == {"lr/group0": 0.25}
    assert all(type(state) is Named for state in run.optimizer.state.values())


def test_restore_keeps_optimizer_states_that_are_views_of_one_tensor() -> None:
    """An optimizer with one flat buffer has such states."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    flat = torch.zeros(4)
    optimizer.state[weight] = {"flat": flat, "moment": flat[:2]}
    parameters = ReplicaWeights(optimizer, None, SingleReplica())
    kept = parameters.snapshot()
    parameters.restore_(kept)
    optimizer.state[weight]["flat"].fill_(7.0)
    assert optimizer.state[weight]["moment"].tolist() == [7.0, 7.0]


def test_guard_accepts_float8_parameters() -> None:
    model = net()
    model.register_parameter(
        "scale", nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    run = SmallRun(
        "one",
        0,
        1,
        model,
        optimizer,
        lambda optimizer: ConstantLR(optimizer, factor=1.0),
        guard=hdet.Guard(),
        sync_every=T,
    )
    for _ in range(2 * T):
        run.step()
    good_point = run.scheduler._run.good_point
    assert good_point is not None
    assert good_point.step == 2 * T
