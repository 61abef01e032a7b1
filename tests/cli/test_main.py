"""The `hdet` command as a person calls it: what it prints, what it leaves, how it exits."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hdet
from hdet.cli import main as cli
from hdet.records import reader
from tests.knob_run import Run
from tests.processes import POLL_SECONDS, Progress, communicate
from tests.sample_record import write_sample

HDET = [sys.executable, "-W", "error::UserWarning", "-W", "ignore:scout disabled"]
HDET += ["-W", "ignore:the scout saw hardly", "-m", "hdet"]


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
        (["--replicas", "5"], "`--replicas` must divide 64, got 5"),
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


def test_demo_refuses_to_resume_a_missing_or_other_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = ["demo", "--out", str(tmp_path), "--resume"]
    assert cli.main(resume) == 1
    assert "nothing to resume" in capsys.readouterr().err
    (tmp_path / "checkpoint.pt").write_bytes(b"no checkpoint")
    assert cli.main(resume) == 1
    assert "cannot be read" in capsys.readouterr().err
    torch.save([1, 2], tmp_path / "checkpoint.pt")
    assert cli.main(resume) == 1
    assert "is not a checkpoint of the demo" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert cli.main(["demo", "--out", str(tmp_path / "file")]) == 1


@pytest.mark.parametrize("engine", ["stacked", "processes"])
def test_demo_that_diverges_reports_it_and_writes_a_page(engine: str, tmp_path: Path) -> None:
    options = ["--lr", "1e30", "--steps", "120", "--replicas", "2", "--engine", engine]
    done = run("demo", *options, "--out", tmp_path, status=1)
    assert "Traceback" not in done.stderr
    assert "hdet demo: " in done.stderr
    assert (tmp_path / "report.html").exists()


def test_demo_finds_a_better_learning_rate_than_the_plain_run(tmp_path: Path) -> None:
    run("demo", "--steps", "800", "--replicas", "8", "--out", tmp_path)
    ours, plain = (reader.read(tmp_path / name) for name in ("hdet", "plain"))
    (scouted,) = ours.scouts
    assert scouted.factor is not None
    assert scouted.factor > 30
    assert ours.measure("accuracy")[-1][1] > 0.9
    assert plain.measure("accuracy")[-1][1] < 0.5
    assert not plain.scouts


def test_second_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [*HDET, "demo", "--engine", "processes", "--replicas", "2", "--out", str(tmp_path)]
    shown = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert shown.stdout is not None
    shown.stdout.readline()
    for _ in range(2):
        os.killpg(shown.pid, signal.SIGINT)
    communicate(shown)  # ends when all processes have closed the pipe, replicas too
    assert shown.returncode == 130
    assert (tmp_path / "checkpoint.pt").exists()


@pytest.mark.parametrize("engine", ["stacked", "processes"])
def test_demo_resumes_after_ctrl_c(engine: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ["demo", "--steps", "160", "--lr", "0.03", "--replicas", "2", "--engine", engine]
    command += ["--out", str(out)]
    stopped = subprocess.Popen(
        [*HDET, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert stopped.stdout is not None
    assert stopped.stdout.readline().startswith("step 10/160  cycle 1  hdet: loss ")
    stopped.send_signal(signal.SIGINT)
    text, errors = communicate(stopped)
    assert stopped.returncode == 130, errors
    assert "the same command with --resume goes on" in text
    results = reader.read(out / "hdet")
    assert not results.damaged
    assert not results.is_finished
    assert 0 < results.last_step < 160
    assert (out / "report.html").exists()
    torch.load(out / "checkpoint.pt", weights_only=True)

    kept = torch.load(out / "checkpoint.pt", weights_only=True)
    text = run(*command, "--resume").stdout
    if engine == "stacked":  # the plain run was not stopped
        run("demo", *command[1:-1], tmp_path / "whole")
        ends = [
            torch.load(one / "checkpoint.pt", weights_only=True)
            for one in (out, tmp_path / "whole")
        ]
        ours, theirs = (end["runs"]["plain"]["states"][0] for end in ends)
        assert kept["step"] < 160
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert "after 160 of 160 steps" in text
    assert f"report      {out / 'report.html'}" in text
    for name in ("hdet", "plain"):
        results = reader.read(out / name)
        assert results.is_finished
        assert results.num_replicas == (1 if (engine, name) == ("stacked", "plain") else 2)
        assert [cycle.step for cycle in results.cycles] == list(range(10, 161, 10))
        assert results.measure("accuracy")[-1][1] > 0.9
    assert "the run in" in run(*command, "--resume", status=1).stderr


def test_demo_resumes_on_another_engine_and_with_other_replicas(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    common = ["--steps", "100", "--lr", "0.03", "--out", out]
    stop_soon = subprocess.Popen(
        [*HDET, "demo", *common, "--replicas", "4"], stdout=subprocess.PIPE, text=True
    )
    assert stop_soon.stdout is not None
    stop_soon.stdout.readline()
    stop_soon.send_signal(signal.SIGINT)
    communicate(stop_soon)
    assert stop_soon.returncode == 130
    run("demo", *common, "--replicas", "2", "--engine", "processes", "--resume")
    results = reader.read(tmp_path / "run" / "hdet")
    assert results.is_finished
    assert {len(cycle.losses) for cycle in results.cycles} == {2, 4}
    assert "`--lr` must be" in run("demo", *common, "--lr", "0.1", "--resume", status=1).stderr


@pytest.mark.filterwarnings("ignore:scout disabled")
def test_files_of_an_earlier_demo_are_moved_aside(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for steps in ("10", "20"):
        assert cli.main(["demo", "--steps", steps, "--out", str(out)]) == 0
    assert reader.read(out / "hdet").last_step == 20
    assert reader.read(out / "earlier-1" / "hdet").last_step == 10


def test_terminal_gets_a_live_display(tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    command = [*HDET, "demo", "--steps", "60", "--out", str(tmp_path / "run")]
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
    for words in ("hdet demo", "training", "learning rates", "├", "left", "held-out loss"):
        assert words in text
    assert json.loads((tmp_path / "run" / "hdet" / "record.jsonl").read_text().splitlines()[0])
