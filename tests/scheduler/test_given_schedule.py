"""Schedules as users have them: functions of the step, by epoch, constant, and their lengths."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedules
from torch.optim.lr_scheduler import LRScheduler

import hdet
from hdet.cli import main as cli
from hdet.scheduler.given_schedule import length_of
from tests.processes import Processes

LR, STEPS, PER_EPOCH, EPOCHS = 0.1, 40, 8, 5
PLAIN: dict[str, Any] = {"scout": None, "guard": None}


def get_lr(step: int) -> float:
    """The schedule of nanoGPT: a linear warm-up, then a cosine to a tenth."""
    if step < 5:
        return LR * step / 5
    share = (step - 5) / (STEPS - 5)
    return 0.1 * LR + 0.45 * LR * (1 + math.cos(math.pi * share))


def table(step: int) -> float:
    """A schedule that exists for the steps of the run alone."""
    return [get_lr(step) for step in range(STEPS)][step]


def sgd(*lrs: float, dtype: torch.dtype = torch.float64) -> torch.optim.SGD:
    lrs = lrs or (LR,)
    groups: list[dict[str, Any]] = [
        {"params": [nn.Parameter(torch.ones(1, dtype=dtype))], "lr": lr} for lr in lrs
    ]
    return torch.optim.SGD(groups, lr=LR)


def lrs_of(optimizer: Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def follow(scheduler: hdet.HDET, steps: int) -> list[list[float]]:
    """The learning rates that the optimizer steps with."""
    seen = []
    for _ in range(steps):
        seen.append(lrs_of(scheduler.optimizer))
        scheduler.optimizer.step()
        scheduler.step(1.0)
    return seen


# A run that equals the plain loop -------------------------------------------------------------

By = Callable[[Optimizer], LRScheduler]
BY_EPOCH: dict[str, By] = {
    "step": lambda o: torch_schedules.StepLR(o, 2, 0.3),
    "milestones": lambda o: torch_schedules.MultiStepLR(o, [1, 3], 0.1),
    "cosine": lambda o: torch_schedules.CosineAnnealingLR(o, EPOCHS),
    "momentum": lambda o: torch_schedules.CyclicLR(o, 0.01, LR, 2),
    "sequential": lambda o: torch_schedules.SequentialLR(
        o,
        [torch_schedules.LinearLR(o, 0.1, 1.0, 2), torch_schedules.CosineAnnealingLR(o, 3)],
        [2],
    ),
}


class Training:
    """A loop that writes the learning rate by hand or steps by epoch, or has hdet in that place."""

    def __init__(self, kind: str, *, is_ours: bool, **options: Any) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        if torch.distributed.is_initialized():
            self.model = DistributedDataParallel(self.model)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        plain = [p for p in self.model.parameters() if p.dim() == 1]
        groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": plain}]
        self.optimizer = torch.optim.SGD(groups, lr=LR, momentum=0.9)
        self.step, self.kind, self.is_ours = 0, kind, is_ours
        if kind != "function":
            self.base = BY_EPOCH[kind](self.optimizer)
        settings = {**PLAIN, "sync_every": 7, **options}
        if is_ours and kind == "function":
            settings = {"schedule": table, "total_steps": STEPS, **settings}
            self.scheduler = hdet.HDET(self.optimizer, model=self.model, **settings)
        elif is_ours:
            settings = {"steps_per_epoch": PER_EPOCH, **settings}
            self.scheduler = hdet.HDET(self.base, model=self.model, **settings)

    def go(self, steps: int, rank: int = 0) -> list[Any]:
        seen: list[Any] = []
        for _ in range(steps):
            if not self.is_ours and self.kind == "function":
                for group in self.optimizer.param_groups:
                    group["lr"] = table(self.step)
            seen.append([(g["lr"], g["momentum"]) for g in self.optimizer.param_groups])
            draw = torch.Generator().manual_seed(100 * rank + self.step)
            x = torch.randn(8, 3, generator=draw, dtype=torch.float64)
            self.optimizer.zero_grad()
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            if self.is_ours:
                self.scheduler.step(loss)
            elif self.kind != "function" and self.step % PER_EPOCH == 0:
                self.base.step()
        return seen

    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def save(self, path: Path) -> None:
        parts = (self.model, self.optimizer, self.scheduler)
        torch.save([part.state_dict() for part in parts], path)

    def load(self, path: Path) -> None:
        parts: tuple[Any, ...] = (self.model, self.optimizer, self.scheduler)
        for part, state in zip(parts, torch.load(path, weights_only=True), strict=True):
            part.load_state_dict(state)
        self.step = self.scheduler.last_epoch


@pytest.mark.parametrize("kind", ["function", *BY_EPOCH])
def test_one_replica_equals_the_plain_loop_bit_for_bit(kind: str) -> None:
    ours, plain = (Training(kind, is_ours=is_ours) for is_ours in (True, False))
    assert ours.go(STEPS) == plain.go(STEPS)
    assert torch.equal(ours.weights(), plain.weights())


def train_both(rank: int) -> list[tuple[bool, bool]]:
    equal = []
    for kind in ("function", "step"):
        both = [Training(kind, is_ours=is_ours, spread=0.0) for is_ours in (True, False)]
        ours, plain = (training.go(STEPS, rank) for training in both)
        equal.append((ours == plain, torch.equal(both[0].weights(), both[1].weights())))
    return equal


def test_ddp_without_spread_equals_the_plain_loop_bit_for_bit(processes: Processes) -> None:
    assert processes(2, train_both) == [[(True, True)] * 2] * 2


@pytest.mark.parametrize("kind", ["function", *BY_EPOCH])
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(kind: str, tmp_path: Path) -> None:
    first = Training(kind, is_ours=True)
    first.go(2 * PER_EPOCH + 3)  # in the middle of an epoch
    first.scheduler.converge()
    first.save(tmp_path / "state")
    second = Training(kind, is_ours=True)
    second.load(tmp_path / "state")
    left = STEPS - first.step
    assert second.go(left) == first.go(left)
    assert torch.equal(second.weights(), first.weights())


# A function of the step -----------------------------------------------------------------------


def test_function_is_asked_for_the_steps_of_the_run_alone() -> None:
    asked = []

    def noting(step: int) -> float:
        asked.append(step)
        return table(step)

    scheduler = hdet.HDET(sgd(), schedule=noting, total_steps=STEPS, **PLAIN)
    seen = follow(scheduler, STEPS)
    assert seen == [[get_lr(step)] for step in range(STEPS)]
    assert set(asked) == set(range(STEPS))
    assert all(type(step) is int for step in asked)
    assert scheduler.get_last_lr() == [get_lr(STEPS - 1)]


@pytest.mark.parametrize(
    ("choice", "error"),
    [
        ("raise", pytest.raises(ValueError, match=r"at most `total_steps` \(40\) times")),
        ("hold", pytest.warns(UserWarning, match=r"step 41 is beyond `total_steps` \(40\)")),
    ],
)
def test_step_after_the_end_of_a_function_follows_on_overrun(choice: Any, error: Any) -> None:
    options: dict[str, Any] = {**PLAIN, "on_overrun": choice}
    scheduler = hdet.HDET(sgd(), schedule=table, total_steps=STEPS, **options)
    follow(scheduler, STEPS)
    with error:
        scheduler.step(1.0)
    assert scheduler.get_last_lr() == [get_lr(STEPS - 1)]


def test_groups_keep_their_ratio_to_the_first_group() -> None:
    scheduler = hdet.HDET(sgd(0.2, 0.02, 0.2), schedule=get_lr, total_steps=STEPS, **PLAIN)
    for step, lrs in enumerate(follow(scheduler, STEPS)):
        assert lrs == [get_lr(step), pytest.approx(get_lr(step) / 10), get_lr(step)]
    equal = hdet.HDET(sgd(0.0, 0.0), schedule=get_lr, total_steps=STEPS, **PLAIN)
    assert follow(equal, STEPS)[9] == [get_lr(9)] * 2
    with pytest.raises(ValueError, match=r"their ratio to it: it must be above 0, got \[0.0, 0.1"):
        hdet.HDET(sgd(0.0, 0.1), schedule=get_lr, total_steps=STEPS)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (math.nan, ValueError, "a finite number that is at least 0, got nan for step 7"),
        (math.inf, ValueError, "a finite number that is at least 0, got inf for step 7"),
        (-0.1, ValueError, "a finite number that is at least 0, got -0.1 for step 7"),
        (torch.tensor(0.1), TypeError, r"must return a number, got tensor\(0.1\S+\) for step 7"),
        (None, TypeError, "must return a number, got None for step 7"),
        (True, TypeError, "must return a number, got True for step 7"),
    ],
)
def test_bad_value_of_a_function_is_an_error_with_its_step(
    value: Any, kind: type[Exception], message: str
) -> None:
    def bad(step: int) -> Any:
        return value if step == 7 else LR

    with pytest.raises(kind, match=message):
        hdet.HDET(sgd(), schedule=bad, total_steps=STEPS)
    endless = hdet.HDET(sgd(), schedule=bad, **PLAIN)
    with pytest.raises(kind, match=message):
        follow(endless, STEPS)


def test_factors_in_the_place_of_learning_rates_are_noticed() -> None:
    def factor(step: int) -> float:
        return 1 - step / STEPS

    with pytest.warns(UserWarning, match=r"its highest value is 1 where the optimizer has 0.1"):
        hdet.HDET(sgd(), schedule=factor, total_steps=STEPS, **PLAIN)
    hdet.HDET(sgd(1.0), schedule=factor, total_steps=STEPS, **PLAIN)


def test_state_holds_no_function_and_loads_with_another_one(tmp_path: Path) -> None:
    scheduler = hdet.HDET(sgd(), schedule=get_lr, total_steps=STEPS, **PLAIN)
    follow(scheduler, 10)
    state = scheduler.state_dict()
    assert state["base"]["schedule"] == {"last_epoch": 10, "max_lrs": [pytest.approx(LR)]}
    torch.save(state, tmp_path / "state")
    other = hdet.HDET(sgd(), schedule=lambda step: 2 * get_lr(step), total_steps=STEPS, **PLAIN)
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert other.get_last_lr() == [2 * get_lr(10)]
    constant = hdet.HDET(sgd(), total_steps=STEPS, **PLAIN)
    with pytest.raises(ValueError, match="must be of a ConstantSchedule, got that of a FunctionSc"):
        constant.load_state_dict(state)


def test_state_of_a_plain_lambda_lr_continues_at_its_step() -> None:
    optimizer = sgd()
    plain = torch_schedules.LambdaLR(optimizer, lambda step: get_lr(step) / LR)
    for _ in range(10):
        optimizer.step()
        plain.step()
    scheduler = hdet.HDET(sgd(), schedule=get_lr, total_steps=STEPS, **PLAIN)
    scheduler.load_state_dict(plain.state_dict())
    assert scheduler.last_epoch == 10
    assert follow(scheduler, 5) == [[get_lr(step)] for step in range(10, 15)]


class Course:
    """A schedule that is a method of an object that cannot be copied."""

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("not to be copied")

    def __call__(self, step: int) -> float:
        return get_lr(step)


@pytest.mark.parametrize("form", [get_lr, Course(), Course().__call__])
@pytest.mark.parametrize("lr", [LR, 1e-6])
def test_scout_takes_the_highest_value_of_a_function_for_the_given_lr(form: Any, lr: float) -> None:
    """The learning rate of the optimizer does not count where a function says another."""
    scheduler = hdet.HDET(sgd(lr), schedule=form, total_steps=STEPS, **PLAIN)
    base = scheduler._run.base
    assert base.peaks == [max(map(get_lr, range(STEPS)))]
    shares = base.shares(STEPS)
    assert shares is not None
    assert shares.highest == 1.0
    assert shares.mean == pytest.approx(sum(map(get_lr, range(STEPS))) / STEPS / base.peaks[0])


# An optimizer alone ---------------------------------------------------------------------------


def test_optimizer_alone_has_a_constant_learning_rate_per_group() -> None:
    scheduler = hdet.HDET(sgd(0.2, 0.01), total_steps=STEPS, **PLAIN)
    assert follow(scheduler, STEPS) == [[0.2, 0.01]] * STEPS
    state = scheduler.state_dict()
    assert state["base"]["kind"] == "ConstantSchedule"
    found = sgd(0.4, 0.02)  # what a loaded optimizer may have, where the scout has doubled it
    resumed = hdet.HDET(found, total_steps=STEPS, **PLAIN)
    resumed.load_state_dict({**state, "step": 5, "base_step": 5})
    assert lrs_of(found) == [0.2, 0.01]


def test_optimizer_alone_is_scouted_if_the_length_is_known() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert hdet.HDET(optimizer, model=model, total_steps=1600).is_scouting
    with pytest.warns(UserWarning, match="scout disabled: the length of the run is unknown, and "):
        assert not hdet.HDET(optimizer, model=model).is_scouting


def test_scout_that_was_asked_for_refuses_an_unknown_length() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    message = "the length of the run is unknown, .* Pass total_steps= to HDET."
    for scout in (hdet.Scout(), hdet.Scout(steps=4), "restart"):
        with pytest.raises(ValueError, match=message):
            hdet.HDET(optimizer, model=model, scout=scout)
    run = hdet.HDET(optimizer, model=model, scout=None)
    with pytest.raises(RuntimeError, match=message):
        run.scout_again()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"schedule": 0.1}, TypeError, "`schedule` must be a function of the step .* got 0.1"),
        ({"schedule": get_lr, "base": True}, ValueError, "`schedule` must be None beside a StepLR"),
        ({"steps_per_epoch": 0}, ValueError, "`steps_per_epoch` must be at least 1, got 0"),
        ({"steps_per_epoch": 2.5}, TypeError, "`steps_per_epoch` must be an integer, got 2.5"),
        ({"schedule": get_lr, "total_steps": "9"}, TypeError, "`total_steps` must be an integer"),
        (
            {"plateau": True, "steps_per_epoch": 9},
            ValueError,
            "`steps_per_epoch` must be None for ReduceLROnPlateau, .* Pass sync_every=9 instead",
        ),
    ],
)
def test_schedules_that_do_not_fit_are_refused(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    first: Any = sgd()
    if options.pop("base", False):
        first = torch_schedules.StepLR(first, 2)
    if options.pop("plateau", False):
        first = torch_schedules.ReduceLROnPlateau(first)
    with pytest.raises(kind, match=message):
        hdet.HDET(first, **options)


# Schedules by epoch ---------------------------------------------------------------------------


def test_epochs_give_the_length_and_a_function_gets_the_epoch() -> None:
    def by_epoch(epoch: int) -> float:
        return [0.3, 0.2, 0.1][epoch]

    base = torch_schedules.CosineAnnealingLR(sgd(), EPOCHS)
    scheduler = hdet.HDET(base, steps_per_epoch=PER_EPOCH, **PLAIN)
    assert scheduler._run.settings.total_steps == EPOCHS * PER_EPOCH
    one_cycle = torch_schedules.OneCycleLR(sgd(), LR, total_steps=EPOCHS)
    with pytest.raises(ValueError, match=r"at most that of the base schedule \(40\), got 41"):
        hdet.HDET(one_cycle, steps_per_epoch=PER_EPOCH, total_steps=41, **PLAIN)
    given = hdet.HDET(sgd(), schedule=by_epoch, steps_per_epoch=8, total_steps=20, **PLAIN)
    wanted = [0.3] * 8 + [0.2] * 8 + [0.1] * 4
    assert follow(given, 20) == [[lr] for lr in wanted]


def test_state_of_a_plain_schedule_by_epoch_continues_at_its_epoch() -> None:
    optimizer = sgd()
    plain = torch_schedules.StepLR(optimizer, 2, 0.3)
    for _ in range(3):
        optimizer.step()
        plain.step()
    base = torch_schedules.StepLR(sgd(), 2, 0.3)
    scheduler = hdet.HDET(base, steps_per_epoch=PER_EPOCH, **PLAIN)
    scheduler.load_state_dict(plain.state_dict())
    assert scheduler.last_epoch == 3 * PER_EPOCH
    wanted = [0.3 * LR] * PER_EPOCH + [0.3**2 * LR]
    assert follow(scheduler, PER_EPOCH + 1) == [[pytest.approx(lr)] for lr in wanted]
    with pytest.raises(ValueError, match="must be of a StepLR, got that of a StepLR by epoch"):
        other = torch_schedules.StepLR(sgd(), 2, 0.3)
        hdet.HDET(other, **PLAIN).load_state_dict(scheduler.state_dict())


def test_epochs_of_another_length_go_on_in_the_same_epoch() -> None:
    first = hdet.HDET(torch_schedules.StepLR(sgd(), 2, 0.3), steps_per_epoch=8, **PLAIN)
    follow(first, 12)  # one epoch and a half
    second = hdet.HDET(torch_schedules.StepLR(sgd(), 2, 0.3), steps_per_epoch=4, **PLAIN)
    second.load_state_dict(first.state_dict())
    assert follow(second, 4) == [[LR]] * 2 + [[pytest.approx(0.3 * LR)]] * 2


@pytest.mark.filterwarnings("ignore:the scout:UserWarning")
def test_all_epochs_follow_a_scout_and_replay_plays_them(tmp_path: Path) -> None:
    steps_per_epoch, epochs = 270, 6
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    base = torch_schedules.MultiStepLR(optimizer, [2, 4], 0.5)
    scheduler = hdet.HDET(
        base,
        model=model,
        steps_per_epoch=steps_per_epoch,
        total_steps=epochs * steps_per_epoch,
        guard=None,
        record=tmp_path / "run",
    )
    assert scheduler.is_scouting
    lrs, scouted = [], 0
    draw = torch.Generator().manual_seed(0)
    for _ in range(epochs * steps_per_epoch):
        x = torch.randn(16, 3, generator=draw)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scouted += scheduler.is_scouting
        scheduler.step(loss)
    assert base.last_epoch == epochs
    found, left = scheduler.found_lr, len(lrs) - scouted
    assert found is not None
    for index, lr in enumerate(lrs[scouted:]):
        epoch = index * epochs / left
        if min(abs(epoch - 2), abs(epoch - 4)) > 0.01:  # an epoch is compressed with the rest
            assert lr == pytest.approx(found * 0.5 ** ((epoch > 2) + (epoch > 4)))
    assert cli.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out.json")]) == 0
    replayed = torch.optim.AdamW(nn.Linear(3, 1).parameters(), lr=1e-3)
    replay = hdet.Replay(replayed, tmp_path / "out.json")
    for lr in lrs[:-1]:
        assert scouted > 0 or replay.get_last_lr() == [pytest.approx(lr)]
        scouted -= 1
        replayed.step()
        replay.step()


# Lengths --------------------------------------------------------------------------------------


def linear(optimizer: Optimizer, start: float, end: float, num: int) -> LRScheduler:
    return torch_schedules.LinearLR(optimizer, start, end, num)


LENGTHS: list[tuple[str, By, int | None]] = [
    ("cosine", lambda o: torch_schedules.CosineAnnealingLR(o, 40), 40),
    ("polynomial", lambda o: torch_schedules.PolynomialLR(o, 40), 40),
    ("linear decay", lambda o: linear(o, 1.0, 0.0, 40), 40),
    ("warm-up", lambda o: linear(o, 0.1, 1.0, 40), None),
    ("constant", lambda o: torch_schedules.ConstantLR(o, 0.5, 40), None),
    ("restarts", lambda o: torch_schedules.CosineAnnealingWarmRestarts(o, 40), None),
    ("steps", lambda o: torch_schedules.MultiStepLR(o, [10, 20]), None),
    ("one cycle", lambda o: torch_schedules.OneCycleLR(o, LR, total_steps=40), 40),
    (
        "warm-up and cosine",
        lambda o: torch_schedules.SequentialLR(
            o, [linear(o, 0.1, 1, 10), torch_schedules.CosineAnnealingLR(o, 30)], [10]
        ),
        40,
    ),
    (
        "cosine and constant",
        lambda o: torch_schedules.SequentialLR(
            o, [torch_schedules.CosineAnnealingLR(o, 30), torch_schedules.ConstantLR(o)], [30]
        ),
        None,
    ),
    (
        "chained",
        lambda o: torch_schedules.ChainedScheduler(
            [linear(o, 0.1, 1, 10), torch_schedules.CosineAnnealingLR(o, 40)]
        ),
        40,
    ),
    (
        "chained without end",
        lambda o: torch_schedules.ChainedScheduler(
            [linear(o, 0.1, 1, 10), torch_schedules.ExponentialLR(o, 0.9)]
        ),
        None,
    ),
]


@pytest.mark.parametrize(("make", "length"), [row[1:] for row in LENGTHS], ids=lambda _: "")
def test_schedule_tells_the_length_that_it_is_made_for(make: By, length: int | None) -> None:
    assert length_of(make(sgd())) == length


def test_told_length_is_no_limit() -> None:
    base = torch_schedules.CosineAnnealingLR(sgd(), 10)
    scheduler = hdet.HDET(base, total_steps=30, **PLAIN)
    assert [lr for [lr] in follow(scheduler, 30)][20] == pytest.approx(LR)


# A learning rate that was lost ----------------------------------------------------------------


class Uncopied(torch_schedules.CosineAnnealingLR):
    """A schedule whose course hdet cannot learn beforehand."""

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("not to be copied")


AFTER_LOADING: dict[str, Callable[[Any, int], Any]] = {
    "cosine": torch_schedules.CosineAnnealingLR,
    "uncopied": Uncopied,
    "optimizer alone": lambda optimizer, _: optimizer,
    "factors": lambda optimizer, _: torch_schedules.LambdaLR(optimizer, lambda _: 300.0),
}


@pytest.mark.filterwarnings("ignore:the scout:UserWarning")
@pytest.mark.parametrize("kind", AFTER_LOADING)
def test_run_stays_below_half_of_the_lowest_lr_that_was_lost(kind: str, tmp_path: Path) -> None:
    """Also if the optimizer comes from a checkpoint, with a learning rate above its first one."""
    steps, model = 1600, nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    state = optimizer.state_dict()
    state["param_groups"][0] |= {"lr": 3e-3, "initial_lr": 1e-5}
    optimizer.load_state_dict(state)
    first = AFTER_LOADING[kind](optimizer, steps)
    options: dict[str, Any] = {"total_steps": steps, "guard": None, "record": tmp_path}
    scheduler = hdet.HDET(first, model=model, **options)
    draw, highest = torch.Generator().manual_seed(0), 0.0
    for _ in range(steps):
        x = 3.16 * torch.randn(16, 4, generator=draw)
        optimizer.zero_grad()
        loss = model(x).square().mean() / 2
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        if not scheduler.is_scouting:
            highest = max(highest, *scheduler.get_last_lr())
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    search = [line for line in lines if line["event"] == "scout"][-1]
    lost = search["divergence"] * search["reference_lrs"]["group0"]
    assert 0 < highest < lost / 2
    assert highest == pytest.approx(scheduler.found_lr)
