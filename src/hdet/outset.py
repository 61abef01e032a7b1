"""What a run sets out from: kept when it is made, and looked at again until its first step.

A checkpoint may be loaded after the scheduler is made; then that is what it sets out from.
"""

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hdet.parameters import Parameters
from hdet.snapshot import Snapshot


class Outset:
    """Weights, buffers, optimizer state and random numbers before the first step."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None,
        parameters: Parameters,
        *,
        offload: bool = False,
    ) -> None:
        self._parameters, self._offload = parameters, offload
        self._kept = parameters.snapshot(offload=offload)
        self._is_settled = False
        self._hooks = self._look_when_loaded_or_stepped(optimizer, model)

    @property
    def kept(self) -> Snapshot:
        self.look()
        return self._kept

    def look(self) -> None:
        """Before the first step: whatever there is now is what the run sets out from."""
        if self._is_settled:
            return
        now = self._parameters.snapshot(offload=self._offload)
        if now.has_the_weights_of(self._kept):
            # The first forward has moved buffers already: those of before are the better ones.
            now = now._replace(buffers=self._kept.buffers)
        self._kept = now

    def take_anew(self) -> None:
        """A checkpoint was loaded: with its buffers, too."""
        if not self._is_settled:
            self._kept = self._parameters.snapshot(offload=self._offload)

    def settle(self) -> None:
        """A step is about to be made, or was attempted: from now on nothing is looked at again."""
        self.look()
        self._is_settled = True

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _look_when_loaded_or_stepped(
        self, optimizer: Optimizer, model: nn.Module | None
    ) -> Sequence[RemovableHandle]:
        weakly = weakref.ref(self)  # hooks must not outlive what they look for

        def stepped(*_: Any) -> None:
            if (outset := weakly()) is not None:
                outset.settle()

        def loaded(*_: Any) -> None:
            if (outset := weakly()) is not None:
                outset.take_anew()

        bare = getattr(model, "module", None)  # DDP's own is loaded by itself, too
        modules = [m for m in (model, bare) if isinstance(m, nn.Module)]
        return [
            optimizer.register_step_pre_hook(stepped),
            optimizer.register_load_state_dict_post_hook(loaded),
            *(module.register_load_state_dict_post_hook(loaded) for module in modules),
        ]
