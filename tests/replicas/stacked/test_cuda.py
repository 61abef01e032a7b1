"""Stacked replicas on a GPU: compiled, captured and in half precision still the same run."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet
from benchmarks.zoo.models import GPT, ResNet18, Size, gpt_loss, image_loss
from hdet.lr_search.constants import NUM_HELD_OUT_PARTS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
N = 4


def workload(
    name: str, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Any, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    if name in ("gpt", "odd heads"):
        model: nn.Module = GPT(Size(64, 32, 2, 2, 128 if name == "gpt" else 12))
        return model.cuda(), gpt_loss, (torch.randint(64, (8, 33), device="cuda"),)
    # float64: convolutions on a GPU add up in no fixed order, and BatchNorm makes much of it.
    model = ResNet18(width=8).cuda().to(dtype)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(32, 3, 16, 16, device="cuda", dtype=dtype)
    x = x.to(memory_format=torch.channels_last)
    return model, image_loss, (x, torch.randint(10, (32,), device="cuda"))


def train(
    name: str, gradients: Any, mode: Any, compiled: bool, dtype: torch.dtype, steps: int = 6
) -> list[Tensor]:
    model, loss_function, batch = workload(name, dtype if dtype == torch.float64 else torch.float32)
    ensemble = hdet.StackedReplicas(model, N, mode=mode)
    if compiled:
        ensemble.compile()
    optimizer = ensemble.optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    scheduler = hdet.OneCycleHDET(
        optimizer, 0.05, total_steps=12, spread=0.5, sync_every=4, warmup_steps=4,
        gradients=gradients, model=model, replicas=ensemble, auto_lr=False,
    )  # fmt: skip
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype == torch.bfloat16):
            losses = ensemble.losses(loss_function, *batch)
        losses.sum().backward()
        optimizer.step()
        scheduler.step(losses)
        seen.append(losses.detach().clone())
    weights = [p.detach().clone() for m in ensemble.modules(None) for p in m.parameters()]
    buffers = [b.detach().clone() for m in ensemble.modules(None) for b in m.buffers()]
    return [torch.stack(seen), *weights, *buffers]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("gradients", ["shared", "local"])
@pytest.mark.parametrize("name", ["gpt", "resnet", "odd heads"])
def test_all_modes_and_compiled_runs_on_cuda_agree(
    name: str, gradients: str, compiled: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # no fallback
        warnings.filterwarnings("ignore", message=".*TensorFloat32.*|.*max_autotune.*")
        dtype = torch.float64 if name == "resnet" else torch.float32
        want = train(name, gradients, "loop", False, dtype)
        got = train(name, gradients, "auto", compiled, dtype)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["gpt", "resnet", "odd heads"])
def test_half_precision_run_on_cuda_is_close_to_float32(name: str, compiled: bool) -> None:
    # Few steps: BatchNorm on 8 images makes much of every rounding.
    want = train(name, "shared", "loop", False, torch.float32, steps=3)[0]
    got = train(name, "shared", "auto", compiled, torch.bfloat16, steps=3)[0]
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_held_out_scores_are_equal_with_captured_graphs(name: str) -> None:
    """A replay for all replicas on one part, and none of it is seen by the run."""
    tables = []
    for compiled in (False, True):
        dtype = torch.float64 if name == "resnet" else torch.float32
        model, loss_function, batch = workload(name, dtype)
        ensemble = hdet.StackedReplicas(model, N)
        if compiled:
            ensemble.compile()
        held = ensemble.hold_out(NUM_HELD_OUT_PARTS, NUM_HELD_OUT_PARTS)
        while held.steps_left:
            ensemble.losses(loss_function, *batch).sum().backward()
            held.end_step()
        kept = [*model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
        before = [tensor.clone() for tensor in kept]
        tables.append(held.rows(8)[:, :8])
        tables.append(held.rows(8, alike=True)[:, :8])
        after = [*model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(before, after, strict=True))
    for table in tables[1:]:
        torch.testing.assert_close(table, tables[0], rtol=2e-3, atol=2e-4)


def test_cycle_on_cuda_synchronizes_with_the_host_once() -> None:
    model, loss_function, batch = workload("gpt")
    ensemble = hdet.StackedReplicas(model, N)
    optimizer = ensemble.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
    scheduler = hdet.OneCycleHDET(
        optimizer, 0.01, total_steps=100, sync_every=4, warmup_steps=4, model=model,
        replicas=ensemble,
    )  # fmt: skip
    counts = []
    for _ in range(12):
        optimizer.zero_grad()
        losses = ensemble.losses(loss_function, *batch)
        losses.sum().backward()
        optimizer.step()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scheduler.step(losses)
        torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchronizing" in str(w.message) for w in caught))
    assert counts == [0, 0, 0, 1] * 3


# What a captured run must still do -------------------------------------------------------------


def small(mode: Any = "vmap", dropout: float = 0.0) -> tuple[nn.Module, hdet.StackedReplicas]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), nn.Linear(8, 2)).cuda()
    ensemble = hdet.StackedReplicas(model, N, mode=mode)
    ensemble.compile()
    return model, ensemble


def label_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def batch(seed: int, num: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 8, generator=generator)
    return x.cuda(), torch.randint(2, (num,), generator=generator).cuda()


@pytest.mark.parametrize("mode", ["vmap", "loop"])
def test_dropout_draws_new_masks_at_every_replay_and_is_reproducible(mode: str) -> None:
    _, ensemble = small(mode, dropout=0.5)
    ensemble.losses(label_loss, *batch(0))

    def draw() -> list[Tensor]:
        torch.manual_seed(5)
        return [ensemble.losses(label_loss, *batch(0)).detach() for _ in range(3)]

    first, second = draw(), draw()
    assert len({tuple(losses.tolist()) for losses in first}) == 3
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("mode", ["vmap", "loop"])
def test_gradients_accumulate_over_replays(mode: str) -> None:
    model, ensemble = small(mode)
    for seed in (1, 2):
        ensemble.losses(label_loss, *batch(seed)).sum().backward()
    together = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    separate = []
    for seed in (1, 2):
        ensemble.losses(label_loss, *batch(seed)).sum().backward()
        separate.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    for total, one, two in zip(together, *separate, strict=True):
        torch.testing.assert_close(total, one + two)


def test_backward_after_the_next_replay_raises_an_error() -> None:
    _, ensemble = small()
    losses = ensemble.losses(label_loss, *batch(1))
    ensemble.losses(label_loss, *batch(2))
    with pytest.raises(RuntimeError, match="must come before the next"):
        losses.sum().backward()


def test_batch_of_another_size_is_captured_separately() -> None:
    model, ensemble = small()
    plain = copy.deepcopy(model)
    for num in (32, 16, 32):
        model.zero_grad()
        losses = ensemble.losses(label_loss, *(data := batch(num, num)))
        losses.sum().backward()
        plain.zero_grad()
        label_loss(plain, *data).backward()
        torch.testing.assert_close(losses.mean(), label_loss(plain, *data).detach())
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_loss_that_cannot_be_captured_runs_without_graphs() -> None:
    _, ensemble = small("loop")

    def looks(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = label_loss(model, x, y)
        return loss * 2 if loss.item() > 1e9 else loss

    with pytest.warns(UserWarning, match="without CUDA graphs"):
        losses = ensemble.losses(looks, *batch(1))
    losses.sum().backward()
    assert losses.isfinite().all()


def test_shared_optimizer_state_on_cuda_gives_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    together = train("gpt", "shared", "auto", False, torch.float32)
    monkeypatch.setattr("hdet.replicas.stacked.optimizer.moves_in_proportion", lambda _: False)
    apart = train("gpt", "shared", "auto", False, torch.float32)
    for ours, theirs in zip(together, apart, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("mode", ["vmap", "loop"])
def test_captured_run_follows_changes_of_its_knobs(mode: Any) -> None:
    """Each replay uses the present values, one for each replica."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)).cuda()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    knobs = [hdet.dropout(model), hdet.label_smoothing(criterion)]
    dials = [dial for knob in knobs for each in knob.dials.values() for dial in each]
    plain = copy.deepcopy(model).train()
    ensemble = hdet.StackedReplicas(model, 2, mode=mode)
    ensemble.compile()
    for dial in dials:
        dial.place(2, torch.device("cuda"))

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return criterion(model(x), y)

    x, y = torch.randn(6, 8, device="cuda"), torch.randint(4, (6,), device="cuda")
    for turn in range(5):
        drops = [0.0, 1.0] if turn % 2 else [1.0, 0.0]
        dials[0].set(torch.tensor(drops))
        dials[1].set(torch.tensor([0.1 * turn, 0.05 * turn]))
        losses = ensemble.losses(loss, x.repeat(2, 1), y.repeat(2))
        losses.sum().backward()
        for replica, drop in enumerate(drops):
            plain[1].dial.set(drop)  # type: ignore[operator,union-attr]
            smoothing = (0.1, 0.05)[replica] * turn
            want = nn.functional.cross_entropy(plain(x), y, label_smoothing=smoothing)
            torch.testing.assert_close(losses[replica], want, rtol=1e-3, atol=1e-4)


