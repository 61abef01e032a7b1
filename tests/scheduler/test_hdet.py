"""HDET in a training loop: converge, consensus, state, overrun, losses and lost replicas."""

import copy
import gc
import io
import json
import math
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import hdet
from hdet.control.controller import Evidence, Move, ScaleState
from tests import toy
from tests.processes import Processes, RemoteError, warns_on_first

TOTAL, T = 24, 4


class Trainer:
    """An ordinary DDP loop with hdet that can stop and resume at any step."""

    def __init__(self, rank: int, name: str = "adamw", **changed: Any) -> None:
        self.rank = rank
        # By default DDP rearranges its buckets after the first batch, which changes the order of
        # sums: a resumed run would differ in the last bit. This option keeps the buckets.
        self.model = DistributedDataParallel(toy.toy(), find_unused_parameters=True)
        self.optimizer = toy.OPTIMIZERS[name](self.model)
        arguments: dict[str, Any] = {
            "total_steps": TOTAL, "sync_every": T, "spread": 0.3, "warmup_steps": 8,
        }  # fmt: skip
        self.scheduler = hdet.OneCycleHDET(
            self.optimizer, 0.05, model=self.model, **(arguments | changed)
        )

    def train(self, steps: range) -> "Trainer":
        for step in steps:
            self.optimizer.zero_grad()
            loss = toy.loss_of(self.model, step, self.rank)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step(loss)
        return self

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def save(self) -> bytes:
        file = io.BytesIO()
        parts = (self.model.module, self.optimizer, self.scheduler)
        torch.save([part.state_dict() for part in parts], file)
        return file.getvalue()

    def load(self, saved: bytes) -> "Trainer":
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for part, state in zip(
            (self.scheduler, self.model.module, self.optimizer),
            (states[2], states[0], states[1]),
            strict=True,
        ):
            part.load_state_dict(state)
        return self

    def everything(self) -> tuple[Tensor, list[float], dict[str, Any]]:
        return self.weights(), self.scheduler.get_last_lr(), self.scheduler.state_dict()


def assert_same(first: Any, second: Any) -> None:
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:]


# The end of a run, and converge on demand ---------------------------------------------------------


def train_to_the_end(rank: int, gradients: str, total: int) -> Tensor:
    trainer = Trainer(rank, total_steps=total, gradients=gradients)
    return trainer.train(range(total)).weights()


@pytest.mark.parametrize("gradients", ["shared", "local"])
@pytest.mark.parametrize("total", [24, 26])
def test_all_replicas_have_equal_weights_after_the_last_step(
    processes: Processes, gradients: str, total: int
) -> None:
    first, *others = processes(3, train_to_the_end, gradients, total)
    assert all(torch.equal(first, other) for other in others)


def converge_on_demand(rank: int) -> list[Tensor]:
    trainer = Trainer(rank).train(range(6))
    before = trainer.weights()
    trainer.scheduler.converge()
    return [before, trainer.weights()]


def test_converge_sets_all_replicas_to_their_mean_weights(processes: Processes) -> None:
    results = processes(3, converge_on_demand)
    mean = sum(before for before, _ in results) / 3
    assert not torch.equal(results[0][0], results[1][0])
    for _, after in results:
        torch.testing.assert_close(after, mean, rtol=1e-12, atol=1e-14)
        assert torch.equal(after, results[0][1])


# Evaluation --------------------------------------------------------------------------------


def evaluate_on_the_way(rank: int, every: int | None, name: str) -> Any:
    trainer = Trainer(rank, name)
    seen = []
    for step in range(TOTAL):
        trainer.train(range(step, step + 1))
        if every and step % every == 0:
            own = trainer.weights()
            with trainer.scheduler.consensus():
                seen.append((own, trainer.weights()))
                trainer.scheduler.state_dict()  # saving inside the consensus does not warn
            assert torch.equal(own, trainer.weights())
    return seen, trainer.everything()


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_consensus_shows_mean_weights_and_leaves_training_unchanged(
    processes: Processes, name: str
) -> None:
    visited = processes(3, evaluate_on_the_way, 3, name)
    undisturbed = processes(3, evaluate_on_the_way, None, name)
    for replica in range(3):
        assert_same(visited[replica][1], undisturbed[replica][1])
    for visit in range(len(visited[0][0])):
        mean = sum(seen[visit][0] for seen, _ in visited) / 3
        for seen, _ in visited:
            torch.testing.assert_close(seen[visit][1], mean, rtol=1e-12, atol=1e-14)


