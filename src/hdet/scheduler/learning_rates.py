"""LearningRates: what every replica of this process trains with, written to its optimizer."""

import weakref
from collections.abc import Sequence
from operator import mul

from torch.optim import Optimizer

from hdet.control.knob_bank import KnobBank
from hdet.control.knob_state import KnobState
from hdet.knobs import param_groups
from hdet.knobs.binding import BoundKnobs
from hdet.replicas.protocol import Replicas
from hdet.scheduler.base_schedule import BaseSchedule
from hdet.scheduler.progress import Progress

MOMENTA = ("momentum", "betas")
"""The entries of parameter groups that hold a momentum."""


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
        self._base, self._knob_bank = base, knob_bank
        self._engines = [one for one in optimizers if one is not base.optimizer]
        """The optimizers of the local replicas where the user's one stands for all of them."""
        self._bound_knobs, self._replicas, self._progress = bound_knobs, replicas, progress
        self._factors: list[list[float]] = []
        """For the centre and each local replica: the factor on each group's base schedule."""
        self._shares: list[float] = []
        """What each group's base schedule adds to the share of the given learning rates."""
        self._follows_base = True
        """Whether no group has a learning rate that is held since the hand-over."""
        self._writes_momenta = False
        """Whether replicas do not follow the momenta of the schedule by themselves."""
        self._are_equal = False
        """Whether all local replicas have the learning rates of the centre."""
        self.written = param_groups.WrittenRates()
        """The learning rates as they were written last."""
        self.centre: list[float] = []
        """The learning rate of each group in the centre of the spread."""
        self.highest = 0.0
        """The highest share of the given learning rates since the cycle began."""

    def write(self, *, everything: bool = False) -> None:
        """Write the learning rates of this step; scheduled knobs too, or all of them.

        Within a cycle only the base schedule moves, so factors are read where `everything` is
        written. Replicas of this process with equal learning rates are written together then: their
        engine copies the groups of the user's optimizer before it steps.
        """
        if everything:
            self._read_factors()
        base = self._base.lrs if self._follows_base else self._knob_bank.base_lrs(self._base.lrs)
        self.centre = list(map(mul, base, self._factors[0]))
        share = sum(map(mul, base, self._shares))
        if share > self.highest:
            self.highest = share
        if everything or not self._are_equal:
            self._write_each(everything=everything)
        else:
            param_groups.write_learning_rates(self._base.optimizer, self.centre)
            self.written.note_numbers(self._base.optimizer, self.centre)
        if everything or self._bound_knobs.are_scheduled:
            self._bound_knobs.write(
                self.other_knobs(), self._progress.step, self._base.momenta, everything=everything
            )

    def write_start(self) -> None:
        """Write the base schedule's own learning rates, and the start values of all knobs."""
        param_groups.write_learning_rates(self._base.optimizer, self._base.lrs)
        self._bound_knobs.write_start()

    def _read_factors(self) -> None:
        users, num = self._base.optimizer, len(self._base.lrs)
        places = [None, *self._replicas.local]
        self._factors = [self._knob_bank.factors_of_groups(place, num) for place in places]
        self._shares = self._base.shares_of(self._factors[0])
        self._follows_base = self._knob_bank.held is None
        is_search = self._progress.trial is not None
        is_spread = any(row != self._factors[0] for row in self._factors[1:])
        steered = self._bound_knobs.settings()
        # A knob on one of Adam's betas writes the entry that also holds the momentum.
        self._writes_momenta = self._base.momenta is not None and not steered.isdisjoint(MOMENTA)
        # Replicas that follow the user's optimizer would share its tensors.
        has_own = is_search or is_spread or param_groups.has_tensor_rates(users)
        self._are_equal = not (has_own or self._writes_momenta)
        steered = steered | (set() if self._are_equal else {"lr"})
        self._replicas.optimizers(users, steered)

    @property
    def local(self) -> list[list[float]]:
        """The learning rates of each local replica."""
        if self._progress.trial is not None:
            return [self.of(replica) for replica in self._replicas.local]
        base = self._knob_bank.base_lrs(self._base.lrs)
        return [list(map(mul, base, factors)) for factors in self._factors[1:]]

    def _write_each(self, *, everything: bool) -> None:
        """Write the user's optimizer, and those of the local replicas where an engine has others.

        Within a cycle the schedule itself writes the momenta, and replicas follow it.
        """
        local = self.local
        rows = [(self._base.optimizer, local[0] if len(local) == 1 else self.centre)]
        rows += zip(self._engines, local, strict=False)
        for optimizer, lrs in rows:
            param_groups.write_learning_rates(optimizer, lrs)
            if everything or self._writes_momenta:
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
