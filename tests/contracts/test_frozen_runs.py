"""Frozen runs are reproduced number by number, and saved runs go on as they did."""

from pathlib import Path

import pytest

from hdet.lr_search.reasons import Reason, describe
from tests.contracts import comparison
from tests.contracts.frozen_runs import (
    RUNS,
    STATES,
    frozen_path,
    go_on,
    lighthouse,
    on_every_process,
    play_elastic,
    replay,
)
from tests.processes import Processes


@pytest.mark.parametrize("name", RUNS)
def test_frozen_run_is_reproduced(name: str, processes: Processes, tmp_path: Path) -> None:
    comparison.check(comparison.read(frozen_path("run", name)), replay(processes, name, tmp_path))


def test_frozen_run_of_torchft_is_reproduced(processes: Processes) -> None:
    pytest.importorskip("torchft")
    with lighthouse() as address:
        results = processes(2, play_elastic, address)
    comparison.check(comparison.read(frozen_path("run", "torchft")), results)


@pytest.mark.parametrize("name", STATES)
def test_saved_state_goes_on_as_before(name: str, processes: Processes) -> None:
    results = on_every_process(processes, STATES[name].run, go_on, name)
    comparison.check(comparison.read(frozen_path("state", name)), results)


def test_differences_are_found() -> None:
    want = {"lrs": [1e-14], "losses": [1.0, float("nan")], "reason": "a", "name": "b"}
    assert list(comparison.differences(want, {**want, "reason": "c"})) == []
    for changed in ({"lrs": [1.1e-14]}, {"losses": [1.0 + 1e-9, float("nan")]}, {"name": "c"}):
        assert len(list(comparison.differences(want, {**want, **changed}))) == 1
    assert len(list(comparison.differences(want, {**want, "more": 1}))) == 1
    assert len(list(comparison.differences(want, {**want, "lrs": []}))) == 1


def scout_line(reason: str, why: str) -> dict[str, object]:
    return {"schema": 2, "event": "scout", "step": 4, "reason": reason, "factor_reason": why}


def test_frozen_check_finds_a_swapped_reason_of_the_scout() -> None:
    ended = [Reason.SWEPT, Reason.BEST_NOT_IN_LAST_ROUND]
    kept = describe([Reason.GIVEN_IS_KEPT], declined=100.0)
    want = scout_line(describe(ended), kept)
    comparison.check([want], [scout_line(describe(ended), kept)])
    for reason, why in (
        (describe([Reason.NO_TIME, *ended[1:]]), kept),
        (describe(ended[:1]), kept),
        (describe(ended), describe([Reason.FOUND])),
        (describe(ended), describe([Reason.GIVEN_IS_KEPT], declined=10.0)),
    ):
        with pytest.raises(AssertionError, match="differ"):
            comparison.check([want], [scout_line(reason, why)])
    with pytest.raises(ValueError, match="no reason has the text"):
        comparison.check([want], [scout_line("another text", kept)])
