"""Probes: the same batches for every replica, in eval mode, and no trace of it in the run."""

import copy
import functools
import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import DataLoader, TensorDataset

import hdet
from hdet.signals.probe import as_probe
from hdet.signals.probe_scoring import score_replicas
from tests.processes import Processes

T = 4


class Net(nn.Module):
    """Everything that must not change while it is probed: BatchNorm, dropout, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(3, 6), nn.BatchNorm1d(6)
        self.dropout, self.down = nn.Dropout(0.3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.dropout(torch.relu(self.norm(self.up(x)))))
        return output


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net()


def data(seed: int, num: int = 16) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(num, 3, generator=draw), torch.randint(2, (num,), generator=draw)


HELD = data(99, 32)


def score(model: Any) -> Tensor:
    return F.cross_entropy(model(HELD[0]), HELD[1], reduction="none")


def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


class Run:
    def __init__(self, probe: Any, num: int = 4, **options: Any) -> None:
        self.model = net()
        self.ensemble = hdet.StackedReplicas(self.model, num, mode="loop")
        self.optimizer = self.ensemble.optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        settings = {"controller": hdet.Tracker(), "spread": 0.3, "sync_every": T, **options}
        self.scheduler = hdet.HDET(
            ConstantLR(self.optimizer, factor=1.0),
            model=self.model,
            replicas=self.ensemble,
            probe=probe,
            **settings,
            preset="paper",
        )

    def go(self, steps: int) -> "Run":
        for step in range(steps):
            losses = self.ensemble.losses(loss, *data(step, 4 * self.ensemble.size))
            self.optimizer.zero_grad()
            losses.sum().backward()
            self.optimizer.step()
            self.scheduler.step(losses.detach())
        return self


def test_controller_gets_the_scores_of_each_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what each scores with its own weights, in eval mode, before the converge."""
    run = Run(hdet.Probe(score, tail=0.0))
    seen: list[Any] = []
    steer = run.scheduler._run.knob_bank.move_knobs

    def spy(losses: Any, fit: Any, errors: Any, scores: Any) -> Any:
        seen.append(scores)
        return steer(losses, fit, errors, scores)

    monkeypatch.setattr(run.scheduler._run.knob_bank, "move_knobs", spy)
    run.go(T - 1)
    losses = run.ensemble.losses(loss, *data(T - 1, 16))
    run.optimizer.zero_grad()
    losses.sum().backward()
    run.optimizer.step()
    with torch.no_grad():
        want = [score(copy.deepcopy(module).eval()) for module in run.ensemble.modules(None)]
    run.scheduler.step(losses.detach())
    for got, one in zip(seen[0], want, strict=True):
        assert got == pytest.approx(one.tolist(), rel=1e-6)
    assert seen[0][0] != seen[0][1]


def test_a_probe_changes_neither_weights_nor_random_state() -> None:
    probed, plain = Run(score, controller=None), Run(None, controller=None)
    torch.manual_seed(5)
    probed.go(2 * T + 1)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    plain.go(2 * T + 1)
    assert torch.equal(after, torch.get_rng_state())
    for one, other in zip(
        probed.model.state_dict().values(), plain.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)
    assert all(module.training for module in probed.model.modules())


def random_score(model: Any) -> Tensor:
    model(HELD[0])
    return torch.rand(3)


def score_by_random_numbers(cycle: int, seed: int, num: int = 3) -> list[list[float]]:
    modules = [net() for _ in range(num)]
    rows = score_replicas(hdet.Probe(random_score), modules, sync_every=10, cycle=cycle, seed=seed)
    return rows[:, :3].tolist()


def test_every_replica_of_a_process_scores_with_the_same_random_numbers() -> None:
    first, *others = score_by_random_numbers(cycle=2, seed=7)
    assert others == [first, first]


def test_random_numbers_of_a_score_depend_on_seed_and_cycle_only() -> None:
    torch.manual_seed(0)
    found = score_by_random_numbers(cycle=2, seed=7)
    torch.manual_seed(1)  # as on another replica, whose loop has drawn other numbers
    assert score_by_random_numbers(cycle=2, seed=7) == found
    assert score_by_random_numbers(cycle=3, seed=7) != found
    assert score_by_random_numbers(cycle=2, seed=8) != found


