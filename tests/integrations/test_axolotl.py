"""hdet as a plugin of axolotl 0.19.

axolotl asks for another version of transformers than the other adapters are tested with. So the
tests state the interface that the plugin needs. Where axolotl is installed, they use it.
"""

import inspect
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

import hdet
from tests.integrations import digits
from tests.integrations.launch import launch
from tests.integrations.transformers_runs import Rows, arguments_of, trainer_of

HAS_AXOLOTL = find_spec("axolotl") is not None


class BasePlugin:
    """The methods of axolotl.integrations.base.BasePlugin that the plugin overrides."""

    def __init__(self) -> None: ...

    def get_input_args(self) -> str | None:
        return None

    def get_trainer_cls(self, cfg: Any) -> Any:
        return None


class AxolotlTrainer(Trainer):
    """What axolotl.core.trainers.AxolotlTrainer adds that the plugin meets."""

    def __init__(
        self,
        *_args: Any,
        bench_data_collator: Any = None,
        eval_data_collator: Any = None,
        dataset_tags: Any = None,
        **kwargs: Any,
    ) -> None:
        self.dataset_tags = dataset_tags
        super().__init__(*_args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        return super().create_scheduler(num_training_steps, optimizer=optimizer)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)


class Config(dict[str, Any]):
    """Answers for missing keys with None, as axolotl's DictDefault."""

    def __missing__(self, key: str) -> None:
        return None


def interface() -> dict[str, ModuleType]:
    """Return modules with the stated interface, by their names; none where axolotl is there."""
    if HAS_AXOLOTL:
        return {}
    names = ("axolotl", "axolotl.integrations", "axolotl.integrations.base", "axolotl.core")
    modules: dict[str, Any] = {n: ModuleType(n) for n in (*names, "axolotl.core.trainers")}
    modules["axolotl.integrations.base"].BasePlugin = BasePlugin
    modules["axolotl.core.trainers"].AxolotlTrainer = AxolotlTrainer
    return modules


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, module in interface().items():
        monkeypatch.setitem(sys.modules, name, module)
    from hdet.integrations.axolotl import HDETPlugin

    return HDETPlugin()


@pytest.mark.skipif(not HAS_AXOLOTL, reason="axolotl needs other versions of its dependencies")
@pytest.mark.integrations
def test_stated_interface_is_that_of_axolotl() -> None:
    from axolotl.core import trainers
    from axolotl.integrations import base

    for stated, real in ((BasePlugin, base.BasePlugin), (AxolotlTrainer, trainers.AxolotlTrainer)):
        for name, method in vars(stated).items():
            if inspect.isfunction(method):
                own = list(inspect.signature(method).parameters)
                assert own == list(inspect.signature(getattr(real, name)).parameters), name
    assert issubclass(trainers.AxolotlTrainer, Trainer)


@pytest.mark.integrations
def test_plugin_names_its_options_and_makes_them_from_plain_data(plugin: Any) -> None:
    module, _, name = plugin.get_input_args().rpartition(".")
    options = getattr(sys.modules[module], name)
    assert set(options.model_fields) == {"hdet", "hdet_hold_out"}
    written = {"record": "runs/a", "scout": {"share": 0.05}, "guard": None}
    kind = plugin.get_trainer_cls(Config(hdet=written, hdet_hold_out=4))
    assert issubclass(kind, Trainer)
    assert kind.hold_out == 4
    expected = {"record": "runs/a", "scout": hdet.Scout(share=0.05), "guard": None}
    assert kind.hdet_options == expected


@pytest.mark.integrations
@pytest.mark.parametrize("key", ["rl", "reward_model", "process_reward_model", "trainer_cls"])
def test_plugin_refuses_other_trainers(key: str, plugin: Any) -> None:
    with pytest.raises(ValueError, match=f"got `{key}`.*HDETMixin"):
        plugin.get_trainer_cls(Config({key: "dpo"}))


class Named(Rows):
    column_names = ("x", "labels")
    """axolotl asks for them."""


@pytest.mark.skipif(HAS_AXOLOTL, reason="axolotl is installed")
@pytest.mark.integrations
def test_plugin_without_axolotl_says_what_to_install() -> None:
    from hdet.integrations.axolotl import HDETPlugin

    with pytest.raises(ModuleNotFoundError, match=r"pip install 'hdet\[axolotl\]'"):
        HDETPlugin().get_trainer_cls(Config())


def trains(folder: str) -> dict[str, Any]:
    of_arguments: Any = TrainingArguments
    if HAS_AXOLOTL:
        from axolotl.core import training_args

        of_arguments = training_args.AxolotlTrainingArguments
    sys.modules.update(interface())
    from hdet.integrations.axolotl import HDETPlugin

    kind = HDETPlugin().get_trainer_cls(Config(hdet={"scout": {"share": 0.3}}))
    args = arguments_of(folder, of_arguments, max_steps=300)
    more: dict[str, Any] = {"train_dataset": Named(train=True), "dataset_tags": ["digits"]}
    trainer = trainer_of(args, kind=kind, **more)
    trainer.train()
    found = {
        "loss": digits.held_out_loss(trainer.model.network),
        "lr": trainer.lr_scheduler.found_lr,
    }
    dist.destroy_process_group()
    return found


@pytest.mark.integrations
def test_trainer_of_the_plugin_finds_a_learning_rate(tmp_path: Path) -> None:
    run, cpu = "tests.integrations.test_axolotl:trains", {"ACCELERATE_USE_CPU": "true"}
    for found in launch(run, environment=cpu, folder=str(tmp_path)):  # as accelerate launch sets it
        assert found["lr"] > 100 * digits.BAD_LR
        assert found["loss"] < 0.3
