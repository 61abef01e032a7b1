"""What is saved of stacked replicas loads as a plain module, where hdet cannot be imported."""

import copy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet

N = 8
LOADS = """
    import sys
    from importlib.abc import MetaPathFinder

    class Blocked(MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "hdet":
                raise ImportError("hdet is not installed here")

    sys.meta_path.insert(0, Blocked())
    import torch
    x, wants = torch.load("expected.pt")
    for name, want in wants.items():
        model = torch.load(name, weights_only=False).eval()
        assert torch.equal(model(x), want), name
        assert type(model[2]) is torch.nn.Dropout and 0 < model[2].p < 1, model
        assert not model._state_dict_hooks and not model._load_state_dict_post_hooks
        model.load_state_dict(model.state_dict())
        model.train()(x).sum().backward()
    assert not any(name.partition(".")[0] == "hdet" for name in sys.modules)
    torch.load("state.pt", weights_only=True)
"""


def loss_of(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - 1).square().mean()
    return loss


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 50), nn.BatchNorm1d(50), nn.Dropout(0.25), nn.Linear(50, 2))


def test_a_stacked_model_is_saved_as_a_plain_module_that_loads_without_hdet(
    tmp_path: Path,
) -> None:
    """In the scout, and after training: `torch.save(model)`, `unwrap()`, and state dicts."""
    model = network()
    torch.save(model, tmp_path / "before.pt")
    knob = hdet.dropout(model)
    ensemble = hdet.StackedReplicas(model, N)
    optimizer = ensemble.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    base = OneCycleLR(optimizer, 0.01, total_steps=200)
    scheduler = hdet.HDET(
        base, model=model, replicas=ensemble, knobs=[hdet.lr(), knob], sync_every=2
    )
    wants, x = {}, torch.randn(5, 4)

    def save(name: str, plain: nn.Module) -> None:
        model.eval()
        torch.save(plain, tmp_path / name)
        with torch.no_grad():
            wants[name] = plain.eval()(x)
        model.train()

    for step in range(12):
        optimizer.zero_grad()
        losses = ensemble.losses(loss_of, torch.randn(4 * N, 4))
        losses.sum().backward()
        optimizer.step()
        scheduler.step(losses)
        if step == 1:
            assert scheduler.is_scouting
            save("scouting.pt", model)
    save("model.pt", model)
    save("unwrapped.pt", ensemble.unwrap())
    scheduler.converge()
    torch.testing.assert_close(ensemble.unwrap().state_dict(), model.state_dict())
    torch.save(model.state_dict(), tmp_path / "state.pt")
    torch.save((x, wants), tmp_path / "expected.pt")
    sizes = {name: (tmp_path / name).stat().st_size for name in (*wants, "before.pt")}
    assert max(sizes.values()) < 1.1 * sizes["before.pt"], sizes  # not the memory of all replicas
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOADS)],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_saving_and_copying_leave_the_replicas_as_they_are() -> None:
    model = network()
    model.register_state_dict_post_hook(users_hook)
    ensemble = hdet.StackedReplicas(model, 2)
    other = network()
    for plain in (copy.deepcopy(model), ensemble.consensus(), ensemble.unwrap()):
        assert users_hook in plain._state_dict_hooks.values()
        assert "hdet" not in str([*vars(plain), *plain._state_dict_hooks.values()])
        plain.load_state_dict(network().state_dict())
        addresses = {p.untyped_storage().data_ptr() for p in plain.state_dict().values()}
        assert not addresses & {p.untyped_storage().data_ptr() for p in model.state_dict().values()}
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(0.5)
    model.load_state_dict(other.state_dict())  # the hook of hdet is still there
    for module in ensemble.modules(None):
        torch.testing.assert_close(module.state_dict(), other.state_dict())
    ensemble.losses(loss_of, torch.randn(4, 4)).sum().backward()


def users_hook(*_: Any) -> None:
    """A hook that the user has registered."""


def test_model_outlives_its_replicas_and_can_still_be_saved(tmp_path: Path) -> None:
    model = network()
    hdet.StackedReplicas(model, 2)
    torch.save(model, tmp_path / "model.pt")
    copied = torch.load(tmp_path / "model.pt", weights_only=False)
    torch.testing.assert_close(copied.state_dict(), model.state_dict())
    model.load_state_dict(network().state_dict())


def test_unwrapped_model_keeps_the_temperature_that_it_was_trained_with() -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    hdet.attention_temperature(model, start=2.0)
    ensemble = hdet.StackedReplicas(model, 2)
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(ensemble.unwrap().eval()(x), model.eval()(x))
