"""Questions about the learning rate: where a run ends, from which start, at what cost."""
