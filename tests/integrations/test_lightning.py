"""hdet under Lightning's Trainer."""

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch.optim.lr_scheduler import ConstantLR, ReduceLROnPlateau, StepLR

import hdet
from hdet.integrations._lightning_refusals import check_fit
from hdet.integrations.lightning import HDETCallback
from tests.integrations import digits
from tests.integrations.features import (
    ACCUMULATES,
    BEST_MODEL,
    CLIPS,
    EVALUATES,
    FINDS,
    FP16,
    FSDP2,
    HOLDS_OUT,
    LOGS,
    LORA,
    REFUSED,
    RESUMES,
    RESUMES_SCOUT,
    STACKED,
    STOPS_EARLY,
)
from tests.integrations.launch import launch
from tests.integrations.lightning_runs import Batches, Digits, trainer_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]
RUNS = "tests.integrations.lightning_runs"


@pytest.mark.works("Lightning", FINDS)
def test_run_with_a_learning_rate_far_too_low_ends_near_one_with_a_good_one() -> None:
    ranks = launch(f"{RUNS}:three_ways", epochs=6)
    assert ranks[0] == ranks[1]
    found = ranks[0]
    assert found["bad"] > 2.0
    assert found["hdet"] < 1.05 * found["good"]
    assert found["clock"] == 6 * 45


# Accumulation, clipping, logs --------------------------------------------------------------------


@pytest.fixture(scope="module")
def accumulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("accumulated")
    ranks = launch(f"{RUNS}:accumulating", folder=str(folder), steps=300)
    assert ranks[0]["loss"] == ranks[1]["loss"]
    return {**ranks[0], "rows": rows_of(folder)}


def rows_of(folder: Path) -> list[dict[str, str]]:
    """What Lightning's CSVLogger wrote."""
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def column(rows: list[dict[str, str]], name: str) -> dict[int, float]:
    """The values of a metric by step."""
    return {int(row["step"]): float(row[name]) for row in rows if row[name]}


@pytest.mark.integrations
@pytest.mark.works("Lightning", ACCUMULATES)
def test_clock_counts_optimizer_steps_under_accumulation(accumulated: dict[str, Any]) -> None:
    assert accumulated["clock"] == accumulated["steps"] == 300
    assert accumulated["loss"] < 0.2


@pytest.mark.integrations
@pytest.mark.works("Lightning", ACCUMULATES)
def test_losses_are_those_of_micro_batches(accumulated: dict[str, Any]) -> None:
    for loss in accumulated["first_losses"]:
        assert loss == pytest.approx(math.log(10), rel=0.05)


@pytest.mark.integrations
@pytest.mark.works("Lightning", CLIPS)
def test_trainer_clips_gradients(accumulated: dict[str, Any]) -> None:
    assert accumulated["norm"] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.integrations
@pytest.mark.works("Lightning", LOGS)
def test_logged_loss_of_the_scout_is_that_of_its_start(accumulated: dict[str, Any]) -> None:
    losses = column(accumulated["rows"], "train_loss")
    scouting = column(accumulated["rows"], "hdet/scouting")
    in_scout = {losses[step] for step, flag in scouting.items() if flag}
    assert len(in_scout) == 1
    assert max(losses.values()) < 3.0
    assert len({losses[step] for step, flag in scouting.items() if not flag}) > 100


# Validation --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("validated")
    first, second = launch(f"{RUNS}:validating", folder=str(folder))
    return {"ranks": (first, second), "rows": rows_of(folder)}


@pytest.mark.integrations
@pytest.mark.works("Lightning", EVALUATES)
def test_validation_in_mid_cycle_shows_the_consensus(validated: dict[str, Any]) -> None:
    first, second = validated["ranks"]
    assert len(first["shown"]) == 3  # the sanity check, and two in mid-cycle
    assert first["shown"] == second["shown"]
    for before, other in zip(first["before"], second["before"], strict=True):
        assert before != other


@pytest.mark.integrations
@pytest.mark.works("Lightning", EVALUATES)
def test_validation_leaves_the_run_unchanged(validated: dict[str, Any]) -> None:
    first, second = validated["ranks"]
    assert first["digest"] == first["expected"] == second["digest"]


