"""One log line for each decision that changes a run: scout result, rollback, exclusion."""

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import hdet
from hdet.lr_search.estimator import Estimate
from hdet.lr_search.reasons import Reason
from hdet.lr_search.trigger import SearchTrigger
from hdet.scheduler.search_result import caution_about
from tests.small_run import SmallRun, loss_of

HELD = torch.ones(4, 3, dtype=torch.float64)


def stacked(lr: float = 0.01, **options: object) -> SmallRun:
    model = torch.nn.Linear(3, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    schedule = {"total_steps": 400, "scout": None, "guard": None, **options}
    return SmallRun(
        "stacked", 0, 4, model, optimizer, lambda made: LambdaLR(made, lambda _: 1.0), **schedule
    )


def lines(captured: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in captured.readouterr().err.splitlines() if line.startswith("hdet:")]


def poison(run: SmallRun, replica: int) -> None:
    next(run.modules()[replica].parameters()).data.fill_(math.nan)


def test_scout_result_is_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    probe = hdet.Probe(lambda model: loss_of(model, HELD))
    run = stacked(preset="best", scout=hdet.Scout(), probe=probe, total_steps=2000)
    while run.scheduler.is_scouting:
        run.step()
    (line,) = lines(capsys)
    chosen = run.scheduler.get_base_lr()[0]
    assert line.startswith(f"hdet: scout chose {chosen:.3g} (")
    assert "x the given 0.01) after" in line
    assert "range tried" in line
    assert "; compared by probe; decided mostly by what " in line
    sure = re.search(r"; the best is probably within a factor of ([\d.]+) \((.*)\)\.$", line)
    assert sure is not None
    assert 1 < float(sure[1]) < 10
    parts = dict(part.split() for part in sure[2].split(", "))
    assert set(parts) >= {"prior", "gains"}
    assert sum(int(share.rstrip("%")) for share in parts.values()) == pytest.approx(100, abs=2)


def test_guess_of_the_scout_is_logged_with_its_evidence_and_warned_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All learning rates have the same score, so only the usual one of SGD counts."""
    probe = hdet.Probe(lambda model: 1 + 0 * loss_of(model, HELD))
    run = stacked(preset="best", scout=hdet.Scout(), probe=probe, total_steps=2000)
    with pytest.warns(UserWarning, match="saw too little difference .* took mostly what is usual"):
        while run.scheduler.is_scouting:
            run.step()
    (line,) = lines(capsys)
    assert "decided mostly by what is usual for this optimizer" in line
    assert line.endswith("(prior 100%).")


@pytest.mark.parametrize(
    ("prior", "factor", "reason", "is_warned_of"),
    [
        (0.6, 3.0, Reason.MOSTLY_USUAL, True),
        (0.6, 3.0, Reason.BELOW_DIVERGENCE, True),
        (0.6, 0.3, Reason.MOSTLY_USUAL, True),
        (0.6, 0.3, Reason.BELOW_DIVERGENCE, False),
        (0.6, 1.9, Reason.MOSTLY_USUAL, False),
        (0.4, 30.0, Reason.FOUND, False),
    ],
)
def test_change_of_the_learning_rate_is_warned_of_where_the_usual_one_decides_more_than_half(
    prior: float, factor: float, reason: Reason, is_warned_of: bool
) -> None:
    search = SimpleNamespace(reasons=[Reason.SWEPT])
    trial: Any = SimpleNamespace(search=search, trigger=SearchTrigger.START)
    estimate = Estimate(factor, reason, 2.0, {"prior": prior, "gains": 1 - prior})
    text = caution_about(trial, estimate)
    assert text.startswith("the scout saw too little difference") == is_warned_of
    assert bool(text) == is_warned_of


def test_small_change_of_the_learning_rate_by_a_guess_is_not_warned_of() -> None:
    probe = hdet.Probe(lambda model: 1 + 0 * loss_of(model, HELD))
    run = stacked(lr=0.2, preset="best", scout=hdet.Scout(), probe=probe, total_steps=2000)
    while run.scheduler.is_scouting:  # a warning is an error
        run.step()
    assert 0.5 <= run.scheduler.get_base_lr()[0] / 0.2 <= 2


def test_exclusion_at_the_end_of_a_cycle_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    run = stacked(sync_every=2, gradients="local")
    run.step()
    poison(run, 2)
    run.step()
    (line,) = lines(capsys)
    assert line.startswith("hdet: replica 2 was left out of the average at step 2: ")


@pytest.mark.parametrize("how", ["converge", "consensus"])
def test_exclusion_on_demand_is_logged(capsys: pytest.CaptureFixture[str], how: str) -> None:
    run = stacked(sync_every=100)
    run.step()
    poison(run, 1)
    if how == "converge":
        run.scheduler.converge()
    else:
        with run.scheduler.consensus():
            pass
    (line,) = lines(capsys)
    assert line == (
        "hdet: replica 1 was left out of the average at step 1: weights are not finite."
    )


def test_rollback_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    run = stacked(sync_every=2, guard=hdet.Guard(), spread=0.0, controller=None)
    for _ in range(8):
        run.step()
    for replica in range(4):
        poison(run, replica)
    for _ in range(2):
        run.step()
    size, line = lines(capsys)
    assert size.startswith("hdet: guard keeps a snapshot of ")
    assert line.startswith("hdet: guard restored the weights of step 8 at step 10 (")
    assert line.endswith("; the learning rate is kept.")
