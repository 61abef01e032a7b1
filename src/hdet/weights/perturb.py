"""perturb_: adds noise to the weights of each replica before a run (paper, eq. 10)."""

import math
from hashlib import sha256

import torch
from torch import nn

from hdet._validation import check_integer, check_range
from hdet.replicas.factory import local_replicas
from hdet.replicas.protocol import Replicas
from hdet.tensors.dtensor import cut, layout, local, whole

PERTURBED = "_hdet_perturbed"


@torch.no_grad()
def perturb_(
    model: nn.Module, noise: float = 0.01, *, replicas: Replicas | None = None, seed: int = 0
) -> None:
    """Add noise to the weights of each replica before a run (paper, eq. 10).

    This is the paper's warm noisy start: theta <- theta + eps, with
    eps ~ N(0, noise^2 |theta|^2 / d) for d weights. Each replica draws its own noise from a private
    generator, so that no global random state changes. Frozen parameters stay as they are.

    Call it after DDP wraps the model: DDP would overwrite the noise of all replicas with that of
    the first. Call it before the scheduler is made.

    Args:
        model: The model. Its weights change in place.
        noise: The norm of the noise, relative to the norm of the weights.
        replicas: The engine of the run. Needed for stacked replicas and for sharded models; by
            default, each process of the default process group is one replica.
        seed: The seed of the noise. A replica's noise depends on the seed and on its index.

    Raises:
        ValueError: `noise` or `seed` is negative, the model has no trainable parameters, or it is
            sharded and `replicas` is not given.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> before = model.weight.detach().clone()
        >>> perturb_(model, 0.01)
        >>> bool((model.weight == before).any())
        False
    """
    check_range("noise", noise, least=0, below=math.inf)
    check_integer("seed", seed, at_least=0)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("`model` must have parameters that require a gradient, got none.")
    if replicas is None and any(layout(p) is not None for p in model.parameters()):
        raise ValueError("`perturb_` needs `replicas=` for a sharded model, got None.")
    here = local_replicas() if replicas is None else replicas.local
    modules = [model] if replicas is None else replicas.modules(model)
    for replica, module in zip(here, modules, strict=True):
        assert module is not None
        _add_noise(module, noise, torch.Generator().manual_seed(_seed(seed, replica)))


def _add_noise(module: nn.Module, noise: float, generator: torch.Generator) -> None:
    parameters = [p for p in module.parameters() if p.requires_grad]
    num = sum(p.numel() for p in parameters)
    norms = torch.stack([whole(p.double().norm()).cpu() for p in parameters])
    deviation = noise * float(norms.norm()) / num**0.5
    for p in parameters:
        # Noise for the whole parameter: a sharded model gets the same noise as a plain one.
        epsilon = torch.empty(p.shape, dtype=torch.float64).normal_(generator=generator)
        local(p).add_((cut(epsilon, p) * deviation).to(device=p.device, dtype=p.dtype))
        setattr(p, PERTURBED, True)


def _seed(seed: int, replica: int) -> int:
    digest = sha256(f"perturb/{seed}/{replica}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
