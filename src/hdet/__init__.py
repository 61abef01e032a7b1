"""hdet: the replicas you already pay for find and track your learning rate inside the run itself.

Words: a *replica* trains with its own learning rate; a *cycle* is the `sync_every` steps between
two converges; the *spread* gives each replica its *multiplier*; the *scale* is the centre of the
spread in units of the *base* schedule; *factor* = scale x multiplier; the *consensus* is the mean
of the replicas' weights.

Public names are loaded when they are used, so that `import hdet` is quick and the packages without
torch can be imported where torch is not installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hdet._version import __version__

if TYPE_CHECKING:
    from hdet._messages import set_verbosity
    from hdet.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
    from hdet.control.guard import Guard
    from hdet.control.paper import PaperController
    from hdet.control.replica_health import ReplicasLost
    from hdet.control.tracker import Tracker
    from hdet.knobs.dial import Dial
    from hdet.knobs.model_knobs import attention_temperature, dropout, label_smoothing
    from hdet.knobs.optimizer_knobs import betas, eps, gradient_clip, lr, momentum, weight_decay
    from hdet.knobs.specs import Knob
    from hdet.lr_search.scout import Scout
    from hdet.records.replay import Replay
    from hdet.replicas.process import ProcessReplicas
    from hdet.replicas.stacked.replicas import StackedReplicas
    from hdet.replicas.torchft import TorchftReplicas
    from hdet.scheduler.hdet import HDET
    from hdet.scheduler.one_cycle import OneCycleHDET
    from hdet.signals.probe import Probe
    from hdet.weights.perturb import perturb_

__all__ = [
    "HDET",
    "Dial",
    "Guard",
    "Knob",
    "OneCycleHDET",
    "PaperController",
    "Probe",
    "ProcessReplicas",
    "Replay",
    "ReplicasLost",
    "Scout",
    "StackedReplicas",
    "TorchftReplicas",
    "Tracker",
    "__version__",
    "attention_temperature",
    "betas",
    "dropout",
    "eps",
    "gradient_clip",
    "label_smoothing",
    "latest_checkpoint",
    "load_checkpoint",
    "lr",
    "momentum",
    "perturb_",
    "save_checkpoint",
    "set_verbosity",
    "weight_decay",
]

_MODULES = {
    "hdet._messages": ("set_verbosity",),
    "hdet.checkpoint": ("latest_checkpoint", "load_checkpoint", "save_checkpoint"),
    "hdet.control.paper": ("PaperController",),
    "hdet.control.replica_health": ("ReplicasLost",),
    "hdet.control.guard": ("Guard",),
    "hdet.control.tracker": ("Tracker",),
    "hdet.knobs.dial": ("Dial",),
    "hdet.knobs.model_knobs": ("attention_temperature", "dropout", "label_smoothing"),
    "hdet.knobs.optimizer_knobs": (
        "betas",
        "eps",
        "gradient_clip",
        "lr",
        "momentum",
        "weight_decay",
    ),
    "hdet.knobs.specs": ("Knob",),
    "hdet.lr_search.scout": ("Scout",),
    "hdet.records.replay": ("Replay",),
    "hdet.replicas.process": ("ProcessReplicas",),
    "hdet.replicas.stacked.replicas": ("StackedReplicas",),
    "hdet.replicas.torchft": ("TorchftReplicas",),
    "hdet.scheduler.hdet": ("HDET",),
    "hdet.scheduler.one_cycle": ("OneCycleHDET",),
    "hdet.signals.probe": ("Probe",),
    "hdet.weights.perturb": ("perturb_",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hdet' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
