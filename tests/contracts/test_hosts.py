"""Test training on several hosts: network namespaces with a link, and torchrun in each.

The fixture creates and removes the namespaces. They need root and iproute2. On a machine without
them the tests are skipped, or fail if HDET_HOSTS=required.
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

import hdet
from benchmarks.result_file import ROOT
from benchmarks.systems.hosts import Hosts, environment
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
    """Return the last checkpoint of a run: weights, optimizer states and schedule."""
    path = hdet.latest_checkpoint(out)
    assert path is not None and path.name == f"step-{STEPS:08d}"
    dcp_to_torch_save(path, out / "all.pt")
    state = torch.load(out / "all.pt", weights_only=False)
    return flatten_state_dict({**state, **torch.load(path / "common.pt", weights_only=True)})[0]


def test_two_hosts_end_with_the_state_of_one_host_and_send_no_gradients(
    hosts: Hosts, tmp_path: Path
) -> None:
    """The link is slow, and one process dies half-way."""
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
    # A ring of four processes sends 1.5 times the reduced bytes over each link, and one link leaves
    # this host. Shared gradients would send that at each step. The bound leaves room for the
    # averages, two starts and two checkpoints.
    assert hosts.sent() < STEPS * 1.5 * MODEL_BYTES / 5
