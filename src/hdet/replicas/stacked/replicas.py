"""N replicas of a model on one device: stacked weights, one forward and backward for all."""

import copy
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from hdet._validation import check_choice, check_integer
from hdet.knobs.dial import remember_copies, sharing_dials
from hdet.replicas.protocol import Capabilities, HeldOutBatches
from hdet.replicas.stacked.forward import Forward
from hdet.replicas.stacked.held_out import RecordedBatches
from hdet.replicas.stacked.local_replicas import LocalReplicas
from hdet.replicas.stacked.module_stack import ModuleStack
from hdet.replicas.stacked.optimizer import StackedOptimizer, copy_for_module
from hdet.replicas.stacked.recorded_calls import LossFunction
from hdet.replicas.stacked.rows import copy_rows_, mean_of_rows
from hdet.tensors.dtensor import check_initialised


class StackedReplicas(LocalReplicas):
    """N replicas of a model on its device. The model itself becomes replica 0.

    Parameters and buffers are stacked, [N, ...]. Each replica is a module whose tensors are slices
    of the stack. Move, convert and extend the model before. Load weights with `load_state_dict`.

    Args:
        model: The model. It must lie on one device, outside DDP and torch.compile.
        num: The number of replicas.
        mode: How the replicas are run: "vmap" all at once, "loop" one after another. With "auto"
            the first batch of training decides: vmap where torch can run the model with it.

    Raises:
        TypeError: `model` is no module, or `num` is no integer.
        ValueError: `num` is less than 1, `mode` is unknown, or the model has no parameters, lies on
            several devices, is lazy, wrapped or compiled.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> replicas = StackedReplicas(model, 4)
        >>> optimizer = replicas.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> losses = replicas.losses(lambda model, x: model(x).square().mean(), torch.ones(8, 2))
        >>> losses.shape
        torch.Size([4])
        >>> losses.sum().backward()
        >>> optimizer.step()
    """

    capabilities = Capabilities(records_calls=True, has_own_optimizer=True)

    def __init__(
        self, model: nn.Module, num: int, *, mode: Literal["auto", "vmap", "loop"] = "auto"
    ) -> None:
        check_integer("num", num, at_least=1)
        check_choice("mode", mode, ("auto", "vmap", "loop"))
        _check_model(model)
        super().__init__(num)
        with sharing_dials():
            self._modules = [model, *(copy.deepcopy(model) for _ in range(num - 1))]
        if num > 1:
            remember_copies(model)
        self._forward = Forward(ModuleStack(self._modules), mode)
        self._optimizer: StackedOptimizer | None = None
        model.register_load_state_dict_post_hook(_LoadIntoAll(self))
        model.register_state_dict_post_hook(_save_one)

    @property
    def mode(self) -> str:
        """How the replicas are run. "auto" changes with the first batch of training."""
        return self._forward.mode

    # What a training loop calls ------------------------------------------------------------

    def losses(self, function: LossFunction, *batch: Any) -> Tensor:
        """The loss of every replica, [N], each on its own part of the global batch.

        Call `losses.sum().backward()` afterwards. With shared gradients the parameters of the model
        then hold the mean over the replicas, as they do under DDP.

        Args:
            function: `function(model, *part)` returns a scalar loss. It gets a model to call, and
                one N-th of every tensor of the batch.
            batch: Tensors, or tuples, lists and dicts of them. Their first dimension is split.

        Returns:
            A tensor with one loss for each replica.

        Raises:
            TypeError: The batch has something else than tensors, or `function` returns no tensor.
            ValueError: The batch does not split evenly, or the loss is no scalar.
            RuntimeError: A tensor of the model was replaced after `StackedReplicas` was made.
        """
        return self._forward.losses(function, tree_map(self._split, batch))

    def optimizer(self, one: Optimizer | Callable[[nn.Module], Optimizer]) -> StackedOptimizer:
        """One optimizer that steps all replicas.

        Parameter groups, their names and their settings stay as they are.

        Args:
            one: An optimizer of the model, which is copied for each replica. For an optimizer that
                cannot be copied, a function `make(module)` that is called for each replica.

        Returns:
            The optimizer for the training loop and for the base schedule.

        Raises:
            TypeError: `one` is neither an optimizer nor a function that returns one.
            ValueError: The optimizer has parameters that are not the model's, or needs a closure.
        """
        if isinstance(one, Optimizer):
            names: dict[Tensor, str] = {p: name for name, p in self._modules[0].named_parameters()}
            each = [one, *(copy_for_module(one, names, m) for m in self._modules[1:])]
        elif callable(one):
            each = [one(module) for module in self._modules]
        else:
            raise TypeError(
                "`one` must be an optimizer of the model or a function that makes one, "
                f"got {one!r}."
            )
        self._optimizer = StackedOptimizer(each, self._modules, self._forward)
        return self._optimizer

    def compile(self, **options: Any) -> None:
        """Compile the replicas' forward and backward.

        On CUDA both are also captured in CUDA graphs. Give `losses` the same function object at
        every step, and batches of few different shapes.

        Args:
            options: The options of torch.compile.
        """
        self._forward.graphs.compile(**options)

    def consensus(self) -> nn.Module:
        """Make an ordinary module with the mean of the replicas' weights.

        Returns:
            A copy of the model that shares no memory with the replicas.
        """
        module = copy.deepcopy(self._modules[0])
        for part in module.modules():  # a copy of a slice would keep the memory of its stack
            part._buffers.update({n: b.clone() for n, b in part._buffers.items() if b is not None})
        rows = [_tensors(replica) for replica in self._modules]
        with torch.no_grad():
            copy_rows_([_tensors(module)], mean_of_rows(rows, self.local))
        return module

    def converge_(self) -> None:
        """Give all replicas the mean of their weights and buffers.

        A scheduler does this at the end of every cycle, and excludes replicas that diverged.
        """
        self.average_([_tensors(module) for module in self._modules], self.local)

    def select_(self, replica: int) -> None:
        """Copy the weights, buffers and optimizer state of one replica to all.

        Args:
            replica: The replica to copy, from 0 to N - 1.

        Raises:
            ValueError: There is no such replica.
        """
        check_integer("replica", replica, at_least=0)
        if replica >= self.size:
            raise ValueError(f"`replica` must be less than {self.size}, got {replica}.")
        targets = [r for r in self.local if r != replica]
        self.copy_([_tensors(module) for module in self._modules], replica, targets)
        if self._optimizer is not None:
            self._optimizer.select_(replica)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the consensus: a checkpoint is one model, for every engine.

        Returns:
            The state dict of an ordinary module.
        """
        return self.consensus().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state into all replicas, like `load_state_dict` of the model itself.

        Args:
            state: The state dict of the model.
        """
        self._modules[0].load_state_dict(state)

    # The Replicas protocol -----------------------------------------------------------------

    def modules(self, model: nn.Module | None) -> list[nn.Module]:
        if model is not None and model is not self._modules[0]:
            raise ValueError("`model` must be the one that was stacked, got another.")
        return self._modules

    def optimizers(
        self, optimizer: Optimizer, steered: Collection[str] | None = None
    ) -> list[Optimizer]:
        if optimizer is not self._optimizer or self._optimizer is None:
            raise ValueError(
                "`optimizer` must be the one that `replicas.optimizer(...)` returned, got a "
                f"{type(optimizer).__name__}. That optimizer steps all replicas."
            )
        if steered is not None:
            self._optimizer.steered = set(steered)
        return self._optimizer.each

    def share_gradients(self, model: nn.Module | None, shared: bool) -> None:
        self._forward.shares_gradients = shared
        if shared:  # a training loop clears the gradients of its model only
            for module in self._modules[1:]:
                module.zero_grad()

    def hold_out(self, num_parts: int, max_parts: int) -> HeldOutBatches:
        """Keep the next batches, so that replicas can be scored on them."""
        return RecordedBatches(self._forward, num_parts, max_parts)

    def _split(self, value: Any) -> Any:
        """One N-th of the first dimension for every replica. Scalars go to all replicas."""
        if not isinstance(value, Tensor):
            if isinstance(value, Mapping) or hasattr(value, "__array__"):
                raise TypeError(
                    "`batch` must be made of tensors in tuples, lists and dicts, got a "
                    f"{type(value).__name__}."
                )
            return value
        if value.dim() == 0:
            return value
        if len(value) % self.size:
            raise ValueError(
                f"`batch` must split evenly over {self.size} replicas, got {len(value)} samples. "
                "Use drop_last=True in the loader."
            )
        return value.unflatten(0, (self.size, -1))


