"""Layers and losses that read a dial: dropout, label smoothing, attention, gradient clipping.

torch compiles the probability of nn.Dropout and the label smoothing into the code, so that every
new value needs a new compilation. A dial is a tensor: a new value compiles nothing. It holds one
value for each replica of the process, and code that runs replica r reads the r-th.
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
    """What the replacements of torch's dropout layers have in common."""

    dial: Dial
    training: bool
    inplace: bool

    def mask_shape(self, shape: Sequence[int]) -> list[int]:
        """The shape of the random mask for an input of some shape."""
        return list(shape)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (as in torch)
        if not self.training:
            return input
        # In half precision random numbers have few values, which would drop too many elements.
        dtype = torch.promote_types(input.dtype, torch.float32)
        p = self.dial().to(dtype)
        draw = torch.rand(self.mask_shape(input.shape), dtype=dtype, device=input.device)
        # At p = 1 all elements are dropped: 0 / 0 would be nan.
        kept = ((draw >= p) / (1 - p).clamp_min(torch.finfo(dtype).tiny)).to(input.dtype)
        return input.mul_(kept) if self.inplace else input * kept

    def extra_repr(self) -> str:
        return f"p=hdet.Dial, inplace={self.inplace}"


class SteeredDropout(_Dropout, nn.Dropout):
    """nn.Dropout whose probability is a dial."""


class SteeredDropout1d(_Dropout, nn.Dropout1d):
    """nn.Dropout1d whose probability is a dial."""

    def mask_shape(self, shape: Sequence[int]) -> list[int]:
        return _channels(shape, 2 if len(shape) == 3 else 1)


class SteeredDropout2d(_Dropout, nn.Dropout2d):
    """nn.Dropout2d whose probability is a dial."""

    def mask_shape(self, shape: Sequence[int]) -> list[int]:
        return _channels(shape, 2)  # torch takes the first two dimensions for samples and channels


class SteeredDropout3d(_Dropout, nn.Dropout3d):
    """nn.Dropout3d whose probability is a dial."""

    def mask_shape(self, shape: Sequence[int]) -> list[int]:
        return _channels(shape, 2 if len(shape) == 5 else 1)


def _channels(shape: Sequence[int], num: int) -> list[int]:
    """The first `num` dimensions, and 1 for each other one."""
    return [*shape[:num], *[1] * len(shape[num:])]


DROPOUTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: SteeredDropout,
    nn.Dropout1d: SteeredDropout1d,
    nn.Dropout2d: SteeredDropout2d,
    nn.Dropout3d: SteeredDropout3d,
}


def steer_dropout(layers: Sequence[nn.Module]) -> dict[Dial, float]:
    """Let layers read their probability from dials, one dial for each probability that occurs.

    Only the class of a layer changes: its hooks and the state_dict stay.

    Returns:
        The dials and their start values.
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


def restore_dropout(module: nn.Module) -> None:
    """Give dropout layers the class of torch again, with the probability of their dial."""
    classes = {steered: plain for plain, steered in DROPOUTS.items()}
    for layer in module.modules():
        if type(layer) in classes:
            layer.p = float(layer.dial.centre)  # type: ignore
            del layer.dial
            layer.__class__ = classes[type(layer)]


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
        # Logits of minus infinity make the flat part infinite, and 0 times inf would be nan.
        return torch.where(share == 0, sharp, torch.lerp(sharp, flat, share))


def steer_label_smoothing(criterion: nn.CrossEntropyLoss) -> dict[Dial, float]:
    """Let a cross-entropy read its label smoothing from a dial.

    Returns:
        The dial and its start value.
    """
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
        if self.dial.is_applied:  # by a module around this one
            return self._forward(*inputs, **options)
        self.dial.is_applied = True
        try:
            with _Temper(self.dial):
                return self._forward(*inputs, **options)
        finally:
            self.dial.is_applied = False

    def _forward(self, *inputs: Any, **options: Any) -> Any:
        if self._inner is not None:  # a wrapper of another library
            return self._inner(*inputs, **options)
        return type(self._module).forward(self._module, *inputs, **options)


class _Temper(TorchFunctionMode):
    """Inside, attention scores are divided by a dial.

    It divides the queries, which is cheaper and has the same effect.
    """

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
    """Divide the projection that makes the queries, which nn.MultiheadAttention hides."""
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
    """Divide the first `num` of stacked rows: those of the queries, before keys and values."""
    return torch.cat([stacked[:num] / dial().to(stacked.dtype), stacked[num:]])


def steer_temperature(modules: Sequence[nn.Module], start: float) -> dict[Dial, float]:
    """Let attention in these modules, and in all inside of them, read one temperature.

    Returns:
        The dial and its start value.
    """
    dial = Dial(start)
    for module in modules:
        own = vars(module).get("forward")
        if isinstance(own, _Tempered):
            dial = own.dial
            dial.set(start)
    # Also the attention modules themselves: activation checkpointing calls them separately.
    parts = {part for module in modules for part in (module, *filter(_attends, module.modules()))}
    for part in parts:
        own = vars(part).get("forward")
        if not isinstance(own, _Tempered) or own.dial is not dial:
            check_not_copied(part, "attention_temperature")
    for part in parts:
        part.forward = _Tempered(part, dial)
    return {dial: start}


def _attends(module: nn.Module) -> bool:
    """Whether a module computes attention, judged by its source code."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    try:
        return "scaled_dot_product_attention" in inspect.getsource(type(module))
    except (OSError, TypeError):
        return False


# Gradient clipping -----------------------------------------------------------------------------


@torch.no_grad()
def clip_gradients(
    parameters: Sequence[Tensor], max_norm: Tensor, *, scale: Tensor | None, in_place: bool
) -> None:
    """Scale gradients so that their norm is at most `max_norm`. The host does not wait.

    Args:
        parameters: The parameters whose gradients are clipped.
        max_norm: The highest norm.
        scale: The factor of GradScaler, if gradients still have it: fused optimizers remove it
            themselves.
        in_place: Whether gradients change in place. Replicas that share gradients get copies, since
            the other replicas need the originals.
    """
    clipped = [p for p in parameters if p.grad is not None]
    gradients = [p.grad for p in clipped if p.grad is not None]
    if not gradients:
        return
    norm = nn.utils.get_total_norm(gradients)
    norm = norm if scale is None else norm / scale
    factor = (max_norm.to(norm.dtype) / (norm + 1e-6)).clamp_max(1.0)
    if in_place:
        torch._foreach_mul_(gradients, factor)
        return
    for parameter, gradient in zip(clipped, torch._foreach_mul(gradients, factor), strict=True):
        parameter.grad = gradient