def score_after_other_draws(rank: int) -> list[list[float]]:
    torch.manual_seed(rank)
    return score_by_random_numbers(cycle=1, seed=5, num=1)


def test_replicas_in_different_processes_score_with_the_same_random_numbers(
    processes: Processes,
) -> None:
    first, *others = processes(3, score_after_other_draws)
    assert others == [first, first]


def test_training_flags_are_restored_after_a_score_also_if_it_raises() -> None:
    model = net()
    model.norm.eval()

    def fails(model: Any) -> Tensor:
        model(HELD[0])
        raise KeyError("of its own")

    for function in (score, fails):
        try:
            score_replicas(as_probe(function), [model], sync_every=10, cycle=0, seed=0)  # type: ignore[arg-type]
        except KeyError:
            assert function is fails
        assert [m.training for m in (model, model.up, model.norm)] == [True, True, False]


def test_cycles_take_successive_batches_also_after_a_resume() -> None:
    taken: list[int] = []

    def note(model: Any, batch: Tensor) -> Tensor:
        taken.append(int(batch[0, 0]))
        return model(batch).sum()

    batches = [torch.full((2, 3), float(i)) for i in range(5)]
    probe = hdet.Probe(note, batches, num=2)
    for cycle in range(4):
        score_replicas(probe, [net()], sync_every=10, cycle=cycle, seed=0)
    assert taken == [0, 1, 2, 3, 4, 0, 1, 2]
    taken.clear()
    score_replicas(hdet.Probe(note, batches, num=2), [net()], sync_every=10, cycle=3, seed=0)
    assert taken == [1, 2]


def test_default_number_of_batches_costs_at_most_two_percent() -> None:
    many = hdet.Probe(lambda model, batch: 0.0, [1] * 100)
    for every in (17, 50, 100, 1000):
        assert 1 <= many.num_batches(every) <= 8
        assert many.num_batches(every) / (3 * every) <= 0.02  # a forward is a third of a step
    # Replicas that share out the batches they train on score all of a batch each.
    for every in (170, 500, 1000):
        assert many.num_batches(every, 8) * 8 / (3 * every) <= 0.02
    assert [many.num_batches(every) for every in (50, 1000)] == [3, 8]
    assert many.num_batches(1000, 8) == 7
    assert many.num_batches(5) == many.num_batches(50, 8) == 1  # one at least
    assert hdet.Probe(lambda model, batch: 0.0, [1]).num_batches(1000) == 1


class Scored(nn.Sequential):
    flag = False

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean() + float(self.flag)


def row_of(score: Any, model: nn.Module | None = None) -> Tensor:
    model = Scored(nn.Linear(3, 3)) if model is None else model
    return score_replicas(hdet.Probe(score), [model], sync_every=10, cycle=0, seed=0)[0]


def test_inputs_of_methods_and_submodules_are_fingerprinted() -> None:
    torch.manual_seed(0)
    model, x, y = Scored(nn.Linear(3, 3)), torch.ones(1, 3), torch.zeros(1, 3)
    calls: list[Any] = [
        lambda m, x: m.loss(x),
        lambda m, x: m[0](x),
        lambda m, x: next(iter(m))(x),
    ]
    for call in calls:

        def seen(batch: Tensor, call: Any = call) -> list[float]:
            return row_of(lambda model: call(model, batch).sum(), model)[-2:].tolist()

        assert seen(x) == seen(x)
        assert seen(x) != seen(y)


def test_a_score_may_set_attributes_of_the_model() -> None:
    def flipped(model: Any) -> Tensor:
        model.flag = True
        result: Tensor = model.loss(torch.zeros(1, 3))
        return result

    model = Scored(nn.Linear(3, 3, bias=False))
    assert row_of(flipped, model)[0] == 1.0
    assert model.flag


def test_a_score_may_call_a_deep_copy_of_the_model() -> None:
    model = Scored(nn.Linear(3, 3))
    x = torch.ones(1, 3)
    copied = row_of(lambda model: copy.deepcopy(model).loss(x), model)
    assert torch.equal(copied.nan_to_num(), row_of(lambda m: m.loss(x), model).nan_to_num())


def test_a_score_that_does_not_use_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="must call the model"):
        row_of(lambda model: float(len(model)))


