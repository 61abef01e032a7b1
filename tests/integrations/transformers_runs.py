"""What the processes of test_transformers.py run: the Trainer of Hugging Face on the digits."""

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import hdet
from hdet.integrations.transformers import HDETCallback, HDETMixin, HDETTrainer
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


def arguments_of(
    folder: str | Path, kind: Any = TrainingArguments, **more: Any
) -> TrainingArguments:
    """Return the arguments of a trainer, which connect the processes."""
    return kind(
        output_dir=str(folder),
        **{
            "learning_rate": digits.BAD_LR,
            "per_device_train_batch_size": BATCH,
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 10,
            "disable_tqdm": True,
            "ddp_find_unused_parameters": False,
            "dataloader_pin_memory": False,
            **more,
        },
    )


def trainer_of(
    args: TrainingArguments,
    *,
    kind: Any = HDETTrainer,
    model: nn.Module | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    **more: Any,
) -> Any:
    """Return a trainer of the digits."""
    torch.manual_seed(0)
    return kind(
        args=args,
        **{
            "model": Classifier() if model is None else model,
            "train_dataset": Rows(train=True),
            "eval_dataset": Rows(train=False),
            "callbacks": list(callbacks),
            **more,
        },
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
        more: dict[str, Any] = {"hdet_options": {"scout": scout(steps)}} if name == "hdet" else {}
        args = arguments_of(folder, learning_rate=lr, max_steps=steps)
        trainer = trainer_of(args, kind=kind, **more)
        trainer.train()
        found[name] = digits.held_out_loss(trainer.model.network)
    found["digest"] = digits.digest(trainer.model)
    found["steps"] = trainer.lr_scheduler.last_epoch
    found["log"] = trainer.state.log_history
    dist.destroy_process_group()
    return found


EXPLORES = {"spread": 0.5, "sync_every": 10, "scout": hdet.Scout(share=0.3)}
"""A scout, then cycles in which the replicas have different learning rates."""


class At(TrainerCallback):
    """Saves and evaluates at given steps, and notes the weights before and at evaluations."""

    def __init__(self, *, save: Collection[int] = (), evaluate: Collection[int] = ()) -> None:
        self.save, self.evaluate = save, evaluate
        self.before: list[str] = []
        self.shown: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **said: Any) -> Any:
        control.should_save |= state.global_step in self.save
        if state.global_step in self.evaluate:
            control.should_evaluate = True
            self.before.append(digits.digest(said["model"]))
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, **said: Any) -> None:
        self.shown.append(digits.digest(said["model"]))


def evaluates(folder: str) -> dict[str, Any]:
    """Train with and without evaluations, two of them of two sets, in mid-scout and mid-cycle."""
    found: dict[str, Any] = {}
    both: dict[str, tuple[int, ...]] = {"without": (), "with": (13, 117)}
    for name, steps in both.items():
        at = At(evaluate=steps)
        args = arguments_of(folder, max_steps=200)
        trainer = trainer_of(args, callbacks=[at], hdet_options=EXPLORES)
        trainer.eval_dataset = {"a": trainer.eval_dataset, "b": trainer.eval_dataset}
        trainer.train()
        found[name] = digits.digest(trainer.model)
    losses = [row["eval_a_loss"] for row in trainer.state.log_history if "eval_a_loss" in row]
    return {**found, "before": at.before, "shown": at.shown, "losses": losses}


def resumes(folder: str) -> dict[str, Any]:
    """Train and save in the scout and in a cycle; then resume each checkpoint."""

    def trainer(where: str) -> Any:
        args = arguments_of(Path(folder) / where, max_steps=150, gradient_accumulation_steps=2)
        model, at = Classifier(dropout=0.1), At(save=(13, 117))
        return trainer_of(args, model=model, callbacks=[at], hdet_options=EXPLORES, hold_out=4)

    whole = trainer("whole")
    whole.train()
    found: dict[str, Any] = {"whole": digits.digest(whole.model)}
    found["steps"] = [whole.lr_scheduler.last_epoch]
    for name, step in (("scout", 13), ("run", 117)):
        resumed = trainer(name)
        resumed.train(resume_from_checkpoint=str(Path(folder) / "whole" / f"checkpoint-{step}"))
        found[name] = digits.digest(resumed.model)
        found["steps"].append(resumed.lr_scheduler.last_epoch)
    state = torch.load(Path(folder) / "whole" / "checkpoint-13" / "scheduler.pt", weights_only=True)
    return {**found, "was_scouting": "search" in state, "lr": whole.hdet_scheduler.found_lr}


class Norms(TrainerCallback):
    """Notes the largest norm of the gradients with which the optimizer steps."""

    largest = 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **said: Any) -> None:
        norms = [p.grad.norm() for p in said["model"].parameters() if p.grad is not None]
        self.largest = max(self.largest, torch.stack(norms).norm().item())