def raise_inside(rank: int) -> bool:
    trainer = Trainer(rank).train(range(6))
    own = trainer.weights()
    for call in (trainer.scheduler.step, trainer.scheduler.converge):
        with (
            pytest.raises(RuntimeError, match="cannot be used inside `consensus\\(\\)`"),
            trainer.scheduler.consensus(),
        ):
            call()
    return torch.equal(own, trainer.weights())


def test_error_inside_consensus_still_restores_the_replica_weights(processes: Processes) -> None:
    assert processes(2, raise_inside) == [True, True]


# State -------------------------------------------------------------------------------------


def save_and_go_on(rank: int, cut: int, name: str, changed: dict[str, Any]) -> Any:
    trainer = Trainer(rank, name, **changed).train(range(cut))
    trainer.scheduler.converge()
    saved = trainer.save()
    return saved, trainer.train(range(cut, TOTAL)).everything()


def resume(rank: int, saved: bytes, cut: int, name: str, changed: dict[str, Any]) -> Any:
    return Trainer(rank, name, **changed).load(saved).train(range(cut, TOTAL)).everything()


@pytest.mark.parametrize("cut", [5, 8, 14, 16, 23, 24])
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("adamw", {}),
        ("sgd", {}),  # weight decay enters the momentum, which differs between replicas
        ("adam", {"gradients": "local"}),
        ("adamw", {"gradients": "local", "optimizer_state": "average"}),
    ],
)
def test_resumed_run_equals_the_uninterrupted_run(
    processes: Processes, cut: int, name: str, changed: dict[str, Any]
) -> None:
    results = processes(3, save_and_go_on, cut, name, changed)
    states = [torch.load(io.BytesIO(saved), weights_only=True) for saved, _ in results]
    assert states[0][2] == states[1][2] == states[2][2]
    # All replicas load the checkpoint of replica 1.
    resumed = processes(3, resume, results[1][0], cut, name, changed)
    for again, (_, on) in zip(resumed, results, strict=True):
        assert_same(again, on)


