"""Reasons and triggers: members in the code, texts in records, and states of older versions."""

import json

import pytest

import hdet
from hdet.lr_search.estimator import Estimate
from hdet.lr_search.observations import Observation
from hdet.lr_search.plan import Search
from hdet.lr_search.reasons import Reason, describe, reasons_of_state
from hdet.lr_search.trigger import SearchTrigger, trigger_of_state, trigger_to_state


@pytest.mark.parametrize("reason", Reason)
def test_each_reason_is_read_from_its_value_and_has_a_text(reason: Reason) -> None:
    assert reasons_of_state([reason.value]) == (reason,)
    assert describe([reason])


def test_text_of_an_older_state_is_read_as_several_reasons() -> None:
    text = (
        "the lowest that gains nearly as much as the best, tried closely, "
        "lowered, since there was no time for longer rounds"
    )
    reasons = (Reason.NEARLY_BEST, Reason.REFINED, Reason.LOWERED_FOR_LONGER_ROUNDS)
    assert reasons_of_state(text) == reasons


@pytest.mark.parametrize("saved", ["a text of another version", ["a value of another version"]])
def test_unknown_reason_becomes_a_neutral_one(saved: str | list[str]) -> None:
    assert reasons_of_state(saved) == (Reason.UNKNOWN,)
    assert reasons_of_state("") == ()


def test_kept_learning_rate_names_the_factor_that_was_declined() -> None:
    kept = Estimate(1.0, Reason.GIVEN_IS_KEPT, declined=0.61234)
    assert kept.text == "the given learning rate is kept: 0.612 times it is not far enough off"


def test_search_continues_from_a_state_with_a_reason_text() -> None:
    def recorded() -> Search:
        search = Search(hdet.Scout(), num_replicas=8, total_steps=1500)
        search.record_round(
            [Observation(f, 2 - min(f, 1 / f) if f < 9 else 2 * f) for f in search.factors],
            None,
            2.0,
        )
        return search

    state = json.loads(json.dumps(recorded().state_dict()))
    assert state["rough"][2] == ["nearly_best"]
    state["rough"][2] = "the lowest that gains nearly as much as the best"
    search, other = recorded(), Search(hdet.Scout(), num_replicas=8, total_steps=1500)
    other.load_state_dict(state)
    for one in (search, other):
        one.record_round([Observation(f, 2.0, 0.5) for f in one.factors], None, 2.0)
        assert one.reasons == (Reason.NEARLY_BEST,)
    assert other.estimate() == search.estimate()


@pytest.mark.parametrize("trigger", SearchTrigger)
def test_trigger_is_read_from_the_flags_of_a_state(trigger: SearchTrigger) -> None:
    state = dict[str, object](trigger_to_state(trigger))
    if trigger.is_mid_run:
        state["late"] = {"scout": {}, "total_steps": None}
    assert trigger_of_state(state) is trigger


def test_state_without_flags_is_of_a_search_at_the_start() -> None:
    assert trigger_of_state({"used": 3}) is SearchTrigger.START
    assert trigger_of_state({"late": {"total_steps": 9}}) is SearchTrigger.REQUESTED
