# SPDX-License-Identifier: Apache-2.0
"""Settings of the backend, each with the place that it came from.

A setting has one name in three spellings: the field ``pass_config.max_tiles``, the option
``magi.pass_config.max_tiles``, and the environment variable ``MAGI_COMPILE_PASS_CONFIG__MAX_TILES``. If several give a
value, the options take precedence over ``config_patch``, that over the environment, and that over the default. The
command line is never read.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, TypeAdapter, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

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


def _read(value: object) -> object:
    """*value* as sizes by input, each a shape or a number; it may be JSON from an environment variable."""
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, list | tuple) or not all(isinstance(sizes, Mapping) and sizes for sizes in value):
        msg = "not a sequence of dicts"
        raise ValueError(msg)
    return tuple({name: _shape(shape) for name, shape in sizes.items()} for sizes in value)


def _shape(value: object) -> object:
    return tuple(value) if isinstance(value, list | tuple) else value


_Number = Annotated[int, Field(ge=0, strict=True)]
_Sizes = Mapping[str, _Number | tuple[_Number, ...]]
SizeSets = Annotated[tuple[_Sizes, ...], NoDecode, BeforeValidator(_read)]


__all__ = ["CompileConfig", "ConfigPatch", "Mode", "PassConfig"]

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

ENV_PREFIX = "MAGI_COMPILE_"
_NESTING = "__"


def _names(value: object) -> object:
    """*value*, which may be text such as ``"ns::a, ns::b"`` from an environment variable, as a tuple of names."""
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    return tuple(value) if isinstance(value, list) else value


_OpNames = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)]


class PassConfig(BaseModel):
    """Which of the graph passes may run. A pass that is switched off here is never used, not even by tuning.

    Attributes:
        enable_nd_tiling_workaround: Tile Triton kernels of convolution-heavy dynamic graphs in more than one dimension.
        enable_conv_layout: Keep convolutions channels-last in graphs with symbolic shapes, where Inductor does not.
        enable_temporal_conv: Write 3D convolutions with few time taps as one 2D convolution.
        max_tiles: How many tile dimensions the tiling pass may ask for.

    Raises:
        ConfigError: A value of another type, or out of range; or an unknown name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    enable_nd_tiling_workaround: bool = True
    enable_conv_layout: bool = True
    enable_temporal_conv: bool = True
    max_tiles: int = Field(default=3, ge=2, le=3)

    if not TYPE_CHECKING:  # type checkers know the fields

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ConfigError(_bad_values(error, {"pass_config": values}, "pass_config.")) from error


class CompileConfig(BaseSettings):
    """All settings of one compilation. ``print(config)`` shows each value and where it came from.

    Attributes:
        mode: The ``mode`` of ``torch.compile``, which does not accept ``mode=`` together with ``options=``.
        check: Compare the first call of each compiled piece with eager, forward and backward.
        tune: Measure the settings that could suit a graph and keep the fastest.
        progress: Show what is being compiled, on a terminal only.
        boundary_ops: Names of operators at which a graph is split, besides those registered as subgraph boundaries.
        memory_budget: Share of the activations, from 0 to 1, that a training graph may save; the rest is recomputed.
            None leaves the choice to torch, which saves what its partitioner finds cheapest.
        compile_sizes: Sizes for which a graph with symbols gets code of its own at its first call. Each is a dict from
            an input to its shape, or to a number if the input is an int, such as ``{"x": (1, 16, 5, 68, 120)}``. In the
            environment it is JSON.
        hot_sizes: How many sizes that came back may have code of their own at a time, for each graph; 0 turns this off.
            The least recently used one is dropped first.
        hot_after: The number of the call with the same sizes, counted from 1, at which that code is made.
        report: A folder in which each compilation is recorded while it happens, for
            ``python -m magi_backend report FOLDER``.
        profile: Measure the kernels of each graph in a few of its first calls, for the report; without CUDA graphs.
        strict: Raise where compiling a graph fails, although it might succeed without our passes, options and repairs.
            By default it is compiled once more without them, with a warning.
        on_unsupported: What to do with an operator whose Triton kernels or launches no graph can carry: ``"error"``, or
            ``"opaque"`` to keep the operator opaque with a warning. If such a kernel is found in the source, this is
            decided at decoration, where only the environment counts.
        pass_config: Which graph passes may run.

    Raises:
        ConfigError: A value, for example from the environment, that its field does not accept; or a variable that
            starts with ``MAGI_COMPILE_`` and names no field.

    Example:
        >>> CompileConfig(check=True).check
        True
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=_NESTING,
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=False,
    )

    mode: Mode = "default"
    check: bool = False
    tune: bool = False
    progress: bool = True
    boundary_ops: _OpNames = ()
    memory_budget: float | None = Field(default=None, ge=0.0, le=1.0)
    compile_sizes: SizeSets = ()
    hot_sizes: int = Field(default=0, ge=0)
    hot_after: int = Field(default=3, ge=1)
    report: str | None = None
    profile: bool = False
    strict: bool = False
    on_unsupported: Literal["error", "opaque"] = "error"
    pass_config: PassConfig = PassConfig()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, **values: Any) -> None:
        _refuse_unknown_variables()
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_bad_values(error, values)) from error
        self._origins |= {
            name: "argument" if has_value(values, name) else _environment_origin(name) for name in field_names()
        }

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then the environment; no dotenv files, no secrets, no command line."""
        del env_settings, dotenv_settings, file_secret_settings
        return init_settings, _Environment(settings_cls)

    @classmethod
    def resolve(
        cls, *, config_patch: ConfigPatch | None = None, options: Mapping[str, object] | None = None
    ) -> CompileConfig:
        """The settings of one compilation.

        Args:
            config_patch: Values by dotted name, or a function that gets the settings so far and returns such values
                or another ``CompileConfig``.
            options: Values by dotted name, as in ``options={"magi.check": True}`` without the prefix.

        Returns:
            The settings, with the origin of each value.

        Raises:
            ConfigError: An unknown name, or a value of the wrong type.
        """
        base = cls()
        if config_patch is not None:
            base = base.replace(_patch_values(base, config_patch), origin="config_patch")
        return base.replace(options or {}, origin="options")

    def replace(self, values: Mapping[str, object], *, origin: str = "argument") -> CompileConfig:
        """A copy with *values*, by dotted name, each checked strictly: ``"yes"`` is not a bool here.

        Raises:
            ConfigError: An unknown name, or a value of the wrong type.
        """
        given: object = values
        if not isinstance(given, Mapping):
            msg = f"{origin} = {given!r} is a {type(given).__name__}. {_VALUES}"
            raise ConfigError(msg)
        for name, value in values.items():
            _check_value(name, value, origin)
        changed = type(self)(**nested(dict(self.items()) | dict(values)))
        changed.note_origins(self._origins | dict.fromkeys(values, origin))
        return changed

    def note_origins(self, origins: Mapping[str, str]) -> None:
        """Set where the values of settings came from, by dotted name."""
        self._origins |= origins

    def items(self) -> Iterator[tuple[str, object]]:
        """Each setting's dotted name and value, in the order of the fields."""
        for name in field_names():
            value: object = self
            for part in name.split("."):
                value = getattr(value, part)
            yield name, value

    def origin(self, name: str) -> str:
        """Where the value of the setting *name* came from: "default", "environment VARIABLE", "options", ….

        Raises:
            ConfigError: There is no such setting.
        """
        if name not in self._origins:
            raise ConfigError(unknown_name(name, field_names()))
        return self._origins[name]

    def __str__(self) -> str:
        rows = [(name, repr(value), self.origin(name)) for name, value in self.items()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows)


