"""What does a spike cost that a run survives, with and without a guard? -> spikes.json

    python -m benchmarks.learning_rate.spikes [--data FOLDER] [--out FILE]

The language model of the settling benchmark: three runs that spike (found among those of the
benchmark, so that this says nothing of how often it happens), and nine that do not, at one, two
and four times the best learning rate; without a guard, with one that sees large spikes alone, and
with one that undoes small ones.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import torch

import hdet
from benchmarks.learning_rate.methods.bench import Bench
from benchmarks.learning_rate.methods.guards import RowGuards
from benchmarks.learning_rate.methods.rows import train_rows
from benchmarks.learning_rate.methods.schedules import RowPlan
from benchmarks.result_file import RESULTS, write_result
from benchmarks.zoo.entries import ENTRIES

BEST = 2e-3
SPIKING = [RowPlan(9, (1.6e-3,), 41), RowPlan(9, (1.474e-3,), 41), RowPlan(9, (1e-3,))]
CALM = [RowPlan(seed, (BEST * by,)) for seed in (5, 6, 7) for by in (1.0, 2.0, 4.0)]
GUARDS = {
    "no guard": None,
    "large spikes alone": hdet.Guard(share=0.5),
    "small ones undone": hdet.Guard(),
}
WORDS = {
    "no guard": "no_guard",
    "large spikes alone": "large_spikes_alone",
    "small ones undone": "guard",
    "small ones undone, and lowered": "guard_lowered",
}
"""Names of guards in the headline; the last is one of an older guard."""


def headline(losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The mean loss of the runs that spike, which were chosen because they do."""
    means = {name: fmean(own[: len(SPIKING)]) for name, own in losses.items()}
    return {
        "runs": len(SPIKING) + len(CALM),
        "spiking_runs": len(SPIKING),
        **{f"spiking_{WORDS[name]}_mean_loss": mean for name, mean in means.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("HDET_DATA"))
    parser.add_argument("--out", type=Path, default=RESULTS / "spikes.json")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.backends.cuda.matmul.allow_tf32 = True
    entry = ENTRIES["language, AdamW"]
    device = torch.device("cuda" if on_gpu else "cpu")
    task = entry.make(entry.full, options.data and Path(options.data), device)
    bench, losses = Bench(task, entry.full, on_gpu, on_gpu), {}
    for name, guard in GUARDS.items():
        ended = train_rows(
            bench, [*SPIKING, *CALM], watch=None if guard is None else RowGuards(guard)
        )
        losses[name] = [float(end.live["loss"] or float("inf")) for end in ended]
        print(f"{name:<32}" + " ".join(f"{loss:.3f}" for loss in losses[name]), flush=True)
    legs = [leg._asdict() for leg in (*SPIKING, *CALM)]
    write_result(
        options.out,
        headline=headline(losses),
        settings={"legs": legs, "best_lr": BEST},
        seeds=sorted({leg.seed for leg in (*SPIKING, *CALM)}),
        losses=losses,
    )


if __name__ == "__main__":
    main()
