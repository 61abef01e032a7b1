"""Compressed converges: fewer bytes, the same bits for everyone, and nothing lost for good."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import hdet
from hdet.replicas.quantization import BF16, BLOCK, Int8
from tests import reference, toy
from tests.processes import Processes
from tests.weights.test_overlap import NESTEROV, OUTER

N, T, S, LR, ALPHA = 4, 5, 33, 0.02, 0.25


# The codes ----------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=3 * BLOCK))
def test_codec_error_is_at_most_half_a_quantization_step(numbers: list[float]) -> None:
    padded = numbers + [0.0] * (-len(numbers) % BLOCK)
    rows = torch.tensor([padded, [-number for number in padded]])
    steps = rows.unflatten(1, (-1, BLOCK)).abs().amax(2, keepdim=True) / 127
    off = (Int8().decode(Int8().encode(rows)) - rows).abs().unflatten(1, (-1, BLOCK))
    # A block so small that float32 has no scale for it may be lost: it is sent another time.
    lost = 127 * torch.finfo(torch.float32).tiny
    assert bool((off <= 0.5001 * steps + lost).all())
    half = BF16().decode(BF16().encode(rows))
    assert bool(((half - rows).abs() <= rows.abs() * 2.0**-8 + 1e-38).all())


def test_codec_output_has_the_expected_length() -> None:
    rows = torch.zeros(2, 4 * BLOCK)
    assert BF16().encode(rows).nbytes == rows.nbytes // 2
    assert Int8().encode(rows).nbytes == rows.nbytes // 4 + 2 * 4 * 4


# The run, as a plain loop -------------------------------------------------------------------------


def coded(numbers: Tensor, kind: str) -> Tensor:
    """What arrives of a vector."""
    if kind == "bf16":
        return numbers.to(torch.bfloat16).double()
    blocks = numbers.float().view(-1, BLOCK)
    steps = blocks.abs().amax(1, keepdim=True) / 127
    return ((blocks / steps.clamp(min=1e-37)).round() * steps).flatten().double()


class Wire:
    """Error feedback for N replicas, and for the mean of each part."""

    def __init__(self, kind: str, numbers: Tensor) -> None:
        self._kind, self._num = kind, len(numbers)
        size = N * math.ceil(len(numbers) / (N * BLOCK)) * BLOCK
        self.known, self._owed = torch.zeros(size).double(), torch.zeros(N, size).double()
        self._owed_mean = torch.zeros(size).double()
        self.known[: self._num] = numbers

    def mean(self, vectors: list[Tensor]) -> Tensor:
        said = []
        for replica, vector in enumerate(vectors):
            change = self._owed[replica].clone()
            change[: self._num] += vector
            change -= self.known
            said.append(coded(change, self._kind))
            self._owed[replica] = change - said[-1]
        mean = self._owed_mean + sum(said) / N
        results = coded(mean, self._kind)
        self._owed_mean = mean - results
        self.known = self.known + results
        return self.known[: self._num].clone()


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def expected(kind: str, outer: bool) -> Tensor:
    models = [toy.toy() for _ in range(N)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=LR) for model in models]
    slow = [p.detach().clone() for p in models[0].parameters()]
    velocities = [torch.zeros_like(tensor) for tensor in slow]
    wire: Wire | None = None
    for step in range(S):
        for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.param_groups[0]["lr"] = LR * reference.multiplier(replica, N, ALPHA)
            optimizer.zero_grad()
            toy.loss_of(model, step, replica).backward()
            optimizer.step()
        if (step + 1) % T and step + 1 < S:
            continue
        if wire is None:  # the first one is exact
            reference.average(models)
        else:
            mean = wire.mean([vector(model) for model in models])
            for model in models:
                nn.utils.vector_to_parameters(mean.clone(), model.parameters())
        if outer:
            reference.nesterov(models, slow, velocities, *NESTEROV)
        wire = wire or Wire(kind, vector(models[0]))
        wire.known[: len(vector(models[0]))] = vector(models[0])
    return vector(models[0])


def scheduled(model: nn.Module, optimizer: Any, **options: Any) -> hdet.HDET:
    base = LambdaLR(optimizer, lambda _: 1.0)
    given = {"spread": ALPHA, "controller": None, "gradients": "local", **options}
    return hdet.HDET(base, model=model, preset="paper", sync_every=T, total_steps=S, **given)


def run(rank: int, kind: str, outer: bool, folder: str) -> Tensor:
    model = DistributedDataParallel(toy.toy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    follows = OUTER if outer else None
    scheduler = scheduled(model, optimizer, compress=kind, outer=follows, record=folder)
    train(rank, model, optimizer, scheduler, S)
    return vector(model)


def train(part: int, model: nn.Module, optimizer: Any, scheduler: hdet.HDET, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = toy.loss_of(model, scheduler.last_epoch, part)
        loss.backward()
        optimizer.step()
        scheduler.step(loss)


@pytest.mark.parametrize(("kind", "outer"), [("int8", False), ("bf16", True)])
def test_compressed_average_of_processes_equals_the_plain_loop(
    processes: Processes, tmp_path: Path, kind: str, outer: bool
) -> None:
    first, *others = processes(N, run, kind, outer, str(tmp_path / "run"))
    assert all(first.equal(other) for other in others)
    torch.testing.assert_close(first, expected(kind, outer), rtol=1e-10, atol=1e-10)
    lines = [json.loads(line) for line in (tmp_path / "run/record.jsonl").read_text().splitlines()]
    exact, *short = [line["converge"]["bytes"] for line in lines if line["event"] == "cycle"]
    size = N * math.ceil(len(first) / (N * BLOCK)) * BLOCK
    assert exact == 8 * len(first)
    assert set(short) == {2 * size if kind == "bf16" else size + 4 * size // BLOCK}


# What is rounded off ------------------------------------------------------------------------------


def small_changes(rank: int, kind: str) -> Tensor:
    """One weight moves by 1 in every cycle; all others by so little that a code rounds it off."""
    model = nn.Linear(BLOCK, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = scheduled(model, optimizer, compress=kind, spread=0.0)
    optimizer.step()  # torch warns of schedules that come first
    for step in range(S - S % T):
        if step % T == 0:
            with torch.no_grad():
                model.weight[0, 0] += 1.0
                model.weight[0, 1:] += 1e-3 * (rank + 1)
        scheduler.step(torch.zeros(()))
    return model.weight.detach()[0]


def test_error_feedback_sends_rounding_errors_later(processes: Processes) -> None:
    first, second = processes(2, small_changes, "int8")
    assert first.equal(second)
    cycles, step = S // T, 1.0 / 127
    assert step > 2 * 1e-3  # no single change is large enough to be heard
    torch.testing.assert_close(first[0], torch.tensor(float(cycles)).double(), rtol=0, atol=step)
    want = torch.full_like(first[1:], cycles * 1.5e-3)
    torch.testing.assert_close(first[1:], want, rtol=0, atol=1.01 * step)
    assert bool((first[1:] > 1.5e-3).all())  # more than the first one, which was exact


# With the rest ------------------------------------------------------------------------------------


def overlapped(rank: int, kind: str | None = "int8") -> tuple[Tensor, Tensor]:
    """The mean of all replicas half-way between two averages, and their weights at the end."""
    model = DistributedDataParallel(toy.toy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = scheduled(model, optimizer, compress=kind, overlap=2, outer=OUTER)
    train(rank, model, optimizer, scheduler, 3 * T + 2)
    with scheduler.consensus():
        mean = vector(model)
    train(rank, model, optimizer, scheduler, S - 3 * T - 2)
    return mean, vector(model)


def test_overlapped_compressed_average_ends_close_to_the_exact_one(processes: Processes) -> None:
    means, ends = zip(*processes(N, overlapped), strict=True)
    assert all(mean.equal(means[0]) for mean in means)
    assert all(end.equal(ends[0]) for end in ends)
    exact = processes(N, overlapped, None)[0][1]
    shifted_by = (exact - means[0]).norm()
    assert float((ends[0] - exact).norm() / shifted_by) < 0.05


def heard(rank: int) -> list[int]:
    """When this replica sends something that is coded."""
    model = DistributedDataParallel(toy.toy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    replicas, results = hdet.ProcessReplicas(), []
    all_to_all = replicas.all_to_all
    scheduler = scheduled(model, optimizer, replicas=replicas, compress="int8", overlap=2)

    def noted(rows: Tensor) -> Any:
        results.append(scheduler.last_epoch)
        return all_to_all(rows)

    replicas.all_to_all = noted  # type: ignore[method-assign]
    train(rank, model, optimizer, scheduler, 3 * T + 3)
    return results


def test_overlapped_compressed_average_sends_both_halves_in_the_background(
    processes: Processes,
) -> None:
    """The first converge is exact; the mean of the changes goes on a step after they were sent."""
    assert processes(N, heard) == [[2 * T, 2 * T + 1, 3 * T, 3 * T + 1]] * N


def checkpointed(rank: int) -> tuple[Tensor, Tensor]:
    def made() -> tuple[Any, Any, hdet.HDET]:
        model = DistributedDataParallel(toy.toy())
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        return model, optimizer, scheduled(model, optimizer, compress="int8", overlap=2)

    first, second = made(), made()
    train(rank, *first, 2 * T + 1)
    first[2].converge()
    for one, other in zip(first, second, strict=True):
        other.load_state_dict(copy.deepcopy(one.state_dict()))
    for one in (first, second):
        train(rank, *one, 2 * T)
    return vector(first[0]), vector(second[0])


def test_resumed_compressed_run_is_bit_equal(processes: Processes) -> None:
    for one, other in processes(2, checkpointed):
        assert one.equal(other)


class Mixed(nn.Module):
    """Two dtypes, an expert that is idle in every other cycle, and a weight that moves about."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = nn.Linear(4, 4)
            self.expert = nn.Linear(4, 4).bfloat16()

    def forward(self, x: Tensor, busy: bool) -> Tensor:
        y: Tensor = self.first(x).square().mean()
        return y + self.expert.weight.float().square().sum() if busy else y


