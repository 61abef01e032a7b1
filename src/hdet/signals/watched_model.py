"""The model as a probe's score sees it: a wrapper that notes what the model is called with."""

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hdet.tensors.hashing import fingerprint


class InputNotes:
    """A fingerprint of all tensors that a model was called with."""

    def __init__(self) -> None:
        self.fingerprint = torch.zeros((), dtype=torch.int64)
        self.is_used = False
        """Whether the model, or a tensor of it, was used at all."""

    def call(self, function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Note the inputs, then call the function with them."""
        self.is_used = True
        for value in tree_leaves((inputs, options)):
            if isinstance(value, Tensor):
                found = fingerprint(value.detach().contiguous())
                self.fingerprint = self.fingerprint.to(found.device) * 31 + found + 1
        return function(*inputs, **options)


class WatchedModel:
    """A module, or a part of one, whose calls are noted.

    It behaves like the module: calls, attributes, methods, items and copies go to it.
    """

    def __init__(self, module: nn.Module, notes: InputNotes | None = None) -> None:
        vars(self).update(_module=module, _notes=notes or InputNotes())

    @property
    def fingerprint(self) -> Tensor:
        """The fingerprint of all inputs so far."""
        return self._notes.fingerprint  # type: ignore[no-any-return]

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self._notes.call(self._module, *inputs, **options)

    def __getattr__(self, name: str) -> Any:
        return self._watched(getattr(self._module, name))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._watched(self._module[key])

    def __iter__(self) -> Iterator[Any]:
        return map(self._watched, self._module)

    def __len__(self) -> int:
        return len(self._module)

    def __deepcopy__(self, memo: dict[int, Any]) -> "WatchedModel":
        return WatchedModel(copy.deepcopy(self._module, memo), self._notes)

    def _watched(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return WatchedModel(value, self._notes)
        if inspect.ismethod(value):
            return partial(self._notes.call, value)
        if isinstance(value, Tensor):
            self._notes.is_used = True
        return value

    def check_used(self) -> None:
        """Raise a ValueError if the score did not use the model."""
        if not self._notes.is_used:
            raise ValueError(
                "`score` of the probe must call the model that it is given, got one that did not. "
                "Use the argument, not a model from outside."
            )
