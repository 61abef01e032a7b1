"""Frozen numbers: how they are written as JSON, and how close a replay must come to them."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hdet.records.codec import modernise
from tests.contracts.scout_reasons import members_of

DATA = Path(__file__).parents[1] / "data"
RELATIVE, ABSOLUTE = 1e-10, 1e-12
PURELY_RELATIVE = {"lrs", "centre", "last_lr", "knob_values", "values", "scale"}
"""Settings of a run can be as small as the absolute tolerance."""
SCOUT_TEXTS = {"reason": "reasons", "factor_reason": "factor_reasons"}
"""The texts of a scout in a line of a record, and the lists of reasons that replace them."""
EXACT_TEXTS = {"event", "name", "names", "groups", "decision", "space", "kind"}
EXACT_TEXTS |= set(SCOUT_TEXTS.values())
"""All other texts are messages, which may be worded anew."""
TIMES = {"time", "seconds", "versions"}
OF_TORCH = {
    "verbose",
    "foreach",
    "fused",
    "maximize",
    "capturable",
    "differentiable",
    "decoupled_weight_decay",
}
LEFT_OUT = TIMES | OF_TORCH
"""They change from one machine, or from one version of torch, to the next."""


def plain(value: Any) -> Any:
    """As JSON has it, without times and without what torch keeps private in its schedules."""
    if isinstance(value, dict):
        entries = {str(key): entry for key, entry in value.items()}
        return {
            key: plain(entry)
            for key, entry in entries.items()
            if key not in LEFT_OUT and not key.startswith("_")
        }
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.15g}")
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain(value), separators=(",", ":")) + "\n", encoding="utf-8")


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def differences(want: Any, got: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Where two plain values differ, each as one line."""
    if isinstance(want, dict) and isinstance(got, dict):
        for key in sorted(want.keys() ^ got.keys()):
            yield f"{'/'.join(path)}: {key!r} is in one of them alone"
        for key in want.keys() & got.keys():
            yield from differences(want[key], got[key], (*path, key))
    elif isinstance(want, list) and isinstance(got, list):
        if len(want) != len(got):
            yield f"{'/'.join(path)}: {len(want)} entries, now {len(got)}"
        for place, pair in enumerate(zip(want, got, strict=False)):
            yield from differences(*pair, (*path, str(place)))
    elif not _agree(want, got, path):
        yield f"{'/'.join(path)}: {want!r}, now {got!r}"


def _agree(want: Any, got: Any, path: tuple[str, ...]) -> bool:
    if isinstance(want, str) and isinstance(got, str):
        exact = any(part in EXACT_TEXTS for part in path[-2:])
        return want == got or not exact
    numbers = (int, float)
    if isinstance(want, bool) or not isinstance(want, numbers) or not isinstance(got, numbers):
        return type(want) is type(got) and want == got
    if math.isnan(want):
        return math.isnan(got)
    smallest = 0.0 if PURELY_RELATIVE.intersection(path) else ABSOLUTE
    return math.isclose(want, got, rel_tol=RELATIVE, abs_tol=smallest)


def _modern(value: Any) -> Any:
    """Lines of records in today's schema, in which a null and a missing key say the same."""
    if isinstance(value, list):
        return [_modern(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if "schema" not in value:
        return {key: _modern(entry) for key, entry in value.items()}
    return _with_reasons(_without_nulls(modernise(value)))


def _with_reasons(line: dict[str, Any]) -> dict[str, Any]:
    """A line whose texts of a scout are lists of reasons, which do not depend on the wording."""
    if line["event"] != "scout":
        return line
    texts = {key: line[key] for key in SCOUT_TEXTS if key in line}
    lists = {SCOUT_TEXTS[key]: members_of(text) for key, text in texts.items()}
    return {key: value for key, value in line.items() if key not in texts} | lists


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}


def check(want: Any, got: Any) -> None:
    """Fail with the first differences."""
    found = list(differences(_modern(want), _modern(plain(got))))
    assert not found, "\n".join([f"{len(found)} numbers differ:", *found[:20]])