def test_captured_run_with_knobs_and_a_probe_trains() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)).cuda()
    knobs = [hdet.lr(), hdet.weight_decay(), hdet.dropout(model), hdet.gradient_clip(1.0)]
    ensemble = hdet.StackedReplicas(model, 8)
    ensemble.compile()
    optimizer = ensemble.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    x, y = torch.randn(64, 8, device="cuda"), torch.randint(4, (64,), device="cuda")
    scheduler = hdet.HDET(
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
        model=model,
        replicas=ensemble,
        gradients="local",  # a probe sees dropout only in weights that went their own ways
        knobs=knobs,
        probe=hdet.Probe(
            lambda m: nn.functional.cross_entropy(m(x), y, reduction="none"), tail=0.5
        ),
        controller=hdet.Tracker(threshold=0.0),
        sync_every=4,
        preset="paper",
    )
    for _ in range(20):
        optimizer.zero_grad()
        losses = ensemble.losses(label_loss, x, y)
        losses.sum().backward()
        optimizer.step()
        scheduler.step(losses.detach())
    assert any(centre != 1.0 for centre in scheduler.get_knobs().values())
    assert len(scheduler.sensitivity()) == 4
    torch.cuda.synchronize()
    assert 0 < (scheduler.probe_share() or 0) < 1
