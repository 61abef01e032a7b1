"""Reasons of a decision: members in the code, texts in records."""

import pytest

from hdet.lr_search.estimator import Estimate
from hdet.lr_search.reasons import Reason, describe


@pytest.mark.parametrize("reason", Reason)
def test_each_reason_is_read_from_its_value_and_has_a_text(reason: Reason) -> None:
    assert Reason(reason.value) is reason
    assert describe([reason])


def test_texts_of_reasons_differ() -> None:
    assert len({describe([reason]) for reason in Reason}) == len(Reason)


def test_text_of_several_reasons_names_them_in_order() -> None:
    text = describe([Reason.NO_TIME, Reason.BEST_NOT_IN_LAST_ROUND])
    first, second = describe([Reason.NO_TIME]), describe([Reason.BEST_NOT_IN_LAST_ROUND])
    assert text == f"{first}, {second}"
    assert describe([]) == ""


def test_kept_learning_rate_names_the_factor_that_was_declined() -> None:
    kept = Estimate(1.0, Reason.GIVEN_IS_KEPT, declined=0.61234)
    assert kept.text == "the given learning rate is kept: 0.612 times it is not far enough off"
