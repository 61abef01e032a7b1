"""One contract for every engine: the same scheduler, states, records and numbers on each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hdet
from hdet.control.assignment import assignment
from hdet.replicas.process import ProcessReplicas
from hdet.replicas.protocol import (
    AllToAllReplicas,
    Capabilities,
    ElasticReplicas,
    RecordingReplicas,
    Replicas,
    SingleReplica,
)
from tests import reference
from tests.engines import ENGINES, PEAKS, TASKS, Trainer
from tests.processes import Processes

N, T, S, WARMUP = 4, 3, 132, 12  # 44 cycles, 40 of them steered
SETTINGS: dict[str, Any] = {
    "total_steps": S, "sync_every": T, "warmup_steps": WARMUP, "spread": 0.25, "temperature": 0.05,
    "step_size": 0.7, "momentum": 0.8, "seed": 5,
}  # fmt: skip

On = Callable[..., list[Any]]
"""Runs a function on an engine: one answer for each process of it."""


@pytest.fixture
def on(processes: Processes) -> On:
    def run(engine: str, num: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if engine == "processes":
            return processes(num, function, engine, num, *arguments)
        return [function(0, engine, num, *arguments)]

    return run


def flat(answers: list[list[Any]]) -> list[Any]:
    """One entry for each process, with one for each of its replicas -> one for each replica."""
    return [entry for answer in answers for entry in answer]


# The Replicas protocol -----------------------------------------------------------------------


def engine_of(engine: str, num: int) -> Replicas:
    if engine == "processes":
        return ProcessReplicas()
    if engine == "one":
        return SingleReplica()
    return hdet.StackedReplicas(torch.nn.Linear(1, 1), num)


def exercise(rank: int, engine: str, num: int, fit: list[int]) -> list[dict[str, Any]]:
    """What the protocol does to the rows of this process, one answer for each replica of it."""
    replicas = engine_of(engine, num)
    local = list(replicas.local)

    def rows(scale: float = 1.0) -> list[list[Tensor]]:
        return [[torch.full((2, 2), scale * r), torch.tensor([r, -r])] for r in local]

    means, most, copied = rows(), rows(), rows()
    replicas.average_([row[:1] for row in means], fit)
    replicas.maximum_([row[1:] for row in most])
    replicas.copy_(copied, source=fit[0], targets=[r for r in range(num) if r not in fit])
    bad = [[torch.ones(3), torch.tensor(float("nan") if r == 1 else 1.0)] for r in local]
    gathered = replicas.gather(torch.tensor([[float(r), 7.0] for r in local]))
    finite = replicas.are_finite(bad).tolist()
    return [
        {
            "size": replicas.size,
            "local": local,
            "mean": means[i][0].tolist(),
            "most": most[i][1].tolist(),
            "copied": copied[i][0].tolist(),
            "gathered": gathered.tolist(),
            "finite": finite[i],
            "told": len(replicas.gather_objects(None)),
        }
        for i in range(len(local))
    ]


@pytest.mark.parametrize("fit", [[0, 1, 2], [1, 2], [2]])
@pytest.mark.parametrize("engine", ["processes", "stacked"])
def test_engine_follows_the_replicas_protocol(on: On, engine: str, fit: list[int]) -> None:
    for replica, answer in enumerate(flat(on(engine, 3, exercise, fit))):
        assert answer["size"] == 3
        assert replica in answer["local"]
        assert answer["mean"] == [[sum(fit) / len(fit)] * 2] * 2
        assert answer["most"] == [2, 0]
        assert answer["copied"] == [[float(replica if replica in fit else fit[0])] * 2] * 2
        assert answer["gathered"] == [[0.0, 7.0], [1.0, 7.0], [2.0, 7.0]]
        assert answer["finite"] == (replica != 1)
        assert answer["told"] == (3 if engine == "processes" else 1)


def test_single_replica_follows_the_replicas_protocol() -> None:
    (answer,) = exercise(0, "one", 1, [0])
    assert (answer["size"], answer["mean"], answer["gathered"]) == (
        1,
        [[0.0] * 2] * 2,
        [[0.0, 7.0]],
    )


def test_capabilities_of_an_engine_match_its_members() -> None:
    # The annotations let mypy check that an engine has all members of its protocol.
    elastic: type[ElasticReplicas] = hdet.TorchftReplicas
    compressing: type[AllToAllReplicas] = ProcessReplicas
    recording: type[RecordingReplicas] = hdet.StackedReplicas
    single: type[Replicas] = SingleReplica
    engines: list[Any] = [elastic, compressing, recording, single]
    for engine in engines:
        capabilities: Capabilities = engine.capabilities
        assert capabilities.is_elastic == hasattr(engine, "start_quorum") == (engine is elastic)
        assert capabilities.can_compress == hasattr(engine, "all_to_all") == (engine is compressing)
        assert capabilities.records_calls == hasattr(engine, "hold_out") == (engine is recording)


# The same numbers ----------------------------------------------------------------------------


def whole_run(rank: int, engine: str, num: int, task: str, folder: str) -> Any:
    trainer = Trainer(engine, task, num, rank, record=folder, **SETTINGS).train(range(S))
    return trainer.weights(), trainer.buffers(), trainer.state()


def expected(task: str) -> reference.Run:
    chosen = TASKS[task]
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        model = chosen.model().double()
    names = [group["name"] for group in chosen.groups(model)]
    return reference.run(
        model,
        chosen.optimizer,
        chosen.loss,
        lambda group, cycle: assignment(N, seed=5, cycle=cycle, knob=f"lr/{names[group]}"),
        num_replicas=N, peaks=PEAKS, total_steps=S, sync_every=T, warmup_steps=WARMUP, alpha=0.25,
        beta=0.8, sigma=0.05, lam=0.7,
    )  # fmt: skip


@pytest.mark.parametrize("task", ["transformer", "conv"])
def test_processes_and_stacked_replicas_equal_the_reference(
    on: On, tmp_path: Path, task: str
) -> None:
    want = expected(task)
    states, buffers = {}, {}
    for engine in ENGINES:
        answers = on(engine, N, whole_run, task, str(tmp_path / engine))
        weights = flat([answer[0] for answer in answers])
        buffers[engine] = flat([answer[1] for answer in answers])
        states[engine] = answers[0][2]
        for replica in range(N):
            for ours, theirs in zip(weights[replica], want.parameters[replica], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        lines = (tmp_path / engine / "record.jsonl").read_text().splitlines()
        cycles = [json.loads(line) for line in lines[1:]]
        assert sum(line["weights"] is not None for line in cycles) == 40
        for line, cycle in zip(cycles, want.cycles, strict=True):
            assert line["losses"] == pytest.approx(cycle.losses, rel=1e-10)
            for knob, lrs in zip(line["knobs"], cycle.lrs, strict=True):
                assert knob["lrs"] == pytest.approx(lrs, rel=1e-10)
    for engine in ENGINES[1:]:
        torch.testing.assert_close(buffers[engine], buffers["processes"], rtol=1e-10, atol=1e-10)
        assert_alike(states[engine], states["processes"])


def assert_alike(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Counts and names are the same, numbers to the last digits that a sum's order leaves."""
    assert first.keys() == second.keys()
    for key in first.keys() - {"knobs", "noise"}:
        assert first[key] == second[key], key
    assert first["noise"] == pytest.approx(second["noise"], rel=1e-8)
    for ours, theirs in zip(first["knobs"], second["knobs"], strict=True):
        assert ours["name"] == theirs["name"]
        assert ours["felt"] == pytest.approx(theirs["felt"], rel=1e-7)
        assert (ours["slope"] or 0.0) == pytest.approx(theirs["slope"] or 0.0, rel=1e-7)
        numbers = ours.keys() - {"name", "felt", "slope"}
        assert [ours[n] for n in numbers] == pytest.approx([theirs[n] for n in numbers], rel=1e-10)


