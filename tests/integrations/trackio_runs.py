"""Runs that trackio records. Its folder is fixed when it is imported, so they need a process."""

import warnings
from typing import Any

import trackio
from trackio.context_vars import current_run

from hdet.integrations.trackio import TrackioSink
from tests.integrations.tracked import train

QUIET = {"auto_log_cpu": False, "auto_log_gpu": False, "embed": False}


def own() -> dict[str, Any]:
    """A run that the sink starts."""
    events = train(TrackioSink("own", name="small", **QUIET))
    is_ended = current_run.get() is None
    return {"points": events.points(), "texts": events.texts(), "is_ended": is_ended}


def others() -> dict[str, Any]:
    """A run that a trainer has begun, and one that trackio refuses."""
    run = trackio.init("trainers", name="begun", **QUIET)
    run.log({"train/loss": 0.5}, step=7)
    train(TrackioSink("another"))
    is_left_open = current_run.get() is run
    run.log({"train/loss": 0.25})
    trackio.finish()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        refused = train(TrackioSink("registry-of-trackio", **QUIET))
    return {
        "is_left_open": is_left_open,
        "warnings": [str(one.message) for one in seen],
        "cycles": len(refused.of("cycle")),
    }
