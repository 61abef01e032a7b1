"""Fixtures that several rooms share."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.processes import Processes

# A busy machine is no failure.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    pool = Processes()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _same_seed_for_every_test() -> None:
    torch.manual_seed(0)
