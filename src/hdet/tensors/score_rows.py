"""The layout of a row of scores as it travels between processes."""

import math

import torch
from torch import Tensor

MAX_SCORES = 32
"""So many scores of a replica travel; more are averaged in groups."""


NUM_BATCH_WORDS = 2
"""Columns of a row that say which batches were scored."""


def pad_scores(scores: Tensor, words: Tensor) -> Tensor:
    """A row of scores as it travels: up to its full length, then which batches were scored."""
    padding = scores.new_full((MAX_SCORES - len(scores),), math.nan)
    # A nan among the scores must not look like padding.
    return torch.cat([torch.where(scores.isnan(), math.inf, scores), padding, words])
