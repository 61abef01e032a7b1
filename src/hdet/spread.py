"""Who explores what: the multipliers of the spread, and which replica gets which of them.

Plain Python, no torch: every process computes the same answer, bit for bit.
"""

from hashlib import sha256


def multipliers(num_replicas: int, spread: float) -> tuple[float, ...]:
    """Evenly spaced factors in [1 - spread, 1 + spread] whose mean is 1 (paper, eq. 1).

    >>> multipliers(3, spread=0.5)
    (0.5, 1.0, 1.5)
    >>> multipliers(1, spread=0.5)
    (1.0,)
    """
    centre = (num_replicas - 1) / 2
    return tuple(1 + spread * (r - centre) / max(centre, 0.5) for r in range(num_replicas))


def assignment(num_replicas: int, *, seed: int, cycle: int, knob: str) -> tuple[int, ...]:
    """The permutation that gives replica r the multiplier number `assignment[r]` (paper, eq. 9).

    It depends on (seed, cycle, knob) and on nothing else: no generator is read or written, so an
    extra random draw on one replica cannot break the bijection.

    >>> sorted(assignment(4, seed=0, cycle=7, knob="lr/head"))
    [0, 1, 2, 3]
    """
    return tuple(
        sorted(
            range(num_replicas),
            key=lambda r: sha256(f"{seed}/{cycle}/{knob}/{r}".encode()).digest(),
        )
    )


def spread_out(
    num_replicas: int, spread: float, *, seed: int, cycle: int | None, knob: str
) -> tuple[float, ...]:
    """Replica r's multiplier, for every r. Without a cycle, in the order of the replicas."""
    fan = multipliers(num_replicas, spread)
    if cycle is None:
        return fan
    return tuple(fan[i] for i in assignment(num_replicas, seed=seed, cycle=cycle, knob=knob))
