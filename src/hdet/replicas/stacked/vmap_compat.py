"""What vmap needs to run real models as they run alone: autocast, attention, cross-entropy.

vmap takes `linear` apart before autocast sees it: the matrix product runs in half precision, but
adding a float32 bias makes everything after it float32 again. It hides from attention that a
gradient will be wanted. And the cross-entropy it makes for the compiler writes a whole table of
zeros in its backward. Inside this mode these are done for all replicas as they are done for one,
at the level of the functions that a model calls.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

# The kernels of attention want heads of so many numbers, or a multiple of it.
ALIGNMENT = 8
# What autocast runs in half precision.
NARROWED = frozenset(
    {
        F.linear,
        F.bilinear,
        F.conv1d,
        F.conv2d,
        F.conv3d,
        F.conv_transpose1d,
        F.conv_transpose2d,
        F.conv_transpose3d,
        F.multi_head_attention_forward,
        F.scaled_dot_product_attention,
        torch.matmul,
        torch.mm,
        torch.mv,
        torch.bmm,
        torch.addmm,
        torch.addmv,
        torch.addbmm,
        torch.baddbmm,
        torch.chain_matmul,
        torch.linalg.multi_dot,
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.mm,
        Tensor.bmm,
    }
)


class VmapCompat(TorchFunctionMode):
    """Inside, autocast and attention do for every replica what they do for a model alone."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in NARROWED and torch.is_autocast_enabled(self.device_type):
            dtype = torch.get_autocast_dtype(self.device_type)
            args, kwargs = tree_map(lambda value: _narrow(value, dtype), (args, kwargs))
        if func is F.scaled_dot_product_attention and self.device_type == "cuda":
            return _attention(*args, **kwargs)
        if func is F.cross_entropy and torch.compiler.is_compiling():
            return _cross_entropy(*args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def safe_attention(device_type: str) -> Iterator[None]:
    """Attention that is called out of sight (in nn.MultiheadAttention) takes a kernel that works.

    On the CPU the fast kernel has no rule for vmap; on CUDA all but flash attention leave out
    what their backward needs.
    """
    kernels = [SDPBackend.FLASH_ATTENTION] if device_type == "cuda" else []
    with sdpa_kernel([*kernels, SDPBackend.MATH]):
        yield


def _narrow(value: Any, dtype: torch.dtype) -> Any:
    # Like autocast: float64 is somebody's intention and stays.
    narrows = isinstance(value, Tensor) and value.dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
    )
    return value.to(dtype) if narrows else value


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel that attention would choose, told that a gradient may be wanted."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    if attn_mask is not None or enable_gqa or query.dim() != 4 or query.dtype == torch.float64:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if query.shape[-1] % ALIGNMENT or value.shape[-1] % ALIGNMENT:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        query, key, wide = _in_eights(query), _in_eights(key), _in_eights(value)
        output = _attention(query, key, wide, None, dropout_p, is_causal, scale)
        return output[..., : value.shape[-1]]
    ops = torch.ops.aten
    if half and torch.cuda.get_device_capability()[0] >= 9:
        answer = ops._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, dropout_p, is_causal, False, scale=scale
        )
    elif half:
        answer = ops._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
    else:
        answer = ops._scaled_dot_product_efficient_attention(
            query, key, value, None, True, dropout_p, is_causal, scale=scale
        )
    return cast(Tensor, answer[0])


def _in_eights(tensor: Tensor) -> Tensor:
    """Zeros add nothing to a product, nor to what is mixed."""
    return F.pad(tensor, (0, -tensor.shape[-1] % ALIGNMENT))


def _cross_entropy(
    scores: Tensor, target: Tensor, weight: Tensor | None = None, **how: Any
) -> Tensor:
    """For class indices, without a table of zeros: the compiler makes one pass of it each way."""
    plain = weight is None and not target.is_floating_point() and scores.dim() in (1, 2)
    if not plain or how.get("label_smoothing") or not how.keys() <= {"ignore_index", "reduction"}:
        return F.cross_entropy(scores, target, weight, **how)
    scores = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    classes = torch.arange(scores.shape[-1], device=scores.device)
    chosen = torch.where(classes == target.unsqueeze(-1), scores, 0).sum(-1)
    counts = target != how.get("ignore_index", -100)
    losses = torch.where(counts, scores.logsumexp(-1) - chosen, 0)
    reduction = how.get("reduction", "mean")
    if reduction == "none":
        return losses
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()
