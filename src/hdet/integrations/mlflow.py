"""A sink for MLflow: `record=MlflowSink(run_name="digits")`."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hdet.integrations._extras import extra
from hdet.integrations._tracker import TrackerSink

with extra("trackers"):
    import mlflow


class MlflowSink(TrackerSink):
    """Logs metrics, and stores texts and the report as artifacts in the folder `hdet`.

    A tag has the last text of its kind of event; `events.txt` has all texts.

    Args:
        run_id: The run to log to. By default it is the one that is active at the first event, such
            as that of a trainer, or else a new one, which ends with the scheduler.
        **options: Arguments of `mlflow.start_run` for a new run.
    """

    def __init__(self, run_id: str | None = None, **options: Any) -> None:
        super().__init__()
        self._given, self._options = run_id, options

    def _start(self) -> None:
        active = mlflow.active_run()
        run_id = self._given or (active and active.info.run_id)
        self._is_ours = run_id is None
        self._id = run_id or mlflow.start_run(**self._options).info.run_id
        self._client, self._texts = mlflow.MlflowClient(), ""

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        named = {_allowed(name, numbers): value for name, value in numbers.items()}
        mlflow.log_metrics(named, step=step, run_id=self._id)

    def _tell(self, kind: str, text: str, step: int) -> None:
        self._texts += f"step {step}: {text}\n"
        self._client.set_tag(self._id, f"hdet.{kind}", f"step {step}: {text}")
        self._client.log_text(self._id, self._texts, "hdet/events.txt")

    def _store(self, folder: Path) -> None:
        self._client.log_artifacts(self._id, str(folder), folder.name)

    def _end(self) -> None:
        active = mlflow.active_run()
        if self._is_ours and active and active.info.run_id == self._id:
            mlflow.end_run()
        elif self._is_ours:  # another run has begun since, or another thread ends it
            self._client.set_terminated(self._id)


def _allowed(name: str, others: Mapping[str, float]) -> str:
    """A name that MLflow takes. In its files, a metric cannot also be the folder of others."""
    is_folder = any(other.startswith(f"{name}/") for other in others)
    return re.sub(r"[^\w\-. :/]", "_", f"{name}/centre" if is_folder else name)
