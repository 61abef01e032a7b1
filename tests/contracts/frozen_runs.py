"""The frozen runs. `python -m tests.contracts.frozen_runs --write [NAME ...]` writes files anew.

They use public names alone, so that they outlast every change inside the library. Write the files
anew only for a change of behaviour that is intended: saved states and records are those of users.
"""

import argparse
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau

import hdet
from hdet.cli import main as cli
from tests.contracts import comparison
from tests.contracts.comparison import DATA
from tests.contracts.training import (
    Parts,
    Plan,
    Training,
    groups_of,
    held_out_entropy,
    held_out_error,
    lines_of,
    net,
    seeded,
)
from tests.managers import States, managed
from tests.processes import Processes

LR = 0.02


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=LR, weight_decay=0.01)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.8, weight_decay=0.01)


def low_sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)


def constant(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1.0)


def one_cycle(optimizer: Any, lr: float = LR, steps: int = 60) -> OneCycleLR:
    return OneCycleLR(optimizer, lr, total_steps=steps)


def cosine(optimizer: Any, steps: int = 60) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, steps)


def plateau(optimizer: Any) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.05)


def fixed(**options: Any) -> Any:
    """Options that need no part of the run."""
    return lambda parts: dict(options)


def several_knobs(parts: Parts) -> dict[str, Any]:
    knobs = [hdet.lr(shared=True), hdet.weight_decay(), hdet.momentum()]
    knobs += [hdet.dropout(parts.model), hdet.label_smoothing(parts.criterion)]
    return {
        "preset": "paper",
        "knobs": knobs,
        "spread": 0.2,
        "sync_every": 5,
        "controller": hdet.Tracker(threshold=0.1),
        "probe": held_out_entropy,
        "gradients": "local",
        "total_steps": 60,
    }


def other_knobs(parts: Parts) -> dict[str, Any]:
    return {
        **DIVERSE,
        "knobs": [hdet.lr(groups=["last"]), hdet.betas(), hdet.eps(), hdet.gradient_clip(1.0)],
        "design": "latin",
        "controller": hdet.Tracker(threshold=0.1),
    }


def spike(step: int, replica: int) -> float:
    """One cycle of bad batches for all replicas, and one more."""
    return 40.0 if 30 <= step < 35 or 40 <= step < 45 else 1.0


def bad_replica(step: int, replica: int) -> float:
    return math.nan if step == 17 and replica == 2 else 1.0


def everything_bad(step: int, replica: int) -> float:
    """A batch that is not finite, then a spike."""
    return math.nan if step == 43 and replica == 1 else 40.0 if 85 <= step < 90 else 1.0


def note(run: Training) -> None:
    run.scheduler.note("looked at it", loss=0.5, accuracy=0.25)


def resume(run: Training) -> None:
    run.load(run.save())


PAPER = {"spread": 0.2, "sync_every": 5, "warmup_steps": 20, "temperature": 0.3}
GUARDED = {"preset": "paper", "controller": None, "spread": 0.0, "guard": hdet.Guard()}
SCOUT = hdet.Scout(decades=2, steps=6, share=0.3)
SCOUTED = {"preset": "paper", "controller": None, "spread": 0.0, "scout": SCOUT, "sync_every": 10}
RESTART = hdet.Scout(restart=True, share=0.15)
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
LOCAL = {"preset": "paper", "controller": None, "spread": 0.1, "gradients": "local"}
DIVERSE = {"preset": "paper", "spread": 0.15, "sync_every": 5, "total_steps": 60}

