"""Run the example scripts and check what they print and write."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import hdet
from tests.processes import run_program

ROOT = Path(__file__).parent.parent


def run(*command: str) -> str:
    done = run_program(sys.executable, *command, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ddp_example_trains_and_writes_a_record_and_a_checkpoint(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "4"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    said = run(*torchrun, "examples/ddp.py", "--epochs", "14", "--out", str(tmp_path))
    assert float(said.split("accuracy")[-1].split()[0]) > 0.9
    assert float(said.split("learning rate:")[1].split()[0]) > 30
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    cycles = [line for line in lines if line["event"] == "cycle"]
    assert len(cycles) >= 20
    assert all(len(line["losses"]) == 4 for line in cycles)
    saved = hdet.latest_checkpoint(tmp_path / "checkpoints")
    assert saved is not None and saved.name == "step-00000294"


def test_knobs_example_moves_a_knob_and_writes_a_record(tmp_path: Path) -> None:
    said = run("examples/knobs.py", "--steps", "300", "--out", str(tmp_path))
    assert "d loss / d dropout" in said
    lines = (tmp_path / "record.jsonl").read_text().splitlines()
    assert any('decision": "up' in line for line in lines)


@pytest.mark.parametrize("name", ["muon", "gan"])
def test_example_with_several_optimizers_adds_at_most_four_lines(name: str) -> None:
    lines = (ROOT / f"examples/{name}.py").read_text().splitlines()
    marked = [line for line in lines if "# hdet" in line]
    assert len(marked) <= 4
    # Without them nothing of hdet is left but what the script prints at its end.
    others = [line for line in lines if line not in marked and "hdet" in line]
    assert all("hdet in the lines marked so" in line for line in others)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_example_finds_a_factor_for_both_optimizers() -> None:
    said = run("examples/muon.py", "--steps", "700")
    assert float(said.split("accuracy")[-1].split()[0]) > 0.9
    assert float(said.split("learning rates:")[1].split()[0]) > 30


def test_gan_example_finds_a_factor_for_both_networks() -> None:
    said = run("examples/gan.py", "--steps", "900")
    assert float(said.split("distance")[-1].split()[0]) < 0.05  # 0.5 with the given rates
    assert float(said.split("learning rates:")[1].split()[0]) > 30


def test_one_device_example_trains_and_writes_a_record_and_a_checkpoint(
    tmp_path: Path,
) -> None:
    said = run("examples/one_device.py", "--steps", "400", "--out", str(tmp_path))
    assert float(said.split("accuracy")[-1].split()[0]) > 0.9
    assert float(said.split("learning rate:")[1].split()[0]) > 30
    lines = (tmp_path / "record.jsonl").read_text().splitlines()
    assert len([line for line in lines if '"event": "cycle"' in line]) >= 30
    saved = hdet.latest_checkpoint(tmp_path / "checkpoints")
    assert saved is not None and saved.name == "step-00000400"


def last_number(said: str, name: str) -> float:
    """The last number that a script prints behind a name."""
    return float(said.rsplit(name, 1)[1].split()[0])


@pytest.mark.parametrize("name", ["by_hand", "fsdp2", "epochs", "schedule_free", "ppo"])
def test_example_of_a_loop_marks_at_most_four_lines_of_hdet(name: str) -> None:
    lines = (ROOT / f"examples/{name}.py").read_text().splitlines()
    marked = [line for line in lines if "# hdet" in line]
    used = [line for line in lines if re.search(r"hdet\.\w|scheduler\.(step|observe)", line)]
    assert 3 <= len(marked) <= 4
    assert set(used) <= set(marked)


def test_by_hand_example_finds_its_learning_rate_with_ddp_and_accumulation() -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    said = run(*torchrun, "examples/by_hand.py", "--steps", "400")
    assert last_number(said, "peak of the learning rate") > 1e-3
    assert last_number(said, "test loss") < 2.2


def test_fsdp2_example_finds_its_learning_rate() -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    said = run(*torchrun, "examples/fsdp2.py", "--steps", "400")
    assert last_number(said, "peak of the learning rate") > 1e-3
    assert last_number(said, "test loss") < 2.3


def test_epochs_example_lowers_its_learning_rate_by_epoch() -> None:
    said = run("examples/epochs.py", "--epochs", "20")
    rates = [float(line.split("lr")[1].split()[0]) for line in said.splitlines()]
    assert rates[13] > 1e-3
    assert rates[-1] == pytest.approx(rates[13] / 10)
    assert last_number(said, "accuracy") > 0.85


def test_schedule_free_example_finds_a_constant_learning_rate() -> None:
    said = run("examples/schedule_free.py", "--epochs", "20")
    rates = {line.split("lr")[1].split()[0] for line in said.splitlines()}
    assert len(rates) == 1
    assert float(rates.pop()) > 1e-3
    assert last_number(said, "accuracy") > 0.85


def test_ppo_example_learns_to_walk_from_a_learning_rate_that_is_far_too_low() -> None:
    said = run("examples/ppo.py", "--updates", "50")
    assert last_number(said, "reward of a step") > 0.13
