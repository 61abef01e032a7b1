"""Several hosts: network namespaces with a link between them, and torchrun on each.

Made and removed here. Where a machine does not allow them (they need root and iproute2) the tests
are skipped; with HDET_HOSTS=required that is a failure.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from benchmarks.hosts import ROOT, Hosts, environment
from tests.processes import run_program

NEEDED = os.environ.get("HDET_HOSTS") == "required"
STEPS, WIDTH = 100, 512
MODEL_BYTES = 4 * (64 * WIDTH + WIDTH + 10 * WIDTH + 10)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    reason = None if shutil.which("ip") and shutil.which("tc") else "iproute2 is not installed"
    made: Any = None
    if reason is None:
        try:
            made = Hosts()
        except OSError as error:
            reason = f"this machine allows no network namespaces ({error})"
    if reason is not None:
        if NEEDED:
            pytest.fail(f"HDET_HOSTS=required, but {reason}", pytrace=False)
        pytest.skip(reason)
    yield made
    made.close()


def on_one_host(*arguments: str) -> str:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "4"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = run_program(sys.executable, *torchrun, *arguments, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def script(out: Path, *options: str) -> list[str]:
    sizes = ["--steps", str(STEPS), "--width", str(WIDTH)]
    return ["examples/hosts.py", "--out", str(out), *sizes, *options]


def weights(said: str) -> str:
    return said.split("sum of all weights ")[1].split()[0]


def at_the_end(out: Path) -> dict[str, Any]:
    """All that the last checkpoint of a run holds: weights, optimizers, schedule."""
    dcp_to_torch_save(out / f"step_{STEPS}", out / "all.pt")
    return flatten_state_dict(torch.load(out / "all.pt", weights_only=False))[0]


def test_two_hosts_end_where_one_does_and_send_no_gradients(hosts: Hosts, tmp_path: Path) -> None:
    """Over a slow link, with a process that dies half-way."""
    hosts.shape("100mbit")
    options = ["--save-every", "50"]
    one = on_one_host(*script(tmp_path / "one", *options))
    two = hosts.torchrun(*script(tmp_path / "two", *options), HDET_STUMBLE="50")
    assert "going on from step 50" in two
    assert weights(two) == weights(one)
    ours, want = at_the_end(tmp_path / "two"), at_the_end(tmp_path / "one")
    assert ours.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(ours[name], value) if isinstance(value, Tensor) else ours[name] == value
    # A ring of four sends 1.5 times what is reduced over each of its links, and one leaves this
    # host: shared gradients would take that for every step. Five converges take less, with all that
    # two starts and two checkpoints take besides.
    assert hosts.sent() < STEPS * 1.5 * MODEL_BYTES / 5
