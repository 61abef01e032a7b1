"""Knobs: every replica trains with its own values, on every engine; bad ones are refused."""

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, OneCycleLR, SequentialLR

import hdet
from hdet.control.assignment import levels
from tests.knob_run import Run, T, Tiny, adamw, batch, steered, tiny, vector
from tests.processes import Processes

# What these runs are about is not what they find.
pytestmark = pytest.mark.filterwarnings("ignore:the probe cannot compare values of")

N = 4
ENGINES = ["processes", "vmap", "loop"]


SETS: dict[str, Callable[[nn.Module, Any], list[Any]]] = {
    "outside": lambda model, criterion: [
        hdet.weight_decay(),
        hdet.gradient_clip(0.2),
        hdet.betas(beta1=None),
    ],
    "inside": lambda model, criterion: [
        hdet.attention_temperature(model),
        hdet.label_smoothing(criterion),
        hdet.momentum(),
    ],
    "decay": lambda model, criterion: [hdet.lr(shared=True), hdet.weight_decay()],
}
STARTS = {
    "weight_decay": ("log", 0.1),
    "gradient_clip": ("log", 0.2),
    "beta2": ("logit", 0.999),
    "attention_temperature": ("log", 1.0),
    "label_smoothing": ("logit", 0.1),
    "momentum": ("logit", 0.9),
}
NAMES = {
    "outside": ["weight_decay", "gradient_clip", "beta2"],
    "inside": ["attention_temperature", "label_smoothing", "momentum"],
    "decay": ["lr", "weight_decay"],
}


def value(name: str, level: float) -> float:
    """The value of a replica from the definition of a spread of 0.5."""
    kind, start = STARTS[name]
    if kind == "log":
        return start * 1.5**level
    odds = start / (1 - start) * 1.5**level
    return odds / (1 + odds)


def train_engine(rank: int, engine: str, which: str, gradients: Any, steps: int) -> list[Any]:
    """The weights of the local replicas after every step."""
    model, criterion = tiny(), nn.CrossEntropyLoss(label_smoothing=0.1)
    knobs = SETS[which](model, criterion)
    ensemble: Any = None
    wrapped: Any = model
    if engine == "processes":
        wrapped = DistributedDataParallel(model)
        optimizer = adamw(model)
        local = [rank]
    else:
        mode: Any = engine
        ensemble = hdet.StackedReplicas(model, N, mode=mode)
        optimizer = ensemble.optimizer(adamw(model))
        local = list(range(N))
    scheduler = hdet.HDET(
        ConstantLR(optimizer, factor=1.0),
        model=wrapped,
        replicas=ensemble,
        knobs=knobs,
        spread=0.5,
        controller=None,
        design="orthogonal",
        gradients=gradients,
        sync_every=T,
        preset="paper",
    )

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return criterion(model(x), y)

    seen = []
    for step in range(steps):
        parts = [batch(step, replica) for replica in local]
        x, y = (torch.cat(each) for each in zip(*parts, strict=True))
        optimizer.zero_grad()
        if ensemble is None:
            losses = loss(wrapped, x, y)
            losses.backward()
        else:
            losses = ensemble.losses(loss, x, y)
            losses.sum().backward()
        optimizer.step()
        modules = [model] if ensemble is None else ensemble.modules(model)
        seen.append(
            [nn.utils.parameters_to_vector(m.parameters()).detach().clone() for m in modules]
        )
        scheduler.step(losses.detach())
    return [list(each) for each in zip(*seen, strict=True)]


