"""What a run sets out from: kept when it is made, and looked at again until its first step.

A checkpoint may be loaded after the scheduler is made; then that is what it sets out from.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hdet.control.spike_guard import Guard, SpikeMonitor
from hdet.control.stall_detector import StallDetector
from hdet.weights.averaging import ReplicaWeights
from hdet.weights.snapshot import Snapshot


class StartPoint:
    """Weights, buffers, optimizer state and random numbers before the first step."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None,
        parameters: ReplicaWeights,
        *,
        offload: bool = False,
    ) -> None:
        self._parameters, self._offload = parameters, offload
        self._kept = parameters.snapshot(offload=offload)
        self._is_settled = False
        self._hooks = self._look_when_loaded_or_stepped(optimizer, model)

    @property
    def kept(self) -> Snapshot:
        self.look()
        return self._kept

    def look(self) -> None:
        """Before the first step: whatever there is now is what the run sets out from."""
        if self._is_settled:
            return
        now = self._parameters.snapshot(offload=self._offload)
        if now.has_the_weights_of(self._kept):
            # The first forward has moved buffers already: those of before are the better ones.
            now = now._replace(buffers=self._kept.buffers)
        self._kept = now

    def retake(self) -> None:
        """A checkpoint was loaded: with its buffers, too."""
        if not self._is_settled:
            self._kept = self._parameters.snapshot(offload=self._offload)

    def settle(self) -> None:
        """A step is about to be made, or was attempted: from now on nothing is looked at again."""
        self.look()
        self._is_settled = True

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _look_when_loaded_or_stepped(
        self, optimizer: Optimizer, model: nn.Module | None
    ) -> Sequence[RemovableHandle]:
        weakly = weakref.ref(self)  # hooks must not outlive what they look for

        def stepped(*_: Any) -> None:
            if (start_score := weakly()) is not None:
                start_score.settle()

        def loaded(*_: Any) -> None:
            if (start_score := weakly()) is not None:
                start_score.retake()

        bare = getattr(model, "module", None)  # DDP's own is loaded by itself, too
        modules = [m for m in (model, bare) if isinstance(m, nn.Module)]
        return [
            optimizer.register_step_pre_hook(stepped),
            optimizer.register_load_state_dict_post_hook(loaded),
            *(module.register_load_state_dict_post_hook(loaded) for module in modules),
        ]


class GoodPoint:
    """What the run is taken back to: at first what it set out from, then every good consensus."""

    def __init__(
        self,
        guard: Guard,
        optimizer: Optimizer,
        model: nn.Module | None,
        parameters: ReplicaWeights,
        step: int,
    ) -> None:
        self.monitor = SpikeMonitor(guard)
        self.step = step
        """The step of the weights that are kept."""
        self._guard, self._parameters = guard, parameters
        self._outset: StartPoint | None = StartPoint(
            optimizer, model, parameters, offload=guard.offload
        )
        self._kept: Snapshot | None = None

    def keep(self, step: int) -> None:
        """All replicas stand at a good consensus."""
        self.close()
        self._kept = None  # before the new one is made: two would not fit
        self.step = step
        self._kept = self._parameters.snapshot(
            offload=self._guard.offload, alike=not self._parameters.has_pending_average
        )

    def restore(self) -> None:
        """To what was kept; the random numbers go on, so that nothing is repeated."""
        kept = self._kept if self._outset is None else self._outset.kept
        assert kept is not None
        self._parameters.restore_(kept, draws=False)

    def close(self) -> None:
        if self._outset is not None:
            self._outset.close()
            self._outset = None


State = dict[str, Any]


class SavedPlace(NamedTuple):
    """Where a run is: its weights and whatever the scheduler counts."""

    kept: Snapshot
    state: State


class SecondStart:
    """What a run began with, in the memory of the host, as long as it may be needed."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None,
        parameters: ReplicaWeights,
        state: Callable[[], State],
    ) -> None:
        self.stall_detector = StallDetector()
        self._parameters, self._state = parameters, state
        self._outset = StartPoint(optimizer, model, parameters, offload=True)
        self._first = state()
        self._left: SavedPlace | None = None
        """Where the run was when it went back."""
        self.has_just_looked = False
        """Whether what is left of a cycle comes next, which has little to gain."""

    @property
    def can_return(self) -> bool:
        return self._left is not None

    def restore(self, *, for_good: bool) -> State:
        """To the first weights; what the scheduler had counted then. Data is not repeated."""
        if not for_good:
            self._left = SavedPlace(self._parameters.snapshot(offload=True), self._state())
        self._parameters.restore_(self._outset.kept, draws=False)
        return self._first

    def restore_last(self) -> State:
        """To where the run was: its learning rate was not the fault."""
        assert self._left is not None
        self._parameters.restore_(self._left.kept, draws=False)
        return self._left.state

    def close(self) -> None:
        self._outset.close()
