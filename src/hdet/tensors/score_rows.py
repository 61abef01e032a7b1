"""The layout of a row of scores that is sent between processes."""

import math

import torch
from torch import Tensor

MAX_SCORES = 32
"""The scores of a replica that are sent. More scores are averaged in groups."""
NUM_BATCH_WORDS = 2
"""The columns of a row that identify the batches that were scored."""


def pad_scores(scores: Tensor, words: Tensor) -> Tensor:
    """A row as it is sent: the scores, padding up to `MAX_SCORES`, and the batches' words."""
    padding = scores.new_full((MAX_SCORES - len(scores),), math.nan)
    # A nan among the scores must not look like padding.
    return torch.cat([torch.where(scores.isnan(), math.inf, scores), padding, words])
