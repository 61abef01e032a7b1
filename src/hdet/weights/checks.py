"""Read-only checks of the replicas' tensors: finite, equal, how far apart, how noisy."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from hdet.replicas.protocol import Replicas
from hdet.tensors.hashing import fingerprint, fingerprints
from hdet.weights.inventory import ALL_KINDS, ReplicaTensors, TensorKind
from hdet.weights.perturb import PERTURBED

TensorDescription = tuple[tuple[int, ...], str, tuple[int, ...], int | None]
"""Shape, dtype, strides and fingerprint of a tensor; the fingerprint is None for a buffer."""


class WeightChecks:
    """Checks of the replicas of this process; most return one entry for each of them."""

    def __init__(self, replicas: Replicas, local_tensors: Sequence[ReplicaTensors]) -> None:
        self._replicas, self._local = replicas, local_tensors

    def state_numels(self) -> list[int]:
        """The size of each replica's optimizer state."""
        return [tensors.state_numel() for tensors in self._local]

    def are_finite(self, *, with_state: bool) -> Tensor:
        """Whether all parameters of a replica are finite, and its optimizer state `with_state`."""
        kinds = [kind for kind in ALL_KINDS if kind is not TensorKind.BUFFERS]
        if not with_state:
            kinds.remove(TensorKind.OPTIMIZER_STATE)
        return self._replicas.are_finite(
            [tensors.to_reduce(kinds, {})[0] for tensors in self._local]
        )

    def num_bad_buffers(self) -> Tensor:
        """The number of elements of the buffers that are not finite.

        Some may be so by design, such as a mask of minus infinity. Then the number is equal on all
        replicas.
        """
        return torch.stack([tensors.num_bad_buffers() for tensors in self._local])

    def sample(self) -> Tensor:
        """The same few thousand trainable elements of each replica."""
        return torch.stack([tensors.sample() for tensors in self._local])

    def fingerprints(self, kind: TensorKind) -> Tensor:
        """One number for each tensor of a kind, equal on two replicas if the tensors are.

        The optimizer state has one number in all, since the number of its tensors may differ.
        """
        rows = [fingerprints(tensors.of_kind(kind)) for tensors in self._local]
        found = torch.stack(rows)
        if kind is TensorKind.OPTIMIZER_STATE:
            return torch.stack([fingerprint(row)[None] for row in found])
        return found

    def describe(self) -> dict[str, TensorDescription]:
        """Name -> what must be equal on all replicas before the first step.

        Raises:
            ValueError: A parameter cannot be averaged, or replicas of this process start from
                different values without `perturb_`.
        """
        tensors = self._local[0]
        tensors.check()
        if not self.are_perturbed():
            self._check_equal_start()
        parameters, buffers = tensors.replicated(), tensors.buffers()
        values: list[int | None] = [*fingerprints(list(parameters.values())).tolist()]
        values += [None] * len(buffers)
        named = zip([*parameters.items(), *buffers.items()], values, strict=True)
        return {
            name: (tuple(tensor.shape), str(tensor.dtype), tensor.stride(), value)
            for (name, tensor), value in named
        }

    def describe_groups(self, explored: Collection[str] = ()) -> list[dict[str, Any]]:
        """The settings of the parameter groups, without learning rates and `explored` settings."""
        return self._local[0].groups(explored)

    def are_perturbed(self) -> bool:
        """Whether `perturb_` made the replicas differ on purpose."""
        return all(
            any(hasattr(p, PERTURBED) for p in tensors.parameters().values())
            for tensors in self._local
        )

    def _check_equal_start(self) -> None:
        """Refuse replicas of this process that start from different values."""
        named = [tensors.replicated() for tensors in self._local]
        rows = [fingerprints(list(one.values())).tolist() for one in named if len(named) > 1]
        for name, *values in zip(named[0], *rows, strict=False):
            for replica, value in enumerate(values):
                if value != values[0]:
                    raise ValueError(
                        f"replicas must be alike: parameter {name!r} does not start from the same "
                        f"values on replicas 0 and {replica}. Change weights before stacking the "
                        "model, load them with its load_state_dict, or perturb them on purpose "
                        "with hdet.perturb_(model, replicas=...)."
                    )
