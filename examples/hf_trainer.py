"""A script with the Trainer of Hugging Face, with hdet in the lines marked so.

torchrun --nproc-per-node 2 examples/hf_trainer.py

A small network on scikit-learn's handwritten digits; it needs no GPU and no download.
"""

from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import TrainingArguments

from hdet.integrations.transformers import HDETTrainer  # hdet


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.network(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    torch.manual_seed(0)
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    samples: Any = [{"x": x[i].float() / 16, "labels": y[i]} for i in torch.randperm(len(x))]
    arguments = TrainingArguments(
        output_dir="runs/trainer",
        max_steps=2000,
        learning_rate=1e-5,  # 300 times too low, on purpose
        per_device_train_batch_size=16,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
    )
    trainer = HDETTrainer(  # hdet: was Trainer(
        model=Classifier(),
        args=arguments,
        train_dataset=samples[:1408],
        eval_dataset=samples[1408:],
        hdet_options={"record": "runs/trainer"},  # hdet: any option of hdet.HDET
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"learning rate {trainer.lr_scheduler.found_lr:.2g}, loss on test {loss:.3f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
