"""A loop with DeepSpeed, with hdet in the lines marked so.

torchrun --nproc-per-node 2 examples/deepspeed_loop.py

A small network on scikit-learn's handwritten digits; it needs no GPU and no download.
"""

import deepspeed
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import hdet  # hdet
from hdet.integrations.deepspeed import attach_hdet  # hdet

EPOCHS, LR = 18, 1e-5  # 300 times too low, on purpose
CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0},
}


def main() -> None:
    if not torch.cuda.is_available():
        vars(deepspeed.ops)["__compatible_ops__"] = {}  # compile no kernels for the CPU
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    data, steps = TensorDataset(x[:1408], y[:1408]), EPOCHS * 22
    base = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=base, training_data=data, config=CONFIG
    )
    scout = hdet.Scout(share=0.25)  # hdet: the run is short; leave it out in longer ones
    scheduler = attach_hdet(engine, scout=scout)  # hdet: around the schedule of the engine

    test_x, test_y = x[1408:].to(engine.device), y[1408:].to(engine.device)
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            logits = engine(inputs.to(engine.device))
            loss = nn.functional.cross_entropy(logits, targets.to(engine.device))
            engine.backward(loss)
            scheduler.observe(loss)  # hdet
            engine.step()
    with scheduler.consensus(), torch.no_grad():  # hdet: the mean of the replicas is judged
        accuracy = (engine(test_x).argmax(1) == test_y).float().mean().item()
    engine.save_checkpoint("runs/deepspeed_loop")
    if engine.global_rank == 0:
        print(f"learning rate found: {scheduler.found_lr:.2g}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
