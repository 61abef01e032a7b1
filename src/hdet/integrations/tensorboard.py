"""A sink for TensorBoard: `record=TensorBoardSink("runs/a")`."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hdet.integrations._extras import extra
from hdet.integrations._tracker import TrackerSink

with extra("trackers"):
    from torch.utils.tensorboard import SummaryWriter

KINDS = {"loss": "training losses", "score": "scores", "lr": "learning rates", "scale": "scales"}
CHARTS = {"hdet": {title: ["Multiline", [f"hdet/{kind}/.*"]] for kind, title in KINDS.items()}}
"""The charts of the tab Custom Scalars: all replicas in one."""


class TensorBoardSink(TrackerSink):
    """Writes scalars, texts and charts for TensorBoard, and the report beside its files.

    Args:
        log_dir: The folder for TensorBoard. A trainer's own folder works too.
        **options: Further arguments of `SummaryWriter`.
    """

    def __init__(self, log_dir: str | Path, **options: Any) -> None:
        super().__init__()
        self._log_dir, self._options = Path(log_dir), options
        self._writer: Any = None
        self._purge_step: int | None = None

    def _start(self) -> None:
        more = {"purge_step": self._purge_step, **self._options}
        self._writer = SummaryWriter(str(self._log_dir), **more)
        self._writer.add_custom_scalars(CHARTS)

    def _resume(self, step: int) -> None:
        self._purge_step = step + 1
        if self._writer is not None:
            self._end()
            self._start()

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def _tell(self, kind: str, text: str, step: int) -> None:
        self._writer.add_text("hdet/events", text, step)

    def _store(self, folder: Path) -> None:
        shutil.copytree(folder, self._log_dir / folder.name, dirs_exist_ok=True)
        self._writer.flush()  # at exit nothing else does

    def _end(self) -> None:
        self._writer.close()
        self._writer = None