def train_plainly(which: str, gradients: str, steps: int) -> list[list[Tensor]]:
    """N copies in a plain loop, with torch's own modules and numbers."""
    models = [tiny() for _ in range(N)]
    optimizers = [adamw(model) for model in models]
    seen: list[list[Tensor]] = [[] for _ in models]
    for step in range(steps):
        columns = levels("orthogonal", N, NAMES[which], seed=0, cycle=step // T)
        for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            own = {
                name: column[replica] for name, column in zip(NAMES[which], columns, strict=True)
            }
            values = {name: value(name, level) for name, level in own.items() if name != "lr"}
            model.temperature = values.get("attention_temperature", 1.0)
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * 1.5 ** own.get("lr", 0.0)
                group["betas"] = (values.get("momentum", 0.9), values.get("beta2", 0.999))
            if "weight_decay" in values:
                optimizer.param_groups[0]["weight_decay"] = values["weight_decay"]
            x, y = batch(step, replica)
            optimizer.zero_grad()
            smoothing = values.get("label_smoothing", 0.1)
            F.cross_entropy(model(x), y, label_smoothing=smoothing).backward()
        if gradients == "shared":
            for same in zip(*(m.parameters() for m in models), strict=True):
                mean: Any = sum(p.grad for p in same) / N
                for p in same:
                    p.grad = mean.clone()
        for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if "gradient_clip" in NAMES[which]:
                column = columns[NAMES[which].index("gradient_clip")]
                most = value("gradient_clip", column[replica])
                nn.utils.clip_grad_norm_(model.parameters(), most)
            optimizer.step()
            seen[replica].append(vector(model))
        if (step + 1) % T == 0:
            with torch.no_grad():
                for same in zip(*(m.parameters() for m in models), strict=True):
                    mean = sum(p for p in same) / N
                    for p in same:
                        p.copy_(mean)
    return seen


@pytest.mark.parametrize("gradients", ["shared", "local"])
@pytest.mark.parametrize("which", list(SETS))
@pytest.mark.parametrize("engine", ENGINES)
def test_every_replica_trains_with_its_own_knob_values(
    processes: Processes, engine: str, which: str, gradients: str
) -> None:
    steps = 3 * T
    if engine == "processes":
        answers = processes(N, train_engine, engine, which, gradients, steps)
        got = [path for answer in answers for path in answer]
    else:
        got = train_engine(0, engine, which, gradients, steps)
    want = train_plainly(which, gradients, steps)
    for mine, truth in zip(got, want, strict=True):
        for one, other in zip(mine, truth, strict=True):
            # Dials are float32: 1e-7 of the value of a knob.
            assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)


# On one device, in short -----------------------------------------------------------------------


def test_weight_decay_groups_are_shared_or_separate_and_zero_stays_zero() -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        a, b, c, d = model.parameters()
        groups = [
            {"params": [a], "name": "a", "weight_decay": 0.1},
            {"params": [b], "name": "b", "weight_decay": 0.01},
            {"params": [c, d], "name": "c", "weight_decay": 0.0},
        ]
        return torch.optim.SGD(groups, lr=0.1)

    together = Run([hdet.weight_decay()], optimizer=sgd)
    ratios = [
        a / b
        for a, b in zip(
            together.each("weight_decay"), together.each("weight_decay", 1), strict=True
        )
    ]
    assert ratios == pytest.approx([10.0] * 4)
    assert together.each("weight_decay", 2) == [0.0] * 4
    alone = Run([hdet.weight_decay(groups=["a", "b"], shared=False)], optimizer=sgd)
    assert list(alone.scheduler.get_knobs()) == ["weight_decay/a", "weight_decay/b"]
    one = Run([hdet.weight_decay(groups=["b"])], optimizer=sgd)
    assert one.each("weight_decay") == [0.1] * 4
    assert len(set(one.each("weight_decay", 1))) > 1


def test_replica_values_are_clamped_to_the_bounds() -> None:
    run = Run([hdet.weight_decay(bounds=(0.09, 0.11))])
    assert set(run.each("weight_decay")) == {0.09, 0.11}


def test_a_knob_follows_its_own_schedule() -> None:
    run = Run([hdet.weight_decay(spread=0.0, schedule=lambda step: 1 / (1 + step))])
    seen = [run.each("weight_decay")[0]]
    for _ in range(4):
        seen.append(run.go(1).each("weight_decay")[0])
    assert seen == pytest.approx([0.1, 0.05, 0.1 / 3, 0.025, 0.02])


def cycled(optimizer: Any) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=30)


def held_then_cycled(optimizer: Any) -> SequentialLR:
    parts = [ConstantLR(optimizer, 1.0, total_iters=4), cycled(optimizer)]
    return SequentialLR(optimizer, parts, [4])


@pytest.mark.parametrize("base", [cycled, held_then_cycled])
def test_momentum_is_explored_around_the_scheduled_momentum(base: Callable[..., Any]) -> None:
    run = Run([hdet.momentum(spread=0.5)], base=base, total_steps=30)
    plain = adamw(tiny())
    schedule = base(plain)
    for _ in range(10):
        beta = plain.param_groups[0]["betas"][0]
        seen = [betas[0] / (1 - betas[0]) for betas in run.each("betas")]
        want = sorted(beta / (1 - beta) * 1.5**sign for sign in (-1, -1, 1, 1))
        assert sorted(seen) == pytest.approx(want)
        run.go(1)
        plain.step()
        schedule.step()


def test_beta2_is_explored_while_the_schedule_cycles_beta1() -> None:
    def base(optimizer: Any) -> OneCycleLR:
        return OneCycleLR(optimizer, max_lr=0.1, total_steps=30)

    run = Run([hdet.betas(beta1=None)], base=base, total_steps=30).go(5)
    plain = adamw(tiny())
    schedule = base(plain)
    for _ in range(5):
        plain.step()
        schedule.step()
    betas = run.each("betas")
    assert {beta1 for beta1, _ in betas} == {plain.param_groups[0]["betas"][0]}
    assert len({beta2 for _, beta2 in betas}) == 2