@pytest.mark.integrations
@pytest.mark.works("Lightning", LOGS)
def test_logs_have_the_learning_rates_of_consensus_and_replicas(validated: dict[str, Any]) -> None:
    rows = validated["rows"]
    given, own = column(rows, "lr-AdamW"), column(rows, "hdet/lr/group0/replica0")
    other, centre = column(rows, "hdet/lr/group0/replica1"), column(rows, "hdet/lr/group0")
    assert sorted(given) == list(range(70))
    assert given == {step: own[step] for step in given}  # LearningRateMonitor reads the first rank
    for step in given:
        assert centre[step] == pytest.approx(math.sqrt(own[step] * other[step]))
        assert own[step] != other[step]
    assert column(rows, "hdet/loss/replica1").keys() == {20, 40, 60, 70}


# Checkpoints -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Without and with held-out batches: the whole run, and those from checkpoints."""
    found = {}
    for hold_out in (0, 4):
        folder = str(tmp_path_factory.mktemp("resumed"))
        ranks = launch(f"{RUNS}:saving", folder=folder, steps=[13, 104], hold_out=hold_out)
        assert ranks[0]["whole"]["digest"] == ranks[1]["whole"]["digest"]
        found[hold_out] = ranks[0]
    return found


@pytest.mark.integrations
@pytest.mark.parametrize("hold_out", [0, 4])
@pytest.mark.works("Lightning", RESUMES)
def test_run_resumes_in_mid_run_bit_for_bit(resumed: dict[int, Any], hold_out: int) -> None:
    found = resumed[hold_out]
    assert not found["104"]["scouts"]
    assert found["104"]["digest"] == found["whole"]["digest"]
    assert found["104"]["clock"] == found["whole"]["clock"] == 270


@pytest.mark.integrations
@pytest.mark.parametrize("hold_out", [0, 4])
@pytest.mark.works("Lightning", RESUMES_SCOUT)
def test_run_resumes_in_mid_scout_bit_for_bit(resumed: dict[int, Any], hold_out: int) -> None:
    found = resumed[hold_out]
    assert found["13"]["scouts"]
    assert found["13"]["digest"] == found["whole"]["digest"]


@pytest.mark.integrations
@pytest.mark.works("Lightning", HOLDS_OUT)
def test_scout_compares_replicas_on_batches_of_the_validation_loader(
    resumed: dict[int, Any],
) -> None:
    assert resumed[4]["whole"]["compared_by"] == ["held out"]
    assert resumed[0]["whole"]["compared_by"] == ["losses"]
    assert resumed[4]["whole"]["loss"] < 0.2


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(f"{RUNS}:keeping", folder=str(tmp_path_factory.mktemp("kept")))


@pytest.mark.integrations
@pytest.mark.works("Lightning", BEST_MODEL)
def test_best_checkpoint_is_the_model_that_was_validated(kept: list[dict[str, Any]]) -> None:
    assert kept[0]["best_loaded"] == kept[0]["best"] < 1.0


@pytest.mark.integrations
@pytest.mark.works("Lightning", STOPS_EARLY)
def test_early_stopping_in_mid_cycle_leaves_one_model(kept: list[dict[str, Any]]) -> None:
    assert kept[0]["clock"] == kept[1]["clock"] == 81
    assert kept[0]["digest"] == kept[1]["digest"]


