"""Every constant of the learning-rate search, with its source.

Logarithms are to base 10. "Fitted" means: by `python -m benchmarks.zoo.zoo_fit` on the setting
half of the zoo (benchmarks/results/zoo_fit.json). All others are choices, or come from what they
name.
"""

# What is tried.

MAX_DECADES = 12.0001
"""`Scout(decades=...)` is below it: twelve, and room for rounding."""
MAX_LR = 3e4
"""The highest learning rate that is tried: no run survives more, nor does half precision."""
SWEEP_POINTS = 6
"""Learning rates of a sweep, at least."""
MAX_SWEEPS = 4
"""Sweeps of a search, at most: a shifted one tries the range beside the last one."""
SWEEP_STEPS = 8
"""Steps of a round, at most. Rounds of 6, 12 and 24 steps decide equally well (zoo_fit.json)."""
MIN_ROUND_STEPS = 3
"""Steps of a round, at least: shorter ones show nothing."""
SWEEPS_PER_BUDGET = 2
"""A sweep takes at most half of the budget if rounds stay long enough: another may follow."""
LOSS_ROUND_PARTS = 2
"""Training losses count in the last 1/2 of a round: the first steps differ little."""
NUM_SWEEPS_ASKED_FOR = 2
"""`Scout(steps=...)` allows this many sweeps beyond `share`."""

# Held-out batches.

NUM_HELD_OUT_PARTS = 8
"""Held-out parts that score a round; each part is as large as the batch of one replica."""
MIN_PART_SIZE = 8
"""A batch that a loop gives is split into parts of at least so many samples."""
DEFAULT_TAIL = 0.5
"""Last share of a cycle or round over which weights are averaged before they are scored."""

# The prior: the usual mean learning rate of a run.

ADAM_PRIOR = -2.15
"""Adam and its relatives. Fitted."""
SGD_MOMENTUM_PRIOR = -1.4
"""SGD with momentum. Fitted."""
SGD_PRIOR = -0.6
"""SGD without momentum: momentum of 0.85 makes steps 6.7 times longer."""
LION_PRIOR = -3.0
"""Lion: a seventh of Adam's, as its authors say (3 to 10 times lower)."""
ADAFACTOR_PRIOR = ADAM_PRIOR + 1.0
"""Adafactor: torch multiplies its steps by the root mean square of the parameters they change,
which is about 0.1 for a layer with a hundred inputs."""
MUON_PRIOR = -1.7
"""Muon. Fitted, on one task; 0.02 at the peak is the published value."""
PRIOR_ERROR = 0.35
"""The error of a prior. Fitted."""
PRIOR_TAIL = 3.0
"""Degrees of freedom of the prior: it gives way to what contradicts it."""
USUAL_SIZE, SIZE_POWER, SIZE_ERROR = 3e4, 0.35, 0.2
"""Models of the zoo have about so many parameters. Each factor of ten more lowers the learning rate
by so much, with so much more error: 3.3 M parameters want 2e-3 to 4e-3
(benchmarks/results/settle.json), and a GPT of 85 M wants 4e-4."""
UNKNOWN_ERROR = 3.0
"""The error of the given learning rate where there is no prior."""

# What rounds say.

NEARLY_BEST_SHARE = 0.3
"""Gains that differ by this share of the highest are about equal. Fitted."""
BEST_UNDER_PEAK = 0.25
"""The best mean learning rate lies so far below the peak of the gains. Fitted."""
GAIN_ERROR = 0.25
"""The error of that. Fitted."""
FULL_GAIN_SHARE, LOW_GAIN_ERROR = 0.15, 0.2
"""Rounds that gain this share of the start's score have so much more error; those that gain less
have the more, by the square. Fitted."""
GAIN_SIZE = 1e6
"""The gains of models up to about this size are alike. In short rounds of larger ones the peak
falls twice as fast as the best learning rate, for Adam and its relatives: a GPT of 0.1 to 85 M
parameters, whose best is known at both ends (benchmarks/results/zoo_sizes.json)."""
GAIN_NOISE_ERRORS = 2.0
"""A gain counts beyond so many of its own errors: the highest of a few is that high by chance."""
DIVERGED_SHARE = 1.0
"""A score explodes if it is worse than the start by the start's own size."""
DIVERGENCE_OVER_BEST, DIVERGENCE_ERROR = 1.95, 1.2
"""The explosion lies so far above the best mean learning rate, and the error of that. Fitted."""

# The decision.

CAUTION = 0.2
"""The run starts so many errors below the mean: too high costs more than too low. Fitted."""
MARGIN_TO_DIVERGENCE = 2.0
"""The run starts this factor below the lowest learning rate that exploded, at least."""
GRID_STEP = 0.02
"""The step of the grid on which evidence is combined."""
GRID_MARGIN, GRID_ERRORS = 2.0, 4.0
"""The grid reaches so far beyond the evidence, and so many of the lowest error."""
MAX_PEAK_OVER_MEAN = 2.5
"""A schedule that peaks further above its mean counts as one that peaks so far."""
FAR_OFF_ERRORS, FAR_OFF_RATIO = 2.0, 4.0
"""With `scout="restart"`, the given learning rate is far off beyond so many errors and this
factor."""
GUESS_RATIO = 2.0
"""A change by more than this factor without evidence is warned of."""

# When the search is left out.

MIN_MEAN_SHARE = 0.02
"""A schedule with a mean below this share of the given learning rate, such as Noam's, is about
another learning rate: a default scout is left out."""

# Chance and damage in observations.

MIN_START_SCORES = 3
"""First losses of rounds that show how much losses vary from batch to batch, at least."""
SINGLE_SCORE_NOISE = 1e-3
"""Error of a probe that gives a single score, as a share of the score."""
DIVERGED_NOISE_RATIO = 30.0
"""A replica that is this many times noisier than others has diverged: the errors of two or three
losses differ by a factor of ten by chance."""
BAD_BATCH_ALLOWANCE = 1.0
"""A bad batch is suspected if the last finite loss is no further above the first losses of all
replicas than this many of their ranges: a learning rate makes losses rise further."""
OVERFLOW = 1e300
"""Scores beyond it count as not finite: their sums would overflow."""
