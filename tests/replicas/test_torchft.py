"""Replicas that come and go, by torchft's own lighthouse and managers."""

import copy
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import hdet
from hdet.replicas.torchft import TorchftReplicas
from tests import reference, toy
from tests.managers import States, managed
from tests.processes import Processes
from tests.torch_version import IS_OLDEST

T, LR, ALPHA = 4, 0.02, 0.25


class Moment(NamedTuple):
    """A replica right after a step."""

    step: int
    num_replicas: int
    lrs: list[float]
    """Of all replicas."""
    lr: float
    """Its own."""
    weights: Tensor


def states_of(model: nn.Module, optimizer: Any) -> States:
    return {
        "model": (model.load_state_dict, model.state_dict),
        "optimizer": (optimizer.load_state_dict, optimizer.state_dict),
    }


def run(
    rank: int,
    lighthouse: str,
    goes_on: Callable[[list[Moment]], bool],
    meddle: Callable[[TorchftReplicas], None] = lambda replicas: None,
    *,
    together: bool = True,
    shared: bool = False,
    state: dict[str, Any] | None = None,
    **options: Any,
) -> list[Moment]:
    """Train as long as it is to go on, and tell of every step; `shared` as torchft's examples do,
    whose DDP and optimizer ask at every step who is there."""
    model: nn.Module = toy.toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    stepped: Any = optimizer
    results: list[Moment] = []
    with managed(rank, lighthouse, states_of(model, optimizer)) as manager:
        if together:  # torchft does not wait long for late replicas
            dist.barrier()
        if shared:
            import torchft

            model = torchft.DistributedDataParallel(manager, model)
            stepped = torchft.Optimizer(manager, optimizer)
        replicas = hdet.TorchftReplicas(manager)
        meddle(replicas)
        scheduler = hdet.HDET(
            LambdaLR(optimizer, lambda _: 1.0),
            model=model,
            replicas=replicas,
            preset="paper",
            spread=ALPHA,
            gradients="shared" if shared else "local",
            **{"controller": None, "sync_every": T, **options},
        )
        if state is not None:
            scheduler.load_state_dict(state)
            assert optimizer.param_groups[0]["lr"] == LR  # in the centre, until all have met
        if shared:
            scheduler.converge()  # nothing to do yet, as before a first checkpoint
        while goes_on(results):
            stepped.zero_grad()  # one that is healed knows its step after this
            loss = toy.loss_of(model, scheduler.last_epoch, rank)
            loss.backward()
            stepped.step()
            scheduler.step(loss.detach())
            results.append(
                Moment(
                    scheduler.last_epoch,
                    replicas.size,
                    [lrs[0] for lrs in scheduler.get_replica_lrs()],
                    optimizer.param_groups[0]["lr"],
                    nn.utils.parameters_to_vector(model.parameters()).detach().clone(),
                )
            )
    return results


def serve(min_replicas: int) -> Iterator[str]:
    if IS_OLDEST:
        pytest.skip("torchft needs torch 2.7")
    from torchft.coordination import LighthouseServer

    # On a busy machine a replica may be late, and its heartbeats may be rare.
    server = LighthouseServer(
        bind="[::]:0", min_replicas=min_replicas, join_timeout_ms=60_000, heartbeat_timeout_ms=5000
    )
    yield server.address()
    server.shutdown()


@pytest.fixture
def lighthouse() -> Iterator[str]:
    yield from serve(2)


@pytest.fixture
def lonely_lighthouse() -> Iterator[str]:
    yield from serve(1)


@pytest.fixture(scope="module")
def pool() -> Iterator[Processes]:
    made = Processes(3)  # not that of other tests: torchft leaves threads behind
    yield made
    made.close()


# One that leaves ----------------------------------------------------------------------------------


def expected(leaves_at: int, steps: int, *, shared: bool) -> list[Tensor]:
    """As a plain loop: three replicas, then two, who find out when they meet again. The first step
    is without a spread."""
    models = [toy.toy() for _ in range(3)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=LR) for model in models]
    results, factors = [], [1.0] * 3
    for step in range(steps):
        here = range(3 if step < leaves_at else 2)
        for place in here:
            optimizers[place].param_groups[0]["lr"] = LR * factors[place]
            optimizers[place].zero_grad()
            toy.loss_of(models[place], step, place).backward()
        if shared:
            share_gradients([models[place] for place in here])
        for place in here:
            optimizers[place].step()
        if step == 0 or (step + 1) % T == 0:
            reference.average([models[place] for place in here])
            factors = [reference.multiplier(place, len(here), ALPHA) for place in here]
        results.append(nn.utils.parameters_to_vector(models[0].parameters()).detach().clone())
    return results


