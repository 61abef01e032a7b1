"""Evaluation and resumption of loops of the user's own, under the adapters that leave them."""

from typing import Any

import pytest

from tests.integrations.features import EVALUATES, RESUMES, RESUMES_SCOUT
from tests.integrations.launch import launch
from tests.integrations.own_loop import IN_CYCLE

FRAMEWORKS = {"Accelerate": "accelerate_runs", "DeepSpeed": "deepspeed_runs"}


def showing(feature: str) -> Any:
    """Parametrize a test by framework; it shows that the feature works with each."""
    cases = [
        pytest.param(module, marks=pytest.mark.works(name, feature), id=name)
        for name, module in FRAMEWORKS.items()
    ]
    return pytest.mark.parametrize("resumed", cases, indirect=True)


@pytest.fixture(scope="module")
def resumed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    return launch(f"tests.integrations.{request.param}:resumes", folder=str(folder))


@pytest.mark.integrations
@showing(EVALUATES)
def test_evaluation_in_mid_cycle_shows_the_consensus(resumed: list[dict[str, Any]]) -> None:
    assert resumed[0]["mid-cycle"] != resumed[1]["mid-cycle"]
    assert resumed[0]["consensus"] == resumed[1]["consensus"] == resumed[0]["saved"]
    assert [one["after consensus"] for one in resumed] == [one["mid-cycle"] for one in resumed]


@pytest.mark.integrations
@showing(RESUMES_SCOUT)
def test_run_resumed_in_mid_scout_is_equal_bit_for_bit(resumed: list[dict[str, Any]]) -> None:
    for found in resumed:
        assert found["scouting"]
        assert found["still scouting"]
        assert found["end from scout"] == found["end"]


@pytest.mark.integrations
@showing(RESUMES)
def test_run_resumed_in_mid_cycle_is_equal_bit_for_bit(resumed: list[dict[str, Any]]) -> None:
    for found in resumed:
        assert found["clock"] == IN_CYCLE
        assert found["end from cycle"] == found["end"]
