"""The zoo benchmark: runs as a user writes them, peers, regrets, and the fit of constants."""

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.zoo import peers, winner_takes_all, zoo, zoo_fit, zoo_lengths, zoo_sizes
from benchmarks.zoo.runs import run_alone, run_stacked
from benchmarks.zoo.small.catalogue import REPORTING, TASKS
from benchmarks.zoo.small.curve import best_lr, curve_rows
from benchmarks.zoo.small.task import with_steps
from benchmarks.zoo.usual_lr import mean_share, usual_lr
from benchmarks.zoo.zoo_headline import headline, reference, regrets
from hdet.lr_search import constants, evidence

DIGITS = "diffusion_digits_adamw"
"""A task whose data comes with scikit-learn."""


def test_stacked_run_from_any_start_ends_alike() -> None:
    """The learning rate that was given does not matter where the optimizer is known."""
    task = replace(TASKS[DIGITS], steps=200)
    low, high = (run_stacked(task, 6e-3 * start, 0, 8) for start in (1e-3, 1e3))
    assert low.scout_steps == high.scout_steps > 0
    assert low.peak == pytest.approx(high.peak, rel=1e-9)
    assert low.loss == pytest.approx(high.loss, rel=0.02)
    assert low.loss < low.outset / 2


def test_run_without_a_scout_keeps_its_learning_rate() -> None:
    task = replace(TASKS[DIGITS], steps=60)
    outcome = run_alone(task, 1e-3, 0, scout=None)
    assert (outcome.peak, outcome.scout_steps, outcome.rollbacks) == (1e-3, 0, 0)


@pytest.mark.parametrize("name", sorted({*peers.PEERS} - {"Step Law"}))
def test_peer_trains(name: str) -> None:
    task = replace(TASKS["mlp_digits_adam"], steps=60)
    outcome = peers.PEERS[name](task, 0)
    assert outcome.loss < outcome.outset


def test_step_law_is_a_peer_of_language_models_only() -> None:
    jobs = zoo.jobs_of([*REPORTING], ["Step Law"])
    assert {job.task for job in jobs} == set(peers.LANGUAGE_MODELS)
    task = replace(TASKS[peers.LANGUAGE_MODELS[0]], steps=10)
    outcome = peers.PEERS["Step Law"](task, 0)
    assert outcome.loss < outcome.outset


def test_winner_of_a_population_becomes_the_parent_of_all() -> None:
    task = replace(TASKS["mlp_digits_adam"], steps=10)
    members = [winner_takes_all._member(task, 1e-3, 0, place) for place in range(3)]
    for member, value in zip(members, (3.0, 1.0, 2.0), strict=True):
        with torch.no_grad():
            for parameter in member.model.parameters():
                parameter.fill_(value)
    winner = winner_takes_all._select(members, [[3.0], [1.0], [math.nan]])
    assert winner is members[1]
    for member in members:
        assert all(bool((p == 1.0).all()) for p in member.model.parameters())
    assert [member.factor for member in members] == pytest.approx([1.0, 1.25, 1.25**2])


def test_members_of_a_population_step_with_one_mean_gradient() -> None:
    task = replace(TASKS["mlp_digits_adam"], steps=10)
    members = [winner_takes_all._member(task, 1e-3, 0, place) for place in range(2)]
    for member, value in zip(members, (1.0, 3.0), strict=True):
        for parameter in member.model.parameters():
            parameter.grad = torch.full_like(parameter, value)
    winner_takes_all._share_gradients(members, None)
    grads = [p.grad for member in members for p in member.model.parameters()]
    assert all(grad is not None and bool((grad == 2.0).all()) for grad in grads)
    lr = members[1].optimizer.param_groups[0]["lr"]
    members[1].step()
    assert members[1].optimizer.param_groups[0]["lr"] == pytest.approx(lr, rel=0.1)


def test_usual_learning_rate_is_the_prior_for_the_mean_of_the_schedule() -> None:
    task = TASKS[DIGITS]
    assert 0 < mean_share(task) <= 1
    assert usual_lr(task) * mean_share(task) == pytest.approx(10**-2.15, rel=1e-6)


