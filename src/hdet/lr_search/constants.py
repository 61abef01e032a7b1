"""Every constant of the learning-rate search, with its reason.

A constant without a named result file is a choice that no result file records.
"""

# The range that is tried.

MAX_DECADES = 12.0001
"""`Scout(decades=...)` is below it: twelve, and room for rounding (a choice)."""
MAX_LR = 3e4
"""The highest learning rate that is tried: no run survives more, nor does half precision."""
POINTS_PER_DECADE = 2
"""Learning rates per decade of a sweep, at least (a choice)."""
MAX_SWEEPS = 4
"""Sweeps of a search, at most: four of them cover twelve decades and more."""
NUM_REPEATED_POINTS = 2
"""Points that a shifted sweep tries again, so that its curve joins the one before (a choice)."""
REFINE_POINTS = 6
"""Learning rates of a refinement, at least: a parabola needs more than three (a choice)."""
MIN_REFINED_POINTS = REFINE_POINTS // 2
"""An interrupted refinement counts if it has this many points: half of them (a choice)."""
REFINE_BELOW, REFINE_ABOVE = 8.0, 2.0
"""The refinement reaches from 1/8 to 2 times its centre: longer rounds choose lower."""

# The length of rounds.

SWEEP_STEPS = 12
"""Steps of a round of a sweep, at most: longer ones prefer learning rates that are too low."""
REFINE_STEPS = 24
"""Steps of a round of a refinement, at most: set on language and fine-tuning of
benchmarks/results/settle.json."""
SWEEPS_PER_BUDGET = 4
"""One sweep takes at most a quarter of the budget, so that shifts fit (a choice)."""
NUM_SWEEPS_ASKED_FOR = 2
"""`Scout(steps=...)` allows this many sweeps beyond `share` (a choice)."""
MIN_ROUND_STEPS = 4
"""Steps of a round, at least: shorter ones show nothing (a choice)."""
MIN_LOSS_ROUND_STEPS = 6
"""Steps of a round that is judged by training losses, at least, if the scout is a default."""
MIN_TRUSTED_STEPS = 6
"""Steps below which a round chooses many times too high: set on the runs of 300 steps of
benchmarks/results/explosion.json."""
LOSS_ROUND_PARTS = 2
"""Training losses count in the last 1/2 of a round: the first steps differ little (a choice)."""
MIN_LENGTH_RATIO = 1.5
"""A refinement must be this many times longer than a sweep to show how the choice goes on with
the length: set on the variants of benchmarks/results/explosion.json."""

# Held-out batches.

NUM_HELD_OUT_PARTS, MAX_HELD_OUT_PARTS = 8, 32
"""Held-out parts that score a sweep, and a refinement at most; each part is as large as the batch
of one replica. 32 parts choose better than 16, and 16 than 8, on the feed ranker."""
NUM_REFINE_PARTS = 2 * NUM_HELD_OUT_PARTS
"""Held-out parts that score a refinement, at least (the same comparison)."""
FORWARDS_PER_STEP = 3
"""Forward passes that take the time of one training step."""
HELD_OUT_BUDGET_SHARE = 1 / 4
"""Share of the spare steps of the budget that may be used to hold batches out (a choice)."""
DEFAULT_TAIL = 0.5
"""Last share of a cycle or round over which weights are averaged before they are scored."""

# When the search is left out, and when the given learning rate is hopeless.

MIN_MEAN_SHARE = 0.02
"""A schedule with a mean below this share of the given learning rate, such as Noam's, is about
another learning rate: a default scout is left out."""
HOPELESS_SHARE = 1 / 8
"""The given learning rate is hopeless if the best mean one is below this share of it: no schedule
has so low a mean that its run survives that (a choice)."""

# The choice by scores.

