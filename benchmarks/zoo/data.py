"""The data that benchmarks train on, from a folder of the user's; without it, what pip installs.

    python -m benchmarks.zoo.data FOLDER OUT [--train 10000] [--test 2000]

packs what FOLDER has into a small one that a machine without pillow can read. FOLDER is given by
`--data` or $HDET_DATA and holds

- tinyshakespeare.txt, from https://raw.githubusercontent.com/karpathy/char-rnn
- mdn_en_us.txt.xz: the English texts of https://github.com/mdn/content
- cifar10/: sheets of 100 x 100 images, {data_batch_1..5,test_batch}.webp, and labels.npy, [6,
  10000], made of the batches at https://www.cs.toronto.edu/~kriz/cifar.html, in their order
- census-income.test.gz, from https://archive.ics.uci.edu/dataset/117
- wikitext2/{valid,test}.txt: parts of https://huggingface.co/datasets/Salesforce/wikitext
- kuairand/kuairand27k_standard_kcore15.tsv: a slice of https://kuairand.com
"""

import argparse
import csv
import gzip
import lzma
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

TEXT = "tinyshakespeare.txt"
CORPUS = "mdn_en_us.txt.xz"
CENSUS = "census-income.test.gz"
FEED = "kuairand/kuairand27k_standard_kcore15.tsv"
PACKED = "cifar10.npz"
BATCH = 10_000


class Images(NamedTuple):
    """[number, channels, height, width], centred and scaled, and their classes."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def text(folder: Path | None) -> bytes:
    """Shakespeare's, or else the descriptions of scikit-learn's datasets."""
    if folder is not None and (folder / TEXT).exists():
        return (folder / TEXT).read_bytes()
    import sklearn.datasets

    files = sorted((Path(sklearn.datasets.__file__).parent / "descr").glob("*.rst"))
    return b"".join(file.read_bytes() for file in files)


def corpus(folder: Path | None) -> bytes:
    """Web documentation, 59 MB; or else as `text`."""
    if folder is not None and (folder / CORPUS).exists():
        return lzma.decompress((folder / CORPUS).read_bytes())
    return text(folder)


class Table(NamedTuple):
    """Rows of categories, each an index into one vocabulary for all columns, and of numbers."""

    categories: Tensor
    numbers: Tensor
    labels: Tensor
    """[rows, tasks], 0 or 1."""
    vocabulary: int


def census(folder: Path | None) -> Table:
    """Census-Income: earns more than 50 000, has never married; or else scikit-learn's digits."""
    if folder is None or not (folder / CENSUS).exists():
        return _digits_as_table()
    with gzip.open(folder / CENSUS, "rt") as lines:
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines) if row]
    numbers, married, weight, income = (0, 5, 16, 17, 18, 30, 39), 7, 24, 41
    left = [c for c in range(income) if c not in (*numbers, married, weight)]
    labels = [[row[income] == "50000+.", row[married] == "Never married"] for row in rows]
    return _table(
        [[row[c] for c in left] for row in rows],
        [[float(row[c]) for c in numbers] for row in rows],
        labels,
    )


def feed(folder: Path | None) -> Table:
    """KuaiRand: liked rather than hated, watched long, clicked; or else scikit-learn's digits."""
    if folder is None or not (folder / FEED).exists():
        return _digits_as_table()
    with (folder / FEED).open() as lines:
        rows = list(csv.DictReader(lines, delimiter="\t"))
    columns = [[r["user_id"], r["video_id"], r["date"], r["hourmin"]] for r in rows]
    labels = [[r["label"] == "1", r["long_view"] == "1", r["is_click"] == "1"] for r in rows]
    return _table(columns, [[float(r["duration_ms"])] for r in rows], labels)


