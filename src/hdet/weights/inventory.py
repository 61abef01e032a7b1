"""One replica of this process: which tensors it consists of, and what becomes of each kind."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.tensors.buckets import flatten, packed
from hdet.tensors.dtensor import check_initialised, layout, local, sharded_modules

TENSOR_KINDS = ("moving", "still", "buffers", "state")
"""What a replica consists of: parameters that train, frozen ones, buffers, optimizer state."""

SAMPLES = 4096
"""About so many parameters tell how far replicas are apart."""

Agreed = Mapping[str, list[bool]]
"""Part -> for each of its tensors (or for all of them at once) whether all replicas agree in it."""

NotReplicated = Callable[[Mapping[str, Tensor]], Collection[str]]
"""Parameters by name -> the names of those that exist once for all replicas."""


class TensorSlot(NamedTuple):
    """Where a module keeps a tensor. A buffer may be rebound; then the new one counts."""

    holder: dict[str, Any]
    name: str
    full_name: str


class ReplicaTensors:
    """The optimizer of a replica, and its model if it was given.

    Where tensors are sharded over the processes of a replica, all of this is about the shards of
    this process. A parameter that exists once for all replicas is in no part: nobody has another
    one to average it with.
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
        self._parameter_places = _places(model, "_parameters")
        self._buffer_places = _places(model, "_buffers")
        self._key: tuple[list[int], list[bool], list[int], list[int]] | None = None
        self._lists: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}
        check_initialised(self.parameters())
        self.refresh()

    def refresh(self) -> None:
        """Look again which tensors there are: some may have been rebound, frozen or added."""
        for module in self._sharded:
            module.reshard()  # whole parameters would not see what is written into shards
        parameters = self._all()
        buffers = _present(self._buffer_places)
        everything = [*map(local, parameters), *map(local, buffers)]
        key = (
            [*map(id, parameters), *map(id, buffers)],
            [tensor.requires_grad for tensor in parameters],
            # `tensor.data = ...` moves a tensor under its name, or cuts it.
            [*map(Tensor.data_ptr, everything)],
            [*map(Tensor.numel, everything)],
        )
        if key != self._key:
            self._key = key
            named = self.parameters()
            self._alone = {id(named[name]) for name in self._find_unreplicated(named)}
            once = _once(p for p in parameters if id(p) not in self._alone)
            self._parts = {
                "moving": [local(p) for p in once if p.requires_grad],
                "still": [local(p) for p in once if not p.requires_grad],
                "buffers": [*map(local, _once(buffers))],
            }
            places = {id(p): place for place, p in enumerate(parameters)}
            self.moving_places = [(places[id(p)], p.numel()) for p in once if p.requires_grad]
            """Which parameters train, by their place among all, wherever they lie: the same for all
            replicas."""
            self._lists.clear()

    def _all(self) -> list[Tensor]:
        """The parameters of the model and of the optimizer, as often as they are named."""
        groups = self.optimizer.param_groups
        return [*_present(self._parameter_places), *(p for g in groups for p in g["params"])]

    def part(self, name: str) -> list[Tensor]:
        """Every tensor of a part once, also if it is tied, without gradient or outside a model."""
        return [t for _, t in self._state()] if name == "state" else self._parts[name]

    def steered(self) -> list[Tensor]:
        """The parameters that the optimizer moves; others may have gradients that nobody clears."""
        groups = self.optimizer.param_groups
        shifted_by = [p for group in groups for p in group["params"] if p.requires_grad]
        return _once(p for p in shifted_by if id(p) not in self._alone)

    @property
    def has_unreplicated(self) -> bool:
        """Whether a parameter exists once for all replicas: then all must run forwards together."""
        return bool(self._alone)

    def unsaved(self) -> list[str]:
        """Those that exist once for all replicas, and do not say which part of what they are."""
        alone = {name: p for name, p in self.parameters().items() if id(p) in self._alone}
        return [name for name, parameter in alone.items() if layout(parameter) is None]

    def movers(self) -> list[Tensor]:
        """The parameters that train, whole or sharded, also those of which nothing lies here."""
        mine = {id(p): p for p in self._all() if p.requires_grad and id(p) not in self._alone}
        return list(mine.values())

    def divided(self, names: Iterable[str], agreed: Agreed) -> tuple[list[Tensor], list[Tensor]]:
        """What replicas may differ in: tensors to average, and those of which the largest counts.

        The latter are integers, and the step counts of the optimizer. As long as nothing changes
        the lists are the same objects, so that an engine can know them again.
        """
        chosen = {name: agreed.get(name, []) for name in names}
        if "state" in chosen:
            return self._divide(chosen)
        # A part that is empty makes no difference; flags make one only if some are set.
        key = tuple((n, *f) if any(f) else (n,) for n, f in chosen.items() if self._parts[n])
        if key not in self._lists:
            self._lists[key] = self._divide(chosen)
        return self._lists[key]

    def _divide(self, chosen: Mapping[str, list[bool]]) -> tuple[list[Tensor], list[Tensor]]:
        averaged: list[Tensor] = []
        progress_state: list[Tensor] = []
        for name, flags in chosen.items():
            steps = {id(t) for key, t in self._state() if key == "step"} if name == "state" else ()
            tensors = self.part(name)
            same = flags if len(flags) == len(tensors) else [any(flags)] * len(tensors)
            for tensor, equal in zip(tensors, same, strict=True):
                floating = tensor.is_floating_point() or tensor.is_complex()
                if not equal:
                    (averaged if floating and id(tensor) not in steps else progress_state).append(
                        tensor
                    )
        return averaged, progress_state

    def sample(self) -> Tensor:
        """Every so many-th of the parameters that train, in their order."""
        key = ("sample",)
        if key not in self._lists:
            self._lists[key] = (_every(self._parts["moving"], SAMPLES), [])
        views = self._lists[key][0]
        if len({(view.dtype, view.device) for view in views}) > 1:
            views = [view.to(device=views[0].device, dtype=torch.float64) for view in views]
        return torch.cat(views) if views else torch.zeros(0)

    def state_numel(self) -> int:
        """How much optimizer state there is: replicas that differ here cannot average it."""
        return sum(tensor.numel() for tensor in self.part("state"))

    def num_bad_buffers(self) -> Tensor:
        """How many elements of the buffers are not finite."""
        buffers = [flatten(buffer) for buffer in self.divided(["buffers"], {})[0]]
        groups = [[buffers[index] for index in members] for members in packed(buffers)]
        joined = [torch.cat(group) if len(group) > 1 else group[0] for group in groups]
        counts = [(~together.isfinite()).sum() for together in joined]
        if not counts:
            # On the device: a zero from the host would make it wait.
            return torch.zeros((), dtype=torch.int64, device=self._device())
        return torch.stack([count.to(counts[0].device) for count in counts]).sum()

    def _device(self) -> torch.device | None:
        tensors = [*self._parts["moving"], *self._parts["still"]]
        return tensors[0].device if tensors else None

    def shards(self) -> dict[str, Tensor]:
        """What this process has of every parameter."""
        return {name: local(parameter) for name, parameter in self.parameters().items()}

    def replicated(self) -> dict[str, Tensor]:
        """What this process has of those of which every replica has one."""
        return {
            name: local(parameter)
            for name, parameter in self.parameters().items()
            if id(parameter) not in self._alone
        }

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter under its name in the model, or its place in the optimizer."""
        named = _named(self._parameter_places)
        known = {id(parameter) for parameter in named.values()}
        for index, group in enumerate(self.optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    named[f"param_groups[{index}]['params'][{position}]"] = parameter
        return named

    def buffers(self) -> dict[str, Tensor]:
        return {name: local(buffer) for name, buffer in _named(self._buffer_places).items()}

    def groups(self, turned: Collection[str] = ()) -> list[dict[str, Any]]:
        """Settings and parameters of every group, without what differs between replicas."""
        skipped = {"params", "lr", *turned}
        names = {id(parameter): name for name, parameter in self.parameters().items()}
        return [
            {
                **{key: repr(group[key]) for key in group if key not in skipped},
                "params": [names[id(parameter)] for parameter in group["params"]],
            }
            for group in self.optimizer.param_groups
        ]

    def check(self) -> None:
        """Refuse parameters that cannot be averaged, by name."""
        named = self.shards()
        for name, parameter in named.items():
            _check_dense(name, parameter)
        _check_not_shared(named)
        if named and all(id(parameter) in self._alone for parameter in self.parameters().values()):
            raise ValueError(
                "every replica must have parameters of its own, got a model whose parameters all "
                "exist once: it is sharded over the processes that are to be replicas. Pass "
                "ProcessReplicas(mesh['replicate']) of the mesh it is sharded on."
            )

    def _state(self) -> list[tuple[str, Tensor]]:
        return [
            (key, local(state[key]))
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in self._alone
            for state in [self.optimizer.state.get(parameter, {})]
            for key in sorted(state)
            if isinstance(state[key], Tensor)
        ]


def _every(tensors: Sequence[Tensor], most: int) -> list[Tensor]:
    """Views of evenly spaced elements of all tensors together, at least `most` of them if any."""
    stride = max(sum(tensor.numel() for tensor in tensors) // most, 1)
    views, start = [], stride // 2
    for flat in map(flatten, tensors):
        if start < flat.numel():
            views.append(flat[start::stride])
        start = (start - flat.numel()) % stride
    return views


def _places(model: nn.Module | None, kind: str) -> list[TensorSlot]:
    if model is None:
        return []
    return [
        TensorSlot(getattr(module, kind), name, f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules()
        for name in getattr(module, kind)
    ]


def _present(places: Iterable[TensorSlot]) -> list[Tensor]:
    return [t for holder, name, _ in places if (t := holder.get(name)) is not None]


def _named(places: Iterable[TensorSlot]) -> dict[str, Tensor]:
    return {full: t for holder, name, full in places if (t := holder.get(name)) is not None}


def _once(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each tensor of which something lies here at its first place; tied ones share memory."""
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
    """Parameters may be one tensor under two names, but not share a part of their memory."""
    spans: dict[tuple[str, int, int], str] = {}
    for name, p in named.items():
        spans.setdefault((str(p.device), p.data_ptr(), p.data_ptr() + p.nbytes), name)
    ordered: Sequence[tuple[str, int, int]] = sorted(span for span in spans if span[1] < span[2])
    for (device, _, end), other in pairwise(ordered):
        if other[0] == device and other[1] < end:
            raise ValueError(
                f"`{spans[other]}` must not share a part of its memory with another parameter, "
                "got one that does: replace one of them by a copy."
            )