# Resuming ------------------------------------------------------------------------------------


def begin(rank: int, engine: str, num: int, task: str) -> Any:
    """A run that is saved in the middle of a cycle, and goes on."""
    trainer = Trainer(engine, task, num, rank, **SETTINGS).train(range(31))
    saved = trainer.save()
    at_the_cut = trainer.weights()[0], trainer.moments(), trainer.state()
    return saved, at_the_cut, trainer.train(range(31, 60)).weights(), trainer.state()


def resume(rank: int, engine: str, num: int, task: str, saved: bytes) -> Any:
    trainer = Trainer(engine, task, num, rank, **SETTINGS).load(saved)
    at_the_cut = trainer.weights(), trainer.moments(), trainer.state()
    return at_the_cut, trainer.train(range(31, 60)).weights(), trainer.state()


@pytest.mark.parametrize("task", ["transformer", "conv"])
def test_a_run_resumes_on_every_engine(on: On, task: str) -> None:
    for before in ("processes", "vmap"):
        answers = on(before, N, begin, task)
        saved, (weights, moments, state), *_ = answers[0]
        went_on = flat([answer[2] for answer in answers])
        for after in ENGINES:
            resumed = on(after, N, resume, task, saved)
            for replicas, their_moments, their_state in [answer[0] for answer in resumed]:
                for replica in replicas:
                    assert all(map(torch.equal, replica, weights))
                assert all(map(torch.equal, their_moments, moments))
                assert their_state == state
            ended = flat([answer[1] for answer in resumed])
            if after == before:
                for ours, theirs in zip(ended, went_on, strict=True):
                    assert all(map(torch.equal, ours, theirs))
                assert resumed[0][2] == answers[0][3]
            else:
                torch.testing.assert_close(ended, went_on, rtol=1e-10, atol=1e-10)
                assert_alike(resumed[0][2], answers[0][3])


