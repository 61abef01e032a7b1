"""Loops that use `step()` in another way than once after each optimizer step are told so."""

import gc
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import schedulefree
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

import hdet
from hdet.scheduler.loop_checks import MANY_STEPS
from tests.processes import Processes
from tests.small_run import SmallRun, batch, loss_of

Make = Callable[[nn.Module], torch.optim.Optimizer]
SETS_LR = "must be set by hdet alone"


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def small(engine: str = "one", make: Make = sgd, **options: Any) -> SmallRun:
    model = nn.Linear(3, 3).double()
    settings = {"preset": "best", "scout": None, "guard": None, "total_steps": 400, **options}
    return SmallRun(
        engine, 0, 2, model, make(model), lambda o: LambdaLR(o, lambda i: 1 / (1 + i)), **settings
    )


# The loop writes learning rates ------------------------------------------------------------------


@pytest.mark.parametrize("scout", [None, hdet.Scout(steps=4)])
@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_a_loop_that_sets_the_learning_rate_stops(engine: str, scout: hdet.Scout | None) -> None:
    run = small(engine, scout=scout, total_steps=4000)
    run.step()
    for group in run.optimizer.param_groups:
        group["lr"] = 1e-5
    with pytest.raises(RuntimeError, match=f"{SETS_LR}, which wrote .*, got 1e-05"):
        run.step()


def test_writing_to_the_optimizer_of_the_first_stacked_replica_stops_the_loop() -> None:
    run = small("stacked")
    run.optimizer.each[0].param_groups[0]["lr"] = 1e-5
    with pytest.raises(RuntimeError, match=SETS_LR):
        run.optimizer.step()


def test_optimizers_of_stacked_replicas_are_checked_before_the_first_step_alone() -> None:
    run = small("stacked")
    assert run.optimizer._optimizer_step_pre_hooks
    run.step()
    assert not run.optimizer._optimizer_step_pre_hooks


def test_stepping_the_base_schedule_too_stops_the_loop() -> None:
    model = nn.Linear(3, 3).double()
    optimizer = sgd(model)
    base = CosineAnnealingLR(optimizer, 50)
    scheduler = hdet.HDET(base, model=model, scout=None, guard=None, total_steps=50)
    optimizer.step()
    base.step()
    with pytest.raises(RuntimeError, match="or steps the base schedule"):
        scheduler.step()


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)])
def test_a_loaded_optimizer_state_is_no_misuse(lr: Any) -> None:
    run = small(make=lambda model: torch.optim.AdamW(model.parameters(), lr=lr))
    states = []
    for _ in range(3):
        run.step()
        states.append((run.optimizer.state_dict(), run.scheduler.state_dict()))
    for optimizer, scheduler in states:
        run.optimizer.load_state_dict(optimizer)
        run.scheduler.load_state_dict(scheduler)
        run.step()


def test_schedule_free_may_keep_its_own_learning_rate_in_the_group() -> None:
    run = small(make=lambda model: schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01))
    run.optimizer.train()
    for _ in range(3):
        run.step()
        assert run.optimizer.param_groups[0]["scheduled_lr"] > 0


# Optimizer steps and calls of step() --------------------------------------------------------------


def loop(run: SmallRun, steps_before_calls: list[int]) -> None:
    """Call `step()` after each of these numbers of optimizer steps."""
    for num in steps_before_calls:
        run.optimizer.zero_grad()
        losses = run.backward(run.scheduler.last_epoch)
        for _ in range(num):
            run.optimizer.step()
        run.scheduler.step(losses)


