"""Every constant of the learning-rate search, with its reason."""

MAX_LR = 3e4
"""No run survives more, and half precision cannot hold it."""
MIN_LOSS_ROUND_STEPS = 6
"""Of a round that is judged by training losses, where nobody has asked for it."""
MIN_MEAN_SHARE = 0.02
"""Of the given learning rate: a schedule whose mean is less is about another one."""

POINTS_PER_DECADE = 2
"""At least so many learning rates are tried in a decade, in several rounds if need be."""
SWEEP_STEPS, REFINE_STEPS = 12, 24
"""Of a round, if the budget allows: longer ones prefer learning rates that are too low."""
REFINE_POINTS = 6
"""At least so many learning rates are tried around a first choice ..."""
REFINE_BELOW, REFINE_ABOVE = 8.0, 2.0
"""... from this factor below it to that above: what a longer round chooses is lower."""
MIN_ROUND_STEPS = 4
"""Below so many a round tells nothing."""
LIKELY_OVER_FLOOR = 1.5
"""In units of what is needlessly low: what is tried closely lies around it at most, ..."""
MIN_TRUSTED_STEPS = 6
"""... and so does the choice if no round had so many steps, for gradients without noise: what gains
most in five steps is many times more than a run can bear."""
NUM_HELD_OUT_PARTS, MAX_HELD_OUT_PARTS = 8, 32
"""Of batches that score replicas, each as large as what one of them trains on."""
HELD_OUT_BUDGET_SHARE = 1 / 4
"""Of the steps that are left over, so many at most are for keeping batches."""
HOPELESS_SHARE = 1 / 8
"""Where this share of a learning rate is still too high for a mean one, the schedule is lost."""
MAX_SWEEPS = 4
"""Twelve decades further there is nothing to be found."""

LOST_SHARE = 0.25
"""A learning rate is lost if its score is worse than before the first step, by this share of what
the best has gained."""
NEARLY_BEST_SHARE = 0.07
"""The choice may gain less than the best by this share."""
FLAT_WITHIN_ERRORS = 0.5
"""What lies so many standard errors above the lowest of a curve is no worse: that is chance."""
MARGIN_TO_LOST = 4.0
"""The choice keeps this factor away from learning rates that are lost."""
EXPLOSION_IN_GAINS = 20.0
"""A score explodes if it is worse than before the first step by so many times what the best has
gained, or twice as high: what comes first."""
MIN_SIGNIFICANCE = 2.5
"""Differences of fewer standard errors than this say nothing."""
MAX_EXCUSED_NOISE = 3.0
"""What gains nothing may be so many times as noisy as what does: beyond, that is no excuse."""
DIVERGED_NOISE_RATIO = 30.0
"""What is so many times as noisy as others has diverged: two or three losses may seem ten times as
noisy as others by chance."""
PARABOLA_SIGNIFICANCE = 2.2
"""A parabola that is nothing but chance is hardly ever anywhere so many standard errors below a
reference."""
SINGLE_SCORE_NOISE = 1e-3
"""So much of a score is taken for chance where a probe gives a single one."""
OVERFLOW = 1e300
"""Scores beyond it count as not finite."""

SGD_LIKE = ("SGD", "ASGD")
"""Optimizers whose steps are as long as the gradients; others are like Adam."""
MAX_GRADIENT_NOISE = 1e6
"""Beyond it gradients are nothing but noise."""
FLOOR_BELOW_DIVERGENCE, FLOOR_BELOW_DIVERGENCE_SGD = 90.0, 20.0
"""A constant learning rate so many times below where scores explode is needlessly low."""
CEILING_BELOW_DIVERGENCE = 16.0
"""A constant learning rate was never the best that is less than so many times below it. For SGD
nothing of the kind is known (docs/scout.md)."""
MIN_LENGTH_RATIO = 1.5
"""Rounds that are less than so many times longer than others say nothing about longer ones: their
choices differ by where the points of a sweep happen to lie."""
MAX_HORIZON_POWER = 1.0
"""What gains most in k steps goes with 1 / k at most: then it is how far one comes that counts."""
HALF_EFFECT_NOISE = 2.0
"""At this noise of gradients half of what longer rounds lower is put down to the noise."""
MAX_PEAK_OVER_MEAN = 2.5
"""A schedule that peaks further above its mean is taken for one that peaks so far."""
DEFAULT_TAIL = 0.5
"""Of a cycle or a round: replicas are scored at the mean of their weights over it."""
