"""Batches of stacked replicas: which dimension is split, for each argument, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet

N, TIME, SAMPLES, TOKENS = 2, 5, 8, 11


class Recurrent(nn.Module):
    """A model of sequence-first batches, [time, samples], whose samples do not mix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(TOKENS, 4), nn.Linear(8, 4)
        self.head = nn.Linear(4, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros(x.shape[1], 4, dtype=self.head.weight.dtype)
        outputs = []
        for step in self.embed(x):
            hidden = torch.tanh(self.rnn(torch.cat([step, hidden], -1)))
            outputs.append(self.head(hidden))
        return torch.stack(outputs)


def loss_of(model: Any, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    logits = model(x).flatten(0, 1)
    return nn.functional.cross_entropy(logits, y.flatten(), weight)


def sequences() -> tuple[Tensor, Tensor]:
    x = torch.randint(TOKENS, (TIME, SAMPLES), generator=torch.Generator().manual_seed(0))
    return x, x.roll(-1, 0)


def halves(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x[:, :4], y[:, :4]), (x[:, 4:], y[:, 4:])]


def stacked(batch_dim: Any, mode: Any = "vmap") -> hdet.StackedReplicas:
    torch.manual_seed(0)
    return hdet.StackedReplicas(Recurrent().double(), N, mode=mode, batch_dim=batch_dim)


@pytest.mark.parametrize("mode", ["vmap", "loop"])
def test_sequence_first_batch_is_split_over_its_samples(mode: Any) -> None:
    """The losses and the shared gradient are those of the plain model on each half of the batch."""
    x, y = sequences()
    ensemble = stacked(1, mode)
    plain = ensemble.consensus()
    want = torch.stack([loss_of(plain, *part) for part in halves(x, y)])
    want.mean().backward()
    losses = ensemble.losses(loss_of, x, y)
    losses.sum().backward()
    torch.testing.assert_close(losses, want)
    model = ensemble.modules(None)[0]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_every_form_of_batch_dim_gives_the_same_losses() -> None:
    """An int, a tuple, names of positional, named and nested arguments, a batch that is a dict."""
    x, y = sequences()
    weight = torch.linspace(1, 2, TOKENS, dtype=torch.float64)

    def of_dict(model: Any, batch: dict[str, Any]) -> Tensor:
        return loss_of(model, batch["x"], *batch["rest"])

    def of_named(model: Any, **batch: Tensor) -> Tensor:
        return loss_of(model, **batch)

    calls: list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]] = [
        ((1, 1, None), loss_of, (x, y, weight), {}),
        ((1, -1, None), loss_of, (x, y, weight), {}),
        ({"x": 1, "y": 1, "weight": None}, loss_of, (x, y, weight), {}),
        ({"x": 1, "y": 1, "weight": None}, loss_of, (x,), {"y": y, "weight": weight}),
        ({"weight": None}, loss_of, (), {"x": x.T, "y": y.T, "weight": weight}),
        ({"x": 1, "rest": (1, None)}, of_dict, ({"x": x, "rest": [y, weight]},), {}),
        ({"batch": {"x": 1, "rest": (1, None)}}, of_dict, ({"x": x, "rest": [y, weight]},), {}),
        ({"x": 1, "y": 1, "weight": None}, of_named, (), {"weight": weight, "y": y, "x": x}),
    ]
    found = [stacked(dims).losses(f, *args, **named) for dims, f, args, named in calls]
    found[4:5] = []  # its batch is transposed: another order of time, so other losses
    for losses in found[1:]:
        torch.testing.assert_close(losses, found[0])
    second = loss_of(stacked(1).consensus(), *halves(x, y)[1], weight)
    torch.testing.assert_close(found[0][1], second)


