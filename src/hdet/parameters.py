"""The only writer of weights, buffers and optimizer state: converge, re-seed, perturb, visit."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.body import PARTS, Agreed, Body
from hdet.buckets import wire_dtype
from hdet.bulk import copies, copy_all
from hdet.codec import CODECS
from hdet.fingerprint import fingerprint, fingerprints
from hdet.flight import Flight
from hdet.ledger import Ledger, Places, Traders
from hdet.outer import Make, Outer
from hdet.replicas import Means, Replicas, Rows, local_replicas
from hdet.shards import cut, layout, local, whole
from hdet.snapshot import Snapshot, restore, seen, show, take
from hdet.validation import check_integer, check_range

_PERTURBED = "_hdet_perturbed"

Shape = tuple[tuple[int, ...], str, tuple[int, ...], int | None]
"""Shape, dtype, strides and fingerprint of a tensor; buffers go without the last."""


class Parameters:
    """The weights, buffers and optimizer states of the replicas that live in this process."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None,
        replicas: Replicas,
        outer: Make | None = None,
        compress: str | None = None,
    ) -> None:
        self._replicas = replicas
        pairs = zip(replicas.optimizers(optimizer), replicas.modules(model), strict=True)
        self._bodies = [Body(*pair, replicas.alone) for pair in pairs]
        self._outer = None if outer is None else Outer(outer, optimizer, self._bodies)
        self._ledger: Ledger | None = None
        if compress is not None and isinstance(replicas, Traders):
            self._ledger = Ledger(replicas, CODECS[compress])
        self._flight: Flight | None = None
        self._sent_off: tuple[Agreed, Places] = ({}, [])
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
    def have_lonely(self) -> bool:
        """Whether replicas share a parameter: then they can only run together."""
        return any(body.has_lonely for body in self._bodies)

    def unsaved(self) -> list[str]:
        """Parameters that exist once for all replicas, as plain tensors."""
        return [name for body in self._bodies for name in body.unsaved()]

    def refresh(self) -> None:
        """Look again which tensors the replicas consist of; a roll call begins with it."""
        for body in self._bodies:
            body.refresh()

    # What replicas say of themselves, one entry for each that lives here ---------------------

    def state_numels(self) -> list[int]:
        return [body.state_numel() for body in self._bodies]

    def are_finite(self, *, with_state: bool) -> Tensor:
        """Whether all parameters are finite, and the optimizer state if it is to be averaged."""
        parts = ["moving", "still", "state"] if with_state else ["moving", "still"]
        return self._replicas.are_finite([body.divided(parts, {})[0] for body in self._bodies])

    def num_bad_buffers(self) -> Tensor:
        """How many elements of the buffers are not finite.

        Some are so by design, such as a mask of minus infinity; then all replicas count alike.
        """
        return torch.stack([body.num_bad_buffers() for body in self._bodies])

    def sample(self) -> Tensor:
        """The same few thousand of the parameters that train, for each local replica."""
        return torch.stack([body.sample() for body in self._bodies])

    def fingerprints(self, part: str) -> Tensor:
        """One number for each tensor of a part: replicas share it where they agree, bit for bit.

        For the optimizer state one in all, since replicas may not have the same number of tensors.
        """
        prints = torch.stack([fingerprints(body.part(part)) for body in self._bodies])
        if part == "state":
            return torch.stack([fingerprint(row)[None] for row in prints])
        return prints

    @torch.no_grad()
    def gradient_norms(self) -> tuple[float, float] | None:
        """The mean squared norm of the replicas' gradients, and that of their mean.

        None if a replica has no gradients, or none that are finite.
        """
        self.refresh()
        rows = [_gradients(body.steered()) for body in self._bodies]
        alone = self._squares(rows)
        everyone = self._replicas.gather(alone)
        if not bool((everyone.isfinite() & (everyone > 0)).all()):
            return None
        self._replicas.average_(rows, range(self._replicas.size), once=True)
        return float(everyone.mean()), float(self._squares(rows[:1])[0])

    def _squares(self, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        """Of the norm of each local replica's tensors, over all processes that it consists of."""
        return self._replicas.pool(torch.stack([_square(row)[None] for row in rows])).sum(1)

    def describe(self) -> dict[str, Shape]:
        """Name -> what replicas must have in common, for the door."""
        body = self._bodies[0]
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
        return self._bodies[0].groups(turned)

    def are_perturbed(self) -> bool:
        """Whether `perturb_` made the replicas differ on purpose."""
        return all(
            any(hasattr(p, _PERTURBED) for p in body.parameters().values()) for body in self._bodies
        )

    def _check_alike(self) -> None:
        """Replicas that live together must start from the same values too."""
        named = [body.replicated() for body in self._bodies]
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
        ledger = None if exact else self._ledger
        body, others = self._bodies[0], [part for part in parts if part != "moving"]
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
            self._forget_debts()
        elif differ:
            ledger.remember(body.moving_places, body.part("moving"))
        return num_bytes

    def _forget_debts(self) -> None:
        """Replicas were moved by other means than a compressed converge."""
        if self._ledger is not None:
            self._ledger.forget()

    def meet_(self, fit: Sequence[int], parts: Sequence[str], agreed: Agreed) -> None:
        """Every replica takes the mean of those that are fit, and no outer optimizer follows it."""
        self._average_(fit, parts, agreed)

    def note_step(self) -> None:
        """A step was attempted, on all replicas alike."""
        if self._outer is not None:
            self._outer.has_moved = True

    def start_apart(self) -> None:
        """Replicas do not begin from the same weights."""
        if self._outer is not None:
            self._outer.is_apart = True

    def start_converge_(self, agreed: Agreed) -> int:
        """Send off the weights that train, and average the rest, of all replicas; the bytes
        reduced. The replicas train on meanwhile, until `land_`.
        """
        everyone = range(self._replicas.size)
        takes_off = bool(self._moving(agreed)[0])
        if self._outer is not None:
            self._outer.has_moved, takes_off = False, True
        # An outer optimizer moves also what all replicas agree in, and a ledger knows all or none.
        everything = self._outer is not None or self._ledger is not None
        self._sent_off = ({} if everything else agreed, list(self._bodies[0].moving_places))
        rows = self._moving(self._sent_off[0])
        self._flight = Flight(rows, self._begin_average) if takes_off else None
        num_bytes = 0 if self._flight is None else self._flight.num_bytes
        return num_bytes + self._average_(everyone, ("still", "buffers"), agreed)

    def _moving(self, agreed: Agreed) -> Rows:
        return [body.divided(("moving",), agreed)[0] for body in self._bodies]

    def _begin_average(self, rows: Rows) -> tuple[Means, int]:
        if self._ledger is not None and self._ledger.knows(self._bodies[0].moving_places):
            return self._ledger.begin_average(self._bodies[0].part("moving"))
        num_bytes = sum(flat.nbytes for flat in rows[0])
        return self._replicas.begin_average(rows), num_bytes

    def pass_on_(self) -> None:
        """Half-way: what arrived of compressed changes goes on as their mean, in the background."""
        if self._ledger is not None:
            self._ledger.pass_on()

    @property
    def are_under_way(self) -> bool:
        """Whether a mean is still to come: until then replicas are apart."""
        return self._flight is not None

    def land_(self) -> None:
        """What was sent off comes back as a change."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self.refresh()
            agreed, places = self._sent_off
            is_same = places == self._bodies[0].moving_places
            if is_same:  # unless something was frozen meanwhile
                flight.follow(self._moving(agreed))
            goals = flight.land(None if self._outer is None else self._outer.leads_to)
            if self._ledger is not None and is_same:
                self._ledger.remember(places, self._bodies[0].part("moving"), goals)
            else:
                self._forget_debts()

    def abandon(self) -> None:
        """What was sent off is not wanted any more."""
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.abandon()
        self._forget_debts()

    def _average_(self, fit: Sequence[int], parts: Sequence[str], agreed: Agreed) -> int:
        """What is equal on all replicas is left alone: averaging it would cost traffic, and for an
        N that is no power of two the mean of equal numbers is not always that number.
        """
        divided = [body.divided(parts, agreed) for body in self._bodies]
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
            for replica, body in zip(self._replicas.local, self._bodies, strict=True):
                if replica in targets:
                    body.optimizer.state.clear()
            return 0
        return self._replicas.copy_([b.part("state") for b in self._bodies], source, targets)

    def reset_state_(self) -> None:
        """Forget the optimizers' state, as if they had just been made."""
        for body in self._bodies:
            body.optimizer.state.clear()

    def keep(self) -> Callable[[], None]:
        """A copy of the weights and buffers, and the way back to it."""
        self.refresh()
        own = [t.detach() for body in self._bodies for part in PARTS[:-1] for t in body.part(part)]
        kept = copies(own)

        def undo() -> None:
            copy_all(own, kept)

        return undo

    @contextmanager
    def visit(self, fit: Sequence[int], parts: Sequence[str], agreed: Agreed) -> Iterator[None]:
        """The consensus inside, every replica's own tensors again after it."""
        divided = [body.divided(parts, agreed) for body in self._bodies]
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
        return take(self._bodies, self.outer, offload=offload, alike=alike)

    def restore_(self, snapshot: Snapshot, *, draws: bool = True) -> None:
        self.refresh()
        self._forget_debts()
        restore(snapshot, self._bodies, self.outer, draws=draws)

    def select_(self, source: int) -> None:
        """All replicas take the weights, buffers and optimizer state of one."""
        targets = [replica for replica in range(self._replicas.size) if replica != source]
        rows = [[t for part in PARTS[:-1] for t in body.part(part)] for body in self._bodies]
        self._replicas.copy_(rows, source, targets)
        self.reseed_state_(source, targets)

    @contextmanager
    def visit_snapshot(self, snapshot: Snapshot) -> Iterator[None]:
        """The weights and buffers that were kept inside, every replica's own again after it."""
        self.refresh()
        own = seen(self._bodies)
        show(snapshot.seen, self._bodies)
        try:
            yield
        finally:
            self.refresh()
            show(own, self._bodies)

    def begin_anew(self) -> None:
        """A new cycle: whatever was noted of the last one is void.

        All replicas stand together, unless a mean is under way.
        """
        self.forget_iterates()
        if self._outer is not None and not self.are_under_way:
            self._outer.begin()

    # Averaged iterates -------------------------------------------------------------------------

    @torch.no_grad()
    def add_iterate(self) -> None:
        """Take the weights as they are into the mean over the tail of the cycle."""
        weights = self._weights()
        self._tail_steps += 1
        if self._tail_steps == 1 or len(weights) != len(self._tail):
            self._tail, self._tail_steps = copies(weights), 1
        elif weights:
            torch._foreach_lerp_(self._tail, weights, 1 / self._tail_steps)

    def forget_iterates(self) -> None:
        self._tail, self._tail_steps = [], 0

    @contextmanager
    def at_tail(self) -> Iterator[None]:
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
        rows = [body.part("moving") for body in self._bodies]
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


@torch.no_grad()
def perturb_(
    model: nn.Module, noise: float = 0.01, *, replicas: Replicas | None = None, seed: int = 0
) -> None:
    """Warm noisy start: theta <- theta + eps, eps ~ N(0, noise^2 |theta|^2 / d) (paper, eq. 10).

    Each replica draws its own eps from a private generator, so no global random state is touched.
    Frozen parameters stay as they are. Call it after wrapping the model in DDP, which would
    otherwise overwrite the noise of all replicas with that of the first, and before hdet.
    """
    check_range("noise", noise, least=0, below=math.inf)
    check_integer("seed", seed, at_least=0)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("`model` must have parameters that require a gradient, got none.")
    if replicas is None and any(layout(p) is not None for p in model.parameters()):
        raise ValueError("`perturb_` needs `replicas=` for a sharded model, got None.")
    here = local_replicas() if replicas is None else replicas.local
    modules = [model] if replicas is None else replicas.modules(model)
    for replica, module in zip(here, modules, strict=True):
        assert module is not None
        _add_noise(module, noise, torch.Generator().manual_seed(_seed(seed, replica)))


def _add_noise(module: nn.Module, noise: float, generator: torch.Generator) -> None:
    parameters = [p for p in module.parameters() if p.requires_grad]
    num = sum(p.numel() for p in parameters)
    norms = torch.stack([whole(p.double().norm()).cpu() for p in parameters])
    deviation = noise * float(norms.norm()) / num**0.5
    for p in parameters:
        # Of the whole parameter, so that a sharded model is perturbed like one that is not.
        epsilon = torch.empty(p.shape, dtype=torch.float64).normal_(generator=generator)
        local(p).add_((cut(epsilon, p) * deviation).to(device=p.device, dtype=p.dtype))
        setattr(p, _PERTURBED, True)


def _seed(seed: int, replica: int) -> int:
    digest = sha256(f"perturb/{seed}/{replica}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
