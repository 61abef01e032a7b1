"""A sink for Weights & Biases: `record=WandbSink(project="digits")`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hdet.integrations._extras import extra
from hdet.integrations._tracker import TrackerSink

with extra("trackers"):
    import wandb


class WandbSink(TrackerSink):
    """Logs numbers over `hdet/step`, sends alerts, and stores the report as an artifact.

    Decisions of the scout and of the guard, and replicas that were left out, become alerts. W&B
    sends one a minute of each kind; the column `hdet/event` of the history has all of them.

    Args:
        run: The run to log to. By default it is the one that is active at the first event, such as
            that of a trainer, or else a new one, which ends with the scheduler.
        **options: Arguments of `wandb.init` for a new run.
    """

    def __init__(self, run: Any = None, **options: Any) -> None:
        super().__init__()
        self._given, self._options = run, options

    def _start(self) -> None:
        self._run: Any = self._given or wandb.run
        self._is_ours = self._run is None
        if self._is_ours:
            self._run = wandb.init(**self._options)
        # A step of its own: W&B drops numbers of a step before its last.
        self._run.define_metric("hdet/step", hidden=True)
        self._run.define_metric("hdet/*", step_metric="hdet/step")

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log({**numbers, "hdet/step": step})

    def _tell(self, kind: str, text: str, step: int) -> None:
        self._run.log({"hdet/event": text, "hdet/step": step})
        if kind != "note":
            level = "INFO" if kind == "scout" else "WARN"
            self._run.alert(f"hdet {kind}", f"step {step}: {text.removeprefix(f'{kind}: ')}", level)

    def _store(self, folder: Path) -> None:
        artifact = wandb.Artifact(f"{folder.name}-{self._run.id}", type="report")
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact)

    def _end(self) -> None:
        if self._is_ours:
            self._run.finish()