def test_state_dict_holds_plain_values_and_nothing_about_replicas() -> None:
    state = _single(TOTAL).state_dict()

    def leaves(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [leaf for entry in value.values() for leaf in leaves(entry)]
        if isinstance(value, (list, tuple)):
            return [leaf for entry in value for leaf in leaves(entry)]
        return [value]

    assert {type(leaf) for leaf in leaves(state)} <= {int, float, bool, str, type(None)}
    assert not any(word in json.dumps(state) for word in ("rank", "replica", "world"))


@pytest.mark.parametrize("num", [1, 2, 4])
def test_run_resumes_with_another_number_of_replicas(processes: Processes, num: int) -> None:
    (saved, _), *_ = processes(3, save_and_go_on, 14, "adamw", {})
    state = torch.load(io.BytesIO(saved), weights_only=True)[2]
    resumed = processes(num, resume_and_tell, saved)
    centre = resumed[0][1]
    for lrs, base_lr, _ in resumed:
        assert base_lr == centre
        assert all(lr > 0 for lr in lrs)
    mean = sum(lrs[0] for lrs, _, _ in resumed) / num
    assert mean == pytest.approx(centre[0])
    assert all(step == state["step"] for _, _, step in resumed)


def resume_and_tell(rank: int, saved: bytes) -> Any:
    trainer = Trainer(rank).load(saved)
    outcome = (
        trainer.scheduler.get_last_lr(),
        trainer.scheduler.get_base_lr(),
        trainer.scheduler.last_epoch,
    )
    trainer.train(range(14, TOTAL))
    return outcome


def rates_to_the_end(rank: int, saved: bytes, changed: dict[str, Any]) -> list[float]:
    trainer = Trainer(rank, **changed).load(saved)
    rates = [trainer.scheduler.get_base_lr()[0]]
    for step in range(14, TOTAL):
        trainer.train(range(step, step + 1))
        rates.append(trainer.scheduler.get_base_lr()[0])
    return rates


@pytest.mark.parametrize(("num", "changed"), [(1, {}), (3, {"auto_lr": False})])
def test_run_resumed_without_a_controller_decays_to_the_lowest_learning_rate(
    processes: Processes, num: int, changed: dict[str, Any]
) -> None:
    """No controller compares replicas, and the rate still ends at the floor of OneCycleLR."""
    (saved, _), *_ = processes(3, save_and_go_on, 14, "adamw", {"temperature": 1e9})
    for rates in processes(num, rates_to_the_end, saved, changed):
        assert rates == sorted(rates, reverse=True)
        assert rates[-1] == pytest.approx(0.05 / 25 / 1e4, rel=1e-6)


def resume_lower(rank: int, saved: bytes, optimizer_first: bool) -> list[float]:
    trainer = Trainer(rank)
    del trainer.scheduler
    lower = hdet.OneCycleHDET(
        trainer.optimizer, 0.005, total_steps=TOTAL, sync_every=T, spread=0.3, warmup_steps=8
    )
    states = torch.load(io.BytesIO(saved), weights_only=True)
    parts: list[Any] = [(trainer.optimizer, states[1]), (lower, states[2])]
    for part, state in parts if optimizer_first else reversed(parts):
        part.load_state_dict(state)
    return lower.get_base_lr()


@pytest.mark.parametrize("cut", [6, 14])
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_run_resumes_with_a_lower_max_lr(
    processes: Processes, cut: int, optimizer_first: bool
) -> None:
    """The error about lost replicas advises this. The cuts lie before and after the warm-up."""
    (saved, _), *_ = processes(2, save_and_go_on, cut, "adamw", {})
    same = processes(2, resume_and_tell, saved)[0][1]
    for rates in processes(2, resume_lower, saved, optimizer_first):
        assert rates == pytest.approx([rate / 10 for rate in same], rel=1e-9)


def test_run_past_its_end_resumes_at_its_step_in_a_longer_schedule() -> None:
    scheduler = _single(10, on_overrun="extend")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(15):
            scheduler.step(1.0)
    longer, plain = _single(30), _single(30)
    longer.load_state_dict(scheduler.state_dict())
    for _ in range(15):
        plain.step(1.0)
    assert longer.get_last_lr() == plain.get_last_lr()


def lengthen(rank: int, saved: bytes, total: int) -> list[float]:
    trainer = Trainer(rank, total_steps=total, temperature=1e9).load(saved)
    trainer.train(range(14, total))
    return trainer.scheduler.get_base_lr()


@pytest.mark.parametrize("total", [20, 48])
def test_run_resumed_with_other_total_steps_ends_at_the_lowest_learning_rate(
    processes: Processes, total: int
) -> None:
    """A high temperature removes the signal. The rate still ends at the floor of OneCycleLR."""
    (saved, _), *_ = processes(3, save_and_go_on, 14, "adamw", {"temperature": 1e9})
    for rates in processes(3, lengthen, saved, total):
        assert rates == pytest.approx([0.05 / 25 / 1e4] * 4, rel=1e-9)


def from_one_cycle(rank: int, plain: dict[str, Any], changed: dict[str, Any]) -> Any:
    trainer = Trainer(rank, **changed)
    trainer.scheduler.load_state_dict(plain)
    start = (trainer.scheduler.get_last_lr(), trainer.scheduler.last_epoch)
    momenta = [group["betas"][0] for group in trainer.optimizer.param_groups]
    trainer.train(range(10, TOTAL))
    return start, momenta, trainer.scheduler.state_dict()["started"]


def test_run_resumes_from_the_state_of_a_plain_one_cycle_lr(processes: Processes) -> None:
    optimizer = toy.OPTIMIZERS["adamw"](toy.toy())
    plain = OneCycleLR(optimizer, 0.05, total_steps=TOTAL)
    for _ in range(10):
        optimizer.step()
        plain.step()
    for replica, (start, momenta, started) in enumerate(
        processes(3, from_one_cycle, plain.state_dict(), {})
    ):
        assert start[0] == pytest.approx([plain.get_last_lr()[0] * [0.7, 1.0, 1.3][replica]] * 4)
        assert start[1] == 10
        assert momenta == [group["betas"][0] for group in optimizer.param_groups]
        assert started  # the warm-up was over, so the controller started at the next sync


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            {"epoch": 3},
            "`state_dict` must come from hdet or from a torch LRScheduler, got the keys",
        ),
        ({"hdet": 99}, "`state_dict` must have version 2, got 99."),
        ({"hdet": 2}, "`state_dict` must be complete, got one without 'base'."),
    ],
)
def test_load_state_dict_rejects_a_foreign_state_and_changes_nothing(
    state: dict[str, Any], words: str
) -> None:
    scheduler = _single(TOTAL)
    before = scheduler.state_dict()
    with pytest.raises(ValueError) as error:
        scheduler.load_state_dict(state)
    assert str(error.value).startswith(words)
    assert scheduler.state_dict() == before