def test_regret_is_measured_against_the_run_with_the_same_seed_at_the_best() -> None:
    best = best_lr(DIGITS)
    (own,) = (row for row in curve_rows(DIGITS) if (row["lr"], row["seed"]) == (best, 0))
    loss, outset = reference(DIGITS, 0)
    assert loss == own["loss"]
    row = {"task": DIGITS, "seed": 0, "loss": 1.1 * loss}
    pct, share = regrets(row)
    assert pct == pytest.approx(10.0)
    assert share == pytest.approx(10 * loss / (outset - loss))
    assert regrets({**row, "loss": None}) == (math.inf, math.inf)


def test_headline_counts_lost_runs_and_alarms() -> None:
    loss, outset = reference(DIGITS, 0)
    shared = {"task": DIGITS, "seed": 0, "method": "hdet, 8 replicas", "steps": 100}
    shared |= {"scout_steps": 2, "chosen": 0.5, "rollbacks": 0}
    rows = [
        {**shared, "start": 1.0, "loss": loss},
        {**shared, "start": 3.0, "loss": (loss + outset) / 2, "rollbacks": 1},
    ]
    found = headline(rows)
    assert (found["runs"], found["lost"], found["tasks_reported"]) == (2, 1, 1)
    assert found["harm_at_best_pct"] == 0.0
    assert found["scout_steps_pct"] == 2.0
    assert found["false_alarms_per_1000_runs"] == 500.0


def test_sign_test_counts_pairs_of_the_same_task_and_seed() -> None:
    shared = {"task": DIGITS, "steps": 100, "scout_steps": 2, "chosen": 0.5, "rollbacks": 0}
    shared |= {"start": 1.0}
    rows = [
        {**shared, "method": method, "seed": seed, "loss": loss}
        for seed in range(4)
        for method, loss in (("hdet, 8 replicas", 0.3), ("Prodigy", 0.2 if seed == 3 else 0.4))
    ]
    found = headline(rows)
    assert (found["wins_over_prodigy"], found["pairs_with_prodigy"]) == (3, 4)
    assert found["sign_p_prodigy"] == pytest.approx(5 / 16)


def test_sign_test_takes_the_median_over_starts() -> None:
    shared = {"task": DIGITS, "steps": 100, "scout_steps": 2, "chosen": 0.5, "rollbacks": 0}
    ends = {"hdet, 8 replicas": (0.3, 0.3, 9.0), "winner takes all": (0.2, 4.0, 5.0)}
    rows = [
        {**shared, "method": method, "seed": 0, "start": start, "loss": loss}
        for method, losses in ends.items()
        for start, loss in zip((0.01, 1.0, 100.0), losses, strict=True)
    ]
    found = headline(rows)
    assert (found["wins_over_winner_takes_all"], found["pairs_with_winner_takes_all"]) == (1, 1)


def test_longer_run_goes_through_the_data_anew() -> None:
    task = TASKS[DIGITS]
    longer = with_steps(task, 2 * task.steps).batches(0)
    assert torch.equal(longer(1)[0], task.batches(0)(1)[0])
    assert torch.equal(longer(task.steps + 1)[0], task.batches(1000)(1)[0])


def test_lengths_compare_with_plain_runs_of_the_same_steps() -> None:
    plain = {"task": DIGITS, "replicas": 0, "start": 1.0, "outset": 2.0}
    rows = [
        {**plain, "steps": 300, "loss": 1.0},
        {**plain, "steps": 16_000, "loss": 0.5},
        {**plain, "steps": 300, "replicas": 8, "loss": 1.3},
    ]
    found = zoo_lengths.headline(rows)["n8_300"]
    assert (found["runs"], found["lost"]) == (1, 1)
    assert found["median_gain_pct"] == pytest.approx(30)


def test_usual_learning_rate_falls_with_the_size_of_a_gpt() -> None:
    rates = [zoo_sizes.usual_of(zoo_sizes.MODELS[name])[0] for name in ("gpt_0.1M", "gpt_3M")]
    assert rates[0] > rates[1]


def test_jobs_cover_every_method_start_and_seed_once() -> None:
    jobs = zoo.jobs_of([DIGITS], list(zoo.METHODS))
    assert len(jobs) == len(set(jobs))
    assert sum(job.method == "hdet, 8 replicas" for job in jobs) == 27


def test_changed_constants_are_put_back() -> None:
    assert vars(evidence)["GAIN_ERROR"] == constants.GAIN_ERROR
    with zoo_fit.changed({"GAIN_ERROR": 9.0}):
        assert vars(evidence)["GAIN_ERROR"] == 9.0
    assert vars(evidence)["GAIN_ERROR"] == constants.GAIN_ERROR
