"""Run the example scripts and check what they print and write."""

import json
import sys
from pathlib import Path

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
