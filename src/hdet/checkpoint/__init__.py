"""Checkpoints of runs: whole or absent on disk, verified before they are loaded, on any mesh."""

from hdet.checkpoint.folders import latest_checkpoint
from hdet.checkpoint.load import load_checkpoint
from hdet.checkpoint.save import save_checkpoint

__all__ = ["latest_checkpoint", "load_checkpoint", "save_checkpoint"]
