"""The schedule that a run found: from its history to JSON, and back to a value for any step.

Plain Python, no torch. A schedule is a few points for each parameter group, with straight lines
between them; where the learning rate jumped at the end of a cycle, two points lie side by side.
"""

import bisect
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from hdet.records.reader import CycleRecord, History

FORMAT = "hdet schedule"
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSchedule:
    """What one parameter group was trained with."""

    steps: list[int]
    lrs: list[float]
    momenta: list[float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundSchedule:
    """Steps count from 0: `lrs` at 0 is what the first optimizer step uses."""

    groups: dict[str, GroupSchedule]
    total_steps: int
    finished: bool = True
    run: str = ""

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"


def found(history: History) -> FoundSchedule:
    """The learning rates of the consensus, as the record tells them."""
    if not history.cycles:
        raise ValueError(f"{history.path} holds no cycle yet: there is no schedule to export")
    names = history.rate_names
    points: dict[str, dict[int, tuple[float, float | None]]] = {name: {} for name in names}
    for cycle in history.cycles:
        for name, course in _courses(cycle).items():
            points[name].update(course)
    if not names or not all(points.values()):
        raise ValueError(f"{history.path} holds no learning rate to export")
    return FoundSchedule(
        groups={name: _group(points[name]) for name in names},
        total_steps=history.cycles[-1].step,
        finished=history.is_finished,
        run=history.name,
    )


def load(path: str | Path) -> FoundSchedule:
    """A schedule that was exported before."""
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


def at(steps: list[int], values: list[float], place: float) -> float:
    """The value at a step, or between two.

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


def _courses(cycle: CycleRecord) -> dict[str, dict[int, tuple[float, float | None]]]:
    """For each knob of a cycle: step -> learning rate and momentum."""
    courses = {}
    for index, knob in enumerate(knob for knob in cycle.knobs if knob.is_lr):
        if cycle.steps and index < len(cycle.centres):
            momenta = cycle.momenta[index] if cycle.momenta else [None] * len(cycle.steps)
            rows = zip(cycle.steps, cycle.centres[index], momenta, strict=True)
            courses[knob.name] = {step: (lr, momentum) for step, lr, momentum in rows}
        else:  # a record from before centres were noted: what its last step was run with
            lrs = [lr for lr in knob.values if lr is not None]
            if lrs:
                courses[knob.name] = {cycle.step - 1: (fmean(lrs), None)}
    return courses


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
