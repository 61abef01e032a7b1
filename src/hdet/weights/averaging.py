"""The average of the replicas' weights (paper, eq. 3): exact, compressed or overlapped."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer

from hdet.replicas.error_feedback import CompressedAverage, Places
from hdet.replicas.protocol import Means, Replicas, Rows, can_compress
from hdet.replicas.quantization import CODECS
from hdet.tensors.ops import copies, copy_all
from hdet.weights.inventory import Agreed, ReplicaTensors, TensorKind, refresh_all
from hdet.weights.outer_optimizer import OptimizerFactory, OuterOptimizer
from hdet.weights.overlap import PendingAverage

Kinds = Sequence[TensorKind]


class Averager:
    """Averages the replicas.

    `average_` is the ordinary end of a cycle: all replicas take the mean, and an outer optimizer
    makes its step. `start_average_` and `finish_average_` do the same in two halves, between which
    the replicas train on. `average_without_outer_step_` is the bare mean. `at_average` takes it for
    a while only.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        replicas: Replicas,
        local_tensors: Sequence[ReplicaTensors],
        outer: OptimizerFactory | None = None,
        compress: str | None = None,
    ) -> None:
        self._replicas, self._local = replicas, local_tensors
        self._outer = None if outer is None else OuterOptimizer(outer, optimizer, local_tensors)
        self._compressed: CompressedAverage | None = None
        if compress is not None and can_compress(replicas):
            self._compressed = CompressedAverage(replicas, CODECS[compress])
        self._pending: PendingAverage | None = None
        self._agreed_when_sent: Agreed = {}
        self._places_when_sent: Places = []

    @property
    def outer(self) -> Optimizer | None:
        """The outer optimizer, if there is one."""
        return None if self._outer is None else self._outer.optimizer

    def outer_parameters(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs of a model's parameter and the outer optimizer's copy of it."""
        return [] if self._outer is None else self._outer.pairs()

    def start_cycle(self) -> None:
        """Start a new cycle; all replicas are equal, unless an average is pending."""
        if self._outer is not None and not self.has_pending_average:
            self._outer.start_cycle()

    def note_step(self) -> None:
        """Note that all replicas have attempted an optimizer step."""
        if self._outer is not None:
            self._outer.has_trained = True

    def note_different_start(self) -> None:
        """Note that the replicas start from different weights."""
        if self._outer is not None:
            self._outer.starts_apart = True

    def clear_error_feedback(self) -> None:
        """Forget compression residuals: replicas changed by other means than a compressed mean."""
        if self._compressed is not None:
            self._compressed.forget()

    # At once -------------------------------------------------------------------------------------

    def average_(
        self, fit: Sequence[int], kinds: Kinds, agreed: Agreed, *, exact: bool = True
    ) -> int:
        """Give every replica the mean of the `fit` ones, then let the outer optimizer step.

        Args:
            fit: The replicas that are averaged.
            kinds: The kinds of tensors to average.
            agreed: The tensors that are equal on all replicas already.
            exact: Whether to average without compression. Needed unless all replicas are fit.

        Returns:
            The number of bytes that were reduced.
        """
        if self._outer is not None:
            # The optimizer may have skipped every step, as GradScaler does.
            self._outer.remember_start()
        compressed, first = None if exact else self._compressed, self._local[0]
        differ = bool(first.to_reduce((TensorKind.TRAINABLE,), agreed)[0])
        if compressed is not None and differ and compressed.knows(first.trainable_places):
            # All trainable tensors: which of them differ may change from cycle to cycle.
            num_bytes = compressed.average_(first.of_kind(TensorKind.TRAINABLE))
            others = [kind for kind in kinds if kind is not TensorKind.TRAINABLE]
            num_bytes += self.average_without_outer_step_(fit, others, agreed)
        else:
            num_bytes = self.average_without_outer_step_(fit, kinds, agreed)
        if self._outer is not None:
            self._outer.step()
        if compressed is None:
            self.clear_error_feedback()
        elif differ:
            compressed.remember(first.trainable_places, first.of_kind(TensorKind.TRAINABLE))
        return num_bytes

    def average_without_outer_step_(self, fit: Sequence[int], kinds: Kinds, agreed: Agreed) -> int:
        """Give every replica the exact mean of the `fit` ones; return the bytes reduced.

        Tensors that are equal on all replicas stay as they are. This saves traffic, and the mean of
        N equal numbers is not always that number when N is no power of two.
        """
        split = [tensors.to_reduce(kinds, agreed) for tensors in self._local]
        to_average, to_maximize = zip(*split, strict=True)
        return self._replicas.average_(to_average, fit) + self._replicas.maximum_(to_maximize)

    @contextmanager
    def at_average(self, fit: Sequence[int], kinds: Kinds, agreed: Agreed) -> Iterator[None]:
        """Inside, every replica has the mean of the `fit` ones; afterwards its own tensors."""
        split = [tensors.to_reduce(kinds, agreed) for tensors in self._local]
        changed = [t.detach() for lists in split for tensors in lists for t in tensors]
        own = copies(changed)
        try:
            self.average_without_outer_step_(fit, kinds, agreed)
            yield
        finally:
            refresh_all(self._local)
            copy_all(changed, own)

    # While replicas train on ---------------------------------------------------------------------

    @property
    def has_pending_average(self) -> bool:
        """Whether an average was started and not finished: until then replicas differ."""
        return self._pending is not None

    def start_average_(self, agreed: Agreed) -> int:
        """Start to average the trainable weights of all replicas, and average the rest at once.

        The replicas train on until `finish_average_`.

        Returns:
            The number of bytes that were reduced.
        """
        starts = bool(self._trainable_rows(agreed)[0])
        if self._outer is not None:
            self._outer.has_trained, starts = False, True
        # An outer optimizer also moves equal tensors, and compression handles all tensors or none.
        takes_all = self._outer is not None or self._compressed is not None
        self._agreed_when_sent = {} if takes_all else agreed
        self._places_when_sent = list(self._local[0].trainable_places)
        rows = self._trainable_rows(self._agreed_when_sent)
        self._pending = PendingAverage(rows, self._start_mean) if starts else None
        num_bytes = 0 if self._pending is None else self._pending.num_bytes
        others = (TensorKind.FROZEN, TensorKind.BUFFERS)
        everyone = range(self._replicas.size)
        return num_bytes + self.average_without_outer_step_(everyone, others, agreed)

    def forward_partial_means_(self) -> None:
        """Half-way to the end of a compressed average: send the means of parts to all replicas."""
        if self._compressed is not None:
            self._compressed.forward_partial()

    def finish_average_(self) -> None:
        """Wait for the average that was started, if any, and move every replica by it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        refresh_all(self._local)
        first, places = self._local[0], self._places_when_sent
        is_same = places == first.trainable_places
        if is_same:  # unless a parameter was frozen in between
            pending.rebind(self._trainable_rows(self._agreed_when_sent))
        targets = pending.apply_(None if self._outer is None else self._outer.step_towards)
        if self._compressed is not None and is_same:
            self._compressed.remember(places, first.of_kind(TensorKind.TRAINABLE), targets)
        else:
            self.clear_error_feedback()

    def cancel_average(self) -> None:
        """Discard the average that was started, if any."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.cancel()
        self.clear_error_feedback()

    def _trainable_rows(self, agreed: Agreed) -> Rows:
        return [tensors.to_reduce((TensorKind.TRAINABLE,), agreed)[0] for tensors in self._local]

    def _start_mean(self, rows: Rows) -> tuple[Means, int]:
        first = self._local[0]
        if self._compressed is not None and self._compressed.knows(first.trainable_places):
            return self._compressed.begin_average(first.of_kind(TensorKind.TRAINABLE))
        num_bytes = sum(flat.nbytes for flat in rows[0])
        return self._replicas.begin_average(rows), num_bytes
