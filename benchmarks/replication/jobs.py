"""Runs many jobs on two processes, keeps each row as it ends, and goes on where it was stopped."""

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Row = dict[str, Any]


def work_through(
    jobs: Sequence[Mapping[str, Any]],
    run: Callable[[Mapping[str, Any]], Row],
    known: Sequence[Row],
    keep: Callable[[Sequence[Row]], None],
    *,
    workers: int = 2,
) -> list[Row]:
    """Run what is missing.

    Args:
        jobs: What names each run: plain data.
        run: A function of a module, job -> its row without the job.
        known: The rows of earlier calls. Each contains its job.
        keep: Called with all rows after each run.
        workers: The number of processes; 0 runs in this one.

    Returns:
        All rows of the jobs, in their order.
    """
    rows = {_key(job, job): dict(row) for row in known for job in jobs if is_row_of(job, row)}
    missing = [job for job in jobs if _key(job, job) not in rows]
    begun = time.monotonic()

    def take(job: Mapping[str, Any], row: Row) -> None:
        rows[_key(job, job)] = {**job, **row}
        keep(_in_order(jobs, rows))
        left = len(jobs) - len(rows)
        minutes = (time.monotonic() - begun) / 60
        print(f"{left:4d} left {minutes:6.1f} min  {dict(job)}  {_short(row)}", flush=True)

    if not workers:
        for job in missing:
            take(job, run(job))
        return _in_order(jobs, rows)
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, torch.set_num_threads, (1,)) as pool:
        for job, row in pool.imap_unordered(_Named(run), missing):
            take(job, row)
    return _in_order(jobs, rows)


class _Named:
    """Runs a job, and returns it beside its row."""

    def __init__(self, run: Callable[[Mapping[str, Any]], Row]) -> None:
        self._run = run

    def __call__(self, job: Mapping[str, Any]) -> tuple[Mapping[str, Any], Row]:
        return job, self._run(job)


def _key(job: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[str, ...]:
    values = [row[name] for name in job]
    # Result files have seven digits.
    return tuple(f"{v:.6g}" if isinstance(v, float) else f"{v}" for v in values)


def is_row_of(job: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether a row is that of a job, also as its file has it."""
    return all(name in row for name in job) and _key(job, row) == _key(job, job)


def _in_order(jobs: Sequence[Mapping[str, Any]], rows: Mapping[tuple[str, ...], Row]) -> list[Row]:
    return [rows[_key(job, job)] for job in jobs if _key(job, job) in rows]


def _short(row: Row) -> str:
    return "  ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float))
