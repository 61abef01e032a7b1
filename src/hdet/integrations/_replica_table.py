"""The table of what the workers of a trainer report: one line for each replica."""

from collections.abc import Mapping, Sequence
from typing import Any

from hdet.integrations.tracking import scalars_of


class LastCycle:
    """A sink that keeps the numbers of the last cycle. The first worker has them."""

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def write(self, event: Mapping[str, Any]) -> None:
        """Keep the numbers of this event."""
        if event["event"] == "cycle":
            self.scalars = scalars_of(event)

    def close(self) -> None:
        """Do nothing."""


def replica_table(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of what all workers have reported.

    Args:
        metrics: The numbers of each worker, in the order of the ranks. Those of hdet are under the
            names of `hdet.integrations.tracking`, with the first replica of the worker under
            `hdet/replica` and the step under `hdet/step`.

    Returns:
        A head line, then one line for each replica, and one for the consensus.
    """
    first = metrics[0]
    groups = [n for n in first if n.startswith("hdet/lr/") and f"{n}/replica0" in first]
    size = sum(name.startswith(f"{groups[0]}/replica") for name in first)
    own = [n for n, v in first.items() if not n.startswith("hdet/") and isinstance(v, int | float)]
    kinds = [kind for kind in ("loss", "score") if f"hdet/{kind}/replica0" in first]
    columns = [n.removeprefix("hdet/") for n in groups] + own + [f"cycle {kind}" for kind in kinds]
    rows = [["replica", *columns]]
    for replica in range(size):
        worker = max(
            (one for one in metrics if one["hdet/replica"] <= replica),
            key=lambda one: one["hdet/replica"],
        )
        numbers = [first.get(f"{name}/replica{replica}") for name in groups]
        numbers += [worker.get(name) for name in own]
        numbers += [first.get(f"hdet/{kind}/replica{replica}") for kind in kinds]
        rows.append([f"{replica}", *map(_shown, numbers)])
    rows.append(["all", *(_shown(first[name]) for name in groups), *[""] * len(own + kinds)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
    scouting = ", scouting" if first["hdet/scouting"] else ""
    return "\n".join([f"step {first['hdet/step']}{scouting}", *lines])


def _shown(number: Any) -> str:
    return f"{number:.4g}" if isinstance(number, int | float) else ""