class _LoadIntoAll:
    """A hook of the model that copies a loaded checkpoint to all replicas.

    A copy of the model, or a pickled one, belongs to no replicas.
    """

    def __init__(self, ensemble: StackedReplicas | None = None) -> None:
        # Weak: the hook must not keep the replicas alive.
        self._ensemble = None if ensemble is None else weakref.ref(ensemble)

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        ensemble = self._ensemble() if self._ensemble is not None else None
        if ensemble is not None:
            rows = [_tensors(replica) for replica in ensemble.modules(None)]
            ensemble.copy_(rows, 0, ensemble.local[1:])

    def __reduce__(self) -> Any:
        return _LoadIntoAll, ()


def _save_one(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A hook of the model: a checkpoint holds the memory of one replica, not that of all."""
    for name, value in state.items():
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            state[name] = value.clone()


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {model!r}.")
    if not any(True for _ in model.parameters()):
        raise ValueError("`model` must have parameters, got none.")
    kind = type(model).__name__
    if kind == "OptimizedModule":
        raise ValueError(
            "`model` must be the module itself, got a compiled one: call `compile()` on the "
            "replicas instead."
        )
    if kind in ("DistributedDataParallel", "DataParallel"):
        raise ValueError(f"`model` must be the module itself, got it wrapped in {kind}.")
    check_initialised(dict(model.named_parameters()))
    devices = {tensor.device for tensor in _tensors(model)}
    if len(devices) > 1:
        raise ValueError(
            f"`model` must lie on one device, got {sorted(str(device) for device in devices)}."
        )
