"""N replicas of a model on one device: stacked weights, one forward and backward for all."""

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from hdet.buckets import wire_dtype
from hdet.validation import check_choice, check_integer

LossFunction = Callable[..., Tensor]
"""(model, *batch) -> the loss of one replica on its part of the batch."""


class StackedReplicas:
    """N replicas of `model` on its device. The model itself becomes replica 0.

    Parameters and buffers are stacked, [N, ...], and each replica is a module whose tensors are
    slices of the stack. `mode` says how they are run: "vmap" all at once, "loop" one after
    another, "auto" with vmap where torch can and in a loop otherwise.
    """

    def __init__(
        self, model: nn.Module, num: int, *, mode: Literal["auto", "vmap", "loop"] = "auto"
    ) -> None:
        check_integer("num", num, at_least=1)
        check_choice("mode", mode, ("auto", "vmap", "loop"))
        if not any(True for _ in model.parameters()):
            raise ValueError("`model` must have parameters, got none.")
        self.size = num
        self.local = range(num)
        self.mode = mode
        self.shares_gradients = True
        self._modules = [model, *(copy.deepcopy(model) for _ in range(num - 1))]
        self._parameters = _stack(self._modules, "named_parameters")
        self._buffers = _stack(self._modules, "named_buffers")
        self._optimizers: list[Optimizer] = []

    # What a training loop calls ------------------------------------------------------------

    def losses(self, function: LossFunction, *batch: Any) -> Tensor:
        """The loss of every replica, [N], each on its own part of the global batch.

        `function(model, *part)` gets a model to call and one N-th of every tensor of the batch.
        """
        parts = tree_map(self._split, batch)
        if self.mode == "auto":
            return self._try_vmap(function, parts)
        return self._vmap(function, parts) if self.mode == "vmap" else self._loop(function, parts)

    def optimizer(self, make: Callable[[nn.Module], Optimizer]) -> "StackedOptimizer":
        """One optimizer for all replicas; `make(module)` makes that of a single one.

        >>> ensemble = StackedReplicas(nn.Linear(2, 1), 4)
        >>> optimizer = ensemble.optimizer(lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
        """
        self._optimizers = [make(module) for module in self._modules]
        return StackedOptimizer(self, self._optimizers)

    def consensus(self) -> nn.Module:
        """An ordinary module with the mean of the replicas' weights."""
        module = copy.deepcopy(self._modules[0])
        rows = [_tensors(replica) for replica in self._modules]
        means = [mean_of(column, self.local) for column in zip(*rows, strict=True)]
        with torch.no_grad():
            for tensor, mean in zip(_tensors(module), means, strict=True):
                tensor.copy_(mean)
        return module

    def state_dict(self) -> dict[str, Any]:
        """That of the consensus: a checkpoint is one model, whatever the engine."""
        return self.consensus().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for module in self._modules:
            module.load_state_dict(state)

    def select_(self, replica: int) -> None:
        """All replicas take the weights, buffers and optimizer state of one."""
        source, targets = replica, [r for r in self.local if r != replica]
        self.copy_([_tensors(module) for module in self._modules], source, targets)
        for target in targets if self._optimizers else ():
            state = copy.deepcopy(self._optimizers[source].state_dict())
            rates = [group["lr"] for group in self._optimizers[target].param_groups]
            self._optimizers[target].load_state_dict(state)
            for group, rate in zip(self._optimizers[target].param_groups, rates, strict=True):
                group["lr"] = rate

    # The Replicas protocol -----------------------------------------------------------------

    def modules(self, model: nn.Module | None) -> list[nn.Module]:
        return self._modules

    def optimizers(self, optimizer: Optimizer) -> list[Optimizer]:
        return self._optimizers

    def gather(self, rows: Tensor) -> Tensor:
        return rows

    def gather_objects(self, description: Any) -> list[Any]:
        return [description]

    def are_finite(self, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        flat = [tensor.detach() for row in rows for tensor in row]
        if not flat:
            return torch.ones(self.size, dtype=torch.bool)
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(flat, float("inf"))])
        return norms.view(self.size, -1).isfinite().all(1)

    @torch.no_grad()
    def average_(self, rows: Sequence[Sequence[Tensor]], fit: Sequence[int]) -> int:
        for column in zip(*rows, strict=True):
            mean = mean_of(column, fit)
            for tensor in column:
                tensor.copy_(mean)
        return 0

    @torch.no_grad()
    def maximum_(self, rows: Sequence[Sequence[Tensor]]) -> int:
        for column in zip(*rows, strict=True):
            most = torch.stack([tensor.detach() for tensor in column]).amax(0)
            for tensor in column:
                tensor.copy_(most)
        return 0

    @torch.no_grad()
    def copy_(self, rows: Sequence[Sequence[Tensor]], source: int, targets: Sequence[int]) -> int:
        for target in targets:
            torch._foreach_copy_(list(rows[target]), list(rows[source]))
        return 0

    def share_gradients(self, model: nn.Module | None, shared: bool) -> None:
        self.shares_gradients = shared

    # How replicas are run ------------------------------------------------------------------

    def _split(self, value: Any) -> Any:
        """One N-th of the first dimension for every replica; scalars are for all."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if len(value) % self.size:
            raise ValueError(
                f"`batch` must split evenly over {self.size} replicas, got {len(value)} samples."
            )
        return value.view(self.size, -1, *value.shape[1:])

    def _vmap(self, function: LossFunction, parts: Any) -> Tensor:
        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], part: Any) -> Tensor:
            def model(*inputs: Any, **options: Any) -> Any:
                return functional_call(self._modules[0], (parameters, buffers), inputs, options)

            return function(model, *part)

        dims = tree_map(lambda v: 0 if isinstance(v, Tensor) and v.dim() else None, parts)
        run = vmap(one, in_dims=(0, 0, dims), randomness="different")
        losses: Tensor = run(self._parameters, self._buffers, parts)
        return losses

    def _loop(self, function: LossFunction, parts: Any) -> Tensor:
        def part(replica: int) -> Any:
            return tree_map(lambda v: v[replica] if isinstance(v, Tensor) and v.dim() else v, parts)

        slices = {name: stack.unbind() for name, stack in self._parameters.items()}

        def model_of(replica: int) -> Callable[..., Any]:
            weights = {name: slices[name][replica] for name in slices}
            module = self._modules[replica]
            return lambda *inputs, **options: functional_call(module, weights, inputs, options)

        return torch.stack([function(model_of(r), *part(r)) for r in self.local])

    def _try_vmap(self, function: LossFunction, parts: Any) -> Tensor:
        """The first call decides; what a failed attempt changed is put back."""
        kept = {name: buffer.clone() for name, buffer in self._buffers.items()}
        device = next(iter(self._parameters.values())).device
        devices = [device] if device.type == "cuda" else []
        state = torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in devices]
        try:
            losses = self._vmap(function, parts)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            for name, buffer in kept.items():
                self._buffers[name].copy_(buffer)
            torch.set_rng_state(state[0])
            for d, cuda_state in zip(devices, state[1], strict=True):
                torch.cuda.set_rng_state(cuda_state, d)
            losses = self._loop(function, parts)  # if this fails too, the error is the user's
            reason = str(error).strip().splitlines()[0]
            warnings.warn(
                f"replicas run one after another: vmap cannot run this model ({reason})",
                stacklevel=3,
            )
            self.mode = "loop"
            return losses
        self.mode = "vmap"
        return losses

    def hand_out_gradients(self) -> None:
        """Give every replica its gradients: its own, or the mean of all of them."""
        for name, stack in self._parameters.items():
            if stack.grad is None:
                continue
            shared = stack.grad.mean(0) if self.shares_gradients else None
            for replica, module in enumerate(self._modules):
                gradient = stack.grad[replica] if shared is None else shared
                module.get_parameter(name).grad = gradient

    @property
    def stacks(self) -> list[nn.Parameter]:
        """The stacked parameters: the leaves that gradients are computed for."""
        return [stack for stack in self._parameters.values() if isinstance(stack, nn.Parameter)]


class StackedOptimizer(Optimizer):
    """The optimizers of all replicas, in the shape of one.

    Its groups have the names and settings of a single replica's; a schedule wraps it as it would
    wrap that one. Learning rates are those of the replicas' own groups.
    """

    def __init__(self, ensemble: StackedReplicas, optimizers: Sequence[Optimizer]) -> None:
        self._ensemble = ensemble
        self._each = list(optimizers)
        first = optimizers[0]
        places = {id(p): name for name, p in ensemble.modules(None)[0].named_parameters()}
        stacks = dict(ensemble._parameters)
        groups = [
            {**group, "params": [stacks[places[id(p)]] for p in group["params"]]}
            for group in first.param_groups
        ]
        super().__init__(groups, dict(first.defaults))
        self._handed_out = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("`closure` must be None: replicas are stepped together.")
        self._hand_out()
        for optimizer in self._each:
            for mine, theirs in zip(self.param_groups, optimizer.param_groups, strict=True):
                theirs.update({k: v for k, v in mine.items() if k not in ("params", "lr")})
            optimizer.step()
        self._handed_out = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for optimizer in self._each:
            optimizer.zero_grad(set_to_none=True)
        self._handed_out = False

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradient of every replica by its own norm; the norms before, [N]."""
        self._hand_out()
        norms = []
        for optimizer in self._each:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            norms.append(nn.utils.clip_grad_norm_(parameters, max_norm))
            if self._ensemble.shares_gradients:
                break  # one gradient for all: clipping it once is clipping it for everyone
        return torch.stack(norms).expand(len(self._each))

    def state_dict(self) -> dict[str, Any]:
        """That of one replica, as an ordinary optimizer would save it."""
        return self._each[0].state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer in self._each:
            optimizer.load_state_dict(copy.deepcopy(state_dict))
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _hand_out(self) -> None:
        if not self._handed_out:
            self._ensemble.hand_out_gradients()
            self._handed_out = True


