"""The usual learning rates of optimizers."""

import pytest

from hdet.lr_search.constants import (
    ADAFACTOR_PRIOR,
    ADAM_PRIOR,
    GAIN_SIZE,
    LION_PRIOR,
    MUON_PRIOR,
    PRIOR_ERROR,
    SGD_MOMENTUM_PRIOR,
    SGD_PRIOR,
    SIZE_POWER,
    USUAL_SIZE,
)
from hdet.lr_search.prior import Prior, prior_of, prior_of_members


@pytest.mark.parametrize(
    ("name", "mean"),
    [
        ("Adam", ADAM_PRIOR),
        ("AdamW", ADAM_PRIOR),
        ("NAdam", ADAM_PRIOR),
        ("FusedAdam", ADAM_PRIOR),
        ("AdamWScheduleFree", ADAM_PRIOR),
        ("Adafactor", ADAFACTOR_PRIOR),
        ("Lamb", ADAM_PRIOR),
        ("Lion", LION_PRIOR),
        ("Muon", MUON_PRIOR),
        ("SGD", SGD_PRIOR),
    ],
)
def test_optimizer_family_gives_the_prior_of_a_small_model(name: str, mean: float) -> None:
    assert prior_of(name) == Prior(mean, PRIOR_ERROR)
    assert prior_of(name, num_parameters=int(USUAL_SIZE)) == Prior(mean, PRIOR_ERROR)


@pytest.mark.parametrize(
    "name", ["MyOwn", "RMSprop", "Adagrad", "DAdaptAdam", "DAdaptSGD", "Prodigy", "LDoG", ""]
)
def test_unknown_optimizer_and_one_with_a_learning_rate_of_its_own_have_no_prior(name: str) -> None:
    assert prior_of(name) is None


def test_momentum_lowers_the_prior_of_sgd_only() -> None:
    known = prior_of("SGD", momentum=0.9)
    assert known is not None
    assert known.mean == SGD_MOMENTUM_PRIOR < SGD_PRIOR
    assert prior_of("AdamW", momentum=0.9) == prior_of("AdamW")


def test_larger_models_have_a_lower_and_less_certain_prior() -> None:
    priors = [prior_of("AdamW", num_parameters=10**power) for power in (3, 4, 5, 6, 8, 11)]
    means = [prior.mean for prior in priors if prior is not None]
    errors = [prior.error for prior in priors if prior is not None]
    assert len(means) == 6
    assert means == sorted(means, reverse=True)
    assert errors == sorted(errors)
    assert means[0] == means[1] == ADAM_PRIOR
    assert means[3] - means[4] == pytest.approx(2 * SIZE_POWER)


def test_prior_says_how_much_larger_a_model_is_than_those_whose_gains_are_known() -> None:
    known = [prior_of("AdamW", num_parameters=int(num)) for num in (0, 1e3, GAIN_SIZE, 1e8)]
    assert [prior.decades for prior in known if prior is not None] == [0.0, 0.0, 0.0, 2.0]


def test_size_does_not_change_the_prior_of_sgd() -> None:
    assert prior_of("SGD", num_parameters=10**9) == prior_of("SGD")


def test_prior_of_several_optimizers_is_their_mean_by_parameters() -> None:
    found = prior_of_members([(Prior(0.0, 0.3), 300), (Prior(2.0, 0.4, 1.5), 100)])
    assert found is not None
    assert found.mean == pytest.approx(0.5)
    variance = (3 * (0.3**2 + 0.5**2) + 0.4**2 + 1.5**2) / 4
    assert found.error == pytest.approx(variance**0.5)
    assert found.decades == 1.5


def test_optimizers_that_agree_are_as_sure_together_as_each_alone() -> None:
    found = prior_of_members([(Prior(1.0, 0.3), 10), (Prior(1.0, 0.3), 30)])
    assert found is not None
    assert found == pytest.approx((1.0, 0.3, 0.0))


def test_prior_says_less_where_an_optimizer_is_unknown() -> None:
    found = prior_of_members([(Prior(1.0, 0.3), 25), (None, 75)])
    assert found is not None
    assert found == pytest.approx((1.0, 0.6, 0.0))
    assert prior_of_members([(None, 10), (None, 20)]) is None
    # A single optimizer keeps its prior, also one whose parameters are all frozen.
    assert prior_of_members([(Prior(1.0, 0.3), 0)]) == Prior(1.0, 0.3)