def test_a_loader_with_its_own_generator_resumes_with_the_same_batches() -> None:
    def taken(cycles: range) -> list[Any]:
        own = torch.Generator().manual_seed(7)
        some = TensorDataset(torch.arange(12))
        loader = DataLoader(some, batch_size=2, shuffle=True, generator=own)
        probe = hdet.Probe(lambda model, batch: 0.0, loader, num=2)
        return [[b.tolist() for (b,) in probe.take(cycle, 10, 0)] for cycle in cycles]

    whole = taken(range(8))
    assert taken(range(5, 8)) == whole[5:]


def test_mode_max_negates_scores() -> None:
    def run(probe: hdet.Probe) -> Tensor:
        return score_replicas(probe, [net()], sync_every=10, cycle=0, seed=0)

    low, high = run(hdet.Probe(score)), run(hdet.Probe(lambda m: -score(m), mode="max"))
    assert torch.equal(low.nan_to_num(), high.nan_to_num())


def test_many_scores_are_averaged_in_groups() -> None:
    x, y = data(1, 100)
    probe = hdet.Probe(lambda model: F.cross_entropy(model(x), y, reduction="none"))
    row = score_replicas(probe, [net()], sync_every=10, cycle=0, seed=0)[0]
    with torch.no_grad():
        want = F.cross_entropy(net().eval()(x), y)
    assert len(row) == 34
    assert float(row[:32].mean()) == pytest.approx(float(want), rel=0.05)


def test_replicas_are_scored_at_the_mean_of_their_last_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[Tensor]] = []

    def look(model: Any) -> Tensor:
        seen.append([p.detach().clone() for p in model.parameters()])
        return score(model)

    torch.manual_seed(5)
    run = Run(look, num=2, controller=None)  # half of the cycle by default
    iterates: list[list[list[Tensor]]] = []
    add = run.scheduler._run.weights.tail.add

    def spy() -> None:
        iterates.append(
            [[p.detach().clone() for p in m.parameters()] for m in run.ensemble.modules(None)]
        )
        add()

    monkeypatch.setattr(run.scheduler._run.weights.tail, "add", spy)
    run.go(T)
    assert len(iterates) == T // 2
    for replica in range(2):
        for place, mean in enumerate(seen[replica]):
            want = torch.stack([step[replica][place] for step in iterates]).mean(0)
            assert torch.allclose(mean, want, atol=1e-7)
    torch.manual_seed(5)
    plain = Run(None, num=2, controller=None).go(T)
    for one, other in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(one, other)  # what was scored is not what trains on


@pytest.mark.filterwarnings("ignore:the probe cannot compare values of")
def test_label_smoothing_is_zero_while_replicas_are_scored() -> None:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.3)
    knob = hdet.label_smoothing(criterion)
    seen = []

    def scored(model: Any) -> Tensor:
        output = model(HELD[0])
        seen.append(float(criterion(output, HELD[1]) - F.cross_entropy(output, HELD[1])))
        return criterion(output, HELD[1])

    model = net()
    ensemble = hdet.StackedReplicas(model, 2)
    optimizer = ensemble.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = hdet.HDET(
        ConstantLR(optimizer, factor=1.0),
        model=model,
        replicas=ensemble,
        knobs=[knob],
        probe=scored,
        controller=hdet.Tracker(),
        sync_every=1,
        preset="paper",
    )
    losses = ensemble.losses(lambda model, x, y: criterion(model(x), y), *data(0))
    losses.sum().backward()
    optimizer.step()
    scheduler.step(losses.detach())
    assert seen == pytest.approx([0.0, 0.0], abs=1e-6)
    (dials,) = knob.dials.values()
    assert all(float(value) > 0.1 for dial in dials for value in dial.values)


# Processes ---------------------------------------------------------------------------------------


