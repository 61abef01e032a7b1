"""Replicas that come and go: over a torchft manager, which knows who takes part.

At the end of every cycle whoever is there meets. Somebody new has been given the state of one of
the others by torchft; somebody who has gone is not waited for. If one leaves in the middle of it,
the others find out at the end, and the meeting never was: they have their weights of before.
Gradients are local, or shared by torchft's own DDP. Then torchft asks at every step who is there;
somebody new trains along, without a place in the spread until the next meeting; and those meet who
have made the last step together, since a newcomer would take a quorum for that of a step.
"""

import pickle
import random
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from hdet._validation import check_integer
from hdet.replicas.collectives import CollectiveReplicas
from hdet.replicas.protocol import Rows

WANTED = (
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


class Interrupted(RuntimeError):
    """A replica has left in the middle of a meeting."""


class Members(NamedTuple):
    """Who takes part from now on."""

    have_changed: bool
    """Since the last meeting."""
    newcomers: tuple[int, ...]
    """Those who have the weights of another one, and have not trained with the others."""


class TorchftReplicas(CollectiveReplicas):
    """One replica in each replica group of a torchft manager, as many as there are.

    The manager must find its quorum at once (`use_async_quorum=False`), with a `quorum_timeout`
    that is longer than a cycle, and be given the states of model and optimizer
    (`manager.register_state_dict_fn`); hdet adds its own.
    """

    def __init__(self, manager: Any, *, bucket_bytes: int = 64 << 20) -> None:
        if missing := [name for name in WANTED if not hasattr(manager, name)]:
            raise TypeError(
                f"`manager` must be a torchft.Manager, got a {type(manager).__name__} without "
                f"{', '.join(missing)}."
            )
        if getattr(manager, "_use_async_quorum", False):
            raise ValueError(
                "`manager` must be made with use_async_quorum=False, got True: whoever heals would "
                "not have the weights of the others when they meet."
            )
        if getattr(manager, "_group_world_size", 1) > 1:
            raise ValueError(
                "`manager` must be that of a replica group of one process, got "
                f"{manager._group_world_size} processes."
            )
        check_integer("bucket_bytes", bucket_bytes, at_least=1024)
        device = "cuda" if "nccl" in str(manager._pg.getBackendName()).lower() else "cpu"
        super().__init__(bucket_bytes, [device])
        self._manager = manager
        self.size = max(int(getattr(manager, "_min_replica_size", 2)), 2)
        """Of those that are expected, until they have met."""
        self.local = range(1)
        self._name = float(random.SystemRandom().getrandbits(52))
        self._met: tuple[float, ...] = ()
        self._now: tuple[float, ...] = ()
        self.has_healed = False
        """Whether it has the state of another one, and has not met the others since."""
        self.begins = 0
        """The step at which those have begun who begin together."""
        self.shared = False
        """Whether the loop averages gradients over those who are there."""
        self._quorum = -1
        """Torchft's number of those who have met."""

    @property
    def have_synced(self) -> bool:
        return bool(self._met)

    @property
    def are_members_unchanged(self) -> bool:
        """Whether those who have met are those who are there; a step may have found others."""
        return self.have_synced and self._quorum == self._manager._quorum_id

    def must_sync(self, step: int) -> bool:
        """Whether nobody knows yet who the others are. Where gradients are shared all know which
        step it is, and somebody new waits for the end of the cycle."""
        return step == self.begins + 1 if self.shared else not self.have_synced

    def register(self, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        """The state that somebody new is given."""

        def heal(told: Any) -> None:
            load(told["run"])
            self.begins, self.has_healed = told["begins"], True

        def tell() -> Any:
            return {"run": save(), "begins": self.begins}

        try:
            self._manager.register_state_dict_fn("hdet", heal, tell)
        except AssertionError as error:
            raise ValueError("`manager` must have one scheduler of hdet, got a second.") from error

    # A meeting -------------------------------------------------------------------------------

    def start_quorum(self, *, anew: bool = False) -> None:
        """Wait for whoever takes part. Somebody new has the state of another one after this.

        Where gradients are shared they are those of the last step, unless that went wrong and there
        is no other (`anew`).
        """
        if anew or not self.shared:
            self._manager.start_quorum()
        place = self._manager.participating_rank()
        if place is None:
            raise RuntimeError("this replica is a spare of torchft: hdet needs all to take part.")
        self.size, self.local = self._manager.num_participants(), range(place, place + 1)

    def call(self) -> Members:
        """Who is there; the same answer for all of them."""
        row = [[self._name, _digest(self._met), float(self.has_healed)]]
        table = self.gather(torch.tensor(row, dtype=torch.float64)).tolist()
        self._now = tuple(name for name, _, _ in table)
        fresh = [bool(healed) or last == _digest(()) for _, last, healed in table]
        return Members(
            any(bool(healed) or last != _digest(self._now) for _, last, healed in table),
            tuple(r for r, new in enumerate(fresh) if new) if not all(fresh) else (),
        )

    def commit(self) -> bool:
        """Whether all of it went well for this one; torchft heals whoever it did not."""
        went_well = bool(self._manager.should_commit())
        if went_well:
            self._met, self.has_healed = self._now, False
            self._quorum = self._manager._quorum_id
        return went_well

    # The Replicas protocol -------------------------------------------------------------------

    def begin_reduce(self, wire: Tensor, op: Any) -> "_WatchedWork":
        return _WatchedWork(self._manager, self._manager.allreduce(wire, reduce_op=op))

    def gather(self, rows: Tensor) -> Tensor:
        everyone = torch.zeros(
            self.size, *rows.shape[1:], dtype=rows.dtype, device=self._home(rows.device)
        )
        everyone[self.local[0]] = rows[0]
        self.begin_reduce(everyone, ReduceOp.SUM).wait()
        return everyone

    def gather_objects(self, description: Any) -> list[Any]:
        if not self.have_synced:  # others may be in the middle of their run: nobody to ask
            return [description]
        told = torch.frombuffer(bytearray(pickle.dumps(description)), dtype=torch.uint8)
        sizes = self.gather(torch.tensor([[len(told)]]))[:, 0].tolist()
        row = torch.zeros(1, max(sizes), dtype=torch.uint8)
        row[0, : len(told)] = told
        rows = self.gather(row).cpu()
        return [pickle.loads(bytes(r[:n].tolist())) for r, n in zip(rows, sizes, strict=True)]

    def copy_(self, rows: Rows, source: int, targets: Sequence[int]) -> int:
        sent = 0
        for bucket in self._buckets.of(rows[0]).buckets:
            own = bucket.load()
            wire = own.clone() if self.local[0] == source else torch.zeros_like(own)
            self.begin_reduce(wire, ReduceOp.SUM).wait()
            if self.local[0] in targets:
                own.copy_(wire)
                bucket.store()
            sent += wire.nbytes
        return sent

    def share_gradients(self, model: nn.Module, shared: bool) -> None:
        """They are what the loop makes them: torchft's own DDP shares them."""
        self.shared = shared


def shares_gradients(model: nn.Module | None) -> bool:
    """Whether torchft averages them at every step."""
    return model is not None and any(map(is_of_torchft, model.modules()))


def is_of_torchft(thing: Any) -> bool:
    return any(kind.__module__.startswith("torchft.") for kind in type(thing).__mro__)


class _WatchedWork:
    """What torchft sends: an error is kept by its manager, and must not be taken for numbers."""

    def __init__(self, manager: Any, work: Any) -> None:
        self._manager, self._work = manager, work

    def wait(self) -> None:
        self._work.wait()
        if error := self._manager.errored():
            reason = str(getattr(error, "original_exception", error)).splitlines()
            raise Interrupted(f"a replica has left: {reason[0] if reason else error!r}")


def _digest(names: Sequence[float]) -> float:
    """A number that stands for a list, exact in a float64."""
    return float(int.from_bytes(sha256(repr(tuple(names)).encode()).digest()[:6], "big"))