def share_gradients(models: list[nn.Module]) -> None:
    for same in zip(*(model.parameters() for model in models), strict=True):
        mean = torch.stack([p.grad for p in same if p.grad is not None]).mean(0)
        for parameter in same:
            parameter.grad = mean.clone()


def leaves(rank: int, lighthouse: str, leaves_at: int, steps: int, shared: bool) -> list[Moment]:
    last = leaves_at if rank == 2 else steps
    return run(rank, lighthouse, lambda results: len(results) < last, shared=shared)


@pytest.mark.parametrize("shared", [False, True])
def test_remaining_replicas_spread_out_again_after_one_leaves(
    pool: Processes, lighthouse: str, shared: bool
) -> None:
    leaves_at, steps = 2 * T, 5 * T
    first, second, gone = pool(3, leaves, lighthouse, leaves_at, steps, shared)
    assert len(gone) == leaves_at
    for one, other in zip(first, second, strict=True):
        assert one.lrs == other.lrs
        assert fmean(one.lrs) == pytest.approx(LR, rel=1e-12)
        assert one.num_replicas == (2 if one.step >= leaves_at + T else 3)
        assert (one.lr, other.lr) == (one.lrs[0], one.lrs[1])
    assert first[-2].lrs == pytest.approx([LR * (1 - ALPHA), LR * (1 + ALPHA)], rel=1e-12)
    assert first[-1].weights.equal(second[-1].weights)
    for moment, want in zip(first, expected(leaves_at, steps, shared=shared), strict=True):
        torch.testing.assert_close(moment.weights, want, rtol=1e-10, atol=1e-10)


# One that comes -----------------------------------------------------------------------------------


def joins(rank: int, lighthouse: str, folder: str) -> list[Moment]:
    """The third one begins when the others have met; they go on until it is there."""
    sign = Path(folder) / "met"

    def goes_on(results: list[Moment]) -> bool:
        if rank == 0 and len(results) == 2 * T:
            sign.touch()
        there = [moment for moment in results if moment.num_replicas == 3]
        return len(there) <= 2 * T

    while rank == 2 and not sign.exists():
        os.sched_yield()
    given: Any = {"controller": hdet.PaperController(), "record": f"{folder}/{rank}"}
    return run(rank, lighthouse, goes_on, together=False, **given)


def test_new_replica_gets_the_weights_of_the_others(
    pool: Processes, lighthouse: str, tmp_path: Path
) -> None:
    first, second, late = pool(3, joins, lighthouse, str(tmp_path))
    assert {moment.num_replicas for moment in first} == {2, 3}
    assert late[0].step > 2 * T  # it was given the state of the others at its first meeting
    here = {moment.step: moment for moment in first}
    there = {moment.step: moment for moment in second}
    for moment in late:
        others = (here[moment.step], there[moment.step])
        assert all(other.lrs == moment.lrs for other in others)
        assert fmean(moment.lrs) == pytest.approx(fmean(others[0].lrs), rel=1e-12)
        assert (*(other.lr for other in others), moment.lr) == tuple(moment.lrs)
        if moment.step % T == 0:
            assert all(other.weights.equal(moment.weights) for other in others)
    lines = lines_of(tmp_path / "0")
    texts = [line["text"] for line in lines if line["event"] == "note"]
    assert texts == ["2 replicas take part", "3 replicas take part"]
    joined = [line["excluded"] for line in lines if line["event"] == "converge"]
    assert joined[-1] == [{"replica": 2, "reason": "has just joined"}]


LONG = 20
"""The cycle in which a replica joins."""


def joins_in_mid_cycle(rank: int, lighthouse: str, folder: str) -> list[Moment]:
    """The third one begins when the others have met, and joins at whatever step they are at."""
    sign = Path(folder) / "met"

    def goes_on(results: list[Moment]) -> bool:
        if rank == 0 and len(results) == LONG:
            sign.touch()
        return [moment.num_replicas for moment in results].count(3) <= LONG

    while rank == 2 and not sign.exists():
        os.sched_yield()
    given: Any = {"sync_every": LONG}
    return run(rank, lighthouse, goes_on, together=False, shared=True, **given)