def test_a_user_knob_gets_a_number_or_one_value_per_replica() -> None:
    strength = torch.zeros(4)
    turn: Any = strength.copy_
    knob = hdet.Knob("strength", lambda: strength, turn, bounds=(-1.0, 1.0), spread=0.2)

    def loss(model: Any, x: Tensor, y: Tensor, strength: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) + strength.sum()

    run = Run([knob])
    assert sorted(strength.tolist()) == pytest.approx([-0.2, -0.2, 0.2, 0.2])
    parts = [batch(0, replica) for replica in range(4)]
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    with_it = run.ensemble.losses(loss, x, y, strength)
    without = run.ensemble.losses(lambda model, x, y: F.cross_entropy(model(x), y), x, y)
    assert torch.allclose(with_it - without, strength.double(), atol=1e-6)

    state = {"x": 0.3}
    single = hdet.Knob("x", lambda: state["x"], lambda v: state.update(x=v), bounds=(0.1, 1.0))
    model = tiny()
    hdet.HDET(ConstantLR(adamw(model), factor=1.0), knobs=[single], controller=None, preset="paper")
    assert state["x"] == 0.3  # one replica: the start value


def test_a_dial_makes_a_knob_for_every_engine() -> None:
    class Scaled(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.scale = hdet.Dial(2.0)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale()

    model = Scaled().double()
    model.scale.place(4, torch.device("cpu"))
    knob = hdet.Knob(
        "scale", model.scale.get, model.scale.set, bounds=(0.1, 10.0), space="log", spread=1.0
    )
    run = Run([knob], model=model).go(T + 1)
    assert sorted(model.scale.values.tolist()) == pytest.approx([1.0, 1.0, 4.0, 4.0])
    assert list(run.scheduler.get_knobs()) == ["scale"]


def test_a_tensor_learning_rate_makes_the_other_settings_tensors() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))

    run = Run([hdet.lr(spread=0.1), hdet.betas(), hdet.eps()], num=8, optimizer=make)
    before = [
        (group["betas"], group["eps"]) for one in run.optimizer.each for group in one.param_groups
    ]
    run.go(2 * T)
    after = [
        (group["betas"], group["eps"]) for one in run.optimizer.each for group in one.param_groups
    ]
    for (betas, eps), (same_betas, same_eps) in zip(before, after, strict=True):
        assert isinstance(eps, Tensor) and eps is same_eps
        assert all(a is b for a, b in zip(betas, same_betas, strict=True))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_compiled_optimizer_step_with_knobs_compiles_once() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model = tiny().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    knobs = [hdet.lr(), hdet.weight_decay(), hdet.betas(), hdet.eps(), hdet.gradient_clip(1.0)]
    scheduler = hdet.HDET(
        ConstantLR(optimizer, factor=1.0),
        knobs=knobs,
        sync_every=1,
        controller=None,
        preset="paper",
    )
    step = torch.compile(optimizer.step, backend="aot_eager")
    graphs = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*`lr_scheduler.step..` before.*")
        for _ in range(10):
            for knob in scheduler._run.knob_bank.knobs:
                knob.state = knob.state._replace(scale=knob.state.scale * 0.99)
            model(torch.randn(5, 3)).square().sum().backward()
            step()
            scheduler.step(1.0)
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[2:] == graphs[1:2] * 8  # the first step makes the optimizer's state


# State -----------------------------------------------------------------------------------------


def test_a_run_with_knobs_resumes_bit_for_bit() -> None:
    whole = steered().go(8 * T)
    first = steered().go(5 * T)
    first.scheduler.converge()
    state = copy.deepcopy(
        (first.model.state_dict(), first.optimizer.state_dict(), first.scheduler.state_dict())
    )
    again = steered()
    again.model.load_state_dict(state[0])
    again.optimizer.load_state_dict(state[1])
    again.scheduler.load_state_dict(state[2])
    first.go(3 * T)
    again.go(3 * T)
    for one, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert first.scheduler.get_knobs() == again.scheduler.get_knobs()
    assert first.scheduler.sensitivity() == again.scheduler.sensitivity()
    assert any(centre != 1 for centre in whole.scheduler.get_knobs().values())
    assert first.each("weight_decay") == again.each("weight_decay")