def accumulates(folder: str, steps: int = 400) -> dict[str, Any]:
    """Accumulate, and clip gradients: plainly at the good learning rate, and with hdet."""
    found: dict[str, Any] = {}
    for name, kind, lr in (("good", Trainer, digits.GOOD_LR), ("hdet", HDETTrainer, digits.BAD_LR)):
        norms = Norms()
        more: dict[str, Any] = {"hdet_options": {"scout": scout(steps)}} if name == "hdet" else {}
        halves = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": BATCH // 2}
        args = arguments_of(folder, learning_rate=lr, max_steps=steps, max_grad_norm=0.5, **halves)
        trainer = trainer_of(args, kind=kind, callbacks=[norms], **more)
        trainer.train()
        found[name] = digits.held_out_loss(trainer.model.network)
    return {**found, "steps": trainer.lr_scheduler.last_epoch, "norm": norms.largest}


def keeps_the_best(folder: str) -> dict[str, Any]:
    """Stop early at the first evaluation that is not better, load the best; then train again."""
    args = arguments_of(
        folder,
        learning_rate=10 * digits.GOOD_LR,
        max_steps=2000,
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=20,
        save_strategy="best",
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
    )
    early = EarlyStoppingCallback(early_stopping_patience=1)
    options = {"preset": "paper", "sync_every": 9, "spread": 0.9}
    trainer = trainer_of(args, callbacks=[early], hdet_options=options)
    trainer.train()
    saved = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    model = trainer.model.state_dict()
    found = {
        "is_best": all(torch.equal(saved[name], model[name]) for name in model),
        "best": trainer.state.best_metric,
        "loss": trainer.evaluate()["eval_loss"],
        "stopped": trainer.state.global_step,
        "digest": digits.digest(trainer.model),
    }
    trainer.args.max_steps = 5
    trainer.train()
    return {**found, "again": trainer.lr_scheduler.last_epoch}


class Checked(HDETTrainer):
    """Notes what hdet gets as the loss of a micro-batch, beside the mean loss of its labels."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.pairs: list[tuple[float, float]] = []
        self.weights: list[tuple[float, int]] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        with torch.no_grad():
            true = self.model(**inputs).loss.item()
        labels = int(inputs["labels"][:, 1:].ne(-100).sum())
        scheduler: Any = self.lr_scheduler
        take = scheduler.observe

        def observe(loss: Tensor, *, weight: float) -> None:
            self.pairs.append((loss.item(), true))
            self.weights.append((weight, labels))
            take(loss, weight=weight)

        scheduler.observe = observe
        loss = super().training_step(model, inputs, num_items_in_batch)
        del scheduler.observe
        return loss


class Texts(Dataset[dict[str, Tensor]]):
    """Counting sequences, of which the first labels do not count."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (torch.arange(16) * (1 + index % 3) + index) % 32
        labels = ids.clone()
        labels[: index % 13] = -100
        return {"input_ids": ids, "labels": labels}


def language_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"], task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), lora)


def adapts(folder: str) -> dict[str, Any]:
    """Train LoRA adapters with accumulation, save in the scout, and resume."""

    def trainer(where: str) -> Any:
        parts = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
        return trainer_of(
            arguments_of(Path(folder) / where, max_steps=80, **parts),
            kind=Checked,
            model=language_model(),
            train_dataset=Texts(),
            callbacks=[At(save=(9,))],
            hdet_options=EXPLORES,
        )

    whole = trainer("whole")
    start = {name: p.clone() for name, p in whole.model.named_parameters()}
    whole.train()
    resumed = trainer("resumed")
    resumed.train(resume_from_checkpoint=str(Path(folder) / "whole" / "checkpoint-9"))
    frozen = [n for n, p in whole.model.named_parameters() if not p.requires_grad]
    now = dict(whole.model.named_parameters())
    return {
        "whole": digits.digest(whole.model),
        "resumed": digits.digest(resumed.model),
        "frozen": all(torch.equal(now[name], start[name]) for name in frozen),
        "pairs": whole.pairs,
        "weights": whole.weights,
    }


class Overflows(Classifier):
    """Has gradients that are not finite at some steps, as float16 has."""

    def __init__(self, steps: Collection[int]) -> None:
        super().__init__()
        self.steps, self.calls = steps, 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = super().forward(x, labels)
        if self.calls in self.steps:
            found["logits"].register_hook(lambda gradient: gradient * torch.inf)
        self.calls += 1
        return found


class Skips(TrainerCallback):
    """Counts the steps that the loss scale leaves out in this process."""

    num = 0

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **said: Any) -> None:
        self.num += said["optimizer"].step_was_skipped


