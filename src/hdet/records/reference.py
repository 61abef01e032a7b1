"""Reference: results of other runs, beside the record of a run. A report draws them as a band.

Plain Python, no torch and no plotly.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE_NAME = "reference.json"
"""The name of the file in the folder of a run."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What a run is compared with, such as the best of a sweep.

    Attributes:
        name: The name of the task. A report draws runs with the same name together.
        text: Where the results come from.
        runs: What they cost, in runs.
        lr: Their learning rate.
        bands: The lowest and the highest final result, for each measure.

    >>> Reference(name="a", text="best of 9 runs", bands={"loss": (0.1, 0.2)}).bands["loss"]
    (0.1, 0.2)
    """

    name: str
    text: str
    runs: int | None = None
    lr: float | None = None
    bands: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def write(self, folder: str | Path) -> None:
        """Write it into the folder of a run."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        table = {"name": self.name, "text": self.text, "runs": self.runs, "lr": self.lr}
        text = json.dumps({**table, "bands": {k: list(v) for k, v in self.bands.items()}})
        (Path(folder) / FILE_NAME).write_text(text + "\n", encoding="utf-8")


def read_reference(folder: Path) -> Reference | None:
    """The reference in the folder of a run; None without a file that can be used."""
    try:
        table = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        name, text = table["name"], table["text"]
        bands = {str(key): _band(band) for key, band in table["bands"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(name, str) or not isinstance(text, str):
        return None
    runs, lr = table.get("runs"), table.get("lr")
    return Reference(
        name=name,
        text=text,
        runs=runs if isinstance(runs, int) else None,
        lr=lr if isinstance(lr, float) else None,
        bands=bands,
    )


def _band(value: Any) -> tuple[float, float]:
    low, high = (float(end) for end in value)
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ValueError
    return low, high
