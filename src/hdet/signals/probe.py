"""A fair comparison: every replica scores the same batches, in eval mode, before the converge.

Losses on private batches differ by more than what the knobs do to them, and a training loss always
prefers less dropout. Scores on shared held-out batches have neither fault.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hdet._validation import check_choice, check_integer, check_range
from hdet.knobs.dial import running
from hdet.lr_search.constants import DEFAULT_TAIL
from hdet.tensors.dtensor import local
from hdet.tensors.hashing import fingerprint
from hdet.tensors.ops import are_finite
from hdet.tensors.score_rows import MAX_SCORES, NUM_BATCH_WORDS, pad_scores

SHARE = 0.02
"""What a probe may cost by default, as a share of the cycle's work."""
MAX_BATCHES = 8


class Probe:
    """Scores replicas by `score(model, batch)` on `num` of the `batches`, or by `score(model)`.

    A score is one number, or a tensor with one for each batch or sample: the more there are, the
    better the uncertainty of the comparison is known. `batches` is a loader or a list, from which
    every cycle takes the next `num`; by default as many as cost 2 % of the cycle. `mode` says
    whether a low or a high score is good. Replicas are scored at the mean of their weights over the
    last `tail` of the cycle, which tells better how they will end than where they happen to stand;
    with 0 they are scored where they stand, and no mean is kept.
    """

    def __init__(
        self,
        score: Callable[..., Any],
        batches: Iterable[Any] | None = None,
        *,
        num: int | None = None,
        mode: Literal["min", "max"] = "min",
        tail: float = DEFAULT_TAIL,
    ) -> None:
        if not callable(score):
            raise TypeError(
                "`score` must be a function of the model (and of a batch, if `batches` is given), "
                f"got {score!r}."
            )
        if batches is not None and (isinstance(batches, Iterator) or not _is_iterable(batches)):
            raise TypeError(
                "`batches` must be a loader or a list that can be gone through again and again, "
                f"got {batches!r}."
            )
        _check_call(score, ["model"] if batches is None else ["model", "batch"])
        if num is not None:
            check_integer("num", num, at_least=1)
        check_choice("mode", mode, ("min", "max"))
        check_range("tail", tail, least=0, below=1.0000001)
        self.score, self.batches, self.num = score, batches, num
        self.mode, self.tail = mode, float(tail)
        self._iterator: Iterator[Any] | None = None
        self._place = self._epoch = 0

    def describe(self) -> dict[str, Any]:
        """What replicas must have in common, and what the record keeps."""
        return {"num": self.num, "mode": self.mode, "tail": self.tail}

    def num_batches(self, sync_every: int, num_replicas: int = 1) -> int:
        """Batches for each cycle, one at least. A forward pass is a third of a step's work.

        Replicas of one device share out a batch when they train, and score all of it each. No batch
        counts twice: it would seem to know more than it does.

        >>> Probe(lambda model: 0.0).num_batches(100), Probe(lambda model: 0.0).num_batches(100, 4)
        (6, 1)
        """
        num = self.num or min(max(int(SHARE * 3 * sync_every / num_replicas), 1), MAX_BATCHES)
        return min(num, self._length or num)

    def tail_steps(self, sync_every: int) -> int:
        """Over how many steps at the end of a cycle the weights are averaged."""
        return math.ceil(self.tail * sync_every)

    def take(self, cycle: int, sync_every: int, seed: int, num_replicas: int = 1) -> list[Any]:
        """The batches of a cycle: the next ones, from the start again after the last."""
        num = self.num_batches(sync_every, num_replicas)
        place = cycle * num
        if self._iterator is None or self._place != place:
            self._restart(place // self._length if self._length else 0, seed)
            # A run that was resumed goes on where it was in the loader.
            for _ in range(place % self._length if self._length else place):
                self._next(seed)
        taken = [self._next(seed) for _ in range(num)]
        self._place = place + num
        return taken

    @property
    def _length(self) -> int | None:
        try:
            return len(self.batches) or None  # type: ignore[arg-type]
        except TypeError:
            return None

    def _restart(self, epoch: int, seed: int) -> None:
        """A loader that shuffles draws its order now: the same in every process, and after a
        resume."""
        assert self.batches is not None
        chosen = (seed * 1_000_003 + epoch) & 0x7FFFFFFF
        torch.manual_seed(chosen)
        sampler = getattr(self.batches, "sampler", None)
        for owner in (self.batches, sampler):  # a generator of its own draws it, if there is one
            if isinstance(own := getattr(owner, "generator", None), torch.Generator):
                own.manual_seed(chosen)
        self._epoch, self._iterator = epoch, iter(self.batches)

    def _next(self, seed: int) -> Any:
        for _ in range(2):
            assert self._iterator is not None
            for batch in self._iterator:
                return batch
            self._restart(self._epoch + 1, seed)
        raise ValueError("`batches` of the probe must hold at least one batch, got none.")


def _check_call(score: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Refuse what the end of the first cycle would trip over."""
    try:
        signature = inspect.signature(score, follow_wrapped=False)
    except (TypeError, ValueError):  # not everything that can be called says how
        return
    try:
        signature.bind(*arguments)
    except TypeError as problem:
        raise TypeError(
            f"`score` of the probe must be callable as score({', '.join(arguments)}), got one with "
            f"the arguments {signature} ({problem})."
        ) from None


def as_probe(probe: Any) -> Probe | None:
    """A bare function of the model is a probe too."""
    if probe is None or isinstance(probe, Probe):
        return probe
    if callable(probe) and not isinstance(probe, nn.Module):
        return Probe(probe)
    raise TypeError(
        "`probe` must be a function of the model, or hdet.Probe(score, loader) with a function "
        f"that scores a model on one batch, got {probe!r}."
    )


@torch.no_grad()
def score_replicas(
    probe: Probe,
    modules: Sequence[nn.Module],
    gather_parts: Callable[[Tensor], Tensor] = lambda rows: rows[:, None],
    *,
    together: bool = False,
    sync_every: int,
    cycle: int,
    seed: int,
    fresh: bool = False,
    alike: bool = False,
) -> Tensor:
    """Every replica of this process scores the same batches. Leaves no trace in the run.

    One row for each: its scores, lower is better, padded with nan, then which batches it saw.
    Replicas that are `fresh` have trained for a few steps only: their running statistics do not
    tell anything yet, and normalisation takes those of the batch. Of replicas that are `alike`
    one scores for all. `gather_parts` asks all processes that a replica consists of
    (`Replicas.gather_parts`); replicas that share a parameter run `together`.
    """
    device = next(iter(modules[0].parameters())).device
    rows = []
    scored, times = (modules[:1], len(modules)) if alike else (modules, 1)
    sound = [True] * len(modules)
    if fresh:  # all processes of a replica score it, or none does
        finite = torch.stack([_is_finite(module)[None] for module in scored] * times)
        sound = gather_parts(finite).flatten(1).all(1).tolist()
    with _same_draws(device, seed, cycle):
        batches = None
        if probe.batches is not None:
            batches = probe.take(cycle, sync_every, seed, len(modules))
        for place, module in enumerate(scored):
            who = (
                nullcontext() if len(modules) == 1 else running(torch.tensor(place, device=device))
            )
            with who, evaluating(module, fresh) as bare, _same_draws(device, seed, cycle):
                if not (sound[place] or together):
                    # What a lost replica would make of the batches is anybody's guess.
                    rows.append(_lost_row(device))
                    continue
                seen = ProbedModel(bare)
                scores = _scores(probe, seen, batches)
                seen.check()
                row = _row(scores, probe.mode, seen, device)
                rows.append(row if sound[place] else _lost_row(device))
    return torch.stack(rows * times)


def _is_finite(module: nn.Module) -> Tensor:
    """Whether all that this process has of its weights is; 1 or 0, on the device."""
    return are_finite([local(parameter) for parameter in module.parameters()]).double()


def _lost_row(device: torch.device) -> Tensor:
    return torch.full((MAX_SCORES + NUM_BATCH_WORDS,), math.inf, device=device, dtype=torch.float64)


def _scores(probe: Probe, model: "ProbedModel", batches: list[Any] | None) -> Tensor:
    if batches is None:
        return _flat(probe.score(model))
    return torch.stack([_flat(probe.score(model, batch)).mean() for batch in batches])


def _flat(score: Any) -> Tensor:
    if not isinstance(score, (Tensor, int, float)):
        raise TypeError(f"`score` of the probe must return a tensor or a number, got {score!r}.")
    flat = torch.as_tensor(score, dtype=torch.float64).detach().reshape(-1)
    if not flat.numel():
        raise ValueError("`score` of the probe must return at least one number, got none.")
    return flat


def _row(scores: Tensor, mode: str, seen: "ProbedModel", device: torch.device) -> Tensor:
    if len(scores) > MAX_SCORES:
        scores = _in_parts(scores, MAX_SCORES)
    scores = scores.to(device) if mode == "min" else -scores.to(device)
    words = torch.stack([seen.print >> 32, seen.print & 0xFFFFFFFF]).to(scores)
    return pad_scores(scores, words)


def _in_parts(scores: Tensor, num: int) -> Tensor:
    """The means of so many parts, as equal as can be; the first ones are longer."""
    length, longer = divmod(len(scores), num)
    first, rest = scores.tensor_split([longer * (length + 1)])
    return torch.cat([first.view(longer, length + 1).mean(1), rest.view(-1, length).mean(1)])


class Notes:
    """What a score has called a model with."""

    def __init__(self) -> None:
        self.print = torch.zeros((), dtype=torch.int64)
        self.is_used = False

    def around(self, call: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        self.is_used = True
        for value in tree_leaves((inputs, options)):
            if isinstance(value, Tensor):
                found = fingerprint(value.detach().contiguous())
                self.print = self.print.to(found.device) * 31 + found + 1
        return call(*inputs, **options)


class ProbedModel:
    """The model as a score gets it, or a part of it: what it is called with is noted."""

    def __init__(self, module: nn.Module, notes: Notes | None = None) -> None:
        vars(self).update(_module=module, _notes=notes or Notes())

    @property
    def print(self) -> Tensor:
        return self._notes.print  # type: ignore[no-any-return]

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self._notes.around(self._module, *inputs, **options)

    def __getattr__(self, name: str) -> Any:
        return self._shown(getattr(self._module, name))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __getitem__(self, place: Any) -> Any:
        return self._shown(self._module[place])

    def __iter__(self) -> Iterator[Any]:
        return map(self._shown, self._module)

    def __len__(self) -> int:
        return len(self._module)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ProbedModel":
        return ProbedModel(copy.deepcopy(self._module, memo), self._notes)

    def _shown(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return ProbedModel(value, self._notes)
        if inspect.ismethod(value):
            return partial(self._notes.around, value)
        if isinstance(value, Tensor):
            self._notes.is_used = True
        return value

    def check(self) -> None:
        if not self._notes.is_used:
            raise ValueError(
                "`score` of the probe must call the model it is given, got one that did not: it "
                "would score another replica, or none."
            )


@contextmanager
def evaluating(module: nn.Module, fresh: bool = False) -> Iterator[nn.Module]:
    """Inside, a module is in eval mode, and bare: DDP would broadcast its buffers.

    If it is `fresh`, normalisation takes the statistics of each batch, and keeps none of them.
    """
    bare = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    parts = list(bare.modules())
    flags = [part.training for part in parts]
    kind = nn.modules.batchnorm._NormBase
    normalising = [p for p in parts if fresh and p.training and isinstance(p, kind)]
    bare.eval()
    kept = [[buffer.clone() for buffer in part.buffers()] for part in normalising]
    for part in normalising:
        part.train()
    try:
        yield bare
    finally:
        for part, flag in zip(parts, flags, strict=True):
            part.training = flag
        for part, buffers in zip(normalising, kept, strict=True):
            for buffer, own in zip(part.buffers(), buffers, strict=True):
                buffer.copy_(own)


@contextmanager
def _same_draws(device: torch.device, seed: int, cycle: int) -> Iterator[None]:
    """Inside, all replicas draw the same random numbers; after it, the run goes on with its own."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed((seed * 1_000_003 + cycle) & 0x7FFFFFFF)
        yield


def _is_iterable(value: Any) -> bool:
    return isinstance(value, Iterable) or hasattr(value, "__getitem__")
