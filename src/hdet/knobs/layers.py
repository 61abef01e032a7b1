"""Numbers that a model reads from memory while it runs, and the drop-ins that read them.

torch compiles the probability of nn.Dropout or a label smoothing into the code: every new value
is a new compilation. A dial is a tensor, so that turning it costs nothing, and it holds one value
for each replica of the process: the code that runs replica r reads the r-th.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hdet.knobs.dial import Dial, check_not_copied

# Dropout ---------------------------------------------------------------------------------------


class _Dropout:
    """What the drop-ins for torch's dropout layers have in common."""

    dial: Dial
    training: bool
    inplace: bool

    def drawn(self, shape: Sequence[int]) -> list[int]:
        """The shape of what is drawn."""
        return list(shape)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (as in torch)
        if not self.training:
            return input
        # In half precision a draw has few values, and would drop too many.
        dtype = torch.promote_types(input.dtype, torch.float32)
        p = self.dial().to(dtype)
        draw = torch.rand(self.drawn(input.shape), dtype=dtype, device=input.device)
        # At p = 1 everything is dropped: 0 / 0 would be no number.
        kept = ((draw >= p) / (1 - p).clamp_min(torch.finfo(dtype).tiny)).to(input.dtype)
        return input.mul_(kept) if self.inplace else input * kept

    def extra_repr(self) -> str:
        return f"p=hdet.Dial, inplace={self.inplace}"


class SteeredDropout(_Dropout, nn.Dropout):
    """nn.Dropout whose probability is a dial."""


class SteeredDropout1d(_Dropout, nn.Dropout1d):
    """nn.Dropout1d whose probability is a dial."""

    def drawn(self, shape: Sequence[int]) -> list[int]:
        return _channels(shape, 2 if len(shape) == 3 else 1)


class SteeredDropout2d(_Dropout, nn.Dropout2d):
    """nn.Dropout2d whose probability is a dial."""

    def drawn(self, shape: Sequence[int]) -> list[int]:
        return _channels(shape, 2)  # torch takes any first two for samples and channels


class SteeredDropout3d(_Dropout, nn.Dropout3d):
    """nn.Dropout3d whose probability is a dial."""

    def drawn(self, shape: Sequence[int]) -> list[int]:
        return _channels(shape, 2 if len(shape) == 5 else 1)


def _channels(shape: Sequence[int], num: int) -> list[int]:
    """One number for each of the first dimensions."""
    return [*shape[:num], *[1] * len(shape[num:])]


DROPOUTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: SteeredDropout,
    nn.Dropout1d: SteeredDropout1d,
    nn.Dropout2d: SteeredDropout2d,
    nn.Dropout3d: SteeredDropout3d,
}


def steer_dropout(layers: Sequence[nn.Module]) -> dict[Dial, float]:
    """Give layers dials, one for each probability that occurs; the dials and their start values.

    Only the class of a layer changes: its place, its hooks and the state_dict stay.
    """
    dials: dict[Dial, float] = {}
    for p in dict.fromkeys(float(layer.p) for layer in layers):  # type: ignore[arg-type]
        same: list[Any] = [layer for layer in layers if layer.p == p]
        there = {id(getattr(layer, "dial", None)) for layer in same}
        dial = same[0].dial if len(there) == 1 and hasattr(same[0], "dial") else Dial(p)
        for layer in same:
            if getattr(layer, "dial", None) is not dial:
                check_not_copied(layer, "dropout")
        for layer in same:
            layer.__class__ = DROPOUTS.get(type(layer), type(layer))
            layer.dial = dial
        dials[dial] = p
    return dials


# Label smoothing -------------------------------------------------------------------------------


class SteeredCrossEntropyLoss(nn.CrossEntropyLoss):
    """nn.CrossEntropyLoss whose label smoothing is a dial. The loss is linear in it."""

    dial: Dial

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002 (as in torch)
        how = {
            "weight": self.weight,
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
        }
        sharp = F.cross_entropy(input, target, **how)  # type: ignore[arg-type]
        flat = F.cross_entropy(input, target, **how, label_smoothing=1.0)  # type: ignore[arg-type]
        share = self.dial().to(sharp.dtype)
        # Logits of minus infinity make the flat part infinite: none of it is none of it.
        return torch.where(share == 0, sharp, torch.lerp(sharp, flat, share))


