"""Batches that a loop holds out: the scout scores every replica on them."""

import gc
import json
import math
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

import hdet
from tests.processes import Processes, warns_on_first

STEPS, TOTAL, LR = 6, 2000, 0.05
TAIL = STEPS // 2
SCOUT = hdet.Scout(decades=2, steps=STEPS, share=0.5)


class Net(nn.Module):
    """A net with batch normalisation, which counts its forward passes in the training mode."""

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


def batch(step: int, replica: int, num: int = 16) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randn(num, 3, generator=draw, dtype=torch.float64)


def held(replica: int, num: int = 32) -> Tensor:
    return batch(999, replica, num)


def loss_of(model: Any, x: Tensor) -> Tensor:
    return (model(x) - x.flip(1)).square().mean(1)  # one loss for each sample


def training_loss(model: Any, x: Tensor) -> Tensor:
    return loss_of(model, x).mean()


class Run:
    """A run of one replica, of stacked ones, or of one of several processes."""

    def __init__(self, engine: str = "one", rank: int = 0, num: int = 1, **options: Any) -> None:
        self.rank, self.num, self.bare = rank, num, net()
        self.model: nn.Module = self.bare
        self.optimizer: Any = torch.optim.SGD(self.bare.parameters(), lr=LR)
        self.ensemble: hdet.StackedReplicas | None = None
        if engine == "stacked":
            self.ensemble = hdet.StackedReplicas(self.bare, num)
            self.optimizer = self.ensemble.optimizer(self.optimizer)
        elif engine == "processes":
            self.model = DistributedDataParallel(self.bare)
        self.scheduler = hdet.HDET(
            CosineAnnealingLR(self.optimizer, TOTAL),
            model=self.model,
            replicas=self.ensemble,
            total_steps=TOTAL,
            **{"scout": SCOUT, "guard": None, **options},
        )

    def train(self) -> None:
        step = self.scheduler.last_epoch
        self.optimizer.zero_grad()
        if self.ensemble is None:
            losses = training_loss(self.model, batch(step, self.rank))
        else:
            x = torch.cat([batch(step, replica) for replica in range(self.num)])
            losses = self.ensemble.losses(training_loss, x)
        losses.sum().backward()
        self.optimizer.step()
        self.losses = losses.detach()

    def step(self) -> None:
        self.train()
        self.scheduler.step(self.losses)

    def search(self) -> None:
        while self.scheduler.is_scouting:
            self.step()

    @property
    def held_out(self) -> Any:
        trial = self.scheduler._run.progress.trial
        return None if trial is None else trial.held_out

    def tensors(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self.bare.state_dict().values()]


def last_event(folder: Path) -> dict[str, Any]:
    """Return the last scout event of a record."""
    lines = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    return dict([line for line in lines if line["event"] == "scout"][-1])


