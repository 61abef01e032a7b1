"""The schema of a record: one class for each event, used by the writer and by the reader.

Plain Python, no torch. The names of the fields are the keys of the JSON lines, and `codec` converts
in both directions. A renamed field gets an entry in `codec.RENAMED`, for older records.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

SCHEMA = 2
"""The version of the schema. A change of the name or the meaning of a field raises it."""

Numbers = tuple[float | None, ...]
"""One number for each replica; none where a replica has none."""

Rows = tuple[tuple[float, ...], ...]
"""A table of finite numbers."""

OMITTED: dict[str, bool] = {"omit": True}
"""Marks a field that a line leaves out where it does not apply, instead of writing null."""


# Parts of events -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaInfo:
    """The engine that holds the replicas.

    Attributes:
        kind: The name of its class.
        size: The number of replicas.
    """

    kind: str = ""
    size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExcludedReplica:
    """A replica that was left out of an average.

    Attributes:
        replica: Its index.
        reason: Why it was left out.
    """

    replica: int
    reason: str = ""

    @classmethod
    def from_reasons(cls, reasons: Mapping[int, str]) -> "tuple[ExcludedReplica, ...]":
        """One entry for each replica in a mapping from index to reason."""
        return tuple(cls(replica=replica, reason=reason) for replica, reason in reasons.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvergeCost:
    """What an average cost.

    Attributes:
        bytes: The bytes that one replica sent.
        seconds: The time it took on the device.
    """

    bytes: float | None = None
    seconds: float | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The time that a part of a cycle took, in seconds on the device."""

    seconds: float | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True, kw_only=True, slots=True)
class LRTracePoints:
    """The learning rates inside a cycle, at the steps that are needed to draw them.

    Attributes:
        steps: The steps, counted from 0.
        lrs: For each learning rate, the centre of the spread at those steps.
        momenta: For each learning rate, the momentum at those steps; none if the base schedule does
            not cycle it.
    """

    steps: tuple[int, ...] = ()
    lrs: Rows = ()
    momenta: Rows | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class KnobEntry:
    """One knob in one cycle: the values of the replicas, and the decision of the controller.

    A line has the values of a learning rate under the key `lrs`, and those of any other knob under
    the key `values`.

    Attributes:
        name: The name of the knob; for a learning rate that of its parameter group.
        values: The value of each replica, in the last step of the cycle.
        is_lr: Whether the knob is a learning rate.
        centre: The centre of the spread in that step.
        space: The space of the knob: `log`, `logit` or `linear`.
        scale: The centre after the decision, in units of the base schedule for a learning rate.
        velocity: The running mean of the hypergradient.
        decay: The share of the scale that is lost at each cycle.
        floor: The lowest scale that is allowed.
        evidence: The evidence of all cycles, in standard errors; old cycles fade.
        evidence_variance: The variance that the evidence would have without an effect.
        max_move: How far the next move may go, in units of the spread; 0 before the first.
        spread_share: The share of the spread that is in use.
        hypergradient: The pull of the losses: above zero toward higher values.
        hypergradient_error: Its standard error, where it is known.
        slope: d score / d position from the joint fit of the cycle.
        slope_error: The standard error of the slope.
        decision: `up`, `down`, `stay` or `abstain`.
        reason: Why.
    """

    name: str
    values: Numbers
    is_lr: bool = False
    centre: float | None = None
    space: str | None = field(default=None, metadata=OMITTED)
    scale: float | None = None
    velocity: float | None = field(default=None, metadata=OMITTED)
    decay: float | None = field(default=None, metadata=OMITTED)
    floor: float | None = field(default=None, metadata=OMITTED)
    evidence: float | None = field(default=None, metadata=OMITTED)
    evidence_variance: float | None = field(default=None, metadata=OMITTED)
    max_move: float | None = field(default=None, metadata=OMITTED)
    spread_share: float | None = field(default=None, metadata=OMITTED)
    hypergradient: float | None = None
    hypergradient_error: float | None = None
    slope: float | None = None
    slope_error: float | None = None
    decision: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedRate:
    """A learning rate that a search tried.

    Attributes:
        factor: The learning rate, in units of the reference.
        score: What it came to; lower is better, none if it is not finite.
        error: The standard error of the score against the others.
        bad_batch: Whether a bad batch may have spoiled it, and not the learning rate.
    """

    factor: float | None = None
    score: float | None = None
    error: float | None = None
    bad_batch: bool = False


