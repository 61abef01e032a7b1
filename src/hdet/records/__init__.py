"""What happened in a run, as files: written, read back, exported, played back."""
