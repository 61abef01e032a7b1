"""The only writer of weights, buffers and optimizer state: converge, re-seed, perturb, visit."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hdet.buckets import flatten
from hdet.replicas import Replicas, default_replicas
from hdet.validation import check_finite, check_integer

_PERTURBED = "_hdet_perturbed"


class Tensors(NamedTuple):
    """What a replica consists of, by what a converge does with it."""

    moving: list[Tensor]
    """Parameters that train: averaged."""
    still: list[Tensor]
    """Frozen parameters: averaged, but only where the replicas differ in them."""
    buffers: list[Tensor]
    """Floating buffers: averaged."""
    counters: list[Tensor]
    """Integer buffers: the maximum."""


class Parameters:
    """The weights, buffers and optimizer state of the replicas that live in this process."""

    def __init__(self, optimizer: Optimizer, model: nn.Module | None, replicas: Replicas) -> None:
        self._optimizer = optimizer
        self._replicas = replicas
        # Places, not tensors: a module may rebind a buffer, and then the new one counts.
        self._parameter_places = _places(model, "_parameters")
        self._buffer_places = _places(model, "_buffers")

    def tensors(self) -> Tensors:
        """Every tensor once, also if it is tied, frozen, without gradient, or outside the model."""
        parameters = _present(self._parameter_places)
        parameters += [p for group in self._optimizer.param_groups for p in group["params"]]
        buffers = _once(_present(self._buffer_places))
        return Tensors(
            moving=[p for p in _once(parameters) if p.requires_grad],
            still=[p for p in _once(parameters) if not p.requires_grad],
            buffers=[b for b in buffers if _is_averaged(b)],
            counters=[b for b in buffers if not _is_averaged(b)],
        )

    def state_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """The optimizer's moments, and its step counts."""
        moments: list[Tensor] = []
        counts: list[Tensor] = []
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter, {})
                for key in sorted(state):
                    if isinstance(state[key], Tensor):
                        (counts if key == "step" else moments).append(state[key])
        return moments, counts

    def state_numel(self) -> int:
        """How much optimizer state there is: replicas that differ here cannot average it."""
        return sum(tensor.numel() for tensors in self.state_tensors() for tensor in tensors)

    def are_finite(self, *, with_state: bool) -> Tensor:
        """For each local replica whether everything that will be averaged is finite."""
        tensors = self.tensors()
        state = self.state_tensors()[0] if with_state else []
        return self._replicas.are_finite(
            [*tensors.moving, *tensors.still, *tensors.buffers, *state]
        )

    def fingerprint(self, part: str) -> Tensor:
        """Equal on two replicas if and only if (but for a chance of 2^-64) their bits are.

        `part` is "all" parameters, the "still" ones, the optimizer "state", or "nothing". The
        answer is a 64-bit integer that stays on the device.
        """
        tensors = self.tensors()
        chosen = {
            "all": [*tensors.moving, *tensors.still],
            "still": tensors.still,
            "state": self.state_tensors()[0] if part == "state" else [],
            "nothing": [],
        }[part]
        return _fingerprint(fingerprints(chosen))

    def converge_(self, fit: Sequence[int], *, agreed: str) -> int:
        """Every replica takes the mean of those that are fit (eq. 3); the bytes reduced.

        `agreed` names the parameters that are equal on all replicas, bit for bit: "all", "still"
        or "nothing". They are left alone: averaging them would cost traffic, and where N is not a
        power of two the mean of equal numbers is not always that number.
        """
        tensors = self.tensors()
        averaged = {
            "all": tensors.buffers,
            "still": [*tensors.moving, *tensors.buffers],
            "nothing": [*tensors.moving, *tensors.still, *tensors.buffers],
        }[agreed]
        return self._replicas.average_(averaged, fit) + self._replicas.maximum_(tensors.counters)

    def converge_state_(self, fit: Sequence[int]) -> int:
        """Every replica takes the mean optimizer state of those that are fit."""
        moments, counts = self.state_tensors()
        return self._replicas.average_(moments, fit) + self._replicas.maximum_(counts)

    def reseed_state_(self, source: int, targets: Sequence[int]) -> int:
        """Replicas that were left out take the optimizer state of one that is fit.

        Where states differ in size (a replica that never made a step has none) they start anew.
        """
        if len(set(self._replicas.gather_objects(self.state_numel()))) > 1:
            if set(targets) & set(self._replicas.local):
                self.reset_state_()
            return 0
        moments, counts = self.state_tensors()
        return self._replicas.copy_(moments + counts, source, targets)

    def reset_state_(self) -> None:
        """Forget the optimizer's state, as if it had just been made."""
        self._optimizer.state.clear()

    @contextmanager
    def visit(self, fit: Sequence[int]) -> Iterator[None]:
        """The consensus inside, every replica's own weights again after it."""
        tensors = self.tensors()
        everything = [tensor.detach() for group in tensors for tensor in group]
        kept = [tensor.clone() for tensor in everything]
        try:
            self.converge_(fit, agreed="nothing")
            yield
        finally:
            torch._foreach_copy_(everything, kept)

    def describe(self) -> dict[str, tuple[tuple[int, ...], str, tuple[int, ...], int]]:
        """Name -> shape, dtype, strides and fingerprint of every parameter, for the door."""
        named = self._named()
        for name, parameter in named.items():
            _check_usable(name, parameter)
        prints = [int(value) for value in fingerprints(list(named.values())).tolist()]
        return {
            name: (tuple(p.shape), str(p.dtype), p.stride(), value)
            for (name, p), value in zip(named.items(), prints, strict=True)
        }

    def is_perturbed(self) -> bool:
        """Whether `perturb_` made the replicas differ on purpose."""
        return any(hasattr(p, _PERTURBED) for p in self._named().values())

    def _named(self) -> dict[str, Tensor]:
        named = {
            f"{prefix}{name}": holder[name]
            for holder, prefix, name in self._parameter_places
            if holder.get(name) is not None
        }
        known = {id(parameter) for parameter in named.values()}
        for index, group in enumerate(self._optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    named[f"param_groups[{index}]['params'][{position}]"] = parameter
        return named


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """A 64-bit hash of the bits of each tensor, the same whatever the hardware and its order.

    Integer sums wrap around and do not depend on the order in which they are made; every element
    is multiplied by a mixed function of its place, every chunk by a power of an odd number.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    return torch.stack(
        [torch.zeros((), dtype=torch.int64, device=device)]
        + [_fingerprint(tensor).to(device) for tensor in tensors]
    )[1:]


def _fingerprint(tensor: Tensor) -> Tensor:
    flat = flatten(tensor)
    bits = flat.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.itemsize]
    )
    # On the CPU a chunk that fits the cache; elsewhere one that is worth a launch.
    size = min(1 << 18 if flat.device.type == "cpu" else 1 << 24, flat.numel())
    places = torch.arange(1, size + 1, dtype=torch.int64, device=flat.device)
    places.mul_(-7046029254386353131)  # 2^64 / golden ratio, as a signed number
    places.bitwise_xor_(places >> 29).mul_(-4658895280553007687).bitwise_or_(1)
    total = torch.full((), flat.numel(), dtype=torch.int64, device=flat.device)
    for chunk in bits.split(max(size, 1)):
        total = total * 6364136223846793005 + (chunk.long() * places[: chunk.numel()]).sum()
    return total


@torch.no_grad()
def perturb_(
    model: nn.Module, noise: float = 0.01, *, replicas: Replicas | None = None, seed: int = 0
) -> None:
    """Warm noisy start: theta <- theta + eps, eps ~ N(0, noise^2 |theta|^2 / d) (paper, eq. 10).

    Each replica draws its own eps from a private generator, so no global random state is touched.
    Frozen parameters stay as they are. Call it after wrapping the model in DDP, which would
    otherwise overwrite the noise of all replicas with that of the first.
    """
    check_finite("noise", noise, above=-1e-300)
    check_integer("seed", seed, at_least=0)
    parameters = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    if not parameters:
        raise ValueError("`model` must have parameters that require a gradient, got none.")
    num = sum(p.numel() for p in parameters)
    norms = torch.stack([p.double().norm().cpu() for p in parameters])
    deviation = noise * float(norms.norm()) / num**0.5
    (replica,) = (replicas or default_replicas()).local
    generator = torch.Generator().manual_seed(_seed(seed, replica))
    for p in parameters:
        epsilon = torch.empty(p.shape, dtype=torch.float64).normal_(generator=generator)
        p.add_((epsilon * deviation).to(device=p.device, dtype=p.dtype))
        setattr(p, _PERTURBED, True)


def _seed(seed: int, replica: int) -> int:
    digest = sha256(f"perturb/{seed}/{replica}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _places(model: nn.Module | None, kind: str) -> list[tuple[dict[str, Any], str, str]]:
    """Where the model keeps its parameters or buffers: holder, prefix of the name, name."""
    if model is None:
        return []
    return [
        (getattr(module, kind), f"{prefix}." if prefix else "", name)
        for prefix, module in model.named_modules()
        for name in getattr(module, kind)
    ]


def _present(places: Iterable[tuple[dict[str, Any], str, str]]) -> list[Tensor]:
    return [holder[name] for holder, _, name in places if holder.get(name) is not None]


def _once(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each tensor at its first place; tied ones share their memory."""
    seen: dict[tuple[int, int], Tensor] = {}
    for tensor in tensors:
        if tensor.numel():
            seen.setdefault((tensor.data_ptr(), tensor.numel()), tensor)
    return list(seen.values())


def _is_averaged(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _check_usable(name: str, parameter: Tensor) -> None:
    if is_lazy(parameter):
        raise ValueError(
            f"`{name}` must be initialised, got a lazy parameter: run one batch first."
        )
    try:
        flatten(parameter)
    except RuntimeError as error:
        raise ValueError(
            f"`{name}` must be dense in memory, got shape {tuple(parameter.shape)} with strides "
            f"{parameter.stride()}: replace it by a contiguous copy."
        ) from error
