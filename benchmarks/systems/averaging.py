"""Ways to average tensors over processes: raw, by hdet, and by other libraries."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore

from benchmarks.systems.tensor_sets import Place, Row, Shapes, model_of, num_bytes, tensors_of
from hdet import HDET, PaperController, ProcessReplicas
from hdet.weights.inventory import WEIGHTS
from hdet.weights.replica_weights import ReplicaWeights

RAW, HEADLINE, WHOLE = "raw all-reduce", "hdet converge", "hdet, whole end of a cycle"
FOLLOWED = "hdet converge, outer optimizer"
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def raw(shapes: Shapes, place: Place) -> Row:
    """The floor: one message, no copy, no division."""
    flat = torch.full((num_bytes(shapes) // 4,), 1e-37)  # it doubles at every call
    return Row(lambda: dist.all_reduce(flat), [])


def flat_copy(shapes: Shapes, place: Place) -> Row:
    """The plain way: copy into one tensor, reduce, divide, copy back."""
    tensors = tensors_of(shapes)
    sizes = [tensor.numel() for tensor in tensors]

    def call() -> None:
        flat = torch.cat([tensor.view(-1) for tensor in tensors])
        dist.all_reduce(flat)
        flat.div_(place.settings.processes)
        for tensor, part in zip(tensors, torch.split(flat, sizes), strict=True):
            tensor.copy_(part.view_as(tensor))

    return Row(call, tensors)


def per_parameter(shapes: Shapes, place: Place) -> Row:
    tensors = tensors_of(shapes)

    def call() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor.div_(place.settings.processes)

    return Row(call, tensors)


def torch_averager(shapes: Shapes, place: Place) -> Row:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model = model_of(shapes)
    for parameter in model:
        parameter.grad = torch.zeros(()).expand_as(parameter)  # it skips those without gradient
    averager = PeriodicModelAverager(period=1)
    return Row(lambda: averager.average_parameters(model.parameters()), list(model))


def accelerate_local_sgd(shapes: Shapes, place: Place) -> Row:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    model = model_of(shapes)
    local_sgd = LocalSGD(Accelerator(cpu=True), model, local_sgd_steps=1)
    if not local_sgd.enabled:
        raise RuntimeError("Accelerate did not find the process group.")
    return Row(local_sgd.step, list(model))


def torchft_local_sgd(shapes: Shapes, place: Place) -> Row:
    """Quorum, all-reduce of a copy, vote and copy back, as LocalSGD does at a sync."""
    from torchft.local_sgd import LocalSGD

    model = model_of(shapes)
    manager = torchft_manager(model, place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local_sgd = LocalSGD(manager, model, optimizer, sync_every=1)
    return Row(local_sgd.sync, list(model), manager.shutdown)


def torchft_diloco(shapes: Shapes, place: Place) -> Row:
    """The same for what has changed since the last sync, and a step of the outer optimizer."""
    from torchft.local_sgd import DiLoCo

    model = model_of(shapes)
    manager = torchft_manager(model, place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # without gradients it does nothing
    diloco = DiLoCo(manager, [model], optimizer, OUTER(list(model)), sync_every=1)
    diloco.__enter__()

    def close() -> None:
        diloco.__exit__(None, None, None)
        manager.shutdown()

    return Row(optimizer.step, list(model), close, outer_way())


def outer_way() -> float:
    """The first step of Nesterov's momentum, in units of what has changed."""
    settings = OUTER.keywords
    return float(settings["lr"] * (1 + settings["momentum"]))


def torchft_manager(model: nn.Module, place: Place) -> Any:
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    if place.lighthouse is None:
        raise RuntimeError("torchft's lighthouse did not start.")
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=place.settings.processes,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=place.lighthouse,
        replica_id=f"replica_{place.rank}",
        hostname="localhost",
        init_sync=False,
    )
    manager.hdet_store = store  # the server ends with its last reference
    return manager


def hdet_converge(shapes: Shapes, place: Place) -> Row:
    """What the rows of Local SGD do too: the weights of a model, averaged."""
    model = model_of(shapes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replicas = ProcessReplicas(bucket_bytes=place.settings.bucket_bytes)
    parameters = ReplicaWeights(optimizer, model, replicas)
    everyone = range(place.settings.processes)

    def call() -> None:
        parameters.refresh()
        parameters.averager.average_(everyone, WEIGHTS, {})

    return Row(call, list(model))


def hdet_outer(shapes: Shapes, place: Place) -> Row:
    """What DiLoCo does: the same, a step of the outer optimizer, and a copy to set out from."""
    model = model_of(shapes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replicas = ProcessReplicas(bucket_bytes=place.settings.bucket_bytes)
    parameters = ReplicaWeights(optimizer, model, replicas, OUTER)
    everyone = range(place.settings.processes)
    optimizer.step()  # the first of a cycle copies what it sets out from; no gradient, no change

    def call() -> None:
        parameters.averager.note_step()
        parameters.refresh()
        parameters.averager.average_(everyone, WEIGHTS, {})
        optimizer.step()

    return Row(call, list(model), way=outer_way())


def hdet_cycle_end(shapes: Shapes, place: Place) -> Row:
    """And what they do not: losses exchanged, all weights checked, learning rates moved."""
    model = model_of(shapes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    base = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    optimizer.step()  # torch warns of schedules that are stepped before; no gradient, no change
    scheduler = HDET(
        base,
        model=model,
        spread=0.1,
        sync_every=1,
        controller=PaperController(),
        gradients="local",
        replicas=ProcessReplicas(bucket_bytes=place.settings.bucket_bytes),
    )
    loss = torch.tensor(2.0 + place.rank)
    return Row(lambda: scheduler.step(loss), list(model))


ROWS: dict[str, Callable[[Shapes, Place], Row]] = {
    RAW: raw,
    HEADLINE: hdet_converge,
    WHOLE: hdet_cycle_end,
    "flat copy": flat_copy,
    "one all-reduce per parameter": per_parameter,
    "torch PeriodicModelAverager": torch_averager,
    "Accelerate LocalSGD": accelerate_local_sgd,
    "torchft LocalSGD": torchft_local_sgd,
    FOLLOWED: hdet_outer,
    "torchft DiLoCo": torchft_diloco,
}
LIKE: dict[str, tuple[str, tuple[str, ...]]] = {
    "Local SGD": (
        HEADLINE,
        ("torch PeriodicModelAverager", "Accelerate LocalSGD", "torchft LocalSGD"),
    ),
    "DiLoCo": (FOLLOWED, ("torchft DiLoCo",)),
}
"""hdet's row -> those of other libraries that do the same."""
