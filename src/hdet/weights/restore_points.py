"""Snapshots of a run that it can return to: its start, and its best average."""

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hdet.control.guard import Guard
from hdet.control.guard_monitor import GuardMonitor
from hdet.weights.replica_weights import ReplicaWeights
from hdet.weights.snapshot import Snapshot


class RestorePoint:
    """One snapshot of the replicas: taken, restored as often as needed, and closed.

    A restore leaves random numbers alone, so that the run draws no batch twice.
    """

    def __init__(self, weights: ReplicaWeights, *, offload: bool = False) -> None:
        self._weights, self._offload = weights, offload
        self._snapshot: Snapshot | None = None

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot that was taken last."""
        assert self._snapshot is not None
        return self._snapshot

    def take(self, *, equal: bool = False) -> None:
        """Take a new snapshot in place of the last one; `equal` replicas are copied once."""
        self._snapshot = self._weights.snapshot(offload=self._offload, equal=equal)

    def restore(self) -> None:
        """Give all replicas the weights, buffers and optimizer states of the snapshot."""
        self._weights.restore_(self.snapshot, random_state=False)

    def close(self) -> None:
        """Release what the restore point holds on to."""


class StartPoint(RestorePoint):
    """The snapshot before the first step.

    A checkpoint may be loaded after the scheduler is made. So the snapshot is taken again until the
    first optimizer step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None,
        weights: ReplicaWeights,
        *,
        offload: bool = False,
    ) -> None:
        super().__init__(weights, offload=offload)
        self._is_final = False
        self._random_states: dict[str, Tensor] | None = None
        self.take()
        self._hooks = self._add_hooks(optimizer, model)

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot before the first step. Before that step it is taken anew at each access."""
        self._update()
        return super().snapshot

    def keep_random_state(self) -> None:
        """Start with the random numbers of now, not with those of the first step."""
        self.take()
        self._random_states = super().snapshot.random_states

    def finalize(self) -> None:
        """Take the snapshot a last time: a step follows, or was attempted."""
        self._update()
        self._is_final = True

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _update(self) -> None:
        if self._is_final:
            return
        before = super().snapshot
        self.take()
        now = super().snapshot
        if now.has_weights_of(before):
            # The first forward pass has changed buffers already: keep those from before it.
            states = self._random_states or now.random_states
            self._snapshot = now._replace(buffers=before.buffers, random_states=states)

    def _take_loaded(self) -> None:
        """Take the snapshot of a checkpoint that was loaded, with its buffers."""
        if not self._is_final:
            self.take()

    def _add_hooks(
        self, optimizer: Optimizer, model: nn.Module | None
    ) -> Sequence[RemovableHandle]:
        this = weakref.ref(self)  # hooks must not keep the restore point alive

        def before_step(*_: Any) -> None:
            if (point := this()) is not None:
                point.finalize()

        after_load = _AfterLoad(this)
        inner = getattr(model, "module", None)  # users also load into the module inside of DDP
        modules = [m for m in (model, inner) if isinstance(m, nn.Module)]
        return [
            optimizer.register_step_pre_hook(before_step),
            optimizer.register_load_state_dict_post_hook(after_load),
            *(module.register_load_state_dict_post_hook(after_load) for module in modules),
        ]


class _AfterLoad:
    """A hook of a model: takes the snapshot anew after a load.

    Users save models whole, with their hooks. A saved one does nothing, and loads without hdet.
    """

    def __init__(self, point: weakref.ref[StartPoint]) -> None:
        self._point = point

    def __call__(self, *_: Any) -> None:
        if (point := self._point()) is not None:
            point._take_loaded()

    def __reduce__(self) -> tuple[Any, ...]:
        # torch wants a call that takes anything and returns None.
        return getattr, (logging.getLogger("hdet.saved"), "debug")


class GoodPoint:
    """What a guard rolls back to: the start of the run, then the average of its best cycle."""

    def __init__(
        self,
        guard: Guard,
        optimizer: Optimizer,
        model: nn.Module | None,
        weights: ReplicaWeights,
        step: int,
    ) -> None:
        self.monitor = GuardMonitor(guard)
        self.step = step
        """The step of the snapshot."""
        self._offload, self._weights = guard.offload, weights
        self._point: RestorePoint = StartPoint(optimizer, model, weights, offload=guard.offload)

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot of the best weights."""
        return self._point.snapshot

    def num_bad_buffers(self) -> int:
        """The number of elements of a replica's buffers in the snapshot that are not finite."""
        rows = self.snapshot.buffers
        return min(sum(int((~b.isfinite()).sum()) for b in row.values()) for row in rows)

    def take(self, step: int) -> None:
        """Take a snapshot of a good average."""
        self._point.close()
        self.step = step
        # The old snapshot goes before the new one is taken: memory may not hold two.
        self._point = RestorePoint(self._weights, offload=self._offload)
        self._point.take(equal=not self._weights.averager.has_pending_average)

    def restore(self) -> None:
        """Restore the best weights."""
        self._point.restore()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, replicas have the best weights and optimizer states; afterwards their own."""
        with self._own_afterwards():
            self.restore()
            yield

    @contextmanager
    def loaded(self, step: int) -> Iterator[None]:
        """Inside, others load the best weights, of this step; afterwards replicas have their own.

        If the block raises, the snapshot stays as it is.
        """
        with self._own_afterwards():
            yield
            self.take(step)

    @contextmanager
    def _own_afterwards(self) -> Iterator[None]:
        own = self._weights.snapshot(offload=self._offload)
        try:
            yield
        finally:
            self._weights.restore_(own)

    def memory(self) -> str:
        """The size of the snapshot, and where it lies, in words."""
        where = "host memory" if self._offload else "the memory of the device"
        return f"{self.snapshot.num_bytes() / 2**20:.3g} MiB in {where} of each process"

    def close(self) -> None:
        """Release what the restore point holds on to."""
        self._point.close()