def mean_of(column: Iterable[Tensor], fit: Sequence[int]) -> Tensor:
    """The mean over the replicas that are fit; exactly their value where they agree.

    Summed as differences from the first, in float32 at least: the mean of equal numbers is then
    that number for every N, and half precision loses nothing on the way.
    """
    tensors = [tensor.detach() for tensor in column]
    if not (tensors[0].is_floating_point() or tensors[0].is_complex()):
        return tensors[fit[0]].clone()
    exact = tensors[0].dtype if tensors[0].is_complex() else wire_dtype(tensors[0].dtype)
    anchor = tensors[fit[0]].to(exact)
    total = torch.zeros_like(anchor)
    for replica in fit[1:]:
        total += tensors[replica].to(exact) - anchor
    return (anchor + total / len(fit)).to(tensors[0].dtype)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _stack(modules: Sequence[nn.Module], kind: str) -> dict[str, Tensor]:
    """Name -> [N, ...], of which the modules' own tensors become slices."""
    stacks: dict[str, Tensor] = {}
    for name, tensor in getattr(modules[0], kind)():
        data = tensor.detach().expand(len(modules), *tensor.shape).clone()
        for replica, module in enumerate(modules):
            dict(getattr(module, kind)())[name].data = data[replica]
        trained = isinstance(tensor, nn.Parameter)
        stacks[name] = nn.Parameter(data, tensor.requires_grad) if trained else data
    return stacks