def feed_order(folder: Path | None) -> Tensor:
    """The places of the rows of `feed` in the order of time; their own order for the digits."""
    if folder is None or not (folder / FEED).exists():
        return torch.arange(len(_digits_as_table().labels))
    with (folder / FEED).open() as lines:
        times = [int(row["time_ms"]) for row in csv.DictReader(lines, delimiter="\t")]
    return torch.tensor(times).argsort(stable=True)


def _table(
    columns: Sequence[Sequence[str]],
    numbers: Sequence[Sequence[float]],
    labels: Sequence[Sequence[bool]],
) -> Table:
    """Every value of every column is a category; numbers are centred logarithms."""
    known: dict[tuple[int, str], int] = {}
    places = [
        [known.setdefault((column, cell), len(known)) for column, cell in enumerate(row)]
        for row in columns
    ]
    logs = torch.tensor(numbers).log1p()
    logs = (logs - logs.mean(0)) / logs.std(0).clamp(min=1e-6)
    return Table(torch.tensor(places), logs, torch.tensor(labels).float(), len(known))


def _digits_as_table() -> Table:
    from sklearn.datasets import load_digits

    digits = load_digits()
    columns = [[str(int(cell)) for cell in row] for row in digits.data[:, ::2]]
    labels = [[digit % 2 == 0, digit > 4] for digit in digits.target.tolist()]
    return _table(columns, digits.data[:, 1:17:2].tolist(), labels)


def images(
    folder: Path | None, device: torch.device, most: tuple[int, int] | None = None
) -> Images:
    """CIFAR-10, at most so many images to train and to test with; or else scikit-learn's digits."""
    num_train, num_test = most or (5 * BATCH, BATCH)
    if folder is not None and (folder / PACKED).exists():
        with np.load(folder / PACKED) as packed:
            parts = [packed[name][:num_train] for name in ("x", "y")]
            parts += [packed[name][:num_test] for name in ("x_test", "y_test")]
    elif folder is not None and (folder / "cifar10").exists():
        parts = unpacked(folder / "cifar10", num_train, num_test)
    else:
        return _digits(device)
    x, y, x_test, y_test = (torch.from_numpy(part).to(device) for part in parts)
    pictures = [(p.permute(0, 3, 1, 2).float() / 255 - 0.47) / 0.25 for p in (x, x_test)]
    return Images(pictures[0].contiguous(), y.long(), pictures[1].contiguous(), y_test.long())


def unpacked(folder: Path, num_train: int, num_test: int) -> list[np.ndarray]:
    """Images of bytes, [number, 32, 32, 3], and labels; train, then test."""
    labels = np.load(folder / "labels.npy")
    num_batches = -(-num_train // BATCH)
    x = np.concatenate([_sheet(folder / f"data_batch_{i + 1}.webp") for i in range(num_batches)])
    y = labels[:num_batches].reshape(-1)
    x_test, y_test = _sheet(folder / "test_batch.webp"), labels[5]
    return [x[:num_train], y[:num_train], x_test[:num_test], y_test[:num_test]]


def _sheet(path: Path) -> np.ndarray:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    sheet = np.asarray(Image.open(path).convert("RGB"))
    return sheet.reshape(100, 32, 100, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3)


def _digits(device: torch.device) -> Images:
    """The digits of scikit-learn, in the same random order as those of the demo."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x = (torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16)[order].to(device)
    y = torch.tensor(labels)[order].to(device)
    return Images(x[:1200], y[:1200], x[1200:], y[1200:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=BATCH)
    parser.add_argument("--test", type=int, default=2000)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name in (TEXT, CORPUS, CENSUS, FEED):
        (chosen.out / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(chosen.folder / name, chosen.out / name)
    x, y, x_test, y_test = unpacked(chosen.folder / "cifar10", chosen.train, chosen.test)
    np.savez_compressed(chosen.out / PACKED, x=x, y=y, x_test=x_test, y_test=y_test)
    print(f"{chosen.out}: {sum(f.stat().st_size for f in chosen.out.iterdir()) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
