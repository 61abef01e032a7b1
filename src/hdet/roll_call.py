"""What replicas tell each other before a converge: one row each, and one host sync for all."""

from typing import NamedTuple

import torch
from torch import Tensor

from hdet.loss_signal import LossSignal
from hdet.parameters import Parameters
from hdet.replicas import Replicas


class RollCall(NamedTuple):
    """One entry for each replica, except for what they have in common."""

    losses: list[float | None]
    """Mean loss since the last converge; none where no loss was observed."""
    num_observed: list[int]
    finite: list[bool]
    agreed: str
    """The parameters that are equal on all replicas: "all", "still" or "nothing"."""
    states_match: bool
    """Whether the optimizer states have the same size everywhere, so that they can be averaged."""
    states_agree: bool
    """Whether they are known to be equal everywhere."""

    def require_losses(self, step: int) -> None:
        silent = [replica for replica, loss in enumerate(self.losses) if loss is None]
        if silent:
            raise ValueError(
                "`step(loss)` or `observe(loss)` must give a loss in every cycle, got none from "
                f"replica(s) {silent} in the cycle that ends at step {step}."
            )


def roll_call(
    replicas: Replicas,
    parameters: Parameters,
    signal: LossSignal,
    *,
    step: int,
    compare: str,
    with_state: bool,
) -> RollCall:
    """Gather one row from every replica. `compare` is the part that may be equal on all of them."""
    rows = signal.rows()
    device = rows.device

    def column(value: Tensor) -> Tensor:
        return value.to(device=device, dtype=torch.float64).expand(len(replicas.local))

    columns = [
        column(torch.tensor(step)),
        column(parameters.are_finite(with_state=with_state)),
        column(torch.tensor(parameters.state_numel() if with_state else 0)),
    ]
    for part in (compare, "state" if with_state else "nothing"):
        # A float64 holds 53 bits: the 64 of a fingerprint travel in two columns.
        value = parameters.fingerprint(part)
        columns += [column(value >> 32), column(value & 0xFFFFFFFF)]
    table = replicas.gather(torch.column_stack([rows.double(), *columns])).tolist()
    _check_steps([int(row[2]) for row in table])
    return RollCall(
        losses=[row[0] if row[1] else None for row in table],
        num_observed=[int(row[1]) for row in table],
        finite=[bool(row[3]) for row in table],
        agreed=compare if len({tuple(row[5:7]) for row in table}) == 1 else "nothing",
        states_match=len({row[4] for row in table}) == 1,
        states_agree=with_state and len({tuple(row[7:9]) for row in table}) == 1,
    )


def _check_steps(steps: list[int]) -> None:
    if len(set(steps)) > 1:
        raise RuntimeError(
            f"replicas must call `step()` equally often, got the steps {steps}, one for each "
            "replica. Call it once for every attempted optimizer step, also for one that "
            "GradScaler skipped."
        )
