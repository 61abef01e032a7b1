"""Can a failure lose a checkpoint? Kills inside saving, cut files, flipped bits -> saving.json

    python -m benchmarks.systems.saving [--kills 60] [--cuts 200] [--flips 1000] [--out FILE]

Kills: a run of two replicas, in DDP or stacked, saves every six steps and is killed with -9 inside
its saves: after a random delay, or at a point such as half-way through a file. It is started again
until it has had its kills. Lost are: a restart that finds no whole checkpoint or an older one than
the last that was saved, and an end that is not bit-equal to that of the run without a kill.

Cuts and flips: one file of two checkpoints is cut or deleted, or has one bit flipped. Then a run
loads the newest checkpoint, and the damaged one itself. It must have the state of the old one or
the new one, or refuse and stay as it was. Everything else is silent damage.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import hdet
from benchmarks.result_file import RESULTS, write_result
from benchmarks.systems.saving_run import (
    ENGINES,
    POINTS,
    REPLICAS,
    SAVE_EVERY,
    STEPS,
    Kill,
    TinyRun,
    live,
)

KILLS_OF_A_RUN = 3
PATIENCE_SECONDS = 20.0
"""What a process has to notice that another one is dead, before it is killed too."""
SEED = 0


# Kills ------------------------------------------------------------------------------------------


def measure_kills(num: int, folder: Path, seed: int = SEED) -> list[dict[str, Any]]:
    """Kill runs, one after another; one row for each run."""
    ends = {engine: undisturbed(folder / engine, engine) for engine in ENGINES}
    rows: list[dict[str, Any]] = []
    while (left := num - sum(len(row["kills"]) for row in rows)) > 0:
        number = len(rows)
        engine, draw = ENGINES[number % len(ENGINES)], random.Random(1000 * seed + number)
        where, most = folder / f"{engine}-{number}", min(left, KILLS_OF_A_RUN)
        rows.append({"engine": engine, **killed_run(where, engine, most, draw, ends[engine])})
        shutil.rmtree(where)
        print(f"run {number} ({engine}): {rows[-1]}", flush=True)
    return rows


def undisturbed(folder: Path, engine: str) -> list[str]:
    """How the run ends that nobody kills: the digest of each process."""
    folder.mkdir(parents=True)
    codes = one_life(folder, engine, 0, None)
    if any(codes):
        raise RuntimeError(f"the undisturbed run failed: {errors_of(folder)}")
    return digests(folder, engine)


def killed_run(
    folder: Path, engine: str, num: int, draw: random.Random, want: list[str]
) -> dict[str, Any]:
    """One run with at most so many kills, and what they have cost."""
    folder.mkdir()
    kills: list[str] = []
    lost = life = 0
    while True:
        is_last = len(kills) == num
        plan = None if is_last else plan_of(draw, processes_of(engine), is_first=life == 0)
        codes = one_life(folder, engine, life, plan)
        life += 1
        if plan is not None and -signal.SIGKILL in codes:
            kills.append(plan.point)
            lost += has_lost(folder)
        elif any(codes):
            raise RuntimeError(f"a process failed: {errors_of(folder)}")
        else:
            break
    is_equal = digests(folder, engine) == want
    return {"kills": kills, "lost": lost + (not is_equal), "is_bit_equal": is_equal}


def plan_of(draw: random.Random, processes: int, *, is_first: bool) -> Kill:
    """A random kill. The first life has nothing to load."""
    point = draw.choice([point for point in POINTS if not (is_first and point == "in load")])
    # Old checkpoints are removed from the third save on.
    save = draw.randrange(2, 5) if "removed" in point or "after" in point else draw.randrange(3)
    first_only = ("before a rename", "after the rename", "while an old one is removed")
    return Kill(
        point,
        save,
        draw.randint(1, POINTS[point]),
        draw.uniform(0.0, 0.05),
        0 if point in first_only else draw.randrange(processes),
        draw.random() < 0.3,
    )


def has_lost(folder: Path) -> bool:
    """Whether the newest whole checkpoint is older than the last one that was saved."""
    saved = folder / "saved-step"
    done = int(saved.read_text()) if saved.exists() else 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a kill damages no checkpoint
        path = hdet.latest_checkpoint(folder / "saved")
    return done > (0 if path is None else int(path.name.split("-")[1]))


def processes_of(engine: str) -> int:
    """The processes of a run."""
    return REPLICAS if engine == "ddp" else 1


def digests(folder: Path, engine: str) -> list[str]:
    """What the processes have ended with."""
    return [(folder / f"digest-{rank}").read_text() for rank in range(processes_of(engine))]


def errors_of(folder: Path) -> str:
    """The last words of the processes of the last life."""
    return "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("errors-*")))


def one_life(folder: Path, engine: str, life: int, kill: Kill | None) -> list[int]:
    """Fork the processes of a run and wait for their ends; return their exit codes."""
    size = processes_of(engine)
    pids = {_fork(folder, engine, rank, size, life, kill): rank for rank in range(size)}
    codes: dict[int, int] = {}
    first_death: float | None = None
    while len(codes) < size:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            codes[pids[pid]] = os.waitstatus_to_exitcode(status)
            if codes[pids[pid]] != 0 and first_death is None:
                first_death = time.monotonic()
                if kill is not None and kill.everyone:
                    first_death -= PATIENCE_SECONDS
            continue
        if first_death is not None and time.monotonic() - first_death > PATIENCE_SECONDS:
            for other, rank in pids.items():
                if rank not in codes:
                    os.kill(other, signal.SIGKILL)
        time.sleep(0.002)
    return [codes[rank] for rank in range(size)]


def _fork(folder: Path, engine: str, rank: int, size: int, life: int, kill: Kill | None) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with (folder / f"errors-{rank}").open("w") as errors:
            os.dup2(errors.fileno(), 2)
        warnings.simplefilter("ignore")
        live(folder, engine, rank, size, life, kill)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


# Damage -----------------------------------------------------------------------------------------


def measure_damage(
    num: int, folder: Path, change: Callable[[random.Random, bytes], bytes | None], seed: int = SEED
) -> list[dict[str, Any]]:
    """Damage files, one at a time; count what came of it, for each file."""
    run, ends = TinyRun("stacked", 0), {}
    for name in ("old", "new"):
        for _ in range(SAVE_EVERY):
            run.step()
        path = run.save(folder)
        run.load(path)
        ends[run.digest()] = name
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    draw = random.Random(seed)
    counts: dict[str, Counter[str]] = {}
    for _ in range(num):
        file = draw.choice(files)
        seen = counts.setdefault(f"{file.parent.name}/{file.name}", Counter())
        with damaged(file, change(draw, file.read_bytes())):
            for find in (lambda: hdet.latest_checkpoint(folder), lambda: file.parent):  # noqa: B023
                seen[outcome(run, find, ends)] += 1
    return [{"file": file, **counts[file]} for file in sorted(counts)]


def outcome(run: TinyRun, find: Callable[[], Path | None], ends: dict[str, str]) -> str:
    """What a run has after it loads a checkpoint: the old state, the new one, or a refusal."""
    run.step()  # to a state that is not saved
    before = run.digest()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a checkpoint is damaged
            path = find()
            if path is None:
                return "silent"
            run.load(path)
    except ValueError:
        return "refused" if run.digest() == before else "silent"
    return ends.get(run.digest(), "silent")


@contextmanager
def damaged(file: Path, content: bytes | None) -> Iterator[None]:
    """Inside, a file has other content; None is no file."""
    before = file.read_bytes()
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(before)


def cut(draw: random.Random, content: bytes) -> bytes | None:
    """The content up to a random place; None removes the file."""
    return None if draw.random() < 0.1 else content[: draw.randrange(len(content))]


def flip(draw: random.Random, content: bytes) -> bytes:
    """The content with one bit flipped."""
    place, changed = draw.randrange(len(content)), bytearray(content)
    changed[place] ^= 1 << draw.randrange(8)
    return bytes(changed)


# The whole --------------------------------------------------------------------------------------


def headline(
    kills: list[dict[str, Any]], cuts: list[dict[str, Any]], flips: list[dict[str, Any]]
) -> dict[str, int]:
    """The numbers that pages quote."""
    return {
        "kills": sum(len(row["kills"]) for row in kills),
        "lost": sum(row["lost"] for row in kills),
        "cuts_silent": sum(row.get("silent", 0) for row in cuts),
        "flips_silent": sum(row.get("silent", 0) for row in flips),
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 kills, 20 cuts, 50 flips")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--cuts", type=int, default=200)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.kills, chosen.cuts, chosen.flips = 3, 20, 50
    torch.set_num_threads(1)
    import_module("torch._dynamo")  # torch loads it at the first step: here once for all processes
    hdet.set_verbosity("WARNING")
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        kills = measure_kills(chosen.kills, folder)
        cuts = measure_damage(chosen.cuts, folder / "cuts", cut)
        flips = measure_damage(chosen.flips, folder / "flips", flip)
    default = RESULTS / "saving.json"
    if chosen.quick:
        default = Path("runs") / "saving.json"
    found = write_result(
        chosen.out or default,
        headline=headline(kills, cuts, flips),
        settings={
            "steps": STEPS,
            "save_every": SAVE_EVERY,
            "replicas": REPLICAS,
            "kills_of_a_run": KILLS_OF_A_RUN,
            "cuts": chosen.cuts,
            "flips": chosen.flips,
        },
        seeds=[SEED],
        kills=kills,
        cuts=cuts,
        flips=flips,
    )
    print(found["headline"])


if __name__ == "__main__":
    main()