RUNS: dict[str, Plan] = {
    "one-replica": Plan(
        engine="one",
        num=1,
        steps=40,
        base=partial(one_cycle, steps=40),
        optimizer=adamw,
        options=fixed(scout=None, guard=None, sync_every=5),
    ),
    "one-replica-with-guard": Plan(
        engine="one",
        num=1,
        steps=60,
        base=cosine,
        optimizer=adamw,
        options=fixed(scout=None, guard=hdet.Guard(), sync_every=5),
        factor=spike,
    ),
    "reduce-on-plateau": Plan(
        engine="stacked",
        num=3,
        steps=60,
        base=plateau,
        optimizer=adamw,
        options=fixed(preset="paper", controller=None, spread=0.1, sync_every=3),
    ),
    "paper-stacked": Plan(
        engine="stacked",
        num=4,
        steps=80,
        base=None,
        optimizer=adamw,
        options=fixed(max_lr=[LR, LR / 2], total_steps=80, **PAPER),
    ),
    "paper-in-scale-form": Plan(
        engine="stacked",
        num=3,
        steps=60,
        base=cosine,
        optimizer=adamw,
        options=fixed(**DIVERSE, optimizer_state="reset"),
        every=3,
    ),
    "paper-processes": Plan(
        engine="processes",
        num=2,
        steps=80,
        base=None,
        optimizer=adamw,
        options=fixed(max_lr=[LR, LR / 2], total_steps=80, **PAPER),
    ),
    "tracker-with-probe": Plan(
        engine="stacked",
        num=4,
        steps=60,
        base=cosine,
        optimizer=adamw,
        options=fixed(**DIVERSE, controller=hdet.Tracker(threshold=0.5), probe=held_out_error),
    ),
    "several-knobs": Plan(
        engine="stacked",
        num=8,
        steps=60,
        base=constant,
        optimizer=sgd,
        options=several_knobs,
        dropout=0.1,
        classifies=True,
        every=3,
    ),
    "other-knobs": Plan(
        engine="stacked",
        num=4,
        steps=60,
        base=cosine,
        optimizer=adamw,
        options=other_knobs,
        every=3,
    ),
    "best-preset": Plan(
        engine="stacked",
        num=4,
        steps=300,
        base=partial(one_cycle, steps=300),
        optimizer=adamw,
        options=fixed(spread=0.1, probe=held_out_error),
        every=6,
    ),
    "scout-with-probe": Plan(
        engine="stacked",
        num=4,
        steps=80,
        base=partial(one_cycle, steps=80),
        optimizer=adamw,
        options=fixed(**SCOUTED, probe=held_out_error),
    ),
    "scout-with-held-out-batches": Plan(
        engine="stacked",
        num=4,
        steps=120,
        base=partial(one_cycle, steps=120),
        optimizer=adamw,
        options=fixed(**SCOUTED),
        every=2,
    ),
    "scout-without-rewind": Plan(
        engine="stacked",
        num=4,
        steps=80,
        base=partial(one_cycle, steps=80),
        optimizer=adamw,
        options=fixed(
            **SCOUTED | {"scout": replace(SCOUT, rewind=False)},
            probe=held_out_error,
        ),
        every=4,
    ),
    "scout-by-losses-on-processes": Plan(
        engine="processes",
        num=2,
        steps=80,
        base=partial(one_cycle, steps=80),
        optimizer=adamw,
        options=fixed(**SCOUTED),
    ),
    "scout-that-restarts": Plan(
        engine="stacked",
        num=4,
        steps=240,
        base=partial(one_cycle, lr=1e-5, steps=240),
        optimizer=low_sgd,
        options=fixed(
            preset="paper",
            controller=None,
            spread=0.0,
            scout=RESTART,
            guard=hdet.Guard(),
            sync_every=10,
            probe=held_out_error,
        ),
        every=5,
    ),
    "scout-again": Plan(
        engine="stacked",
        num=4,
        steps=120,
        base=partial(cosine, steps=120),
        optimizer=adamw,
        options=fixed(**{**SCOUTED, "scout": None}, probe=held_out_error),
        actions={30: lambda run: run.scheduler.scout_again(SCOUT)},
        every=2,
    ),
    "guard-after-a-spike": Plan(
        engine="stacked",
        num=4,
        steps=80,
        base=partial(cosine, steps=80),
        optimizer=adamw,
        options=fixed(**GUARDED, sync_every=5),
        factor=spike,
    ),
    "replica-excluded": Plan(
        engine="stacked",
        num=4,
        steps=40,
        base=constant,
        optimizer=adamw,
        options=fixed(**LOCAL, sync_every=5, total_steps=40),
        factor=bad_replica,
    ),
    "average-optimizer-state": Plan(
        engine="stacked",
        num=3,
        steps=40,
        base=constant,
        optimizer=adamw,
        options=fixed(**LOCAL, sync_every=5, optimizer_state="average"),
    ),
    "outer-with-overlap": Plan(
        engine="stacked",
        num=3,
        steps=60,
        base=constant,
        optimizer=adamw,
        options=fixed(**LOCAL, sync_every=6, overlap=2, outer=OUTER, total_steps=60),
    ),
    "int8-on-processes": Plan(
        engine="processes",
        num=2,
        steps=40,
        base=constant,
        optimizer=sgd,
        options=fixed(**LOCAL, sync_every=5, compress="int8"),
    ),
    "bf16-on-processes": Plan(
        engine="processes",
        num=2,
        steps=40,
        base=constant,
        optimizer=sgd,
        options=fixed(**LOCAL, sync_every=5, compress="bf16"),
    ),
    "everything": Plan(
        engine="stacked",
        num=4,
        steps=120,
        base=partial(cosine, steps=120),
        optimizer=adamw,
        options=fixed(
            preset="paper",
            spread=0.1,
            sync_every=5,
            controller=hdet.Tracker(threshold=0.5),
            scout=SCOUT,
            guard=hdet.Guard(),
            probe=held_out_error,
            gradients="local",
        ),
        factor=everything_bad,
        actions={50: lambda run: run.scheduler.converge(), 57: note, 63: resume},
        every=2,
    ),
}


