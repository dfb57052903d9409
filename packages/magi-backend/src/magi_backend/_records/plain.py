# SPDX-License-Identifier: Apache-2.0
"""Records as plain data for JSON, and back."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any, TypeVar


T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """*value* as dicts, lists and numbers; a float that JSON does not have becomes a string.

    Example:
        >>> to_plain({"largest": float("inf"), "sizes": (1, 2)})
        {'largest': 'inf', 'sizes': [1, 2]}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_plain(kind: type[T], data: Any) -> T:
    """The record of class *kind* that *data* was made from; fields that *data* lacks get their defaults."""
    result: T = _value(kind, data)
    return result


def _value(kind: Any, data: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in {types.UnionType, typing.Union}:
        return None if data is None else _value(next(one for one in arguments if one is not types.NoneType), data)
    if origin is tuple:
        kinds = (arguments[0],) * len(data) if arguments[1:] == (Ellipsis,) else arguments
        return tuple(_value(one, item) for one, item in zip(kinds, data, strict=True))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        make: Any = kind
        hints = typing.get_type_hints(kind)
        known = {field.name for field in dataclasses.fields(kind)}
        return make(**{name: _value(hints[name], item) for name, item in data.items() if name in known})
    return float(data) if kind is float else data
