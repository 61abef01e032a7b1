"""SearchTrigger: why a learning-rate search starts."""

from collections.abc import Mapping
from enum import Enum
from typing import Any


class SearchTrigger(Enum):
    """Why a search starts."""

    START = "start"
    """The run starts."""
    REQUESTED = "requested"
    """The user calls `scout_again()` in the middle of the run."""
    NEW_DATA = "new_data"
    """The guard reports in the middle of the run that the data has changed."""

    @property
    def is_mid_run(self) -> bool:
        """Whether factors of the search are in units of the learning rate of the current step."""
        return self in (SearchTrigger.REQUESTED, SearchTrigger.NEW_DATA)


def trigger_to_state(trigger: SearchTrigger) -> dict[str, bool]:
    """The keys of a saved state that name the trigger; "late" names the rest of it.

    >>> trigger_to_state(SearchTrigger.START)
    {'unasked': False}
    """
    return {"unasked": trigger is SearchTrigger.NEW_DATA}


def trigger_of_state(state: Mapping[str, Any] | None) -> SearchTrigger:
    """The trigger of the search in a saved state; START without a state.

    >>> trigger_of_state({"late": {}, "unasked": True}), trigger_of_state(None)
    (<SearchTrigger.NEW_DATA: 'new_data'>, <SearchTrigger.START: 'start'>)
    """
    if state is None:
        return SearchTrigger.START
    if state.get("late") is not None:
        is_new_data = state.get("unasked", False)
        return SearchTrigger.NEW_DATA if is_new_data else SearchTrigger.REQUESTED
    return SearchTrigger.START
