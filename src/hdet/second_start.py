"""The way back to the beginning of a run, and back from there if that was not the fault."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from hdet.outset import Outset
from hdet.parameters import Parameters
from hdet.snapshot import Snapshot
from hdet.stuck import Stuck

State = dict[str, Any]


class Place(NamedTuple):
    """Where a run is: its weights and whatever the scheduler counts."""

    kept: Snapshot
    state: State


class SecondStart:
    """What a run began with, in the memory of the host, as long as it may be needed."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None,
        parameters: Parameters,
        state: Callable[[], State],
    ) -> None:
        self.stuck = Stuck()
        self._parameters, self._state = parameters, state
        self._outset = Outset(optimizer, model, parameters, offload=True)
        self._first = state()
        self._left: Place | None = None
        """Where the run was when it went back."""
        self.has_just_looked = False
        """Whether what is left of a cycle comes next, which has little to gain."""

    @property
    def can_return(self) -> bool:
        return self._left is not None

    def go_back(self, *, for_good: bool) -> State:
        """To the first weights; what the scheduler had counted then. Data is not repeated."""
        if not for_good:
            self._left = Place(self._parameters.snapshot(offload=True), self._state())
        self._parameters.restore_(self._outset.kept, draws=False)
        return self._first

    def return_(self) -> State:
        """To where the run was: its learning rate was not the fault."""
        assert self._left is not None
        self._parameters.restore_(self._left.kept, draws=False)
        return self._left.state

    def close(self) -> None:
        self._outset.close()
