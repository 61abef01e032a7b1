"""What a tracker shows of a run: numbers by name, and a text where something was decided.

Every tracker and every trainer's logger gets the same names from here.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from hdet.knobs.param_groups import group_names
from hdet.scheduler.hdet import HDET


def step_of(event: Mapping[str, Any]) -> int:
    """Return the step that an event belongs to; 0 for the start of a run."""
    return int(event.get("step") or 0)


def scalars_of(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an event that a tracker can plot over the steps.

    Args:
        event: An event, as a sink gets it.

    Returns:
        Finite numbers by name. All names begin with `hdet/`.
    """
    found = dict(_NUMBERS.get(event["event"], _nothing)(event))
    return {
        f"hdet/{name}": float(value)
        for name, value in found.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def scalars_now(scheduler: HDET) -> dict[str, float]:
    """Return the learning rates of now, for a trainer that logs at its own steps.

    Args:
        scheduler: The scheduler of the run.

    Returns:
        The learning rates of the consensus and of every replica by parameter group, under the
        names that `scalars_of` gives them, and whether the scout runs: 1 or 0.
    """
    names = group_names(scheduler.optimizer)
    numbers = {f"hdet/lr/{n}": lr for n, lr in zip(names, scheduler.get_base_lr(), strict=True)}
    for replica, lrs in enumerate(scheduler.get_replica_lrs()):
        for name, lr in zip(names, lrs, strict=True):
            numbers[f"hdet/lr/{name}/replica{replica}"] = lr
    numbers["hdet/scouting"] = float(scheduler.is_scouting)
    return numbers


def text_of(event: Mapping[str, Any]) -> str:
    """Return what an event decided, in a sentence; empty where a tracker has nothing to tell."""
    match event["event"]:
        case "scout" if event.get("factor") is not None:
            within = event.get("within")
            around = f", within a factor of {within:.2g}" if within else ""
            by = f" Compared by {event['compared_by']}." if event.get("compared_by") else ""
            return f"scout: {event['factor']:.3g} times the given learning rate{around}.{by}"
        case "guard":
            back, factor = event["back_to"], event.get("factor") or 1
            done = [f"weights of step {back}"] * (back != event["step"])
            done += [f"learning rates times {factor:.3g}"] * (factor != 1)
            return f"guard: {', '.join(done) or 'no change'}. {event.get('reason', '')}".rstrip()
        case "note" if event.get("text"):
            return str(event["text"])
        case "cycle" | "converge" if event.get("excluded"):
            return "; ".join(
                f"replica {one['replica']} left out: {one['reason']}" for one in event["excluded"]
            )
    return ""


Numbers = Iterator[tuple[str, Any]]


def _nothing(_: Mapping[str, Any]) -> Numbers:
    return iter(())


def _of_cycle(event: Mapping[str, Any]) -> Numbers:
    for kind, key in (("loss", "losses"), ("loss_error", "loss_errors"), ("score", "scores")):
        for replica, value in enumerate(event.get(key) or ()):
            yield f"{kind}/replica{replica}", value
    for replica, value in enumerate(event.get("distances") or ()):
        yield f"distance/replica{replica}", value
    for knob in event.get("knobs") or ():
        values = knob.get("lrs") or knob.get("values") or ()
        kind = "lr" if "lrs" in knob else "knob"
        yield f"{kind}/{knob['name']}", knob.get("centre")
        yield f"scale/{knob['name']}", knob.get("scale")
        yield f"hypergradient/{knob['name']}", knob.get("hypergradient")
        for replica, value in enumerate(values):
            yield f"{kind}/{knob['name']}/replica{replica}", value


def _of_search(event: Mapping[str, Any]) -> Numbers:
    yield "scout/tried", len(event.get("points") or ())
    for key in ("factor", "within", "divergence"):
        yield f"scout/{key}", event.get(key)


def _of_guard(event: Mapping[str, Any]) -> Numbers:
    yield "guard/back_to", event.get("back_to")
    yield "guard/factor", event.get("factor")


def _of_note(event: Mapping[str, Any]) -> Numbers:
    for name, value in (event.get("measures") or {}).items():
        yield f"note/{name}", value


_NUMBERS = {"cycle": _of_cycle, "scout": _of_search, "guard": _of_guard, "note": _of_note}
