"""Result files: what every benchmark writes into results/, and the one place that writes it.

A result file says what it was made with (commit, date, device, versions), the seeds and settings of
its runs, a flat headline of the numbers that pages quote, and the rows that these are computed
from. `tools/fill_numbers.py` copies headlines into Markdown.
"""

import json
import math
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

import hdet

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SEVERAL = "The rows come from several commits. This one added the last of them."


def write_result(
    path: Path,
    *,
    headline: Mapping[str, Any],
    settings: Mapping[str, Any],
    seeds: Sequence[int],
    kept: Mapping[str, Any] | None = None,
    **parts: Any,
) -> dict[str, Any]:
    """Write a result file, and return what it says.

    Args:
        path: The file.
        headline: The numbers that pages quote. Tables in it are made flat.
        settings: What the runs have in common.
        seeds: The seeds of the runs, without those that only pick a reference.
        kept: The earlier result, if some of its rows are still in `parts`.
        parts: The rows, by whatever name the benchmark gives them.
    """
    made = made_with()
    if kept:
        devices = dict.fromkeys([*str(kept.get("device", "unknown")).split("; "), made["device"]])
        made["device"] = "; ".join(devices)
        if "commit_note" in kept or kept.get("commit", made["commit"]) != made["commit"]:
            made["commit_note"] = SEVERAL
    result: dict[str, Any] = plain_json(
        {
            "headline": flat(headline),
            **made,
            "seeds": list(seeds),
            "settings": dict(settings),
            **parts,
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(result))
    return result


def summarise_again(path: Path, *, headline: Mapping[str, Any], **parts: Any) -> None:
    """Write the headline and the tables of a result anew; what its rows were made with stays."""
    result = read_result(path) | plain_json({"headline": flat(headline), **parts})
    path.write_text(text_of(result))


def read_result(path: Path) -> dict[str, Any]:
    """What a result file says, or nothing where there is no file."""
    outcome: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return outcome


def made_with() -> dict[str, Any]:
    """What a result is made with: commit, date, device and versions."""
    return {
        "commit": commit(),
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "hdet": hdet.__version__,
        },
    }


def commit() -> str:
    """The commit of the working tree, with "+" if its code differs from it."""
    head = _git("rev-parse", "--short=10", "HEAD")
    if not head:
        return "unknown"
    changed = _git("status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results")
    return head + ("+" if changed else "")


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:  # a machine without git
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """One level of keys, each a word that a marker on a page can name."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = "_".join(filter(None, [before, word_of(key)]))
        if isinstance(value, Mapping):
            found |= flat(value, name)
        else:
            found[name] = value
    return found


def word_of(key: str) -> str:
    """A key in lower case, with underscores for all that is no letter and no digit.

    >>> word_of("ranking, feed: 3 % fewer")
    'ranking_feed_3_pct_fewer'
    """
    return re.sub(r"[^a-z0-9]+", "_", key.lower().replace("%", " pct ")).strip("_")


def plain_json(value: Any) -> Any:
    """Seven digits, and null for what is not finite."""
    if isinstance(value, Mapping):
        return {key: plain_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


def text_of(result: Mapping[str, Any]) -> str:
    """JSON with one line for each entry of a table and each row of a list."""
    lines = []
    for key, value in result.items():
        if isinstance(value, Mapping) and value:
            inside = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items()]
            text = "{\n" + ",\n".join(inside) + "\n }"
        elif isinstance(value, (list, tuple)) and any(isinstance(v, (dict, list)) for v in value):
            text = "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n ]"
        else:
            text = json.dumps(value)
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
