"""Draws a run from its record: the learning rate and the loss of every replica.

python docs/pictures/fan_out.py RUN PICTURE.svg
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

INK, FAINT = "#333333", "#dddddd"


def read(run: Path) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (run / "record.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "cycle"]


def draw(cycles: list[dict[str, Any]], path: Path) -> None:
    num = len(cycles[0]["losses"])
    colours = plt.get_cmap("viridis")([0.85 * r / max(num - 1, 1) for r in range(num)])
    plt.rcParams.update({"font.size": 10, "svg.hashsalt": "hdet", "axes.edgecolor": INK})
    figure, (rates, losses) = plt.subplots(2, 1, figsize=(8, 5.6), sharex=True)
    steps = [cycle["step"] for cycle in cycles]
    for replica in range(num):
        lrs = [cycle["knobs"][0]["lrs"][replica] for cycle in cycles]
        rates.plot(steps, lrs, ".", color=colours[replica], label=f"replica {replica}")
        values = [cycle["losses"][replica] for cycle in cycles]
        losses.plot(steps, values, "-", lw=0.9, color=colours[replica])
    start = next((c["step"] for c in cycles if c["weights"] is not None), None)
    for axes in (rates, losses):
        axes.set_yscale("log")
        axes.grid(color=FAINT, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if start is not None:
            axes.axvline(start, color=INK, lw=0.8, ls=":")
    if start is not None:
        rates.annotate(" auto-LR from here", (start, rates.get_ylim()[0]), va="bottom", color=INK)
    rates.set_ylabel("learning rate")
    rates.set_title("One training run, several learning rates", loc="left", color=INK)
    rates.legend(frameon=False, ncols=2, fontsize=9)
    losses.set_ylabel("training loss of a cycle")
    losses.set_xlabel("step (weights are averaged at every point)")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(read(Path(sys.argv[1])), Path(sys.argv[2]))
    print(f"picture: {sys.argv[2]}")
