"""Run every test of the integrations and write what they show -> integrations.json

    python -m tests.integrations [PYTEST ARGUMENTS]

The tables of docs/reference/trainers.md come from that file and are filled in. A run with arguments
of its own, or with failures, writes nothing.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.result_file import RESULTS, ROOT, write_result
from tests.integrations import features
from tools.fill_numbers import filled

PAGE = ROOT / "docs" / "reference" / "trainers.md"
ORDER = [text for name, text in vars(features).items() if name.isupper() and name != "REFUSED"]
"""What users ask for, in the order of the rows."""

PACKAGES = (
    "transformers",
    "axolotl",
    "lightning",
    "accelerate",
    "deepspeed",
    "ray",
    "torchtitan",
    "peft",
    "tensorboard",
    "wandb",
    "mlflow-skinny",
    "trackio",
)


def main(arguments: Sequence[str]) -> int:
    """Run the tests; return the exit status of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        shown = Path(folder) / "shown.json"
        ours = ["-q", "-m", "", f"--shown={shown}", *(arguments or ["tests/integrations"])]
        status = subprocess.run([sys.executable, "-m", "pytest", *ours], check=False).returncode
        if status == 0 and not arguments:
            write(json.loads(shown.read_text()))
            PAGE.write_text(filled(PAGE.read_text()))
    return status


def write(rows: Sequence[dict[str, Any]]) -> None:
    """Write the result file from what the tests have shown."""
    of_trackers = [row for row in rows if row["works"] == features.RECORDS]
    tables = {
        "trainers": works([row for row in rows if row not in of_trackers]),
        "trackers": works(of_trackers),
        "versions": [["Package", "Tested version"], *versions()],
    }
    write_result(
        RESULTS / "integrations.json",
        headline=headline(rows),
        settings={"packages": installed()},
        seeds=[],
        tables=tables,
        rows=rows,
    )


def headline(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {"frameworks": len({row["with"] for row in rows}), "shown": len(rows)}


def installed() -> dict[str, str]:
    """Package -> its version, of those that are there."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def versions() -> list[list[str]]:
    return [[package, number] for package, number in installed().items()]


def works(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The table: what works in the first column, then a column for each framework.

    A cell is empty where no test has passed, and `in part` where some cases work and others are
    refused.
    """
    said: dict[tuple[str, str], str] = {}
    for row in rows:
        if row["passed"]:
            what = row["works"].removesuffix(features.REFUSED)
            word = "yes" if row["works"] == what else "refused"
            cell = row["with"], what
            said[cell] = word if said.get(cell, word) == word else "in part"
    frameworks = sorted({name for name, _ in said}, key=str.lower)
    shown = sorted({what for _, what in said}, key=ORDER.index)
    body = [[what, *(said.get((name, what), "") for name in frameworks)] for what in shown]
    return [["", *frameworks], *body]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
