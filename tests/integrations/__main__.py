"""Run every test of the integrations and write what they show -> integrations.json

    python -m tests.integrations [PYTEST ARGUMENTS]

The table of what works with what comes from that file. A run with arguments of its own, or with
failures, writes nothing.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.result_file import RESULTS, write_result
from tests.integrations.features import REFUSED

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
    return status


def write(rows: Sequence[dict[str, Any]]) -> None:
    """Write the result file from what the tests have shown."""
    write_result(
        RESULTS / "integrations.json",
        headline={"frameworks": len({row["with"] for row in rows}), "shown": len(rows)},
        settings={"packages": installed()},
        seeds=[],
        tables={"works": works(rows), "versions": [["Package", "Tested version"], *versions()]},
        rows=rows,
    )


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
    return [[f"`{package}`", number] for package, number in installed().items()]


def works(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The table: what works in the first column, then a column for each framework."""
    said = {}
    for row in rows:
        what = row["works"].removesuffix(REFUSED)
        said[row["with"], what] = "refused" if row["works"] != what else "yes"
    frameworks = sorted({name for name, _ in said})
    features = dict.fromkeys(what for _, what in said)
    body = [[what, *(said.get((name, what), "") for name in frameworks)] for what in features]
    return [["", *frameworks], *body]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