# Events --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A line of a record.

    Attributes:
        time: When it was written, in seconds since 1970.
    """

    kind: ClassVar[str]
    """The name of the event in a line."""
    time: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEvent(Event):
    """A start of the run: the first, or one that a resume follows.

    Attributes:
        settings: All options of the run, as plain data.
        replicas: The engine and the number of replicas.
        device: The device of the parameters.
        versions: The versions of hdet, Python and torch.
    """

    kind: ClassVar[str] = "run"
    settings: Mapping[str, Any] = field(default_factory=dict)
    replicas: ReplicaInfo = ReplicaInfo()
    device: str | None = None
    versions: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeEvent(Event):
    """The run continues from a saved state.

    Attributes:
        step: The step of that state. Events after it are superseded.
    """

    kind: ClassVar[str] = "resume"
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvergeEvent(Event):
    """The replicas were averaged, on demand between the ends of cycles.

    Attributes:
        step: The step after which it happened.
        excluded: The replicas that were left out.
        converge: The cost.
    """

    kind: ClassVar[str] = "converge"
    step: int
    excluded: tuple[ExcludedReplica, ...] = ()
    converge: ConvergeCost = ConvergeCost()


@dataclass(frozen=True, kw_only=True, slots=True)
class CycleEvent(ConvergeEvent):
    """The end of a cycle: an average, and what the cycle showed.

    Attributes:
        cycle: The number of the cycle, counted from 0.
        losses: The mean training loss of each replica.
        loss_errors: Their standard errors.
        weights: How much each replica counted for the controller; none if it does not weigh.
        distances: How far each replica was from the average, relative to the weights.
        scores: The score of each replica in the probe, lower is better; none without a probe.
        lr_trace: The learning rates inside the cycle.
        knobs: One entry for each parameter group, then one for each other knob.
        training: The time of the training steps; only with a probe.
        probe: The time of the probe; only with a probe.
    """

    kind: ClassVar[str] = "cycle"
    cycle: int
    losses: Numbers
    loss_errors: Numbers = ()
    weights: Numbers | None = None
    distances: Numbers = ()
    scores: Numbers | None = None
    lr_trace: LRTracePoints = LRTracePoints()
    knobs: tuple[KnobEntry, ...]
    training: Timing | None = field(default=None, metadata=OMITTED)
    probe: Timing | None = field(default=None, metadata=OMITTED)

    @property
    def probe_share(self) -> float | None:
        """The share of the cycle's time that the probe took."""
        probe = None if self.probe is None else self.probe.seconds
        training = None if self.training is None else self.training.seconds
        if probe is None or training is None or probe + training <= 0:
            return None
        return probe / (probe + training)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchEvent(Event):
    """What a learning-rate search observed up to the end of a round, and what it found.

    Attributes:
        step: The step at the end of the round.
        mid_run: Whether the search began in mid-run, around the learning rate of that moment.
        compared_by: What replicas are compared by: `probe`, `held out` or `losses`.
        points: The learning rates of the first rounds.
        refined: In older records, the learning rates around a first choice.
        noise: In older records, the gradient noise, relative to the gradient.
        reference_lrs: For each parameter group the learning rate that a factor of 1 stands for.
        found: In older records, the factor for the batch of one replica.
        factor: The factor that the run continues with; none before the last round.
        factor_reason: Why it continues with that factor.
        within: The best factor probably lies within this factor of it.
        shares: Evidence (`prior`, `gains`, `divergence`) -> its share in the decision.
        lowest_lost: In older records, the lowest factor whose score was not finite.
        divergence: The lowest factor from which the loss diverges.
        reason: Why the search ended.
    """

    kind: ClassVar[str] = "scout"
    step: int
    mid_run: bool = False
    compared_by: str = ""
    points: tuple[TriedRate, ...] = ()
    refined: tuple[TriedRate, ...] = ()
    noise: float | None = None
    reference_lrs: Mapping[str, float | None] = field(default_factory=dict)
    found: float | None = None
    factor: float | None = None
    factor_reason: str = ""
    within: float | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    lowest_lost: float | None = None
    divergence: float | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardEvent(Event):
    """The guard restored earlier weights, or changed the learning rates.

    Attributes:
        step: The step at which it acted.
        reason: Why.
        back_to: The step of the weights that were restored; `step` itself if none were.
        factor: What the learning rates were multiplied by, if they were.
        scales: The centre of each knob after it, where weights were restored.
    """

    kind: ClassVar[str] = "guard"
    step: int
    reason: str = ""
    back_to: int
    factor: float | None = None
    scales: Mapping[str, float | None] | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoteEvent(Event):
    """A remark or a measurement of the user.

    Attributes:
        step: The step it belongs to.
        text: The remark.
        measures: The measured values by name. `loss` is the held-out loss of the consensus.
    """

    kind: ClassVar[str] = "note"
    step: int
    text: str = ""
    measures: Mapping[str, float | None] = field(default_factory=dict)


EVENTS: dict[str, type[Event]] = {
    event.kind: event
    for event in (
        RunEvent,
        ResumeEvent,
        CycleEvent,
        ConvergeEvent,
        SearchEvent,
        GuardEvent,
        NoteEvent,
    )
}
"""The class of each event, by its name in a line."""
