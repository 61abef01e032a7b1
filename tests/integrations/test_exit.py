"""Reports of runs whose scheduler lives until Python exits, as in a script without functions."""

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.integrations.launch import ROOT
from tests.integrations.test_wandb import records
from tests.processes import run_program

SCRIPT = """
import sys, mlflow, torch, hdet
from hdet.integrations.mlflow import MlflowSink
from hdet.integrations.tensorboard import TensorBoardSink
from hdet.integrations.trackio import TrackioSink
from hdet.integrations.wandb import WandbSink

mlflow.set_tracking_uri("file:mlflow")
sinks = [
    TensorBoardSink("tensorboard"),
    WandbSink(mode="offline", dir="."),
    MlflowSink(),
    TrackioSink(auto_log_cpu=False, auto_log_gpu=False, embed=False),
]
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
scheduler = hdet.HDET(optimizer, total_steps=4, sync_every=2, scout=None, record=sinks)
for _ in range(4):
    optimizer.step()
    scheduler.step(1.0)
sys.exit(3)
"""


@pytest.mark.integrations
def test_all_trackers_have_the_report_of_a_script_that_just_ends(tmp_path: Path) -> None:
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(ROOT / "src"),
        "HOME": str(tmp_path),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "WANDB_DATA_DIR": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
    }
    done = run_program(sys.executable, "-W", "ignore", "-c", SCRIPT, cwd=tmp_path, env=environment)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "record" not in done.stderr, done.stderr
    assert len(list(tmp_path.glob("tensorboard/hdet/report.html"))) == 1
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [point.step for point in events.Scalars("hdet/loss/replica0")] == [2, 4]
    assert [one.exit.exit_code for one in records(tmp_path) if one.HasField("exit")] == [3]
    assert len(list(tmp_path.glob("mlflow/*/*/artifacts/hdet/report.html"))) == 1
    # W&B and trackio keep files by their content.
    staged = [*tmp_path.glob("artifacts/staging/*"), *tmp_path.glob("trackio/artifacts/**/*")]
    assert sum(b"hdet report" in file.read_bytes() for file in staged if file.is_file()) == 2