class _Environment(EnvSettingsSource):
    """The environment variables, converted to the types of their settings if possible, because settings are strict."""

    def __call__(self) -> dict[str, Any]:
        texts: dict[str, Any] = super().__call__()
        values: dict[str, Any] = {}
        for name in field_names():
            first, _, rest = name.partition(".")
            found = texts.get(first, {}).get(rest, _ABSENT) if rest else texts.get(name, _ABSENT)
            if found is not _ABSENT:
                with contextlib.suppress(ValidationError):  # the settings will say what is wrong with the text
                    found = adapter(_fields()[name]).validate_python(found)
                values[name] = found
        return nested(values)


_ABSENT = object()

ConfigPatch = Mapping[str, object] | Callable[[CompileConfig], "CompileConfig | Mapping[str, object]"]


def field_names() -> tuple[str, ...]:
    """The dotted names of all settings."""
    return tuple(_fields())


def variable(name: str) -> str:
    """The environment variable of the setting *name*."""
    return ENV_PREFIX + name.replace(".", _NESTING).upper()


_VALUES = (
    "It is a dict of dotted names such as {'check': True}, or a function of the settings so far that returns such a "
    "dict or a CompileConfig, for example config.replace({'check': True})."
)


def _fields() -> dict[str, FieldInfo]:
    fields: dict[str, FieldInfo] = {}
    for name, field in CompileConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            fields |= {f"{name}.{inner}": info for inner, info in field.annotation.model_fields.items()}
        else:
            fields[name] = field
    return fields


def _environment() -> dict[str, str]:
    return {key.upper(): value for key, value in os.environ.items() if key.upper().startswith(ENV_PREFIX)}


def _environment_origin(name: str) -> str:
    return f"environment {variable(name)}" if variable(name) in _environment() else "default"


def _refuse_unknown_variables() -> None:
    valid = {variable(name): name for name in field_names()}
    for key in _environment():
        if key not in valid:
            close = get_close_matches(key, valid, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            known = ", ".join(valid)
            text = f"The environment variable {key} does not name a setting of the magi backend.{hint}"
            raise ConfigError(f"{text} The variables are: {known}")


def _patch_values(base: CompileConfig, patch: ConfigPatch) -> Mapping[str, object]:
    result: object = patch(base) if callable(patch) else patch
    if isinstance(result, CompileConfig):
        return {
            name: value for (name, value), (_, old) in zip(result.items(), base.items(), strict=True) if value != old
        }
    if isinstance(result, Mapping):
        return result
    msg = f"config_patch gave a {type(result).__name__}. {_VALUES}"
    raise ConfigError(msg)


def _check_value(name: str, value: object, origin: str) -> None:
    prefix = "magi." if origin == "options" else ""
    fields = _fields()
    if name not in fields:
        raise ConfigError(unknown_name(name, tuple(fields), prefix=prefix))
    try:
        adapter(fields[name]).validate_python(value, strict=True)
    except ValidationError as error:
        takes = accepted(fields[name])
        msg = f"{prefix}{name} = {value!r} (a {type(value).__name__}, from {origin}): the setting takes {takes}."
        raise ConfigError(msg) from error


def _bad_values(error: ValidationError, values: Mapping[str, Any], prefix: str = "") -> str:
    return bad_values(error, _fields(), values, lambda name: (variable(name), _environment()[variable(name)]), prefix)