@pytest.mark.parametrize("engine", ["one", "stacked"])
@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ([20, 20], "made 20 steps without a `step\\(\\)`"),
        ([MANY_STEPS + 9], f"made {MANY_STEPS + 1} steps without a `step\\(\\)`"),
        ([1, 5, 5], "made 5 steps without a `step\\(\\)`"),
        ([1, 0] * (MANY_STEPS // 2), f"called {MANY_STEPS} times, and the optimizer made 16 steps"),
        ([1, 0, 0, 0] * (MANY_STEPS // 4), f"called {MANY_STEPS} times, .* made 8 steps"),
        ([1, *[0] * MANY_STEPS], f"called {MANY_STEPS} times, .* made 1 steps"),
    ],
    ids=["short epochs", "long epoch", "every fifth", "twice", "micro-batches", "never"],
)
def test_step_that_is_not_called_once_per_optimizer_step_warns_once(
    engine: str, pattern: list[int], words: str
) -> None:
    run = small(engine)
    with pytest.warns(UserWarning, match=words) as seen:
        loop(run, [*pattern, *pattern])
    assert len([one for one in seen if "count wrongly" in str(one.message)]) == 1
    assert all(one.filename == __file__ for one in seen)


@pytest.mark.parametrize(
    "pattern",
    [[1, 1], [11, 1, 1], [0] * 16 + [1, 1], [1, 0, 1, 1], [2, 1, 1]],
    ids=["always", "after warm-up", "loss scale too high", "one skipped", "one too many"],
)
def test_a_right_loop_is_no_longer_watched(pattern: list[int]) -> None:
    run = small()
    with warnings.catch_warnings():
        # torch says it of its own schedule, as in every loop whose first steps are skipped.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        loop(run, pattern)
    assert run.scheduler._loop._watch is None
    assert not run.optimizer._optimizer_step_post_hooks


def test_accumulated_micro_batches_and_closures_count_as_one_step() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    base = LambdaLR(optimizer, lambda _: 1.0)
    scheduler = hdet.HDET(base, model=model, scout=None, total_steps=40)
    for step in range(3):

        def closure() -> Tensor:
            optimizer.zero_grad()
            for micro_batch in range(4):
                loss = loss_of(model, batch(step, micro_batch).float())  # noqa: B023
                scheduler.observe(loss)
                loss.backward()
            return loss

        optimizer.step(closure)
        scheduler.step()
    assert scheduler._loop._watch is None


class Pair:
    """Two optimizers in one run, of which the first may step more often, as in a GAN."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 3)
        self.optimizers = [torch.optim.SGD([p], lr=0.1) for p in self.model.parameters()]
        self.scheduler = hdet.HDET(self.optimizers, model=self.model, scout=None, total_steps=400)

    def loop(self, num: int, often: int, seldom: int) -> None:
        for step in range(num):
            loss = loss_of(self.model, batch(step, 0).float())
            loss.backward()
            for optimizer, steps in zip(self.optimizers, (often, seldom), strict=True):
                for _ in range(steps):
                    optimizer.step()
            self.scheduler.step(loss)


@pytest.mark.parametrize(("often", "seldom"), [(5, 1), (MANY_STEPS + 2, 1)])
def test_one_of_two_optimizers_may_step_more_often(often: int, seldom: int) -> None:
    """A critic steps before each step of its generator."""
    pair = Pair()
    with warnings.catch_warnings(record=True) as seen:
        pair.loop(MANY_STEPS + 1, often, seldom)
    assert not seen
    assert pair.scheduler.last_epoch == MANY_STEPS + 1


def test_two_optimizers_that_both_step_too_often_warn() -> None:
    with pytest.warns(UserWarning, match="made 2 steps without"):
        Pair().loop(MANY_STEPS + 1, 5, 2)


def test_a_step_that_may_be_captured_is_not_counted() -> None:
    run = small(make=lambda model: torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1)))
    loop(run, [1, *[0] * MANY_STEPS])


# Losses ------------------------------------------------------------------------------------------


def test_a_scout_without_losses_says_after_its_first_round_that_the_guard_is_inactive() -> None:
    run = small(
        "stacked",
        scout=hdet.Scout(steps=4),
        guard=hdet.Guard(),
        probe=lambda model: model(batch(0, 0)).square().mean(1),
        total_steps=4000,
    )
    with pytest.warns(UserWarning, match="guard is inactive.* up to step 4\\. Call"):
        for step in range(8):
            run.optimizer.zero_grad()
            run.backward(step)
            run.optimizer.step()
            run.scheduler.step()


def gather_losses(rank: int, is_gathered: bool) -> list[str]:
    """Search in two processes, with the loss of each or with their mean."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    base = LambdaLR(optimizer, lambda _: 1.0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        scout = hdet.Scout(steps=4)
        scheduler = hdet.HDET(base, model=model, total_steps=4000, scout=scout, guard=None)
        for step in range(8):
            optimizer.zero_grad()
            loss = loss_of(model, batch(step, rank).float())
            loss.backward()
            optimizer.step()
            given = loss.detach()
            if is_gathered:
                dist.all_reduce(given)
            scheduler.step(given)
    return [str(one.message) for one in seen]


def test_a_scout_that_gets_gathered_losses_says_that_it_compares_nothing(
    processes: Processes,
) -> None:
    gathered = " ".join(processes(2, gather_losses, True)[0])
    assert "the losses of all replicas are equal" in gathered
    assert "equal" not in " ".join(processes(2, gather_losses, False)[0])


class Activation(torch.autograd.Function):
    """Keeps an object in the graph of its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Any) -> Tensor:
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Kept:
    pass


@pytest.mark.parametrize("engine", ["one", "stacked"])
@pytest.mark.parametrize("call", ["step", "observe"])
def test_a_loss_does_not_keep_its_graph(engine: str, call: str) -> None:
    run = small(engine, scout=hdet.Scout(steps=4), guard=hdet.Guard(), total_steps=4000)
    alive = []

    def one_step(step: int) -> None:
        kept = Kept()
        alive.append(weakref.ref(kept))
        losses = run.backward(step).requires_grad_()
        losses = Activation.apply(losses, kept)
        run.optimizer.step()
        if call == "step":
            run.scheduler.step(losses)
        else:
            run.scheduler.observe(losses)
            run.scheduler.step()

    for step in range(20):
        run.optimizer.zero_grad()
        one_step(step)
        if step in (5, 19):  # inside of a round and after it; a collection takes long
            gc.collect()
            assert not any(reference() for reference in alive)
    assert math.isfinite(run.scheduler.get_last_lr()[0])


def test_a_held_out_batch_and_a_probe_do_not_keep_a_graph() -> None:
    kept = Kept()
    alive = weakref.ref(kept)
    model = nn.Linear(3, 3)
    optimizer = sgd(model)
    base = OneCycleLR(optimizer, 0.01, total_steps=4000, cycle_momentum=False)
    scheduler = hdet.HDET(base, model=model)
    x = Activation.apply(torch.ones(16, 3, requires_grad=True), kept)
    scheduler.hold_out(lambda net, x: net(x).square().mean(1), x)
    del x, kept
    gc.collect()
    assert alive() is None


def test_counter_that_accelerate_reads_says_what_to_use_there() -> None:
    weight = nn.Parameter(torch.ones(1))
    scheduler = hdet.HDET(torch.optim.SGD([weight], lr=0.1), scout=None, guard=None)
    with pytest.raises(AttributeError, match=r"once for each process.*prepare_hdet"):
        scheduler._step_count  # noqa: B018
    assert not hasattr(scheduler, "_step_count")
