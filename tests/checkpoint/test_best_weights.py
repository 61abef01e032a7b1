"""A checkpoint holds what the guard would restore, where that is not the present run."""

from pathlib import Path

import pytest
import torch

import hdet
from tests.scheduler.test_rollback import Run, T


def worsened(engine: str) -> tuple[Run, list[torch.Tensor]]:
    """A run whose last cycle was a little worse than the best one, and the state of that one."""
    run = Run(engine).go(5 * T)
    best = run.state()
    level = run.scheduler.state_dict()["guard"]["lowest"]
    for step in range(T):
        run.backward(step)
        run.optimizer.step()
        run.scheduler.step(torch.full((len(run.modules()),), level + 1e-6))
    return run, best


@pytest.mark.parametrize("engine", ["one", "stacked"])
def test_guard_of_a_loaded_run_goes_back_to_the_best_weights_of_the_saved_one(
    engine: str, tmp_path: Path
) -> None:
    run, best = worsened(engine)
    parts = {"model": run.bare, "optimizer": run.optimizer, "scheduler": run.scheduler}
    path = hdet.save_checkpoint(tmp_path, **parts)
    saved = run.state()
    other = Run(engine)
    hdet.load_checkpoint(
        path, model=other.bare, optimizer=other.optimizer, scheduler=other.scheduler
    )
    assert all(map(torch.equal, other.state(), saved))
    assert other.scheduler.best_step == 5 * T
    other.go(T, {6 * T + 1: 1e4})
    num = len(run.bare.state_dict())
    assert all(map(torch.equal, other.state()[:num], best[:num]))
    assert not all(map(torch.equal, saved[:num], best[:num]))


def test_run_without_a_guard_leaves_the_best_weights_of_a_checkpoint_alone(tmp_path: Path) -> None:
    run, _ = worsened("one")
    parts = {"model": run.bare, "optimizer": run.optimizer, "scheduler": run.scheduler}
    path = hdet.save_checkpoint(tmp_path, **parts)
    other = Run("one", guard=None)
    hdet.load_checkpoint(
        path, model=other.bare, optimizer=other.optimizer, scheduler=other.scheduler
    )
    assert other.scheduler.best_step is None
    assert all(map(torch.equal, other.state(), run.state()))
    with pytest.raises(RuntimeError, match="needs a guard"), other.scheduler.best_weights_loaded(1):
        pass
