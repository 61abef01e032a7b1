"""The `hdet` command as a person calls it: what it prints, what it leaves, how it exits."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest
import torch

import hdet
from hdet.cli import demo_runs, demo_sweep
from hdet.cli import main as cli
from hdet.cli.demo_data import TASKS
from hdet.cli.screen import chart_rows
from hdet.records import reader
from tests.knob_run import Run
from tests.processes import POLL_SECONDS, Progress, communicate
from tests.sample_record import write_sample

HDET = [sys.executable, "-W", "error::UserWarning", "-W", "ignore:scout disabled"]
HDET += ["-W", "ignore:the scout", "-m", "hdet"]


def run(*arguments: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*HDET, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("command", [[], ["demo"], ["report"], ["export"]])
def test_help_of_each_command_is_printed(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main([*command, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: hdet")
    words = {"demo": "--resume", "report": "RUN/report.html", "export": "hdet.Replay"}
    assert words.get(command[0] if command else "", "COMMAND") in " ".join(text.split())


def test_wrong_arguments_exit_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ([], ["train"], ["report"], ["demo", "--engine", "magic"]):
        with pytest.raises(SystemExit) as exit_:
            cli.main(wrong)
        assert exit_.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


def test_version_option_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"hdet {hdet.__version__}\n"


@pytest.mark.parametrize("command", ["report", "export"])
def test_missing_record_is_an_error_without_traceback(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, str(tmp_path / "nothing")]) == 1
    assert f"hdet {command}: no record at" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "extra"), [("report", "report"), ("demo", "demo")])
def test_missing_extra_names_what_to_install(
    command: str,
    extra: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert cli.main([command, *([str(tmp_path)] if command == "report" else [])]) == 1
    error = capsys.readouterr().err
    assert "plotly" in error
    assert f"pip install 'hdet[{extra}]'" in error


def test_report_with_damaged_lines_names_them_and_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = write_sample(tmp_path / "a")
    with (run_folder / "record.jsonl").open("a") as record:
        record.write("{broken\n")
    assert cli.main(["report", str(run_folder)]) == 0
    results = capsys.readouterr()
    assert results.out == f"{run_folder / 'report.html'}\n"
    num = len((run_folder / "record.jsonl").read_text().splitlines())
    assert f"line {num} skipped" in results.err
    assert (run_folder / "report.html").stat().st_size > 1e6


def test_report_of_several_runs_is_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_sample(tmp_path / name)
    assert cli.main(["report", "a", "b"]) == 0
    assert "2 runs compared" in (tmp_path / "report.html").read_text()
    assert cli.main(["report", "a", "b", "--out", "pages/c.html"]) == 0
    assert (tmp_path / "pages" / "c.html").exists()


def test_export_writes_a_file_or_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_sample(tmp_path / "a")
    assert cli.main(["export", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'schedule.json'}\n"
    assert cli.main(["export", str(folder), "--out", "-"]) == 0
    assert capsys.readouterr().out == (folder / "schedule.json").read_text()


def test_export_names_the_knobs_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a"
    Run([hdet.lr(), hdet.weight_decay()], record=folder).go(6)
    assert cli.main(["export", str(folder)]) == 0
    results = capsys.readouterr().err
    assert "not in it, set them yourself: weight_decay (" in results
    assert "lr" not in results


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--replicas", "5"], "`--replicas` must divide 32, got 5"),
        (["--steps", "0"], "`--steps` must be"),
        (["--lr", "-1"], "`--lr` must be"),
        (["--lr", "nan"], "`--lr` must be"),
    ],
)
def test_demo_refuses_bad_settings(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["demo", "--out", str(tmp_path / "run"), *arguments])
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def small_parts() -> dict[str, Any]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    base = torch.optim.lr_scheduler.ConstantLR(optimizer)
    scheduler = hdet.HDET(base, model=model, preset="paper")
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def test_demo_refuses_to_resume_a_missing_or_other_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = ["demo", "--out", str(tmp_path), "--resume"]
    assert cli.main(resume) == 1
    assert "nothing to resume" in capsys.readouterr().err
    hdet.save_checkpoint(tmp_path / "checkpoints", **small_parts(), extra=[1, 2])
    assert cli.main(resume) == 1
    assert "is not a checkpoint of the demo" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert cli.main(["demo", "--out", str(tmp_path / "file")]) == 1


SEARCHES = ("conv-net-too-low", "conv-net-too-high", "transformer-too-low", "transformer-too-high")


@pytest.mark.filterwarnings("ignore:scout disabled")
def test_demo_that_fails_reports_it_and_writes_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(run: demo_runs.DemoRun, step: int) -> None:
        if not run.act.is_paper:
            raise RuntimeError("all replicas are lost")
        one_step(run, step)

    one_step = demo_runs.DemoRun._step
    monkeypatch.setattr(demo_runs.DemoRun, "_step", fail)
    assert cli.main(["demo", "--steps", "20", "--replicas", "2", "--out", str(tmp_path)]) == 1
    assert "hdet demo: all replicas are lost" in capsys.readouterr().err
    assert (tmp_path / "report.html").exists()


def test_demo_ends_beside_the_sweep_from_both_starts(tmp_path: Path) -> None:
    text = run("demo", "--steps", "400", "--out", tmp_path).stdout
    for name in SEARCHES:
        history = reader.read(tmp_path / name)
        (searched,) = history.scouts
        factor = 1 / 1000 if name.endswith("high") else 1000
        assert searched.factor is not None
        assert searched.within is not None
        assert 1 / 20 < searched.factor / factor < 20
        assert history.reference is not None
        loss = history.last("loss")
        assert loss is not None
        assert loss < 2 * history.reference.bands["loss"][1]
    fanned_out = reader.read(tmp_path / "paper").cycles
    assert all(len(set(cycle.knobs[0].values)) == 8 for cycle in fanned_out)
    assert "1000 times too low" in text
    assert "best of a sweep, 9 runs: held-out loss" in text
    assert "the paper's method: 8 replicas, 12 converges: held-out loss" in text
    body = (tmp_path / "report.html").read_text()
    assert body.index("the scout found") < body.index("Side by side")


def test_stored_sweep_says_how_it_was_made() -> None:
    stored = json.loads(demo_sweep.FILE.read_text())
    assert {"made_by", "commit", "date", "device", "seeds", "rows"} <= stored.keys()
    for task in TASKS:
        rows = [row for row in stored["rows"] if row["task"] == task.name]
        best = stored["best"][task.name]
        assert len(rows) == best["runs"] * best["seeds"]
        assert stored["steps"][task.name] == task.steps
        rates = sorted({row["lr"] for row in rows})
        assert rates[0] < best["lr"] < rates[-1]


def test_second_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [*HDET, "demo", "--engine", "processes", "--replicas", "2", "--out", str(tmp_path)]
    shown = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert shown.stdout is not None
    read_until(shown.stdout, "  step ")
    for _ in range(2):
        os.killpg(shown.pid, signal.SIGINT)
    communicate(shown)  # ends when all processes have closed the pipe, replicas too
    assert shown.returncode == 130
    assert hdet.latest_checkpoint(tmp_path / "checkpoints") is not None


def read_until(stream: IO[str], words: str) -> str:
    for line in stream:
        if words in line:
            return line
    raise AssertionError(f"{words} is not in the output")


@pytest.mark.parametrize("engine", ["stacked", "processes"])
def test_demo_resumes_after_ctrl_c(engine: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ["demo", "--steps", "60", "--lr", "0.03", "--replicas", "2", "--engine", engine]
    command += ["--out", str(out)]
    stopped = subprocess.Popen(
        [*HDET, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert stopped.stdout is not None
    read_until(stopped.stdout, "run 2 of 3")
    read_until(stopped.stdout, "  step ")
    stopped.send_signal(signal.SIGINT)
    text, errors = communicate(stopped)
    assert stopped.returncode == 130, errors
    assert "the same command with --resume goes on" in text
    results = reader.read(out / "conv-net")
    assert not results.damaged
    assert 0 < results.last_step < 60
    assert (out / "report.html").exists()
    assert hdet.latest_checkpoint(out / "checkpoints") is not None

    text = run(*command, "--resume").stdout
    assert f"report      {out / 'report.html'}" in text
    for name in ("paper", "conv-net", "transformer"):
        results = reader.read(out / name)
        assert results.is_finished
        assert results.num_replicas == 2
    cycles = [cycle.step for cycle in reader.read(out / "conv-net").cycles]
    assert cycles == sorted(set(cycles))
    assert "the run in" in run(*command, "--resume", status=1).stderr
    assert "`--lr` must be" in run(*command, "--lr", "0.1", "--resume", status=1).stderr


@pytest.mark.filterwarnings("ignore:scout disabled", "ignore:the scout")
def test_files_of_an_earlier_demo_are_moved_aside(tmp_path: Path) -> None:
    out = tmp_path / "run"
    (out / "mine").mkdir(parents=True)
    for steps in ("6", "9"):
        options = ["--steps", steps, "--replicas", "2", "--lr", "0.01", "--out", str(out)]
        assert cli.main(["demo", *options]) == 0
    assert reader.read(out / "conv-net").last_step == 9
    assert reader.read(out / "earlier-1" / "conv-net").last_step == 6
    assert (out / "mine").exists()


def test_terminal_gets_a_live_display(tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    options = ["--steps", "60", "--lr", "0.01", "--out", str(tmp_path / "run")]
    command = [*HDET, "demo", *options]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    shown = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    screen = b""
    progress = Progress([shown.pid])
    while not progress.has_stalled():
        if not select.select([master], [], [], POLL_SECONDS)[0]:
            continue
        try:
            screen += os.read(master, 65536)
        except OSError:  # the other side is gone
            break
    os.close(master)
    assert shown.wait() == 0, screen.decode()
    text = screen.decode()
    for words in ("run 1 of 3", "fan out", "converge", "from the average", "├", "average"):
        assert words in text
    for words in ("scout", "best of a sweep, 9 runs", "░", "found", "price of", "within"):
        assert words in text
    first = (tmp_path / "run" / "paper" / "record.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["event"] == "run"


def test_chart_shades_the_sweep_and_marks_the_losses() -> None:
    rows = chart_rows([(0, 2.0), (100, 0.2)], 100, (0.1, 0.2))
    lines = ["".join(text for text, _ in row) for row in rows]
    assert lines[0].endswith("2.0000 │●" + " " * 59)
    assert "░" not in lines[0]
    assert lines[-1].endswith("0.1000 │" + "░" * 60)
    assert sum("●" in line for line in lines) == 2
    assert "●" in next(line for line in lines if "░" in line)
