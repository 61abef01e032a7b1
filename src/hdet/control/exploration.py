"""Exploration: which value of each knob every replica uses in a cycle.

Plain Python, no torch: every process computes the same answer, bit for bit.
"""

from collections.abc import Sequence

from hdet.control.assignment import levels, spread_out
from hdet.control.knob_state import KnobState


class Exploration:
    """Assigns the spread of every knob to the replicas, anew in every cycle."""

    def __init__(
        self, design: str, *, seed: int, sync_every: int, total_steps: int | None, cooldown: float
    ) -> None:
        """Set up from plain values.

        Args:
            design: One of `assignment.DESIGNS`.
            seed: The seed of the assignments.
            sync_every: Steps of a cycle.
            total_steps: Steps of the run; None if not known.
            cooldown: The last share of the run in which nothing is explored.
        """
        self._design, self._seed, self._cooldown = design, seed, cooldown
        self._num_cycles = None if total_steps is None else num_cycles(total_steps, sync_every)

    def is_cooling(self, cycle: int) -> bool:
        """Whether a cycle lies in the last share of the run, in which nothing is explored."""
        if not self._cooldown or self._num_cycles is None:
            return False
        return cycle >= self._num_cycles * (1 - self._cooldown)

    def assign(
        self,
        knobs: Sequence[KnobState],
        num_replicas: int,
        *,
        cycle: int,
        started: bool,
        closed: bool,
    ) -> None:
        """Give every replica its place in the spread of every knob (paper, eqs. 1 and 9).

        Args:
            knobs: The knobs, whose multipliers or levels are set.
            num_replicas: Replicas of this cycle.
            cycle: The number of the cycle.
            started: Whether the controller has taken over.
            closed: Whether exploration has ended.
        """
        rests = closed or self.is_cooling(cycle)
        if self._design == "permutation":
            for knob in knobs:
                # Before the controller takes over, in the order of the replicas (paper).
                self._permute(knob, num_replicas, cycle if started else None, rests)
            return
        spread = [knob for knob in knobs if knob.info.spread and not rests]
        names = [knob.name for knob in spread]
        columns = levels(self._design, num_replicas, names, seed=self._seed, cycle=cycle)
        for knob in knobs:
            knob.levels = (0.0,) * num_replicas
        for knob, column in zip(spread, columns, strict=True):
            knob.levels = column

    def _permute(self, knob: KnobState, num_replicas: int, cycle: int | None, rests: bool) -> None:
        width = knob.info.spread if knob.info.groups else 1.0
        fan = spread_out(
            num_replicas, 0.0 if rests else width, seed=self._seed, cycle=cycle, knob=knob.name
        )
        if knob.info.groups:
            knob.multipliers = fan
        else:
            knob.levels = tuple(multiplier - 1 for multiplier in fan)


def num_cycles(num_steps: int, sync_every: int) -> int:
    """Cycles in a number of steps; the last cycle may be short.

    >>> num_cycles(100, 50), num_cycles(101, 50)
    (2, 3)
    """
    return -(-num_steps // sync_every)