def test_loading_an_optimizer_state_keeps_the_values_of_each_replica() -> None:
    run = steered().go(4 * T)
    values = run.each("weight_decay")
    state = run.optimizer.state_dict()
    assert state["param_groups"][0]["weight_decay"] == values[0]
    run.optimizer.load_state_dict(state)
    assert run.each("weight_decay") == values


def test_sensitivity_gives_a_slope_with_its_interval() -> None:
    run = steered()
    assert run.scheduler.sensitivity() == {}
    run.go(6 * T)
    recent_slope = run.scheduler.sensitivity()
    assert list(recent_slope) == ["lr", "weight_decay", "attention_temperature", "label_smoothing"]
    for one in recent_slope.values():
        low, high = one.interval
        assert low < one.slope < high
        assert one.error > 0


def test_the_record_holds_every_knob(tmp_path: Path) -> None:
    from hdet.records.reader import read

    steered(tmp_path).go(6 * T)
    results = read(tmp_path)
    assert results.knob_names == [
        "weights", "biases", "weight_decay", "attention_temperature", "label_smoothing"
    ]  # fmt: skip
    assert results.rate_names == ["weights", "biases"]
    assert results.settings["probe"] == {"num": None, "mode": "min", "tail": 0.5}
    assert [knob["name"] for knob in results.settings["knobs"]][:2] == ["lr", "weight_decay"]
    for _, knob in results.knob("weight_decay"):
        assert len(set(knob.values)) == 2
        assert knob.slope is not None
        assert knob.space == "log"
    reasons = {knob.decision for _, knob in results.knob("label_smoothing")}
    assert reasons <= {"up", "down", "abstain"}


def test_loading_a_state_with_other_knobs_is_refused() -> None:
    state = steered().scheduler.state_dict()
    with pytest.raises(ValueError, match=r"must hold the knobs \['weight_decay'\], got"):
        Run([hdet.weight_decay()]).scheduler.load_state_dict(state)


# Bad input -------------------------------------------------------------------------------------


def stuck() -> hdet.Knob:
    return hdet.Knob("stuck", lambda: 0.5, lambda value: None, bounds=(0.0, 1.0))


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ([stuck()], "knob 'stuck' has no effect: `set` was given .*, and `get` reads 0.5"),
        (
            [hdet.weight_decay(bounds=(1.0, 2.0))],
            r"must contain its start value, got \(1, 2\) and 0.1",
        ),
        ([hdet.weight_decay(), hdet.weight_decay()], "a second one for 'weight_decay'"),
        ([hdet.momentum(), hdet.betas()], "a second one for 'beta1'"),
        ([hdet.lr(), hdet.lr()], r"must hold hdet.lr\(\) at most once"),
        ([hdet.lr(groups=["nobody"])], r"must be among \['weights', 'biases'\], got 'nobody'"),
        ([hdet.weight_decay(groups=["biases"])], "must start above 0 in a log space"),
        (["lr"], "`knobs` must be knobs such as"),
    ],
)
def test_invalid_knobs_are_refused(knobs: list[Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        Run(knobs)


def test_missing_or_invalid_knob_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="bounds"):
        hdet.Knob("x", lambda: 1.0, lambda value: None)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="must contain 1"):
        hdet.lr(bounds=(2.0, 3.0))
    with pytest.raises(TypeError, match="must be two numbers"):
        hdet.weight_decay(bounds=3.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`spread` of knob 'weight_decay' must be 0 or more"):
        hdet.weight_decay(spread=-1.0)
    with pytest.raises(TypeError, match="`get` of knob 'x' must be a function"):
        hdet.Knob("x", 1.0, lambda value: None, bounds=(0, 1))  # type: ignore[arg-type]


def test_a_knob_on_a_setting_that_the_optimizer_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="needs an optimizer with 'betas' in its groups, got SGD"):
        Run([hdet.betas(beta1=None)], optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))


def test_knobs_take_turns_if_there_are_too_few_replicas() -> None:
    knobs = [hdet.lr(shared=True, spread=0.1), hdet.weight_decay(), hdet.eps(), hdet.momentum()]
    with pytest.warns(
        UserWarning, match="4 replicas can compare 3 knob.s. at a time, got 4: .* take turns"
    ):
        run = Run(knobs, controller=hdet.Tracker())
    rested = []
    for _ in range(4):
        rested.append([k.name for k in run.scheduler._run.knob_bank.knobs if not k.is_spread()])
        run.go(T)
    assert sorted(name for names in rested for name in names) == [
        "eps",
        "lr",
        "momentum",
        "weight_decay",
    ]


