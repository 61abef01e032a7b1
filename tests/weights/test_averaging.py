"""What a converge averages, and what it leaves alone."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import hdet
from hdet.replicas.process import ProcessReplicas
from hdet.tensors.hashing import fingerprint, fingerprints
from hdet.weights.inventory import ALL_KINDS, ReplicaTensors, TensorKind
from hdet.weights.replica_weights import ReplicaWeights
from tests import toy
from tests.processes import Processes


class Zoo(nn.Module):
    """One of everything a converge has to deal with."""

    def __init__(self) -> None:
        super().__init__()
        self.normal = nn.Parameter(torch.zeros(3))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.unused = nn.Parameter(torch.zeros(3))
        self.in_half = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.complex = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        self.channels_last = nn.Parameter(
            torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)
        )
        self.tied_a = nn.Linear(2, 2, bias=False)
        self.tied_b = nn.Linear(2, 2, bias=False)
        self.tied_b.weight = self.tied_a.weight
        self.batch_norm = nn.BatchNorm1d(2)
        self.empty = nn.Parameter(torch.zeros(0))


def zoo_at(value: float) -> tuple[Zoo, torch.optim.Optimizer, list[Any]]:
    zoo = Zoo()
    with torch.no_grad():
        for tensor in [*zoo.parameters(), *zoo.buffers()]:
            tensor.fill_(value)
    outside = nn.Parameter(torch.full((2,), value))
    return zoo, torch.optim.SGD([zoo.normal, outside], lr=0.1), [outside]


def converge_zoo(rank: int, bucket_bytes: int) -> list[torch.Tensor]:
    zoo, optimizer, outside = zoo_at(float(rank))
    replicas = ProcessReplicas(bucket_bytes=bucket_bytes)
    ReplicaWeights(optimizer, zoo, replicas).averager.average_(range(3), ALL_KINDS, {})
    names = dict(zoo.named_parameters()) | dict(zoo.named_buffers())
    assert names.pop("batch_norm.num_batches_tracked").item() == 2
    return [t.detach() for t in [*names.values(), *outside] if t.numel()]


@pytest.mark.parametrize("bucket_bytes", [1024, 1 << 20])
def test_every_parameter_buffer_and_state_is_averaged_once(
    processes: Processes, bucket_bytes: int
) -> None:
    for tensors in processes(3, converge_zoo, bucket_bytes):
        for tensor in tensors:
            assert bool((tensor == 1).all()), tensor


def average_halves(rank: int) -> torch.Tensor:
    """256 + 1 + 1 + 1 in bfloat16 stays 256, its mean 64; the true one, 64.75, rounds to 65."""
    weight = nn.Parameter(torch.full((4,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16))
    ProcessReplicas().average_([[weight]], range(4))
    return weight.detach()


def test_half_precision_weights_are_accumulated_in_float32(processes: Processes) -> None:
    for weight in processes(4, average_halves):
        assert weight.dtype == torch.bfloat16
        assert weight.tolist() == [65.0] * 4


def average_state(rank: int, policy: str, steps: int) -> list[Any]:
    model = toy.toy()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = hdet.HDET(
        LambdaLR(optimizer, lambda _: 1.0),
        model=model,
        gradients="local",
        sync_every=2,
        controller=None,
        optimizer_state=policy,  # type: ignore[arg-type]
        preset="paper",
    )
    before: list[Any] = []
    for step in range(steps):
        optimizer.zero_grad()
        toy.loss_of(model, step, rank).backward()
        optimizer.step()
        before = [copy.deepcopy(optimizer.state[p]) for p in model.parameters()]
        scheduler.step()
    return [before, [dict(optimizer.state.get(p, {})) for p in model.parameters()]]


@pytest.mark.parametrize("policy", ["keep", "average", "reset"])
def test_the_optimizer_state_follows_its_policy(processes: Processes, policy: str) -> None:
    results = processes(3, average_state, policy, 2)
    for position in range(len(results[0][0])):
        moments = [before[position]["exp_avg"] for before, _ in results]
        for own, (_, after) in zip(moments, results, strict=True):
            if policy == "reset":
                assert after[position] == {}
                continue
            assert after[position]["step"].item() == 2
            want = own if policy == "keep" else sum(moments) / 3
            torch.testing.assert_close(after[position]["exp_avg"], want, rtol=1e-12, atol=1e-15)


def state_of_unequal_size(rank: int) -> int:
    """Replica 1 never made a step (GradScaler may skip the first): its state is empty."""
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = hdet.HDET(
        LambdaLR(optimizer, lambda _: 1.0), model=model, gradients="local", sync_every=1,
        controller=None, optimizer_state="average",preset="paper"
    )  # fmt: skip
    model(torch.ones(1, 2)).sum().backward()
    optimizer._opt_called = True  # type: ignore[attr-defined]
    if rank == 0:
        optimizer.step()
    scheduler.step()
    scheduler.converge()
    return len(optimizer.state)


def test_optimizer_states_of_different_size_are_not_averaged(processes: Processes) -> None:
    assert processes(2, state_of_unequal_size) == [2, 0]


def test_resetting_the_state_of_adagrad_is_refused() -> None:
    optimizer = torch.optim.Adagrad([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="`optimizer_state` must be 'keep' or 'average'"):
        hdet.HDET(LambdaLR(optimizer, lambda _: 1.0), optimizer_state="reset", preset="paper")


def test_refresh_finds_a_rebound_buffer() -> None:
    zoo, optimizer, _ = zoo_at(0.0)
    body = ReplicaTensors(optimizer, zoo)
    zoo.batch_norm.running_mean = torch.full((2,), 5.0)
    body.refresh()
    assert any(bool((b == 5).all()) for b in body.of_kind(TensorKind.BUFFERS))


def test_refresh_finds_a_frozen_parameter_that_trains_again() -> None:
    zoo, optimizer, _ = zoo_at(0.0)
    body = ReplicaTensors(optimizer, zoo)
    assert [t.data_ptr() for t in body.of_kind(TensorKind.FROZEN)] == [zoo.frozen.data_ptr()]
    zoo.frozen.requires_grad_(True)
    body.refresh()
    assert body.of_kind(TensorKind.FROZEN) == []


def freeze(rank: int, differ: bool) -> tuple[list[float], list[float], int]:
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    model = nn.ParameterDict({"frozen": nn.Parameter(values, requires_grad=False)})
    model["trained"] = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([model["trained"]], lr=0.1)
    scheduler = hdet.HDET(
        LambdaLR(optimizer, lambda _: 1.0),
        model=model,
        sync_every=1,
        controller=None,
        gradients="local",
        preset="paper",
    )
    if differ:  # as the target network of a mean teacher does
        with torch.no_grad():
            model["frozen"].add_(rank)
    model["trained"].grad = torch.ones(2)
    optimizer.step()
    scheduler.step()
    return values.tolist(), model["frozen"].tolist(), rank


def test_frozen_parameters_that_are_equal_keep_their_bits(processes: Processes) -> None:
    for before, after, _ in processes(3, freeze, False):
        assert before == after
    after = [result[1] for result in processes(3, freeze, True)]
    assert after[0] == after[1] == after[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_fingerprint_changes_with_one_bit_and_with_the_order(dtype: torch.dtype) -> None:
    values = torch.arange(300_000).to(dtype)
    changed, swapped = values.clone(), values.clone()
    changed[-1] += 2048
    swapped[0], swapped[-1] = values[-1], values[0]
    prints = fingerprints([values, values.clone(), changed, swapped]).tolist()
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_fingerprints_of_many_tensors_equal_those_of_each_tensor() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [1, 0, 7, 300_000, 2, 1000, 7, 20_000]
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
    tensors = [(torch.randn(n, generator=generator) * 9).to(k) for k in kinds for n in sizes]
    tensors += [torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.tensor(3)]
    assert fingerprints(tensors).tolist() == [int(fingerprint(tensor)) for tensor in tensors]


def test_fingerprint_distinguishes_zero_minus_zero_and_nan() -> None:
    values = [torch.tensor([0.0]), torch.tensor([-0.0]), torch.tensor([float("nan")])]
    assert len(set(fingerprints(values).tolist())) == 3


def perturbed(rank: int, noise: float) -> tuple[list[torch.Tensor], bool]:
    model = toy.toy()
    before = torch.get_rng_state()
    hdet.perturb_(model, noise)
    return [p.detach() for p in model.parameters()], torch.equal(before, torch.get_rng_state())


def test_perturb_adds_noise_of_the_size_of_equation_10(processes: Processes) -> None:
    results = processes(4, perturbed, 0.01)
    start = torch.cat([p.detach().flatten() for p in toy.toy().parameters()])
    noises = [torch.cat([p.flatten() for p in weights]) - start for weights, _ in results]
    deviation = 0.01 * start.norm() / start.numel() ** 0.5
    everything = torch.cat(noises)
    assert everything.std() == pytest.approx(float(deviation), rel=0.1)  # 4 sigma at 700 draws
    assert abs(float(everything.mean())) < 4 * deviation / everything.numel() ** 0.5
    correlation = torch.corrcoef(torch.stack(noises)) - torch.eye(4, dtype=torch.float64)
    assert float(correlation.abs().max()) < 4 / start.numel() ** 0.5
    assert all(untouched for _, untouched in results)


def test_perturb_refuses_negative_noise_and_a_model_without_parameters() -> None:
    with pytest.raises(ValueError, match=r"`noise` must be in .0, inf., got -0.5"):
        hdet.perturb_(nn.Linear(1, 1), -0.5)
    with pytest.raises(ValueError, match="`model` must have parameters"):
        hdet.perturb_(nn.ReLU())


def test_perturb_without_noise_changes_nothing() -> None:
    model = toy.toy()
    hdet.perturb_(model, 0.0)
    for ours, plain in zip(model.parameters(), toy.toy().parameters(), strict=True):
        assert torch.equal(ours, plain)


def test_flipped_signs_do_not_cancel_in_a_fingerprint() -> None:
    values = torch.rand(6, dtype=torch.float64)
    prints = fingerprints([values, -values, values * torch.tensor([-1, -1, 1, 1, 1, 1])]).tolist()
    assert len(set(prints)) == 3


class Masked(nn.Module):
    """A mask of minus infinity, a constant table, a running mean, quantised frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.quantised = nn.Parameter(torch.arange(3, dtype=torch.uint8), requires_grad=False)
        self.frozen = nn.Parameter(1 / torch.arange(1, 65), requires_grad=False)
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        self.register_buffer("table", 1 / (10000 ** (torch.arange(64) / 64)))
        self.register_buffer("running", torch.zeros(1))