def expected_of_three(joins_at: int, source: int, steps: int) -> list[list[Tensor]]:
    """As a plain loop: two replicas, then a third one with the weights and the state of one of
    them. It trains without a multiplier until they meet, and counts from then on."""
    models = [toy.toy() for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=LR) for model in models]
    results, factors, trained = [], [1.0] * 2, list(models)
    for step in range(steps):
        if step == joins_at:
            models.append(copy.deepcopy(models[source]))
            factors.append(1.0)
            optimizers.append(torch.optim.AdamW(models[2].parameters(), lr=LR))
            optimizers[2].load_state_dict(copy.deepcopy(optimizers[source].state_dict()))
        for place, model in enumerate(models):
            model.zero_grad()
            toy.loss_of(model, step, place).backward()
        share_gradients(list(models))
        for place, optimizer in enumerate(optimizers):
            optimizer.param_groups[0]["lr"] = LR * factors[place]
            optimizer.step()
        if step == 0 or (step + 1) % LONG == 0:
            reference.average(trained)
            for model in models:
                model.load_state_dict(trained[0].state_dict())
            factors = [reference.multiplier(r, len(models), ALPHA) for r in range(len(models))]
            trained = list(models)
        vectors = [nn.utils.parameters_to_vector(m.parameters()).detach() for m in models]
        results.append([vector.clone() for vector in vectors])
    return results


def test_new_replica_with_shared_gradients_trains_along_until_the_next_synchronization(
    pool: Processes, lighthouse: str, tmp_path: Path
) -> None:
    first, second, late = pool(3, joins_in_mid_cycle, lighthouse, str(tmp_path))
    joins_at = late[0].step - 1
    meets_at = math.ceil(late[0].step / LONG) * LONG
    assert joins_at >= LONG
    assert all(moment.lr == LR for moment in late if moment.step < meets_at)
    rows = list(zip(first[joins_at:], second[joins_at:], late, strict=True))
    for row in rows:
        assert len({moment.step for moment in row}) == 1
        if row[0].step >= meets_at:
            assert row[0].lrs == row[1].lrs == row[2].lrs == [moment.lr for moment in row]
            assert fmean(row[0].lrs) == pytest.approx(LR, rel=1e-12)
            assert row[0].num_replicas == 3
        else:
            assert row[0].num_replicas == row[1].num_replicas == 2
    ways = [expected_of_three(joins_at, source, len(first)) for source in (0, 1)]
    far = [
        max(
            float((moment.weights - want).abs().max())
            for row, wants in zip(rows, way[joins_at:], strict=True)
            for moment, want in zip(row, wants, strict=True)
        )
        for way in ways
    ]
    assert min(far) < 1e-10  # torchft chooses whose state it was given


# All of them again, and one that is early ---------------------------------------------------------


def resumed(rank: int, lighthouse: str, shared: bool) -> list[Moment]:
    optimizer = torch.optim.AdamW(toy.toy().parameters(), lr=LR)
    plain = LambdaLR(optimizer, lambda _: 1.0)
    for _ in range(T + 1):
        optimizer.step()
        plain.step()
    state = plain.state_dict()
    return run(rank, lighthouse, lambda results: len(results) < T, shared=shared, state=state)


@pytest.mark.parametrize("shared", [False, True])
def test_resumed_replica_has_the_central_lr_until_the_first_synchronization(
    pool: Processes, lighthouse: str, shared: bool
) -> None:
    answers = pool(3, resumed, lighthouse, shared)
    for results in answers:
        assert [moment.step for moment in results] == [T + 2 + step for step in range(T)]
        assert [moment.num_replicas for moment in results] == [3] * T  # after the first step
    spread = [reference.multiplier(place, 3, ALPHA) * LR for place in range(3)]
    assert answers[0][0].lrs == pytest.approx(spread, rel=1e-12)
    assert [results[0].lr for results in answers] == answers[0][0].lrs


def is_early(rank: int, lighthouse: str, folder: str, shared: bool) -> list[Moment]:
    """The first one begins alone, where the lighthouse lets it and its manager does not."""
    sign = Path(folder) / "tried"

    def goes_on(results: list[Moment]) -> bool:
        if rank == 0 and len(results) == 3:
            sign.touch()
        return not results or results[-1].step < 2 * T

    while rank > 0 and not sign.exists():
        os.sched_yield()
    return run(rank, lighthouse, goes_on, together=False, shared=shared)


