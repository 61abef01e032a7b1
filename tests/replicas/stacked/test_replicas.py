"""Replicas stacked on one device: the same numbers as the reference, whichever way they are run."""

import copy
import io
import json
import warnings
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hdet
from benchmarks.zoo.models import GPT, Size, gpt_loss
from hdet import StackedReplicas
from tests import toy
from tests.contracts.test_reference_parity import (
    PEAKS,
    SETTINGS,
    WARMUP,
    N,
    S,
    T,
    check_cycle,
    expected,
)


def loss_function(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def global_batch(step: int, num: int) -> tuple[Tensor, Tensor]:
    parts = [toy.batch(step, replica) for replica in range(num)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


@pytest.mark.parametrize("mode", ["vmap", "loop"])
@pytest.mark.parametrize("gradients", ["shared", "local"])
@pytest.mark.parametrize("name", sorted(toy.OPTIMIZERS))
def test_stacked_run_equals_the_reference_in_every_number(
    tmp_path: Path, name: str, gradients: str, mode: str
) -> None:
    settings: dict[str, Any] = {**SETTINGS, "gradients": gradients}
    model = toy.toy()
    ensemble = StackedReplicas(model, N, mode=mode)  # type: ignore[arg-type]
    optimizer = ensemble.optimizer(toy.OPTIMIZERS[name])
    scheduler = hdet.OneCycleHDET(
        optimizer, PEAKS, total_steps=S, cycle_momentum=False, sync_every=T, warmup_steps=WARMUP,
        model=model, replicas=ensemble, record=tmp_path, seed=5,
        **settings,
    )  # fmt: skip
    for step in range(S):
        optimizer.zero_grad()
        losses = ensemble.losses(loss_function, *global_batch(step, N))
        losses.sum().backward()
        optimizer.step()
        scheduler.step(losses)
    want = expected(name, gradients)
    for module, parameters in zip(ensemble.modules(None), want.parameters, strict=True):
        for ours, theirs in zip(module.parameters(), parameters, strict=True):
            torch.testing.assert_close(ours.detach(), theirs, rtol=1e-12, atol=1e-12)
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    cycles = [line for line in lines if line["event"] == "cycle"]
    held = want.cycles[WARMUP // T - 1].centres
    for line, cycle in zip(cycles, want.cycles, strict=True):
        check_cycle(line, cycle, held)


class Stubborn(nn.Module):
    """Looks at a value on its way: vmap cannot run it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.linear(x))
        return hidden * 2 if hidden.sum().item() > 1e9 else hidden


def test_model_that_vmap_cannot_run_is_run_in_a_loop_with_one_warning() -> None:
    ensemble = StackedReplicas(Stubborn(), 2)
    plain = StackedReplicas(Stubborn(), 2, mode="loop")
    plain.load_state_dict(ensemble.state_dict())
    x, y = torch.randn(8, 2), torch.randint(2, (8,))
    with pytest.warns(UserWarning, match="replicas run one after another.*vmap cannot run"):
        first = ensemble.losses(loss_function, x, y)
    torch.testing.assert_close(first, plain.losses(loss_function, x, y))
    torch.testing.assert_close(
        ensemble.losses(loss_function, x, y), plain.losses(loss_function, x, y)
    )
    for ours, theirs in zip(ensemble.modules(None), plain.modules(None), strict=True):
        for name, buffer in ours.named_buffers():
            torch.testing.assert_close(buffer, theirs.get_buffer(name))


def test_batch_norm_has_separate_statistics_on_every_replica() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    state = network.state_dict()
    single = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    single.load_state_dict(state)
    ensemble = StackedReplicas(network, 2, mode="vmap")
    x, y = torch.randn(12, 3), torch.randint(2, (12,))
    losses = ensemble.losses(loss_function, x, y)
    torch.testing.assert_close(losses[1], loss_function(single, x[6:], y[6:]))
    for name, buffer in single.named_buffers():
        torch.testing.assert_close(ensemble.modules(None)[1].get_buffer(name), buffer)


def test_dropout_differs_between_replicas_and_is_reproducible() -> None:
    ensemble = StackedReplicas(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), 2, mode="vmap")
    x = torch.ones(2, 4)

    def draw() -> Tensor:
        torch.manual_seed(7)
        return ensemble.losses(lambda model, part: model(part).sum(), x)

    first = draw()
    assert first[0] != first[1]
    assert torch.equal(first, draw())


def test_clip_grad_norm_clips_every_replica_by_its_own_norm() -> None:
    ensemble = StackedReplicas(nn.Linear(1, 1, bias=False), 2, mode="vmap")
    ensemble.share_gradients(None, False)
    optimizer = ensemble.optimizer(lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    ensemble.losses(lambda model, x: model(x).sum(), torch.tensor([[3.0], [0.5]])).sum().backward()
    norms = optimizer.clip_grad_norm_(1.0)
    torch.testing.assert_close(norms, torch.tensor([3.0, 0.5]))
    gradients = [module.get_parameter("weight").grad for module in ensemble.modules(None)]
    torch.testing.assert_close(gradients, [torch.tensor([[1.0]]), torch.tensor([[0.5]])])


def test_select_copies_one_replica_to_all_and_consensus_is_an_ordinary_module() -> None:
    ensemble = StackedReplicas(nn.Linear(1, 1), 3)
    hdet.perturb_(ensemble.modules(None)[0], 0.5, replicas=ensemble)
    weights = [module.get_parameter("weight").detach().clone() for module in ensemble.modules(None)]
    consensus = ensemble.consensus()
    torch.testing.assert_close(consensus.get_parameter("weight").detach(), sum(weights) / 3)
    ensemble.select_(1)
    for module in ensemble.modules(None):
        assert torch.equal(module.get_parameter("weight"), weights[1])


def test_batch_that_does_not_split_evenly_is_refused() -> None:
    ensemble = StackedReplicas(nn.Linear(1, 1), 3)
    with pytest.raises(ValueError, match="must split evenly over 3 replicas, got 4 samples"):
        ensemble.losses(loss_function, torch.ones(4, 1), torch.zeros(4))


# Real models ---------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Recomputes its middle in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = checkpoint(self.middle, hidden, use_reentrant=self.reentrant)
        logits: Tensor = self.last(torch.tanh(hidden))
        return logits


class Attending(nn.Module):
    """nn.MultiheadAttention, which calls attention out of sight."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, need_weights=False)
        logits: Tensor = self.head(mixed.mean(1))
        return logits


class Frozen(nn.Sequential):
    """A part that does not train, and one whose gradient is never needed."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        self.unused = nn.Linear(2, 2)
        self[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self[2](self[1](self[0](x)))
        return logits


MODELS: dict[str, Callable[[], tuple[nn.Module, Any, tuple[Tensor, ...]]]] = {
    "gpt": lambda: (
        GPT(Size(19, 5, 2, 2, 8)), gpt_loss, (torch.randint(19, (6, 6)),)
    ),
    "attention": lambda: (Attending(), loss_function, batch_of(5, 4)),
    "frozen": lambda: (Frozen(), loss_function, batch_of(3)),
    "conv": lambda: (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2)),
        loss_function,
        batch_of(1, 4, 4),
    ),
}  # fmt: skip


def batch_of(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(6, *shape), torch.randint(2, (6,))


def one_by_one(
    model: nn.Module, function: Any, batch: tuple[Tensor, ...], num: int, shared: bool
) -> tuple[list[float], list[list[Tensor | None]]]:
    """Losses and gradients of copies of the model, each called on its own."""
    models = [copy.deepcopy(model) for _ in range(num)]
    for replica, other in enumerate(models):
        hdet_noise(other, replica)
    losses = []
    for replica, other in enumerate(models):
        loss = function(other, *(tensor.chunk(num)[replica] for tensor in batch))
        loss.backward()
        losses.append(loss.item())
    rows = [[p.grad for p in other.parameters()] for other in models]
    if shared:
        columns = zip(*rows, strict=True)
        rows = [[None if c[0] is None else sum(c) / num for c in columns]]
    return losses, rows


def hdet_noise(model: nn.Module, replica: int) -> None:
    generator = torch.Generator().manual_seed(replica)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", ["vmap", "loop"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_stacked_model_equals_separate_copies_for_every_kind_of_model(
    name: str, shared: bool, mode: Any, compiled: bool
) -> None:
    model, function, batch = MODELS[name]()
    losses, gradients = one_by_one(model, function, batch, 3, shared)
    ensemble = StackedReplicas(model, 3, mode=mode)
    ensemble.share_gradients(model, shared)
    if compiled:
        ensemble.compile(backend="aot_eager")
    for replica, module in enumerate(ensemble.modules(None)):
        hdet_noise(module, replica)
    got = ensemble.losses(function, *batch)
    got.sum().backward()
    assert got.tolist() == pytest.approx(losses, rel=1e-5)
    for module, row in zip(ensemble.modules(None), gradients, strict=False):
        for parameter, gradient in zip(module.parameters(), row, strict=True):
            if gradient is None:
                assert parameter.grad is None or not parameter.grad.any()
            else:
                torch.testing.assert_close(parameter.grad, gradient)


def test_tied_weights_stay_tied() -> None:
    model = GPT(Size(19, 5, 1, 2, 8))
    ensemble = StackedReplicas(model, 2)
    optimizer = ensemble.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    ensemble.losses(gpt_loss, torch.randint(19, (4, 6))).sum().backward()
    optimizer.step()
    for module in ensemble.modules(None):
        assert isinstance(module, GPT)
        assert module.head.weight is module.token.weight
    assert ensemble.consensus().state_dict().keys() == model.state_dict().keys()


def test_model_with_activation_checkpointing_is_run_in_a_loop() -> None:
    model = Checkpointed(reentrant=False)
    losses, gradients = one_by_one(model, loss_function, batch := batch_of(3), 2, True)
    ensemble = StackedReplicas(model, 2)
    for replica, module in enumerate(ensemble.modules(None)):
        hdet_noise(module, replica)
    with pytest.warns(UserWarning, match="replicas run one after another"):
        got = ensemble.losses(loss_function, *batch)
    got.sum().backward()
    assert got.tolist() == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close([p.grad for p in model.parameters()], gradients[0])


def test_gradient_that_bypasses_sharing_raises_an_error() -> None:
    model = Checkpointed(reentrant=True)
    ensemble = StackedReplicas(model, 2, mode="loop")
    optimizer = ensemble.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    ensemble.losses(loss_function, *batch_of(3)).sum().backward()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        optimizer.step()


@pytest.mark.parametrize("mode", ["vmap", "loop"])
def test_autocast_under_vmap_reaches_every_matrix_product(mode: Any) -> None:
    seen = []

    def function(model: Any, x: Tensor) -> Tensor:
        hidden = model(x)
        seen.append(hidden.dtype)
        return hidden.float().square().mean()

    ensemble = StackedReplicas(nn.Linear(3, 4), 2, mode=mode)
    with torch.autocast("cpu", torch.float16):
        losses = ensemble.losses(function, torch.randn(4, 3))
    losses.sum().backward()
    assert set(seen) == {torch.float16}  # the bias did not make it float32 again
    assert losses.dtype == torch.float32


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 1])
def test_cross_entropy_for_the_compiler_equals_that_of_torch(reduction: str, ignored: int) -> None:
    def function(model: Any, x: Tensor, y: Tensor) -> Tensor:
        options: dict[str, Any] = {"ignore_index": ignored, "reduction": reduction}
        return F.cross_entropy(model(x), y, **options).sum()

    x, y = torch.randn(8, 3), torch.tensor([0, 1, 2, 1, 2, 0, 1, 2])
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        ensemble = StackedReplicas(model, 2, mode="vmap" if compiled else "loop")
        if compiled:
            ensemble.compile(backend="aot_eager")
        losses = ensemble.losses(function, x, y)
        losses.sum().backward()
        results.append([losses.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(results[1], results[0])


def test_channels_last_weights_stay_channels_last_when_stacked() -> None:
    model = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    strides = model.weight.stride()
    ensemble = StackedReplicas(model, 2)
    for module in ensemble.modules(None):
        assert module.get_parameter("weight").stride() == strides


def test_dropout_in_a_loop_differs_and_the_choice_of_mode_draws_no_random_numbers() -> None:
    ensemble = StackedReplicas(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), 2, mode="loop")
    auto = StackedReplicas(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), 2)
    auto.load_state_dict(ensemble.state_dict())
    for one in (ensemble, auto):
        torch.manual_seed(7)
        first = one.losses(lambda model, part: model(part).sum(), torch.ones(2, 4))
        assert first[0] != first[1]
        after = torch.rand(1)
        torch.manual_seed(7)
        assert torch.equal(first, one.losses(lambda m, part: m(part).sum(), torch.ones(2, 4)))
        assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize("mode", ["vmap", "loop"])
def test_compiled_dropout_accepts_batches_of_every_size(mode: Any) -> None:
    """The last batch of an epoch: torch would make its shape a symbol, which vmap cannot draw."""
    # Wide: few random numbers would be the same by chance.
    ensemble = StackedReplicas(nn.Sequential(nn.Linear(2, 64), nn.Dropout(0.5)), 2, mode=mode)
    ensemble.compile(backend="aot_eager")
    for num in (8, 6, 4):
        losses = ensemble.losses(lambda model, x: model(x).square().mean(), torch.ones(num, 2))
        losses.sum().backward()
        assert losses[0] != losses[1]


@pytest.mark.parametrize("gradients", ["shared", "local"])
@pytest.mark.parametrize("mode", ["vmap", "loop"])
def test_parameters_frozen_during_a_run_are_frozen_on_all_replicas(
    mode: Any, gradients: Any
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    ensemble = StackedReplicas(model, 3, mode=mode)
    optimizer = ensemble.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    scheduler = hdet.OneCycleHDET(
        optimizer, 0.1, total_steps=40, sync_every=4, model=model, replicas=ensemble,
        gradients=gradients, spread=0.5,
    )  # fmt: skip
    for frozen, other in (("0", "2"), ("2", "0"), ("0", "2")):
        model.get_submodule(frozen).requires_grad_(False)
        model.get_submodule(other).requires_grad_(True)
        before = model.get_parameter(f"{frozen}.weight").detach().clone()
        for _ in range(4):
            optimizer.zero_grad()
            losses = ensemble.losses(lambda m, x: (m(x) - x).square().mean(), torch.randn(6, 3))
            losses.sum().backward()
            optimizer.step()
            scheduler.step(losses)
        for module in ensemble.modules(None):
            assert torch.equal(module.get_parameter(f"{frozen}.weight"), before)


class Counting(nn.Module):
    """Makes a new buffer in every forward, instead of changing the one it has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        logits: Tensor = self.linear(x)
        return logits


def test_buffers_that_a_forward_replaces_are_kept() -> None:
    model = Counting()
    ensemble = StackedReplicas(model, 2)
    for _ in range(3):
        ensemble.losses(loss_function, torch.ones(2, 2), torch.zeros(2, dtype=torch.long))
    assert [module.get_buffer("seen").item() for module in ensemble.modules(None)] == [3, 3]


class StubbornInTraining(Stubborn):
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = super().forward(x) if self.training else self.linear(x)
        return logits


def test_evaluation_before_the_first_step_does_not_choose_the_mode() -> None:
    model = StubbornInTraining()
    ensemble = StackedReplicas(model, 2)
    batch = torch.randn(4, 2), torch.zeros(4, dtype=torch.long)
    with torch.no_grad():
        ensemble.losses(loss_function, *batch)
    model.eval()
    ensemble.losses(loss_function, *batch)
    assert ensemble.mode == "auto"
    model.train()
    with pytest.warns(UserWarning, match="replicas run one after another"):
        ensemble.losses(loss_function, *batch).sum().backward()
    assert ensemble.mode == "loop"


def test_training_flags_of_the_model_apply_to_all_replicas() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for mode in ("vmap", "loop"):
        ensemble = StackedReplicas(copy.deepcopy(model), 2, mode=mode)
        first = ensemble.modules(None)[0]
        first.eval()
        ensemble.losses(loss_function, torch.randn(4, 2), torch.zeros(4, dtype=torch.long))
        for module in ensemble.modules(None):
            assert module.get_buffer("1.num_batches_tracked") == 0


# Optimizers ------------------------------------------------------------------------------------


class WithOwnSettings(torch.optim.SGD):
    """An optimizer with attributes beside its groups and its state."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.power = 0.5
        self.first = self.param_groups[0]["params"][0]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.first.grad.mul_(self.power)
        super().step(closure)


def test_copies_of_an_optimizer_keep_its_own_attributes() -> None:
    """A parameter among them becomes that of the replica."""
    model = toy.toy()
    one = WithOwnSettings(model.parameters(), lr=0.1)
    ensemble = StackedReplicas(model, N)
    optimizer = ensemble.optimizer(one)
    for module, copied in zip(ensemble.modules(None), optimizer.each, strict=True):
        assert isinstance(copied, WithOwnSettings)
        assert copied.power == 0.5
        assert copied.first is next(module.parameters())


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_optimizer_that_a_schedule_has_wrapped_steps_every_replica_once(gradients: str) -> None:
    """A schedule replaces `step` of the optimizer it is made with."""
    model = toy.toy()
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(one, lambda _: 1.0)
    ensemble = StackedReplicas(model, N)
    optimizer = ensemble.optimizer(one)
    ensemble.share_gradients(model, gradients == "shared")
    before = [p.detach().clone() for m in ensemble.modules(None) for p in m.parameters()]
    ensemble.losses(loss_function, *global_batch(0, N)).sum().backward()
    each = list(ensemble.modules(None))
    if gradients == "shared":
        each = [each[0]] * N
    slopes = [p.grad.clone() for m in each for p in m.parameters() if p.grad is not None]
    optimizer.step()
    after = [p.detach() for m in ensemble.modules(None) for p in m.parameters()]
    for new, old, slope in zip(after, before, slopes, strict=True):
        torch.testing.assert_close(new, old - 0.1 * slope)


def test_optimizer_of_the_model_becomes_one_for_all_replicas() -> None:
    model = nn.Linear(2, 1)
    ensemble = StackedReplicas(model, 3)
    groups = [
        {"params": [model.weight], "name": "w", "weight_decay": 0.5},
        {"params": [model.bias], "lr": 0.2, "name": "b"},
    ]
    optimizer = ensemble.optimizer(torch.optim.AdamW(groups, lr=0.1))
    assert [group["name"] for group in optimizer.param_groups] == ["w", "b"]
    for each, module in zip(optimizer.each, ensemble.modules(None), strict=True):
        assert isinstance(each, torch.optim.AdamW)
        assert each.param_groups[0]["params"][0] is module.get_parameter("weight")
        assert each.param_groups[0]["weight_decay"] == 0.5
        assert each.param_groups[1]["lr"] == 0.2
    optimizer.param_groups[0]["weight_decay"] = 0.25  # as a loop or a schedule may do
    ensemble.losses(lambda m, x: m(x).mean(), torch.ones(3, 2)).sum().backward()
    optimizer.step()
    assert [each.param_groups[0]["weight_decay"] for each in optimizer.each] == [0.25] * 3
    assert optimizer.state_dict().keys() == torch.optim.AdamW(groups).state_dict().keys()


def test_select_copies_the_optimizer_state_of_the_replica() -> None:
    model = nn.Linear(1, 1, bias=False)
    ensemble = StackedReplicas(model, 3)
    ensemble.share_gradients(model, False)
    optimizer = ensemble.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    optimizer.steered = {"lr"}
    for replica, each in enumerate(optimizer.each):
        each.param_groups[0]["lr"] = 0.1 * (replica + 1)
    x = torch.tensor([[1.0], [2.0], [3.0]])
    ensemble.losses(lambda m, x: m(x).mean(), x).sum().backward()
    optimizer.step()
    ensemble.select_(2)
    for replica, each in enumerate(optimizer.each):
        (state,) = each.state.values()
        assert state["momentum_buffer"] == 3.0
        assert each.param_groups[0]["lr"] == pytest.approx(0.1 * (replica + 1))
    with pytest.raises(ValueError, match="must be less than 3, got 3"):
        ensemble.select_(3)


def test_torchs_own_clipping_clips_shared_gradients() -> None:
    model = nn.Linear(1, 1, bias=False)
    ensemble = StackedReplicas(model, 2)
    optimizer = ensemble.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    start = model.weight.detach().clone()
    x = torch.tensor([[30.0], [50.0]])
    ensemble.losses(lambda m, x: m(x).sum(), x).sum().backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 40.0
    optimizer.step()
    for module in ensemble.modules(None):
        torch.testing.assert_close(
            start - module.get_parameter("weight").detach(), torch.ones(1, 1)
        )


def test_gradients_of_stacked_replicas_accumulate_over_batches() -> None:
    model = nn.Linear(1, 1, bias=False)
    for mode in ("vmap", "loop"):
        ensemble = StackedReplicas(copy.deepcopy(model), 2, mode=mode)
        for value in (1.0, 2.0):
            x = torch.tensor([[value], [3 * value]])
            ensemble.losses(lambda m, x: m(x).sum(), x).sum().backward()
        gradient = ensemble.modules(None)[0].get_parameter("weight").grad
        assert gradient is not None
        assert gradient.item() == 2.0 + 4.0


class Added(nn.Module):
    """Its gradient is the same number for all replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean() + self.shift


def test_expanded_local_gradient_gets_separate_memory_for_each_replica() -> None:
    ensemble = StackedReplicas(Added(), 3, mode="vmap")
    ensemble.share_gradients(None, False)
    for _ in range(2):
        ensemble.losses(lambda model, x: model(x), torch.ones(3, 1)).sum().backward()
    gradients = [module.get_parameter("shift").grad for module in ensemble.modules(None)]
    assert [float(gradient) for gradient in gradients if gradient is not None] == [2.0] * 3
    assert len({gradient.data_ptr() for gradient in gradients if gradient is not None}) == 3


def test_a_checkpoint_loaded_into_the_model_is_loaded_into_all_replicas() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    ensemble = StackedReplicas(model, 3)
    model.load_state_dict(other.state_dict())
    for module in ensemble.modules(None):
        assert torch.equal(module.get_parameter("weight"), other.weight)
    ensemble.consensus().load_state_dict(nn.Linear(2, 1).state_dict())  # an ordinary module
    assert torch.equal(model.weight, other.weight)


def test_a_checkpoint_has_the_size_of_one_replica_and_the_consensus_can_be_pickled() -> None:
    model = nn.Sequential(nn.Linear(50, 50), nn.BatchNorm1d(50))
    sizes = [len(saved(model.state_dict()))]
    ensemble = StackedReplicas(model, 8)
    sizes += [len(saved(model.state_dict())), len(saved(ensemble.state_dict()))]
    assert max(sizes) < 1.2 * min(sizes)
    for module in (ensemble.consensus(), model):
        again = torch.load(io.BytesIO(saved(module)), weights_only=False)
        again.load_state_dict(model.state_dict())
        assert torch.equal(again[0].weight, model.state_dict()["0.weight"])


def saved(what: Any) -> bytes:
    file = io.BytesIO()
    torch.save(what, file)
    return file.getvalue()


def test_a_plain_schedule_sets_the_learning_rate_of_all_replicas() -> None:
    model = nn.Linear(2, 2)
    ensemble = StackedReplicas(model, 2)
    optimizer = ensemble.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        ensemble.losses(lambda m, x: m(x).mean(), torch.ones(2, 2)).sum().backward()
        optimizer.step()
        schedule.step()
    assert [each.param_groups[0]["lr"] for each in optimizer.each] == [0.025, 0.025]
    other = ensemble.optimizer(torch.optim.SGD(model.parameters(), lr=0.3))
    other.load_state_dict(optimizer.state_dict())
    other.step()
    assert [each.param_groups[0]["weight_decay"] for each in other.each] == [0.5, 0.5]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_local_gradients_have_the_strides_of_their_weights(
    memory_format: torch.memory_format,
) -> None:
    """So that no optimizer has to lay them out again, one by one."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    model = model.to(memory_format=memory_format)  # type: ignore[call-overload]
    ensemble = hdet.StackedReplicas(model, 2, mode="vmap")
    ensemble.share_gradients(model, False)
    x = torch.randn(6, 2, 4, 4)
    ensemble.losses(lambda model, x: model(x).square().mean(), x).sum().backward()
    for module, part in zip(ensemble.modules(None), x.chunk(2), strict=True):
        found = {name: p.grad for name, p in module.named_parameters()}
        module.zero_grad()
        module(part).square().mean().backward()
        for name, parameter in module.named_parameters():
            mine, gradient = found[name], parameter.grad
            assert mine is not None
            assert gradient is not None
            assert mine.stride() == parameter.stride()
            torch.testing.assert_close(mine, gradient)


class AddedUp(nn.Module):
    """Two weights with one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.full((3, 3), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.a + self.b.view(3, 3))


def test_local_gradients_of_added_weights_do_not_share_memory() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x).square().mean()

    x, y = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0))
    model, plain = AddedUp(), AddedUp()
    ensemble = hdet.StackedReplicas(model, 2, mode="vmap")
    optimizer = ensemble.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    ensemble.share_gradients(model, False)
    for part in (x, y):  # accumulated
        ensemble.losses(loss, part).sum().backward()
        loss(plain, part[:4]).backward()
    optimizer.clip_grad_norm_(1.0)
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    for own, single in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, single.grad)


