"""StartWarnings: what the construction of a run warns of, at once or at the first step."""

from hdet._messages import warn


class StartWarnings:
    """Raises the warnings of one construction, on the first process.

    What the model lacks is said at the first step: `attach()` may bring a wrapped one before.

    Args:
        speaks: Whether this process speaks for the run.
    """

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks
        self._waiting: list[str] = []

    def __call__(self, text: str) -> None:
        if self._speaks:
            warn(text)

    def of_model(self, text: str) -> None:
        """Warn of something that another model would mend, at the first step."""
        if self._speaks:
            self._waiting.append(text)

    def say_waiting(self) -> None:
        """Raise the warnings that have waited."""
        waiting, self._waiting = self._waiting, []
        for text in waiting:
            warn(text)

    def missing_wrapper(self) -> None:
        """Warn that nothing averages the gradients of the model."""
        self.of_model(
            "gradients='shared', but `model` is neither wrapped in DistributedDataParallel "
            "nor sharded by fully_shard on a mesh with the replica dimension: each replica "
            "steps with its own gradients, unless your loop averages them."
        )
