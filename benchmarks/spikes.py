"""A spike that a run comes back from by itself: what it costs, and what a guard makes of it.

    python -m benchmarks.spikes [--data FOLDER] [--out FILE]

The language model of the settling benchmark: three runs that spike (found among those of the
benchmark, so that this says nothing of how often it happens), and nine that do not, at one, two
and four times the best learning rate; without a guard, with one that sees large spikes alone, with
small ones undone, and with the learning rate lowered for small ones, too.
"""

import argparse
import os
from pathlib import Path
from statistics import fmean

import torch

import hdet
from benchmarks.methods import Bench, Leg, Lookout, sail
from benchmarks.settle import ENTRIES, RESULTS, write_result

BEST = 2e-3
SPIKING = [Leg(9, (1.6e-3,), 41), Leg(9, (1.474e-3,), 41), Leg(9, (1e-3,))]
CALM = [Leg(seed, (BEST * by,)) for seed in (5, 6, 7) for by in (1.0, 2.0, 4.0)]
GUARDS = {
    "no guard": None,
    "large spikes alone": hdet.Guard(small=0.5),
    "small ones undone": hdet.Guard(),
    "small ones undone, and lowered": hdet.Guard(small=0.1, share=0.1),
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
        ended = sail(bench, [*SPIKING, *CALM], watch=None if guard is None else Lookout(guard))
        losses[name] = [float(end.live["loss"] or float("inf")) for end in ended]
        print(f"{name:<32}" + " ".join(f"{loss:.3f}" for loss in losses[name]), flush=True)
    spiked = {f"{n}: mean loss of runs that spike": fmean(x[:3]) for n, x in losses.items()}
    write_result(options.out, {"headline": spiked, "losses": losses})


if __name__ == "__main__":
    main()