@pytest.mark.integrations
@pytest.mark.works("Lightning", RESUMES)
def test_file_with_weights_alone_has_the_consensus(kept: list[dict[str, Any]]) -> None:
    assert not kept[0]["file_has_optimizer"]
    assert kept[0]["in_mid_cycle"] != kept[1]["in_mid_cycle"]
    assert kept[0]["saved_alone"] == kept[0]["after_saving"] == kept[1]["after_saving"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(f"{RUNS}:stopped", folder=str(tmp_path_factory.mktemp("stopped")))


@pytest.mark.integrations
def test_checkpoint_after_sigterm_is_the_consensus(stopped: list[dict[str, Any]]) -> None:
    first, second = stopped
    assert first["signal raised"] == second["signal raised"] == "SIGTERMException"
    assert first["signal saved"] == first["signal"] == second["signal"]
    assert "middle of a cycle" not in first["signal warned"]


@pytest.mark.integrations
def test_checkpoint_after_an_error_waits_for_no_other_process(
    stopped: list[dict[str, Any]],
) -> None:
    first, second = stopped
    assert first["error raised"] == second["error raised"] == "RuntimeError"
    assert first["error saved"] == first["error"] != second["error"]
    assert "the state is saved in the middle of a cycle" in first["error warned"]


# Precision and sharding --------------------------------------------------------------------------


@pytest.mark.integrations
@pytest.mark.works("Lightning", FP16)
def test_loss_scale_is_equal_on_all_replicas_and_no_part_of_the_losses() -> None:
    first, second = launch(f"{RUNS}:scaling", steps=240)
    assert first["scale"] == second["scale"]
    assert first["clock"] == first["steps"] == 240  # a skipped step counts
    assert first["losses"][0] == pytest.approx([math.log(10)] * 2, rel=0.05)
    assert first["loss"] == second["loss"] < 0.2


@pytest.mark.integrations
@pytest.mark.works("Lightning", FSDP2)
def test_sharded_run_finds_its_learning_rate_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    ranks = launch(f"{RUNS}:sharded", folder=str(tmp_path))
    assert ranks[0] == ranks[1]
    assert ranks[0]["resumed"] == ranks[0]["whole"]
    assert ranks[0]["whole"]["loss"] < 0.2


@pytest.mark.integrations
@pytest.mark.works("Lightning", LORA)
def test_adapters_of_low_rank_find_their_learning_rate() -> None:
    first, second = launch(f"{RUNS}:adapting", epochs=6)
    assert first == second
    assert first["bad"] > 2.0
    assert first["hdet"] < 1.05 * first["good"]


@pytest.mark.integrations
def test_single_process_finds_its_learning_rate() -> None:
    (found,) = launch(f"{RUNS}:alone", num=1, steps=400)
    assert found["found"] > 100 * digits.BAD_LR
    assert found["loss"] < 0.2


# Fabric ------------------------------------------------------------------------------------------


@pytest.mark.integrations
def test_loop_of_the_page_for_fabric_finds_its_learning_rate_and_saves_one_model(
    tmp_path: Path,
) -> None:
    first, second = launch(f"{RUNS}:fabric", folder=str(tmp_path), epochs=8)
    assert first == second
    assert first["digest"] == first["trained"]
    assert first["clock"] == 8 * 45
    assert first["found"] > 10 * 1e-3
    assert first["loss"] < 0.3


# One process -------------------------------------------------------------------------------------


class Scheduled(Digits):
    """Returns what the test says."""

    def __init__(self, config: Any) -> None:
        super().__init__(digits.GOOD_LR)
        self.config = config
        self.lrs: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return self.config(optimizer)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.lrs.append(optimizer.param_groups[0]["lr"])


def fit(module: Any, *callbacks: Any, **options: Any) -> Any:
    trainer = trainer_of(*callbacks, strategy="auto", **{"max_steps": 2, **options})
    trainer.fit(module, Batches(4))
    return module


OFF: dict[str, Any] = {"scout": None, "guard": None}


@pytest.mark.integrations
@pytest.mark.parametrize("frequency", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_schedule_by_epoch_is_that_of_lightning(frequency: int, accumulation: int) -> None:
    def config(optimizer: Any) -> Any:
        schedule = {"scheduler": StepLR(optimizer, 1, 0.5), "frequency": frequency}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    options = {"max_steps": -1, "max_epochs": 4, "accumulate_grad_batches": accumulation}
    expected = fit(Scheduled(config), **options)
    module = fit(Scheduled(config), HDETCallback(**OFF), **options)
    assert module.lrs == expected.lrs
    assert len(set(module.lrs)) == 4 // frequency
    assert digits.digest(module.network) == digits.digest(expected.network)


@pytest.mark.integrations
def test_module_without_a_schedule_keeps_its_learning_rate() -> None:
    callback = HDETCallback(**OFF)
    module = fit(Scheduled(lambda optimizer: optimizer), callback, max_steps=6)
    assert set(module.lrs) == {1.0}
    assert callback.scheduler.last_epoch == 6
    assert callback.scheduler.total_steps == 6


@pytest.mark.integrations
def test_callback_serves_a_second_fit_and_gives_the_methods_back() -> None:
    callback, module = HDETCallback(**OFF), Scheduled(lambda optimizer: optimizer)
    for steps in (3, 5):
        fit(module, callback, max_steps=steps)
        assert callback.scheduler.last_epoch == steps
    assert "log" not in vars(module)
    assert "save_checkpoint" not in vars(module.trainer)


class Manual(Scheduled):
    def __init__(self) -> None:
        super().__init__(lambda optimizer: [optimizer, torch.optim.SGD(self.parameters(), lr=0.1)])
        self.automatic_optimization = False


class Stepping(Scheduled):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(self.current_epoch)


def scheduled(**config: Any) -> Any:
    """A module with `StepLR`, and this more of its configuration."""
    return Scheduled(
        lambda optimizer: {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": StepLR(optimizer, 1), **config},
        }
    )


def with_schedule(schedule: Any) -> Any:
    return lambda: Scheduled(lambda optimizer: ([optimizer], [schedule(optimizer)]))


def one_cycle(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=2)


def plateau(optimizer: Any) -> Any:
    return {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "train_loss"}


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "manual": (Manual, "manual optimization, as for several optimizers"),
    "frequency": (lambda: scheduled(interval="step", frequency=3), "must be 1, got 3"),
    "interval": (with_schedule(one_cycle), 'counts steps. Return {"scheduler": schedule, "int'),
    "plateau": (with_schedule(plateau), "ReduceLROnPlateau waits for a metric"),
    "hdet": (
        with_schedule(lambda optimizer: hdet.HDET(StepLR(optimizer, 1), **OFF)),
        "`configure_optimizers` returned an HDET",
    ),
    "two schedules": (
        lambda: Scheduled(lambda o: ([o], [StepLR(o, 1), ConstantLR(o)])),
        "it needs one schedule, got 2",
    ),
    "own step": (lambda: Stepping(lambda o: ([o], [StepLR(o, 1)])), "`lr_scheduler_step`"),
}


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore:A `OneCycleLR` scheduler is using 'interval'")
@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_work_is_refused_with_what_to_write(name: str) -> None:
    module, message = REFUSALS[name]
    with pytest.raises(ValueError, match="HDETCallback cannot be used here") as refused:
        fit(module(), HDETCallback())
    assert message in str(refused.value)


@pytest.mark.integrations
def test_schedule_by_epoch_needs_a_loader_with_a_length() -> None:
    loader = iter(list(Batches(4)))
    trainer = trainer_of(HDETCallback(), strategy="auto", max_steps=2)
    with pytest.raises(ValueError, match="the schedule counts epochs, and the loader has no"):
        trainer.fit(scheduled(), loader)


@pytest.mark.integrations
def test_weight_averaging_of_lightning_is_refused() -> None:
    with pytest.raises(ValueError, match="StochasticWeightAveraging replaces the schedule"):
        fit(scheduled(), HDETCallback(), StochasticWeightAveraging(0.1))
    with pytest.raises(ValueError, match="WeightAveraging takes in what the scout tries"):
        fit(scheduled(), HDETCallback(), EMAWeightAveraging())


@pytest.mark.integrations
def test_trainer_of_another_package_is_refused_with_what_to_import() -> None:
    """As of pytorch_lightning, whose classes are copies of those of lightning."""
    with pytest.raises(TypeError, match=r"got a builtins\.object\. Import both"):
        check_fit(object(), scheduled(), None)


@pytest.mark.integrations
def test_second_callback_is_refused() -> None:
    with pytest.raises(ValueError, match="the trainer has two of it"):
        fit(scheduled(), HDETCallback(), HDETCallback())


@pytest.mark.integrations
@pytest.mark.works("Lightning", STACKED + REFUSED)
def test_stacked_replicas_are_refused() -> None:
    module = scheduled()
    replicas = hdet.StackedReplicas(module.network, 4)
    with pytest.raises(ValueError, match="`training_step` returns one loss"):
        fit(module, HDETCallback(replicas=replicas))


@pytest.mark.integrations
def test_held_out_batches_need_a_validation_loader() -> None:
    with pytest.raises(ValueError, match="`hold_out` needs a validation loader"):
        fit(
            scheduled(interval="step"),
            HDETCallback(hold_out=2, scout=hdet.Scout(share=0.9)),
            max_steps=400,
        )


@pytest.mark.integrations
def test_scheduler_in_the_module_without_the_callback_warns() -> None:
    warned = " ".join(launch(f"{RUNS}:misused")[0])
    assert "scout disabled: `scout` needs a model wrapped in DDP" in warned
    assert "pass `steps_per_epoch=` to HDET" in warned
