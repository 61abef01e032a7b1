"""Many whole training runs in one: R models as the rows of one matrix.

A benchmark has hundreds of small runs that differ in a learning rate, a seed or a rule. One after
the other they leave a GPU idle; as the rows of a matrix they are one run with larger kernels.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from hdet.replicas.stacked.vmap_compat import VmapCompat, safe_attention

Tensors = dict[str, Tensor]
WARM_UP = 3
"""Runs before a capture: kernels choose their algorithms in them."""
SAMPLES_AT_ONCE = {"cpu": 256}
"""By device: with more samples side by side, activations leave the caches of a CPU."""
EVALUATED_AT_ONCE = {"cpu": 1}
"""Rows, by device: data that is held out are many samples."""


class Layout:
    """Where each parameter of a model lies in a row; groups lie side by side."""

    def __init__(self, model: nn.Module, group_of: Callable[[str], int]) -> None:
        named = sorted(model.named_parameters(), key=lambda pair: group_of(pair[0]))
        self.names = [name for name, _ in named]
        self.shapes = [parameter.shape for _, parameter in named]
        self.sizes = [parameter.numel() for _, parameter in named]
        kinds = [group_of(name) for name in self.names]
        ends = torch.tensor([0, *self.sizes]).cumsum(0).tolist()
        self.blocks = [slice(a, b) for a, b in pairwise(ends)]
        self.groups = [
            slice(ends[kinds.index(kind)], ends[len(kinds) - kinds[::-1].index(kind)])
            for kind in sorted(set(kinds))
        ]

    def row(self, model: nn.Module) -> Tensor:
        """The weights of a model, as one row."""
        return torch.cat([model.get_parameter(name).detach().flatten() for name in self.names])

    def views(self, rows: Tensor) -> Tensors:
        parts = torch.split(rows, self.sizes, dim=1)
        shaped = zip(self.names, self.shapes, parts, strict=True)
        return {name: part.view(len(rows), *shape) for name, shape, part in shaped}


class Bound(NamedTuple):
    """A module with other tensors than its own: what a loss function calls."""

    module: nn.Module
    tensors: tuple[Tensors, Tensors]

    def __call__(self, *inputs: Any) -> Any:
        return functional_call(self.module, self.tensors, inputs)


class Fleet:
    """The weights of R models and their gradients, [R, P], and their buffers, [R, ...]."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        loss: Callable[..., Tensor],
        group_of: Callable[[str], int],
        *,
        half: bool = False,
        capture: bool = False,
    ) -> None:
        self.layout = Layout(models[0], group_of)
        self.weights = torch.stack([self.layout.row(model) for model in models])
        self.gradients = torch.zeros_like(self.weights)
        named = [dict(model.named_buffers()) for model in models]
        self.buffers = {name: torch.stack([b[name] for b in named]).detach() for name in named[0]}
        self._module, self._loss = models[0], loss
        self._half, self._captures = half, capture
        self._captured: Callable[..., Tensor] | None = None
        self._held: dict[int, Tensors] = {}

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def losses(self, *batch: Tensor) -> Tensor:
        """The loss of every row on its own batch, [R]; the gradients are written."""
        run = self._forward_and_back
        if self._captures and self._captured is None:
            self._captured = capture(run, batch, list(self.buffers.values()))
        losses = (self._captured or run)(*batch)
        for row, kept in self._held.items():
            for name, value in kept.items():
                self.buffers[name][row] = value
        return losses

    def hold(self, rows: Sequence[int]) -> None:
        """These rows have made their last step: their buffers stay as they are."""
        for row in rows:
            if row not in self._held:
                self._held[row] = {n: b[row].clone() for n, b in self.buffers.items()}

    def _forward_and_back(self, *batch: Tensor) -> Tensor:
        found = []
        for part in self._parts(batch[0].shape[1]):
            leaf = self.weights[part].detach().requires_grad_()
            buffers = {name: stack[part] for name, stack in self.buffers.items()}
            with self._precision():
                own = [value[part] for value in batch]
                losses = self._over_rows(self._loss, leaf, buffers, own)
            (gradients,) = torch.autograd.grad(losses.sum(), leaf)
            self.gradients[part] = gradients
            found.append(losses.detach())
        return torch.cat(found)

    def _parts(self, num_samples: int) -> Iterator[slice]:
        """Rows that are computed side by side, for so many samples of each."""
        most = SAMPLES_AT_ONCE.get(self.device.type, len(self) * num_samples)
        at_once = max(most // num_samples, 1)
        return (slice(first, first + at_once) for first in range(0, len(self), at_once))

    @torch.no_grad()
    def evaluate(
        self,
        function: Callable[[Any], Tensor],
        *,
        weights: Tensor | None = None,
        batch: Sequence[Tensor] = (),
        training: bool = False,
    ) -> Tensor:
        """What a function of a model says of every row, with the same data for all, or each with
        its own part of a batch."""
        weights = self.weights if weights is None else weights
        self._module.train(training)
        found, at_once = [], EVALUATED_AT_ONCE.get(self.device.type, 8)
        for first in range(0, len(weights), at_once):
            part = slice(first, first + at_once)
            buffers = {name: stack[part].clone() for name, stack in self.buffers.items()}
            with self._precision():
                own = [value[part] for value in batch]
                found.append(self._over_rows(function, weights[part], buffers, own))
        self._module.train()
        return torch.cat(found)

    def _over_rows(
        self, function: Callable[..., Tensor], rows: Tensor, buffers: Tensors, batch: Any
    ) -> Tensor:
        kind = self.device.type

        def one(weights: Tensors, buffers: Tensors, *part: Tensor) -> Tensor:
            with VmapCompat(kind):
                return function(Bound(self._module, (weights, buffers)), *part)

        with safe_attention(kind):
            answer: Tensor = vmap(one)(self.layout.views(rows), buffers, *batch)
        return answer

    def _precision(self) -> AbstractContextManager[Any]:
        if not self._half:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)


def capture(
    function: Callable[..., Tensor], batch: Sequence[Tensor], kept: Sequence[Tensor]
) -> Callable[..., Tensor]:
    """The same as one CUDA graph; `kept` is what trials must not change."""
    places = [part.clone() for part in batch]
    before = [tensor.clone() for tensor in kept]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            function(*places)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = function(*places)
    for tensor, was in zip(kept, before, strict=True):
        tensor.copy_(was)

    def replay(*batch: Tensor) -> Tensor:
        for place, part in zip(places, batch, strict=True):
            place.copy_(part)
        graph.replay()
        return answer.clone()

    return replay