def test_load_state_dict_rejects_a_state_with_other_knob_names() -> None:
    state = _single(TOTAL).state_dict()
    state["knobs"][0]["name"] = "other"
    with pytest.raises(ValueError, match=r"knobs .'lr/group0'., got .'other'"):
        _single(TOTAL).load_state_dict(state)


def save_in_the_middle(rank: int) -> None:
    trainer = Trainer(rank).train(range(4))
    trainer.scheduler.state_dict()  # right after a converge all replicas are equal
    trainer.train(range(4, 6))
    with warns_on_first(rank, "saved in the middle of a cycle"):
        trainer.scheduler.state_dict()


def test_state_dict_in_mid_cycle_warns_that_replicas_differ(processes: Processes) -> None:
    processes(2, save_in_the_middle)


# Past the end ------------------------------------------------------------------------------


def _single(total: int, **changed: Any) -> hdet.OneCycleHDET:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return hdet.OneCycleHDET(optimizer, 0.1, total_steps=total, sync_every=5, **changed)


def test_steps_past_the_end_hold_the_learning_rate_and_warn_once() -> None:
    scheduler = _single(10)
    for _ in range(10):
        scheduler.step(1.0)
    last = scheduler.get_last_lr()
    with pytest.warns(UserWarning, match="step 11 is beyond") as seen:
        scheduler.step(1.0)
    assert seen[0].filename.endswith("test_hdet.py")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            scheduler.step(1.0)
    assert scheduler.get_last_lr() == last
    assert scheduler.last_epoch == 31
    again = _single(10)
    again.load_state_dict(scheduler.state_dict())
    assert (again.get_last_lr(), again.last_epoch) == (last, 31)


def test_step_past_the_end_raises_with_on_overrun_raise() -> None:
    scheduler = _single(10, on_overrun="raise")
    for _ in range(10):
        scheduler.step(1.0)
    with pytest.raises(ValueError, match=r"at most `total_steps` \(10\) times, got call 11"):
        scheduler.step(1.0)


@pytest.mark.filterwarnings("ignore:step 25 is beyond")
def go_past(rank: int, on_overrun: str) -> tuple[list[float], list[float], Tensor]:
    trainer = Trainer(rank, on_overrun=on_overrun).train(range(TOTAL))
    with warns_on_first(rank, "step 25 is beyond"):
        trainer.train(range(TOTAL, TOTAL + 7))
    return trainer.scheduler.get_last_lr(), trainer.scheduler.get_base_lr(), trainer.weights()


def test_on_overrun_hold_closes_the_spread_and_extend_keeps_the_spread(
    processes: Processes,
) -> None:
    held = processes(3, go_past, "hold")
    assert held[0][0] == held[1][0] == held[2][0] == held[0][1]
    assert torch.equal(held[0][2], held[2][2])
    extended = processes(3, go_past, "extend")
    assert len({tuple(lrs) for lrs, _, _ in extended}) == 3
    assert sum(lrs[0] for lrs, _, _ in extended) / 3 == pytest.approx(extended[0][1][0])


def test_linear_one_cycle_ends_at_the_lowest_learning_rate() -> None:
    scheduler = _single(10, anneal_strategy="linear")
    for _ in range(10):
        scheduler.step(1.0)
    assert scheduler.get_last_lr() == [0.1 / 25 / 1e4]


# Losses ------------------------------------------------------------------------------------


def accumulate(rank: int, folder: str) -> None:
    trainer = Trainer(rank, record=folder)
    for _ in range(T):
        trainer.scheduler.observe(torch.tensor(1.0 + rank), weight=3.0)
        trainer.scheduler.observe(2.0 + rank)
        trainer.optimizer.step()
        trainer.scheduler.step()