def alone(replica: int, first_step: int, lr: float, parts: list[Tensor]) -> list[float]:
    """Train a model in a plain loop and return the losses of its tail average on each part."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    tail = []
    for step in range(STEPS):
        optimizer.zero_grad()
        training_loss(model, batch(first_step + step, replica)).backward()
        optimizer.step()
        tail.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    mean = torch.stack(tail[-TAIL:]).mean(0)
    nn.utils.vector_to_parameters(mean, model.parameters())
    return [float(training_loss(model, part).detach()) for part in parts]


def searched(rank: int, engine: str, num: int, folder: Path | None) -> dict[str, Any]:
    run = Run(engine, rank, num, record=folder)
    torch.manual_seed(rank)
    before, random_state = run.tensors(), torch.get_rng_state()
    if engine == "stacked":
        for replica in range(num):
            run.scheduler.hold_out(loss_of, held(replica))
    else:
        run.scheduler.hold_out(loss_of, held(rank))
    changed = not all(map(torch.equal, run.tensors(), before))
    changed |= not torch.equal(torch.get_rng_state(), random_state)
    lrs, trained, after = [], [], []
    while run.scheduler.is_scouting:
        if run.scheduler.last_epoch % STEPS == 0:
            lrs.append([row[0] for row in run.scheduler.get_replica_lrs()])
        torch.rand(1)  # as a loop may draw
        run.train()
        trained.append(torch.get_rng_state())
        run.scheduler.step(run.losses)
        after.append(torch.get_rng_state())
    restored = all(map(torch.equal, run.tensors(), before))
    same_random = all(map(torch.equal, trained[:-1], after[:-1]))
    return {"lrs": lrs, "changed": changed, "restored": restored, "same_random": same_random}


@pytest.mark.parametrize(
    ("engine", "num"), [("one", 1), ("stacked", 2), ("processes", 2), ("processes", 4)]
)
def test_scores_on_given_batches_equal_those_of_a_plain_loop(
    engine: str, num: int, processes: Processes, tmp_path: Path
) -> None:
    arguments = (engine, num, tmp_path)
    many = engine == "processes"
    answers = processes(num, searched, *arguments) if many else [searched(0, *arguments)]
    for answer in answers:
        assert not answer["changed"]
        assert answer["restored"]
        assert answer["same_random"]
        assert answer["lrs"] == answers[0]["lrs"]
    event = last_event(tmp_path)
    assert event["compared_by"] == "held out"
    # At least eight parts, of at least eight samples each.
    pieces = {1: 4, 2: 4, 4: 2}[num]
    parts = [part for replica in range(num) for part in held(replica).tensor_split(pieces)]
    want = {}
    for index, lrs in enumerate(answers[0]["lrs"]):
        for replica, lr in enumerate(lrs):
            want[lr / LR] = fmean(alone(replica, index * STEPS, lr, parts))
    found = {point["factor"]: point["score"] for point in event["points"]}
    assert sorted(found) == pytest.approx(sorted(want), rel=1e-12)
    assert [found[key] for key in sorted(found)] == pytest.approx(
        [want[key] for key in sorted(want)], rel=1e-9
    )


# A noisy task ------------------------------------------------------------------------------------


class Descent(torch.optim.Optimizer):
    """An optimizer without a usual learning rate: what was seen decides."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


def noisy_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean(1)


def expected_loss(model: nn.Linear, *_: Tensor) -> Tensor:
    """The mean of `noisy_loss` over all data."""
    return (model.weight - 1).square().sum() + model.bias.square().sum() + 16