def test_zero_grad_of_the_model_clears_local_gradients_of_all_replicas() -> None:
    model = nn.Linear(2, 2)
    ensemble = StackedReplicas(model, 2)
    ensemble.share_gradients(model, False)
    for _ in range(3):
        model.zero_grad()
        ensemble.losses(lambda m, x: m(x).sum(), torch.ones(2, 2)).sum().backward()
    gradients = [module.get_parameter("weight").grad for module in ensemble.modules(None)]
    torch.testing.assert_close(gradients, [torch.ones(2, 2)] * 2)


def test_converge_averages_all_replicas_without_a_scheduler() -> None:
    ensemble = StackedReplicas(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), 3)
    hdet.perturb_(ensemble.modules(None)[0], 0.5, replicas=ensemble)
    mean = ensemble.consensus()
    ensemble.converge_()
    for module in ensemble.modules(None):
        torch.testing.assert_close(module.state_dict(), mean.state_dict())


# Bad input ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_models_that_cannot_be_stacked_are_refused() -> None:
    linear = nn.Linear(1, 1)
    for model, complaint in (
        (nn.ReLU(), "must have parameters"),
        (torch.compile(linear), "compiled one: call `compile\\(\\)` on the replicas"),
        (nn.LazyLinear(2), "run one batch first"),
        (nn.DataParallel(linear), "wrapped in DataParallel"),
    ):
        with pytest.raises(ValueError, match=complaint):
            StackedReplicas(model, 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a torch"):
        StackedReplicas("model", 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`num` must be"):
        StackedReplicas(linear, 0)


def test_batches_that_cannot_be_split_are_refused() -> None:
    ensemble = StackedReplicas(nn.Linear(2, 2), 2)
    for batch in (UserDict(x=torch.ones(2, 2)), numpy.ones((2, 2))):
        with pytest.raises(TypeError, match="tensors in tuples, lists and dicts"):
            ensemble.losses(loss_function, batch)


def two_losses(model: Any, x: Tensor) -> Any:
    return model(x).sum(), 0


@pytest.mark.parametrize("mode", ["auto", "vmap", "loop"])
def test_loss_function_must_return_a_scalar_tensor(mode: Any) -> None:
    ensemble = StackedReplicas(nn.Linear(2, 2), 2, mode=mode)
    with pytest.raises(TypeError, match="must return one loss, got a tuple"):
        ensemble.losses(two_losses, torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"must return one loss, got shape \(1, 2\)"):
        ensemble.losses(lambda m, x: m(x), torch.ones(2, 2))


def test_replicas_that_start_from_different_values_are_refused() -> None:
    changes: list[Callable[[Any], Any]] = [
        lambda model: nn.init.zeros_(model[0].weight),
        lambda model: model[0].load_state_dict(nn.Linear(2, 2).state_dict()),
        lambda model: hdet.perturb_(model),
    ]
    for change in changes:
        model = nn.Sequential(nn.Linear(2, 2))
        ensemble = StackedReplicas(model, 2)
        optimizer = ensemble.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        change(model)
        with pytest.raises(ValueError, match="does not start from the same values on replicas 0"):
            hdet.OneCycleHDET(
                optimizer, 0.1, total_steps=9, sync_every=3, model=model, replicas=ensemble
            )


def test_scheduler_refuses_a_model_that_was_not_stacked() -> None:
    model = nn.Linear(2, 2)
    ensemble = StackedReplicas(model, 2)
    optimizer = ensemble.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="the one that was stacked"):
        hdet.OneCycleHDET(
            optimizer, 0.1, total_steps=9, sync_every=3, model=nn.Linear(2, 2), replicas=ensemble
        )


def test_unsuitable_optimizers_are_refused() -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    ensemble = StackedReplicas(model, 2)
    with pytest.raises(ValueError, match="that is not the model's"):
        ensemble.optimizer(torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="of other parameters"):
        ensemble.optimizer(lambda _: torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="function that makes one"):
        ensemble.optimizer("sgd")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must make a torch optimizer, got None"):
        ensemble.optimizer(lambda _: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="without a closure, got LBFGS"):
        ensemble.optimizer(torch.optim.LBFGS(model.parameters()))
    optimizer = ensemble.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="`add_param_group` must come before"):
        optimizer.add_param_group({"params": []})
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"`replicas\.optimizer"):
        hdet.OneCycleHDET(plain, 0.1, total_steps=10, sync_every=5, model=model, replicas=ensemble)
    with pytest.raises(ValueError, match="`closure` must be None"):
        ensemble.optimizer(plain).step(lambda: 0.0)


def test_loss_function_may_only_call_the_model() -> None:
    ensemble = StackedReplicas(nn.Linear(1, 1), 2, mode="loop")
    with pytest.raises(AttributeError, match="can only be called"):
        ensemble.losses(lambda model, x: model.weight.sum(), torch.ones(2, 1))


def test_losses_of_a_model_that_was_moved_raise_an_error() -> None:
    model = nn.Linear(1, 1)
    ensemble = StackedReplicas(model, 2)
    model.double()
    with pytest.raises(RuntimeError, match="`weight` no longer belongs to the replicas"):
        ensemble.losses(loss_function, torch.ones(2, 1), torch.zeros(2))


def test_error_in_the_loss_function_reaches_the_user() -> None:
    ensemble = StackedReplicas(nn.Linear(2, 2), 2)

    def function(model: Any, x: Tensor) -> Tensor:
        return model(x).matmul(torch.ones(3, 3)).sum()

    with warnings.catch_warnings(), pytest.raises(RuntimeError, match=r"mat1|shape|size"):
        warnings.simplefilter("error")
        ensemble.losses(function, torch.ones(4, 2))