def test_observed_losses_are_weighted_over_micro_batches(
    processes: Processes, tmp_path: Path
) -> None:
    processes(2, accumulate, str(tmp_path))
    line = json.loads((tmp_path / "record.jsonl").read_text().splitlines()[-1])
    assert line["losses"] == pytest.approx([1.25, 2.25])


def forget_the_loss(rank: int) -> None:
    trainer = Trainer(rank)
    for _ in range(T):
        trainer.optimizer.step()
        trainer.scheduler.step(None if rank == 1 else 1.0)


def test_loss_missing_on_one_replica_raises_on_all_replicas(processes: Processes) -> None:
    with pytest.raises(RemoteError) as error:
        processes(3, forget_the_loss)
    for text in error.value.tracebacks:
        assert text is not None
        assert "got none from replica(s) [1] in the cycle that ends at step 4" in text


@pytest.mark.parametrize(
    ("loss", "weight", "words"),
    [
        (torch.ones(8), 1.0, "`loss` must hold 1 number(s), one for each replica of this process"),
        (1.0, 0.0, "`weight` must be a finite number above 0, got 0.0."),
        (1.0, math.nan, "`weight` must be a finite number above 0, got nan."),
    ],
)
def test_observe_rejects_a_bad_loss_or_weight_by_name(loss: Any, weight: float, words: str) -> None:
    with pytest.raises(ValueError) as error:
        _single(10).observe(loss, weight=weight)
    assert str(error.value).startswith(words)


# Mixed precision ---------------------------------------------------------------------------


def train_scaled(rank: int, gradients: str, folder: str, careless: bool) -> Any:
    """GradScaler skips step 5 on replica 1, and on all replicas if gradients are shared."""
    trainer = Trainer(rank, gradients=gradients, record=folder)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    skipped = 0
    for step in range(TOTAL):
        trainer.optimizer.zero_grad()
        loss = toy.loss_of(trainer.model, step, rank)
        scaler.scale(loss * (math.inf if step == 5 and rank == 1 else 1.0)).backward()
        before = scaler.get_scale()
        scaler.step(trainer.optimizer)
        scaler.update()
        was_skipped = scaler.get_scale() < before
        skipped += was_skipped
        trainer.scheduler.observe(loss)
        if not (careless and was_skipped):
            trainer.scheduler.step()
        if careless and trainer.scheduler.last_epoch == 8:
            break  # the end of the cycle
    return skipped, trainer.weights(), trainer.scheduler.last_epoch


@pytest.mark.parametrize(("gradients", "skips"), [("shared", [1, 1, 1]), ("local", [0, 1, 0])])
def test_step_skipped_by_grad_scaler_does_not_shift_cycle_ends(
    processes: Processes, tmp_path: Path, gradients: str, skips: list[int]
) -> None:
    results = processes(3, train_scaled, gradients, str(tmp_path), False)
    assert [skipped for skipped, _, _ in results] == skips
    assert all(torch.equal(weights, results[0][1]) for _, weights, _ in results)
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    cycles = [line for line in lines if line["event"] == "cycle"]
    assert [line["step"] for line in cycles] == [4, 8, 12, 16, 20, 24]
    assert all(line["excluded"] == [] for line in cycles)


def train_carelessly(rank: int, folder: str) -> None:
    with warns_on_first(rank, r"replicas observed different numbers of losses, .4, 5, 4."):
        train_scaled(rank, "local", folder, True)


def test_unequal_numbers_of_observed_losses_warn_at_the_cycle_end(
    processes: Processes, tmp_path: Path
) -> None:
    processes(3, train_carelessly, str(tmp_path))


def test_converge_raises_when_replicas_are_at_different_steps(processes: Processes) -> None:
    with pytest.raises(RemoteError) as error:
        processes(2, drift_without_gradients)
    for text in error.value.tracebacks:
        assert text is not None
        assert "got `converge()` at step 5 on replica 0; `converge()` at step 6 on replica" in text


def drift_without_gradients(rank: int) -> None:
    trainer = Trainer(rank)
    for _ in range(5 + rank):
        trainer.optimizer.step()
        trainer.scheduler.step(1.0)
    trainer.scheduler.converge()


# Lost replicas -----------------------------------------------------------------------------


