"""A converge in the background: its mean comes some steps later, as a change."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import hdet
from tests import reference, toy
from tests.processes import Processes

N, T, S, DELAY, ALPHA, LR = 4, 6, 40, 2, 0.25, 0.02
NESTEROV = (0.7, 0.9)
OUTER = partial(torch.optim.SGD, lr=NESTEROV[0], momentum=NESTEROV[1], nesterov=True)


def expected(shared: bool, outer: bool = False) -> list[list[Tensor]]:
    """The same as a plain loop; the last cycle ends with an ordinary converge."""
    models = [toy.toy() for _ in range(N)]
    slow = [p.detach().clone() for p in models[0].parameters()]
    velocities = [torch.zeros_like(tensor) for tensor in slow]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=LR) for model in models]
    sent: list[list[Tensor]] = []
    for step in range(S):
        for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.param_groups[0]["lr"] = LR * reference.multiplier(replica, N, ALPHA)
            optimizer.zero_grad()
            toy.loss_of(model, step, replica).backward()
        if shared:
            reference.share_gradients(models)
        for optimizer in optimizers:
            optimizer.step()
        done = step + 1
        if sent and done % T == DELAY:
            means = [sum(same) / N for same in zip(*sent, strict=True)]
            if outer:
                follow(means, slow, velocities)
            land(models, sent, slow if outer else means)
        if done % T == 0:
            sent = [[p.detach().clone() for p in model.parameters()] for model in models]
    reference.average(models)
    if outer:
        reference.nesterov(models, slow, velocities, *NESTEROV)
    return [[p.detach() for p in model.parameters()] for model in models]


def follow(means: list[Tensor], slow: list[Tensor], velocities: list[Tensor]) -> None:
    """An outer step along the mean of what was sent off, by the reference."""
    mean = toy.toy()
    nn.utils.vector_to_parameters(torch.cat([m.flatten() for m in means]), mean.parameters())
    reference.nesterov([mean], slow, velocities, *NESTEROV)


@torch.no_grad()
def land(models: list[toy.Toy], sent: list[list[Tensor]], goals: list[Tensor]) -> None:
    for model, before in zip(models, sent, strict=True):
        for p, goal, own in zip(model.parameters(), goals, before, strict=True):
            p.add_(goal - own)


def scheduled(model: nn.Module, optimizer: Any, **options: Any) -> hdet.HDET:
    given = {"spread": ALPHA, "controller": None, "overlap": DELAY, **options}
    base = LambdaLR(optimizer, lambda _: 1.0)
    return hdet.HDET(base, model=model, preset="paper", sync_every=T, total_steps=S, **given)


def processes_run(rank: int, gradients: str, outer: bool) -> list[Tensor]:
    model = DistributedDataParallel(toy.toy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    follows = OUTER if outer else None
    scheduler = scheduled(model, optimizer, gradients=gradients, outer=follows)
    for step in range(S):
        optimizer.zero_grad()
        loss = toy.loss_of(model, step, rank)
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        if step % T == 0 and step:  # while a mean is under way: no trace of it must stay
            with scheduler.consensus():
                pass
    return [p.detach() for p in model.parameters()]


class Stacked:
    def __init__(self, model: toy.Toy | None = None, **options: Any) -> None:
        self.model = model or toy.toy()
        self.ensemble = hdet.StackedReplicas(self.model, N)
        own = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self.optimizer = self.ensemble.optimizer(own)
        self.scheduler = scheduled(self.model, self.optimizer, replicas=self.ensemble, **options)

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            parts = [toy.batch(self.scheduler.last_epoch, replica) for replica in range(N)]
            batch = [torch.cat(same) for same in zip(*parts, strict=True)]
            losses = self.ensemble.losses(loss_of, *batch)
            self.optimizer.zero_grad()
            losses.sum().backward()
            self.optimizer.step()
            self.scheduler.step(losses.detach())

    def weights(self) -> list[list[Tensor]]:
        modules = self.ensemble.modules(None)
        return [[p.detach().clone() for p in module.parameters()] for module in modules]


def loss_of(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens), labels)


def check(got: list[list[Tensor]], want: list[list[Tensor]]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        for ours, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("gradients", ["local", "shared"])
def test_overlapped_average_of_processes_equals_the_plain_loop(
    processes: Processes, gradients: str, outer: bool
) -> None:
    want = expected(gradients == "shared", outer)
    check(processes(N, processes_run, gradients, outer), want)


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("gradients", ["local", "shared"])
def test_overlapped_average_of_stacked_replicas_equals_the_plain_loop(
    gradients: str, outer: bool
) -> None:
    run = Stacked(gradients=gradients, outer=OUTER if outer else None)
    run.go_on(S)
    check(run.weights(), expected(gradients == "shared", outer))


@pytest.mark.parametrize("outer", [None, OUTER])
def test_converge_during_a_pending_average_makes_one_model_to_save(outer: Any) -> None:
    run = Stacked(gradients="local", outer=outer)
    run.go_on(T)
    with pytest.warns(UserWarning, match="saved in the middle of a cycle"):
        run.scheduler.state_dict()
    run.scheduler.converge()
    first, *others = run.weights()
    assert all(a.equal(b) for other in others for a, b in zip(first, other, strict=True))
    again = Stacked(gradients="local", outer=outer)
    again.go_on(T + 1)  # another mean is under way when it is loaded
    again.model.load_state_dict(run.model.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    if run.scheduler.outer is not None and again.scheduler.outer is not None:
        again.scheduler.outer.load_state_dict(copy.deepcopy(run.scheduler.outer.state_dict()))
    again.scheduler.load_state_dict(run.scheduler.state_dict())
    for each in (run, again):
        each.go_on(9)
    check(again.weights(), run.weights())


def test_a_replica_with_nan_weights_takes_the_mean_of_the_others() -> None:
    run = Stacked(gradients="local")
    run.go_on(T - 1)
    with torch.no_grad():
        next(iter(run.ensemble.modules(None)[1].parameters())).fill_(float("nan"))
    run.go_on(1 + 2 * T)
    assert all(tensor.isfinite().all() for row in run.weights() for tensor in row)


def test_converge_during_a_pending_average_makes_one_outer_step() -> None:
    run = Stacked(gradients="local", outer=OUTER)
    run.go_on(T)
    outer, num = run.scheduler.outer, 0

    def count(*_: Any) -> None:
        nonlocal num
        num += 1

    assert outer is not None
    outer.register_step_post_hook(count)
    run.scheduler.converge()
    run.scheduler.converge()
    assert num == 1


def freeze(run: Stacked, frozen: bool) -> None:
    for module in run.ensemble.modules(None):
        assert isinstance(module, toy.Toy)
        module.head.bias.requires_grad_(not frozen)


def test_parameters_frozen_or_unfrozen_during_a_pending_average() -> None:
    """Frozen: it keeps what was sent. Not any more: it has no outer step before it is known."""
    run = Stacked(gradients="local", outer=OUTER)
    run.go_on(T)
    sent = run.weights()
    mean = sum(row[-1] for row in sent) / N
    freeze(run, True)
    run.go_on(DELAY)
    for row in run.weights():
        torch.testing.assert_close(row[-1], mean, rtol=1e-10, atol=1e-10)
    other = toy.toy()
    other.head.bias.requires_grad_(False)
    late = Stacked(other, gradients="local", outer=OUTER)
    late.go_on(T)
    freeze(late, False)
    late.go_on(3 * T)
    assert all(tensor.isfinite().all() for row in late.weights() for tensor in row)


@pytest.mark.parametrize("outer", [None, OUTER])
def test_rollback_with_overlap_makes_replicas_equal(outer: Any) -> None:
    run = Stacked(gradients="local", guard=hdet.Guard(), outer=outer)
    run.go_on(2 * T)
    for factor in (1.0, 0.25):  # the first failure is spared
        with torch.no_grad():  # after the last mean has landed
            for module in run.ensemble.modules(None):
                for p in module.parameters():
                    p.mul_(50)
        run.go_on(T)
        assert run.scheduler.get_knobs()["lr/group0"] == factor
        first, *others = run.weights()
        assert all(a.equal(b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": T // 2 + 1}, r"`overlap` must be at most half of `sync_every` \(6\), got 4"),
        ({"overlap": -1}, "`overlap` must be at least 0, got -1"),
        ({"optimizer_state": "average"}, "`overlap` needs optimizer_state='keep'"),
    ],
)
def test_overlap_with_incompatible_settings_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Stacked(**options)
