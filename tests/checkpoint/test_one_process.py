"""Checkpoints of one process: what a run goes on with, and what is refused without a change."""

import json
import os
import pickle
import random
from collections.abc import Callable
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiStepLR, OneCycleLR, StepLR

import hdet
from hdet.checkpoint.manifest import FILE_NAME, FileEntry, Manifest, entry_of, read_manifest
from hdet.checkpoint.plain_data import from_file


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flip(1)).square().mean()


class Loop:
    """A loop that draws its batches at random, over one replica or over several stacked ones."""

    def __init__(
        self,
        replicas: int = 1,
        base: Any = None,
        optimizers: int = 1,
        kind: Callable[..., Any] = torch.optim.AdamW,
        total: int = 40,
        spread: float = 0.2,
    ) -> None:
        self.model = network()
        layers = list(self.model.parameters())
        shares = [layers] if optimizers == 1 else [layers[:2], layers[2:]]
        self.optimizers: list[Any] = [kind(share, lr=0.01) for share in shares]
        self.ensemble = hdet.StackedReplicas(self.model, replicas) if replicas > 1 else None
        if self.ensemble is not None:
            self.optimizers = [self.ensemble.optimizer(one) for one in self.optimizers]
        make_base = base or (lambda one: OneCycleLR(one, 0.01, total_steps=total))
        bases = [make_base(one) for one in self.optimizers]
        self.scheduler = hdet.HDET(
            bases if optimizers > 1 else bases[0],
            model=self.model,
            replicas=self.ensemble,
            sync_every=5,
            total_steps=total,
            scout=None,
            spread=spread if replicas > 1 else 0.0,
            guard=hdet.Guard(),
        )

    @property
    def parts(self) -> dict[str, Any]:
        one = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        return {"model": self.model, "optimizer": one, "scheduler": self.scheduler}

    def steps(self, num: int) -> "Loop":
        for _ in range(num):
            shift = random.random() + float(np.random.random())
            x = torch.randn(12, 3) + shift
            for optimizer in self.optimizers:
                optimizer.zero_grad()
                if hasattr(optimizer, "train"):  # Schedule-Free
                    optimizer.train()
            if self.ensemble is None:
                losses = loss_of(self.model, x)
            else:
                losses = self.ensemble.losses(loss_of, x)
            losses.sum().backward()
            for optimizer in self.optimizers:
                optimizer.step()
            self.scheduler.step(losses)
        return self

    def everything(self) -> list[Any]:
        """The state of all parts, with tensors as lists."""
        moments = [one.state_dict() for one in self.optimizers]
        state = [self.model.state_dict(), moments, self.scheduler.state_dict()]
        return [json.loads(json.dumps(state, default=lambda tensor: tensor.tolist()))]


def again(path: Path, make: Callable[[], Loop], steps: int) -> Loop:
    """A new run that goes on from a checkpoint, after others have used the random numbers."""
    loop = make()
    torch.manual_seed(9)
    random.seed(9)
    np.random.seed(9)
    hdet.load_checkpoint(path, **loop.parts)
    return loop.steps(steps)


def test_optimizers_of_a_scheduler_may_stand_for_their_list(tmp_path: Path) -> None:
    loop = Loop(optimizers=2).steps(3)
    path = hdet.save_checkpoint(
        tmp_path, model=loop.model, optimizer=loop.scheduler.optimizer, scheduler=loop.scheduler
    )
    theirs = loop.steps(3).everything()
    assert again(path, lambda: Loop(optimizers=2), 3).everything() == theirs


MAKES: dict[str, Callable[[], Loop]] = {
    "one": Loop,
    "stacked": lambda: Loop(3),
    "two optimizers": lambda: Loop(optimizers=2),
    "two optimizers, stacked": lambda: Loop(3, optimizers=2),
    "stacked, an optimizer that counts": lambda: Loop(
        3, lambda one: LambdaLR(one, lambda _: 1.0), kind=AdamWScheduleFree, spread=0.0
    ),
    "milestones": lambda: Loop(base=lambda one: MultiStepLR(one, [14, 16])),
}


