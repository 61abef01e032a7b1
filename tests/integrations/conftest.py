"""What the tests of integrations show, written to a file for the table of the docs."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

SHOWN: dict[tuple[str, str], bool] = {}
"""(framework, what works) -> whether every test that shows it has passed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shown", type=Path, help="where to write what the tests have shown")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment]
    if report.when == "call" or report.failed:
        for marker in item.iter_markers("works"):
            key = marker.args[0], marker.args[1]
            SHOWN[key] = SHOWN.get(key, True) and report.passed
    return report  # type: ignore[return-value]


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--shown", default=None)
    if path is not None:
        rows = [{"with": a, "works": b, "passed": ok} for (a, b), ok in sorted(SHOWN.items())]
        path.write_text(json.dumps(rows, indent=1))
