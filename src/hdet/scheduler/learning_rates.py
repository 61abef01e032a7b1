"""LearningRates: what every replica of this process trains with, written to its optimizer."""

import weakref
from collections.abc import Sequence

from torch.optim import Optimizer

from hdet.control.knob_bank import KnobBank
from hdet.control.knob_state import KnobState
from hdet.knobs import param_groups
from hdet.knobs.binding import BoundKnobs
from hdet.replicas.protocol import Replicas
from hdet.scheduler.base_schedule import BaseSchedule
from hdet.scheduler.progress import Progress


class LearningRates:
    """Base schedule x scale x multiplier, for each local replica and parameter group.

    Nothing is read back: group["lr"] is compared with what was written last, never computed with.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        base: BaseSchedule,
        knob_bank: KnobBank,
        bound_knobs: BoundKnobs,
        replicas: Replicas,
        progress: Progress,
    ) -> None:
        self._optimizers, self._base, self._knob_bank = optimizers, base, knob_bank
        self._bound_knobs, self._replicas, self._progress = bound_knobs, replicas, progress
        self._factors: list[list[float]] = []
        self.written = param_groups.WrittenRates()
        """The learning rates as they were written last."""
        self.centre: list[float] = []
        """The learning rate of each group in the centre of the spread."""
        self.local: list[list[float]] = []
        """Those of each local replica."""
        self.highest = 0.0
        """The highest share of the given learning rates since the cycle began."""

    def write(self, *, everything: bool = False) -> None:
        """Write the learning rates of this step; scheduled knobs too, or all of them."""
        if everything:  # within a cycle only the base schedule moves
            places = [None, *self._replicas.local]
            num = len(self._base.lrs)
            self._factors = [self._knob_bank.factors_of_groups(place, num) for place in places]
        base = self._knob_bank.base_lrs(self._base.lrs)
        self.centre, *self.local = [
            [lr * factor for lr, factor in zip(base, factors, strict=True)]
            for factors in self._factors
        ]
        self.highest = max(self.highest, self.share())
        if self._progress.trial is not None:
            self.local = [self.of(replica) for replica in self._replicas.local]
        self._write_groups(everything=everything)
        if everything or self._bound_knobs.are_scheduled:
            self._bound_knobs.write(
                self.other_knobs(), self._progress.step, self._base.momenta, everything=everything
            )

    def share(self) -> float:
        """The learning rates in units of those that the user gave, as a mean over the groups."""
        return self._base.share_of(self.centre)

    def _write_groups(self, *, everything: bool) -> None:
        users = self._base.optimizer
        shown = self.local[0] if len(self.local) == 1 else self.centre
        rows = [(users, shown)]
        rows += [
            (optimizer, lrs)
            for optimizer, lrs in zip(self._optimizers, self.local, strict=True)
            if optimizer is not users
        ]
        for optimizer, lrs in rows:
            param_groups.write_learning_rates(optimizer, lrs)
            param_groups.write_momenta(optimizer, self._base.momenta)
        self.written.note(rows, everything=everything)

    def write_after_loading(self) -> None:
        """Write the learning rates again whenever the optimizer loads a state."""
        weakly = weakref.ref(self)  # a hook must not keep the run alive

        def write_again(_: Optimizer) -> None:
            rates = weakly()
            if rates is not None:
                rates._base.restore_entries()
                rates.write(everything=True)

        self._base.optimizer.register_load_state_dict_post_hook(write_again)

    def of(self, replica: int) -> list[float]:
        """The learning rates of any replica, one for each group."""
        trial = self._progress.trial
        if trial is None:
            return self._knob_bank.lrs(self._base.lrs, replica)
        explored = {group for knob in self._knob_bank.knobs for group in knob.info.groups}
        return [
            trial.lr(group, replica) if group in explored else lr
            for group, lr in enumerate(self._base.lrs)
        ]

    def other_knobs(self) -> list[KnobState]:
        """The knobs beside the learning rates."""
        return [knob for knob in self._knob_bank.knobs if not knob.info.groups]