@pytest.mark.parametrize("mode", ["vmap", "loop"])
def test_named_arguments_train_like_positional_ones_also_compiled(mode: Any) -> None:
    """As a batch of Hugging Face: a dict of tensors and numbers."""
    x, y = torch.randn(8, 3), torch.randint(3, (8,))

    def loss(model: Any, x: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        return nn.functional.cross_entropy(model(x), labels, label_smoothing=smoothing)

    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        ensemble = hdet.StackedReplicas(model, 2, mode=mode)
        if compiled:
            ensemble.compile(backend="aot_eager")
        batch: dict[str, Any] = {"x": x, "labels": y, "smoothing": 0.1}
        losses = ensemble.losses(loss, **batch) if compiled else ensemble.losses(loss, x, y, 0.1)
        losses.sum().backward()
        results.append([losses.detach(), model.weight.grad])
    torch.testing.assert_close(results[0], results[1])


def test_batch_that_is_not_split_by_its_first_dimension_is_refused_with_what_to_write() -> None:
    """Sequences of 32 steps with flattened targets would be split over time without a word."""
    ensemble = hdet.StackedReplicas(nn.Linear(4, 1), 4)
    x = torch.randn(32, 8, 4)  # time, samples, features
    with pytest.raises(ValueError, match=r"\[\(32, 8, 4\), \(256,\)\].*dim 0.*batch_dim="):
        ensemble.losses(loss_of, x, torch.randn(256))
    with pytest.raises(ValueError, match=r"35 samples in dim 0 .*\(35, 8, 4\).*batch_dim="):
        ensemble.losses(loss_of, x.repeat(2, 1, 1)[:35], torch.randn(35, 8))


def test_names_without_an_entry_must_have_as_many_samples_as_the_others() -> None:
    """Sequences first, and targets that were forgotten: samples would be paired wrongly."""
    x, y = torch.zeros(8, 4).long(), torch.zeros(8, 4).long()
    with pytest.raises(ValueError, match=r"got the shapes \[\(8, 4\), \(8, 4\)\].*their dims"):
        stacked({"x": 1}).losses(loss_of, x, y)


def test_sizes_may_differ_where_each_argument_has_a_dim() -> None:
    real, noise = torch.ones(4, 2), torch.ones(8, 2)

    def loss(model: Any, real: Tensor, noise: Tensor) -> Tensor:
        total: Tensor = model(real).sum() + model(noise).sum()
        return total

    for dims in ((0, 0), {"real": 0, "noise": 0}):
        ensemble = hdet.StackedReplicas(nn.Linear(2, 1), 2, batch_dim=dims)
        assert len(ensemble.losses(loss, real, noise)) == 2


@pytest.mark.parametrize(
    ("dims", "error", "complaint"),
    [
        (None, TypeError, "must split something"),
        (True, TypeError, "must be an integer"),
        ({"x": 0.5}, TypeError, "got 0.5"),
        ("x", TypeError, "got 'x'"),
        (2, ValueError, r"got 2 for a tensor of shape \(8, 8\)"),
        ((0,), ValueError, "one entry for each argument"),
        ((0, 0, 0), ValueError, "3 positional|2 positional"),
        (((0, 0), 0), ValueError, r"`batch_dim\[0\]` must have the structure .* for a Tensor"),
        ({"x": {"ids": 0}}, ValueError, r"`batch_dim\['x'\]` must have the structure"),
        ({"labels": 0}, ValueError, "got 'labels', which is none of weight, x, y"),
    ],
)
def test_batch_dim_that_does_not_fit_is_refused(
    dims: Any, error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        stacked(dims).losses(loss_of, torch.zeros(8, 8).long(), torch.zeros(8, 8).long())


def test_named_arguments_need_names_in_batch_dim() -> None:
    x, y = sequences()
    with pytest.raises(ValueError, match="Use a mapping from names"):
        stacked((1, 1)).losses(loss_of, x, y=y)


def test_tensor_with_one_entry_for_each_replica_needs_no_other_size() -> None:
    """The values of a knob of the user's, which a loss function gets with its part of the batch."""
    ensemble = hdet.StackedReplicas(nn.Linear(2, 1), 4)
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    seen = ensemble.losses(
        lambda m, x, value: 0 * m(x).sum() + value.sum(), torch.ones(8, 2), values
    )
    assert seen.tolist() == values.tolist()


def test_held_out_batches_are_split_along_the_batch_dim() -> None:
    """Those that the engine records, and those that the loop gives."""
    x, y = sequences()
    ensemble = stacked({"x": 1, "y": 1})
    plain = ensemble.consensus()
    held = ensemble.hold_out(2 * N, 2 * N)
    for _ in range(2):
        ensemble.losses(loss_of, x, y=y)
        held.end_step()
    want = [loss_of(plain, *half).item() for half in halves(x, y)]
    assert held.rows(2)[0, :2].tolist() == pytest.approx(want, rel=1e-12)
    held.close()

    model = ensemble.modules(None)[0]
    optimizer = ensemble.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    base = OneCycleLR(optimizer, 0.1, total_steps=2000)
    scheduler = hdet.HDET(base, model=model, replicas=ensemble)
    wide = x.repeat(1, 4)  # 32 samples make four parts
    scheduler.hold_out(loss_of, wide, y=y.repeat(1, 4))
    optimizer.zero_grad()
    losses = ensemble.losses(loss_of, x, y=y)
    losses.sum().backward()
    optimizer.step()
    scheduler.step(losses)
    trial = scheduler._run.progress.trial
    assert trial is not None
    parts = trial.held_out._parts  # type: ignore[union-attr]
    assert [part.batch[1]["y"].shape for part in parts] == [(TIME, 8)] * 4
    assert torch.equal(torch.cat([part.batch[0][0] for part in parts], 1), wide)
