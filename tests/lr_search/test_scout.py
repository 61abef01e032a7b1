"""The settings of a search: which values are refused."""

import pytest

import hdet
from hdet.lr_search.constants import MIN_ROUND_STEPS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decades": 0}, "`decades` must be in"),
        ({"decades": 400}, "`decades` must be in"),
        ({"decades": float("nan")}, "`decades` must be in"),
        ({"share": 1.5}, "`share` must be in"),
        ({"share": 0.0}, "`share` must be in"),
        ({"steps": MIN_ROUND_STEPS - 1}, f"`steps` must be at least {MIN_ROUND_STEPS}"),
    ],
)
def test_scout_refuses_numbers_out_of_range(options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hdet.Scout(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("flag", ["rewind", "restart"])
def test_scout_refuses_flags_that_are_no_bool(flag: str) -> None:
    with pytest.raises(TypeError, match=f"`{flag}`"):
        hdet.Scout(**{flag: "yes"})  # type: ignore[arg-type]


def test_scout_takes_its_settings_by_name_only() -> None:
    with pytest.raises(TypeError):
        hdet.Scout(4.0)  # type: ignore[call-arg]
