"""hdet as a plugin of axolotl: `plugins: [hdet.integrations.axolotl.HDETPlugin]` in its YAML file.

It builds on `hdet.integrations.transformers`. No private name of axolotl is used.
"""

from collections.abc import Mapping
from typing import Any

from hdet.control.guard import Guard
from hdet.integrations._extras import extra
from hdet.integrations.transformers import HDETMixin
from hdet.lr_search.scout import Scout

with extra("axolotl"):
    from pydantic import BaseModel

try:
    from axolotl.integrations.base import BasePlugin
except ModuleNotFoundError:  # axolotl loads plugins, so it is there; tools read the module without
    BasePlugin = object

OTHER_TRAINERS = ("rl", "reward_model", "process_reward_model", "trainer_cls")
"""Keys of axolotl with which it would train with another class."""


class HDETArgs(BaseModel):
    """What the YAML file of axolotl may say of hdet."""

    hdet: dict[str, Any] | None = None
    """Options of `hdet.HDET`. `scout` and `guard` may be mappings of their own options."""

    hdet_hold_out: int = 0
    """Batches of each process, from the evaluation data, on which the scout compares."""


class HDETPlugin(BasePlugin):
    """Trains with hdet in axolotl, for pre-training and supervised fine-tuning.

    Example:
        In the YAML file of axolotl::

            plugins:
              - hdet.integrations.axolotl.HDETPlugin
            hdet:
              record: runs/a
              scout:
                share: 0.05
    """

    def get_input_args(self) -> str:
        """Return the dotted path of the options, as axolotl asks for it."""
        return "hdet.integrations.axolotl.HDETArgs"

    def get_trainer_cls(self, cfg: Any) -> type[Any]:
        """Return the trainer of axolotl, with hdet.

        Args:
            cfg: The configuration of axolotl.

        Returns:
            A subclass of `AxolotlTrainer`.

        Raises:
            ValueError: If axolotl would train with another class.
            ModuleNotFoundError: If axolotl is not installed.
        """
        if asked := [key for key in OTHER_TRAINERS if cfg.get(key)]:
            raise ValueError(
                f"`HDETPlugin` works with the usual trainer of axolotl, got `{asked[0]}` in its "
                "configuration. Remove the plugin, or subclass that trainer with "
                "hdet.integrations.transformers.HDETMixin."
            )
        with extra("axolotl"):
            from axolotl.core.trainers import AxolotlTrainer  # it takes long to import

        members = {
            "hdet_options": options_of(cfg.get("hdet") or {}),
            "hold_out": int(cfg.get("hdet_hold_out") or 0),
        }
        return type("HDETAxolotlTrainer", (HDETMixin, AxolotlTrainer), members)


def options_of(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `hdet.HDET` from plain data.

    Args:
        written: The options, where `scout` and `guard` may be mappings.

    Returns:
        The options, with a `hdet.Scout` and a `hdet.Guard` in the place of such mappings.
    """
    options = dict(written)
    for name, kind in (("scout", Scout), ("guard", Guard)):
        if isinstance(options.get(name), Mapping):
            options[name] = kind(**options[name])
    return options