def lose(rank: int, what: str, lost: list[int], folder: str, policy: str) -> Any:
    trainer = Trainer(rank, gradients="local", record=folder, optimizer_state=policy)
    trainer.train(range(10))
    if rank in lost and what == "weights":
        with torch.no_grad():
            next(trainer.model.parameters())[0] = math.nan
        for state in trainer.optimizer.state.values():
            state["exp_avg"].fill_(math.nan)
    if what == "loss":
        for step in (10, 11):
            trainer.optimizer.zero_grad()
            toy.loss_of(trainer.model, step, rank).backward()
            trainer.optimizer.step()
            trainer.scheduler.step(math.inf if rank in lost else 1.0)
    else:
        trainer.train(range(10, 12))
    moments = [state["exp_avg"].isfinite().all() for state in trainer.optimizer.state.values()]
    middle = trainer.weights()
    trainer.train(range(12, TOTAL))
    return middle, all(moments), trainer.weights()


@pytest.mark.parametrize("policy", ["keep", "average"])
@pytest.mark.parametrize("what", ["weights", "loss"])
def test_replica_with_nonfinite_weights_or_loss_is_excluded_and_restored(
    processes: Processes, tmp_path: Path, what: str, policy: str
) -> None:
    results = processes(4, lose, what, [1, 2], str(tmp_path), policy)
    for middle, moments_are_finite, end in results:
        assert bool(middle.isfinite().all() and end.isfinite().all() and moments_are_finite)
        assert torch.equal(middle, results[0][0])
        assert torch.equal(end, results[0][2])
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    third = [line for line in lines if line["event"] == "cycle"][2]
    assert [entry["replica"] for entry in third["excluded"]] == [1, 2]
    assert third["weights"] is None or third["weights"][1:3] == [0.0, 0.0]
    reason = "weights are not finite" if what == "weights" else "loss is inf"
    assert third["excluded"][0]["reason"] == reason


def test_average_uses_only_replicas_with_finite_weights(processes: Processes) -> None:
    for value in processes(3, average_two_of_three):
        assert value == [2.0, 2.0]