@pytest.mark.parametrize(("before", "after"), [("processes", "vmap"), ("vmap", "processes")])
def test_a_run_resumes_with_another_number_of_replicas(on: On, before: str, after: str) -> None:
    saved, (weights, moments, state), *_ = on(before, 2, begin, "conv")[0]
    for answer in on(after, 3, resume, "conv", saved):
        (replicas, their_moments, their_state), ended, end = answer
        for replica in replicas:
            assert all(map(torch.equal, replica, weights))
        assert all(map(torch.equal, their_moments, moments))
        assert their_state == state
        assert end["step"] == 60
        assert all(tensor.isfinite().all() for row in ended for tensor in row)


# What a replica that is lost, a look at the consensus, and the off switch do ---------------------


def lose_one(rank: int, engine: str, num: int, folder: str) -> Any:
    trainer = Trainer(engine, "toy", num, rank, record=folder, gradients="local", **SETTINGS)
    trainer.train(range(T - 1))
    for replica, module in zip(trainer.local, trainer.modules(), strict=True):
        if replica == 1:
            next(module.parameters()).data.fill_(float("nan"))
    trainer.train(range(T - 1, 2 * T))
    return trainer.weights()


@pytest.mark.parametrize("engine", ENGINES)
def test_diverged_replica_is_excluded_and_reseeded(on: On, engine: str, tmp_path: Path) -> None:
    weights = flat(on(engine, 3, lose_one, str(tmp_path)))
    for row in weights[1:]:
        assert all(map(torch.equal, row, weights[0]))
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert [gone["replica"] for gone in lines[1]["excluded"]] == [1]
    assert lines[2]["excluded"] == []
    assert lines[1]["distances"][1] is None
    assert all(distance > 0 for distance in lines[2]["distances"])


def look(rank: int, engine: str, num: int, looks: bool) -> Any:
    trainer = Trainer(engine, "conv", num, rank, **SETTINGS)
    seen = None
    for step in range(14):
        trainer.train(range(step, step + 1))
        if looks and step % 2:
            before = trainer.weights()
            with trainer.scheduler.consensus():
                seen = trainer.weights()
            for own, again in zip(before, trainer.weights(), strict=True):
                assert all(map(torch.equal, own, again))
    return seen, trainer.weights(), trainer.buffers()


@pytest.mark.parametrize("engine", ENGINES)
def test_consensus_changes_nothing_in_the_run(on: On, engine: str) -> None:
    looked, blind = on(engine, 3, look, True), on(engine, 3, look, False)
    for ours, theirs in zip(looked, blind, strict=True):
        for part in (1, 2):
            for own, other in zip(ours[part], theirs[part], strict=True):
                assert all(map(torch.equal, own, other))
    rows = flat([answer[0] for answer in looked])
    ends = flat([answer[1] for answer in looked])
    assert all(map(torch.equal, rows[0], rows[-1]))
    for mean, *own in zip(rows[0], *ends, strict=True):
        torch.testing.assert_close(mean, sum(own) / 3, rtol=1e-12, atol=1e-12)


def distances(rank: int, engine: str, num: int, folder: str) -> Any:
    trainer = Trainer(engine, "toy", num, rank, record=folder, gradients="local", **SETTINGS)
    trainer.train(range(T - 1))
    before = [torch.cat([p.flatten() for p in row]) for row in trainer.weights()]
    trainer.scheduler.observe(torch.ones(len(trainer.local)))
    trainer.scheduler.step()
    return before


@pytest.mark.parametrize("engine", ENGINES)
def test_recorded_distance_of_a_small_model_is_exact(on: On, engine: str, tmp_path: Path) -> None:
    """Below 4096 parameters the sample is all of them."""
    rows = torch.stack(flat(on(engine, 3, distances, str(tmp_path))))
    want = (rows - rows.mean(0)).norm(dim=1) / rows.mean(0).norm()
    line = json.loads((tmp_path / "record.jsonl").read_text().splitlines()[1])
    assert line["distances"] == pytest.approx(want.tolist(), rel=1e-9)


def switched_off(rank: int, engine: str, num: int) -> Any:
    settings: dict[str, Any] = {**SETTINGS, "spread": 0.0, "auto_lr": False}
    return Trainer(engine, "conv", num, rank, **settings).train(range(40)).weights()


@pytest.mark.parametrize("engine", ENGINES)
def test_run_without_spread_and_controller_is_the_base_schedule(on: On, engine: str) -> None:
    """Replicas that share gradients and learning rates never differ; a plain loop says so too."""
    rows = flat(on(engine, 2, switched_off))
    assert all(map(torch.equal, rows[0], rows[1]))
    task = TASKS["conv"]
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        models = [task.model().double()]
    optimizer = task.optimizer(models[0])
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAKS, total_steps=S, cycle_momentum=False
    )
    for step in range(40):
        optimizer.zero_grad()
        losses = [task.loss(models[0], step, replica) for replica in range(2)]
        (sum(losses, torch.zeros(())) / 2).backward()
        optimizer.step()
        schedule.step()
    for ours, theirs in zip(rows[0], models[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-10, atol=1e-10)
