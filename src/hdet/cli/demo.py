"""`hdet demo`: the paper's method, then learning rates that are far off, beside a sweep.

Everything is trained on handwritten digits that install with pip.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

import hdet
from hdet.checkpoint.load import extra_of
from hdet.cli import demo_processes
from hdet.cli.demo_acts import Act, DemoSettings, acts
from hdet.cli.demo_data import TASKS
from hdet.cli.demo_results import histories_of
from hdet.cli.demo_runs import CHECKPOINTS, train_all
from hdet.cli.progress import Display, display_for
from hdet.records.history import History
from hdet.report import build as report

PAGE = "report.html"


class DemoResult(NamedTuple):
    """What the demo came to when it ended or was stopped.

    Attributes:
        runs: The runs that were made.
        stopped: Whether Ctrl-C stopped it.
        page: The report.
        checkpoint: The folder of the checkpoints to resume from.
    """

    runs: list[tuple[Act, History]]
    stopped: bool
    page: Path
    checkpoint: Path


def run(
    settings: DemoSettings, folder: Path, *, resume: bool, display: Display | None = None
) -> DemoResult:
    """Make all runs and write the report. Ctrl-C stops at the end of the cycle.

    Args:
        settings: The options of the demo.
        folder: Where records, checkpoint and report are written.
        resume: Whether to continue the demo in that folder.
        display: Shows the progress; by default what suits the terminal.

    Raises:
        FileNotFoundError: There is nothing to resume.
        ValueError: The demo to resume has other settings, or has ended.
    """
    prepare(folder, settings, resume)
    try:
        with display or display_for() as shown, _asked_to_stop() as asked:
            if settings.engine == "stacked":
                device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
                stopped = train_all(settings, folder, device, shown.show, asked, resume=resume)
            else:
                stopped = demo_processes.train(settings, folder, resume, shown, asked)
    finally:  # a run that diverged or was interrupted gets a report, too
        runs = histories_of(acts(settings), folder)
        if runs:
            searches_first = sorted(runs, key=lambda run: run[0].is_paper)
            report.write([folder / act.name for act, _ in searches_first], folder / PAGE)
    return DemoResult(runs, stopped, folder / PAGE, folder / CHECKPOINTS)


def prepare(folder: Path, settings: DemoSettings, resume: bool) -> None:
    """Check that the run can be resumed, or move the files of an earlier demo aside."""
    if resume:
        _check_can_resume(folder, settings)
    else:
        _set_aside(folder)
    folder.mkdir(parents=True, exist_ok=True)


def _check_can_resume(folder: Path, settings: DemoSettings) -> None:
    checkpoint = hdet.latest_checkpoint(folder / CHECKPOINTS)
    if checkpoint is None:
        raise FileNotFoundError(f"nothing to resume: no checkpoint in {folder / CHECKPOINTS}")
    saved = extra_of(checkpoint)
    if not isinstance(saved, dict) or not {"act", "step", "settings", "curve"} <= saved.keys():
        raise ValueError(f"{checkpoint} is not a checkpoint of the demo")
    for name, value in saved["settings"].items():
        if name not in ("engine", "replicas") and getattr(settings, name) != value:
            raise ValueError(
                f"`--{name}` must be that of the run to resume ({value}), "
                f"got {getattr(settings, name)}."
            )
    everything = acts(settings)
    if saved["act"] == len(everything) - 1 and saved["step"] >= everything[-1].steps:
        raise ValueError(f"nothing to resume: the run in {folder} has ended")


def _set_aside(folder: Path) -> None:
    """Move the files of an earlier demo into a folder of their own."""
    tasks = [f"{task.name}{end}" for task in TASKS for end in ("", "-too-low", "-too-high")]
    names = ("paper", *tasks, CHECKPOINTS, "checkpoint.pt", PAGE)
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
