"""Assignment: the multipliers of the spread, and which replica uses which of them.

Plain Python, no torch: every process computes the same answer, bit for bit.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
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

    It depends only on (seed, cycle, knob). No random generator is read, so an extra draw on one
    replica cannot break the permutation.

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
    """The multiplier of each replica; without a cycle in the order of the replicas."""
    fan = multipliers(num_replicas, spread)
    if cycle is None:
        return fan
    return tuple(fan[i] for i in assignment(num_replicas, seed=seed, cycle=cycle, knob=knob))


Column = tuple[float, ...]

DESIGNS = ("orthogonal", "latin", "permutation")
CANDIDATES = 64
"""Permutations that are compared for each column of a latin design."""


def levels(
    kind: str, num_replicas: int, knobs: Sequence[str], *, seed: int, cycle: int
) -> list[Column]:
    """The level of every replica, for each knob. It depends only on the arguments.

    With more knobs than N - 1 they take turns. A knob that rests has levels of zero.

    >>> levels("orthogonal", 2, ["dropout"], seed=0, cycle=1)
    [(-1.0, 1.0)]
    """
    if num_replicas == 1:
        return [(0.0,)] * len(knobs)
    if kind == "permutation":
        fan = [multiplier - 1 for multiplier in multipliers(num_replicas, 1.0)]
        return [
            tuple(fan[i] for i in assignment(num_replicas, seed=seed, cycle=cycle, knob=knob))
            for knob in knobs
        ]
    taking_turns = [i for i in range(len(knobs)) if is_active(i, len(knobs), num_replicas, cycle)]
    make = _orthogonal if kind == "orthogonal" else _latin
    columns = iter(make(num_replicas, len(taking_turns), seed, cycle))
    return [
        next(columns) if i in taking_turns else (0.0,) * num_replicas for i in range(len(knobs))
    ]


def is_active(knob: int, num_knobs: int, num_replicas: int, cycle: int) -> bool:
    """Whether this knob is explored in this cycle: N replicas separate N - 1 knobs.

    >>> [[is_active(k, 3, 2, cycle) for k in range(3)] for cycle in range(3)]
    [[True, False, False], [False, True, False], [False, False, True]]
    """
    most = num_replicas - 1
    return num_knobs <= most or (knob - cycle * most) % num_knobs < most


def _orthogonal(num_replicas: int, num: int, seed: int, cycle: int) -> list[Column]:
    """Columns with zero mean and no correlation, assigned anew in every cycle."""
    rows = _order(num_replicas, f"{seed}/{cycle}/rows")
    columns = contrasts(num_replicas)
    chosen = _order(len(columns), f"{seed}/{cycle}/columns")[:num]
    signs = [1.0 if _draw(f"{seed}/{cycle}/sign/{place}")[0] % 2 else -1.0 for place in range(num)]
    return [
        tuple(sign * columns[place][row] for row in rows)
        for place, sign in zip(chosen, signs, strict=True)
    ]


@lru_cache(maxsize=64)
def contrasts(num: int) -> tuple[Column, ...]:
    """`num` - 1 orthogonal columns: two levels if a Hadamard matrix exists, else waves.

    >>> contrasts(4)[0]
    (1.0, -1.0, 1.0, -1.0)
    >>> [round(level, 3) for level in contrasts(3)[0]]
    [1.0, -0.5, -0.5]
    """
    matrix = _hadamard(num)
    if matrix is not None:
        return tuple(zip(*matrix, strict=True))[1:]
    waves: list[Column] = []
    for k in range(1, (num - 1) // 2 + 1):
        angles = [2 * math.pi * k * r / num for r in range(num)]
        waves += [tuple(map(math.cos, angles)), tuple(map(math.sin, angles))]
    if num % 2 == 0:
        waves.append(tuple(1.0 if r % 2 == 0 else -1.0 for r in range(num)))
    return tuple(_to_one(wave) for wave in waves)


def _to_one(column: Column) -> Column:
    most = max(map(abs, column))
    return tuple(level / most for level in column)


def _hadamard(num: int) -> list[Column] | None:
    """A Hadamard matrix with a first column of ones, by Sylvester or Paley; None without one."""
    if num <= 2:
        return [(1.0,)] if num == 1 else [(1.0, 1.0), (1.0, -1.0)]
    half = _hadamard(num // 2) if num % 2 == 0 else None
    if half is not None:
        return [(*row, *(sign * level for level in row)) for sign in (1.0, -1.0) for row in half]
    prime = num - 1
    if prime % 4 != 3 or any(prime % d == 0 for d in range(2, math.isqrt(prime) + 1)):
        return None
    squares = {i * i % prime for i in range(1, prime)}

    def level(row: int, column: int) -> float:
        gap = (column - row) % prime
        return -1.0 if gap == 0 or gap not in squares else 1.0

    first = (1.0,) * num
    return [first, *((1.0, *(level(r, c) for c in range(prime))) for r in range(prime))]


def _latin(num_replicas: int, num: int, seed: int, cycle: int) -> list[Column]:
    """Even levels: in N cycles every replica has every level of every knob once."""
    columns = _apart(num_replicas, num, seed)
    return [
        tuple(column[(r + cycle) % num_replicas] for r in range(num_replicas)) for column in columns
    ]


@lru_cache(maxsize=64)
def _apart(num_replicas: int, num: int, seed: int) -> tuple[Column, ...]:
    """Permutations of the levels, each the candidate with the least correlation to the others."""
    columns: list[Column] = []
    for knob in range(num):
        candidates = [
            levels("permutation", num_replicas, [f"latin/{knob}/{i}"], seed=seed, cycle=0)[0]
            for i in range(CANDIDATES)
        ]
        columns.append(
            min(candidates, key=lambda one: max([_alike(one, c) for c in columns] or [0]))
        )
    return tuple(columns)


def _alike(one: Column, other: Column) -> float:
    return abs(math.fsum(a * b for a, b in zip(one, other, strict=True)))


def _order(num: int, key: str) -> list[int]:
    return sorted(range(num), key=lambda i: _draw(f"{key}/{i}"))


def _draw(key: str) -> bytes:
    return sha256(key.encode()).digest()