@pytest.mark.parametrize("name", MAKES)
def test_resumed_run_is_bit_equal_to_the_one_that_went_on(name: str, tmp_path: Path) -> None:
    loop = MAKES[name]().steps(12)  # in the middle of a cycle
    path = hdet.save_checkpoint(tmp_path, **loop.parts)
    assert path == tmp_path / "step-00000012" == hdet.latest_checkpoint(tmp_path)
    theirs = loop.steps(13).everything()  # to the end of a cycle
    assert again(path, MAKES[name], 13).everything() == theirs


def test_checkpoint_goes_on_with_another_length(tmp_path: Path) -> None:
    """The saved learning rates do not stay in the groups."""
    path = hdet.save_checkpoint(tmp_path, **Loop().steps(12).parts)
    longer = again(path, lambda: Loop(total=80), 3)
    base = Loop(total=80).steps(15)
    assert longer.scheduler.get_last_lr() == base.scheduler.get_last_lr()


def test_first_start_without_a_checkpoint_is_refused_clearly(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="got None: the folder has none yet"):
        hdet.load_checkpoint(hdet.latest_checkpoint(tmp_path), **Loop().parts)


def test_stacked_run_goes_on_as_one_replica_and_back(tmp_path: Path) -> None:
    stacked = Loop(3).steps(12)
    path = hdet.save_checkpoint(tmp_path, **stacked.parts)
    one = Loop()
    hdet.load_checkpoint(path, **one.parts)
    for ours, theirs in zip(one.model.parameters(), stacked.model.parameters(), strict=True):
        assert ours.equal(theirs)
    path = hdet.save_checkpoint(tmp_path, **one.steps(2).parts)
    other = Loop(2)
    hdet.load_checkpoint(path, **other.parts)
    assert other.ensemble is not None and other.scheduler.last_epoch == 14
    for module in other.ensemble.modules(None):
        for ours, theirs in zip(module.parameters(), one.model.parameters(), strict=True):
            assert ours.equal(theirs)
    moments = other.optimizers[0].state_dict()["state"][0]["exp_avg"]
    assert moments.equal(one.optimizers[0].state_dict()["state"][0]["exp_avg"])