def average_two_of_three(rank: int) -> list[float]:
    model = nn.ParameterList([torch.zeros(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = hdet.HDET(
        LambdaLR(optimizer, lambda _: 1.0),
        model=model,
        sync_every=1,
        controller=None,
        gradients="local",
        preset="paper",
    )
    model[0].data.fill_([1.0, math.nan, 3.0][rank])
    optimizer.step()
    scheduler.step()
    result: list[float] = model[0].tolist()
    return result


def test_run_raises_replicas_lost_when_no_replica_is_finite(
    processes: Processes, tmp_path: Path
) -> None:
    with pytest.raises(RemoteError) as error:
        processes(2, lose, "weights", [0, 1], str(tmp_path), "keep")
    for text in error.value.tracebacks:
        assert text is not None
        assert "ReplicasLost: no replica has finite weights and a finite loss at step 12" in text


# Other base schedules, controllers and parameter groups ---------------------------------------


def step_past_a_loop(rank: int) -> list[float]:
    """A base without one-cycle bounds; the loss is lower at higher learning rates."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    base = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scheduler = hdet.HDET(base, spread=0.5, sync_every=2, preset="paper")
    for _ in range(40):
        optimizer.step()
        scheduler.step(-scheduler.get_last_lr()[0] * (1 + scheduler.last_epoch))
    return [*scheduler.get_base_lr(), float(base.get_last_lr()[0])]


def test_scale_rises_when_losses_prefer_high_learning_rates(processes: Processes) -> None:
    for centre, base in processes(4, step_past_a_loop):
        assert base == pytest.approx(0.1 / 41)
        assert centre > 1.05 * base


def test_saved_state_dict_does_not_change_when_training_continues() -> None:
    scheduler = _single(20)
    state = scheduler.state_dict()
    kept = copy.deepcopy(state)
    for _ in range(7):
        scheduler.step(1.0)
    assert state == kept


def test_load_state_dict_rejects_the_state_of_another_schedule_class() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    other = hdet.HDET(LambdaLR(optimizer, lambda _: 1.0), preset="paper")
    with pytest.raises(ValueError, match="must be of a LambdaLR, got that of a OneCycleLR"):
        other.load_state_dict(_single(10).state_dict())


def test_hdet_rejects_another_hdet_as_base() -> None:
    with pytest.raises(TypeError, match="`base` must be a plain torch LRScheduler"):
        hdet.HDET(_single(10), preset="paper")


def test_hdet_rejects_total_steps_above_those_of_the_base_schedule() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"at most that of the base schedule \(10\), got 13"):
        hdet.HDET(OneCycleLR(optimizer, 0.1, total_steps=10), total_steps=13, preset="paper")


def test_deleted_scheduler_does_not_write_learning_rates() -> None:
    scheduler = _single(10)
    optimizer = scheduler.optimizer
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.5
    del scheduler
    gc.collect()
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_parameter_group_added_after_construction_raises() -> None:
    scheduler = _single(10)
    scheduler.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="must keep its 1 parameter groups, got 2"):
        scheduler.load_state_dict(scheduler.state_dict())
    with pytest.raises(ValueError, match="must keep its 1 parameter groups, got 2"):
        scheduler.step(torch.tensor(1.0))


def test_run_accepts_an_empty_parameter_group() -> None:
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [nn.Parameter(torch.ones(1))]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    scheduler = hdet.OneCycleHDET(optimizer, 0.1, total_steps=4, sync_every=2)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    assert scheduler.last_epoch == 4


def differ_unannounced(rank: int) -> bool:
    """User code changes the weights, which hdet does not see."""
    trainer = Trainer(rank, spread=0.0, auto_lr=False).train(range(2))
    hdet.perturb_(trainer.model)
    own = trainer.weights()
    with trainer.scheduler.consensus():
        inside = trainer.weights()
    return not torch.equal(own, inside) and torch.equal(own, trainer.weights())


def test_consensus_averages_replicas_that_user_code_perturbed(processes: Processes) -> None:
    assert processes(2, differ_unannounced) == [True, True]


class Nudge:
    """A user-defined controller: any object with these three members."""

    warmup_steps = 0

    def weigh(self, losses: Sequence[float]) -> list[float]:
        return [1 / len(losses)] * len(losses)

    def update(self, state: ScaleState, evidence: Evidence) -> Move:
        return Move(state._replace(scale=state.scale * 1.5), 0.0, "up", "because")


def own_controller(rank: int) -> float:
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = hdet.HDET(
        LambdaLR(optimizer, lambda _: 1.0), sync_every=1, controller=Nudge(), preset="paper"
    )
    optimizer.step()
    scheduler.step(1.0)
    return scheduler.get_base_lr()[0]


def test_user_defined_controller_moves_the_learning_rate(processes: Processes) -> None:
    assert processes(2, own_controller) == pytest.approx([0.15, 0.15])


def test_steps_past_a_held_end_need_no_loss(processes: Processes) -> None:
    assert processes(2, go_past_in_silence) == [TOTAL + 2 * T] * 2


def go_past_in_silence(rank: int) -> int:
    trainer = Trainer(rank).train(range(TOTAL))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2 * T):
            trainer.scheduler.step()
    return trainer.scheduler.last_epoch


def train_without_ddp(rank: int) -> None:
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = hdet.HDET(LambdaLR(optimizer, lambda _: 1.0), model=model, preset="paper")
    optimizer.step()
    with warns_on_first(rank, "`model` is neither wrapped in DistributedDataParallel"):
        scheduler.step()


def test_shared_gradients_without_ddp_warn(processes: Processes) -> None:
    processes(2, train_without_ddp)


def ends_by_itself(rank: int) -> bool:
    """Return whether a run is freed with its last reference."""
    model = DistributedDataParallel(toy.toy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    base = OneCycleLR(optimizer, 0.01, total_steps=40)
    knobs = [hdet.lr(spread=0.0), hdet.weight_decay()]
    gc.collect()
    gc.disable()
    try:
        scheduler = hdet.HDET(base, model=model, knobs=knobs, scout=None, sync_every=2)
        replicas = weakref.ref(scheduler._run.replicas)
        for step in range(4):
            optimizer.zero_grad()
            loss = toy.loss_of(model, step, rank)
            loss.backward()
            optimizer.step()
            scheduler.step(loss.detach())
        del scheduler
        return replicas() is None
    finally:
        gc.enable()


def test_deleted_scheduler_frees_its_replicas_without_garbage_collection(
    processes: Processes,
) -> None:
    """A run that waits for the garbage collector keeps the threads of its process groups alive.

    A process that exits before the collection is aborted.
    """
    assert processes(2, ends_by_itself) == [True, True]
