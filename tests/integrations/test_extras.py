"""What every adapter has in common: errors for missing packages, and no import before its use."""

import pytest

from hdet.integrations._extras import extra


def test_missing_package_names_the_extra_to_install() -> None:
    with (
        pytest.raises(ModuleNotFoundError, match=r"`not_there`.*pip install 'hdet\[trackers\]'"),
        extra("trackers"),
    ):
        import not_there  # type: ignore[import-not-found]  # noqa: F401
