"""What do a step and a converge take over a slow link between two hosts? -> hosts.json

    python -m benchmarks.systems.hosts [--rate 100mbit] [--out FILE]     as root, with iproute2

Two network namespaces with a cable between them are two hosts; `tc` makes it slow. Two processes on
each train a small network under DDP: with local gradients over a free link and over the slow one,
and with shared gradients over the slow one. A step between two cycles, the whole end of a cycle and
an all-reduce of the same bytes are timed on their own, each by the median, in five rounds of which
the fastest counts: four processes share what cores there are. Local training is limited by the
converge alone if its other steps take as long over the slow link as over a free one, and the end of
a cycle longer by the all-reduce. tests/contracts/test_hosts.py has the same hosts.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from benchmarks.result_file import RESULTS, ROOT, write_result
from benchmarks.systems.loops import seconds

WIDTH, BATCH, CYCLE, CYCLES, ROUNDS = 1024, 512, 10, 10, 5


# Hosts ----------------------------------------------------------------------------------------


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
    """Return the environment of torchrun. A shared store keeps old addresses over a restart."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def ip(*arguments: str) -> None:
    call("ip", *arguments)


# One process ------------------------------------------------------------------------------------


def work(gradients: Any, out: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 64))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    base = OneCycleLR(optimizer, 1e-3, total_steps=CYCLE * CYCLES)
    scheduler = hdet.HDET(base, model=model, preset="paper", sync_every=CYCLE, gradients=gradients)
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()

    def step() -> None:
        x = torch.randn(BATCH, 64)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())

    taken: dict[str, list[float]] = {"step": [], "end": [], "all_reduce": []}
    for number in range(CYCLE * CYCLES):
        is_end = (number + 1) % CYCLE == 0
        if is_end or number % CYCLE == 0:
            dist.barrier()  # a late process must not count
        taken["end" if is_end else "step"].append(seconds(step))
        if is_end:
            dist.barrier()
            taken["all_reduce"].append(seconds(lambda: dist.all_reduce(flat)))
    if dist.get_rank() == 0:
        results = {name: median(times) for name, times in taken.items()}
        out.write_text(json.dumps({**results, "bytes": flat.nbytes}))
    dist.barrier()
    dist.destroy_process_group()


# All of it --------------------------------------------------------------------------------------


def measure(rate: str) -> dict[str, Any]:
    cases = {
        "local, free": ("local", None),
        "local, slow": ("local", rate),
        "shared, slow": ("shared", rate),
    }
    results: dict[str, Any] = {}
    for number in range(ROUNDS):
        for name, (gradients, slow) in cases.items():
            found, known = trained(gradients, slow), results.get(name, {})
            results[name] = {key: min(value, known.get(key, value)) for key, value in found.items()}
        print(f"{number + 1} of {ROUNDS} rounds", flush=True)
    return results


def trained(gradients: str, rate: str | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, closing(Hosts()) as hosts:
        if rate is not None:
            hosts.shape(rate)
        out = Path(folder) / "told.json"
        hosts.torchrun("-m", "benchmarks.systems.hosts", "--work", gradients, "--out", str(out))
        results: dict[str, float] = json.loads(out.read_text())
    return results


def headline(results: dict[str, Any]) -> dict[str, float]:
    free, slow, shared = (results[name] for name in ("local, free", "local, slow", "shared, slow"))
    return {
        "local_step_over_free_link": slow["step"] / free["step"],
        "end_of_cycle_over_all_reduce": (slow["end"] - slow["step"]) / slow["all_reduce"],
        "shared_step_over_local": shared["step"] / slow["step"],
        "local_step_ms": 1e3 * slow["step"],
        "end_of_cycle_ms": 1e3 * slow["end"],
        "shared_step_ms": 1e3 * shared["step"],
        "bytes": slow["bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", default="100mbit", help="of the link, as tc wants it")
    parser.add_argument("--work", choices=("local", "shared"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "hosts.json")
    options = parser.parse_args()
    if options.work is not None:
        work(options.work, options.out)
        return
    results = measure(options.rate)
    settings = {"rate": options.rate, "hosts": 2, "processes": 4, "cycle": CYCLE}
    write_result(
        options.out, headline=headline(results), settings=settings, seeds=[], cases=results
    )
    for name, value in headline(results).items():
        print(f"{name}: {value:.4g}")


if __name__ == "__main__":
    main()
