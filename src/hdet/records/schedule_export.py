"""The schedule that a run found: from its history to JSON, and back to a value for any step.

Plain Python, no torch. A schedule is a few points for each parameter group, with straight lines
between them. A jump at the end of a cycle is two points at neighbouring steps.
"""

import bisect
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from hdet.records.events import CycleEvent
from hdet.records.history import History

FORMAT = "hdet schedule"
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSchedule:
    """The schedule of one parameter group.

    Attributes:
        steps: Steps, counted from 0, in ascending order.
        lrs: The learning rate at each of them.
        momenta: The momentum at each of them; none if the schedule did not cycle it.
    """

    steps: list[int]
    lrs: list[float]
    momenta: list[float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundSchedule:
    """The learning rates that a run found. The first optimizer step uses those of step 0.

    Attributes:
        groups: The schedule of each parameter group, by name.
        total_steps: The length of the schedule.
        finished: Whether the run reached its end.
        run: The name of the run.
    """

    groups: dict[str, GroupSchedule]
    total_steps: int
    finished: bool = True
    run: str = ""

    def to_json(self) -> str:
        """The text of the file that `load` reads."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"


def found(history: History) -> FoundSchedule:
    """The learning rates of the consensus, from the record of a run.

    Raises:
        ValueError: The record has no cycle, or no learning rate.
    """
    if not history.cycles:
        raise ValueError(f"{history.path} holds no cycle yet: there is no schedule to export")
    names = history.rate_names
    points: dict[str, dict[int, tuple[float, float | None]]] = {name: {} for name in names}
    for cycle in history.cycles:
        for name, lrs in _lrs_by_step(cycle).items():
            points[name].update(lrs)
    if not names or not all(points.values()):
        raise ValueError(f"{history.path} holds no learning rate to export")
    return FoundSchedule(
        groups={name: _group(points[name]) for name in names},
        total_steps=history.cycles[-1].step,
        finished=history.is_finished,
        run=history.name,
    )


def load(path: str | Path) -> FoundSchedule:
    """Read a schedule that `hdet export` wrote.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file does not hold a complete schedule of a known version.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"`path` must be a schedule from `hdet export`, got {path}: {error}"
        ) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"`path` must be a schedule from `hdet export`, got {path}.")
    if data.get("version") != VERSION:
        raise ValueError(
            f"`path` must hold a schedule of version {VERSION}, got {data.get('version')!r}."
        )
    try:
        groups = {name: GroupSchedule(**_checked(group)) for name, group in data["groups"].items()}
        total = int(data["total_steps"])
        if not groups or total < 1:
            raise ValueError("it is empty")
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"`path` must hold a complete schedule, got {path}: {error}") from None
    return FoundSchedule(
        groups=groups,
        total_steps=total,
        finished=bool(data.get("finished", True)),
        run=str(data.get("run", "")),
    )


def at(steps: Sequence[int], values: Sequence[float], place: float) -> float:
    """The value at a step, interpolated between two points.

    >>> at([0, 10], [1.0, 2.0], 5), at([0, 10], [1.0, 2.0], 99)
    (1.5, 2.0)
    """
    right = bisect.bisect_right(steps, place)
    if right == 0:
        return values[0]
    if right == len(steps):
        return values[-1]
    left = right - 1
    share = (place - steps[left]) / (steps[right] - steps[left])
    return values[left] if share == 0 else values[left] + share * (values[right] - values[left])


def _lrs_by_step(cycle: CycleEvent) -> dict[str, dict[int, tuple[float, float | None]]]:
    """For each learning rate of a cycle: its value and its momentum, by step."""
    by_name = {}
    for index, knob in enumerate(knob for knob in cycle.knobs if knob.is_lr):
        trace = cycle.lr_trace
        if trace.steps and index < len(trace.lrs):
            momenta = trace.momenta[index] if trace.momenta else [None] * len(trace.steps)
            rows = zip(trace.steps, trace.lrs[index], momenta, strict=True)
            by_name[knob.name] = {step: (lr, momentum) for step, lr, momentum in rows}
        else:  # early records have no trace: the last step of the cycle has to do
            lrs = [lr for lr in knob.values if lr is not None]
            if lrs:
                by_name[knob.name] = {cycle.step - 1: (fmean(lrs), None)}
    return by_name


def _group(points: dict[int, tuple[float, float | None]]) -> GroupSchedule:
    steps = sorted(points)
    momenta = [momentum for step in steps if (momentum := points[step][1]) is not None]
    return GroupSchedule(
        steps=steps,
        lrs=[points[step][0] for step in steps],
        momenta=momenta if len(momenta) == len(steps) else None,
    )


def _checked(group: dict[str, Any]) -> dict[str, Any]:
    steps, lrs, momenta = group["steps"], group["lrs"], group.get("momenta")
    if not steps or sorted(set(steps)) != steps:
        raise ValueError("its steps are not in order")
    if len(lrs) != len(steps) or (momenta is not None and len(momenta) != len(steps)):
        raise ValueError("it has not one value for each step")
    if not all(math.isfinite(value) and value >= 0 for value in [*steps, *lrs, *(momenta or ())]):
        raise ValueError("it has values that are negative or not finite")
    return {
        "steps": [int(step) for step in steps],
        "lrs": [float(lr) for lr in lrs],
        "momenta": None if momenta is None else [float(momentum) for momentum in momenta],
    }