def test_too_many_knobs_for_permutations_warn() -> None:
    knobs = [hdet.lr(shared=True, spread=0.1), hdet.weight_decay()]
    with pytest.warns(UserWarning, match="got 2: no knob will move"):
        Run(knobs, num=2, controller=hdet.Tracker(), design="permutation")
    Run(knobs, num=2, controller=hdet.PaperController())


def test_a_dial_that_no_code_reads_raises() -> None:
    class Manual(Tiny):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            scores = hidden @ hidden.T
            output: Tensor = self.down(scores.softmax(-1) @ hidden)
            return output

    model = Manual().double()
    run = Run([hdet.attention_temperature(model)], model=model)
    with pytest.raises(ValueError, match="'attention_temperature' has no effect: nothing has"):
        run.go(T)


def refuse_in_processes(rank: int) -> str:
    model = tiny()
    knob = stuck() if rank == 1 else hdet.Knob("stuck", lambda: 0.5, lambda v: None, bounds=(0, 1))
    try:
        hdet.HDET(
            ConstantLR(adamw(model), factor=1.0),
            model=DistributedDataParallel(model),
            knobs=[knob],
            controller=None,
            preset="paper",
        )
    except ValueError as error:
        return str(error)
    return ""


def test_a_knob_without_effect_is_refused_on_all_processes(processes: Processes) -> None:
    assert all("has no effect" in results for results in processes(2, refuse_in_processes))


def test_different_knobs_on_two_replicas_are_refused(processes: Processes) -> None:
    results = processes(2, differing_knobs)
    assert all(
        "replicas must be alike: `knobs.0.spread` is 0.5 on replica 0 and 0.7" in t for t in results
    )


def differing_knobs(rank: int) -> str:
    model = tiny()
    try:
        hdet.HDET(
            LambdaLR(adamw(model), lambda _: 1.0),
            model=DistributedDataParallel(model),
            knobs=[hdet.weight_decay(spread=0.7 if rank else 0.5)],
            preset="paper",
        )
    except ValueError as error:
        return str(error)
    return ""


def test_paper_controller_moves_every_knob_by_its_softmax() -> None:
    """h <- h + lambda (1 - beta) (sum w h - mean h) after one cycle (Remark 1)."""
    run = Run([hdet.weight_decay()], controller=hdet.PaperController(temperature=0.01))
    values = run.each("weight_decay")
    run.go(T - 1)
    parts = [batch(T - 1, replica) for replica in range(4)]
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    losses = run.ensemble.losses(run.loss, x, y)
    sums = run.scheduler._run.training_loss.rows()[:, 0] * (T - 1) + losses.detach()
    run.go(1)
    weights = (-(sums / T) / 0.01).softmax(0).tolist()
    pull = math.fsum(w * v for w, v in zip(weights, values, strict=True)) - sum(values) / 4
    want = 0.1 + 0.5 * 0.1 * pull
    assert run.scheduler.get_knobs()["weight_decay"] == pytest.approx(want, rel=1e-6)


# What a review has found -------------------------------------------------------------------------


def consult(rank: int) -> list[float]:
    model = tiny()
    knob = hdet.attention_temperature(model, spread=2.0)
    wrapped = DistributedDataParallel(model)
    optimizer = adamw(model)
    scheduler = hdet.HDET(
        ConstantLR(optimizer, factor=1.0),
        model=wrapped,
        knobs=[knob],
        controller=None,
        sync_every=5,
        preset="paper",
    )
    (dial,) = next(iter(knob.dials.values()))
    before = float(dial())
    with scheduler.consensus():
        inside = float(dial())
    return [before, inside, float(dial())]


def test_dials_have_the_centre_value_inside_consensus(processes: Processes) -> None:
    answers = processes(2, consult)
    assert [inside for _, inside, _ in answers] == [1.0, 1.0]
    assert sorted(before for before, _, _ in answers) == pytest.approx([1 / 3, 3.0])
    assert all(before == after for before, _, after in answers)


def one_cycle(knobs: list[Any]) -> list[list[float]]:
    model = tiny()
    ensemble = hdet.StackedReplicas(model, 2)
    optimizer = ensemble.optimizer(adamw(model))
    scheduler = hdet.OneCycleHDET(
        optimizer,
        max_lr=0.01,
        total_steps=20,
        model=model,
        replicas=ensemble,
        sync_every=2,
        knobs=knobs,
    )
    seen = []
    for step in range(20):
        seen.append(scheduler.get_base_lr())
        parts = [batch(step, replica) for replica in range(2)]
        x, y = (torch.cat(each) for each in zip(*parts, strict=True))
        losses = ensemble.losses(lambda model, x, y: F.cross_entropy(model(x), y), x, y)
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
        scheduler.step(losses.detach())
    return seen


