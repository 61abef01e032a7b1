"""Several hosts: network namespaces with a link between them, and torchrun on each.

Made and removed here. Where a machine does not allow them (they need root and iproute2) the tests
are skipped; with HDET_HOSTS=required that is a failure.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NEEDED = os.environ.get("HDET_HOSTS") == "required"
STEPS, WIDTH = 100, 512
MODEL_BYTES = 4 * (64 * WIDTH + WIDTH + 10 * WIDTH + 10)


class Hosts:
    """Two namespaces, `first` and `second`, and a cable."""

    def __init__(self) -> None:
        mark = f"{os.getpid() % 100_000}"
        self.names = [f"hdet{mark}a", f"hdet{mark}b"]
        self.wires = [f"hw{mark}a", f"hw{mark}b"]
        self.addresses = ["10.77.42.1", "10.77.42.2"]
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.wires[0], "type", "veth", "peer", "name", self.wires[1])
        for name, wire, address in zip(self.names, self.wires, self.addresses, strict=True):
            ip("link", "set", wire, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", wire)
            ip("-n", name, "link", "set", wire, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def shape(self, rate: str) -> None:
        for name, wire in zip(self.names, self.wires, strict=True):
            limit = ["rate", rate, "burst", "256kb", "latency", "400ms"]
            call("tc", "-n", name, "qdisc", "add", "dev", wire, "root", "tbf", *limit)

    def sent(self) -> int:
        """Bytes that have left the first host so far."""
        counter = f"/sys/class/net/{self.wires[0]}/statistics/tx_bytes"
        return int(call("ip", "netns", "exec", self.names[0], "cat", counter))

    def torchrun(self, *arguments: str, **variables: str) -> str:
        """The same on both hosts, two processes each; what the first one says."""
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.addresses[0]}:29400"]
        nodes = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "2"]

        def torchrun(address: str, *, is_host: bool) -> list[str]:
            # It knows a host by its name, and namespaces have none.
            where = ["--local-addr", address, "--rdzv-conf", f"is_host={int(is_host)}"]
            return [sys.executable, "-m", "torch.distributed.run", *nodes, *meeting, *where]

        runs = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *torchrun(address, is_host=place == 0), *arguments],
                cwd=ROOT,
                env={**environment(), "GLOO_SOCKET_IFNAME": wire, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            for place, (name, wire, address) in enumerate(
                zip(self.names, self.wires, self.addresses, strict=True)
            )
        ]
        try:
            said = [run.communicate(timeout=120)[0] for run in runs]
        finally:
            for run in runs:
                if run.poll() is None:
                    os.killpg(run.pid, signal.SIGKILL)
        assert all(run.returncode == 0 for run in runs), "\n".join(said)
        return said[0] + said[1]

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def environment() -> dict[str, str]:
    """Torchrun would find the addresses of the first life in its store, after a restart."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def ip(*arguments: str) -> None:
    call("ip", *arguments)


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
    done = subprocess.run(
        [sys.executable, *torchrun, *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def script(out: Path, *options: str) -> list[str]:
    sizes = ["--steps", str(STEPS), "--width", str(WIDTH)]
    return ["examples/hosts.py", "--out", str(out), *sizes, *options]


def weights(said: str) -> str:
    return said.split("sum of all weights ")[1].split()[0]


def test_two_hosts_end_where_one_does_and_send_no_gradients(hosts: Hosts, tmp_path: Path) -> None:
    """Over a slow link, with a process that dies half-way."""
    hosts.shape("100mbit")
    options = ["--save-every", "50"]
    one = on_one_host(*script(tmp_path / "one", *options))
    two = hosts.torchrun(*script(tmp_path / "two", *options), HDET_STUMBLE="50")
    assert "going on from step 50" in two
    assert weights(two) == weights(one)
    # A ring of four sends 1.5 times what is reduced over each of its links, and one leaves this
    # host: shared gradients would take that for every step. Five converges take less, with all that
    # two starts and two checkpoints take besides.
    assert hosts.sent() < STEPS * 1.5 * MODEL_BYTES / 5
