"""A small task that every framework trains: the handwritten digits of scikit-learn."""

import hashlib

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

GOOD_LR = 3e-3
BAD_LR = GOOD_LR / 300
"""The learning rate of the runs that hdet must mend."""
NUM_TRAINED = 1440


def tensors() -> tuple[Tensor, Tensor]:
    """Return all images as rows of 64 pixels from 0 to 1, and their labels."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]


def network() -> nn.Module:
    """Return the same untrained network in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def held_out_loss(model: nn.Module) -> float:
    """Return the loss on the images that no run trains on."""
    x, y = tensors()
    with torch.no_grad():
        return nn.functional.cross_entropy(model(x[NUM_TRAINED:]), y[NUM_TRAINED:]).item()


def digest(model: nn.Module) -> str:
    """Return a hash of all weights and buffers: equal for models that are equal bit for bit."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