def test_learning_rates_that_are_not_explored_keep_their_schedule() -> None:
    plain = adamw(tiny())
    schedule = OneCycleLR(plain, max_lr=0.01, total_steps=20)
    want = []
    for _ in range(20):
        want.append(schedule.get_last_lr())
        plain.step()
        schedule.step()
    assert one_cycle([hdet.weight_decay()]) == [pytest.approx(lrs) for lrs in want]
    partly = one_cycle([hdet.lr(groups=["weights"])])
    assert [lrs[1] for lrs in partly] == pytest.approx([lrs[1] for lrs in want])


def test_learning_rates_are_clamped_to_their_bounds() -> None:
    run = Run([hdet.lr(spread=0.5, bounds=(0.9, 1.1))], controller=hdet.PaperController())
    assert sorted(run.each("lr")) == pytest.approx([0.045, 0.045, 0.055, 0.055])


@pytest.mark.parametrize("controller", [hdet.PaperController(), None])
def test_groups_have_the_spreads_of_a_dictionary_and_others_that_of_the_run(
    controller: Any,
) -> None:
    run = Run([hdet.lr(spread={"weights": 0.5})], controller=controller, spread=0.1)
    assert sorted(run.each("lr", 0)) == pytest.approx([0.025, 0.05 * 5 / 6, 0.05 * 7 / 6, 0.075])
    assert max(run.each("lr", 1)) == pytest.approx(0.05 * 1.1)


