"""`hdet demo`: a learning rate that is far too low, with hdet and without, side by side.

Both runs get the same model, learning rate, batches and number of steps, on handwritten digits that
install with pip.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hdet.cli import demo_processes
from hdet.cli.demo_runs import CHECKPOINT, PLAIN, WITH_HDET, DemoPair, DemoSettings
from hdet.cli.progress import Display, Score, display_for
from hdet.records.history import FILE_NAME, History
from hdet.report import build as report

PAGE = "report.html"


class DemoResult(NamedTuple):
    """What the demo came to when it ended or was stopped.

    Attributes:
        scores: The last measurements of each run.
        found: For each run the peak of its schedule times the scale at the end.
        step: The number of steps that were made.
        page: The report.
        checkpoint: The checkpoint to resume from.
    """

    scores: list[Score]
    found: list[float]
    step: int
    page: Path
    checkpoint: Path


def run(
    settings: DemoSettings, folder: Path, *, resume: bool, display: Display | None = None
) -> DemoResult:
    """Train both runs and write the report. Ctrl-C stops at the end of the cycle.

    Args:
        settings: The options of the demo.
        folder: Where records, checkpoint and report are written.
        resume: Whether to continue the run in that folder.
        display: Shows the progress; by default what suits the terminal.

    Raises:
        FileNotFoundError: There is nothing to resume.
        ValueError: The run to resume has other settings, or has ended.
    """
    prepare(folder, settings, resume)
    try:
        with display or display_for() as shown, _asked_to_stop() as stopped:
            if settings.engine == "stacked":
                device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
                pair = DemoPair(settings, folder, device)
                step = pair.train(pair.load() if resume else 0, shown.show, stopped)
                scores = pair.scores()
            else:
                scores, step = demo_processes.train(settings, folder, resume, shown, stopped)
    finally:  # a run that diverged or was interrupted gets a report, too
        histories = _write_report(folder)
    scales = [each.cycles[-1].knobs[0].scale if each.cycles else None for each in histories]
    found = [settings.lr * (scale or 1.0) for scale in scales]
    return DemoResult(scores, found, step, folder / PAGE, folder / CHECKPOINT)


def _write_report(folder: Path) -> list[History]:
    runs = [folder / name for name in (WITH_HDET, PLAIN) if (folder / name / FILE_NAME).exists()]
    return report.write(runs, folder / PAGE) if runs else []


def prepare(folder: Path, settings: DemoSettings, resume: bool) -> None:
    """Check that the run can be resumed, or move the files of an earlier demo aside."""
    if resume:
        _check_can_resume(folder, settings)
    else:
        _set_aside(folder)
    folder.mkdir(parents=True, exist_ok=True)


def _check_can_resume(folder: Path, settings: DemoSettings) -> None:
    checkpoint = folder / CHECKPOINT
    if not checkpoint.exists():
        raise FileNotFoundError(f"nothing to resume: {checkpoint} does not exist")
    try:
        saved = torch.load(checkpoint, weights_only=True)
    except Exception as error:
        raise ValueError(f"{checkpoint} cannot be read: {error}") from None
    if not isinstance(saved, dict) or not {"step", "settings", "runs"} <= saved.keys():
        raise ValueError(f"{checkpoint} is not a checkpoint of the demo")
    for name, value in saved["settings"].items():
        if value is not None and getattr(settings, name) != value:
            raise ValueError(
                f"`--{name}` must be that of the run to resume ({value}), "
                f"got {getattr(settings, name)}."
            )
    if saved["step"] >= settings.steps:
        raise ValueError(f"nothing to resume: the run in {folder} has ended")


def _set_aside(folder: Path) -> None:
    """Move the files of an earlier demo into a folder of their own."""
    names = (WITH_HDET, PLAIN, CHECKPOINT, PAGE)
    left = [folder / name for name in names if (folder / name).exists()]
    if left:
        number = next(n for n in count(1) if not (folder / f"earlier-{n}").exists())
        (folder / f"earlier-{number}").mkdir()
        for path in left:
            path.rename(folder / f"earlier-{number}" / path.name)


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C only sets a flag; pressed once more, it interrupts at once."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
