"""Replay: a schedule that a run found, played back as a plain scheduler without replicas."""

from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet._validation import check_integer
from hdet.knobs import param_groups
from hdet.records import schedule_export


class Replay(LRScheduler):
    """Plays what `hdet export` wrote: the learning rates of the consensus, group by group.

    Groups are matched by their names. With `total_steps` the schedule is stretched or shortened
    to another length; after its end the last value holds. Momenta are played too, if the run's
    schedule cycled them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        path: str | Path,
        *,
        total_steps: int | None = None,
        last_epoch: int = -1,
    ) -> None:
        found = schedule_export.load(path)
        if total_steps is not None:
            check_integer("total_steps", total_steps, at_least=1)
        names = param_groups.group_names(optimizer)
        if names != list(found.groups):
            raise ValueError(
                f"`optimizer` must have the parameter groups {list(found.groups)}, got {names}."
            )
        self.total_steps = total_steps or found.total_steps
        self._groups = list(found.groups.values())
        self._pace = (found.total_steps - 1) / max(self.total_steps - 1, 1)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        place = self._place()
        momenta = [schedule_export.at(g.steps, g.momenta, place) for g in self._groups if g.momenta]
        if len(momenta) == len(self._groups) and self._has_momenta():
            param_groups.write_momenta(self.optimizer, momenta)
        return [schedule_export.at(group.steps, group.lrs, place) for group in self._groups]

    def state_dict(self) -> dict[str, Any]:
        """Where it stands; what it plays is the file's."""
        own = ("_groups", "_pace", "total_steps")  # what it is set to now counts
        return {name: value for name, value in super().state_dict().items() if name not in own}

    def _has_momenta(self) -> bool:
        return all("betas" in group or "momentum" in group for group in self.optimizer.param_groups)

    def _place(self) -> float:
        """The step of the found schedule that belongs to the step it is at."""
        step = min(max(self.last_epoch, 0), self.total_steps - 1)
        return step if self._pace == 1 else step * self._pace