@pytest.mark.parametrize(
    ("knob", "words"),
    [
        ({"spread": {"nobody": 0.1}}, r"`spread` of knob 'lr' must be among \['weights', "),
        ({"spread": {"weights": 0.1}, "groups": ["biases"]}, r"must be among \['biases'\]"),
        ({"spread": {"weights": -1.0}}, r"`spread\['weights'\]` must be"),
        ({"spread": {"weights": "x"}}, r"`spread\['weights'\]` must be"),
        ({"spread": {"weights": 0.1}, "shared": True}, "must be one number where all groups"),
    ],
)
def test_invalid_spreads_of_groups_are_refused(knob: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        Run([hdet.lr(**knob)])


@pytest.mark.parametrize("spread", [-0.5, "x", 2.0])
def test_spreads_that_allow_negative_learning_rates_are_refused(spread: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="`spread` must be"):
        Run([hdet.lr(spread=spread)], controller=hdet.PaperController())


def test_a_knob_without_effect_raises_when_its_turn_comes() -> None:
    with pytest.warns(UserWarning, match="take turns"):
        run = Run([hdet.weight_decay(), stuck()], num=2, controller=hdet.Tracker())
    with pytest.raises(ValueError, match="knob 'stuck' has no effect"):
        run.go(2 * T)


def test_knobs_that_take_turns_all_move() -> None:
    """Two replicas tell one knob apart: how slopes vary is known from its turn before."""
    dials = [hdet.Dial(4.0), hdet.Dial(4.0)]
    knobs = [
        hdet.Knob(name, dial.get, dial.set, bounds=(0.01, 10.0), space="log", spread=0.3)
        for name, dial in zip("ab", dials, strict=True)
    ]

    def loss(model: Any, x: Any, y: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(x), y) + sum(dial() for dial in dials)

    with pytest.warns(UserWarning, match="take turns"):
        run = Run(knobs, num=2, controller=hdet.Tracker(), loss=loss, gradients="local")
    assert all(value < 3.0 for value in run.go(40 * T).scheduler.get_knobs().values())
    assert set(run.scheduler.sensitivity()) == {"a", "b"}


def test_two_knobs_on_one_dial_are_refused() -> None:
    dial = hdet.Dial(0.5)
    knobs = [hdet.Knob(name, dial.get, dial.set, bounds=(0.0, 1.0)) for name in "ab"]
    with pytest.raises(ValueError, match="must each write another setting"):
        Run(knobs, num=4)


def test_momentum_starts_at_the_scheduled_momentum() -> None:
    knobs = [hdet.momentum(bounds=(0.92, 0.99))]  # the optimizer's own is 0.9
    assert Run(knobs, base=cycled, total_steps=30).scheduler.get_knobs()["momentum"] == 0.95


@pytest.mark.parametrize("bounds", [5, (1.0,), None])
def test_bounds_of_lr_that_are_not_two_numbers_are_refused(bounds: Any) -> None:
    with pytest.raises(TypeError, match="`bounds` of knob 'lr' must be two numbers"):
        hdet.lr(bounds=bounds)


def test_a_dial_can_be_passed_as_a_knob_directly() -> None:
    dial = hdet.Dial(0.5)
    knob = hdet.Knob("x", dial.get, dial.set, bounds=(0.0, 1.0))
    run = Run([knob], num=2)
    assert sorted(dial.values.tolist()) == pytest.approx([0.4, 0.6])
    with pytest.raises(ValueError, match="nothing has read it"):
        run.go(T)


def test_a_loaded_value_is_clamped_to_tighter_bounds() -> None:
    run = Run([hdet.weight_decay(bounds=(1e-3, 10.0))])
    state = run.scheduler.state_dict()
    state["knobs"][0]["scale"] = 5.0
    tight = Run([hdet.weight_decay(bounds=(0.01, 1.0))])
    tight.scheduler.load_state_dict(state)
    assert tight.scheduler.get_knobs() == {"weight_decay": 1.0}


@pytest.mark.parametrize("name", ["weights", "lr/weights"])
def test_a_knob_with_the_name_of_a_group_is_refused(name: str) -> None:
    state = {"x": 0.5}
    knob = hdet.Knob(name, lambda: state["x"], lambda v: state.update(x=v), bounds=(0, 1))
    with pytest.raises(ValueError, match="names that no parameter group has"):
        Run([hdet.lr(), knob], num=1)
    with pytest.raises(ValueError, match="`groups` of knob 'lr' must be different"):
        Run([hdet.lr(groups=["weights", "weights"])])


def test_a_second_scheduler_restores_the_settings_before_the_first() -> None:
    run = Run([hdet.weight_decay()])
    del run.scheduler
    base = ConstantLR(run.optimizer, factor=1.0)
    hdet.HDET(base, model=run.model, replicas=run.ensemble, controller=None, preset="paper")
    run.optimizer.step()
    assert run.each("weight_decay") == [0.1] * 4


def test_gradient_clip_respects_the_scale_of_grad_scaler() -> None:
    """A fused optimizer takes GradScaler's scale out in its step, after gradients are clipped."""
    shifted_by = []
    for fused in (False, True):
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
        scheduler = hdet.HDET(
            ConstantLR(optimizer, factor=1.0),
            knobs=[hdet.gradient_clip(1.0)],
            controller=None,
            preset="paper",
        )
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(1, 2)).square().sum()).backward()
        scaler.step(optimizer)
        shifted_by.append(model.weight.detach().clone())
        assert scheduler.get_knobs() == {"gradient_clip": 1.0}
    assert torch.allclose(shifted_by[0], shifted_by[1], atol=1e-5)
    assert float((shifted_by[0] - 1).norm()) == pytest.approx(1.0, abs=1e-4)
    with pytest.raises(ValueError, match="`closure` must be None with"):
        optimizer.step(lambda: 1.0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hdet.Knob("x", lambda: 1.0, print, bounds=3), "must be two numbers, got 3"),  # type: ignore[arg-type]
        (lambda: hdet.Knob("x", lambda: 1.0, print, bounds=(0, math.inf)), "must be given where"),
        (
            lambda: Run([hdet.weight_decay(groups=["weights", "biases"])]),
            "got 0 in one of its groups",
        ),
        (
            lambda: Run([hdet.weight_decay(schedule=lambda step: math.nan)]),
            "`schedule` of knob 'weight_decay' must be finite, got nan at step 0",
        ),
        (
            lambda: Run([hdet.eps()], optimizer=lambda m: torch.optim.Adafactor(m.parameters())),
            "needs an optimizer with 'eps' in its groups, got Adafactor",
        ),
    ],
)
def test_unusual_knob_arguments_are_refused_with_a_clear_message(
    make: Callable[[], Any], words: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_dropout_knob_with_a_probe_and_shared_gradients_warns() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2))
    knobs = [hdet.dropout(model)]
    ensemble = hdet.StackedReplicas(model, 4)
    optimizer = ensemble.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    given: Any = {"model": model, "replicas": ensemble, "knobs": knobs, "sync_every": 5}
    for gradients, wanted in (("shared", 1), ("local", 0)):
        base = ConstantLR(optimizer, factor=1.0)
        probe = hdet.Probe(lambda model: model(torch.ones(2, 3)).mean())
        with warnings.catch_warnings(record=True) as results:
            warnings.simplefilter("always")
            hdet.HDET(base, probe=probe, **{**given, "gradients": gradients})
        texts = [str(one.message) for one in results]
        assert sum("cannot compare values of dropout" in text for text in texts) == wanted


