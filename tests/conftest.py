"""Fixtures that several rooms share."""

from collections.abc import Iterator

import pytest
import torch

from tests.processes import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    pool = Processes()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _same_seed_for_every_test() -> None:
    torch.manual_seed(0)