def mixed(rank: int, overlap: int, folder: str) -> tuple[Tensor, list[int]]:
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    given = {"compress": "int8", "spread": 0.0, "overlap": overlap, "record": folder}
    scheduler = scheduled(model, optimizer, **given)
    for step in range(S):
        if rank == 0 and step in (7, 16):
            model.first.weight.data = model.first.weight.data.clone()  # as by .cpu() and .cuda()
        optimizer.zero_grad()
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x, busy=step // T % 2 == 0) * (1 + rank)
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
    lines = [] if rank else (Path(folder) / "record.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    sent = [line["converge"]["bytes"] for line in results if line["event"] == "cycle"]
    return torch.cat([p.detach().double().flatten() for p in model.parameters()]), sent


@pytest.mark.parametrize("overlap", [0, 2])
def test_compressed_average_handles_several_dtypes_idle_weights_and_new_memory(
    processes: Processes, tmp_path: Path, overlap: int
) -> None:
    (first, sent), *others = processes(3, mixed, overlap, str(tmp_path / "run"))
    assert all(first.equal(other) for other, _ in others)
    # The first average is exact, and the last one does not overlap. Idle weights change no size.
    assert len(set(sent[1:-1])) == 1


def loses_one(rank: int) -> Tensor:
    model = DistributedDataParallel(toy.toy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = scheduled(model, optimizer, compress="int8")
    train(rank, model, optimizer, scheduler, 2 * T + 1)
    if rank == 1:
        with torch.no_grad():
            next(model.parameters()).fill_(math.nan)
    train(rank, model, optimizer, scheduler, 2 * T)
    scheduler.converge()
    return vector(model)


def test_diverged_replica_gets_the_mean_of_the_others_with_compression(
    processes: Processes,
) -> None:
    first, *others = processes(3, loses_one)
    assert bool(first.isfinite().all())
    assert all(first.equal(other) for other in others)


def test_invalid_compress_settings_are_refused() -> None:
    model = toy.toy()
    ensemble = hdet.StackedReplicas(model, 2)
    optimizer = ensemble.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="`compress` must be None for replicas on one device"):
        scheduled(model, optimizer, replicas=ensemble, compress="int8")
    alone = torch.optim.SGD(toy.toy().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="`compress` must be one of 'bf16', 'int8', got 'int4'"):
        scheduled(toy.toy(), alone, compress="int4")
