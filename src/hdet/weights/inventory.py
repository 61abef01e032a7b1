"""The tensors of one replica, sorted by kind: trainable, frozen, buffers, optimizer state."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.tensors.buckets import flatten, packed
from hdet.tensors.dtensor import check_initialised, layout, local, sharded_modules
from hdet.tensors.joined_optimizer import members_of
from hdet.weights.sample import evenly_spaced, rows_to_join


class TensorKind(StrEnum):
    """The kinds of tensors that a replica consists of."""

    TRAINABLE = "trainable"
    FROZEN = "frozen"
    BUFFERS = "buffers"
    OPTIMIZER_STATE = "optimizer state"


WEIGHTS = (TensorKind.TRAINABLE, TensorKind.FROZEN, TensorKind.BUFFERS)
"""The tensors that the model computes with: all kinds but the optimizer state."""

ALL_KINDS = tuple(TensorKind)

Agreed = Mapping[TensorKind, list[bool]]
"""Kind -> for each of its tensors, or for all of them together: are all replicas equal in it?"""

NotReplicated = Callable[[Mapping[str, Tensor]], Collection[str]]
"""Parameters by name -> the names of those that exist once for all replicas."""


class TensorSlot(NamedTuple):
    """Where a module keeps a tensor. Code may bind another tensor to the same slot."""

    holder: dict[str, Any]
    name: str
    full_name: str


def refresh_all(local_tensors: Iterable["ReplicaTensors"]) -> None:
    """Find the tensors of every replica of this process again."""
    for tensors in local_tensors:
        tensors.refresh()


class ReplicaTensors:
    """The tensors of one replica: those of its optimizer, and of its model if there is one.

    Where tensors are sharded over the processes of a replica, these are the shards of this
    process. A parameter that exists once for all replicas has no kind, since there is no second
    copy to average it with.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None,
        unreplicated: NotReplicated = lambda named: (),
    ) -> None:
        self.optimizer = optimizer
        self._find_unreplicated = unreplicated
        self._sharded = sharded_modules(model)
        self._parameter_slots = _slots(model, "_parameters")
        self._buffer_slots = _slots(model, "_buffers")
        self._key: tuple[list[int], list[bool], list[int], list[int]] | None = None
        self._lists: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}
        self._has_shards = False
        self._rows: list[list[Tensor]] | None = None
        """The trainable tensors in rows that `sample` joins."""
        check_initialised(self.parameters())
        self.refresh()

    def refresh(self) -> None:
        """Find the tensors again: some may have been rebound, frozen, added or moved in memory."""
        for module in self._sharded:
            module.reshard()  # whole parameters would not see what is written into shards
        parameters = self._all_parameters()
        buffers = _present(self._buffer_slots)
        everything = [*parameters, *buffers]
        ids = [*map(id, everything)]
        if self._key is None or ids != self._key[0]:
            self._has_shards = any(local(tensor) is not tensor for tensor in everything)
        if self._has_shards:  # most models have none, and many tensors
            everything = [*map(local, everything)]
        key = (
            ids,
            [tensor.requires_grad for tensor in parameters],
            # `tensor.data = ...` moves a tensor under its name, or cuts it.
            [*map(Tensor.data_ptr, everything)],
            [*map(Tensor.numel, everything)],
        )
        if key != self._key:
            self._key = key
            named = self.parameters()
            self._unreplicated = {id(named[name]) for name in self._find_unreplicated(named)}
            once = _once(p for p in parameters if id(p) not in self._unreplicated)
            self._tensors = {
                TensorKind.TRAINABLE: [local(p) for p in once if p.requires_grad],
                TensorKind.FROZEN: [local(p) for p in once if not p.requires_grad],
                TensorKind.BUFFERS: [*map(local, _once(buffers))],
            }
            places = {id(p): place for place, p in enumerate(parameters)}
            self.trainable_places = [(places[id(p)], p.numel()) for p in once if p.requires_grad]
            """Index among all parameters, and size, of each trainable one; equal on all replicas,
            since it does not depend on addresses."""
            self._lists.clear()
            self._rows = None

    def _all_parameters(self) -> list[Tensor]:
        """The parameters of the model, then of the optimizer, with repetitions."""
        groups = self.optimizer.param_groups
        return [*_present(self._parameter_slots), *(p for g in groups for p in g["params"])]

    def of_kind(self, kind: TensorKind) -> list[Tensor]:
        """Every tensor of a kind once, also if it is tied, has no gradient, or is in no model."""
        if kind is TensorKind.OPTIMIZER_STATE:
            return [tensor for _, tensor in self._state()]
        return self._tensors[kind]

    def weights(self) -> list[Tensor]:
        """Every tensor that the model computes with, once."""
        return [tensor for kind in WEIGHTS for tensor in self._tensors[kind]]

    def optimized(self) -> list[Tensor]:
        """The trainable parameters of the optimizer; others may keep stale gradients."""
        key = ("optimized",)
        if key not in self._lists:
            groups = self.optimizer.param_groups
            trainable = [p for group in groups for p in group["params"] if p.requires_grad]
            once = _once(p for p in trainable if id(p) not in self._unreplicated)
            self._lists[key] = (once, [])
        return self._lists[key][0]

    @property
    def has_unreplicated(self) -> bool:
        """Whether a parameter exists once for all replicas, so that all must run together."""
        return bool(self._unreplicated)

    def unsaved(self) -> list[str]:
        """Names of parameters that exist once for all replicas and are no DTensor.

        A checkpoint cannot tell which part of the whole such a plain tensor is.
        """
        once = {name: p for name, p in self.parameters().items() if id(p) in self._unreplicated}
        return [name for name, parameter in once.items() if layout(parameter) is None]

    def trainable_parameters(self) -> list[Tensor]:
        """The trainable parameters, whole or sharded, also those without elements here."""
        mine = {
            id(p): p
            for p in self._all_parameters()
            if p.requires_grad and id(p) not in self._unreplicated
        }
        return list(mine.values())

    def to_reduce(
        self, kinds: Iterable[TensorKind], agreed: Agreed
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors that may differ between replicas: those to average, and those to maximize.

        Replicas take the maximum of integers and of the optimizer's step counts. While the tensors
        stay the same, the lists are the same objects, so that an engine recognizes them.
        """
        chosen = {kind: agreed.get(kind, []) for kind in kinds}
        if TensorKind.OPTIMIZER_STATE in chosen:
            return self._split(chosen)
        # An empty kind makes no difference, and flags make one only if some are set.
        key = tuple((k, *f) if any(f) else (k,) for k, f in chosen.items() if self._tensors[k])
        if key not in self._lists:
            self._lists[key] = self._split(chosen)
        return self._lists[key]

    def _split(self, chosen: Agreed) -> tuple[list[Tensor], list[Tensor]]:
        to_average: list[Tensor] = []
        to_maximize: list[Tensor] = []
        for kind, flags in chosen.items():
            steps = set()
            if kind is TensorKind.OPTIMIZER_STATE:
                steps = {id(tensor) for key, tensor in self._state() if key == "step"}
            tensors = self.of_kind(kind)
            equal = flags if len(flags) == len(tensors) else [any(flags)] * len(tensors)
            for tensor, is_equal in zip(tensors, equal, strict=True):
                floating = tensor.is_floating_point() or tensor.is_complex()
                has_mean = floating and id(tensor) not in steps
                if not is_equal:
                    (to_average if has_mean else to_maximize).append(tensor)
        return to_average, to_maximize

    def sample(self) -> Tensor:
        """Evenly spaced elements of the trainable parameters, in their order."""
        if self._rows is None:
            self._rows = rows_to_join(self._tensors[TensorKind.TRAINABLE])
        return evenly_spaced(self._rows)

    def state_numel(self) -> int:
        """The size of the optimizer state: replicas can average it only where sizes are equal."""
        return sum(tensor.numel() for tensor in self.of_kind(TensorKind.OPTIMIZER_STATE))

    def num_bad_buffers(self) -> Tensor:
        """The number of elements of the buffers that are not finite."""
        buffers = [flatten(buffer) for buffer in self.to_reduce([TensorKind.BUFFERS], {})[0]]
        groups = [[buffers[index] for index in members] for members in packed(buffers)]
        joined = [torch.cat(group) if len(group) > 1 else group[0] for group in groups]
        counts = [(~together.isfinite()).sum() for together in joined]
        if not counts:
            # On the device: a zero from the host would make it wait.
            return torch.zeros((), dtype=torch.int64, device=self._device())
        return torch.stack([count.to(counts[0].device) for count in counts]).sum()

    def _device(self) -> torch.device | None:
        tensors = [*self._tensors[TensorKind.TRAINABLE], *self._tensors[TensorKind.FROZEN]]
        return tensors[0].device if tensors else None

    def shards(self) -> dict[str, Tensor]:
        """The local shard of every parameter, by name."""
        return {name: local(parameter) for name, parameter in self.parameters().items()}

    def replicated(self) -> dict[str, Tensor]:
        """The local shard of every parameter that each replica has a copy of, by name."""
        return {
            name: local(parameter)
            for name, parameter in self.parameters().items()
            if id(parameter) not in self._unreplicated
        }

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter by its name in the model, or by its position in the optimizer."""
        return _named(self._parameter_slots) | self.beside_model()

    def beside_model(self) -> dict[str, Tensor]:
        """The parameters of the optimizer that the model lacks, by position."""
        known = {*map(id, _present(self._parameter_slots))}
        return {
            f"param_groups[{index}]['params'][{position}]": parameter
            for index, group in enumerate(self.optimizer.param_groups)
            for position, parameter in enumerate(group["params"])
            if id(parameter) not in known
        }

    def buffers(self) -> dict[str, Tensor]:
        """The local shard of every buffer, by name."""
        return {name: local(buffer) for name, buffer in _named(self._buffer_slots).items()}

    def groups(self, explored: Collection[str] = ()) -> list[dict[str, Any]]:
        """Settings and parameter names of every group.

        Learning rates and the `explored` settings are left out: they differ between replicas.
        """
        skipped = {"params", "lr", *explored}
        names = {id(parameter): name for name, parameter in self.parameters().items()}
        return [
            {
                **{key: repr(group[key]) for key in group if key not in skipped},
                "params": [names[id(parameter)] for parameter in group["params"]],
            }
            for group in self.optimizer.param_groups
        ]

    def check(self) -> None:
        """Raise a ValueError that names the first parameter that cannot be averaged."""
        named = self.shards()
        for name, parameter in named.items():
            _check_dense(name, parameter)
        _check_not_shared(named)
        if named and all(
            id(parameter) in self._unreplicated for parameter in self.parameters().values()
        ):
            raise ValueError(
                "each replica needs its own parameters, got a model that is sharded over all "
                "replicas. Pass `replicas=ProcessReplicas(mesh['replicate'])` of the mesh that "
                "the model is sharded on."
            )

    def clear_state(self) -> None:
        """Clear the optimizer state, as if the optimizer were new."""
        for optimizer in members_of(self.optimizer):
            optimizer.state.clear()

    def _state(self) -> list[tuple[str, Tensor]]:
        return [
            (key, local(state[key]))
            for optimizer in members_of(self.optimizer)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in self._unreplicated
            for state in [optimizer.state.get(parameter, {})]
            for key in sorted(state)
            if isinstance(state[key], Tensor)
        ]


def _slots(model: nn.Module | None, kind: str) -> list[TensorSlot]:
    if model is None:
        return []
    return [
        TensorSlot(getattr(module, kind), name, f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules()
        for name in getattr(module, kind)
    ]


def _present(slots: Iterable[TensorSlot]) -> list[Tensor]:
    return [t for holder, name, _ in slots if (t := holder.get(name)) is not None]


def _named(slots: Iterable[TensorSlot]) -> dict[str, Tensor]:
    return {full: t for holder, name, full in slots if (t := holder.get(name)) is not None}


def _once(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each tensor with local elements, at its first position; tied tensors share memory."""
    seen: dict[tuple[int, int], Tensor] = {}
    for tensor in tensors:
        if (here := local(tensor)).numel():
            seen.setdefault((here.data_ptr(), here.numel()), tensor)
    return list(seen.values())


def _check_dense(name: str, parameter: Tensor) -> None:
    try:
        flatten(parameter)
    except RuntimeError as error:
        raise ValueError(
            f"`{name}` must be dense in memory, got shape {tuple(parameter.shape)} with strides "
            f"{parameter.stride()}: replace it by a contiguous copy."
        ) from error


def _check_not_shared(named: dict[str, Tensor]) -> None:
    """Refuse parameters that overlap in memory; one tensor may have two names."""
    spans: dict[tuple[str, int, int], str] = {}
    for name, p in named.items():
        spans.setdefault((str(p.device), p.data_ptr(), p.data_ptr() + p.nbytes), name)
    ordered: Sequence[tuple[str, int, int]] = sorted(span for span in spans if span[1] < span[2])
    for (device, _, end), other in pairwise(ordered):
        if other[0] == device and other[1] < end:
            raise ValueError(
                f"`{spans[other]}` must not overlap another parameter in memory. Replace one of "
                "the two by a copy."
            )
