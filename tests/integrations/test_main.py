"""The table of what works with what."""

from typing import Any

from tests.integrations.__main__ import PAGE, works
from tests.integrations.features import ACCUMULATES, FINDS, REFUSED, STACKED


def row(framework: str, what: str, passed: bool = True) -> dict[str, Any]:
    return {"with": framework, "works": what, "passed": passed}


def test_table_has_a_column_for_each_framework_and_rows_in_the_order_of_the_features() -> None:
    rows = [row("axolotl", ACCUMULATES), row("Ray Train", FINDS), row("Ray Train", ACCUMULATES)]
    assert works(rows) == [
        ["", "axolotl", "Ray Train"],
        [FINDS, "", "yes"],
        [ACCUMULATES, "yes", "yes"],
    ]


def test_table_says_what_is_refused_and_what_works_in_part() -> None:
    rows = [row("A", STACKED + REFUSED), row("B", STACKED), row("B", STACKED + REFUSED)]
    assert works(rows) == [["", "A", "B"], [STACKED, "refused", "in part"]]


def test_table_leaves_out_what_did_not_pass() -> None:
    assert works([row("A", FINDS, passed=False), row("B", FINDS)]) == [["", "B"], [FINDS, "yes"]]


def test_page_has_all_tables_of_the_result_file() -> None:
    text = PAGE.read_text()
    for table in ("trainers", "trackers", "versions"):
        assert f"<!--t integrations.json:tables.{table}-->\n" in text