def noisy_choices(rank: int, num: int, seeds: range, score: Any) -> list[float]:
    """Return the logarithms of the learning rates that searches choose on noisy data."""
    chosen = []
    for seed in seeds:
        draw = torch.Generator().manual_seed(1000 * seed + rank)

        def data(size: int, draw: torch.Generator = draw) -> tuple[Tensor, Tensor]:
            x = torch.randn(size, 4, generator=draw)
            return x, x.sum(1, keepdim=True) + 4 * torch.randn(size, 1, generator=draw)

        model = nn.Linear(4, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = Descent(model.parameters(), lr=0.1)
        wrapped = DistributedDataParallel(model) if num > 1 else model
        scheduler = hdet.HDET(
            CosineAnnealingLR(optimizer, TOTAL),
            model=wrapped,
            scout=hdet.Scout(decades=3, steps=8, share=0.5),
            guard=None,
        )
        if score is not None:
            scheduler.hold_out(score, *data(2048))
        while scheduler.is_scouting:
            x, y = data(8)
            optimizer.zero_grad()
            loss = noisy_loss(wrapped, x, y).mean()
            loss.backward()
            optimizer.step()
            scheduler.step(loss)
        assert scheduler.found_lr is not None
        chosen.append(math.log10(scheduler.found_lr))
    return chosen


def all_choices(rank: int, num: int, seeds: range) -> list[list[float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a search by losses says how unsure it is
        return [
            noisy_choices(rank, num, seeds, score) for score in (None, noisy_loss, expected_loss)
        ]


def test_given_batches_lead_to_a_better_choice_than_training_losses(processes: Processes) -> None:
    by_losses, held_out, exact = processes(2, all_choices, 2, range(8))[0]

    def error(choices: list[float]) -> float:
        """How far choices lie from those by the expected loss, in decades."""
        return fmean(abs(a - b) for a, b in zip(choices, exact, strict=True))

    assert error(held_out) < 0.7 * error(by_losses), (by_losses, held_out, exact)


# Refusals ----------------------------------------------------------------------------------------


def two_dimensions(model: Any, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda s: s.hold_out(held(0), held(0)), TypeError, "must be a function"),
        (lambda s: s.hold_out(loss_of), TypeError, "must hold a tensor, got none"),
        (lambda s: s.hold_out(loss_of, held(0).numpy()), TypeError, "got a ndarray"),
        (lambda s: s.hold_out(two_dimensions, held(0)), ValueError, r"got shape \(32, 3\)"),
        (lambda s: s.hold_out(lambda m, x: 1.0, held(0)), TypeError, "floating-point numbers"),
        (lambda s: s.hold_out(lambda m, x: x.argmax(), held(0)), TypeError, "dtype torch.int64"),
        (lambda s: s.hold_out(loss_of, held(0) / 0), ValueError, "finite loss .* got nan"),
        (lambda s: s.hold_out(lambda m: m(held(0)), held(0)), TypeError, "positional argument"),
    ],
)
def test_hold_out_refuses_what_cannot_be_scored_and_the_run_goes_on(
    call: Callable[[hdet.HDET], None], kind: type[Exception], words: str
) -> None:
    run = Run()
    before = run.tensors()
    with pytest.raises(kind, match=words):
        call(run.scheduler)
    assert all(map(torch.equal, run.tensors(), before))
    assert run.bare.training
    run.scheduler.hold_out(loss_of, held(0))
    run.search()
    assert run.scheduler.found_lr is not None


def test_hold_out_refuses_calls_that_no_search_can_use() -> None:
    run = Run("stacked", num=2)
    with (
        run.scheduler.consensus(),
        pytest.raises(RuntimeError, match=r"`hold_out\(\)` cannot be used inside `consensus\(\)`"),
    ):
        run.scheduler.hold_out(loss_of, held(0))
    run.step()
    with pytest.raises(RuntimeError, match="before the first step of a search"):
        run.scheduler.hold_out(loss_of, held(0))
    run.search()
    probed = Run("stacked", num=2, probe=lambda model: loss_of(model, held(0)))
    with pytest.raises(RuntimeError, match="cannot be used with `probe=`"):
        probed.scheduler.hold_out(loss_of, held(0))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    one_cycle = hdet.OneCycleHDET(optimizer, LR, total_steps=TOTAL, model=model)
    with pytest.raises(RuntimeError, match=r"`hold_out\(\)` is not available in OneCycleHDET"):
        one_cycle.hold_out(loss_of, held(0))


def called_differently(rank: int, how: str) -> str:
    run = Run("processes", rank, 2)
    if how == "once" and rank == 0:
        run.scheduler.hold_out(loss_of, held(0))
    elif how == "dtype":
        extra = torch.ones(1, dtype=[torch.int64, torch.float64][rank])
        run.scheduler.hold_out(lambda model, x, _: loss_of(model, x), held(rank), extra)
    before = run.tensors()
    try:
        run.step()
    except (RuntimeError, ValueError) as error:
        message = str(error)
    assert all(map(torch.equal, run.tensors(), before))
    assert not run.scheduler.is_scouting
    run.step()  # without a search
    return message


@pytest.mark.parametrize(
    ("how", "words"), [("once", "got [1, 0] calls"), ("dtype", "torch.int64 and")]
)
def test_processes_that_call_hold_out_differently_all_raise_and_lose_nothing(
    how: str, words: str, processes: Processes
) -> None:
    for message in processes(2, called_differently, how):
        assert words in message


# What a search does with them --------------------------------------------------------------------


def test_batches_of_several_calls_are_scored_together_and_freed_after_the_search() -> None:
    run = Run()
    for call in range(10):
        run.scheduler.hold_out(loss_of, held(call, 5))
    run.step()
    start = run.scheduler._run.progress.trial.start.weights[0]  # type: ignore[union-attr]
    assert start
    rows = run.held_out.rows(8)[0]
    assert int(rows.isfinite().sum()) == 8 + 2  # eight means of ten parts, and the words
    given = weakref.ref(run.held_out)
    run.search()
    gc.collect()
    assert given() is None


def test_batches_that_are_given_after_the_search_wait_for_the_next_one(tmp_path: Path) -> None:
    run = Run(record=tmp_path)
    run.search()
    assert last_event(tmp_path)["compared_by"] == "losses"
    run.scheduler.hold_out(loss_of, held(0))
    run.step()
    run.scheduler.scout_again(SCOUT)
    run.search()
    assert last_event(tmp_path)["compared_by"] == "held out"


def test_given_batches_replace_those_that_stacked_replicas_hold_out() -> None:
    run = Run("stacked", num=2)
    assert run.held_out.steps_left
    run.scheduler.hold_out(loss_of, held(0))
    assert not run.held_out.steps_left
    run.search()
    assert run.scheduler.last_epoch == 18  # six learning rates, two in each round of six steps


def saved_in_mid_search(run: Run, folder: Path) -> None:
    """Save where a round is half done."""
    for _ in range(STEPS + 2):
        run.step()
    hdet.save_checkpoint(folder, model=run.model, optimizer=run.optimizer, scheduler=run.scheduler)


def resumed(run: Run, folder: Path) -> None:
    path = hdet.latest_checkpoint(folder)
    assert path is not None
    hdet.load_checkpoint(path, model=run.model, optimizer=run.optimizer, scheduler=run.scheduler)


def finished(run: Run) -> tuple[Any, ...]:
    """Search to the end and train on; return everything that must be equal."""
    run.search()
    for _ in range(5):
        run.step()
    weights = torch.cat([p.detach().flatten() for p in run.bare.parameters()])
    return run.scheduler.found_lr, weights.tolist(), run.scheduler.last_epoch


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_resumed_search_goes_on_with_its_batches_bit_for_bit(engine: str, tmp_path: Path) -> None:
    run = Run(engine, num=2)
    if engine == "one":
        run.scheduler.hold_out(loss_of, held(0))
    saved_in_mid_search(run, tmp_path)
    other = Run(engine, num=2)
    if engine == "one":
        other.scheduler.hold_out(loss_of, held(1))  # the saved batches are used instead
    resumed(other, tmp_path)
    expected = finished(run)
    assert finished(other) == expected
    after = Run(engine, num=2)
    resumed(after, tmp_path)
    if engine == "one":
        after.scheduler.hold_out(loss_of, held(2))  # after loading it is as good
    assert finished(after) == expected


def test_resumed_search_leaves_the_random_numbers_of_the_run_that_saved(tmp_path: Path) -> None:
    def drawn_after_search(run: Run) -> list[float]:
        while run.scheduler.is_scouting:
            torch.rand(1)  # as dropout draws
            run.step()
        return torch.rand(3).tolist()

    run = Run()
    run.scheduler.hold_out(loss_of, held(0))
    for _ in range(2):
        torch.rand(1)
        run.step()
    saved_in_mid_search(run, tmp_path)
    at_save = torch.get_rng_state()
    other = Run()
    resumed(other, tmp_path)
    other.scheduler.hold_out(loss_of, held(0))
    assert torch.equal(torch.get_rng_state(), at_save)
    found = drawn_after_search(other)
    torch.set_rng_state(at_save)
    assert drawn_after_search(run) == found


@pytest.mark.parametrize("steps", [1, 2])
def test_resume_while_stacked_replicas_still_hold_out(steps: int, tmp_path: Path) -> None:
    run = Run("stacked", num=2)
    for _ in range(steps):
        run.step()
    arguments = {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler}
    hdet.save_checkpoint(tmp_path, **arguments)
    other = Run("stacked", num=2)
    resumed(other, tmp_path)
    assert finished(other) == finished(run)


def resumed_on(rank: int, folder: Path) -> list[tuple[Any, ...]]:
    run = Run("processes", rank)
    run.scheduler.hold_out(loss_of, held(rank))
    saved_in_mid_search(run, folder)
    expected = finished(run)
    del run
    other = Run("processes", rank)
    resumed(other, folder)
    other.scheduler.hold_out(loss_of, held(rank + 5))
    return [expected, finished(other)]


def test_resumed_search_of_processes_goes_on_bit_for_bit(
    processes: Processes, tmp_path: Path
) -> None:
    for expected, found in processes(2, resumed_on, tmp_path):
        assert found == expected


def test_resumed_search_without_its_calls_goes_on_by_losses(tmp_path: Path) -> None:
    run = Run()
    run.scheduler.hold_out(loss_of, held(0))
    saved_in_mid_search(run, tmp_path)
    other = Run(record=tmp_path)
    resumed(other, tmp_path)
    other.search()
    event = last_event(tmp_path)
    assert event["compared_by"] == "losses"
    assert len(event["points"]) == 6
    assert other.scheduler.found_lr is not None


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([held(0), held(1)], "must be called as often as at the start"),
        ([held(0).float()], "must get batches like those of the checkpoint"),
    ],
)
def test_resumed_search_refuses_other_calls(
    batches: list[Tensor], words: str, tmp_path: Path
) -> None:
    run = Run()
    run.scheduler.hold_out(loss_of, held(0))
    saved_in_mid_search(run, tmp_path)
    other = Run()
    resumed(other, tmp_path)
    for one in batches:
        other.scheduler.hold_out(lambda model, x: loss_of(model, x.double()), one)
    with pytest.raises((RuntimeError, ValueError), match=words):
        other.step()


