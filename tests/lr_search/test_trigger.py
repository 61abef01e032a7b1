"""Why a search starts, and how a saved state tells it."""

import pytest

from hdet.lr_search.trigger import SearchTrigger, trigger_of_state, trigger_to_state


@pytest.mark.parametrize("trigger", SearchTrigger)
def test_trigger_is_read_from_the_flags_of_a_state(trigger: SearchTrigger) -> None:
    state = dict[str, object](trigger_to_state(trigger))
    if trigger.is_mid_run:
        state["late"] = {"scout": {}, "total_steps": None}
    assert trigger_of_state(state) is trigger


def test_state_without_flags_is_of_a_search_at_the_start() -> None:
    assert trigger_of_state({"used": 3}) is SearchTrigger.START
    assert trigger_of_state({"late": {"total_steps": 9}}) is SearchTrigger.REQUESTED
