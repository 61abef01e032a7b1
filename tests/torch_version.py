"""The version of torch, for tests of what torch itself lacks in old versions."""

import torch

MAJOR_MINOR = tuple(int(number) for number in torch.__version__.split(".")[:2])
IS_OLDEST = MAJOR_MINOR == (2, 6)
"""Whether this is the oldest version that hdet supports."""
