"""Forms of what a wire, a step, a stack and a decision take, and their fit to points."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from benchmarks.systems.points import Point
from hdet.tensors.buckets import SLOTS

CORES = 16
"""Of the machine on which the points were measured."""
CACHED_BYTES = 16 << 20
"""Beyond it a message falls out of the caches near a core."""
PASSES = 8
"""How often the mean of stacked replicas reads or writes each of them."""
LINEAR = 0.1
"""The relative error from which on it counts by its amount."""
GUESSES = [{"replica": 1e-3, "byte": byte} for byte in (1e-14, 1e-13, 1e-12)]
"""Where a fit sets out from, if it has to know whether host or device is slower."""
Coefficients = Mapping[str, float]
Features = dict[str, float]


def ring(processes: float, num_bytes: float) -> float:
    """Bytes that each of them sends.

    >>> ring(4, 100.0)
    150.0
    """
    return 2 * (processes - 1) / processes * num_bytes


def wire(point: Point, _: Coefficients) -> Features:
    """A ring; what is out of the caches is fetched from memory that all processes share."""
    num, num_bytes = point["processes"], 4 * point["parameters"]
    return {
        "start": 1.0,
        "latency": 2 * (num - 1),
        "byte": ring(num, num_bytes),
        "shared_byte": 2 * (num - 1) * max(num_bytes - CACHED_BYTES, 0),
    }


def local_step(point: Point, _: Coefficients) -> Features:
    """Matrix products, and an optimizer that reads memory which all processes share."""
    size = point["parameters"]
    return {
        "start": 1.0,
        "token": size * point["tokens"],
        "parameter": size,
        "shared_parameter": size * point["processes"],
    }


def shared_step(all_reduce: Coefficients) -> Callable[[Point, Coefficients], Features]:
    """The same, and the share of its gradients' all-reduce that is waited for."""

    def features(point: Point, known: Coefficients) -> Features:
        wired = predict(wire, all_reduce, point)
        return {**local_step(point, known), "exposed": wired}

    return features


def stacked(point: Point, known: Coefficients) -> Features:
    """The host launches while the device computes: the slower of the two is waited for."""
    launches = point["replicas"]
    moved = PASSES * point["replicas"] * 4 * point["parameters"]
    on_device = moved * known["byte"] > launches * known["replica"]
    return {
        "start": 1.0,
        "replica": 0.0 if on_device else launches,
        "byte": moved if on_device else 0.0,
    }


def deciding(point: Point, _: Coefficients) -> Features:
    return {"start": 1.0, "replica": point["replicas"]}


Form = Callable[[Point, Coefficients], Features]


def predict(form: Form, known: Coefficients, point: Point) -> float:
    return sum(known[name] * value for name, value in form(point, known).items())


class Part(NamedTuple):
    """Something that is timed, and which of its points are kept from the fit."""

    kind: str
    key: str
    form: Form
    held_out: Callable[[Point], bool]
    inside: Callable[[Point], bool] = lambda point: True
    """Whether the model is about a point at all."""


def is_between(point: Point) -> bool:
    """Sizes of three times a power of ten, and numbers of processes that others surround or that
    are more than all others."""
    return point["processes"] in (3, 8) or str(point["parameters"])[0] == "3"


def is_middle(point: Point) -> bool:
    return point["processes"] == 4 or 1.5e6 < point["parameters"] < 2e6


def is_other_stack(point: Point) -> bool:
    return point["replicas"] in (8, 32) or point["parameters"] in (10**6, 10**8)


def has_cores(point: Point) -> bool:
    """A converge has several messages on the wire at a time, and each wants a core."""
    return point["processes"] * SLOTS <= CORES


def parts_of(all_reduce: Coefficients) -> dict[str, Part]:
    return {
        "converge": Part("wire", "converge", wire, is_between, has_cores),
        "local_step": Part("step", "local", local_step, is_middle),
        "shared_step": Part("step", "shared", shared_step(all_reduce), is_middle),
        "stacked_converge": Part("stack", "converge", stacked, is_other_stack),
        "stacked_end": Part("stack", "end", stacked, is_other_stack),
    }


ALL_REDUCE = Part("wire", "all_reduce", wire, is_between)
DECISION = Part(
    "decision",
    "seconds",
    deciding,
    lambda point: point["replicas"] == 512,
    lambda point: point["knobs"] == 1 and point["replicas"] >= 64,
)


class Fit(NamedTuple):
    coefficients: dict[str, float]
    held_out: list[dict[str, float]]
    """Each with what the model says of it, and by how many per cent that is off."""
    outside: list[dict[str, float]]
    """The same for points that the model is not about."""


def fit(part: Part, known: Mapping[str, Sequence[Point]]) -> Fit:
    own = [point for point in known[part.kind] if part.inside(point)]
    used = [point for point in own if not part.held_out(point)]
    tried = [settle(part, used, guess) for guess in GUESSES]
    coefficients = min(tried, key=lambda found: loss(part, used, found))

    def checked(kept: Sequence[Point]) -> list[dict[str, float]]:
        results = []
        for point in kept:
            said = predict(part.form, coefficients, point)
            error = 100 * (said / point[part.key] - 1)
            results.append({**point, "predicted": said, "error_pct": error})
        return results

    others = [point for point in known[part.kind] if not part.inside(point)]
    return Fit(
        coefficients,
        checked([point for point in own if part.held_out(point)]),
        checked(others) if part.kind == "wire" else [],
    )


def settle(part: Part, used: Sequence[Point], guess: Coefficients) -> dict[str, float]:
    """Which of two things is slower is known when both are: guess, fit, and look again."""
    found = dict(guess)
    for _ in range(10):
        rows = [part.form(point, found) for point in used]
        solved = solve([list(row.values()) for row in rows], [point[part.key] for point in used])
        found = dict(zip(rows[0], solved, strict=True))
    return found


def loss(part: Part, used: Sequence[Point], known: Coefficients) -> float:
    errors = [abs(predict(part.form, known, point) / point[part.key] - 1) for point in used]
    return sum(min(error, LINEAR) * (2 * error - min(error, LINEAR)) for error in errors)


def solve(rows: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Coefficients, none of them negative, whose relative errors are small.

    >>> [round(x, 6) for x in solve([[1, 1], [1, 2], [1, 4]], [3, 5, 9])]
    [1.0, 2.0]
    """
    seconds = torch.tensor(times, dtype=torch.float64)[:, None]
    table = torch.tensor(rows, dtype=torch.float64) / seconds
    units = table.abs().amax(0).clamp(min=1e-300)
    table = table / units
    left = [place for place in range(table.shape[1]) if bool(table[:, place].any())]
    while True:
        found = robust(table[:, left])
        if bool((found >= 0).all()):
            break
        del left[int(found.argmin())]
    answer = torch.zeros(table.shape[1], dtype=torch.float64)
    answer[left] = found
    return (answer / units).tolist()


def robust(table: torch.Tensor) -> torch.Tensor:
    """What makes every row one, as nearly as can be."""
    ones = torch.ones(len(table), 1, dtype=torch.float64)
    weights = ones
    for _ in range(25):
        found = torch.linalg.lstsq(table * weights, weights, driver="gelsd").solution
        weights = (table @ found - 1).abs().clamp(min=LINEAR).rsqrt()
    return found[:, 0]


def fit_all(known: Mapping[str, Sequence[Point]]) -> dict[str, Fit]:
    first = fit(ALL_REDUCE, known)
    fits = {"all_reduce": first}
    for name, part in parts_of(first.coefficients).items():
        fits[name] = fit(part, known)
    return {**fits, "decision": fit(DECISION, known)}
