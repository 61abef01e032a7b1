"""Dials and drop-ins: they do what torch's own modules do, and no value compiles anything."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hdet
from benchmarks.zoo.models import GPT, Size
from hdet.knobs.dial import Dial, running, sharing_dials


def dial_of(knob: Any) -> Dial:
    (dials,) = knob.dials.values()
    (dial,) = dials
    assert isinstance(dial, Dial)
    return dial


# Dropout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "shape", "channels"),
    [
        (nn.Dropout, (4000, 8), None),
        (nn.Dropout1d, (500, 40, 3), (500, 40)),
        (nn.Dropout2d, (500, 40, 2, 3), (500, 40)),
        (nn.Dropout3d, (500, 40, 2, 3, 2), (500, 40)),
        (nn.Dropout1d, (20000, 3), (20000,)),  # without a batch
        (nn.Dropout3d, (20000, 2, 3, 2), (20000,)),
        (nn.Dropout2d, (2000, 40, 3), (2000, 40)),  # torch: samples and channels
        (nn.Dropout2d, (500, 40), (500, 40)),
    ],
)
def test_dropout_drops_the_share_of_its_dial_and_rescales_the_rest(
    layer: Callable[[float], nn.Module], shape: tuple[int, ...], channels: tuple[int, ...] | None
) -> None:
    model = nn.Sequential(layer(0.5))
    dial_of(hdet.dropout(model)).set(0.2)
    y = model(torch.ones(shape))
    kept = y != 0
    assert torch.allclose(y[kept], torch.tensor(1 / 0.8))
    assert kept.float().mean() == pytest.approx(0.8, abs=0.02)
    if channels is not None:  # whole channels
        flat = kept.reshape(*channels, -1)
        assert torch.equal(flat.all(-1), flat.any(-1))
    assert torch.equal(model.eval()(torch.ones(shape)), torch.ones(shape))


@pytest.mark.parametrize(("p", "want"), [(0.0, 1.0), (1.0, 0.0)])
def test_dropout_with_probability_0_and_1_is_exact(p: float, want: float) -> None:
    model = nn.Sequential(nn.Dropout(0.5, inplace=True))
    dial_of(hdet.dropout(model)).set(p)
    x = torch.ones(1000, requires_grad=True)
    y = model(x * 1)
    y.sum().backward()
    assert torch.equal(y, torch.full((1000,), want))
    assert torch.equal(x.grad, torch.full((1000,), want))  # type: ignore[arg-type]


def test_dropout_knob_keeps_state_dict_and_hooks_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.3), nn.Linear(2, 2))
    before, layer = copy.deepcopy(model.state_dict()), model[1]
    called = []
    layer.register_forward_hook(lambda *_: called.append(1))
    hdet.dropout(model)
    assert list(model.state_dict()) == list(before)
    assert model[1] is layer and isinstance(layer, nn.Dropout)
    model(torch.ones(1, 2))
    assert called == [1]
    again = pickle.loads(pickle.dumps(model[0]))
    assert list(again.state_dict()) == list(model[0].state_dict())
    assert not list(model.buffers())


def test_dropout_layers_with_different_probabilities_get_different_dials() -> None:
    model = nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.2), nn.Dropout(0.1), nn.Dropout(0.0))
    (dials,) = hdet.dropout(model).dials.values()
    assert list(dials.values()) == [0.1, 0.2, 0.0]
    assert model[0].dial is model[2].dial is not model[1].dial


def test_a_second_factory_call_reuses_the_dials() -> None:
    model = nn.Sequential(nn.Dropout(0.1))
    assert dial_of(hdet.dropout(model)) is dial_of(hdet.dropout(model))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    assert dial_of(hdet.label_smoothing(criterion)) is dial_of(hdet.label_smoothing(criterion))


# Label smoothing -------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_label_smoothing_equals_torch(smoothing: float, reduction: str, weighted: bool) -> None:
    torch.manual_seed(0)
    scores, labels = torch.randn(12, 5, 3).double(), torch.randint(5, (12, 3))
    labels[2] = -7
    options: Any = {
        "weight": torch.rand(5).double() if weighted else None,
        "ignore_index": -7,
        "reduction": reduction,
    }
    criterion = nn.CrossEntropyLoss(label_smoothing=0.5, **options)
    dial_of(hdet.label_smoothing(criterion)).set(smoothing)
    want = F.cross_entropy(scores, labels, label_smoothing=smoothing, **options)
    assert torch.allclose(criterion(scores, labels), want, rtol=1e-6)


def test_label_smoothing_of_class_probabilities_equals_torch() -> None:
    scores, target = torch.randn(6, 4), torch.rand(6, 4).softmax(1)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.2)
    hdet.label_smoothing(criterion)
    want = F.cross_entropy(scores, target, label_smoothing=0.2)
    assert torch.allclose(criterion(scores, target), want)


# Attention -------------------------------------------------------------------------------------


def scaled(x: Tensor, temperature: float) -> Tensor:
    scale = 1 / (temperature * x.shape[-1] ** 0.5)
    return F.scaled_dot_product_attention(x, x, x, scale=scale)


class Bare(nn.Module):
    """Calls attention itself, by place or by name."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.by_name = by_name

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        if self.by_name:
            return F.scaled_dot_product_attention(query=x, key=x, value=x)
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("by_name", [False, True])
def test_attention_scores_are_divided_by_the_temperature(by_name: bool) -> None:
    model, x = Bare(by_name), torch.randn(2, 3, 5, 4)
    hdet.attention_temperature(model, start=0.4)
    assert torch.allclose(model(x), scaled(x, 0.4), atol=1e-6)
    twin = copy.deepcopy(model)
    assert torch.allclose(twin(x), scaled(x, 0.4), atol=1e-6)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("kind", ["packed", "separate", "no bias"])