@pytest.mark.parametrize("shared", [False, True])
def test_steps_of_a_replica_without_a_quorum_do_not_count(
    pool: Processes, lonely_lighthouse: str, tmp_path: Path, shared: bool
) -> None:
    first, second, third = pool(3, is_early, lonely_lighthouse, str(tmp_path), shared)
    assert [moment.step for moment in first[:3]] == [0, 0, 0]
    for results in (first, second, third):
        assert results[-1].step == 2 * T
        assert results[-1].num_replicas == 3
        assert results[-1].weights.equal(first[-1].weights)
        assert fmean(results[-1].lrs) == pytest.approx(LR, rel=1e-12)


# One that leaves in the middle of a meeting -------------------------------------------------------


class Gone(Exception):
    """It leaves without a word."""


def breaks(rank: int, lighthouse: str) -> list[Moment]:
    def meddle(replicas: TorchftReplicas) -> None:
        num, average_ = 0, replicas.average_

        def dies(*given: Any, **options: Any) -> int:
            nonlocal num
            num += 1
            if num == 4:
                replicas._manager._pg.shutdown()
                raise Gone
            return average_(*given, **options)

        if rank == 2:
            replicas.average_ = dies  # type: ignore[method-assign]

    try:
        return run(rank, lighthouse, lambda results: len(results) < 6 * T, meddle)
    except Gone:
        return []


def test_synchronization_that_a_replica_leaves_is_undone(pool: Processes, lighthouse: str) -> None:
    first, second, gone = pool(3, breaks, lighthouse)
    assert gone == []
    assert {moment.num_replicas for moment in first} == {2, 3}
    for one, other in zip(first, second, strict=True):
        assert one.lrs == other.lrs
        assert fmean(one.lrs) == pytest.approx(LR, rel=1e-12)
    assert any(set(moment.lrs) == {LR} for moment in first[T:])  # after it, until they met again
    assert first[-1].weights.equal(second[-1].weights)
    assert bool(first[-1].weights.isfinite().all())


def dies_in_a_step(rank: int, lighthouse: str) -> list[Moment]:
    def meddle(replicas: TorchftReplicas) -> None:
        manager, num = replicas._manager, 0
        start_quorum = manager.start_quorum

        def dies(*given: Any, **options: Any) -> None:
            nonlocal num
            num += 1
            start_quorum(*given, **options)
            if num == DIES_IN:
                manager._pg.shutdown()
                raise Gone

        if rank == 2:
            manager.start_quorum = dies

    try:
        return run(rank, lighthouse, lambda results: len(results) < 5 * T, meddle, shared=True)
    except Gone:
        return []


DIES_IN = 2 * T + 2


def test_training_step_in_which_a_replica_dies_is_skipped(pool: Processes, lighthouse: str) -> None:
    first, second, gone = pool(3, dies_in_a_step, lighthouse)
    assert gone == []
    for results in (first, second):
        assert [moment.step for moment in results] == list(range(1, 5 * T + 1))
        assert results[DIES_IN - 1].weights.equal(results[DIES_IN - 2].weights)
        assert [moment.num_replicas for moment in results] == [3] * (3 * T - 1) + [2] * (2 * T + 1)
    for one, other in zip(first, second, strict=True):
        assert one.lrs == other.lrs
        assert fmean(one.lrs) == pytest.approx(LR, rel=1e-12)
    assert first[-1].weights.equal(second[-1].weights)


# One that is behind ------------------------------------------------------------------------------


def is_behind(rank: int, lighthouse: str, folder: str) -> tuple[list[Moment], list[Any]]:
    """One finds an error of its own at the end of a meeting, and is healed at the next."""
    calls: list[Any] = []

    def meddle(replicas: TorchftReplicas) -> None:
        commit, check_members, num = replicas.commit, replicas.check_members, 0

        def failing() -> bool:
            nonlocal num
            num += 1
            if rank == 1 and num == 3:
                replicas._manager.report_error(RuntimeError("of its own"))
            return commit()

        def noted() -> Any:
            calls.append(check_members())
            return calls[-1]

        replicas.commit, replicas.check_members = failing, noted  # type: ignore[method-assign]

    given: Any = {"controller": hdet.PaperController(), "record": f"{folder}/{rank}"}
    results = run(
        rank, lighthouse, lambda results: not results or results[-1].step < 6 * T, meddle, **given
    )
    return results, [(members.have_changed, members.newcomers) for members in calls]


