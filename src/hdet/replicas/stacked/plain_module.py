"""The user's model as a plain module: copied and saved without anything of hdet.

A stacked model has hooks, and its tensors are slices of the tensors of all replicas. A copy or a
pickle of it must have neither.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import Tensor, nn

from hdet.knobs.layers import restore_dropout

Loaded = Callable[[], None]

HOOKS = ("_state_dict_hooks", "_load_state_dict_post_hooks")
METHODS = ("__deepcopy__", "__reduce_ex__")


def add_hooks(model: nn.Module, loaded: Loaded) -> None:
    """Let the model be copied and saved as a plain module, and call `loaded` after a load.

    Args:
        model: The user's model.
        loaded: Called after `load_state_dict` of the model.
    """
    model.register_load_state_dict_post_hook(lambda *_: loaded())
    model.register_state_dict_post_hook(_save_one)
    this = ref(model)  # the model must not keep itself alive

    def copied(memo: dict[int, Any]) -> nn.Module:
        own = this()
        assert own is not None
        return plain_copy(own, memo)

    def reduced(protocol: Any) -> Any:
        own = this()
        assert own is not None
        plain = plain_copy(own)
        restore_dropout(plain)
        return plain.__reduce_ex__(protocol)

    # Python looks for these on the object itself, so the class of the model stays as it is.
    vars(model).update(__deepcopy__=copied, __reduce_ex__=reduced)


def plain_copy(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of a module without the hooks of hdet, with memory of its own."""
    memo = {} if memo is None else memo
    for buffer in model.buffers():  # a copy of a slice would keep the memory of its stack
        memo.setdefault(id(buffer), buffer.detach().clone())
    with _without_hooks(model):
        return copy.deepcopy(model, memo)


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, the model has none of the hooks and methods that hdet has added."""
    own = vars(model)
    kept = {name: own[name] for name in (*HOOKS, *METHODS) if name in own}
    for name in METHODS:
        own.pop(name, None)
    for name in HOOKS:
        hooks = kept[name].items()
        own[name] = type(kept[name])((key, hook) for key, hook in hooks if not _is_ours(hook))
    try:
        yield
    finally:
        own.update(kept)


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "hdet"


def _save_one(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A hook of the model: a checkpoint holds the memory of one replica, not that of all."""
    for name, value in state.items():
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            state[name] = value.clone()
