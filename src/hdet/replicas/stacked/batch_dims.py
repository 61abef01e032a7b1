"""Which dimension of each tensor of a batch counts the samples, and how a batch is split."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


class Batch(NamedTuple):
    """What a loss function gets beside the model."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]


class BatchDims:
    """The batch dimension of each tensor: one for all, or one for each argument.

    Args:
        dims: An integer for all tensors. Or one for each argument: a tuple in their order, or a
            mapping from names. An entry may be None: such an argument is not split. An argument
            that is a container may have a container of its own. Names without an entry have 0.

    Raises:
        TypeError: An entry is no integer, or all of `dims` is None.
    """

    def __init__(self, dims: Any) -> None:
        _check_dims(dims)
        if dims is None:
            raise TypeError("`batch_dim` must split something, got None for the whole batch.")
        self._dims = dims

    def split(self, function: Any, batch: Batch, num: int) -> Batch:
        """One part for each of `num` replicas: tensors become [num, ...]. Scalars stay.

        A tensor that is not split is expanded: all replicas read the same memory.

        Raises:
            TypeError: The batch has something else than tensors.
            ValueError: A tensor does not split evenly, or tensors have different batch sizes.
        """
        leaves, structure = tree_flatten(tuple(batch))
        dims = self._of_leaves(function, batch)
        _check_leaves(leaves)
        sizes = {size for size, _ in _sizes(leaves, dims)}
        # Who gives a dimension for each argument knows. A tensor of N has one value a replica.
        if len(sizes - {num}) > 1 and not self._has_all(function, batch):
            raise ValueError(_different_sizes(leaves, dims))
        parts = [_parts(leaf, dim, num) for leaf, dim in zip(leaves, dims, strict=True)]
        return Batch(*tree_unflatten(parts, structure))

    def pieces(self, function: Any, batch: Batch, num: int) -> list[Batch]:
        """Split a batch into pieces of nearly equal size. All get what is not split."""
        leaves, structure = tree_flatten(tuple(batch))
        columns = [
            [leaf] * num if dim is None or not is_split(leaf) else leaf.tensor_split(num, dim)
            for leaf, dim in zip(leaves, self._of_leaves(function, batch), strict=True)
        ]
        rows = zip(*columns, strict=True)
        return [Batch(*tree_unflatten(list(row), structure)) for row in rows]

    def num_samples(self, function: Any, batch: Batch) -> int:
        """The number of samples; 1 if the tensors disagree."""
        dims = self._of_leaves(function, batch)
        sizes = {size for size, _ in _sizes(tree_leaves(tuple(batch)), dims)}
        return sizes.pop() if len(sizes) == 1 else 1

    def _has_all(self, function: Any, batch: Batch) -> bool:
        """Whether each argument of a batch has an entry of its own."""
        arguments, named = batch
        if not isinstance(self._dims, Mapping):
            return not isinstance(self._dims, int)
        if len(arguments) == 1 and not named and isinstance(arguments[0], dict):
            return self._dims.keys() >= arguments[0].keys()
        return self._dims.keys() >= {*_names(function, len(arguments)), *named}

    def _of_leaves(self, function: Any, batch: Batch) -> list[int | None]:
        """The dimension of each leaf of a batch, in the order of torch's pytrees."""
        arguments, named = batch
        dims = self._dims
        if dims is None or isinstance(dims, int):
            return _spread(dims, tuple(batch), "")
        if isinstance(dims, Mapping):
            alone = arguments[0] if len(arguments) == 1 and not named else None
            if isinstance(alone, dict) and dims.keys() <= alone.keys():
                return _spread(dims, alone, "")  # the batch is one dict
            names = _names(function, len(arguments))
            _check_known(dims, {*names, *named}, function)
            given = [*zip(names, arguments, strict=True), *named.items()]
            return [dim for n, value in given for dim in _spread(dims.get(n, 0), value, f"[{n!r}]")]
        if named or len(dims) != len(arguments):
            raise ValueError(
                f"`batch_dim` must have one entry for each argument of the batch, got {dims!r} for "
                f"{len(arguments)} positional and {len(named)} named arguments. Use a mapping from "
                "names to dims for named arguments."
            )
        return _spread(dims, arguments, "")


def is_split(value: Any) -> bool:
    """Whether each replica gets its own part of a value. Scalars go to all replicas."""
    return isinstance(value, Tensor) and value.dim() > 0


