"""What do rounds show, and what is found, with larger models? -> zoo_sizes.json

    HDET_DATA=FOLDER python -m benchmarks.zoo.zoo_sizes [--only NAME] [--rounds]

Byte GPTs and LSTMs on web documentation with AdamW, from 0.1 to 25 million parameters. First the
rounds: the gain of 8 steps at learning rates around the usual one, and where it peaks. Then, for
those models that two cores can train: a grid of plain runs of 300 steps, grown until its best is
not at an end, and hdet with 8 replicas and the same batch.
"""

import argparse
import copy
import math
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from benchmarks.result_file import RESULTS, read_result, write_result
from benchmarks.zoo.models import GPT, Size, gpt_loss
from benchmarks.zoo.runs import silence
from benchmarks.zoo.small import data
from benchmarks.zoo.small.curve import finite
from benchmarks.zoo.small.networks import LSTM
from benchmarks.zoo.tasks import seeded
from hdet.lr_search.constants import SWEEP_STEPS
from hdet.lr_search.evidence import gain_peak
from hdet.lr_search.observations import Observation
from hdet.lr_search.prior import prior_of
from hdet.scheduler.search_result import peak_over_mean

PATH = RESULTS / "zoo_sizes.json"
STEPS, REPLICAS, BATCH, CONTEXT, SEED = 300, 8, 32, 64, 0
START, FIRST_PLACES, RATIO = 0.01, (-1, 0, 1), 2.0
ROUND_PLACES = tuple(-1.5 + place / 3 for place in range(9))
"""Learning rates of rounds: logarithms, in units of the usual mean."""
ROUND_BATCH, ROUND_CONTEXT, HELD_BATCHES, LOST_SHARE, MOST_GRID = 4, 256, 8, 20.0, 8
ONE_CYCLE_MEAN = 0.53
"""The mean of OneCycleLR over its peak."""


