# SPDX-License-Identifier: Apache-2.0
"""Settings by dotted name: their fields, nested values, and the errors about wrong names and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from magi_backend.errors import ConfigError


if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

Fields = Mapping[str, "FieldInfo"]


def unknown_name(name: object, valid: tuple[str, ...], *, prefix: str = "") -> str:
    """The error message for a name that no setting has."""
    if not isinstance(name, str):
        return (
            f"{name!r} (a {type(name).__name__}) is not the name of a setting. Names are such as {prefix + valid[0]!r}."
        )
    close = get_close_matches(name, valid, n=1)
    hint = f" Did you mean {prefix + close[0]!r}?" if close else ""
    return f"{prefix + name!r} is not a setting of the magi backend.{hint} The settings are: " + ", ".join(
        prefix + known for known in valid
    )


def nested(values: Mapping[str, object]) -> dict[str, Any]:
    """``{"pass_config.max_tiles": 2}`` as ``{"pass_config": {"max_tiles": 2}}``."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return nested


def has_value(values: Mapping[str, Any], name: str) -> bool:
    """Whether the nested *values* have a value for the setting *name*."""
    first, _, rest = name.partition(".")
    if first not in values:
        return False
    inner = values[first]
    if isinstance(inner, BaseModel):
        inner = dict.fromkeys(inner.model_fields_set)
    return not rest or has_value(inner, rest)


def adapter(field: FieldInfo) -> TypeAdapter[object]:
    """The pydantic adapter that checks a value of *field*."""
    return TypeAdapter[object](Annotated[field.annotation, field])  # type: ignore[arg-type]


def accepted(field: FieldInfo) -> str:
    """What *field* accepts, in words."""
    annotation = field.annotation
    if annotation == tuple[str, ...]:
        return "operator names such as 'ns::op', a list or comma-separated"
    if get_origin(annotation) is tuple:
        return "a sequence of dicts of input to shape or number, such as ({'x': (1, 16, 68, 120)},), or JSON"
    if annotation is bool:
        return "True or False"
    if str(annotation).startswith("typing.Literal"):
        return "one of " + ", ".join(repr(choice) for choice in get_args(annotation))
    bounds = "".join(
        f" {word} {getattr(part, attribute):g}"
        for attribute, word in (("ge", "from"), ("le", "to"))
        for part in field.metadata
        if hasattr(part, attribute)
    )
    kinds = get_args(annotation) or (annotation,)
    return " or ".join("None" if kind is type(None) else f"{kind.__name__}{bounds}" for kind in kinds)


def bad_values(
    error: ValidationError,
    fields: Fields,
    values: Mapping[str, Any],
    text_of: Callable[[str], tuple[str, str]],
    prefix: str = "",
) -> str:
    """The error message about every bad value: what it is, where it came from, what its field takes.

    Args:
        error: The error of pydantic.
        fields: All settings.
        values: The arguments, nested.
        text_of: From the name of a setting that is not among them to its environment variable and that variable's text.
        prefix: The dotted name of the group of settings that was constructed.
    """
    sentences = []
    for problem in error.errors():
        name = prefix + ".".join(str(part) for part in problem["loc"] if str(part) != "function-before")
        inner = problem.get("ctx", {}).get("error")
        if isinstance(inner, ConfigError) and isinstance(inner.__cause__, ValidationError):
            sentences.append(bad_values(inner.__cause__, fields, values, text_of, f"{name}."))
            continue
        if any(field.startswith(f"{name}.") for field in fields):
            takes = "a PassConfig or a dict such as {'max_tiles': 2}"
            sentences.append(f"{name} = {problem['input']!r}: the settings {name} take {takes}.")
            continue
        known = next((field for field in fields if name == field or name.startswith(field + ".")), None)
        if known is None:
            sentences.append(unknown_name(name, tuple(fields)))
            continue
        where, given = known, problem["input"]
        if not has_value(values, known):
            key, given = text_of(known)
            where = f"The environment variable {key}"
        sentences.append(f"{where} = {given!r}: the setting {known} takes {accepted(fields[known])}.")
    return " ".join(sentences)