def train_masked(rank: int, bad: bool) -> Any:
    model = Masked()
    start = copy.deepcopy(dict(model.named_buffers()) | dict(model.named_parameters()))
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    scheduler = hdet.HDET(
        LambdaLR(optimizer, lambda _: 1.0), model=model, gradients="local", sync_every=1,
        controller=None,preset="paper"
    )  # fmt: skip
    model.get_buffer("running").fill_(math.nan if bad and rank == 1 else float(rank))
    optimizer.step()
    scheduler.step()
    with scheduler.consensus():
        pass
    scheduler.converge()
    now = dict(model.named_buffers()) | dict(model.named_parameters())
    unchanged = all(torch.equal(start[n], now[n]) for n in ("mask", "table", "frozen", "quantised"))
    return unchanged, model.get_buffer("running").item()


def test_equal_buffers_and_frozen_parameters_keep_their_bits(processes: Processes) -> None:
    assert processes(3, train_masked, False) == [(True, 1.0)] * 3


def test_a_replica_with_a_nan_in_a_buffer_is_excluded(processes: Processes) -> None:
    assert processes(3, train_masked, True) == [(True, 1.0)] * 3


def test_parameters_that_overlap_in_memory_are_refused() -> None:
    memory = torch.zeros(10)
    model = nn.ParameterDict({"a": nn.Parameter(memory), "b": nn.Parameter(memory[:4])})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="must not overlap another parameter in memory"):
        hdet.HDET(LambdaLR(optimizer, lambda _: 1.0), model=model, preset="paper")


def perturb_one(rank: int) -> bool:
    if rank == 1:
        hdet.perturb_(toy.toy())
    return True


def test_perturb_works_on_one_process_without_the_others(processes: Processes) -> None:
    assert processes(2, perturb_one) == [True, True]


def move_a_buffer(rank: int) -> list[float]:
    model = Masked()
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    scheduler = hdet.HDET(
        LambdaLR(optimizer, lambda _: 1.0), model=model, gradients="local", sync_every=1,
        controller=None,preset="paper"
    )  # fmt: skip
    seen = []
    for step in range(3):
        model.get_buffer("running").data = torch.tensor([float(rank + step)])
        optimizer.step()
        scheduler.step()
        seen.append(model.get_buffer("running").item())
    return seen


def test_a_buffer_with_new_memory_is_averaged(processes: Processes) -> None:
    assert processes(3, move_a_buffer) == [[1.0, 2.0, 3.0]] * 3
