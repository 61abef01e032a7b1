"""What the scripts of the replication share: their arguments, their result file, their table."""

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol

from benchmarks.replication.jobs import Row, is_row_of, work_through
from benchmarks.result_file import (
    RESULTS,
    plain_json,
    read_result,
    summarise_again,
    write_result,
)

TABLE1 = RESULTS / "replication_table1.json"
TASKS = ("feed", "census")
SMOKE_LR = 4e-3

Job = Mapping[str, Any]
Tables = Mapping[str, Sequence[Sequence[str]]]


class Run(Protocol):
    def __call__(self, job: Job, *, folder: str | None) -> Row: ...


class Book:
    """The rows of a result file, and how more of them are made.

    Args:
        path: The file. Rows that it has are kept.
        run: Makes a row of a job.
        options: The arguments of the script.
        parts: All rows -> the other parts of the file, with `headline`, `settings` and `seeds`.
    """

    def __init__(
        self,
        path: Path,
        run: Run,
        options: argparse.Namespace,
        parts: Callable[[Sequence[Row]], Mapping[str, Any]],
    ) -> None:
        self.path, self._parts = path, parts
        self._kept, self._work = read_result(path), worker(run, options)
        self.rows: list[Row] = list(self._kept.get("rows", []))

    def make(self, jobs: Sequence[Job]) -> None:
        """Run what is missing; all rows are kept as they end."""
        others = [row for row in self.rows if not any(is_row_of(job, row) for job in jobs)]

        def keep(now: Sequence[Row]) -> None:
            rows = plain_json([*others, *now])  # as the file has them, so that a headline follows
            write_result(self.path, kept=self._kept or None, rows=rows, **self._parts(rows))

        self.rows = [*others, *self._work(jobs, known=self.rows, keep=keep)]

    def summarise(self) -> None:
        """Write what the rows come to, by the present rules, and print the tables."""
        parts = self._parts(plain_json(self.rows))
        summarise_again(self.path, headline=parts["headline"], tables=parts["tables"])
        show(parts["tables"])


@dataclass(frozen=True)
class Script:
    """A script whose jobs follow from the best learning rate of each task."""

    path: Path
    question: str
    jobs: Callable[[str, Mapping[str, float]], Sequence[Job]]
    """(size, task -> its best learning rate) -> all runs."""
    run: Run
    headline: Callable[[Sequence[Row]], Row]
    tables: Callable[[Sequence[Row]], Tables]

    def main(self, arguments: Sequence[str] | None = None) -> Path:
        """Run what is missing, write the result file and print the tables."""
        options = parse(self.question, arguments)
        size, low = options.size, best_lrs(options.size, options.only)

        def parts(rows: Sequence[Row]) -> dict[str, Any]:
            return {
                "headline": self.headline(rows),
                "settings": {"size": size, "low": low},
                "seeds": sorted({row["seed"] for row in rows}),
                "tables": self.tables(rows),
            }

        book = Book(path_of(self.path, options), self.run, options, parts)
        book.make(self.jobs(size, low))
        book.summarise()
        return book.path


def parse(
    question: str,
    arguments: Sequence[str] | None,
    tasks: Sequence[str] = TASKS,
    devices: Sequence[str] = ("cpu",),
) -> argparse.Namespace:
    """Read the arguments of a script."""
    parser = argparse.ArgumentParser(description=question)
    sizes = parser.add_mutually_exclusive_group()
    for size, what in (("quick", "ten minutes"), ("smoke", "seconds, for tests")):
        sizes.add_argument(
            f"--{size}", dest="size", action="store_const", const=size, default="full", help=what
        )
    parser.add_argument("--only", choices=tasks, action="append", help="a task; all by default")
    parser.add_argument("--workers", type=int, default=2, help="processes; 0 runs in this one")
    if len(devices) > 1:
        parser.add_argument("--device", choices=devices, default=devices[0])
    parser.add_argument("--out", type=Path, help="another result file")
    options = parser.parse_args(arguments)
    options.only = options.only or list(tasks)
    return options


def path_of(path: Path, options: argparse.Namespace) -> Path:
    """The result file: one for each size, so that quick runs replace no full ones."""
    short: Path = path if options.size == "full" else path.with_suffix(f".{options.size}.json")
    return options.out or short


def worker(run: Run, options: argparse.Namespace) -> Callable[..., list[Row]]:
    """`work_through` with the data and the processes of the options."""
    folder = os.environ.get("HDET_DATA")
    return partial(work_through, run=partial(run, folder=folder), workers=options.workers)


def best_lrs(size: str, tasks: Sequence[str]) -> dict[str, float]:
    """The best learning rate of each task, from the grid of the table.

    Raises:
        SystemExit: The table was not made yet.
    """
    if size == "smoke":
        return dict.fromkeys(tasks, SMOKE_LR)
    path = TABLE1 if size == "full" else TABLE1.with_suffix(f".{size}.json")
    found = read_result(path).get("settings", {}).get("low", {})
    if set(tasks) - set(found):
        raise SystemExit(f"{path.name} has no grid of {tasks}: run benchmarks.replication.table1.")
    return {task: found[task] for task in tasks}


def finite(value: float | None) -> float:
    """A loss; infinite for what is not finite, which a file does not hold."""
    return math.inf if value is None or not math.isfinite(value) else value


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error; nan where there are too few values for it."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return (fmean(values) if values else math.nan), error


def change(mean: float, error: float) -> str:
    """A change in percent as a cell of a table; empty for nan."""
    if math.isnan(mean):
        return ""
    if math.isinf(mean):
        return "not finite"
    return f"{mean:+.2f}" if math.isnan(error) else f"{mean:+.2f} ± {error:.2f}"


def show(tables: Tables) -> None:
    """Print tables with aligned columns."""
    for name, lines in tables.items():
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        print(f"\n{name}")
        for line in lines:
            print("  ".join(f"{cell:<{w}s}" for cell, w in zip(line, widths, strict=True)))
