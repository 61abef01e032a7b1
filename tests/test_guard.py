"""Which replicas are fit."""

import math

import pytest

import hdet
from hdet.guard import triage


def test_a_replica_is_left_out_for_its_loss_or_its_weights() -> None:
    verdict = triage([1.0, math.inf, 1.0, None], [True, True, False, True], step=7)
    assert verdict.fit == (0, 3)
    assert verdict.excluded == {1: "loss is inf", 2: "weights are not finite"}


def test_when_none_is_left_the_error_says_so() -> None:
    with pytest.raises(hdet.ReplicasLost, match=r"no replica is left at step 7 .*replica 1: loss"):
        triage([math.nan, math.nan], [True, True], step=7)
