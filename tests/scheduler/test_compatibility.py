"""Errors for bad arguments, and for replicas whose setups differ, on all replicas at once."""

import math
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

import hdet
from hdet.scheduler.compatibility import RULES
from hdet.scheduler.scout_rules import DEFAULT_SCOUT_RULES
from tests.processes import Processes, RemoteError, warns_on_first
from tools import compatibility_page


def one_cycle(**changed: Any) -> hdet.OneCycleHDET:
    torch.manual_seed(0)
    model = changed.pop("model", None) or nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    arguments: dict[str, Any] = {"max_lr": 0.1, "total_steps": 100, "sync_every": 10} | changed
    return hdet.OneCycleHDET(optimizer, **arguments)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"spread": 1.0}, "`spread` must be in [0, 1), got 1.0."),
        ({"spread": -0.1}, "`spread` must be in [0, 1), got -0.1."),
        ({"spread": math.nan}, "`spread` must be in [0, 1), got nan."),
        ({"sync_every": 0}, "`sync_every` must be at least 1, got 0."),
        ({"warmup_steps": 100}, "`warmup_steps` must be less than `total_steps` (100), got 100."),
        ({"warmup_steps": -1}, "`warmup_steps` must be at least 0, got -1."),
        ({"temperature": 0}, "`temperature` must be a finite number above 0, got 0."),
        ({"momentum": 1}, "`momentum` must be in [0, 1), got 1."),
        ({"step_size": math.inf}, "`step_size` must be a finite number above 0, got inf."),
        ({"seed": -3}, "`seed` must be at least 0, got -3."),
        ({"max_lr": -1.0}, "`max_lr` must be a finite number above 0, got -1.0."),
        ({"max_lr": math.nan}, "`max_lr` must be a finite number above 0, got nan."),
        ({"final_div_factor": 0.0}, "`final_div_factor` must be a finite number above 0, got 0.0."),
        (
            {"on_overrun": "stop"},
            "`on_overrun` must be one of 'hold', 'extend', 'raise', got 'stop'.",
        ),
        ({"gradients": "own"}, "`gradients` must be one of 'shared', 'local', got 'own'."),
        ({"gradients": "local"}, "`gradients='local'` needs `model=`, got None."),
        (
            {"optimizer_state": "mean"},
            "`optimizer_state` must be one of 'keep', 'average', 'reset', got 'mean'.",
        ),
        (
            {"total_steps": 10, "pct_start": 0.1},
            "`total_steps` is too small: each phase of the cycle needs a step, "
            "got 10 with `pct_start` 0.1.",
        ),
    ],
)
def test_error_for_a_bad_argument_names_argument_rule_and_value(
    changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError) as error:
        one_cycle(**changed)
    assert str(error.value) == words


@pytest.mark.parametrize("changed", [{"sync_every": 2.5}, {"seed": "a"}, {"warmup_steps": True}])
def test_type_error_for_a_non_integer_names_the_argument(changed: dict[str, Any]) -> None:
    (name,) = changed
    with pytest.raises(TypeError, match=f"`{name}` must be an integer, got"):
        one_cycle(**changed)


def test_hdet_rejects_a_controller_of_the_wrong_type() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(TypeError, match="`controller` must be a controller such as"):
        hdet.HDET(LambdaLR(optimizer, lambda _: 1.0), controller="paper", preset="paper")  # type: ignore[arg-type]


class OnlyUpdates:
    """Lacks two members of a controller."""

    def update(self, state: Any, evidence: Any) -> Any: ...


def test_hdet_names_the_members_that_a_controller_lacks() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    given: Any = OnlyUpdates()
    with pytest.raises(TypeError, match=r"without warmup_steps, weigh\.$"):
        hdet.HDET(LambdaLR(optimizer, lambda _: 1.0), controller=given, preset="paper")


def test_hdet_rejects_a_lazy_parameter() -> None:
    model = nn.LazyLinear(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="`weight` must be initialised, got a lazy parameter"):
        hdet.HDET(LambdaLR(optimizer, lambda _: 1.0), model=model, preset="paper")


def test_hdet_rejects_a_parameter_that_is_not_dense_in_memory() -> None:
    model = nn.ParameterDict({"strided": nn.Parameter(torch.zeros(4, 4)[:, :2])})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="`strided` must be dense in memory"):
        hdet.HDET(LambdaLR(optimizer, lambda _: 1.0), model=model, preset="paper")


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, width))


