"""A short run that every tracker records, and what it must have stored."""

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import hdet
from hdet.integrations._tracker import TrackerSink
from hdet.records.events import GuardEvent
from tests.integrations.events import Events

STEPS = 100
GUARD = GuardEvent(step=STEPS, back_to=90, factor=0.5, reason="the loss spiked")
Points = dict[str, list[tuple[int, float]]]
"""Name -> the steps and values that a tracker stored."""


class TrackedEvents(Events):
    """The events of a run, and what a tracker must have stored of them."""

    def points(self) -> Points:
        """Return some of what a tracker must have stored, computed from the events alone."""
        cycles, (scout,), (note,) = self.of("cycle"), self._scouts(), self.of("note")
        found: Points = {}
        for cycle in cycles:
            (knob,) = cycle["knobs"]
            rows = {"lr/group0": knob["lrs"], "loss": cycle["losses"], "score": cycle["scores"]}
            rows["loss_error"] = cycle["loss_errors"]
            for name, values in rows.items():
                for replica, value in enumerate(values):
                    place = found.setdefault(f"hdet/{name}/replica{replica}", [])
                    place.append((cycle["step"], value))
            found.setdefault("hdet/scale/group0", []).append((cycle["step"], knob["scale"]))
        found["hdet/scout/factor"] = [(scout["step"], scout["factor"])]
        found["hdet/guard/back_to"] = [(GUARD.step, GUARD.back_to)]
        found["hdet/note/accuracy"] = [(note["step"], 0.5)]
        return found

    def texts(self) -> list[str]:
        """Return the texts that a tracker must have shown, in their order."""
        (scout,) = self._scouts()
        return [
            f"scout: {scout['factor']:.3g} times the given learning rate",
            "guard: weights of step 90, learning rates times 0.5. the loss spiked",
            "the end",
        ]

    def _scouts(self) -> list[Mapping[str, Any]]:
        return [event for event in self.of("scout") if event["factor"] is not None]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def train(sink: TrackerSink) -> TrackedEvents:
    """Run eight replicas with a scout, and let the sink close."""
    torch.manual_seed(0)
    events = TrackedEvents()
    model = nn.Linear(4, 1)
    ensemble = hdet.StackedReplicas(model, 8)
    optimizer = ensemble.optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    base = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=STEPS)
    held_out = torch.randn(32, 4)
    scheduler = hdet.HDET(
        base,
        model=model,
        replicas=ensemble,
        probe=lambda model: loss_of(model, held_out),
        knobs=[hdet.lr()],
        sync_every=20,
        record=[events, sink],
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(16, 4)
        losses = ensemble.losses(loss_of, x + 0.3 * torch.randn(16, 4))
        losses.sum().backward()
        optimizer.step()
        scheduler.step(losses)
    scheduler._run.log.write(GUARD)  # a short run on an easy task has no spike of its own
    scheduler.note("the end", accuracy=0.5)
    del scheduler, ensemble, optimizer, base
    gc.collect()
    return events


def differing(stored: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """Return the expected points that a tracker did not store, to the precision of float32."""
    found = {name: torch.tensor(stored.get(name, []), dtype=torch.float64) for name in expected}
    wanted = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in expected.items()}
    return {
        name: (found[name], rows)
        for name, rows in wanted.items()
        if found[name].shape != rows.shape or not torch.allclose(found[name], rows, 1e-6, 1e-12)
    }


def stored_of(rows: list[tuple[str, int, float]]) -> Points:
    """Points by name from rows of a name, a step and a value."""
    found: Points = {}
    for name, step, value in rows:
        found.setdefault(name, []).append((step, value))
    return found