def test_extra_and_the_loss_scale_come_back(tmp_path: Path) -> None:
    loop = Loop().steps(3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    extra = {"epoch": 2, "order": [3, 1, 2], "seen": torch.arange(3)}
    path = hdet.save_checkpoint(tmp_path, **loop.parts, step=77, extra=extra, scaler=scaler)
    assert path.name == "step-00000077"
    fresh = torch.amp.GradScaler("cpu", init_scale=2.0)
    got = hdet.load_checkpoint(path, **loop.parts, scaler=fresh)
    assert got.pop("seen").equal(extra.pop("seen")) and got == extra
    assert fresh.state_dict() == scaler.state_dict()
    with pytest.warns(UserWarning, match="has a loss scale, which is not loaded"):
        hdet.load_checkpoint(path, **loop.parts)
    without = hdet.save_checkpoint(tmp_path, **loop.parts)
    with pytest.raises(ValueError, match="`scaler` must be None, for the checkpoint has no"):
        hdet.load_checkpoint(without, **loop.parts, scaler=fresh)


class WithLossParameter(Loop):
    """A loop whose loss has a parameter that only the optimizer knows."""

    def __init__(self, size: int = 1, model: Any = "own") -> None:
        self.model, self.ensemble = network(), None
        self.weight = nn.Parameter(torch.full((size,), 0.5))
        self.optimizers = [torch.optim.AdamW([*self.model.parameters(), self.weight], lr=0.01)]
        self.scheduler = hdet.HDET(
            OneCycleLR(self.optimizers[0], 0.01, total_steps=40),
            model=self.model if model == "own" else model,
            sync_every=5,
            scout=None,
            guard=hdet.Guard(),
        )

    def steps(self, num: int) -> "WithLossParameter":
        for _ in range(num):
            self.optimizers[0].zero_grad()
            loss = loss_of(self.model, torch.randn(12, 3)) * (-self.weight).exp() + self.weight
            loss.mean().backward()
            self.optimizers[0].step()
            self.scheduler.step(loss.detach().mean())
        return self

    def everything(self) -> list[Any]:
        return [*super().everything(), self.weight.tolist()]


def test_parameter_of_a_loss_is_saved_by_its_position(tmp_path: Path) -> None:
    loop = WithLossParameter().steps(7)
    saved = loop.weight.item()
    path = hdet.save_checkpoint(tmp_path, **loop.parts)
    theirs = loop.steps(9).everything()
    assert loop.weight.item() != saved
    other = WithLossParameter()
    hdet.load_checkpoint(path, **other.parts)
    assert other.weight.item() == saved
    assert again(path, WithLossParameter, 9).everything() == theirs
    assert_refused(path, Loop(), "must have the same parameter groups as the saved one")
    assert_refused(path, WithLossParameter(2), r"has the shape \(2,\), and the saved one \(1,\)")


def test_guard_of_a_loaded_run_restores_the_parameter_of_a_loss_too(tmp_path: Path) -> None:
    loop = WithLossParameter().steps(10)
    best = loop.weight.item()
    loop.steps(3)
    path = hdet.save_checkpoint(tmp_path, **loop.parts)
    other = WithLossParameter()
    hdet.load_checkpoint(path, **other.parts)
    with other.scheduler.best_weights_shown() as step:
        assert step == 10 and other.weight.item() == best
    assert other.weight.item() == loop.weight.item() != best


def test_model_that_is_not_the_one_of_the_optimizer_is_refused(tmp_path: Path) -> None:
    loop, unknown = WithLossParameter().steps(1), WithLossParameter(model=None)
    for parts, why in [
        ({**loop.parts, "model": network()}, r"got 6 other.s., the first of shape \(8, 3\). Pass"),
        (
            {**loop.parts, "model": next(loop.model.children())},
            r"got 4 other.s., the first of shape \(8,\). Pass",
        ),
        (
            unknown.parts,
            r"got 1 other.s., the first of shape \(1,\). Pass the whole model of the r",
        ),
    ]:
        with pytest.raises(ValueError, match=f"must hold parameters of `model`, {why}"):
            hdet.save_checkpoint(tmp_path, **parts)


def accelerated(model: nn.Module, optimizer: Any) -> Any:
    return model, accelerate.Accelerator(cpu=True).prepare(optimizer)


def in_fabric(model: nn.Module, optimizer: Any) -> Any:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    return fabric.setup(model, optimizer)


def bare(model: nn.Module, optimizer: Any) -> Any:
    return model, optimizer


WRAPPERS = [bare, accelerated, in_fabric]


@pytest.mark.parametrize("saver", WRAPPERS)
@pytest.mark.parametrize("loader", WRAPPERS)
def test_checkpoint_of_a_wrapped_run_loads_with_another_wrapper(
    saver: Callable[..., Any], loader: Callable[..., Any], tmp_path: Path
) -> None:
    loop = Loop().steps(7)
    model, optimizer = saver(loop.model, loop.optimizers[0])
    assert (optimizer is loop.optimizers[0]) == (saver is bare)
    path = hdet.save_checkpoint(
        tmp_path, model=model, optimizer=optimizer, scheduler=loop.scheduler
    )
    other = Loop()
    model, optimizer = loader(other.model, other.optimizers[0])
    hdet.load_checkpoint(path, model=model, optimizer=optimizer, scheduler=other.scheduler)
    assert other.everything() == loop.everything()


def test_arguments_that_cannot_be_saved_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    loop, two = Loop().steps(1), Loop(optimizers=2)
    one_of_two = {**two.parts, "optimizer": two.optimizers[1]}
    twice = {**loop.parts, "optimizer": loop.optimizers * 2}
    for arguments, kind, why in [
        ({**loop.parts, "extra": open}, TypeError, "`extra` must be plain data or tensors"),
        ({**loop.parts, "keep": 0}, ValueError, "`keep` must be at least 1, got 0"),
        ({**loop.parts, "step": -1}, ValueError, "`step` must be at least 0, got -1"),
        ({**loop.parts, "step": "3"}, TypeError, "`step` must be an integer, got '3'"),
        ({**loop.parts, "scaler": 3}, TypeError, "`scaler` must be a torch.amp.GradScaler, got 3"),
        ({**loop.parts, "optimizer": []}, TypeError, "must be an optimizer or a list of them"),
        ({**loop.parts, "optimizer": None}, TypeError, "must be an optimizer or a list of them"),
        ({**loop.parts, "model": None}, TypeError, "must be a torch.nn.Module, got a NoneType"),
        (one_of_two, ValueError, "must have all parameters that the scheduler trains"),
        (twice, ValueError, "must be optimizers of different parameters, got one twice"),
    ]:
        with pytest.raises(kind, match=why):
            hdet.save_checkpoint(tmp_path, **arguments)
    assert not list(tmp_path.iterdir())


def test_arguments_of_wrong_types_are_refused_before_processes_wait(tmp_path: Path) -> None:
    loop = Loop().steps(1)
    path = hdet.save_checkpoint(tmp_path, **loop.parts)
    base = torch.optim.lr_scheduler.ConstantLR(loop.optimizers[0])
    others: list[tuple[dict[str, Any], str]] = [
        ({"scheduler": base}, "`scheduler` must be an hdet.HDET, got a ConstantLR"),
        ({"scheduler": None}, "`scheduler` must be an hdet.HDET, got a NoneType"),
        ({"model": "net"}, "`model` must be a torch.nn.Module, got a str"),
    ]
    for wrong, why in others:
        for call in (hdet.save_checkpoint, hdet.load_checkpoint):
            with pytest.raises(TypeError, match=why):
                call(path, **{**loop.parts, **wrong})
    anything: Any = 3
    with pytest.raises(TypeError, match="`folder` must be a str or a pathlib"):
        hdet.save_checkpoint(anything, **loop.parts)
    with pytest.raises(TypeError, match="`path` must be a str or a pathlib"):
        hdet.load_checkpoint(anything, **loop.parts)
    assert hdet.latest_checkpoint(tmp_path) == path


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"loss": np.float64(1.0)}, r"`extra\['loss'\]` must be plain .* got a numpy.float64. "),
        ({"a": [1, (2, Path("x"))]}, r"`extra\['a'\]\[1\]\[1\]` must be .* got a pathlib.Po"),
        ({"at": datetime(2026, 1, 1)}, r"`extra\['at'\]` must be .* got a datetime.datetime. "),
        ({"order": range(3)}, r"`extra\['order'\]` must be plain data .* got a range. "),
        (np.arange(3), "`extra` must be plain data .* got a numpy.ndarray. .* x.tolist.. for an a"),
        ({np.int64(3): 1}, "`a key of extra` must be plain data .* got a numpy.int64"),
        ({"do": open}, r"`extra\['do'\]` must be .* got a builtin_function_or_method"),
        ({"do": lambda: 0}, r"`extra\['do'\]` must be plain data .* got a function"),
    ],
)
def test_extra_that_cannot_be_saved_is_named_with_its_place(
    extra: Any, why: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=why) as error:
        hdet.save_checkpoint(tmp_path, **Loop().parts, extra=extra)
    assert "torch.load" not in str(error.value) and "\x1b" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_extra_that_holds_itself_is_refused_for_its_odd_part(tmp_path: Path) -> None:
    extra: list[Any] = [1, open]
    extra.insert(0, extra)
    with pytest.raises(TypeError, match=r"`extra\[2\]` must be plain data"):
        hdet.save_checkpoint(tmp_path, **Loop().parts, extra=extra)