@pytest.mark.parametrize("training", [False, True])
def test_temperature_acts_on_multihead_attention(kind: str, weights: bool, training: bool) -> None:
    torch.manual_seed(0)
    kinds: Any = {"packed": {}, "separate": {"kdim": 6, "vdim": 7}, "no bias": {"bias": False}}
    options = kinds[kind]
    module = nn.MultiheadAttention(8, 2, batch_first=True, **options).train(training)
    want_module = copy.deepcopy(module)
    with torch.no_grad():  # the queries are divided by 2 where they are made
        if kind == "separate":
            want_module.q_proj_weight.div_(2)
        else:
            want_module.in_proj_weight[:8].div_(2)
        if want_module.in_proj_bias is not None:
            want_module.in_proj_bias[:8].div_(2)
    hdet.attention_temperature(module, start=2.0)
    q = torch.randn(3, 5, 8)
    k, v = (torch.randn(3, 5, 6), torch.randn(3, 5, 7)) if kind == "separate" else (q, q)
    with torch.no_grad():
        got, seen = module(q, k, v, need_weights=weights)
        want, wanted = want_module(q, k, v, need_weights=weights)
    assert torch.allclose(got, want, atol=1e-6)
    if weights:
        assert torch.allclose(seen, wanted, atol=1e-6)


def test_temperature_acts_on_a_transformer_layer_with_its_fast_path() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        plain = layer(x)
        hdet.attention_temperature(layer, start=1.0)
        same = layer(x)
        dial_of(hdet.attention_temperature(layer)).set(5.0)
        other = layer(x)
    assert torch.allclose(plain, same, atol=1e-5)
    assert not torch.allclose(plain, other, atol=1e-3)


def test_each_group_has_its_own_attention_temperature() -> None:
    model = GPT(Size(vocabulary=13, context=6, layers=2, heads=2, width=8))
    knob = hdet.attention_temperature(model, groups=["blocks.0", "blocks.1"], shared=False)
    assert list(knob.dials) == ["attention_temperature/blocks.0", "attention_temperature/blocks.1"]
    x = torch.randint(13, (2, 6))
    before = model(x)
    first = next(iter(knob.dials["attention_temperature/blocks.0"]))
    first.set(3.0)
    assert not torch.allclose(before, model(x))


# Replicas and compilers --------------------------------------------------------------------------


