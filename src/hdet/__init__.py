"""hdet: the replicas you already pay for find and track your learning rate inside the run itself.

Words: a *replica* trains with its own learning rate; a *cycle* is the `sync_every` steps between
two converges; the *spread* gives each replica its *multiplier*; the *scale* is the centre of the
spread in units of the *base* schedule; *factor* = scale x multiplier; the *consensus* is the mean
of the replicas' weights.
"""

from hdet.checkpoint import load_checkpoint, save_checkpoint
from hdet.controller import PaperController
from hdet.dials import Dial
from hdet.elastic import TorchftReplicas
from hdet.guard import Guard, ReplicasLost
from hdet.knobs import (
    Knob,
    attention_temperature,
    betas,
    dropout,
    eps,
    gradient_clip,
    label_smoothing,
    lr,
    momentum,
    weight_decay,
)
from hdet.one_cycle import OneCycleHDET
from hdet.parameters import perturb_
from hdet.probe import Probe
from hdet.replay import Replay
from hdet.replicas import ProcessReplicas
from hdet.scheduler import HDET
from hdet.scout import Scout
from hdet.stacked import StackedReplicas
from hdet.tracker import Tracker
from hdet.version import __version__

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
    "load_checkpoint",
    "lr",
    "momentum",
    "perturb_",
    "save_checkpoint",
    "weight_decay",
]
