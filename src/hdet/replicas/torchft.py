"""TorchftReplicas: replicas that join and leave, over a torchft manager.

At the end of every cycle the replicas that take part synchronize. Torchft has given a new replica
the state of another one. The others do not wait for a replica that has left. If a replica leaves
during a synchronization, the others restore the weights they had before it.

Gradients are local, or torchft's own DDP shares them. With shared gradients torchft asks at every
step who takes part. A new replica then trains along, and gets its own hyperparameters at the next
synchronization. The replicas of the last step synchronize: a new replica would take another quorum
for that of a training step.
"""

import pickle
import random
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.optim import Optimizer

from hdet._validation import check_integer
from hdet.replicas.collectives import CollectiveReplicas
from hdet.replicas.protocol import Capabilities, Interrupted, Members, Rows

REQUIRED_MEMBERS = (
    "start_quorum",
    "should_commit",
    "allreduce",
    "errored",
    "num_participants",
    "participating_rank",
    "register_state_dict_fn",
    "_pg",
    "_quorum_id",
)
"""What `TorchftReplicas` uses of a manager."""


class TorchftReplicas(CollectiveReplicas):
    """One replica in each replica group of a torchft manager.

    Replicas join and leave during the run. Register the states of model and optimizer at the
    manager (`manager.register_state_dict_fn`); hdet adds its own state.

    Args:
        manager: A `torchft.Manager` with `use_async_quorum=False`, and a `quorum_timeout` that is
            longer than a cycle. Its replica groups have one process each.
        bucket_bytes: The memory that an average may use beside the model, in bytes.

    Raises:
        TypeError: `manager` is no torchft manager.
        ValueError: The manager finds its quorum asynchronously, or its replica groups have several
            processes, or `bucket_bytes` is too small.

    Example:
        >>> import hdet, torch
        >>> def main(manager, model, base, loader):  # in every replica group
        ...     scheduler = hdet.HDET(
        ...         base,
        ...         model=model,
        ...         gradients="local",
        ...         scout=None,
        ...         replicas=hdet.TorchftReplicas(manager),
        ...     )
        ...     for x, y in loader:
        ...         base.optimizer.zero_grad()
        ...         loss = torch.nn.functional.cross_entropy(model(x), y)
        ...         loss.backward()
        ...         base.optimizer.step()
        ...         scheduler.step(loss)
    """

    capabilities = Capabilities(is_elastic=True)

    def __init__(self, manager: Any, *, bucket_bytes: int = 64 << 20) -> None:
        if missing := [name for name in REQUIRED_MEMBERS if not hasattr(manager, name)]:
            raise TypeError(
                f"`manager` must be a torchft.Manager, got a {type(manager).__name__} without "
                f"{', '.join(missing)}."
            )
        if getattr(manager, "_use_async_quorum", False):
            raise ValueError(
                "`manager` must be made with use_async_quorum=False, got True. A replica that "
                "recovers must have the weights of the others before the average."
            )
        if getattr(manager, "_group_world_size", 1) > 1:
            raise ValueError(
                "`manager` must belong to a replica group of one process, got "
                f"{manager._group_world_size} processes."
            )
        check_integer("bucket_bytes", bucket_bytes, at_least=1024)
        device = "cuda" if "nccl" in str(manager._pg.getBackendName()).lower() else "cpu"
        super().__init__(bucket_bytes, [device])
        self._manager = manager
        self.size = max(int(getattr(manager, "_min_replica_size", 2)), 2)
        """The expected number of replicas before the first synchronization, the real one after."""
        self.local = range(1)
        self._name = float(random.SystemRandom().getrandbits(52))
        self._last_members: tuple[float, ...] = ()
        """The names of the replicas at the last synchronization that counted."""
        self._members: tuple[float, ...] = ()
        """The names of the replicas that take part now."""
        self.has_healed = False
        """Whether it got the state of another replica and has not synchronized since."""
        self.first_step = 0
        """The step at which this replica and those that started with it began."""
        self.shared = False
        """Whether the training loop averages gradients over the replicas at every step."""
        self._quorum = -1
        """Torchft's number of the quorum at the last synchronization."""

    # The ElasticReplicas protocol ------------------------------------------------------------

    @property
    def have_synced(self) -> bool:
        return bool(self._last_members)

    @property
    def are_members_unchanged(self) -> bool:
        return self.have_synced and self._quorum == self._manager._quorum_id

    def wraps(self, optimizer: Optimizer) -> bool:
        return _is_of_torchft(optimizer)

    def shares_gradients_of(self, model: nn.Module | None) -> bool:
        return _shares_gradients(model)

    def must_sync(self, step: int) -> bool:
        # With shared gradients all replicas know the step, and a new one waits for the cycle's end.
        return step == self.first_step + 1 if self.shared else not self.have_synced

    def register(self, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        def heal(state: Any) -> None:
            load(state["run"])
            self.first_step, self.has_healed = state["begins"], True

        def state() -> Any:
            return {"run": save(), "begins": self.first_step}

        try:
            self._manager.register_state_dict_fn("hdet", heal, state)
        except AssertionError as error:
            raise ValueError("`manager` must have one hdet scheduler, got a second one.") from error

    def start_quorum(self, *, anew: bool = False) -> None:
        if anew or not self.shared:  # with shared gradients the quorum of the last step counts
            self._manager.start_quorum()
        place = self._manager.participating_rank()
        if place is None:
            raise RuntimeError(
                "this replica is a torchft spare, and hdet needs all replicas to take part. Use a "
                "manager without spares."
            )
        self.size, self.local = self._manager.num_participants(), range(place, place + 1)

    def check_members(self) -> Members:
        row = [[self._name, _digest(self._last_members), float(self.has_healed)]]
        table = self.gather(torch.tensor(row, dtype=torch.float64)).tolist()
        self._members = tuple(name for name, _, _ in table)
        is_new = [bool(healed) or last == _digest(()) for _, last, healed in table]
        return Members(
            any(bool(healed) or last != _digest(self._members) for _, last, healed in table),
            tuple(r for r, new in enumerate(is_new) if new) if not all(is_new) else (),
        )

    def commit(self) -> bool:
        went_well = bool(self._manager.should_commit())  # torchft heals a replica where it did not
        if went_well:
            self._last_members, self.has_healed = self._members, False
            self._quorum = self._manager._quorum_id
        return went_well

    # The Replicas protocol -------------------------------------------------------------------

    def begin_reduce(self, wire: Tensor, op: Any) -> "_CheckedWork":
        return _CheckedWork(self._manager, self._manager.allreduce(wire, reduce_op=op))

    def gather(self, rows: Tensor) -> Tensor:
        table = torch.zeros(
            self.size, *rows.shape[1:], dtype=rows.dtype, device=self._wire_device(rows.device)
        )
        table[self.local[0]] = rows[0]
        self.begin_reduce(table, ReduceOp.SUM).wait()
        return table

    def gather_objects(self, description: Any) -> list[Any]:
        if not self.have_synced:  # others may be in the middle of their run and cannot answer
            return [description]
        encoded = torch.frombuffer(bytearray(pickle.dumps(description)), dtype=torch.uint8)
        sizes = self.gather(torch.tensor([[len(encoded)]]))[:, 0].tolist()
        row = torch.zeros(1, max(sizes), dtype=torch.uint8)
        row[0, : len(encoded)] = encoded
        rows = self.gather(row).cpu()
        return [pickle.loads(bytes(r[:n].tolist())) for r, n in zip(rows, sizes, strict=True)]

    def copy_(self, rows: Rows, source: int, targets: Sequence[int]) -> int:
        num_bytes = 0
        for bucket in self._buckets.of(rows[0]).buckets:
            own = bucket.load()
            wire = own.clone() if self.local[0] == source else torch.zeros_like(own)
            self.begin_reduce(wire, ReduceOp.SUM).wait()
            if self.local[0] in targets:
                own.copy_(wire)
                bucket.store()
            num_bytes += wire.nbytes
        return num_bytes

    def share_gradients(self, model: nn.Module, shared: bool) -> bool:
        self.shared = shared  # torchft's own DDP averages them, so there is nothing to switch
        return True


def _shares_gradients(model: nn.Module | None) -> bool:
    """Whether torchft's DDP averages the gradients of a model at every step."""
    return model is not None and any(map(_is_of_torchft, model.modules()))


def _is_of_torchft(thing: Any) -> bool:
    return any(kind.__module__.startswith("torchft.") for kind in type(thing).__mro__)


class _CheckedWork:
    """A collective of torchft that raises its errors.

    Torchft's manager keeps an error and returns numbers that do not count.
    """

    def __init__(self, manager: Any, work: Any) -> None:
        self._manager, self._work = manager, work

    def wait(self) -> None:
        self._work.wait()
        if error := self._manager.errored():
            reason = str(getattr(error, "original_exception", error)).splitlines()
            raise Interrupted(f"a replica has left: {reason[0] if reason else error!r}")


def _digest(names: Sequence[float]) -> float:
    """A number that stands for a list of names, exact in a float64."""
    return float(int.from_bytes(sha256(repr(tuple(names)).encode()).digest()[:6], "big"))
