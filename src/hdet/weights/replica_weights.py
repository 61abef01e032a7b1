"""ReplicaWeights: the only writer of weights, buffers and optimizer state in a run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from hdet.replicas.protocol import Replicas
from hdet.tensors.ops import copies, copy_all
from hdet.weights.averaging import Averager
from hdet.weights.checks import WeightChecks
from hdet.weights.gradient_watch import GradientWatch
from hdet.weights.inventory import ReplicaTensors, TensorKind, refresh_all
from hdet.weights.loss_scale import LossScale
from hdet.weights.outer_optimizer import OptimizerFactory
from hdet.weights.snapshot import (
    Snapshot,
    copy_model,
    restore_snapshot,
    take_snapshot,
    write_model,
)
from hdet.weights.tail_average import TailAverage
from hdet.weights.update_watch import UpdateWatch


class ReplicaWeights:
    """The weights, buffers and optimizer states of the replicas of this process.

    Attributes:
        averager: Averages the replicas.
        checks: Reads whether tensors are finite, equal, or how far apart.
        tail: The mean of the weights over the last steps of a cycle.
        gradient_watch: Tells whether gradients have vanished.
        loss_scale: The loss scale of mixed precision.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None,
        replicas: Replicas,
        outer: OptimizerFactory | None = None,
        compress: str | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        self._replicas = replicas
        pairs = zip(replicas.optimizers(optimizer), replicas.modules(model), strict=True)
        self._local = [ReplicaTensors(*pair, replicas.unreplicated) for pair in pairs]
        self.averager = Averager(optimizer, replicas, self._local, outer, compress)
        self.checks = WeightChecks(replicas, self._local)
        self.tail = TailAverage(self._local)
        self.gradient_watch = GradientWatch(self._local)
        self.loss_scale = LossScale(scaler, replicas)

    @property
    def has_unreplicated(self) -> bool:
        """Whether replicas share a parameter, so that they can only run together."""
        return any(tensors.has_unreplicated for tensors in self._local)

    def unsaved(self) -> list[str]:
        """Names of parameters that exist once for all replicas and are no DTensor."""
        return [name for tensors in self._local for name in tensors.unsaved()]

    def beside_model(self) -> dict[str, Tensor]:
        """The parameters of a replica that its optimizer has and its model lacks, by position."""
        return self._local[0].beside_model()

    def watch_updates(self) -> UpdateWatch | None:
        """Watch the next step for an optimizer that mixes replicas; None within one process."""
        if self._replicas.size == len(self._replicas.local):
            return None
        return UpdateWatch(self._local[0], self._replicas)

    def refresh(self) -> None:
        """Find the tensors of all local replicas again; an exchange starts with it."""
        refresh_all(self._local)

    def start_cycle(self) -> None:
        """Start a new cycle; all replicas are equal, unless an average is pending."""
        self.tail.clear()
        self.averager.start_cycle()

    # Snapshots -----------------------------------------------------------------------------------

    def snapshot(self, *, offload: bool = False, equal: bool = False) -> Snapshot:
        """Copy everything that training changes, and the random states.

        Args:
            offload: Whether the copy lies in host memory.
            equal: Whether replicas have the same weights, so that one copy is enough.
        """
        self.refresh()
        outer = self.averager.outer
        taken = take_snapshot(self._local, outer, offload=offload, equal=equal)
        return taken._replace(loss_scale=self.loss_scale.state())

    def restore_(self, snapshot: Snapshot, *, random_state: bool = True) -> None:
        """Restore a snapshot, with `random_state` also the random numbers that come next."""
        self.refresh()
        self.averager.clear_error_feedback()
        restore_snapshot(snapshot, self._local, self.averager.outer, random_state=random_state)
        self.loss_scale.restore(snapshot.loss_scale)

    @contextmanager
    def at_snapshot(self, snapshot: Snapshot) -> Iterator[None]:
        """Inside, replicas have the weights and buffers of a snapshot; afterwards their own."""
        self.refresh()
        own = copy_model(self._local)
        write_model(snapshot.model, self._local)
        try:
            yield
        finally:
            self.refresh()
            write_model(own, self._local)

    def snapshot_weights(self) -> Callable[[], None]:
        """Copy weights and buffers only.

        Returns:
            A function that restores them.
        """
        self.refresh()
        own = [tensor.detach() for tensors in self._local for tensor in tensors.weights()]
        kept = copies(own)

        def restore() -> None:
            copy_all(own, kept)

        return restore

    # One replica as the source -------------------------------------------------------------------

    def select_(self, source: int) -> None:
        """Give all replicas the weights, buffers and optimizer state of one."""
        targets = [replica for replica in range(self._replicas.size) if replica != source]
        self._replicas.copy_([tensors.weights() for tensors in self._local], source, targets)
        self.reseed_state_(source, targets)

    def reseed_state_(self, source: int, targets: Sequence[int]) -> int:
        """Give replicas that were excluded the optimizer state of a healthy one.

        Where states differ in size (a replica without a step has none), the targets' states are
        cleared instead.

        Returns:
            The number of bytes that were sent.
        """
        sizes = self._replicas.gather_objects(self.checks.state_numels())
        parts = self._replicas.parts
        sizes_of_replicas = [
            size
            for first in range(0, len(sizes), parts)
            for size in zip(*sizes[first : first + parts], strict=True)
        ]
        if len(set(sizes_of_replicas)) > 1:
            for replica, tensors in zip(self._replicas.local, self._local, strict=True):
                if replica in targets:
                    tensors.clear_state()
            return 0
        states = [tensors.of_kind(TensorKind.OPTIMIZER_STATE) for tensors in self._local]
        return self._replicas.copy_(states, source, targets)

    def reset_state_(self) -> None:
        """Clear the optimizers' states, as if the optimizers were new."""
        for tensors in self._local:
            tensors.clear_state()
