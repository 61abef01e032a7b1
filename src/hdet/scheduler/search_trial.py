"""A scout's hands: every replica trains alone with its own learning rate, and comes back."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.lr_search.constants import MAX_LR
from hdet.lr_search.observations import Observation, hit_by_bad_batch, observations_of_round
from hdet.lr_search.plan import Search
from hdet.lr_search.reasons import Reason
from hdet.lr_search.scout import Scout
from hdet.lr_search.transfer import GradientNorms
from hdet.lr_search.trigger import SearchTrigger, trigger_to_state
from hdet.replicas.protocol import HeldOutBatches, Replicas
from hdet.signals.exchange import CycleReport
from hdet.signals.loss_trace import LossTrace
from hdet.weights.replica_weights import ReplicaWeights
from hdet.weights.restore_points import StartPoint
from hdet.weights.snapshot import Snapshot


class SearchTrial:
    """One search, from the weights before it to the choice after it."""

    def __init__(
        self,
        scout: Scout,
        optimizer: Optimizer,
        model: nn.Module,
        parameters: ReplicaWeights,
        replicas: Replicas,
        total_steps: int | None,
        *,
        rates: Sequence[float],
        kind: str,
        shared: bool,
        probes: bool = False,
        trigger: SearchTrigger = SearchTrigger.START,
    ) -> None:
        """`rates` are the learning rates it looks around, one for each group, and `kind` is the
        optimizer's name, of each replica's own where they have one."""
        self.scout, self.trigger = scout, trigger
        self.rates, self._total, self._probes = list(rates), total_steps, probes
        self.search = Search(
            scout,
            num_replicas=replicas.size,
            total_steps=total_steps,
            optimizer=kind,
            shared=shared,
            brief=scout.restart and trigger.is_check,
        )
        self._parameters, self._replicas, self._model = parameters, replicas, model
        self._done = 0
        self._loss_trace = LossTrace()
        self._gradient_norms: GradientNorms | None = None
        self._outset = StartPoint(optimizer, model, parameters)
        self.held_out: HeldOutBatches | None = None
        """What replicas are compared by where there is no probe, if it is not their losses."""
        self._compared_by_before: str | None = None
        """What they were compared by in the first rounds, if that may be something else."""
        replicas.share_gradients(model, False)

    @property
    def start(self) -> Snapshot:
        """Where everyone has set out from."""
        return self._outset.snapshot

    @property
    def keeps_given_lr(self) -> bool:
        """Whether only what is far from the given learning rate is a reason to change it."""
        return self.scout.restart and self.trigger is not SearchTrigger.REQUESTED

    def lr(self, group: int, replica: int) -> float:
        return min(self.rates[group] * self.search.factors[replica], MAX_LR)

    def state_dict(self) -> dict[str, Any]:
        """Of one in mid-run also what it was asked to do: no setting of the run knows it."""
        told = {**self.search.state_dict(), **trigger_to_state(self.trigger)}
        told["by"] = self._compared_by_before or self.by  # what the outset was scored by
        if self.trigger.is_mid_run:
            told["late"] = {"scout": asdict(self.scout), "total_steps": self._total}
        return told

    def resume(self, told: Mapping[str, Any]) -> None:
        self.search.load_state_dict(told)
        self._compared_by_before = told.get("by") if self.search.start_score is not None else None

    @property
    def by(self) -> str:
        """What replicas are compared by."""
        if self._probes:
            return "probe"
        return "losses" if self.held_out is None else "held out"

    @property
    def moves(self) -> bool:
        """Whether rounds are scored by other batches than those before: then what is gained is all
        they have in common."""
        return self.held_out is not None or self._compared_by_before not in (None, self.by)

    def use_held_out(self, held: HeldOutBatches | None) -> None:
        """Compare replicas by what is held out, if there are steps for that."""
        if held is not None and not self.search.can_spare(held.steps_left):
            held.close()
            held = None
        self.held_out = held

    @property
    def is_held_out_step(self) -> bool:
        """Whether nobody trains on this step's batch."""
        return self.held_out is not None and self.held_out.steps_left > 0

    def end_held_out_step(self) -> None:
        """A step whose batch is kept; everyone comes back from it."""
        assert self.held_out is not None
        self._outset.finalize()
        self.held_out.end_step()
        self._return_after(1)
        left = self.held_out.steps_left
        if left and not self.search.can_spare(left):  # bad batches have used them up
            left = self.held_out.steps_left = 0
        if not left and self.held_out.is_empty:
            self.compare_by_losses()

    def compare_by_losses(self) -> None:
        """From now on, since nothing can be held out."""
        assert self.held_out is not None
        if self.search.start_score is not None:
            self._compared_by_before = self._compared_by_before or self.by
        self.held_out.close()
        self.held_out = None

    def advance(self, losses: Tensor | None) -> bool:
        """One step further, with these losses; whether the round is over."""
        self._loss_trace.add(losses)
        self._outset.finalize()  # also if the first step was skipped, as GradScaler does
        if self._done == 0:  # these gradients are of one place
            norms = self._parameters.checks.gradient_norms()
            self._gradient_norms = None if norms is None else GradientNorms(*norms)
            if self.held_out is not None:
                self.held_out.begin_round()
        self._done += 1
        return self._done >= self.search.num_steps

    def steps_left(self) -> int:
        return self.search.num_steps - self._done

    def scores(self, *, alike: bool) -> Tensor:
        """What every replica scores on the batches that were held out."""
        assert self.held_out is not None
        return self.held_out.rows(self.search.num_parts, alike=alike)

    def points(self, call: CycleReport) -> list[Observation]:
        """What every replica has come to in this round."""
        told = (self.search.factors, call.losses, call.errors, call.scores, call.finite)
        points = observations_of_round(*told)
        if all(point.score is not None for point in points):
            return points
        summaries = self._loss_trace.summaries(self._replicas)
        return observations_of_round(
            *told, hit_by_bad_batch(summaries, self.search.num_steps, self.search.factors)
        )

    def judge(
        self, points: Sequence[Observation], call: CycleReport, start_score: CycleReport | None
    ) -> None:
        """The same beside what the weights of before score: by losses, what all replicas saw
        together in the first step of the round."""
        before = call.first_loss if call.scores is None else None
        if start_score is not None and start_score.scores is not None:
            before = fmean(start_score.scores[0])
        known = self.search.start_score
        if self.moves and known is not None and before is not None and math.isfinite(before):
            points, before = [point.shifted_by(known - before) for point in points], None
        self.search.record_round(points, self._gradient_norms, before)

    def restore(self) -> None:
        """To the camp; or to the best replica, if the search is over and that is wanted."""
        best = self._best_replica() if self.search.is_over and not self.scout.rewind else None
        if best is None:
            self._restore()
        else:
            self._parameters.select_(best)
        self._begin_again()

    def interrupt(self) -> None:
        """Everyone comes back in the middle of a round, which starts again if there is time."""
        self._return_after(self._done)

    def _return_after(self, num_steps: int) -> None:
        self.search.interrupt(num_steps)
        self._restore()
        self._begin_again()

    def _restore(self) -> None:
        # A loop may draw its batches from the random numbers: what is held out must not come again.
        draws = self.held_out is None or self.search.is_over
        self._parameters.restore_(self.start, random_state=draws)

    def _begin_again(self) -> None:
        self._done, self._loss_trace = 0, LossTrace()
        if self.held_out is not None:
            self.held_out.end_round()

    def close(self, *, shared: bool) -> None:
        """Gradients are shared again, if they were."""
        self._outset.close()
        if self.held_out is not None:
            self.held_out.close()
        self._replicas.share_gradients(self._model, shared)

    def _best_replica(self) -> int | None:
        """That of the last round, if the best learning rate was tried there."""
        seen = self.search.refined_observations or self.search.points
        finite = [(p.score, p.factor) for p in seen if p.score is not None]
        best, last = min(finite)[1] if finite else None, self.search.last_factors
        if best in last:
            return last.index(best)
        self.search.reasons += (Reason.BEST_NOT_IN_LAST_ROUND,)
        return None