def scales(folder: str) -> dict[str, Any]:
    """Train with a loss scale, where the second process overflows in the scout and after it."""
    skips = Skips()
    # A fused optimizer leaves steps out by itself, and Trainer does not notice.
    args = arguments_of(folder, max_steps=100, optim="adamw_torch")
    model = Overflows((5, 6, 90) if os.environ["RANK"] == "1" else ())
    trainer = trainer_of(args, model=model, callbacks=[skips], hdet_options=EXPLORES)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # as under fp16
    trainer.train()
    return {
        "skipped": skips.num,
        "steps": trainer.lr_scheduler.last_epoch,
        "scale": trainer.accelerator.scaler.get_scale(),
        "digest": digits.digest(trainer.model),
        "loss": digits.held_out_loss(trainer.model.network),
    }


def schedule_of(network: nn.Module, **options: Any) -> tuple[Any, hdet.HDET]:
    optimizer = torch.optim.AdamW(network.parameters(), lr=digits.GOOD_LR)
    base = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    return optimizer, hdet.HDET(base, **options)


def listens(folder: str) -> dict[str, Any]:
    """Explore with the callback alone; save, and resume."""

    def trainer(where: str) -> tuple[Any, hdet.HDET]:
        args = arguments_of(Path(folder) / where, max_steps=100)
        model = Classifier()
        pair = schedule_of(model, preset="paper", sync_every=10, spread=0.5)
        callbacks = [At(save=(57,), evaluate=(33,)), HDETCallback()]
        more = {"kind": Trainer, "model": model, "optimizers": pair}
        return trainer_of(args, callbacks=callbacks, **more), pair[1]

    whole, scheduler = trainer("whole")
    whole.train()
    resumed, _ = trainer("resumed")
    resumed.train(resume_from_checkpoint=str(Path(folder) / "whole" / "checkpoint-57"))
    return {
        "whole": digits.digest(whole.model),
        "resumed": digits.digest(resumed.model),
        "scales": scheduler.get_knobs(),
        "steps": scheduler.last_epoch,
    }


def brings_numbers(folder: str) -> list[str]:
    """Train with TensorBoard as the reporter of the trainer; return its tags."""
    args = arguments_of(folder, max_steps=100, report_to="tensorboard")
    trainer_of(args, hdet_options=EXPLORES).train()
    tags: list[str] = []
    for file in Path(folder).rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file))
        events.Reload()
        tags += events.Tags()["scalars"]
    return tags


def refuses(folder: str) -> list[str]:
    """Use hdet where it cannot work; return what it says."""
    many = arguments_of(folder)
    many._n_gpu = 2
    options = {"replicas": hdet.StackedReplicas(Classifier(), 2)}
    said = [
        message(lambda: trainer_of(arguments_of(folder), hdet_options=options)),
        message(lambda: trainer_of(arguments_of(folder, fsdp=True))),
        message(lambda: trainer_of(many)),
        message(lambda: trainer_of(arguments_of(folder), optimizers=schedule_of(Classifier()))),
    ]
    best = {"save_strategy": "best", "metric_for_best_model": "loss", "eval_strategy": "steps"}
    local = {"gradients": "local", "scout": hdet.Scout(share=0.9)}
    for strategy, pair in (
        ({}, lambda _: (None, None)),
        ({}, lambda model: schedule_of(model, model=model, **local)),
        (best, lambda model: schedule_of(model, scout=None, guard=None)),
    ):
        args = arguments_of(folder, max_steps=100, **strategy)
        more: dict[str, Any] = {"kind": Trainer, "model": Classifier()}
        trainer = trainer_of(
            args, callbacks=[HDETCallback()], optimizers=pair(more["model"]), **more
        )
        said.append(message(trainer.train))
    args = arguments_of(folder, max_steps=400)
    said.append(message(trainer_of(args, callbacks=[HDETCallback()]).train))
    searching = {"scout": hdet.Scout(share=0.9)}
    told = trainer_of(args, eval_dataset=None, hold_out=2, hdet_options=searching)
    said.append(message(told.train))
    said.append(message(lambda: type("Late", (Trainer, HDETMixin), {})))
    return said


def message(call: Callable[[], Any]) -> str:
    """Return what a call says that fails."""
    try:
        call()
    except (TypeError, ValueError) as error:
        return str(error)
    return "no error"


SHOWN = (
    evaluates,
    resumes,
    accumulates,
    keeps_the_best,
    adapts,
    scales,
    listens,
    brings_numbers,
    refuses,
)


def shows(folder: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """Run all of them in the same processes, which share the time of the imports."""
    found = {}
    for run in SHOWN:
        if not names or run.__name__ in names:
            found[run.__name__] = run(folder=str(Path(folder) / run.__name__))
    dist.destroy_process_group()  # gloo may abort at the exit otherwise
    return found
