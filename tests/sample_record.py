"""Sample records of runs, computed from a formula, fast and without torch."""

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hdet.control.assignment import spread_out
from hdet.records.events import SCHEMA

Line = dict[str, Any]
SPREAD = 1 / 9

HOSTILE = [
    "<script>window.harmed = 1</script>",
    "</script><script>window.harmed = 1</script>",
    '"><img src=x onerror="window.harmed = 1">',
    "<b>bold</b>",
    '<a href="javascript:window.harmed=1">link</a>',
    "line\u2028separator",
    "%{x} $x$ &lt;",
    "half \ud800 pair",
]


@dataclass(kw_only=True)
class Sample:
    """A run to record. Its loss is quadratic in the log learning rate, lowest at `best`."""

    cycles: int = 40
    total_cycles: int | None = None
    replicas: int = 4
    knobs: Sequence[str] = ("embedding", "blocks")
    sync_every: int = 25
    lr: float = 1e-3
    best: float = 3e-3
    seed: int = 0
    held_out: bool = True
    excluded: dict[int, int] = field(default_factory=dict)
    """The replica that is excluded, for each cycle with an exclusion."""
    reason: str | None = None
    note: str = "evaluated the consensus"
    scouted: bool = False

    def lines(self, first: int = 0) -> Iterator[Line]:
        """Yield the lines of the record; with `first`, those of a run resumed at that cycle."""
        yield self.start()
        if self.scouted:
            yield self.scout()
            why = self.reason or "mean loss 9 exceeds the limit 4 (recent level 3)"
            results = {"time": 1.7e9, "step": 2, "back_to": 1, "factor": 0.5, "reason": why}
            yield {"event": "guard", **results}
        if first:
            yield {"event": "resume", "time": 1.7e9 + first, "step": first * self.sync_every}
        chance = random.Random(self.seed)
        scales = {name: 1.0 + 0.2 * place for place, name in enumerate(self.knobs)}
        for cycle in range(self.cycles):
            line = self.cycle(cycle, scales, chance)
            if cycle >= first:
                yield line
                if self.held_out and cycle % 5 == 4:
                    yield self.noted(cycle, chance)

    def start(self) -> Line:
        settings: Line = {
            "spread": SPREAD,
            "sync_every": self.sync_every,
            "controller": {"kind": "PaperController", "momentum": 0.9, "temperature": 0.1},
            "gradients": "shared",
            "optimizer_state": "keep",
            "total_steps": (self.total_cycles or self.cycles) * self.sync_every,
            "on_overrun": "hold",
            "seed": self.seed,
            "optimizer": "AdamW",
            "learning_rates": dict.fromkeys(self.knobs, self.lr),
            "groups": list(self.knobs),
            "base": {"kind": "CosineAnnealingLR"},
        }
        return {
            "event": "run",
            "time": 1.7e9,
            "settings": settings,
            "versions": {"python": "3.11.9", "torch": "2.13.0", "hdet": "0.1.0"},
            "replicas": {"kind": "StackedReplicas", "size": self.replicas},
            "device": "cpu",
        }

    def scout(self) -> Line:
        scores = [5.5, 5.4, 5.0, 4.1, 3.5, 3.4, 90.0, None]
        points = [
            {"factor": 0.01 * 4**place, "score": score, "error": 0.01}
            for place, score in enumerate(scores)
        ]
        return {
            "event": "scout",
            "time": 1.7e9,
            "step": 12,
            "compared_by": "held out",
            "points": points,
            "refined": [
                {"factor": 2.0**p, "score": 3.4 - 0.1 * p, "error": 0.01} for p in range(3)
            ],
            "noise": 2.5,
            "reference_lrs": dict.fromkeys(self.knobs, self.lr),
            "found": 2.0,
            "factor": 4.0,
            "factor_reason": "what was found, for the batch of all replicas and the schedule",
            "lowest_lost": 41.0,
            "reason": self.reason or "the lowest that gains nearly as much as the best",
        }

    def cycle(self, cycle: int, scales: dict[str, float], chance: random.Random) -> Line:
        step = (cycle + 1) * self.sync_every
        knobs = [self.knob(name, cycle, scales, chance) for name in self.knobs]
        way = cycle / max(self.total_cycles or self.cycles, 1)
        losses: list[float | None] = [
            2.2 * math.exp(-5 * way)
            + 0.25
            + 0.1 * math.log(knobs[0]["lrs"][replica] / self.best) ** 2
            + chance.gauss(0, 0.02)
            for replica in range(self.replicas)
        ]
        gone = self.excluded.get(cycle)
        if gone is not None:
            losses[gone] = None
        reason = self.reason or "loss is not finite"
        return {
            "event": "cycle",
            "time": 1.7e9 + 3 * cycle,
            "step": step,
            "cycle": cycle,
            "losses": losses,
            "loss_errors": [None if loss is None else 0.02 for loss in losses],
            "weights": [1 / self.replicas] * self.replicas,
            "distances": [0.01 * chance.uniform(0.7, 1.3) * (1.1 - way) for _ in losses],
            "excluded": [] if gone is None else [{"replica": gone, "reason": reason}],
            "converge": {"bytes": 498_000_000, "seconds": 0.031 * chance.uniform(0.9, 1.3)},
            "knobs": knobs,
        }

    def knob(self, name: str, cycle: int, scales: dict[str, float], chance: random.Random) -> Line:
        centre = self.lr * scales[name]
        fan = spread_out(self.replicas, SPREAD, seed=self.seed, cycle=cycle, knob=ascii(name))
        hypergradient = 0.04 * math.log(self.best / centre) + chance.gauss(0, 0.02)
        error = 0.02 * chance.uniform(0.8, 1.2)
        move = "stay" if abs(hypergradient) < error else "up" if hypergradient > 0 else "down"
        factor = {"stay": 1.0, "up": 1.08, "down": 0.94}[move]
        scales[name] *= factor
        why = f"lowest loss in replica {fan.index(max(fan))}: hypergradient {hypergradient:+.3f}"
        return {
            "name": name,
            "lrs": [centre * multiplier for multiplier in fan],
            "scale": scales[name],
            "velocity": hypergradient / 10,
            "decay": 0.0,
            "floor": 1e-9,
            "hypergradient": hypergradient,
            "hypergradient_error": error,
            "decision": move,
            "reason": self.reason or f"{why} ± {error:.3f}",
        }

    def noted(self, cycle: int, chance: random.Random) -> Line:
        loss = 2.1 * math.exp(-5 * cycle / self.cycles) + 0.33 + chance.gauss(0, 0.01)
        measures = {"loss": loss, "accuracy": 1 - loss / 5}
        step = (cycle + 1) * self.sync_every
        return {"event": "note", "step": step, "text": self.note, "measures": measures}


def write_lines(folder: Path, lines: Iterator[Line] | Sequence[Line]) -> Path:
    """Append lines to the record of a run folder and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "record.jsonl").open("a", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps({"schema": SCHEMA, **line}) + "\n")
    return folder


def write_sample(folder: Path, **options: Any) -> Path:
    """Write the record of a sample run and return its folder."""
    return write_lines(folder, Sample(**options).lines())


def write_hostile(folder: Path, knobs: Sequence[str] = HOSTILE) -> Path:
    """Write a record whose names, reasons and texts contain markup that must not be executed."""
    lines = list(Sample(cycles=8, knobs=knobs, excluded={2: 1}, reason=" ".join(HOSTILE)).lines())
    for line in lines:
        if line["event"] == "note":
            line["text"] = " ".join(HOSTILE)
            line["measures"] |= dict.fromkeys(HOSTILE, 0.5)
        if line["event"] == "run":
            line["settings"] |= {text: text for text in HOSTILE}
            line["device"] = line["settings"]["optimizer"] = HOSTILE[0]
    return write_lines(folder, lines)
