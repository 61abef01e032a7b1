"""What a training loop asks of the scout: another search, and batches to compare replicas on."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hdet.lr_search.scout import Scout
from hdet.scheduler.consensus import Consensus
from hdet.scheduler.phases import Phases
from hdet.scheduler.readings import RunReadings


class SearchCalls(RunReadings):
    """The public calls about a search. `hdet.HDET` is the scheduler that has them."""

    _phases: Phases
    _consensus: Consensus
    _visiting: bool
    """Whether the model shows the consensus."""

    def scout_again(self, scout: Scout | None = None) -> None:
        """Search for another learning rate from the next step on, for example for new data.

        The replicas try learning rates around the present one, which is also the prior. Then the
        run continues from the present weights. All replicas must call it. In mid-run, short trials
        favour learning rates that are too low: use it if the learning rate is far off.

        Args:
            scout: The options of the search. None takes those of the run.

        Raises:
            RuntimeError: If no scout can run here, or if one is running.
        """
        self._refuse_while_visiting("scout_again()")
        asked = scout or self._run.settings.scout or Scout()
        model, left = self._phases.search.check_can_search(asked)
        with self._run.collective_call("`scout_again()`"):
            self._consensus.make()
            self._phases.search.again(asked, model, left)
        self._run.rates.write(everything=True)

    def hold_out(self, loss_of: Callable[..., Tensor], /, *batch: Any, **named: Any) -> None:
        """Give the scout a batch that nobody trains on, to compare learning rates on it.

        Without a probe or such batches, processes are compared by their own training losses, which
        are noisy. Call it on every process before the first step, or before `scout_again()`. Every
        process gives its own batch. Each call adds one. At the first step of the search, every
        replica gets the batches of all processes, and it scores all of them after every round.

        Batches are scored without gradients, in the mode in which the model trains, under the
        autocast state of this call, with equal random numbers. Buffers and random state are
        restored. Fewer than eight batches in all are split along the first dimension, or along
        `batch_dim` of `StackedReplicas`, into parts of at least eight samples. Batches may differ
        in size, but not in structure and dtypes.

        The batches are freed when the search ends. Without a search they are kept for the next one.
        `StackedReplicas` hold out batches by themselves, and these batches replace those.

        The state of a search contains its batches, unless a replica has several processes. To
        resume in the middle of a search, call this as often as at its start, before or after
        loading. The saved batches are used then, with `loss_of`. Without these calls, the search
        goes on by training losses.

        Args:
            loss_of: `loss_of(model, *batch, **named)` returns the mean loss, or one loss for each
                sample. It must call the model that it gets. A loss that needs gradients must enable
                them.
            batch: Tensors, or tuples, lists and dicts of them. They are copied.
            named: More of the batch, for keyword arguments of `loss_of`.

        Raises:
            RuntimeError: If a probe scores the replicas, if no search can run here, if the search
                has made its first step, or inside `consensus()`. The first step of the search
                raises it if processes called this a different number of times.
            TypeError: If `loss_of`, its result or the batch has the wrong type.
            ValueError: If the loss has the wrong shape or is not finite. The first step of the
                search raises it if processes gave different structures or dtypes.

        Example:
            >>> import hdet, torch
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> base = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4000)
            >>> scheduler = hdet.HDET(base, model=model)
            >>> def loss_of(model, x, y):
            ...     return torch.nn.functional.mse_loss(model(x), y)
            >>> scheduler.hold_out(loss_of, torch.randn(64, 2), torch.randn(64, 1))
        """
        self._refuse_while_visiting("hold_out()")
        self._phases.search.hold_out(loss_of, (batch, named))

    def _refuse_while_visiting(self, call: str) -> None:
        if self._visiting:
            raise RuntimeError(
                f"`{call}` cannot be used inside `consensus()`, which would undo it. "
                "Leave the `with` block first."
            )
