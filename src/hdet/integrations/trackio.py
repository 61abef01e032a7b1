"""A sink for trackio: `record=TrackioSink(project="digits")`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hdet.integrations._extras import extra
from hdet.integrations._tracker import TrackerSink

with extra("trackers"):
    import trackio
    from trackio.context_vars import current_run  # `init` would end the run of a trainer


class TrackioSink(TrackerSink):
    """Logs numbers, sends alerts, and stores the report as an artifact.

    Args:
        project: The project of a new run.
        run: The run to log to. By default it is the one that is active at the first event, such as
            that of a trainer, or else a new one, which ends with the scheduler.
        **options: Further arguments of `trackio.init` for a new run.
    """

    def __init__(self, project: str = "hdet", run: Any = None, **options: Any) -> None:
        super().__init__()
        self._given, self._options = run, {"project": project, **options}

    def _start(self) -> None:
        self._run: Any = self._given or current_run.get()
        self._is_ours = self._run is None
        if self._is_ours:
            self._run = trackio.init(**self._options)

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def _tell(self, kind: str, text: str, step: int) -> None:
        is_news = kind in ("scout", "note")
        level = trackio.AlertLevel.INFO if is_news else trackio.AlertLevel.WARN
        self._run.alert(f"hdet {kind}", text.removeprefix(f"{kind}: "), level, step=step)

    def _store(self, folder: Path) -> None:
        self._run.log_artifact(folder, name=f"{folder.name}-{self._run.id}", type="report")

    def _end(self) -> None:
        if self._is_ours and current_run.get() is self._run:
            trackio.finish()
        elif self._is_ours:  # another run has begun since
            self._run.finish()
