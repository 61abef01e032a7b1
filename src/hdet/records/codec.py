"""The JSON lines of a record: from an event to plain data, and from plain data to an event.

Plain Python, no torch. The fields of the classes in `events` and their types say what a line holds,
so that the writer and the reader cannot differ.
"""

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from hdet.records.events import SCHEMA, Event, KnobEntry

RENAMED: dict[str, dict[str, str]] = {
    "run.replicas.kind": {"OneReplica": "SingleReplica"},
    "scout": {
        "late": "mid_run",
        "by": "compared_by",
        "close": "refined",
        "peaks": "reference_lrs",
        "why": "factor_reason",
        "edge": "lowest_lost",
        "explosion": "divergence",
    },
    "scout.points": {"glitch": "bad_batch"},
    "scout.refined": {"glitch": "bad_batch"},
    "cycle": {"course": "lr_trace"},
    "cycle.knobs": {
        "pull": "evidence",
        "mass": "evidence_variance",
        "reach": "max_move",
        "narrow": "spread_share",
    },
}
"""Old names and what they are called now, by place: the event, then the field, in today's names.

Where the place is a table, its keys are renamed. Where it is a text, the text is.
"""

T = TypeVar("T")
Read = Callable[[Any, str], Any]
"""Checks one value; the second argument is the name of the field, for an error."""


# From an event to a line ---------------------------------------------------------------------


def as_line(event: Event) -> dict[str, Any]:
    """An event as plain data that strict JSON can express.

    >>> from hdet.records.events import ResumeEvent
    >>> as_line(ResumeEvent(step=3))
    {'schema': 2, 'event': 'resume', 'time': None, 'step': 3}
    """
    return {"schema": SCHEMA, "event": event.kind, **_table(event)}


def as_plain(value: Any) -> Any:
    """The same value as plain data. A number that is not finite becomes none."""
    if is_dataclass(value) and not isinstance(value, type):
        return _table(value)
    if isinstance(value, Mapping):
        return {str(key): as_plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def _table(value: Any) -> dict[str, Any]:
    table = {
        field.name: as_plain(entry)
        for field in fields(value)
        if (entry := getattr(value, field.name)) is not None or "omit" not in field.metadata
    }
    return _knob_table(table) if isinstance(value, KnobEntry) else table


def _knob_table(table: dict[str, Any]) -> dict[str, Any]:
    """The key of the values says whether a knob is a learning rate."""
    is_lr = table.pop("is_lr")
    return {"lrs" if is_lr and key == "values" else key: entry for key, entry in table.items()}


# From a line to an event ---------------------------------------------------------------------


def parse_json(line: bytes) -> dict[str, Any]:
    """The JSON object of a line.

    Raises:
        ValueError: The line is not a JSON object.
    """
    try:
        table = json.loads(line.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deeply") from None
    if not isinstance(table, dict):
        raise ValueError("not a JSON object")
    return table


def modernise(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of any schema with the names of today's schema.

    >>> modernise({"schema": 1, "event": "scout", "late": True, "points": [{"glitch": False}]})
    {'schema': 2, 'event': 'scout', 'mid_run': True, 'points': [{'bad_batch': False}]}
    """
    kind = line.get("event")
    if line.get("schema", 1) == SCHEMA or not isinstance(kind, str):
        return dict(line)
    table: dict[str, Any] = _renamed(dict(line), kind)
    return {**table, "schema": SCHEMA} if "schema" in table else table


def _renamed(value: Any, place: str) -> Any:
    names = RENAMED.get(place, {})
    if isinstance(value, dict):
        return {
            (now := names.get(key, key)): _renamed(entry, f"{place}.{now}")
            for key, entry in value.items()
        }
    if isinstance(value, list):
        return [_renamed(entry, place) for entry in value]
    return names.get(value, value) if isinstance(value, str) else value


def parse(kind: type[T], table: Mapping[str, Any]) -> T:
    """An event, or a part of one, from a table; keys that the class does not have are ignored.

    Args:
        kind: A dataclass of `events`.
        table: The keys of its fields and their values. A null counts as missing.

    Raises:
        ValueError: A field without a default is missing, or a value has the wrong type.
    """
    if kind is KnobEntry and "values" not in table:
        table = {**table, "values": table.get("lrs"), "is_lr": True}
    values = {}
    known = _readers(kind)  # type: ignore[arg-type]  # mypy: type[T] is not hashable
    for name, (read, is_needed) in known.items():
        value = table.get(name)
        if value is not None:
            values[name] = read(value, name)
        elif is_needed:
            raise ValueError(f"the field {name} is missing")
    return kind(**values)


class _Field(NamedTuple):
    read: Read
    is_needed: bool


@cache
def _readers(kind: type[Any]) -> dict[str, _Field]:
    types = get_type_hints(kind)
    return {
        field.name: _Field(
            _reader(types[field.name]),
            field.default is MISSING and field.default_factory is MISSING,
        )
        for field in fields(kind)
    }


def _reader(annotation: Any) -> Read:
    """The function that reads a value of this type."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        (option,) = (each for each in inner if each is not NoneType)
        return _number if option is float else _reader(option)
    if origin is tuple:
        (entry, _) = inner
        return partial(_list, _reader(entry)) if not _is_part(entry) else partial(_tables, entry)
    if origin is Mapping:
        return partial(_mapping, _reader(inner[1]))
    if _is_part(annotation):
        return partial(_part, annotation)
    return _SIMPLE[annotation]


def _is_part(annotation: Any) -> bool:
    return isinstance(annotation, type) and is_dataclass(annotation)


def _number(value: Any, name: str) -> float | None:
    """A finite number; a number that is not finite counts as missing."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is not a number: {reprlib.repr(value)}")
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _finite(value: Any, name: str) -> float:
    number = _number(value, name)
    if number is None:
        raise ValueError(f"{name} is not a number: {reprlib.repr(value)}")
    return number


def _count(value: Any, name: str) -> int:
    # Beyond this a page could not place it: a double holds no larger whole number exactly.
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise ValueError(f"{name} is not an integer of at least 0: {reprlib.repr(value)}")
    return value


def _flag(value: Any, name: str) -> bool:
    return bool(value)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is not a text: {reprlib.repr(value)}")
    return value


def _anything(value: Any, name: str) -> Any:
    return value


_SIMPLE: dict[Any, Read] = {
    int: _count,
    float: _finite,
    bool: _flag,
    str: _text,
    Any: _anything,
}


def _checked_table(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object: {reprlib.repr(value)}")
    return value


def _checked_list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is not a list: {reprlib.repr(value)}")
    return value


def _mapping(read: Read, value: Any, name: str) -> dict[str, Any]:
    return {key: read(entry, key) for key, entry in _checked_table(value, name).items()}


def _part(kind: type[Any], value: Any, name: str) -> Any:
    return parse(kind, _checked_table(value, name))


def _list(read: Read, value: Any, name: str) -> tuple[Any, ...]:
    return tuple(read(entry, name) for entry in _checked_list(value, name))


def _tables(kind: type[Any], value: Any, name: str) -> tuple[Any, ...]:
    tables = _checked_list(value, name)
    if not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{name} holds an entry that is not a JSON object: {reprlib.repr(tables)}")
    return tuple(parse(kind, table) for table in tables)