def test_file_of_plain_data_that_holds_other_objects_is_refused_with_their_class(
    tmp_path: Path,
) -> None:
    for content, why in [
        ({"a": np.float64(1)}, "code: it has a numpy[.]_?core[.]multiarray.scalar$"),
        (Hostile("true"), r"code: it has a posix\.system$"),
    ]:
        torch.save(content, tmp_path / "file")
        with pytest.raises(ValueError, match=why):
            from_file(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"xx")
    with pytest.raises(ValueError, match=r"code: it is no plain data$"):
        from_file(tmp_path / "file")


# Refused without a change ------------------------------------------------------------------------


def assert_refused(path: Path, loop: Loop, why: str, **arguments: Any) -> None:
    before = loop.everything()
    with pytest.raises(ValueError, match=why):
        hdet.load_checkpoint(path, **{**loop.parts, **arguments})
    assert loop.everything() == before


def rewritten(path: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint, with its checksum: by someone who means it."""
    (path / name).write_bytes(content)
    was = read_manifest(path)
    files: dict[str, FileEntry] = {**was.files, name: entry_of(path / name)}
    (path / FILE_NAME).write_text(Manifest(was.number, was.step, was.processes, files).text())


class Hostile:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_hostile_checkpoint_runs_no_code(tmp_path: Path) -> None:
    loop = Loop().steps(2)
    sign = tmp_path / "sign"
    code = pickle.dumps(Hostile(f"touch {sign}"), protocol=2)
    for name in (".metadata", "common.pt", "process-00000.pt"):
        path = hdet.save_checkpoint(tmp_path, **loop.parts)
        rewritten(path, name, code)
        assert_refused(
            path, loop, "is no index of a checkpoint|cannot be read without running code"
        )
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / ".metadata").write_bytes(code)
    assert_refused(tmp_path / "flat", loop, "is no index of a checkpoint: it names posix.system")
    assert not sign.exists()


def test_checkpoint_with_a_damaged_state_changes_nothing(tmp_path: Path) -> None:
    loop = Loop().steps(7)
    path = hdet.save_checkpoint(tmp_path, **loop.parts)
    common = torch.load(path / "common.pt", weights_only=True)
    common["scheduler"]["knobs"][0]["scale"] = float("nan")
    torch.save(common, tmp_path / "file")
    rewritten(path, "common.pt", (tmp_path / "file").read_bytes())
    assert_refused(path, Loop().steps(1), "finite number above 0 as `knobs\\[0\\].scale`, got nan")


def test_other_runs_and_other_paths_are_refused(tmp_path: Path) -> None:
    loop, two = Loop().steps(2), Loop(optimizers=2)
    path = hdet.save_checkpoint(tmp_path, **loop.parts)
    assert_refused(tmp_path, loop, "a folder of them. Pass hdet.latest_checkpoint")
    assert_refused(tmp_path / "typo", loop, "which is no folder")
    assert_refused(path, two, r"as many optimizers as were saved \(1\), got 2")
    assert_refused(path, Loop(base=lambda one: StepLR(one, 5)), "must be of a StepLR")
    wide = Loop()
    wide.model[3] = nn.Linear(8, 3, bias=False)  # type: ignore[operator]
    optimizer = torch.optim.AdamW(wide.model.parameters(), lr=0.01)
    base: LRScheduler = OneCycleLR(optimizer, 0.01, total_steps=40)
    del wide.scheduler
    wide.scheduler = hdet.HDET(base, model=wide.model, scout=None)
    other = {"model": wide.model, "optimizer": optimizer, "scheduler": wide.scheduler}
    assert_refused(path, wide, "it lacks \\['3.bias'\\]", **other)


def test_index_is_the_digest_of_all_files(tmp_path: Path) -> None:
    path = hdet.save_checkpoint(tmp_path, **Loop().parts)
    files = read_manifest(path).files
    assert set(files) == {p.name for p in path.iterdir()} - {FILE_NAME}
    for name, entry in files.items():
        assert entry.sha256 == sha256((path / name).read_bytes()).hexdigest()
