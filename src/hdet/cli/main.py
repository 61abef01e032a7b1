"""The `hdet` command: demo, report, export."""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hdet._version import __version__
from hdet.cli import demo
from hdet.cli.demo_acts import ENGINES, DemoSettings
from hdet.cli.demo_results import paper_line, results_table
from hdet.records import reader, schedule_export
from hdet.records.history import History
from hdet.report import build as report

WORDS = (
    "found: the peak of the schedule; within: the best one probably lies within this factor;",
    "sweep: plain OneCycleLR from nine learning rates, made beforehand; middle of three seeds",
)
STOPPED = 130
"""The exit status of a command that Ctrl-C ended, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: The words after `hdet`; by default those of the command line.

    Returns:
        The exit status: 0 done, 1 failed, 130 stopped by Ctrl-C. Wrong arguments exit with 2.
    """
    chosen = parser().parse_args(arguments)
    try:
        status: int = chosen.run(chosen)
    except (ModuleNotFoundError, OSError, RuntimeError, ValueError) as error:
        print(f"hdet {chosen.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"hdet {chosen.command}: interrupted", file=sys.stderr)
        return STOPPED
    return status


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(
        prog="hdet",
        description="Replicas that find and track your learning rate inside the run itself.",
        epilog="`hdet COMMAND --help` says more about a command.",
    )
    top.add_argument("--version", action="version", version=f"hdet {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_report(commands)
    _add_export(commands)
    return top


# demo ------------------------------------------------------------------------------------------


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    usual = DemoSettings()
    command = commands.add_parser(
        "demo",
        help="the method at work, then learning rates 1000 times off beside a sweep",
        description=(
            "First the paper's method: replicas fan out and converge. Then two small tasks, a conv "
            "net and a transformer, each from a learning rate that is 1000 times too low and from "
            "one that is 1000 times too high, beside the best of a sweep that was made beforehand. "
            "It takes about two minutes on two cores, downloads nothing, stacks its replicas on a "
            "GPU if there is one, and leaves records, checkpoints and an HTML report. Ctrl-C "
            "stops it after the cycle; the same command with --resume goes on."
        ),
    )
    command.add_argument(
        "--replicas", type=int, default=usual.replicas, help="how many (default: %(default)s)"
    )
    command.add_argument(
        "--steps", type=int, help="optimizer steps of each run (default: those of the task)"
    )
    command.add_argument(
        "--lr", type=float, help="learning rate of each run (default: far too low and too high)"
    )
    command.add_argument(
        "--engine",
        choices=ENGINES,
        default=usual.engine,
        help="replicas stacked on one device, or one process each (default: %(default)s)",
    )
    command.add_argument(
        "--out",
        type=Path,
        default=Path("runs/demo"),
        help="folder to write to (default: %(default)s)",
    )
    command.add_argument("--resume", action="store_true", help="go on with the run in that folder")
    command.set_defaults(run=_demo, refuse=command.error)


def _demo(chosen: argparse.Namespace) -> int:
    _need("demo", "rich", "plotly", "sklearn")
    from rich.console import Console

    try:
        settings = DemoSettings(
            replicas=chosen.replicas, steps=chosen.steps, lr=chosen.lr, engine=chosen.engine
        )
    except (TypeError, ValueError) as error:
        chosen.refuse(str(error))
    result = demo.run(settings, chosen.out, resume=chosen.resume)
    title = "stopped" if result.stopped else "one run each, against the best of a sweep"
    console = Console()
    console.print(results_table(result.runs, title))
    for line in (paper_line(result.runs), *WORDS):
        print(line)
    print(f"report      {result.page}")
    print(f"checkpoints {result.checkpoint}")
    if result.stopped:
        print("the same command with --resume goes on")
        return STOPPED
    return 0


# report ----------------------------------------------------------------------------------------


def _add_report(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "report",
        help="one HTML page about a run, or a comparison of several",
        description=(
            "Write one self-contained HTML page: losses, learning rates with every move and its "
            "reason, hypergradients, distances, excluded replicas, costs, settings. Several runs "
            "are compared on one page. It works on a run that has not ended."
        ),
    )
    command.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or its record.jsonl")
    command.add_argument(
        "--out",
        type=Path,
        help="the page to write (default: RUN/report.html; for several runs ./report.html)",
    )
    command.set_defaults(run=_report)


def _report(chosen: argparse.Namespace) -> int:
    _need("report", "plotly")
    first = Path(chosen.runs[0])
    beside = first if first.is_dir() else first.parent
    page = chosen.out or (beside if len(chosen.runs) == 1 else Path()) / "report.html"
    for history in report.write(chosen.runs, page):
        _print_damage(history)
    print(page)
    return 0


# export ----------------------------------------------------------------------------------------


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "export",
        help="the schedule that a run found, as JSON for hdet.Replay",
        description=(
            "Write the learning rates that a run found as JSON. hdet.Replay(optimizer, FILE) plays "
            "them back as a plain scheduler without replicas, also stretched to another length."
        ),
    )
    command.add_argument("run_folder", metavar="RUN", help="a run folder, or its record.jsonl")
    command.add_argument(
        "--out", help="the file to write, - for standard output (default: RUN/schedule.json)"
    )
    command.set_defaults(run=_export)


def _export(chosen: argparse.Namespace) -> int:
    history = reader.read(chosen.run_folder)
    _print_damage(history)
    found = schedule_export.found(history)
    others = [knob for knob in history.cycles[-1].knobs if not knob.is_lr]
    if others:
        ended = [
            f"{k.name} (not known)" if k.centre is None else f"{k.name} ({k.centre:.4g})"
            for k in others
        ]
        print(f"not in it, set them yourself: {', '.join(ended)}", file=sys.stderr)
    if not found.finished:
        print(f"the run has not ended: {found.total_steps} steps are exported", file=sys.stderr)
    if chosen.out == "-":
        sys.stdout.write(found.to_json())
        return 0
    out = Path(chosen.out) if chosen.out else history.path.parent / "schedule.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(found.to_json(), encoding="utf-8")
    print(out)
    return 0


def _print_damage(history: History) -> None:
    for damage in history.damaged:
        print(f"{history.path}: line {damage.line} skipped: {damage.cause}", file=sys.stderr)


def _need(extra: str, *modules: str) -> None:
    """Raise if a module is missing, with the extra that installs it."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        names = ", ".join({"sklearn": "scikit-learn"}.get(name, name) for name in missing)
        raise ModuleNotFoundError(f"needs {names}: pip install 'hdet[{extra}]'")
