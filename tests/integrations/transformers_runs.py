"""What the processes of test_transformers.py run: the Trainer of Hugging Face on the digits."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import hdet
from hdet.integrations.transformers import HDETTrainer
from tests.integrations import digits

BATCH = 16
"""Of each process."""


class Classifier(nn.Module):
    """Returns its loss, as models of Hugging Face do."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.network = digits.network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.network(self.dropout(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, *, train: bool) -> None:
        num = digits.NUM_TRAINED
        self.x, self.y = (t[:num] if train else t[num:] for t in digits.tensors())

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


def trainer_of(
    folder: str | Path,
    *,
    lr: float = digits.BAD_LR,
    kind: Any = HDETTrainer,
    model: nn.Module | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    more: Mapping[str, Any] = {},
    **arguments: Any,
) -> Any:
    """Return a trainer of the digits; `arguments` are those of TrainingArguments."""
    args = TrainingArguments(
        output_dir=str(folder),
        learning_rate=lr,
        per_device_train_batch_size=BATCH,
        **{
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 10,
            "disable_tqdm": True,
            "ddp_find_unused_parameters": False,
            "dataloader_pin_memory": False,
            **arguments,
        },
    )
    torch.manual_seed(0)
    return kind(
        model=model or Classifier(),
        args=args,
        train_dataset=Rows(train=True),
        eval_dataset=Rows(train=False),
        callbacks=list(callbacks),
        **more,
    )


def scout(steps: int) -> hdet.Scout:
    """Return a scout of about 99 steps, as in a run of 3300."""
    return hdet.Scout(share=0.03 * 3300 / steps)


def finds(folder: str, steps: int) -> dict[str, Any]:
    """Train plainly at two learning rates, and with hdet at the bad one."""
    found: dict[str, Any] = {}
    for name, kind, lr in (
        ("bad", Trainer, digits.BAD_LR),
        ("good", Trainer, digits.GOOD_LR),
        ("hdet", HDETTrainer, digits.BAD_LR),
    ):
        more = {"hdet_options": {"scout": scout(steps)}} if name == "hdet" else {}
        trainer = trainer_of(folder, lr=lr, kind=kind, more=more, max_steps=steps)
        trainer.train()
        found[name] = digits.held_out_loss(trainer.model.network)
    found["digest"] = digits.digest(trainer.model)
    found["steps"] = trainer.lr_scheduler.last_epoch
    found["log"] = trainer.state.log_history
    return found
