"""All small tasks, and which of them rules are set by and which they are reported on.

A rule is set by the tasks of SETTING. Nothing is chosen by those of REPORTING, and no choice is
changed after a run with them. The parts were drawn before the first run.
"""

import random
from collections import defaultdict
from collections.abc import Mapping

from benchmarks.zoo.small.finetuning import FINETUNING
from benchmarks.zoo.small.generative import GENERATIVE
from benchmarks.zoo.small.images import CONV, DENSE
from benchmarks.zoo.small.tables import TABLES
from benchmarks.zoo.small.task import SmallTask
from benchmarks.zoo.small.texts import TEXTS

TASKS: dict[str, SmallTask] = {
    task.name: task for task in (*CONV, *DENSE, *TEXTS, *TABLES, *GENERATIVE, *FINETUNING)
}
"""Data is loaded when a task first needs it."""

GIVEN = frozenset(
    {
        "conv_mnist_sgd",
        "conv_mnist_adamw",
        "conv_mnist_batchnorm_sgd",
        "byte_gpt_adamw",
        "lstm_adam_clip",
        "tabular_census_adamw",
        "ranking_feed_adam",
        "regression_adam",
        "diffusion_digits_adamw",
        "finetune_gpt_adamw",
    }
)
"""Tasks of the setting part that are not drawn."""
SPLIT_SEED = 24

SETTING = (
    "conv_mnist_sgd",
    "conv_mnist_adamw",
    "conv_mnist_batchnorm_sgd",
    "mlp_mnist_sgd",
    "vit_cifar_adamw",
    "byte_gpt_adamw",
    "lstm_adam_clip",
    "gpt_shakespeare_muon",
    "tabular_census_adamw",
    "ranking_feed_adam",
    "regression_adam",
    "diffusion_digits_adamw",
    "autoencoder_cifar_sgd",
    "finetune_gpt_adamw",
)
"""As `drawn_setting` draws them."""

REPORTING = (
    "conv_cifar_batchnorm_adamw",
    "conv_cifar_scaled_init_sgd",
    "conv_cifar_groupnorm_sgd_tiny_batch",
    "conv_digits_default_init_adam",
    "mlp_digits_adam",
    "mixer_mnist_lion",
    "gru_stdlib_adamw",
    "text_conv_classifier_adam",
    "regression_sgd",
    "regression_outliers_adafactor",
    "vae_mnist_adam",
    "contrastive_mnist_adamw",
    "finetune_conv_sgd",
    "finetune_head_adam",
)


def drawn_setting(tasks: Mapping[str, SmallTask]) -> tuple[str, ...]:
    """Half of the tasks, and half of every family as far as numbers allow; the given ones first."""
    draw = random.Random(SPLIT_SEED)
    families: dict[str, list[str]] = defaultdict(list)
    for name in sorted(tasks):
        families[tasks[name].family].append(name)
    chosen: set[str] = set()
    for family in sorted(families):
        chosen |= _drawn(families[family], len(families[family]) // 2, chosen, draw)
    odd = [name for name in sorted(families) if len(families[name]) % 2]
    draw.shuffle(odd)
    for family in odd:
        if len(chosen) < len(tasks) // 2:
            num = len(families[family]) // 2 + 1
            chosen |= _drawn(families[family], num, chosen, draw)
    return tuple(name for name in tasks if name in chosen)


def _drawn(family: list[str], num: int, chosen: set[str], draw: random.Random) -> set[str]:
    """Fill the chosen ones of a family up to a number; the given ones are chosen first."""
    own = {name for name in family if name in chosen or name in GIVEN}
    others = [name for name in family if name not in own]
    return own | set(draw.sample(others, max(num - len(own), 0)))