class Saved(NamedTuple):
    """A run that is saved at a step and goes on for some steps in a new one."""

    run: str
    at: int
    more: int
    checkpoint: bool = False
    """Whether `hdet.save_checkpoint` writes it; else torch.save."""


STATES: dict[str, Saved] = {
    "mid-cycle": Saved("tracker-with-probe", 28, 20),
    "mid-scout": Saved("scout-with-probe", 8, 40),
    "mid-sweep": Saved("scout-with-probe", 8, 40),
    "guard-has-lowered": Saved("guard-after-a-spike", 37, 20),
    "guard-has-a-ceiling": Saved("guard-after-a-spike", 57, 20),
    "paper-with-velocity": Saved("paper-stacked", 42, 20),
    "several-knobs": Saved("several-knobs", 32, 20),
    "checkpoint": Saved("paper-processes", 42, 20, checkpoint=True),
}
"""`mid-scout` and `guard-has-lowered` are states of an older search and guard: the search starts
over, and the guard goes on."""

RECORDS = [
    "paper-stacked",
    "several-knobs",
    "scout-with-held-out-batches",
    "scout-that-restarts",
    "guard-after-a-spike",
    "replica-excluded",
    "everything",
]


def on_every_process(pool: Processes, run: str, function: Any, *arguments: Any) -> list[Any]:
    """What `function(rank, ...)` returns in each process of a run."""
    plan = RUNS[run]
    if plan.engine == "processes":
        return pool(plan.num, function, *arguments)
    return [function(0, *arguments)]


def play(rank: int, name: str, folder: Path, nudge: float = 0.0) -> dict[str, Any]:
    """Replay a run with its record in a folder; what it did. `nudge` moves its first weights: a
    well-conditioned run ends as far from the frozen one as it began."""
    plan = RUNS[name]
    with seeded():
        trace = Training(plan, rank, folder, nudge).go(plan.steps)
    return trace if rank else {**trace, "record": lines_of(folder)}


def replay(pool: Processes, name: str, folder: Path, nudge: float = 0.0) -> list[Any]:
    return on_every_process(pool, name, play, name, folder, nudge)


# Replicas that come and go --------------------------------------------------------------------

ELASTIC = Plan(
    engine="torchft",
    num=2,
    steps=30,
    base=constant,
    optimizer=adamw,
    options=fixed(**LOCAL | {"controller": hdet.Tracker(threshold=0.05)}, sync_every=5),
)


@contextmanager
def lighthouse() -> Iterator[str]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=60_000)
    yield server.address()
    server.shutdown()


def play_elastic(rank: int, address: str) -> dict[str, Any]:
    """A run by torchft's managers. Both replicas stay to its end."""
    runs: list[Training] = []
    states: States = {
        "model": (
            lambda state: runs[0].bare.load_state_dict(state),
            lambda: runs[0].bare.state_dict(),
        ),
        "optimizer": (
            lambda state: runs[0].optimizer.load_state_dict(state),
            lambda: runs[0].optimizer.state_dict(),
        ),
    }
    with seeded(), managed(rank, address, states) as manager:
        dist.barrier()  # torchft does not wait long for a replica that is late
        runs.append(Training(ELASTIC, rank, None, manager=manager))
        return runs[0].go(ELASTIC.steps)


# Saved states ---------------------------------------------------------------------------------


def state_path(name: str) -> Path:
    saved = STATES[name]
    return DATA / "states" / (name if saved.checkpoint else f"{name}.pt")


def save(rank: int, name: str) -> None:
    saved, path = STATES[name], state_path(name)
    with seeded():
        run = Training(RUNS[saved.run], rank, None)
        run.go(saved.at)
        if saved.checkpoint:
            hdet.save_checkpoint(path, **parts_of(run))
        else:
            torch.save(run.save(), path)


def parts_of(run: Training) -> dict[str, Any]:
    return {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler}