NEARLY_BEST_SHARE = 0.07
"""The choice may gain less than the best by this share: set on language and fine-tuning of
benchmarks/results/settle.json with benchmarks/learning_rate/foresight.py."""
FLAT_WITHIN_ERRORS = 0.5
"""Points of a refinement within this many standard errors of the lowest are no worse: set on the
vision runs without a probe of benchmarks/results/settle.json."""
MAX_FLAT_GAIN_SHARE = 0.25
"""... but they gain at least 1 - 1/4 of what the best gains, however noisy it is (a choice)."""
LOST_SHARE = 0.25
"""A learning rate is lost if its score is worse than the start by this share of the best gain."""
MARGIN_TO_LOST = 4.0
"""The choice stays this factor below the lowest learning rate that is lost (a choice)."""
MARGIN_TO_LIMIT = 2
"""The start of a run stays this factor below what is lost or explodes (a choice)."""
MIN_PARABOLA_POINTS = 4
"""Points of a parabola, at least: three points leave nothing to average."""

# Chance.

MIN_SIGNIFICANCE = 2.5
"""Score differences of fewer standard errors are chance: a normal deviate exceeds it in 1 of 80."""
PARABOLA_SIGNIFICANCE = 2.2
"""A parabola counts if it sinks this many of its errors below the start: chance does in 1 of 15
(tests/lr_search/test_plan.py simulates it)."""
RANGE_MARGIN, MAXIMUM_MARGIN = 0.4, 0.2
"""Errors added to the expected range, and to the expected maximum, of as many normal deviates:
chance exceeds them in at most 6 of 100 (tests/lr_search/test_plan.py simulates it)."""
MAX_EXCUSED_NOISE = 3.0
"""A bad score may be this many times noisier than good ones; more noise is no excuse for it: set
on a round of the feed ranker in which most replicas diverged."""
DIVERGED_NOISE_RATIO = 30.0
"""A replica that is this many times noisier than others has diverged: the errors of two or three
losses differ by a factor of ten by chance."""
SINGLE_SCORE_NOISE = 1e-3
"""Error of a probe that gives a single score, as a share of the score (a choice)."""
BAD_BATCH_ALLOWANCE = 1.0
"""A bad batch is suspected if the last finite loss is no further above the first losses of all
replicas than this many of their ranges: a learning rate makes losses rise further (a choice)."""
OVERFLOW = 1e300
"""Scores beyond it count as not finite: their squares and sums would overflow."""

# Where scores explode.

EXPLOSION_IN_GAINS = 20.0
"""A score explodes if it is twice as high as the start, or worse by this many gains of the best:
set so that the vision task of benchmarks/results/settle.json is not cut short."""
LEVEL_OVER_LOWEST = 100
"""The lowest score counts as 1/100 of the explosion level when logarithms are interpolated."""
FLOOR_BELOW_DIVERGENCE, FLOOR_BELOW_DIVERGENCE_SGD = 90.0, 20.0
"""A mean learning rate this many times below the explosion is needlessly low: set on the variants
of benchmarks/results/explosion.json."""
CEILING_BELOW_DIVERGENCE = 16.0
"""No best mean learning rate lies nearer below the explosion in the variants of
benchmarks/results/explosion.json. SGD has no such limit there."""
LIKELY_OVER_FLOOR = 1.5
"""A refinement is centred at this many floors at most, 1/60 of the explosion; so is the choice of
rounds that are too short. Set on the variants of benchmarks/results/explosion.json."""

# From short rounds of one replica to a run of all of them.

SGD_LIKE = ("SGD", "ASGD")
"""Optimizers whose steps are as long as the gradients; all others count as like Adam."""
MAX_GRADIENT_NOISE = 1e6
"""Gradients with more noise are nothing but noise."""
MAX_HORIZON_POWER = 1.0
"""The best learning rate of k steps goes with 1 / k at most: then only the distance counts."""
HALF_EFFECT_NOISE = 2.0
"""Gradient noise at which half of what longer rounds lower comes from the noise: set on the
variants of benchmarks/results/explosion.json."""
MAX_PEAK_OVER_MEAN = 2.5
"""A schedule that peaks further above its mean counts as one that peaks so far (a choice)."""