class Model(NamedTuple):
    """How large a model is; 0 layers: an LSTM. `is_trained`: whether two cores can train it."""

    layers: int
    width: int
    is_trained: bool = True

    def make(self) -> nn.Module:
        if self.layers == 0:
            return LSTM(self.width // 4, self.width)
        return GPT(Size(256, ROUND_CONTEXT, self.layers, self.width // 64, self.width))


MODELS = {
    "gpt_0.1M": Model(2, 64),
    "gpt_0.8M": Model(4, 128),
    "gpt_3M": Model(4, 256),
    "gpt_10M": Model(6, 384, is_trained=False),
    "gpt_25M": Model(8, 512, is_trained=False),
    "lstm_0.4M": Model(0, 256),
    "lstm_6M": Model(0, 1024),
}


def bytes_at(
    text: Tensor, seed: int, step: int, batch: int = BATCH, context: int = CONTEXT
) -> Tensor:
    draw = torch.Generator().manual_seed(1_000_003 * seed + step)
    begin = torch.randint(len(text) - context - 1, (batch, 1), generator=draw)
    return text[begin + torch.arange(context + 1)].long()


@torch.no_grad()
def held_out_losses(model: nn.Module, held: Tensor, context: int = CONTEXT) -> Tensor:
    batches = (bytes_at(held, 7, number, BATCH, context) for number in range(HELD_BATCHES))
    return torch.stack([gpt_loss(model, batch) for batch in batches])


def usual_of(model: Model) -> tuple[float, float, int]:
    """The prior's mean learning rate, its error in decades, and the number of parameters."""
    num = sum(parameter.numel() for parameter in model.make().parameters())
    prior = prior_of("AdamW", num_parameters=num)
    assert prior is not None
    return 10**prior.mean, prior.error, num


def peak_of_rounds(model: Model, train: Tensor, held: Tensor) -> dict[str, Any]:
    """Where 8 steps gain most, as the search judges it: the mean of the last half of the steps."""
    first = seeded(model.make, torch.device("cpu"), SEED)
    start, points = held_out_losses(first, held, ROUND_CONTEXT), []
    for place in ROUND_PLACES:
        own = copy.deepcopy(first)
        optimizer = torch.optim.AdamW(own.parameters(), lr=usual_of(model)[0] * 10**place)
        tail = torch.optim.swa_utils.AveragedModel(own)
        for step in range(SWEEP_STEPS):
            optimizer.zero_grad()
            gpt_loss(own, bytes_at(train, SEED, step, ROUND_BATCH, ROUND_CONTEXT)).backward()
            optimizer.step()
            if step >= SWEEP_STEPS // 2:
                tail.update_parameters(own)
        gained = start - held_out_losses(tail.module, held, ROUND_CONTEXT)
        score = float(start.mean() - gained.mean())
        points.append(Observation(10**place, score, float(gained.std())))
    peak = gain_peak(points, float(start.mean()))
    gains = [round(float(start.mean()) - (point.score or math.nan), 4) for point in points]
    return {"gains": gains, "gain_peak_over_usual": None if peak is None else 10**peak.log_lr}


def run_plain(model: Model, train: Tensor, held: Tensor, lr: float) -> dict[str, Any]:
    trained = seeded(model.make, torch.device("cpu"), SEED)
    outset = float(held_out_losses(trained, held).mean())
    optimizer = torch.optim.AdamW(trained.parameters(), lr=lr)
    schedule = OneCycleLR(optimizer, max_lr=lr, total_steps=STEPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        gpt_loss(trained, bytes_at(train, SEED, step)).backward()
        optimizer.step()
        schedule.step()
    return {"outset": outset, "loss": float(held_out_losses(trained, held).mean())}


def run_hdet(model: Model, train: Tensor, held: Tensor, lr: float) -> dict[str, Any]:
    trained = seeded(model.make, torch.device("cpu"), SEED)
    outset = float(held_out_losses(trained, held).mean())
    ensemble = hdet.StackedReplicas(trained, REPLICAS)
    optimizer: Any = ensemble.optimizer(torch.optim.AdamW(trained.parameters(), lr=lr))
    schedule = OneCycleLR(optimizer, max_lr=lr, total_steps=STEPS)
    with silence():
        scheduler = hdet.HDET(schedule, model=trained, replicas=ensemble)
        for step in range(STEPS):
            optimizer.zero_grad()
            losses = ensemble.losses(gpt_loss, bytes_at(train, SEED, step))
            losses.sum().backward()
            optimizer.step()
            scheduler.step(losses.detach())
        with scheduler.consensus():
            loss = float(held_out_losses(trained, held).mean())
    return {"outset": outset, "loss": loss, "lr": scheduler.found_lr or lr}


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    pairs = []
    for name in MODELS:
        own = [row for row in rows if row["model"] == name]
        for row in own:
            if row["method"] == "rounds":
                found[f"gain_peak_over_usual_{name}"] = row["gain_peak_over_usual"]
        grid = [row for row in own if row["method"] == "plain"]
        if not grid:
            continue
        best = min(grid, key=lambda row: finite(row["loss"]))
        found[f"usual_over_best_{name}"] = best["usual"] * peak_over_mean(ONE_CYCLE_MEAN)
        found[f"usual_over_best_{name}"] /= best["lr"]
        for row in own:
            if row["method"] == "hdet":
                found[f"found_over_best_{name}"] = row["lr"] / best["lr"]
                behind = finite(row["loss"]) - best["loss"]
                pairs.append(
                    (100 * behind / best["loss"], 100 * behind / (best["outset"] - best["loss"]))
                )
    if pairs:
        found["runs"] = len(pairs)
        found["lost"] = sum(not share <= LOST_SHARE for _, share in pairs)
        found["median_pct"] = median(pct for pct, _ in pairs)
        found["worst_pct"] = max(pct for pct, _ in pairs)
        found["worst_gain_pct"] = max(share for _, share in pairs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=list(MODELS), action="append")
    parser.add_argument("--rounds", action="store_true", help="leave the runs out")
    options = parser.parse_args()
    kept = read_result(PATH)
    rows: list[dict[str, Any]] = list(kept.get("rows", []))
    text = data.text("mdn")
    train, held = text[:-400_000], text[-400_000:]

    def keep(row: dict[str, Any], begun: float) -> None:
        rows.append(row)
        settings = {"steps": STEPS, "replicas": REPLICAS, "start": START}
        write_result(
            PATH,
            headline=headline(rows),
            settings=settings,
            seeds=[SEED],
            kept=kept or None,
            rows=rows,
        )
        print(f"{time.monotonic() - begun:6.1f} s {row}", flush=True)

    for name in options.only or list(MODELS):
        done = {row["method"] for row in rows if row["model"] == name}
        model = MODELS[name]
        usual, error, num = usual_of(model)
        base = {"model": name, "parameters": num, "usual": usual, "error": error}
        if "rounds" not in done:
            begun = time.monotonic()
            keep({**base, "method": "rounds", **peak_of_rounds(model, train, held)}, begun)
        if model.is_trained and not options.rounds and "hdet" not in done:
            _train(model, base, train, held, keep)


def _train(model: Model, base: dict[str, Any], train: Tensor, held: Tensor, keep: Any) -> None:
    """The grid of a model, then hdet."""
    usual = base["usual"] * peak_over_mean(ONE_CYCLE_MEAN)
    found: dict[int, float] = {}
    places = list(FIRST_PLACES)
    while places and len(found) < MOST_GRID:
        place, begun = places.pop(0), time.monotonic()
        lr = usual * RATIO**place
        made = run_plain(model, train, held, lr)
        found[place] = finite(made["loss"])
        keep({**base, "method": "plain", "lr": lr, **made}, begun)
        if not places:
            best = min(found, key=found.__getitem__)
            places = [p for p in (best - 1, best + 1) if p not in found]
    begun = time.monotonic()
    given = START * usual * RATIO ** min(found, key=found.__getitem__)
    keep({**base, "method": "hdet", **run_hdet(model, train, held, given)}, begun)


if __name__ == "__main__":
    main()
