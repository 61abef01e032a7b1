"""What pages say about run lengths and records is what the library does."""

import json
import re
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.lr_search import constants
from hdet.records import events
from hdet.records.codec import RENAMED
from tests.docs.pages import DOCS, ROOT

LENGTHS = re.findall(
    r"^\| (\d+) \| (\d+) \|$",
    (DOCS / "how-to/choose-a-setup.md").read_text(),
    re.MULTILINE,
)


def started(num_replicas: int, total_steps: int, **options: Any) -> hdet.HDET:
    """A run of this length."""
    model = nn.Linear(2, 1)
    ensemble = hdet.StackedReplicas(model, num_replicas)
    optimizer = ensemble.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    base = OneCycleLR(optimizer, 0.1, total_steps=total_steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hdet.HDET(base, model=model, replicas=ensemble, **options)


def scouts(num_replicas: int, total_steps: int, **options: Any) -> bool:
    """Whether a run of this length starts with a scout."""
    return started(num_replicas, total_steps, **options).is_scouting


def probe(model: Any) -> Any:
    return model(torch.ones(2, 2)).mean()


@pytest.mark.parametrize(("replicas", "steps"), LENGTHS)
def test_scout_needs_the_run_length_that_the_page_gives(replicas: str, steps: str) -> None:
    num, least = int(replicas), int(steps)
    assert scouts(num, least, probe=probe)
    assert not scouts(num, least - 1, probe=probe)
    assert scouts(num, least)
    assert not scouts(num, least - 1)


HELD_OUT_LENGTHS = re.findall(
    r"^\| (\d+) \| (\d+) \| (\d+) \|$",
    (DOCS / "tutorials/one-gpu.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.parametrize("row", HELD_OUT_LENGTHS)
def test_stacked_replicas_hold_out_batches_from_the_length_that_the_tutorial_gives(
    row: tuple[str, str, str],
) -> None:
    """No probe is needed at any length: without held-out batches, training losses decide."""
    num, least, held_out = map(int, row)

    def compared_by(total_steps: int) -> str | None:
        trial = started(num, total_steps)._run.progress.trial
        return None if trial is None else trial.compared_by

    assert [compared_by(least - 1), compared_by(least)] == [None, "losses"]
    assert [compared_by(held_out - 1), compared_by(held_out)] == ["losses", "held out"]
    assert int(dict(LENGTHS).get(str(num), least)) == least


def test_tutorial_gives_the_lengths_of_the_usual_numbers_of_replicas() -> None:
    assert [int(row[0]) for row in HELD_OUT_LENGTHS] == [1, 2, 4, 8, 16]


def test_readme_gives_the_same_run_length() -> None:
    least = dict(LENGTHS)["8"]
    assert f"the scout needs {least} steps" in (ROOT / "README.md").read_text()


def test_limits_page_gives_the_same_run_lengths() -> None:
    limits = " ".join((DOCS / "explanation/limits.md").read_text().split())
    lengths = dict(LENGTHS)
    assert f"a scout needs {lengths['8']} steps" in limits
    assert f"With two replicas it needs {lengths['2']}." in limits


def _loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - 1).square().mean()
    return loss


@pytest.mark.filterwarnings("ignore:the scout:UserWarning")
def test_record_format_page_names_every_field_of_a_record(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    ensemble = hdet.StackedReplicas(model, 8)
    optimizer = ensemble.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    base = OneCycleLR(optimizer, 0.01, total_steps=300)
    parts: dict[str, Any] = {
        "replicas": ensemble,
        "probe": probe,
        "knobs": [hdet.lr(), hdet.momentum()],
    }
    scheduler = hdet.HDET(base, model=model, record=tmp_path, sync_every=10, **parts)
    for step in range(300):
        optimizer.zero_grad()
        losses = ensemble.losses(_loss_of, torch.randn(16, 2))
        losses.sum().backward()
        optimizer.step()
        scheduler.step(losses)
        if step == 200:
            scheduler.converge()
            scheduler.note("a remark", accuracy=0.5)
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    fields = {name for line in lines for name in line}
    fields |= {name for line in lines for knob in line.get("knobs", []) for name in knob}
    fields |= {line["event"] for line in lines}
    named = set(re.findall(r"`(\w+)`", (DOCS / "reference/record-format.md").read_text()))
    assert not fields - named


def test_record_format_page_names_every_field_of_the_schema() -> None:
    text = (DOCS / "reference/record-format.md").read_text()
    parts = (events.KnobEntry, events.TriedRate, events.ExcludedReplica, events.LRTracePoints)
    schema = [*events.EVENTS.values(), *parts, events.ReplicaInfo, events.ConvergeCost]
    wanted = {field.name for kind in schema for field in fields(kind)} - {"is_lr"}
    named = set(re.findall(r"`(\w+)`", text))
    assert not (wanted | set(events.EVENTS)) - named
    assert f"version of the format, {events.SCHEMA};" in text


def test_record_format_page_lists_every_old_name() -> None:
    text = (DOCS / "reference/record-format.md").read_text()
    rows = re.findall(r"^\| (`[^|]+`) \| `(\w+)` \| `(\w+)` \|$", text, re.MULTILINE)
    listed = [(place.strip("`"), old, new) for p, old, new in rows for place in p.split(", ")]
    known = [(place, old, new) for place, names in RENAMED.items() for old, new in names.items()]
    assert sorted(listed) == sorted(known)


def test_scout_page_gives_the_values_of_the_constants() -> None:
    """A row starts with names, in code, and has their values in the same order."""
    text = (DOCS / "explanation/how-the-scout-decides.md").read_text()
    rows = re.findall(r"^\| ((?:`[\w.]+`(?:, )?)+) \| ([^|]+) \|", text, re.MULTILINE)
    given = {
        name: value
        for names, values in rows
        for name, value in zip(re.findall(r"`([\w.]+)`", names), values.split(", "), strict=True)
    }
    assert len(given) >= 20
    assert {name: number(value) for name, value in given.items()} == {
        name: pytest.approx(constant_of(name)) for name in given
    }


def constant_of(name: str) -> float:
    """A constant of the search, or a default such as `Scout.share`."""
    owner, _, field = name.rpartition(".")
    value: float = getattr(hdet.Scout(), field) if owner else getattr(constants, name)
    return value


def number(text: str) -> float:
    """The value of a number as a page writes it: 2.5, 1/8 or 3 %."""
    if text.endswith("%"):
        return float(text.removesuffix("%")) / 100
    top, _, bottom = text.partition("/")
    return float(top) / float(bottom or 1)
