# SPDX-License-Identifier: Apache-2.0
"""The arguments of a pass, checked against the types that its fields are annotated with.

A pass is made long before it runs, and its fields are part of a cache key. ``True`` instead of ``1`` would compile
everything again, and a string instead of a number would fail inside a compilation.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import types
import typing
from typing import Any

from magi_passes.errors import PassArgumentError, PassArgumentTypeError


def check_types(instance: Any) -> None:
    """Raise `PassArgumentTypeError` for a field of *instance* that holds another type than it is annotated with.

    Fields have plain types: bool, int, float, str, None and unions of them. An int is accepted as a float; a bool is
    not accepted as an int.
    """
    cls: type = type(instance)
    for name, kinds in _kinds_of(cls).items():
        value = getattr(instance, name)
        if type(value) not in kinds and not (type(value) is int and float in kinds):
            wanted = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in kinds)
            msg = (
                f"{type(instance).__name__}: {name} must be {wanted}, not {value!r} of type "
                f"{type(value).__name__}.{_advice(value, kinds)}"
            )
            raise PassArgumentTypeError(msg)


def check_value(instance: Any, name: str, *, holds: bool, rule: str) -> None:
    """Raise `PassArgumentError` with the *rule* unless it *holds* for the field *name* of *instance*."""
    if not holds:
        msg = f"{type(instance).__name__}: {name}={getattr(instance, name)!r}: {rule}"
        raise PassArgumentError(msg)


def check_max_tiles(instance: Any) -> None:
    """Raise `PassArgumentError` unless ``max_tiles`` is 2 or 3."""
    rule = "a Triton grid has up to three dimensions; use 2 or 3"
    check_value(instance, "max_tiles", holds=instance.max_tiles in (2, 3), rule=rule)


def check_nodes_per_conv(instance: Any) -> None:
    """Raise `PassArgumentError` unless ``nodes_per_conv`` can be a threshold."""
    rule = "it is a number of nodes for each convolution; use 1 or more"
    check_value(instance, "nodes_per_conv", holds=instance.nodes_per_conv >= 1, rule=rule)


@functools.cache
def _kinds_of(cls: type) -> dict[str, tuple[type, ...]]:
    hints = typing.get_type_hints(cls)
    return {field.name: typing.get_args(hints[field.name]) or (hints[field.name],) for field in dataclasses.fields(cls)}


def _advice(value: object, kinds: tuple[type, ...]) -> str:
    if isinstance(value, type):
        return " Give an instance, not the class."
    if isinstance(value, os.PathLike) and str in kinds:
        return " Write str(...) around it."
    number = next((kind for kind in (bool, int, float) if kind in kinds), None)
    is_scalar = hasattr(value, "item") or hasattr(value, "__index__") or isinstance(value, float)
    if number is not None and is_scalar:
        return f" Write {number.__name__}(...) around it."
    return ""