def _check_dims(dims: Any) -> None:
    if isinstance(dims, Mapping):
        dims = list(dims.values())
    if isinstance(dims, (tuple, list)):
        for inner in dims:
            _check_dims(inner)
    elif dims is not None and (isinstance(dims, bool) or not isinstance(dims, int)):
        raise TypeError(
            f"`batch_dim` must be an integer, or hold one or None for each argument, got {dims!r}."
        )


def _spread(dims: Any, value: Any, place: str) -> list[int | None]:
    """One dimension for each leaf of a value."""
    if dims is None or isinstance(dims, int):
        return [dims] * len(tree_leaves(value))
    if isinstance(dims, Mapping) and isinstance(value, dict) and dims.keys() <= value.keys():
        pairs = [(f"{place}[{key!r}]", dims.get(key, 0), inner) for key, inner in value.items()]
    elif _is_sequence(dims) and _is_sequence(value) and len(dims) == len(value):
        pairs = [
            (f"{place}[{index}]", dim, inner)
            for index, (dim, inner) in enumerate(zip(dims, value, strict=True))
        ]
    else:
        raise ValueError(
            f"`batch_dim{place}` must have the structure of the batch, got {dims!r} for a "
            f"{type(value).__name__}."
        )
    return [dim for where, inner_dims, inner in pairs for dim in _spread(inner_dims, inner, where)]


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _parameters(function: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin has no signature
        return []


def _names(function: Any, num: int) -> list[str]:
    """The names of the first arguments of a loss function after the model."""
    found = _parameters(function)[1 : num + 1]
    names = [one.name for one in found if one.kind is not one.VAR_POSITIONAL]
    return names + [f"argument {place}" for place in range(len(names), num)]


def _check_known(dims: Mapping[str, Any], given: set[str], function: Any) -> None:
    """Raise a ValueError for a name that no call of the function can have."""
    parameters = _parameters(function)
    known = given | {one.name for one in parameters[1:]}
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    unknown = [name for name in dims if name not in known]
    if unknown and not takes_all:
        raise ValueError(
            f"`batch_dim` must name arguments of the loss function, got {unknown[0]!r}, which is "
            f"none of {', '.join(sorted(known))}."
        )


def _check_leaves(leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor) and (
            isinstance(leaf, Mapping) or hasattr(leaf, "__array__")
        ):
            raise TypeError(
                "`batch` must be made of tensors in tuples, lists and dicts, got a "
                f"{type(leaf).__name__}."
            )


def _sizes(leaves: Sequence[Any], dims: Sequence[int | None]) -> list[tuple[int, Tensor]]:
    """The batch size of each tensor that is split, with the tensor."""
    found = []
    for leaf, dim in zip(leaves, dims, strict=True):
        if dim is None or not is_split(leaf):
            continue
        if not -leaf.dim() <= dim < leaf.dim():
            raise ValueError(
                f"`batch_dim` must be a dimension of every tensor of the batch, got {dim} for a "
                f"tensor of shape {tuple(leaf.shape)}. Give each argument its own, such as "
                "batch_dim=(1, 0), and None to those that are not split."
            )
        found.append((leaf.shape[dim], leaf))
    return found


def _different_sizes(leaves: Sequence[Any], dims: Sequence[int | None]) -> str:
    shapes = [tuple(tensor.shape) for _, tensor in _sizes(leaves, dims)]
    used = sorted({dim for dim in dims if dim is not None})
    along = f"dim {used[0]}" if len(used) == 1 else "their dims"
    return (
        f"`batch` must have the same number of samples in all tensors, got the shapes {shapes}, "
        f"which differ along {along}. Pass StackedReplicas(..., batch_dim=...) if another dim "
        "counts the samples, None for a tensor that is not split, and flatten targets inside of "
        "the loss function."
    )


def _parts(value: Any, dim: int | None, num: int) -> Any:
    if not is_split(value):
        return value
    if dim is None:
        return value.expand(num, *value.shape)
    if value.shape[dim] % num:
        raise ValueError(
            f"`batch` must split evenly over {num} replicas, got {value.shape[dim]} samples in dim "
            f"{dim} of a tensor of shape {tuple(value.shape)}. If another dim counts the samples, "
            "pass StackedReplicas(..., batch_dim=...). For a smaller last batch, use "
            "drop_last=True in the loader."
        )
    dim %= value.dim()
    return value.unflatten(dim, (num, -1)).movedim(dim, 0)
