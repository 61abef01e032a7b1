"""Make a way to average ready on all processes, or say why it does not run."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.systems.tensor_sets import Place, Row, Shapes


def ready(prepare: Callable[[Shapes, Place], Row], shapes: Shapes, place: Place) -> Row:
    """A row that has run twice, and that was seen to average."""
    row = prepare(shapes, place)
    with torch.no_grad():
        for tensor in row.tensors:
            tensor.add_(place.rank)
    row.call()
    mean = 1 + row.way * (place.settings.processes - 1) / 2
    if any(bool((tensor - mean).abs().max() > 1e-6) for tensor in row.tensors):
        raise RuntimeError("the result is not the mean.")
    row.call()
    return row


def agreed(prepare: Callable[[], Row]) -> tuple[Row | None, str | None]:
    """A row, or what went wrong in the first process where something did."""
    row = mine = None
    try:
        row = prepare()
    except Exception as error:
        mine = f"{type(error).__name__}: {error}"
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return row, next((error for error in everyone if error), None)