class Touchy(nn.Module):
    """A loss module that changes everything that it can reach."""

    def __init__(self, fails: Callable[[], bool]) -> None:
        super().__init__()
        self.fails = fails

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        if self.fails():
            raise ValueError("out of range")
        model.eval()
        model.train()
        model.norm.num_batches_tracked = torch.tensor(99)  # type: ignore[union-attr]
        loss = loss_of(model, x + 0.01 * torch.randn_like(x))
        with torch.enable_grad():
            loss = loss + 0 * loss_of(model, x)
        x.zero_()
        model.eval()
        return loss


def test_scoring_leaves_no_trace_of_what_a_loss_function_does() -> None:
    run = Run()
    before, random_state = run.tensors(), torch.get_rng_state()
    tracked = run.bare.norm.num_batches_tracked
    batch_of_loop = held(0)
    kept = batch_of_loop.clone()
    run.scheduler.hold_out(Touchy(lambda: False), batch_of_loop)
    run.step()
    first, second = run.held_out.rows(8), run.held_out.rows(8)
    assert torch.equal(first.nan_to_num(-1.0), second.nan_to_num(-1.0))
    run.search()
    assert torch.equal(batch_of_loop, kept)
    assert all(map(torch.equal, run.tensors(), before))
    assert run.bare.norm.num_batches_tracked is tracked
    assert all(module.training for module in run.bare.modules())
    assert all(p.grad is None or p.grad.isfinite().all() for p in run.bare.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.filterwarnings("ignore:the scout saw hardly:UserWarning")
@pytest.mark.filterwarnings("ignore:the scout saw too little difference")
def test_batches_are_scored_under_the_autocast_state_of_the_call() -> None:
    dtypes: list[torch.dtype] = []

    def noting(model: nn.Linear, x: Tensor) -> Tensor:
        output = model(x)
        dtypes.append(output.dtype)
        return output.float().square().mean()

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scheduler = hdet.HDET(CosineAnnealingLR(optimizer, TOTAL), model=model, scout=SCOUT, guard=None)
    with torch.autocast("cpu", torch.bfloat16):
        scheduler.hold_out(noting, torch.randn(8, 3))
    while scheduler.is_scouting:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
    assert len(dtypes) > 2
    assert set(dtypes) == {torch.bfloat16}


def failing(rank: int, who: str) -> tuple[Any, Any]:
    run = Run("processes", rank, 2)
    fails = [False]
    run.scheduler.hold_out(Touchy(lambda: fails[0]), held(rank))
    run.step()
    fails[0] = who == "all" or rank == 1
    start = run.scheduler._run.progress.trial
    assert start is not None
    if who == "all":
        with warns_on_first(rank, "losses instead of held-out losses: .*ValueError: out of range"):
            while start.held_out is not None:
                run.step()
        return "losses", start.compared_by
    with warns_on_first(rank, r"replica\(s\) \[1\] count as diverged .*ValueError: out of range"):
        rows = run.held_out.rows(8)
    return bool(rows[0, :8].isfinite().all()), rank == 0


@pytest.mark.parametrize("who", ["all", "one"])
def test_loss_function_that_fails_later_stops_no_process(who: str, processes: Processes) -> None:
    for found, wanted in processes(2, failing, who):
        assert found == wanted


def plain() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def sharded(rank: int, kind: str, folder: Path) -> list[float]:
    """Search with FSDP2 or tensor parallelism in each of two replicas."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = plain()
    if kind == "fsdp":
        fully_shard(model, mesh=mesh)
    else:  # all processes of a replica have the same batches
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["shard"], plan)
        rank = rank // 2 * 2
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scheduler = hdet.HDET(
        CosineAnnealingLR(optimizer, TOTAL),
        model=model,
        replicas=hdet.ProcessReplicas(mesh["replicate"]),
        gradients="shared" if kind == "fsdp" else "local",
        scout=SCOUT,
        guard=None,
        record=folder,
    )
    scheduler.hold_out(loss_of, held(rank, 16 + rank))
    lrs = []
    while scheduler.is_scouting:
        if scheduler.last_epoch % STEPS == 0:
            lrs += [row[0] for row in scheduler.get_replica_lrs()]
        optimizer.zero_grad()
        loss = training_loss(model, batch(scheduler.last_epoch, rank))
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
    return lrs


def alone_on(replica: int, first_step: int, lr: float, all_ranks: list[int]) -> float:
    """Train a model in a plain loop on the batches of a replica, and score its tail average."""
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    tail: list[Tensor] = []
    ranks = [rank for rank in all_ranks if rank // 2 == replica]
    for step in range(first_step, first_step + STEPS):
        optimizer.zero_grad()
        loss = torch.stack([training_loss(model, batch(step, rank)) for rank in ranks]).mean()
        loss.backward()
        optimizer.step()
        tail.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    nn.utils.vector_to_parameters(torch.stack(tail[-TAIL:]).mean(0), model.parameters())
    parts = [part for rank in all_ranks for part in held(rank, 16 + rank).tensor_split(2)]
    return fmean(float(training_loss(model, part).detach()) for part in parts)


@pytest.mark.parametrize(("kind", "ranks"), [("fsdp", [0, 1, 2, 3]), ("tensor", [0, 2])])
def test_replicas_of_several_processes_are_scored_on_given_batches(
    kind: str, ranks: list[int], processes: Processes, tmp_path: Path
) -> None:
    lrs = processes(4, sharded, kind, tmp_path)[0]
    want = {
        lr / LR: alone_on(place % 2, place // 2 * STEPS, lr, ranks) for place, lr in enumerate(lrs)
    }
    event = last_event(tmp_path)
    assert event["compared_by"] == "held out"
    scores = [point["score"] for point in event["points"]]
    assert scores == pytest.approx([want[factor] for factor in sorted(want)], rel=1e-9)


def test_start_is_scored_once_because_all_rounds_have_the_same_batches() -> None:
    calls = []

    def counted(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(len(x))
        return loss_of(model, x)

    run = Run()
    run.scheduler.hold_out(counted, held(0))
    assert calls == [32]
    run.search()
    rounds = run.scheduler.last_epoch // STEPS
    assert calls == [32, *[8] * 4 * (rounds + 1)]