def test_each_replica_reads_its_own_dial_value() -> None:
    dial = Dial(0.5)
    dial.place(3, None)
    dial.set(torch.tensor([1.0, 2.0, 3.0]), centre=1.8)
    assert float(dial()) == pytest.approx(1.8)
    for replica in range(3):
        with running(torch.tensor(replica)):
            assert float(dial()) == replica + 1
    copied = copy.deepcopy(dial)
    copied.set(7.0)
    assert float(dial()) == pytest.approx(1.8)
    with sharing_dials():
        assert copy.deepcopy(dial) is dial


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)[:, None]
        mixed = F.scaled_dot_product_attention(hidden, hidden, hidden)
        output: Tensor = self.down(self.dropout(mixed[:, 0]))
        return output


@pytest.mark.parametrize("mode", ["vmap", "loop"])
def test_stacked_replicas_run_with_their_own_dial_values(mode: Any) -> None:
    model, criterion = Small().double(), nn.CrossEntropyLoss(label_smoothing=0.1)
    knobs = [hdet.dropout(model), hdet.label_smoothing(criterion)]
    ensemble = hdet.StackedReplicas(model, 3, mode=mode)
    drop, smooth = map(dial_of, knobs)
    for dial, values in ((drop, [0.0, 1.0, 0.0]), (smooth, [0.0, 0.3, 0.6])):
        dial.place(3, None)
        dial.set(torch.tensor(values))
    x, y = torch.randn(2, 4).double().repeat(3, 1), torch.tensor([0, 2]).repeat(3)
    losses = ensemble.losses(lambda model, x, y: criterion(model(x), y), x, y)
    plain = Small().double()
    plain.load_state_dict(model.state_dict())
    want = []
    for p, smoothing in ((0.0, 0.0), (1.0, 0.3), (0.0, 0.6)):
        plain.dropout.p = p
        want.append(F.cross_entropy(plain(x[:2]), y[:2], label_smoothing=smoothing))
    assert torch.allclose(losses, torch.stack(want), rtol=1e-6)


@pytest.mark.parametrize("mode", ["vmap", "loop"])
def test_compiled_stacked_replicas_equal_eager_ones_and_compile_once(mode: Any) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model, criterion = Small(), nn.CrossEntropyLoss(label_smoothing=0.1)
    knobs = [
        hdet.dropout(model),
        hdet.label_smoothing(criterion),
        hdet.attention_temperature(model),
    ]
    with sharing_dials():
        eager = hdet.StackedReplicas(copy.deepcopy(model), 2, mode=mode)
    compiled = hdet.StackedReplicas(model, 2, mode=mode)
    compiled.compile(backend="aot_eager")
    dials = [dial_of(knob) for knob in knobs]
    for dial in dials:
        dial.place(2, None)

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return criterion(model(x), y)

    graphs = []
    for turn in range(12):
        dials[0].set(torch.tensor([0.0, 1.0]) if turn % 2 else torch.tensor([1.0, 0.0]))
        dials[1].set(torch.tensor([0.05 * turn, 0.03 * turn]))
        dials[2].set(torch.tensor([1.0 + turn, 1 / (1.0 + turn)]))
        x, y = torch.randn(8, 4), torch.randint(3, (8,))
        want, got = eager.losses(loss, x, y), compiled.losses(loss, x, y)
        assert torch.allclose(got, want, atol=1e-5)
        got.sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1:] == graphs[:1] * 11


def test_new_dial_values_do_not_recompile_a_model() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model = Small()
    knobs = [hdet.dropout(model), hdet.attention_temperature(model)]
    compiled = torch.compile(model, backend="aot_eager")
    x, graphs = torch.randn(6, 4), []
    for turn in range(12):
        for knob in knobs:
            dial_of(knob).set(0.05 * (turn + 1))
        compiled(x).sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1:] == graphs[:1] * 11


# Errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hdet.dropout(nn.Linear(1, 1)), "must have nn.Dropout layers for knob 'dropout'"),
        (
            lambda: hdet.dropout(Small(), groups=["up"]),
            "must contain dropout layers, got 'up' with none",
        ),
        (lambda: hdet.dropout(Small(), groups="up"), "must be a list of names, got 'up'"),
        (lambda: hdet.label_smoothing(nn.MSELoss()), "must be an nn.CrossEntropyLoss"),  # type: ignore[arg-type]
        (lambda: hdet.attention_temperature(Small(), groups=["x"]), "must be among"),
        (lambda: hdet.gradient_clip(0.0), "`max_norm` must be above 0"),
        (lambda: hdet.dropout(Small(), bounds=(0.5, 1.5)), r"knob 'dropout': `bounds` must be two"),
    ],
)
def test_invalid_arguments_of_factories_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make()


