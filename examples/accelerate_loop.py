"""A loop with Accelerate, with hdet in the lines marked so.

torchrun --nproc-per-node 2 examples/accelerate_loop.py

A small network on scikit-learn's handwritten digits; it needs no GPU and no download.
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hdet  # hdet
from hdet.integrations.accelerate import prepare_hdet  # hdet

EPOCHS, LR = 18, 1e-5  # 300 times too low, on purpose


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    loader = DataLoader(TensorDataset(x[:1408], y[:1408]), batch_size=16, shuffle=True)
    test_x, test_y = x[1408:].to(accelerator.device), y[1408:].to(accelerator.device)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    steps = EPOCHS * len(loader) // 2  # optimizer steps: not times the number of processes
    base = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps)
    scout = hdet.Scout(share=0.25)  # hdet: the run is short; leave it out in longer ones
    scheduler = prepare_hdet(accelerator, base, model, scout=scout)  # hdet

    for epoch in range(EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step(loss)  # hdet: was scheduler.step()
                optimizer.zero_grad()
        with scheduler.consensus(), torch.no_grad():  # hdet: the mean of the replicas is judged
            accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
        if epoch % 6 == 5:
            accelerator.print(f"step {scheduler.last_epoch}  accuracy {accuracy:.3f}")
    accelerator.save_state("runs/accelerate_loop")
    accelerator.print(f"learning rate found: {scheduler.found_lr:.2g}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
