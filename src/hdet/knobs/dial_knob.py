"""DialKnob: a knob on dials inside of a model or a loss, such as dropout."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from hdet.knobs.binding import BindingContext, BoundKnob, is_at_edge
from hdet.knobs.dial import Dial
from hdet.knobs.layers import clip_gradients
from hdet.knobs.specs import KnobSpec


@dataclass(frozen=True, kw_only=True)
class DialKnob(KnobSpec):
    """Dials that a factory has put into a model or a loss.

    Attributes:
        dials: Name of the knob or of its group -> dials with their start values.
        probe_value: The value while a probe scores, for a knob that changes the loss itself.
        clips: Whether the dial is the norm that gradients are clipped to.
        trains_only: Whether the knob acts in training only. Then a score sees its effect on the
            weights only.
    """

    dials: Mapping[str, Mapping[Dial, float]] = field(default_factory=dict)
    probe_value: float | None = None
    clips: bool = False
    trains_only: bool = False

    def bind(self, context: BindingContext) -> list[BoundKnob]:
        bound = [self._bind_dials(context, name, starts) for name, starts in self.dials.items()]
        if self.clips:
            self._add_clipping_hooks(context, bound[0])
        return bound

    def _bind_dials(
        self, context: BindingContext, name: str, starts: Mapping[Dial, float]
    ) -> BoundKnob:
        space = self.make_space()
        dials = [dial for dial, start in starts.items() if not is_at_edge(space, start)]
        if not dials:
            raise ValueError(
                f"knob {name!r} must start strictly inside of its {self.space} space, got "
                f"{', '.join(f'{start:g}' for start in starts.values())}."
            )
        for dial in starts:
            dial.place(len(context.optimizers), context.device)

        def write(target: int, values: Sequence[float], centre: float) -> None:
            value = torch.tensor(values) if len(values) > 1 else values[0]
            dials[target].set(value, centre)

        def read(target: int) -> list[float]:
            return [float(value) for value in dials[target].values]

        return BoundKnob(
            name=name,
            space=space,
            spread=self.spread,
            bases=[starts[dial] for dial in dials],
            write=write,
            read=read,
            schedule=self.schedule,
            dials=() if self.clips else dials,
            probe_value=self.probe_value,
            writes=frozenset(map(id, dials)),
        )

    def _add_clipping_hooks(self, context: BindingContext, bound: BoundKnob) -> None:
        """Clip before every optimizer step, as long as the run of the bound knob exists."""
        (dial,) = next(iter(self.dials.values()))
        owner = weakref.ref(bound)
        in_place = len(context.optimizers) == 1
        for replica, optimizer in enumerate(context.optimizers):

            def clip(stepped: Optimizer, args: Any, options: Any, replica: int = replica) -> None:
                if owner() is None:
                    return
                if options.get("closure") is not None or any(a is not None for a in args[1:]):
                    raise ValueError(
                        "`closure` must be None with hdet.gradient_clip: gradients are clipped "
                        "before the step, and a closure makes new ones in it."
                    )
                clip_gradients(
                    [p for group in stepped.param_groups for p in group["params"]],
                    dial.values[replica],
                    scale=getattr(stepped, "grad_scale", None),
                    in_place=in_place,
                )

            optimizer.register_step_pre_hook(clip)
