"""A guard's hands: the last good weights of a run, and the way back to them."""

from torch import nn
from torch.optim import Optimizer

from hdet.guard import Guard, Watch
from hdet.outset import Outset
from hdet.parameters import Parameters
from hdet.snapshot import Snapshot


class Refuge:
    """What the run is taken back to: at first what it set out from, then every good consensus."""

    def __init__(
        self,
        guard: Guard,
        optimizer: Optimizer,
        model: nn.Module | None,
        parameters: Parameters,
        step: int,
    ) -> None:
        self.watch = Watch(guard)
        self.step = step
        """The step of the weights that are kept."""
        self._guard, self._parameters = guard, parameters
        self._outset: Outset | None = Outset(optimizer, model, parameters, offload=guard.offload)
        self._kept: Snapshot | None = None

    def keep(self, step: int) -> None:
        """All replicas stand at a good consensus."""
        self.close()
        self._kept = None  # before the new one is made: two would not fit
        self.step = step
        self._kept = self._parameters.snapshot(
            offload=self._guard.offload, alike=not self._parameters.are_under_way
        )

    def go_back(self) -> None:
        """To what was kept; the random numbers go on, so that nothing is repeated."""
        kept = self._kept if self._outset is None else self._outset.kept
        assert kept is not None
        self._parameters.restore_(kept, draws=False)

    def close(self) -> None:
        if self._outset is not None:
            self._outset.close()
            self._outset = None