# Knobs that are created too late, or that no code reads ------------------------------------


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(3, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.up(x))
        return attend(y, y, y)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Outside of the class: what is tempered there is the module that calls it."""
    return F.scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize("make", [hdet.dropout, hdet.attention_temperature])
def test_a_knob_for_a_model_that_was_stacked_before_is_refused(make: Any) -> None:
    model = Attends()
    hdet.StackedReplicas(model, 2)
    with pytest.raises(ValueError, match=r"before hdet\.StackedReplicas copies"):
        make(model)
    early = Attends()
    make(early)
    hdet.StackedReplicas(early, 2)
    make(early)  # all replicas have it: another run may name it again
    make(hdet.StackedReplicas(Attends(), 2).consensus())


def test_attention_temperature_acts_on_the_module_inside_of_ddp(processes: Processes) -> None:
    for trained, probed in processes(2, tempered):
        assert trained == pytest.approx(probed)


def tempered(rank: int) -> tuple[float, float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Attends().eval())
    (dials,) = hdet.attention_temperature(model).dials.values()
    next(iter(dials)).set(3.0)
    x = torch.randn(1, 5, 3)
    with torch.no_grad():
        return float(model(x).square().sum()), float(model.module(x).square().sum())


def test_nested_groups_of_attention_temperature_are_refused() -> None:
    model = nn.Sequential(nn.Sequential(Attends()))
    with pytest.raises(ValueError, match=r"'0\.0' inside of '0'"):
        hdet.attention_temperature(model, groups=["0", "0.0"], shared=False)


def test_default_spread_in_a_linear_space_is_a_tenth_of_the_bounds() -> None:
    linear: Any = {"space": "linear"}
    assert hdet.dropout(Attends(), bounds=(0.0, 0.5), **linear).spread == 0.05
    assert hdet.weight_decay(bounds=(0.0, 0.2), **linear).spread == pytest.approx(0.02)
    assert hdet.eps().spread == 2.0
    assert hdet.weight_decay(spread=0.3).spread == 0.3


def test_a_subclass_of_dropout_stays_with_a_warning() -> None:
    class Mine(nn.Dropout):
        pass

    with pytest.warns(UserWarning, match=r"dropout in '1' \(Mine\) is not steered"):
        hdet.dropout(nn.Sequential(nn.Dropout(0.1), Mine(0.1)))


def test_a_consensus_copy_has_its_dial_at_the_centre() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.scale = hdet.Dial(2.0)

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (as in torch)
            return self.scale() * super().forward(input)

    model = Scaled()
    replicas = hdet.StackedReplicas(model, 2)
    knob = hdet.Knob("scale", model.scale.get, model.scale.set, bounds=(0.1, 10), space="log")
    optimizer = replicas.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    base = ConstantLR(optimizer, factor=1.0)
    hdet.HDET(base, model=model, replicas=replicas, knobs=[knob], preset="paper", sync_every=5)
    copied: Any = replicas.consensus()
    assert model.scale.values.tolist() == pytest.approx([2 / 1.5, 3.0])
    assert float(copied.scale()) == 2.0


def test_a_dial_that_only_the_probe_reads_raises() -> None:
    model, criterion = nn.Linear(3, 3), nn.CrossEntropyLoss(label_smoothing=0.1)
    replicas = hdet.StackedReplicas(model, 2)
    optimizer = replicas.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.randn(8, 3), torch.randint(3, (8,))
    scheduler = hdet.HDET(
        ConstantLR(optimizer, factor=1.0),
        model=model,
        replicas=replicas,
        knobs=[hdet.label_smoothing(criterion)],
        probe=lambda model: criterion(model(x), y),
        controller=hdet.Tracker(),
        sync_every=2,
        total_steps=10,
        preset="paper",
    )
    with pytest.raises(ValueError, match="nothing has read it"):
        for _ in range(2):
            losses = replicas.losses(lambda model, x, y: F.cross_entropy(model(x), y), x, y)
            optimizer.zero_grad()
            losses.sum().backward()
            optimizer.step()
            scheduler.step(losses.detach())


def test_knobs_accept_numpy_numbers() -> None:
    box = {"mine": np.float32(0.5)}
    knob = hdet.Knob("mine", lambda: box["mine"], lambda v: box.update(mine=v), bounds=(0.0, 1.0))
    one: Any = np.float32(1.0)
    Run([knob, hdet.weight_decay(schedule=lambda step: one)]).go(1)


def test_get_or_schedule_without_a_number_raises_with_the_knob_name() -> None:
    nothing = hdet.Knob("mine", lambda: None, lambda value: None, bounds=(0.0, 1.0))
    with pytest.raises(TypeError, match="`get` of knob 'mine' must return a number"):
        Run([nothing])

    def unclear(step: int) -> Any:
        return None

    with pytest.raises(TypeError, match="`schedule` of knob 'weight_decay' must return a number"):
        Run([hdet.weight_decay(schedule=unclear)])
