"""N replicas of a model on one device: stacked weights, one forward and backward for all."""

import copy
import weakref
from collections.abc import Callable, Collection
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet._validation import check_choice, check_integer
from hdet.knobs.dial import remember_copies, sharing_dials
from hdet.knobs.layers import restore_dropout
from hdet.replicas.protocol import Capabilities, HeldOutBatches
from hdet.replicas.stacked.batch_dims import Batch, BatchDims
from hdet.replicas.stacked.clipping import clip_each
from hdet.replicas.stacked.forward import Forward
from hdet.replicas.stacked.held_out import RecordedBatches
from hdet.replicas.stacked.local_replicas import LocalReplicas
from hdet.replicas.stacked.module_stack import ModuleStack, check_model, tensors_of
from hdet.replicas.stacked.optimizer import StackedOptimizer, copy_for_module
from hdet.replicas.stacked.plain_module import add_hooks, plain_copy
from hdet.replicas.stacked.recorded_calls import LossFunction
from hdet.replicas.stacked.rows import copy_rows_, mean_of_rows
from hdet.tensors.joined_optimizer import JoinedOptimizer, kinds_of, members_of


class StackedReplicas(LocalReplicas):
    """N replicas of a model on its device. The model itself becomes replica 0.

    Parameters and buffers are stacked, [N, ...]. Each replica is a module whose tensors are slices
    of the stack. Move, convert and extend the model before. Load weights with `load_state_dict`.

    Args:
        model: The model. It must lie on one device, outside DDP and torch.compile.
        num: The number of replicas.
        mode: How the replicas are run: "vmap" all at once, "loop" one after another. With "auto"
            the first batch of training decides: vmap where torch can run the model with it.
        batch_dim: The dimension of a batch that counts the samples. For arguments that differ, a
            tuple in the order of the arguments or a mapping from their names. An entry is an
            integer, None for an argument that all replicas get whole, or a container of these.

    Raises:
        TypeError: `model` is no module, `num` is no integer, or `batch_dim` holds something else
            than integers and None.
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
        self,
        model: nn.Module,
        num: int,
        *,
        mode: Literal["auto", "vmap", "loop"] = "auto",
        batch_dim: Any = 0,
    ) -> None:
        check_integer("num", num, at_least=1)
        check_choice("mode", mode, ("auto", "vmap", "loop"))
        self._batch_dims = BatchDims(batch_dim)
        check_model(model)
        super().__init__(num)
        with sharing_dials():
            self._modules = [model, *(copy.deepcopy(model) for _ in range(num - 1))]
        if num > 1:
            remember_copies(model)
        self._forward = Forward(ModuleStack(self._modules), mode)
        self._optimizers: weakref.WeakSet[StackedOptimizer] = weakref.WeakSet()
        """Those that `optimizer()` made and the user keeps: one for each of the model's."""
        this = weakref.ref(self)  # the hook must not keep the replicas alive
        add_hooks(model, lambda: None if (ensemble := this()) is None else ensemble._copy_first())

    @property
    def mode(self) -> str:
        """How the replicas are run. "auto" changes with the first batch of training."""
        return self._forward.mode

    # What a training loop calls ------------------------------------------------------------

    def losses(self, function: LossFunction, /, *batch: Any, **named: Any) -> Tensor:
        """The loss of every replica, [N], each on its own part of the global batch.

        Call `losses.sum().backward()` afterwards. With shared gradients the parameters of the model
        then hold the mean over the replicas, as they do under DDP.

        Args:
            function: `function(model, *part, **named_part)` returns a scalar loss. It gets a model
                to call, and one N-th of every tensor of the batch.
            batch: Tensors, or tuples, lists and dicts of them. They are split along `batch_dim`,
                the first dimension by default. Their sizes along it must be equal, or N for one
                entry for each replica. Numbers and other values go to all replicas.
            named: More of the batch, for keyword arguments of `function`.

        Returns:
            A tensor with one loss for each replica.

        Raises:
            TypeError: The batch has something else than tensors, or `function` returns no tensor.
            ValueError: The batch does not split evenly, its tensors have different numbers of
                samples, or the loss is no scalar.
            RuntimeError: A tensor of the model was replaced after `StackedReplicas` was made.
        """
        parts = self._batch_dims.split(function, Batch(batch, named), self.size)
        return self._forward.losses(function, parts)

    def optimizer(self, one: Optimizer | Callable[[nn.Module], Optimizer]) -> StackedOptimizer:
        """One optimizer that steps all replicas.

        Parameter groups, their names and their settings stay as they are. A model with several
        optimizers needs a call for each.

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
        stacked = StackedOptimizer(each, self._modules, self._forward)
        self._optimizers.add(stacked)
        return stacked

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the gradient of every replica by its own norm, after the backward.

        It replaces `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`, which would
        reach the first replica only while each has its own gradients, as in a scout. With shared
        gradients there is one gradient for all, and both do the same.

        Args:
            max_norm: The highest norm.
            norm_type: The kind of the norm, as in torch.
            error_if_nonfinite: Raise an error if a norm is not finite.
            foreach: Whether torch uses its fast implementation; None lets torch choose.

        Returns:
            The norms before, one for each replica.

        Raises:
            RuntimeError: A norm is not finite, and `error_if_nonfinite` is True.

        Example:
            >>> model = nn.Linear(1, 1)
            >>> ensemble = StackedReplicas(model, 2)
            >>> losses = ensemble.losses(lambda model, x: model(x).sum(), 3 * torch.ones(2, 1))
            >>> losses.sum().backward()
            >>> ensemble.clip_grad_norm_(1.0)
            tensor([3.1623, 3.1623])
        """
        norms = clip_each(
            self._gradient_rows(),
            nn.utils.clip_grad_norm_,
            max_norm,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
            foreach=foreach,
        )
        return torch.stack(norms).expand(self.size)

    def clip_grad_value_(self, clip_value: float, foreach: bool | None = None) -> None:
        """Clip every element of the gradients of all replicas.

        It replaces `torch.nn.utils.clip_grad_value_(model.parameters(), clip_value)`.

        Args:
            clip_value: The largest absolute value.
            foreach: Whether torch uses its fast implementation; None lets torch choose.
        """
        clip_each(self._gradient_rows(), nn.utils.clip_grad_value_, clip_value, foreach=foreach)

    def _gradient_rows(self) -> list[list[Tensor]]:
        """The parameters of each replica that has gradients of its own."""
        used = self._modules[:1] if self._forward.shares_gradients else self._modules
        return [list(module.parameters()) for module in used]

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
        module = plain_copy(self._modules[0])
        rows = [tensors_of(replica) for replica in self._modules]
        with torch.no_grad():
            copy_rows_([tensors_of(module)], mean_of_rows(rows, self.local))
        return module

    def unwrap(self) -> nn.Module:
        """Make the trained model: the mean of the replicas' weights, without anything of hdet.

        Unlike `consensus()`, it also gives dropout layers with a knob the class of torch again. So
        `torch.save` of it loads where hdet is not installed. Only an `attention_temperature` knob
        stays, because the model is another one without it. The replicas stay as they are.

        `torch.save(model)` of the stacked model also saves a plain module. Like `state_dict()` of
        the model it has the weights of the first replica: those of all after `converge()`.

        Returns:
            A copy of the model that shares no memory with the replicas.

        Example:
            >>> model = nn.Linear(2, 1)
            >>> type(StackedReplicas(model, 4).unwrap())
            <class 'torch.nn.modules.linear.Linear'>
        """
        module = self.consensus()
        restore_dropout(module)
        return module

    def converge_(self) -> None:
        """Give all replicas the mean of their weights and buffers.

        A scheduler does this at the end of every cycle, and excludes replicas that diverged.
        """
        self.average_([tensors_of(module) for module in self._modules], self.local)

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
        self.copy_([tensors_of(module) for module in self._modules], replica, targets)
        for optimizer in self._optimizers:
            optimizer.select_(replica)

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
        members = [one for one in members_of(optimizer) if isinstance(one, StackedOptimizer)]
        own = [one for one in members if one in self._optimizers]
        if len(own) < len(members_of(optimizer)):
            raise ValueError(
                "`optimizer` must be the one that `replicas.optimizer(...)` returned, got a "
                f"{kinds_of(optimizer)}. That optimizer steps all replicas."
            )
        if steered is not None:
            for one in own:
                one.steered = set(steered)
        if not isinstance(optimizer, JoinedOptimizer):
            return own[0].each
        return [JoinedOptimizer(row) for row in zip(*(one.each for one in own), strict=True)]

    def share_gradients(self, model: nn.Module | None, shared: bool) -> bool:
        self._forward.shares_gradients = shared
        if shared:  # a training loop clears the gradients of its model only
            for module in self._modules[1:]:
                module.zero_grad()
        return True

    def hold_out(self, num_parts: int, max_parts: int) -> HeldOutBatches:
        """Keep the next batches, so that replicas can be scored on them."""
        return RecordedBatches(self._forward, num_parts, max_parts)

    def _copy_first(self) -> None:
        """Copy a checkpoint that was loaded into the model to all replicas."""
        self.copy_([tensors_of(module) for module in self._modules], 0, self.local[1:])

    def num_samples(self, loss_of: LossFunction, batch: Any) -> int:
        return self._batch_dims.num_samples(loss_of, Batch(*batch))

    def pieces(self, loss_of: LossFunction, batch: Any, num: int) -> list[Any]:
        return list(self._batch_dims.pieces(loss_of, Batch(*batch), num))
