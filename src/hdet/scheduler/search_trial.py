"""One learning-rate search on real replicas: rounds of training apart, scores, restores."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.lr_search.constants import MAX_LR, NUM_HELD_OUT_PARTS
from hdet.lr_search.observations import Observation, hit_by_bad_batch, observations_of_round
from hdet.lr_search.plan import Search
from hdet.lr_search.prior import Prior
from hdet.lr_search.reasons import Reason
from hdet.lr_search.scout import Scout
from hdet.lr_search.trigger import SearchTrigger, trigger_to_state
from hdet.replicas.protocol import HeldOutBatches, Replicas
from hdet.signals.exchange import CycleReport
from hdet.signals.loss_trace import LossTrace
from hdet.weights.replica_weights import ReplicaWeights
from hdet.weights.restore_points import StartPoint
from hdet.weights.snapshot import Snapshot


class SearchTrial:
    """One search, from the snapshot before it to the choice after it."""

    def __init__(
        self,
        scout: Scout,
        optimizer: Optimizer,
        model: nn.Module,
        weights: ReplicaWeights,
        replicas: Replicas,
        total_steps: int | None,
        *,
        rates: Sequence[float],
        prior: Prior | None,
        probes: bool = False,
        trigger: SearchTrigger = SearchTrigger.START,
    ) -> None:
        """Take a snapshot of the start, and let replicas train with their own gradients.

        Args:
            scout: The options of the search.
            optimizer: The user's optimizer.
            model: The user's model.
            weights: The weights of the replicas.
            replicas: The engine.
            total_steps: Steps of the run, or those that are left.
            rates: The learning rate of each group that a factor of 1 stands for.
            prior: The usual learning rate, in units of those.
            probes: Whether a probe scores the replicas.
            trigger: Why the search started.
        """
        self.scout, self.trigger = scout, trigger
        self.rates, self._total, self._probes = list(rates), total_steps, probes
        self.search = Search(
            scout,
            num_replicas=replicas.size,
            total_steps=total_steps,
            prior=prior,
        )
        self._weights, self._replicas, self._model = weights, replicas, model
        self._done = 0
        self._loss_trace = LossTrace()
        self._start_point = StartPoint(optimizer, model, weights)
        self.held_out: HeldOutBatches | None = None
        """The held-out batches that score replicas without a probe; none where losses do."""
        self.saved_batches: Mapping[str, Any] | None = None
        """The held-out batches of the checkpoint that this search goes on from."""
        self.has_begun = False
        """Whether a step of it was made, so that it takes no more batches of the loop."""
        self._compared_by_before: str | None = None
        """What replicas were compared by in earlier rounds, if that may have changed."""
        self.update_watch = weights.watch_updates()
        replicas.share_gradients(model, False)

    @property
    def start(self) -> Snapshot:
        """The snapshot from before the search."""
        return self._start_point.snapshot

    def keep_random_state(self) -> None:
        """Start every round with the random numbers of now."""
        self._start_point.keep_random_state()

    @property
    def keeps_given_lr(self) -> bool:
        """Whether the run keeps its learning rate unless the estimate is far off."""
        return self.scout.restart and self.trigger is not SearchTrigger.REQUESTED

    def lr(self, group: int, replica: int) -> float:
        """Return the learning rate that a replica tries for a group."""
        return min(self.rates[group] * self.search.factors[replica], MAX_LR)

    def state_dict(self) -> dict[str, Any]:
        """Return the saved form; in mid-run with the options that were asked for."""
        saved = {**self.search.state_dict(), **trigger_to_state(self.trigger)}
        saved["by"] = self._compared_by_before or self.compared_by  # what the start was scored by
        batches = self.saved_batches if self.held_out is None else self.held_out.state_dict()
        if batches:
            saved["held_out"] = batches
        if self.trigger.is_mid_run:
            saved["late"] = {"scout": asdict(self.scout), "total_steps": self._total}
        return saved

    def resume(self, saved: Mapping[str, Any]) -> None:
        self.search.load_state_dict(saved)
        self._compared_by_before = saved.get("by") if self.search.start_score is not None else None
        self.saved_batches = saved.get("held_out")

    @property
    def compared_by(self) -> str:
        """What replicas are compared by."""
        if self._probes:
            return "probe"
        return "losses" if self.held_out is None else "held out"

    @property
    def compares_gains(self) -> bool:
        """Whether rounds are scored on different batches, so that only gains can be compared."""
        before = self._compared_by_before
        if self.held_out is not None:  # after a resume, the batches are others than before it
            return not self.held_out.is_fixed or before is not None
        return before not in (None, self.compared_by)

    def use_held_out(self, held: HeldOutBatches | None) -> None:
        """Compare replicas on held-out batches, if the budget has steps for that."""
        was_loaded = (
            held is not None
            and self.saved_batches is not None
            and held.load_state_dict(self.saved_batches)
        )
        if held is not None and not self.search.can_spare(held.steps_left):
            held.close()
            held = None
        if self.held_out is not None and self.held_out is not held:
            self.held_out.close()
        self.held_out = held
        if was_loaded and self._compared_by_before == self.compared_by:
            self._compared_by_before = None  # the batches are the same as before

    @property
    def is_held_out_step(self) -> bool:
        """Whether the batch of this step is held out: no replica trains on it."""
        return self.held_out is not None and self.held_out.steps_left > 0

    def end_held_out_step(self) -> None:
        """Keep the batch of this step, and restore the start."""
        assert self.held_out is not None
        self._start_point.finalize()
        self.held_out.end_step()
        self._spend(1)
        left = self.held_out.steps_left
        if left and not self.search.can_spare(left):  # bad batches used the budget up
            left = self.held_out.steps_left = 0
        if not left and self.held_out.is_empty:
            self.compare_by_losses()

    def compare_by_losses(self) -> None:
        """Compare replicas by training losses from now on."""
        assert self.held_out is not None
        if self.search.start_score is not None:
            self._compared_by_before = self._compared_by_before or self.compared_by
        self.held_out.close()
        self.held_out = None

    def advance(self, losses: Tensor | None) -> bool:
        """Count one step with these losses; return whether the round is over."""
        self._loss_trace.add(losses)
        self._start_point.finalize()  # also if the first step was skipped, as GradScaler does
        if self._done == 0 and self.held_out is not None:
            self.held_out.begin_round()
        self._done += 1
        return self._done >= self.search.num_steps

    def steps_left(self) -> int:
        return self.search.num_steps - self._done

    def scores(self, *, alike: bool) -> Tensor:
        """Score every local replica on the held-out batches."""
        assert self.held_out is not None
        return self.held_out.rows(NUM_HELD_OUT_PARTS, alike=alike)

    def points(self, report: CycleReport) -> list[Observation]:
        """Return what the learning rate of every replica came to in this round."""
        seen = (self.search.factors, report.losses, report.errors, report.scores, report.finite)
        points = observations_of_round(*seen)
        if all(point.score is not None for point in points):
            return points
        summaries = self._loss_trace.summaries(self._replicas)
        return observations_of_round(
            *seen, hit_by_bad_batch(summaries, self.search.num_steps, self.search.factors)
        )

    def judge(
        self, points: Sequence[Observation], report: CycleReport, at_start: CycleReport | None
    ) -> None:
        """Hand the round to the search, with the score of the start.

        Without scores, the start is scored by the mean loss of the first step of the round.
        """
        before = report.first_loss if report.scores is None else None
        if at_start is not None and at_start.scores is not None:
            before = fmean(at_start.scores[0])
        known = self.search.start_score
        if (
            self.compares_gains
            and known is not None
            and before is not None
            and math.isfinite(before)
        ):
            points, before = [point.shifted_by(known - before) for point in points], None
        self.search.record_round(points, before)

    def restore(self) -> None:
        """Restore the start; after the last round with `rewind=False`, take the best replica."""
        best = self._best_replica() if self.search.is_over and not self.scout.rewind else None
        if best is None:
            self._restore()
        else:
            self._weights.select_(best)
        self._start_round()

    def interrupt(self) -> None:
        """Restore the start in the middle of a round, which is repeated if there is time."""
        self._spend(self._done)
        if not self.search.is_over:  # a run that resumes here knows no earlier random numbers
            self.keep_random_state()

    def _spend(self, num_steps: int) -> None:
        self.search.interrupt(num_steps)
        self._restore()
        self._start_round()

    def _restore(self) -> None:
        # With the random state of the start, a loop could draw the held-out batches again.
        random_state = self.held_out is None or self.search.is_over
        self._weights.restore_(self.start, random_state=random_state)

    def _start_round(self) -> None:
        self._done, self._loss_trace = 0, LossTrace()
        if self.held_out is not None:
            self.held_out.end_round()

    def close(self, *, shared: bool) -> None:
        """End the search; `shared` says whether the run shares gradients."""
        self._start_point.close()
        if self.update_watch is not None:
            self.update_watch.close()
        if self.held_out is not None:
            self.held_out.close()
        self._replicas.share_gradients(self._model, shared)

    def _best_replica(self) -> int | None:
        """Return the replica with the best learning rate, if the last round tried it."""
        seen = self.search.observations.points
        finite = [(p.score, p.factor) for p in seen if p.score is not None]
        best, last = min(finite)[1] if finite else None, self.search.last_factors
        if best in last:
            return last.index(best)
        self.search.reasons += (Reason.BEST_NOT_IN_LAST_ROUND,)
        return None