def test_replica_whose_commit_failed_counts_as_new(
    pool: Processes, lighthouse: str, tmp_path: Path
) -> None:
    answers = pool(3, is_behind, lighthouse, str(tmp_path))
    for results, calls in answers:
        assert calls[:4] == [(True, ()), (False, ()), (False, ()), (True, (1,))]
        assert not any(changed for changed, _ in calls[4:])
        assert results[-1].weights.equal(answers[0][0][-1].weights)
    texts = {
        rank: [line["text"] for line in lines_of(tmp_path / f"{rank}") if line["event"] == "note"]
        for rank in (0, 1)
    }
    assert any("was undone" in text for text in texts[1])
    assert not any("was undone" in text for text in texts[0])
    ended = [line["step"] for line in lines_of(tmp_path / "1") if line["event"] == "cycle"]
    assert 2 * T not in ended  # what was undone is not in the record


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]


# Other knobs, and what a run does between two meetings --------------------------------------------


def decays(rank: int, lighthouse: str) -> tuple[list[float], float, list[str]]:
    model = toy.toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    with managed(rank, lighthouse, states_of(model, optimizer)) as manager:
        dist.barrier()
        replicas = hdet.TorchftReplicas(manager)
        scheduler = hdet.HDET(
            LambdaLR(optimizer, lambda _: 1.0),
            model=model,
            replicas=replicas,
            preset="paper",
            knobs=[hdet.weight_decay(spread=0.5)],
            controller=None,
            gradients="local",
            sync_every=T,
        )

        def go_on(steps: int) -> None:
            for _ in range(steps):
                optimizer.zero_grad()
                loss = toy.loss_of(model, scheduler.last_epoch, rank)
                loss.backward()
                optimizer.step()
                scheduler.step(loss.detach())

        go_on(T + 1)
        (knob,) = scheduler._run.knob_bank.knobs
        wanted, own = knob.factors(), optimizer.param_groups[0]["weight_decay"]
        cycle = scheduler._run.knob_bank.cycle
        scheduler.converge()
        assert scheduler._run.knob_bank.cycle == cycle
        assert knob.factors() == wanted
        results: list[str] = []
        if rank == 2:
            return wanted, own, results
        dist.barrier(group=dist.new_group([0, 1], use_local_synchronization=True))
        replicas._manager.report_error(RuntimeError("gone"))
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with scheduler.consensus():
                results.append(str(caught[-1].message))
                now = nn.utils.parameters_to_vector(model.parameters()).detach()
                assert now.equal(before)
        return wanted, own, results


def test_elastic_replicas_have_their_own_knob_values(pool: Processes, lighthouse: str) -> None:
    answers = pool(3, decays, lighthouse)
    for rank, (wanted, own, results) in enumerate(answers):
        assert len(set(wanted)) > 1
        assert own == pytest.approx(wanted[rank])
        assert all("weights of this replica only" in text for text in results)


# What cannot be -----------------------------------------------------------------------------------


def refused(rank: int, lighthouse: str) -> list[str]:
    model = toy.toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    results = []
    with managed(rank, lighthouse, states_of(model, optimizer)) as manager:
        import torchft

        shared = torchft.DistributedDataParallel(manager, model)
        wrapped = torchft.Optimizer(manager, optimizer)
        for options in (
            {"guard": hdet.Guard()},
            {"overlap": 1},
            {"compress": "int8"},
            {"gradients": "shared"},
            {"model": shared},
            {"base": LambdaLR(wrapped, lambda _: 1.0)},
        ):
            base = LambdaLR(optimizer, lambda _: 1.0)
            given: Any = {"base": base, "model": model, "scout": None, "gradients": "local"}
            replicas = hdet.TorchftReplicas(manager)
            try:
                hdet.HDET(**{**given, **options}, replicas=replicas)
            except ValueError as error:
                results.append(str(error))
        manager._use_async_quorum = True
        try:
            hdet.TorchftReplicas(manager)
        except ValueError as error:
            results.append(str(error))
    return results


def test_options_that_need_fixed_replicas_are_refused(pool: Processes, lighthouse: str) -> None:
    (results,) = pool(1, refused, lighthouse)
    names = ["`guard`", "`overlap`", "`compress`"]
    for text, name in zip(results[:3], names, strict=True):
        assert text.startswith(f"{name} must be ")
        assert "with TorchftReplicas" in text
    plain, managed_model, managed_optimizer, asynchronous = results[3:]
    assert plain.startswith("`gradients` must be 'local' for this model, got 'shared'")
    assert managed_model.startswith("`gradients` must be 'shared' for this model, got 'local'")
    assert "the plain optimizer" in managed_optimizer
    assert "use_async_quorum=False" in asynchronous


def test_object_that_is_no_manager_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`manager` must be a torchft.Manager, got a int"):
        hdet.TorchftReplicas(3)