# Special cases -----------------------------------------------------------------------------------


def test_a_deep_copy_of_a_model_has_its_own_dials() -> None:
    model = Small()
    knob = hdet.dropout(model)
    twin = copy.deepcopy(model)
    dial_of(knob).set(0.7)
    assert float(twin.dropout.dial()) == pytest.approx(0.1)  # type: ignore[operator]
    ensemble = hdet.StackedReplicas(model, 3)
    assert all(m.dropout.dial is dial_of(knob) for m in ensemble.modules(None))  # type: ignore[union-attr]


def test_dropout_with_other_groups_reaches_every_layer() -> None:
    model = nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.1))
    hdet.dropout(model, shared=False)
    (dial,) = next(iter(hdet.dropout(model).dials.values()))
    assert {id(getattr(layer, "dial", None)) for layer in model} == {id(dial)}


def test_dropout_inside_multihead_attention_stays_with_a_warning() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2)
    with pytest.warns(UserWarning, match="inside nn.MultiheadAttention .* is not steered"):
        hdet.dropout(layer)


def test_dropout_that_stays_is_warned_of_on_the_first_process_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2)
    monkeypatch.setenv("RANK", "1")
    hdet.dropout(layer)  # a warning would be an error
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UserWarning, match="is not steered"):
        hdet.dropout(layer)


def test_temperature_keeps_a_wrapper_around_forward() -> None:
    model, x, calls = Bare(False), torch.randn(1, 2, 3, 4), []
    inner = model.forward

    def wrapped(x: Tensor) -> Tensor:
        calls.append(1)
        return inner(x)

    model.forward = wrapped  # type: ignore[method-assign]
    for _ in range(2):
        hdet.attention_temperature(model, start=0.4)
    assert torch.allclose(model(x), scaled(x, 0.4), atol=1e-6)
    assert calls == [1]


def test_label_smoothing_refuses_a_subclass_of_cross_entropy() -> None:
    class Focal(nn.CrossEntropyLoss):
        def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002
            return 100 * super().forward(input, target)

    with pytest.raises(TypeError, match="CrossEntropyLoss itself"):
        hdet.label_smoothing(Focal())


def test_infinite_logits_give_a_finite_loss_without_smoothing() -> None:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.2)
    dial_of(hdet.label_smoothing(criterion)).set(0.0)
    scores = torch.tensor([[1.0, 2.0, -torch.inf]])
    assert torch.isfinite(criterion(scores, torch.tensor([1])))


def test_dropout_in_half_precision_drops_the_right_share() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    dial_of(hdet.dropout(model)).set(0.01)
    dropped = (model(torch.ones(1_000_000, dtype=torch.bfloat16)) == 0).float().mean()
    assert float(dropped) == pytest.approx(0.01, abs=5e-4)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block, self.dropout = Bare(False), nn.Dropout(0.5)
        self.reentrant, self.checkpoints = reentrant, True

    def forward(self, x: Tensor) -> Tensor:
        if not self.checkpoints:
            return self.dropout(self.block(x))
        again = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return checkpoint(self.dropout, again, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_keeps_the_temperature(reentrant: bool) -> None:
    model, x = Checkpointed(reentrant), torch.randn(1, 2, 3, 4, requires_grad=True)
    hdet.attention_temperature(model, start=0.3)
    gradients = []
    for model.checkpoints in (False, True):
        torch.manual_seed(0)
        leaf = x.detach().requires_grad_()
        model(leaf).square().sum().backward()
        gradients.append(leaf.grad)
    plain, recomputed = gradients
    assert plain is not None and recomputed is not None
    assert torch.allclose(plain, recomputed, atol=1e-6)


def test_activation_checkpointing_of_stacked_replicas_with_a_dial_raises() -> None:
    model = Checkpointed(False)
    knob = hdet.dropout(model)
    ensemble = hdet.StackedReplicas(model, 2, mode="loop")
    dial_of(knob).place(2, None)
    losses = ensemble.losses(lambda model, x: model(x).sum(), torch.randn(4, 2, 3, 4))
    with pytest.raises(RuntimeError, match="read in the backward pass by activation checkpoint"):
        losses.sum().backward()