def go_on(rank: int, name: str) -> dict[str, Any]:
    """What a new run does from a saved state on."""
    saved, path = STATES[name], state_path(name)
    with seeded():
        run = Training(RUNS[saved.run], rank, None)
        if saved.checkpoint:
            hdet.load_checkpoint(path, **parts_of(run))
        else:
            run.load(torch.load(path, weights_only=True))
        begin = run.scheduler.last_epoch
        return {"begin": begin, **run.go(saved.more)}


# Records --------------------------------------------------------------------------------------


def record_folder(name: str) -> Path:
    return DATA / "records" / name


def summary_of(folder: Path) -> dict[str, Any]:
    """What the reader of records says of one. This alone knows the reader by its name."""
    from hdet.records.reader import read

    told = read(folder)
    return {
        "starts": len(told.starts),
        "resumes": list(told.resumes),
        "cycles": [cycle.step for cycle in told.cycles],
        "converges": [converge.step for converge in told.converges],
        "notes": [{"step": note.step, "measures": dict(note.measures)} for note in told.notes],
        "scouts": [{"step": scout.step, "factor": scout.factor} for scout in told.scouts],
        "rollbacks": [
            {"step": back.step, "back_to": back.back_to, "factor": back.factor}
            for back in told.rollbacks
        ],
        "excluded": [{"step": gone.step, "replica": gone.replica} for gone in told.excluded],
        "final": [
            {"name": knob.name, "centre": knob.centre, "scale": knob.scale}
            for knob in told.cycles[-1].knobs
        ],
        "damaged": [damage.line for damage in told.damaged],
        "is_finished": told.is_finished,
    }


def export_of(folder: Path, out: Path) -> dict[str, Any]:
    """The schedule that `hdet export` writes, and what hdet.Replay makes of it."""
    assert cli.main(["export", str(folder), "--out", str(out)]) == 0
    exported = comparison.read(out)
    names = {group["name"] for group in groups_of(net())}
    if set(exported["groups"]) != names:
        return {"exported": exported}
    optimizer = adamw(net())
    schedule = hdet.Replay(optimizer, out, total_steps=12)
    played = []
    for _ in range(12):
        played.append(schedule.get_last_lr())
        optimizer.step()
        schedule.step()
    return {"exported": exported, "lrs": played}


# Files ----------------------------------------------------------------------------------------


def frozen_path(kind: str, name: str) -> Path:
    return DATA / "frozen" / f"{kind}-{name}.json"


@contextmanager
def started() -> Iterator[Processes]:
    pool = Processes(most=2)
    try:
        yield pool
    finally:
        pool.close()


def write_all() -> None:
    for folder in ("frozen", "states", "records"):
        shutil.rmtree(DATA / folder, ignore_errors=True)
        (DATA / folder).mkdir(parents=True)
    with started() as pool:
        for name in RUNS:
            with tempfile.TemporaryDirectory() as folder:
                comparison.write(frozen_path("run", name), replay(pool, name, Path(folder)))
                if name in RECORDS:
                    record_folder(name).mkdir()
                    shutil.copy(Path(folder) / "record.jsonl", record_folder(name))
        for name, saved in STATES.items():
            on_every_process(pool, saved.run, save, name)
            write_state(pool, name)
        with lighthouse() as address:
            comparison.write(frozen_path("run", "torchft"), pool(2, play_elastic, address))
    for name in RECORDS:
        write_record(name)


def write_some(names: Sequence[str]) -> None:
    """Write what some runs and saved states lead to. Records and saved states stay; a new state is
    saved."""
    with started() as pool, tempfile.TemporaryDirectory() as folder:
        for name in names:
            if name in RUNS:
                told = replay(pool, name, Path(folder) / name)
                comparison.write(frozen_path("run", name), told)
                continue
            if not state_path(name).exists():
                on_every_process(pool, STATES[name].run, save, name)
            write_state(pool, name)


def write_state(pool: Processes, name: str) -> None:
    told = on_every_process(pool, STATES[name].run, go_on, name)
    comparison.write(frozen_path("state", name), told)


def write_record(name: str) -> None:
    folder = record_folder(name)
    comparison.write(frozen_path("record", name), summary_of(folder))
    with tempfile.TemporaryDirectory() as out:
        told = export_of(folder, Path(out) / "schedule.json")
    comparison.write(frozen_path("export", name), told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True, help="write all files anew")
    parser.add_argument("names", nargs="*", help="these runs and states alone")
    names = parser.parse_args().names
    if unknown := set(names) - RUNS.keys() - STATES.keys():
        parser.error(f"names must be those of runs or states, got {sorted(unknown)}")
    write_some(names) if names else write_all()


if __name__ == "__main__":
    main()
