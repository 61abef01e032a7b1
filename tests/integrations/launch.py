"""Runs a function of a module in real processes of torchrun, as a user's script runs.

Frameworks keep global state for each process, so each launch starts new ones. Several runs in one
launch share the time of the imports.
"""

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.processes import run_program

ROOT = Path(__file__).parent.parent.parent


def launch(
    function: str, num: int = 2, *, environment: Mapping[str, str] | None = None, **arguments: Any
) -> list[Any]:
    """Call `package.module:function` in every process.

    Args:
        function: The module, a colon, and the name of the function.
        num: The number of processes.
        environment: More variables.
        **arguments: Of the function: plain data. Paths are passed as text.

    Returns:
        What the function returned in each process, in the order of the ranks: plain data.

    Raises:
        AssertionError: If a process failed, with all that was printed.
    """
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", f"{num}"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "tests.integrations.launch", folder, function, json.dumps(arguments)]
        done = run_program(
            sys.executable,
            *torchrun,
            *words,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads((Path(folder) / f"{rank}").read_text()) for rank in range(num)]


def main(folder: str, function: str, arguments: str) -> None:
    """What each process does."""
    module, _, name = function.partition(":")
    answer = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    if dist.is_initialized():  # gloo may abort a process that leaves while another still works
        dist.barrier()
        dist.destroy_process_group()
    (Path(folder) / os.environ["RANK"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