def steer_label_smoothing(criterion: nn.CrossEntropyLoss) -> dict[Dial, float]:
    if not isinstance(criterion, SteeredCrossEntropyLoss):
        check_not_copied(criterion, "label_smoothing")
        criterion.__class__ = SteeredCrossEntropyLoss
        criterion.dial = Dial(criterion.label_smoothing)  # type: ignore
    return {criterion.dial: float(criterion.label_smoothing)}  # type: ignore


# The temperature of attention ------------------------------------------------------------------


class _Tempered:
    """The forward of a module in which attention is computed at the temperature of a dial."""

    def __init__(self, module: nn.Module, dial: Dial) -> None:
        own: Any = vars(module).get("forward")
        self._module, self.dial = module, dial
        self._inner: Any = own._inner if isinstance(own, _Tempered) else own

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if self.dial.is_tempering:  # by a module around this one
            return self._forward(*inputs, **options)
        self.dial.is_tempering = True
        try:
            with _Temper(self.dial):
                return self._forward(*inputs, **options)
        finally:
            self.dial.is_tempering = False

    def _forward(self, *inputs: Any, **options: Any) -> Any:
        if self._inner is not None:  # somebody else's wrapper
            return self._inner(*inputs, **options)
        return type(self._module).forward(self._module, *inputs, **options)


class _Temper(TorchFunctionMode):
    """Inside, the scores of attention are divided by a dial: the queries are, which is cheaper."""

    def __init__(self, dial: Dial) -> None:
        super().__init__()
        self.dial = dial

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            if args:
                args = (args[0] / self.dial().to(args[0].dtype), *args[1:])
            else:
                kwargs["query"] = kwargs["query"] / self.dial().to(kwargs["query"].dtype)
        elif func is F.multi_head_attention_forward:
            return func(*_tempered_projection(args, kwargs, self.dial), **kwargs)
        return func(*args, **kwargs)


def _tempered_projection(args: Any, kwargs: dict[str, Any], dial: Dial) -> Any:
    """nn.MultiheadAttention hides its queries: what makes them is divided instead."""
    args = list(args)
    width, packed, bias = args[3], args[5], args[6]
    if kwargs.get("use_separate_proj_weight"):
        weight = kwargs["q_proj_weight"]
        kwargs["q_proj_weight"] = weight / dial().to(weight.dtype)
    else:
        args[5] = _divided_start(packed, width, dial)
    if bias is not None:
        args[6] = _divided_start(bias, width, dial)
    return args


def _divided_start(stacked: Tensor, num: int, dial: Dial) -> Tensor:
    """The first rows of query, key and value rows stacked on each other, divided."""
    return torch.cat([stacked[:num] / dial().to(stacked.dtype), stacked[num:]])


def steer_temperature(modules: Sequence[nn.Module], start: float) -> dict[Dial, float]:
    """Attention in these modules, and in all below them, is computed at one temperature."""
    dial = Dial(start)
    for module in modules:
        own = vars(module).get("forward")
        if isinstance(own, _Tempered):
            dial = own.dial
            dial.set(start)
    # Also the parts that attend themselves: activation checkpointing calls them on their own.
    parts = {part for module in modules for part in (module, *filter(_attends, module.modules()))}
    for part in parts:
        own = vars(part).get("forward")
        if not isinstance(own, _Tempered) or own.dial is not dial:
            check_not_copied(part, "attention_temperature")
    for part in parts:
        part.forward = _Tempered(part, dial)
    return {dial: start}


def _attends(module: nn.Module) -> bool:
    """Whether a module computes attention, as far as its own code tells."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    try:
        return "scaled_dot_product_attention" in inspect.getsource(type(module))
    except (OSError, TypeError):
        return False


# Gradient clipping -----------------------------------------------------------------------------


@torch.no_grad()
def clip_by(
    parameters: Sequence[Tensor], most: Tensor, *, scale: Tensor | None, in_place: bool
) -> None:
    """Scale gradients so that their norm is at most `most`, without reading it back.

    Replicas that share gradients must not clip what the others still need: then copies are made.
    A fused optimizer gets them still scaled by GradScaler, and takes the `scale` out itself.
    """
    clipped = [p for p in parameters if p.grad is not None]
    gradients = [p.grad for p in clipped if p.grad is not None]
    if not gradients:
        return
    norm = nn.utils.get_total_norm(gradients)
    norm = norm if scale is None else norm / scale
    factor = (most.to(norm.dtype) / (norm + 1e-6)).clamp_max(1.0)
    if in_place:
        torch._foreach_mul_(gradients, factor)
        return
    for parameter, gradient in zip(clipped, torch._foreach_mul(gradients, factor), strict=True):
        parameter.grad = gradient
