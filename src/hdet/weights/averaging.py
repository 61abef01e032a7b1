"""The only writer of weights, buffers and optimizer state: converge, re-seed, perturb, visit."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.replicas.error_feedback import CompressedAverage, Places
from hdet.replicas.protocol import Means, Replicas, Rows, can_compress
from hdet.replicas.quantization import CODECS
from hdet.tensors.buckets import wire_dtype
from hdet.tensors.dtensor import local
from hdet.tensors.hashing import fingerprint, fingerprints
from hdet.tensors.ops import copies, copy_all
from hdet.weights.inventory import TENSOR_KINDS, Agreed, ReplicaTensors
from hdet.weights.outer_optimizer import OptimizerFactory, OuterOptimizer
from hdet.weights.overlap import PendingAverage
from hdet.weights.perturb import PERTURBED
from hdet.weights.snapshot import Snapshot, restore, seen, show, take

Shape = tuple[tuple[int, ...], str, tuple[int, ...], int | None]
"""Shape, dtype, strides and fingerprint of a tensor; buffers go without the last."""


class ReplicaWeights:
    """The weights, buffers and optimizer states of the replicas that live in this process."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None,
        replicas: Replicas,
        outer: OptimizerFactory | None = None,
        compress: str | None = None,
    ) -> None:
        self._replicas = replicas
        pairs = zip(replicas.optimizers(optimizer), replicas.modules(model), strict=True)
        self._replicas_tensors = [ReplicaTensors(*pair, replicas.unreplicated) for pair in pairs]
        self._outer = (
            None if outer is None else OuterOptimizer(outer, optimizer, self._replicas_tensors)
        )
        self._compressed: CompressedAverage | None = None
        if compress is not None and can_compress(replicas):
            self._compressed = CompressedAverage(replicas, CODECS[compress])
        self._pending: PendingAverage | None = None
        self._num_sent: tuple[Agreed, Places] = ({}, [])
        """What all agreed in then, and which parameters trained."""
        self._tail: list[Tensor] = []
        self._tail_steps = 0
        self._moved: list[list[Tensor]] = []
        self._detached: list[Tensor] = []
        """What trains, as it was last looked for: kept, since there may be many."""

    @property
    def outer(self) -> Optimizer | None:
        return None if self._outer is None else self._outer.optimizer

    def outer_parameters(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters of the model, each with that of the outer optimizer."""
        return [] if self._outer is None else self._outer.pairs()

    @property
    def has_unreplicated(self) -> bool:
        """Whether replicas share a parameter: then they can only run together."""
        return any(body.has_unreplicated for body in self._replicas_tensors)

    def unsaved(self) -> list[str]:
        """Parameters that exist once for all replicas, as plain tensors."""
        return [name for body in self._replicas_tensors for name in body.unsaved()]

    def refresh(self) -> None:
        """Look again which tensors the replicas consist of; a roll call begins with it."""
        for body in self._replicas_tensors:
            body.refresh()

    # What replicas say of themselves, one entry for each that lives here ---------------------

    def state_numels(self) -> list[int]:
        return [body.state_numel() for body in self._replicas_tensors]

    def are_finite(self, *, with_state: bool) -> Tensor:
        """Whether all parameters are finite, and the optimizer state if it is to be averaged."""
        parts = ["moving", "still", "state"] if with_state else ["moving", "still"]
        return self._replicas.are_finite(
            [body.divided(parts, {})[0] for body in self._replicas_tensors]
        )

    def num_bad_buffers(self) -> Tensor:
        """How many elements of the buffers are not finite.

        Some are so by design, such as a mask of minus infinity; then all replicas count alike.
        """
        return torch.stack([body.num_bad_buffers() for body in self._replicas_tensors])

    def sample(self) -> Tensor:
        """The same few thousand of the parameters that train, for each local replica."""
        return torch.stack([body.sample() for body in self._replicas_tensors])

    def fingerprints(self, part: str) -> Tensor:
        """One number for each tensor of a part: replicas share it where they agree, bit for bit.

        For the optimizer state one in all, since replicas may not have the same number of tensors.
        """
        prints = torch.stack([fingerprints(body.part(part)) for body in self._replicas_tensors])
        if part == "state":
            return torch.stack([fingerprint(row)[None] for row in prints])
        return prints

    @torch.no_grad()
    def gradient_norms(self) -> tuple[float, float] | None:
        """The mean squared norm of the replicas' gradients, and that of their mean.

        None if a replica has no gradients, or none that are finite.
        """
        self.refresh()
        rows = [_gradients(body.steered()) for body in self._replicas_tensors]
        alone = self._squares(rows)
        everyone = self._replicas.gather(alone)
        if not bool((everyone.isfinite() & (everyone > 0)).all()):
            return None
        self._replicas.average_(rows, range(self._replicas.size), once=True)
        return float(everyone.mean()), float(self._squares(rows[:1])[0])

    def _squares(self, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        """Of the norm of each local replica's tensors, over all processes that it consists of."""
        return self._replicas.gather_parts(torch.stack([_square(row)[None] for row in rows])).sum(1)

    def describe(self) -> dict[str, Shape]:
        """Name -> what replicas must have in common, for the door."""
        body = self._replicas_tensors[0]
        body.check()
        if not self.are_perturbed():
            self._check_alike()
        parameters, buffers = body.replicated(), body.buffers()
        prints: list[int | None] = [*fingerprints(list(parameters.values())).tolist()]
        prints += [None] * len(buffers)
        everything = zip([*parameters.items(), *buffers.items()], prints, strict=True)
        return {
            name: (tuple(tensor.shape), str(tensor.dtype), tensor.stride(), value)
            for (name, tensor), value in everything
        }

    def describe_groups(self, turned: Collection[str] = ()) -> list[dict[str, Any]]:
        return self._replicas_tensors[0].groups(turned)

    def are_perturbed(self) -> bool:
        """Whether `perturb_` made the replicas differ on purpose."""
        return all(
            any(hasattr(p, PERTURBED) for p in body.parameters().values())
            for body in self._replicas_tensors
        )

    def _check_alike(self) -> None:
        """Replicas that live together must start from the same values too."""
        named = [body.replicated() for body in self._replicas_tensors]
        prints = [fingerprints(list(one.values())).tolist() for one in named if len(named) > 1]
        for name, *values in zip(named[0], *prints, strict=False):
            for replica, value in enumerate(values):
                if value != values[0]:
                    raise ValueError(
                        f"replicas must be alike: parameter {name!r} does not start from the same "
                        f"values on replicas 0 and {replica}. Change weights before stacking the "
                        "model, load them with its load_state_dict, or perturb them on purpose "
                        "with hdet.perturb_(model, replicas=...)."
                    )

    # What is done to them --------------------------------------------------------------------

    def converge_(
        self, fit: Sequence[int], parts: Sequence[str], agreed: Agreed, *, exact: bool = True
    ) -> int:
        """Every replica takes the mean of those that are fit (eq. 3), and an outer optimizer, if
        there is one, makes its step; the bytes reduced. Only what all are fit for need not be
        `exact`."""
        if self._outer is not None:
            self._outer.hold()  # if its optimizer has skipped every step, as GradScaler does
        ledger = None if exact else self._compressed
        body, others = self._replicas_tensors[0], [part for part in parts if part != "moving"]
        differ = bool(body.divided(("moving",), agreed)[0])
        if ledger is not None and differ and ledger.knows(body.moving_places):
            # All of them: which ones differ may change from one cycle to the next.
            num_bytes = ledger.average_(body.part("moving"))
            num_bytes += self._average_(fit, others, agreed)
        else:
            num_bytes = self._average_(fit, parts, agreed)
        if self._outer is not None:
            self._outer.step()
        if ledger is None:
            self._clear_error_feedback()
        elif differ:
            ledger.remember(body.moving_places, body.part("moving"))
        return num_bytes

    def _clear_error_feedback(self) -> None:
        """Replicas were moved by other means than a compressed converge."""
        if self._compressed is not None:
            self._compressed.forget()

    def average_quietly_(self, fit: Sequence[int], parts: Sequence[str], agreed: Agreed) -> None:
        """Every replica takes the mean of those that are fit, and no outer optimizer follows it."""
        self._average_(fit, parts, agreed)

    def note_step(self) -> None:
        """A step was attempted, on all replicas alike."""
        if self._outer is not None:
            self._outer.has_moved = True

    def note_different_start(self) -> None:
        """Replicas do not begin from the same weights."""
        if self._outer is not None:
            self._outer.is_apart = True

    def start_average_(self, agreed: Agreed) -> int:
        """Send off the weights that train, and average the rest, of all replicas; the bytes
        reduced. The replicas train on meanwhile, until `land_`.
        """
        everyone = range(self._replicas.size)
        takes_off = bool(self._moving(agreed)[0])
        if self._outer is not None:
            self._outer.has_moved, takes_off = False, True
        # An outer optimizer moves also what all replicas agree in, and a ledger knows all or none.
        everything = self._outer is not None or self._compressed is not None
        self._num_sent = (
            {} if everything else agreed,
            list(self._replicas_tensors[0].moving_places),
        )
        rows = self._moving(self._num_sent[0])
        self._pending = PendingAverage(rows, self._begin_average) if takes_off else None
        num_bytes = 0 if self._pending is None else self._pending.num_bytes
        return num_bytes + self._average_(everyone, ("still", "buffers"), agreed)

    def _moving(self, agreed: Agreed) -> Rows:
        return [body.divided(("moving",), agreed)[0] for body in self._replicas_tensors]

    def _begin_average(self, rows: Rows) -> tuple[Means, int]:
        if self._compressed is not None and self._compressed.knows(
            self._replicas_tensors[0].moving_places
        ):
            return self._compressed.begin_average(self._replicas_tensors[0].part("moving"))
        num_bytes = sum(flat.nbytes for flat in rows[0])
        return self._replicas.begin_average(rows), num_bytes

    def forward_partial_(self) -> None:
        """Half-way: what arrived of compressed changes goes on as their mean, in the background."""
        if self._compressed is not None:
            self._compressed.forward_partial()

    @property
    def has_pending_average(self) -> bool:
        """Whether a mean is still to come: until then replicas are apart."""
        return self._pending is not None

    def apply_pending_(self) -> None:
        """What was sent off comes back as a change."""
        flight, self._pending = self._pending, None
        if flight is not None:
            self.refresh()
            agreed, places = self._num_sent
            is_same = places == self._replicas_tensors[0].moving_places
            if is_same:  # unless something was frozen meanwhile
                flight.follow(self._moving(agreed))
            goals = flight.land(None if self._outer is None else self._outer.leads_to)
            if self._compressed is not None and is_same:
                self._compressed.remember(places, self._replicas_tensors[0].part("moving"), goals)
            else:
                self._clear_error_feedback()

    def abandon(self) -> None:
        """What was sent off is not wanted any more."""
        flight, self._pending = self._pending, None
        if flight is not None:
            flight.abandon()
        self._clear_error_feedback()

    def _average_(self, fit: Sequence[int], parts: Sequence[str], agreed: Agreed) -> int:
        """What is equal on all replicas is left alone: averaging it would cost traffic, and for an
        N that is no power of two the mean of equal numbers is not always that number.
        """
        divided = [body.divided(parts, agreed) for body in self._replicas_tensors]
        means, counts = zip(*divided, strict=True)
        return self._replicas.average_(means, fit) + self._replicas.maximum_(counts)

    def reseed_state_(self, source: int, targets: Sequence[int]) -> int:
        """Replicas that were left out take the optimizer state of one that is fit.

        Where states differ in size (a replica that never made a step has none) they start anew.
        """
        sizes = self._replicas.gather_objects(self.state_numels())
        parts = self._replicas.parts
        replicas = [
            size
            for first in range(0, len(sizes), parts)
            for size in zip(*sizes[first : first + parts], strict=True)
        ]
        if len(set(replicas)) > 1:
            for replica, body in zip(self._replicas.local, self._replicas_tensors, strict=True):
                if replica in targets:
                    body.optimizer.state.clear()
            return 0
        return self._replicas.copy_(
            [b.part("state") for b in self._replicas_tensors], source, targets
        )

    def reset_state_(self) -> None:
        """Forget the optimizers' state, as if they had just been made."""
        for body in self._replicas_tensors:
            body.optimizer.state.clear()

    def keep(self) -> Callable[[], None]:
        """A copy of the weights and buffers, and the way back to it."""
        self.refresh()
        own = [
            t.detach()
            for body in self._replicas_tensors
            for part in TENSOR_KINDS[:-1]
            for t in body.part(part)
        ]
        kept = copies(own)

        def undo() -> None:
            copy_all(own, kept)

        return undo

    @contextmanager
    def visit(self, fit: Sequence[int], parts: Sequence[str], agreed: Agreed) -> Iterator[None]:
        """The consensus inside, every replica's own tensors again after it."""
        divided = [body.divided(parts, agreed) for body in self._replicas_tensors]
        everything = [t.detach() for kinds in divided for tensors in kinds for t in tensors]
        kept = copies(everything)
        try:
            self._average_(fit, parts, agreed)
            yield
        finally:
            self.refresh()
            copy_all(everything, kept)

    # Taken back ----------------------------------------------------------------------------------

    def snapshot(self, *, offload: bool = False, alike: bool = False) -> Snapshot:
        """Everything that training changes, of all local replicas, and the random states; of
        replicas that are `alike` the weights of one."""
        self.refresh()
        return take(self._replicas_tensors, self.outer, offload=offload, alike=alike)

    def restore_(self, snapshot: Snapshot, *, draws: bool = True) -> None:
        self.refresh()
        self._clear_error_feedback()
        restore(snapshot, self._replicas_tensors, self.outer, draws=draws)

    def select_(self, source: int) -> None:
        """All replicas take the weights, buffers and optimizer state of one."""
        targets = [replica for replica in range(self._replicas.size) if replica != source]
        rows = [
            [t for part in TENSOR_KINDS[:-1] for t in body.part(part)]
            for body in self._replicas_tensors
        ]
        self._replicas.copy_(rows, source, targets)
        self.reseed_state_(source, targets)

    @contextmanager
    def visit_snapshot(self, snapshot: Snapshot) -> Iterator[None]:
        """The weights and buffers that were kept inside, every replica's own again after it."""
        self.refresh()
        own = seen(self._replicas_tensors)
        show(snapshot.seen, self._replicas_tensors)
        try:
            yield
        finally:
            self.refresh()
            show(own, self._replicas_tensors)

    def start_cycle(self) -> None:
        """A new cycle: whatever was noted of the last one is void.

        All replicas stand together, unless a mean is under way.
        """
        self.clear_tail()
        if self._outer is not None and not self.has_pending_average:
            self._outer.begin()

    # Averaged iterates -------------------------------------------------------------------------

    @torch.no_grad()
    def add_to_tail(self) -> None:
        """Take the weights as they are into the mean over the tail of the cycle."""
        weights = self._weights()
        self._tail_steps += 1
        if self._tail_steps == 1 or len(weights) != len(self._tail):
            self._tail, self._tail_steps = copies(weights), 1
        elif weights:
            torch._foreach_lerp_(self._tail, weights, 1 / self._tail_steps)

    def clear_tail(self) -> None:
        self._tail, self._tail_steps = [], 0

    @contextmanager
    def at_tail_average(self) -> Iterator[None]:
        """Inside, the weights are their mean over the tail of the cycle, if there is one."""
        weights = self._weights() if self._tail else []
        own = copies(weights)
        copy_all(weights, self._tail if weights else [])
        try:
            yield
        finally:
            self.refresh()
            copy_all(weights, own)

    def _weights(self) -> list[Tensor]:
        """Those of all local replicas that train; the same list as long as they are the same."""
        self.refresh()
        rows = [body.part("moving") for body in self._replicas_tensors]
        if [*map(id, rows)] != [*map(id, self._moved)]:
            self._moved = rows
            self._detached = [tensor.detach() for row in rows for tensor in row]
        return self._detached


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Copies of them, in float32 at least; nothing where there is none."""
    own = [
        torch.zeros_like(local(p)) if p.grad is None else local(p.grad).to_dense().detach()
        for p in parameters
    ]
    return copies(own, [wire_dtype(gradient.dtype) for gradient in own])


def _square(tensors: Sequence[Tensor]) -> Tensor:
    """Of the norm of all of them together."""
    if not tensors:
        return torch.zeros(())
    home = tensors[0].device
    exact = torch.float32 if home.type == "mps" else torch.float64
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    norms = torch._foreach_norm(real, 2, dtype=exact)  # a few launches for all
    return torch.stack([norm.to(home) for norm in norms]).square().sum()
