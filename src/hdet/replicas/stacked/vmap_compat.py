"""Corrections for vmap, so that models run under it as they run alone.

- Autocast: vmap decomposes `linear` before autocast sees it. The matrix product runs in half
  precision, but the float32 bias makes the result float32 again.
- Attention: vmap hides that a gradient is needed, so a kernel is chosen that has no backward.
- Cross-entropy: the decomposition that the compiler gets writes a table of zeros in its backward.

The corrections replace the functions that a model calls.
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

# Attention kernels need a head size that is a multiple of this.
ALIGNMENT = 8
# The functions that autocast runs in half precision.
HALF_PRECISION = frozenset(
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
    """Inside, autocast, attention and cross-entropy work as they do without vmap."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in HALF_PRECISION and torch.is_autocast_enabled(self.device_type):
            dtype = torch.get_autocast_dtype(self.device_type)
            args, kwargs = tree_map(lambda value: _autocast(value, dtype), (args, kwargs))
        if func is F.scaled_dot_product_attention and self.device_type == "cuda":
            return _attention(*args, **kwargs)
        if func is F.cross_entropy and torch.compiler.is_compiling():
            return _cross_entropy(*args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def safe_attention(device_type: str) -> Iterator[None]:
    """Restrict attention to kernels that work under vmap, for calls that torch makes itself.

    nn.MultiheadAttention makes such calls. On the CPU the fast kernel has no vmap rule. On CUDA all
    kernels but flash attention leave out what their backward needs.
    """
    kernels = [SDPBackend.FLASH_ATTENTION] if device_type == "cuda" else []
    with sdpa_kernel([*kernels, SDPBackend.MATH]):
        yield


def _autocast(value: Any, dtype: torch.dtype) -> Any:
    # Like autocast: float64 was chosen on purpose and stays.
    is_cast = isinstance(value, Tensor) and value.dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
    )
    return value.to(dtype) if is_cast else value


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
    """Call the kernel that attention would choose, with the outputs that a backward needs."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    if attn_mask is not None or enable_gqa or query.dim() != 4 or query.dtype == torch.float64:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if query.shape[-1] % ALIGNMENT or value.shape[-1] % ALIGNMENT:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        query, key, wide = _pad_heads(query), _pad_heads(key), _pad_heads(value)
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


def _pad_heads(tensor: Tensor) -> Tensor:
    """Pad heads with zeros to the next multiple of `ALIGNMENT`: zeros change no product."""
    return F.pad(tensor, (0, -tensor.shape[-1] % ALIGNMENT))


def _cross_entropy(
    scores: Tensor, target: Tensor, weight: Tensor | None = None, **how: Any
) -> Tensor:
    """Cross-entropy of class indices that the compiler fuses into one pass in each direction."""
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