def disagree(rank: int, what: str) -> None:
    torch.manual_seed(0)
    odd = rank == 2
    model: nn.Module
    if what == "settings":
        one_cycle(spread=0.2 if odd else 0.1)
    elif what == "learning rates":
        one_cycle(max_lr=0.2 if odd else 0.1)
    elif what == "controller":
        one_cycle(temperature=0.2 if odd else 0.1)
    elif what == "schedule length":
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hdet.HDET(CosineAnnealingLR(optimizer, 20 if odd else 10), sync_every=5, preset="paper")
    elif what == "end of the schedule":
        one_cycle(final_div_factor=10.0 if odd else 1e4)
    elif what == "weight decay":
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1 * odd)
        hdet.HDET(CosineAnnealingLR(optimizer, 10), sync_every=5, preset="paper")
    elif what == "order":
        model = nn.Linear(2, 2)
        parameters = [model.weight, model.bias]
        optimizer = torch.optim.SGD(parameters[::-1] if odd else parameters, lr=0.1)
        hdet.HDET(
            CosineAnnealingLR(optimizer, 10),
            sync_every=5,
            model=model,
            gradients="local",
            preset="paper",
        )
    elif what == "buffers":
        model = nn.Linear(2, 2)
        model.register_buffer("statistics", torch.zeros(3 if odd else 2))
        hdet.HDET(
            CosineAnnealingLR(torch.optim.SGD(model.parameters(), lr=0.1), 10),
            sync_every=5, model=model, gradients="local",preset="paper"
        )  # fmt: skip
    elif what == "buckets":
        hdet.ProcessReplicas(bucket_bytes=2048 if odd else 4096)
    elif what == "bad buckets":
        hdet.ProcessReplicas(bucket_bytes=7 if odd else 4096)
    elif what == "shapes":
        model = Wide(3 if odd else 2)
        one_cycle(model=model)
    elif what == "names":
        one_cycle(model=nn.Sequential(nn.Linear(2, 2)) if odd else nn.Linear(2, 2))
    elif what == "one bad argument":
        one_cycle(sync_every=0 if odd else 10)
    elif what == "record":
        one_cycle(record="/dev/null/run" if rank == 0 else None)
    elif what == "weights":
        model = Wide(2)
        with torch.no_grad():
            model.weight[1, 1] += 1e-3 * odd
        one_cycle(model=model)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("settings", "replicas must be alike: `spread` is 0.1 on replica 0 and 0.2 on replica 2."),
        ("learning rates", "`learning_rates.group0` is 0.004"),
        ("controller", "`controller.temperature` is 0.1 on replica 0 and 0.2 on replica 2."),
        ("schedule length", "`total_steps` is 10 on replica 0 and 20 on replica 2."),
        ("end of the schedule", "min_lr"),
        ("weight decay", "`groups.0.weight_decay` is '0.0' on replica 0 and '0.1' on replica 2."),
        ("order", "`groups.0.params.0` is 'weight' on replica 0 and 'bias' on replica 2."),
        ("buffers", "'statistics' is (2,) torch.float32 with strides (1,) on replica 0 and (3,)"),
        ("buckets", "`bucket_bytes` must be the same on all replicas, got [4096, 4096, 2048]"),
        ("shapes", "is (2, 2) torch.float32 with strides (2, 1) on replica 0 and (2, 3)"),
        (
            "one bad argument",
            "replica 2 could not start: ValueError: `sync_every` must be at least",
        ),
        ("record", "replica 0 could not start: NotADirectoryError"),
        ("weights", "does not start from the same values on replicas 0 and 2."),
    ],
)
def test_all_replicas_raise_an_error_when_their_setups_differ(
    processes: Processes, what: str, words: str
) -> None:
    with pytest.raises(RemoteError) as error:
        processes(3, disagree, what)
    texts = error.value.tracebacks
    assert all(text is not None for text in texts)
    results = [text for text in texts if text is not None and words in text]
    # A replica with a bad argument raises its own error. The others name that replica.
    assert len(results) == (2 if "could not start" in words else 3), texts


def test_all_replicas_raise_an_error_when_one_has_a_bad_bucket_size(processes: Processes) -> None:
    with pytest.raises(RemoteError) as error:
        processes(3, disagree, "bad buckets")
    assert all(text is not None and "bucket_bytes" in text for text in error.value.tracebacks)


def start_perturbed(rank: int) -> bool:
    model = Wide(2)
    nn.init.ones_(model.weight)
    hdet.perturb_(model, 0.1)
    scheduler = one_cycle(model=model)
    own = model.weight.clone()
    with scheduler.consensus():
        visited = not torch.equal(own, model.weight)
    return visited and torch.equal(own, model.weight)


def test_hdet_accepts_replicas_perturbed_before_the_start(processes: Processes) -> None:
    assert processes(3, start_perturbed) == [True] * 3


def run_short(rank: int) -> str | None:
    with warns_on_first(rank, "`sync_every` .1000. is longer than the run .100") as seen:
        one_cycle(sync_every=1000)
    return None if seen is None else str(seen[0].filename)


def test_sync_every_longer_than_the_run_warns_at_the_users_line(processes: Processes) -> None:
    first, second = processes(2, run_short)
    assert first.endswith("test_compatibility.py")
    assert second is None


def test_compatibility_page_is_up_to_date() -> None:
    """`python -m tools.compatibility_page` writes it."""
    assert compatibility_page.PAGE.read_text() == compatibility_page.page()


def test_every_compatibility_rule_has_its_own_name_and_whole_sentences() -> None:
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names))
    for rule in (*RULES, *DEFAULT_SCOUT_RULES):
        assert rule.limit.endswith(".") and rule.remedy.endswith(".")


def test_every_link_of_the_compatibility_table_leads_to_a_rule() -> None:
    page = compatibility_page.page()
    for name in re.findall(r"\(#([^)]*)\)", page):
        assert f'<a id="{name}"></a>' in page