def probed_process(rank: int, kind: str) -> Any:
    model = net()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe: Any = score
    if kind == "shuffled":  # the loader draws from the generator that every replica has reset
        loader = DataLoader(TensorDataset(*HELD), batch_size=8, shuffle=True)
        probe = hdet.Probe(lambda model, batch: loss(model, *batch), loader, num=2)
    elif kind == "different":
        probe = hdet.Probe(
            lambda model, batch: model(batch).sum(), [torch.full((2, 3), rank + 1.0)]
        )
    elif kind == "nan":
        probe = lambda model: score(model) * (math.nan if rank == 1 else 1.0)  # noqa: E731
    if kind == "nan":
        warnings.filterwarnings("ignore", message="the probe of replica.s. .1. is not finite")
    scheduler = hdet.HDET(
        ConstantLR(optimizer, factor=1.0),
        model=wrapped,
        probe=probe,
        controller=hdet.Tracker(threshold=0.0),
        spread=0.3,
        sync_every=T,
        preset="paper",
    )
    torch.manual_seed(rank)  # replicas do not share their random numbers
    try:
        for step in range(3 * T):
            optimizer.zero_grad()
            value = loss(wrapped, *data(10 * step + rank))
            value.backward()
            optimizer.step()
            scheduler.step(value.detach())
    except ValueError as error:
        return str(error)
    return scheduler.get_knobs()["lr/group0"], scheduler.sensitivity()["lr/group0"].slope


@pytest.mark.parametrize("kind", ["callable", "shuffled", "nan"])
def test_all_processes_make_the_same_decision_from_scores(processes: Processes, kind: str) -> None:
    answers = processes(3, probed_process, kind)
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][0] != 1.0


def test_scoring_different_batches_is_an_error_on_all_replicas(processes: Processes) -> None:
    for results in processes(2, probed_process, "different"):
        assert "must score the same batches on all replicas, got different ones" in results


def test_scores_that_are_nan_warn_and_move_no_knob() -> None:
    run = Run(lambda model: score(model) * math.nan, num=3)
    with pytest.warns(UserWarning, match=r"replica.s. \[0, 1, 2\] is not finite at step 4"):
        run.go(T)
    (knob,) = run.scheduler._run.knob_bank.knobs
    assert knob.state.scale == 1.0


# Bad input ---------------------------------------------------------------------------------------


def lazy(model: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        (3, "`probe` must be a function of the model, or hdet.Probe"),
        (nn.Linear(1, 1), "`probe` must be a function of the model, or hdet.Probe"),
        ([1, 2], "`probe` must be a function of the model, or hdet.Probe"),
    ],
)
def test_a_probe_that_is_no_function_is_refused(probe: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        Run(probe)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"score": None}, "`score` must be a function"),
        ({"batches": iter([1])}, "can be iterated more than once"),
        ({"batches": 3}, "can be iterated more than once"),
        ({"num": 0}, "`num` must be at least 1"),
        ({"mode": "best"}, "`mode` must be one of 'min', 'max'"),
        ({"tail": 1.5}, "`tail` must be in"),
    ],
)
def test_invalid_probe_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        hdet.Probe(**{"score": score, **arguments})


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        (hdet.Probe(lambda model, batch: 1.0, []), "must hold at least one batch"),
        (lazy, "must call the model that it is given"),
        (lambda model: model(HELD[0])[:0].sum(1), "must return at least one number"),
        (lambda model: [model(HELD[0])], "must return a tensor or a number"),
    ],
)
def test_a_probe_without_batches_scores_or_model_call_raises(probe: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        Run(probe).go(T)


def test_a_probe_without_model_is_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="`probe` needs `model=`"):
        hdet.HDET(ConstantLR(optimizer, factor=1.0), probe=score, preset="paper")


# Batches -----------------------------------------------------------------------------------------


def test_a_cycle_scores_no_batch_twice() -> None:
    """Six copies of one batch would agree perfectly and seem to leave no doubt."""
    seen: list[int] = []

    def note(model: Any, batch: Tensor) -> Tensor:
        seen.append(len(seen))
        return model(batch).sum()

    score_replicas(hdet.Probe(note, [HELD[0]]), [net()], sync_every=100, cycle=0, seed=0)
    assert seen == [0]


