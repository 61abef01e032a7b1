"""Kills inside saving, cut files and flipped bits: a few of those that the benchmark makes."""

import json
import sys
from pathlib import Path

from benchmarks.result_file import ROOT, read_result
from tests.processes import run_program


def test_kills_cuts_and_flips_lose_nothing_and_load_nothing_else(tmp_path: Path) -> None:
    command = ["-m", "benchmarks.systems.saving", "--quick", "--out", str(tmp_path / "a.json")]
    done = run_program(sys.executable, *command, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_result(tmp_path / "a.json")
    assert found["headline"] == {"kills": 3, "lost": 0, "cuts_silent": 0, "flips_silent": 0}
    assert all(row["is_bit_equal"] for row in found["kills"])
    outcomes = {name for row in found["flips"] for name in row} - {"file"}
    assert {"old", "refused"} <= outcomes, json.dumps(found["flips"])
