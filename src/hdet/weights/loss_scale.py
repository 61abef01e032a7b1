"""The loss scale of mixed precision: a part of snapshots, and equal on replicas that average."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.amp import GradScaler

from hdet.replicas.protocol import Replicas


class LossScale:
    """The loss scale of the user's `GradScaler`. Without a scaler it does nothing.

    Replicas with gradients of their own lower their own scale. Where gradients are shared, another
    scale on one replica would give all of them a wrong mean.
    """

    def __init__(self, scaler: GradScaler | None, replicas: Replicas) -> None:
        is_used = scaler is not None and scaler.is_enabled()
        self._scaler, self._replicas = scaler if is_used else None, replicas

    def state(self) -> dict[str, Any]:
        """The state of the scaler; empty without one."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Give the scaler a state that `state()` returned."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(dict(state))

    def equalize_(self, healthy: Sequence[int]) -> None:
        """Give all replicas the lowest scale of the healthy ones. All processes must call it.

        A replica whose weights are not finite lowers its scale at every step, so it does not count.
        """
        replicas, state = self._replicas, self.state()
        if not state or replicas.size * replicas.parts == 1:
            return
        own = state["scale"], state["_growth_tracker"]
        rows = torch.tensor([own] * len(replicas.local), dtype=torch.float64)
        gathered = replicas.gather(replicas.gather_parts(rows).flatten(1)).unflatten(1, (-1, 2))
        scale, tracker = min(tuple(pair) for r in healthy for pair in gathered[r].tolist())
        if (scale, tracker) != own:
            self.restore({**state, "scale": scale, "_growth_tracker": int(tracker)})