def test_a_shuffling_loader_resumes_with_the_same_batches() -> None:
    seen: list[list[float]] = []

    def note(model: Any, batch: Any) -> Tensor:
        seen.append(batch[0].sum(1).tolist())
        return model(batch[0]).sum()

    def probe() -> hdet.Probe:
        loader = DataLoader(TensorDataset(*HELD), batch_size=8, shuffle=True)
        return hdet.Probe(note, loader, num=3)

    whole = probe()
    for cycle in range(4):
        score_replicas(whole, [net()], sync_every=10, cycle=cycle, seed=0)
    resumed_at = len(seen)
    for cycle in (2, 3):
        score_replicas(probe(), [net()], sync_every=10, cycle=cycle, seed=0)
    assert seen[6:resumed_at] == seen[resumed_at:]


def test_a_probe_makes_training_losses_unnecessary() -> None:
    run = Run(score, total_steps=10 * T)
    for step in range(10 * T):  # through the cool-down, in which nothing is scored
        losses = run.ensemble.losses(loss, *data(step, 16))
        run.optimizer.zero_grad()
        losses.sum().backward()
        run.optimizer.step()
        run.scheduler.step()
    assert run.scheduler._run.knob_bank.cycle == 10


def test_different_numbers_of_scores_are_refused_on_all_replicas(processes: Processes) -> None:
    for results in processes(2, differing_scores):
        assert "must return equally many numbers on all replicas, got [3, 4]" in results


def differing_scores(rank: int) -> str:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = hdet.HDET(
        ConstantLR(optimizer, factor=1.0),
        model=DistributedDataParallel(model),
        probe=lambda model: score(model)[: 3 + rank],
        sync_every=1,
        spread=0.1,
        preset="paper",
    )
    optimizer.step()
    try:
        scheduler.step(1.0)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("score", "batches", "words"),
    [
        (lambda model, batch: 0.0, None, "score(model)"),
        (lambda: 0.0, None, "score(model)"),
        (lambda model: 0.0, [1], "score(model, batch)"),
        (lambda model, batch, device: 0.0, [1], "score(model, batch)"),
        (lambda model, *, device: 0.0, None, "score(model)"),
    ],
)
def test_a_score_with_the_wrong_signature_is_refused(score: Any, batches: Any, words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"must be callable as {words}")):
        hdet.Probe(score, batches)


def test_callables_of_every_kind_are_accepted_as_score() -> None:
    class Scorer:
        def __call__(self, model: Any, batch: Any = None) -> float:
            return 0.0

    @functools.wraps(lambda model, batch, device: 0.0)
    def wrapped(*inputs: Any) -> float:
        return 0.0

    for score in (
        Scorer(),
        wrapped,
        lambda *inputs: 0.0,
        functools.partial(lambda x, model, batch=0: 0.0, 1),
        max,
    ):
        assert hdet.Probe(score).score is score
        assert hdet.Probe(score, [1]).score is score


def test_scoring_inside_autocast_uses_no_cached_casts_of_other_weights() -> None:
    """It remembers its casts until the loop leaves it, and knows nothing of weights that change."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=False)
    ensemble = hdet.StackedReplicas(model, 2, mode="loop")
    optimizer = ensemble.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    seen = []

    def scored(model: Any) -> Tensor:
        found: Tensor = model(torch.ones(1, 3)).float().square().mean()
        seen.append(float(found))
        return found

    scheduler = hdet.HDET(
        ConstantLR(optimizer),
        model=model,
        replicas=ensemble,
        probe=hdet.Probe(scored, tail=0.0),
        gradients="local",
        sync_every=1,
        spread=0.5,
        scout=None,
        guard=None,
        controller=hdet.Tracker(),
    )
    with torch.autocast("cpu", torch.float16):
        losses = ensemble.losses(
            lambda model, x: model(x).float().square().mean(), torch.ones(4, 3)
        )
        losses.sum().backward()
        optimizer.step()
        want = [
            float((p.detach().half() @ torch.ones(3).half()).float().square().mean())
            for module in ensemble.modules(None)
            for p in module.parameters()
        ]
        scheduler.step(losses.detach())
        assert seen == pytest.approx(want, rel=0.02)
        optimizer.zero_grad()
        losses = ensemble.losses(
            lambda model, x: model(x).float().square().mean(), torch.ones(4, 3)
        )
        losses.sum().backward()
        optimizer.step()
        with scheduler.consensus(), torch.no_grad():
            shown = model(torch.ones(1, 3)).float()
            assert shown.flatten().tolist() == pytest.approx(model.weight.sum(1).tolist(), abs=0.01)
