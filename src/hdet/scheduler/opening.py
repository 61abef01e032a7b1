"""Opens the run of a scheduler: when it is made, and again when its model is attached."""

from torch import nn
from torch.optim import Optimizer

from hdet.control.one_cycle_bounds import OneCycleBounds
from hdet.records.sinks import Record
from hdet.records.writer import Recorder
from hdet.replicas.factory import default_replicas
from hdet.replicas.protocol import Replicas
from hdet.scheduler import live_runs
from hdet.scheduler.base_schedule import BaseSchedule
from hdet.scheduler.consensus import Consensus
from hdet.scheduler.loop_checks import LoopChecks
from hdet.scheduler.phases import Phases
from hdet.scheduler.run import Prepare, Run
from hdet.scheduler.search_calls import SearchCalls


class OpenedRun(SearchCalls):
    """A scheduler with a run. `hdet.HDET` is the scheduler that prepares its settings."""

    _prepare: Prepare
    """Makes the base schedule and the settings from the user's arguments."""
    _opened_at: int | None
    """The step at which the run was opened. None after a state was loaded."""

    def attach(self, model: nn.Module) -> None:
        """Give the run its model, where the model is wrapped after the scheduler is made.

        Trainers wrap the model in DDP or FSDP2 on their own, often after they have asked for the
        schedule. The run is then prepared anew, as if it had been given this model. Call it on all
        replicas, before the first `step()` and before `load_state_dict()`.

        Args:
            model: The model as the loop calls it, wrapped in DDP or FSDP2 if it is.

        Raises:
            TypeError: If the model is not a `torch.nn.Module`.
            RuntimeError: If the run has made a step or loaded a state, or inside `consensus()`.
            ValueError: If the options do not work with this model. The run is as before then.

        Example:
            >>> import hdet, torch
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> base = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4000)
            >>> scheduler = hdet.HDET(base)
            >>> scheduler.attach(model)
            >>> scheduler.is_scouting
            True
        """
        self._refuse_while_visiting("attach()")
        if not isinstance(model, nn.Module):
            raise TypeError(f"`model` must be a torch.nn.Module, got a {type(model).__name__}.")
        old = self._run
        if old.model is model:
            return
        if self._opened_at != old.progress.step:
            raise RuntimeError(
                "`attach()` must come before the first `step()` and before `load_state_dict()`, "
                f"got it at step {old.progress.step}. Make the scheduler anew with this model."
            )
        live_runs.forget(self)
        old.release()
        try:
            self._open(self._prepare, model, old.replicas, old.log.recorder)
        except Exception:
            self._open(self._prepare, old.model, old.replicas, old.log.recorder)
            raise

    def _open(
        self,
        prepare: Prepare,
        model: nn.Module | None,
        replicas: Replicas | None,
        record: Record | Recorder | None,
    ) -> None:
        replicas = replicas or default_replicas()
        with replicas.collective_call("the construction of the scheduler", 0):
            self._start(Run(prepare, model, replicas, record, self._taken_over))
        self._prepare = prepare

    def _start(self, run: Run) -> None:
        self._run, self._visiting = run, False
        self._opened_at = run.progress.step
        self.optimizer: Optimizer = run.optimizer
        self._phases = Phases(run)
        self._consensus = Consensus(run, self._phases)
        self._phases.search.start()
        run.renew_good_point()
        if run.elastic is not None:
            # A replica that joins gets the state of another one.
            run.elastic.register(self.load_state_dict, run.progress_state)
        run.rates.write(everything=True)
        run.rates.write_after_loading()
        run.start_record()
        self._loop = LoopChecks(run)
        live_runs.register(self, run.optimizer, run.progress)

    def _taken_over(self, base: BaseSchedule) -> OneCycleBounds | None:
        """Return the bounds of a OneCycleLR whose decay the controller takes over; here none."""
        return None
