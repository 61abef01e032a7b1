"""A sink for the tests of integrations."""

from collections.abc import Mapping
from typing import Any


class Events:
    """Keeps the events of a run."""

    def __init__(self) -> None:
        self.all: list[Mapping[str, Any]] = []

    def write(self, event: Mapping[str, Any]) -> None:
        self.all.append(event)

    def close(self) -> None:
        """Keep them."""

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [event for event in self.all if event["event"] == kind]
