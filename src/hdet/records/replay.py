"""Replay: a plain scheduler that plays back the schedule of an earlier run, without replicas."""

from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet._validation import check_integer
from hdet.knobs import param_groups
from hdet.records import schedule_export


class Replay(LRScheduler):
    """Plays back the learning rates that a run found, from the file that `hdet export` wrote.

    Parameter groups are matched by their names. After the end of the schedule the last value
    holds. If the schedule of the run cycled the momentum, that is played back, too.

    Args:
        optimizer: The optimizer whose learning rates are set. Its parameter groups must have the
            names of those of the run.
        path: The file that `hdet export` wrote.
        total_steps: The length to which the schedule is stretched or shortened; by default its
            own.
        last_epoch: The index of the last step, as in torch's schedulers.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file holds no complete schedule, the optimizer has other parameter groups,
            or `total_steps` is not positive.
        TypeError: `total_steps` is not an integer.

    Example:
        >>> import tempfile, torch
        >>> from hdet.records.schedule_export import FoundSchedule, GroupSchedule
        >>> weights = GroupSchedule(steps=[0, 4], lrs=[0.1, 0.5])
        >>> found = FoundSchedule(groups={"group0": weights}, total_steps=5)
        >>> file = Path(tempfile.mkdtemp()) / "schedule.json"
        >>> _ = file.write_text(found.to_json())
        >>> optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
        >>> Replay(optimizer, file).get_last_lr()
        [0.1]
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
        """Return the learning rates at this step, and write the momenta.

        Returns:
            One learning rate for each parameter group.
        """
        place = self._place()
        momenta = [schedule_export.at(g.steps, g.momenta, place) for g in self._groups if g.momenta]
        if len(momenta) == len(self._groups) and self._has_momenta():
            param_groups.write_momenta(self.optimizer, momenta)
        return [schedule_export.at(group.steps, group.lrs, place) for group in self._groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the schedule. The schedule itself stays in its file.

        Returns:
            Plain data.
        """
        own = ("_groups", "_pace", "total_steps")  # a resumed run takes them from its arguments
        return {name: value for name, value in super().state_dict().items() if name not in own}

    def _has_momenta(self) -> bool:
        return all("betas" in group or "momentum" in group for group in self.optimizer.param_groups)

    def _place(self) -> float:
        """The step of the found schedule that belongs to the present step."""
        step = min(max(self.last_epoch, 0), self.total_steps - 1)
        return step if self._pace == 1 else step * self._pace
