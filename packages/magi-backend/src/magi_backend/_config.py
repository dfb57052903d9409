# SPDX-License-Identifier: Apache-2.0
"""Settings of the backend, each with the place that it came from.

A setting has one name in three spellings: the field ``pass_config.max_tiles``, the option
``magi.pass_config.max_tiles``, and the environment variable ``MAGI_COMPILE_PASS_CONFIG__MAX_TILES``. Where several
give a value, the options win over ``config_patch``, that over the environment, and that over the default. The command
line is never read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, TypeAdapter, ValidationError
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from .errors import ConfigError


if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


__all__ = ["CompileConfig", "ConfigPatch", "Mode", "PassConfig"]

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

ENV_PREFIX = "MAGI_COMPILE_"
_NESTING = "__"


def _names(value: object) -> object:
    """``"ns::a, ns::b"``, as an environment variable gives it, as a tuple of names."""
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    return tuple(value) if isinstance(value, list) else value


_OpNames = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)]


class PassConfig(BaseModel):
    """Which of the graph passes may run. A pass that is switched off here is never used, by tuning neither.

    Attributes:
        enable_nd_tiling_workaround: Tile Triton kernels of convolution-heavy dynamic graphs in more than one dimension.
        enable_conv_layout: Keep convolutions channels-last where a symbolic shape makes Inductor give that up.
        enable_temporal_conv: Write 3D convolutions with few time taps as one 2D convolution.
        max_tiles: How many tile dimensions the tiling pass may ask for.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    enable_nd_tiling_workaround: bool = True
    enable_conv_layout: bool = True
    enable_temporal_conv: bool = True
    max_tiles: int = Field(default=3, ge=2, le=3)


class CompileConfig(BaseSettings):
    """All settings of one compilation. ``print(config)`` shows each value and where it came from.

    Attributes:
        mode: As ``mode=`` of ``torch.compile``, which refuses ``mode`` together with ``options``.
        check: Compare the first call of each compiled piece with eager, forward and backward.
        tune: Measure the settings that could suit a graph and keep the fastest.
        progress: Show what is being compiled, on a terminal only.
        boundary_ops: Names of operators at which a graph is split, beside those registered as subgraph boundaries.
        memory_budget: Share of the activations, from 0 to 1, that a training graph may save; the rest is recomputed.
            None leaves the choice to torch, which saves what its partitioner deems cheapest.
        pass_config: Which graph passes may run.

    Raises:
        ConfigError: A value, for example from the environment, that its field does not accept; or a variable that
            starts with ``MAGI_COMPILE_`` and names no field.

    Example:
        >>> CompileConfig(check=True).check
        True
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter=_NESTING, extra="forbid", frozen=True, validate_default=False
    )

    mode: Mode = "default"
    check: bool = False
    tune: bool = False
    progress: bool = True
    boundary_ops: _OpNames = ()
    memory_budget: float | None = Field(default=None, ge=0.0, le=1.0)
    pass_config: PassConfig = PassConfig()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, origins: Mapping[str, str] | None = None, /, **values: Any) -> None:
        _refuse_unknown_variables()
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error, values)) from error
        self._origins = dict(origins or {}) or {
            name: "argument" if _has(values, name) else _environment_origin(name) for name in field_names()
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
        del settings_cls, dotenv_settings, file_secret_settings
        return init_settings, env_settings

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
        """A copy with *values*, by dotted name, each checked strictly: ``"yes"`` is no bool here.

        Raises:
            ConfigError: An unknown name, or a value of the wrong type.
        """
        for name, value in values.items():
            _check_value(name, value, origin)
        merged = dict(self.items()) | dict(values)
        return type(self)(self._origins | dict.fromkeys(values, origin), **_nest(merged))

    def items(self) -> Iterator[tuple[str, object]]:
        """Each setting's dotted name and value, in the order of the fields."""
        for name in field_names():
            value: object = self
            for part in name.split("."):
                value = getattr(value, part)
            yield name, value

    def origin(self, name: str) -> str:
        """Where the value of the setting *name* came from: "default", "environment VARIABLE", "options", …."""
        return self._origins[name]

    def __str__(self) -> str:
        rows = [(name, repr(value), self.origin(name)) for name, value in self.items()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows)


ConfigPatch = Mapping[str, object] | Callable[[CompileConfig], "CompileConfig | Mapping[str, object]"]


def field_names() -> tuple[str, ...]:
    """The dotted names of all settings."""
    return tuple(_fields())


def variable(name: str) -> str:
    """The environment variable of the setting *name*."""
    return ENV_PREFIX + name.replace(".", _NESTING).upper()


def unknown_name(name: str, valid: tuple[str, ...], *, prefix: str = "") -> str:
    """The sentence for a name that no setting has."""
    close = get_close_matches(name, valid, n=1)
    hint = f" Did you mean {prefix + close[0]!r}?" if close else ""
    return f"{prefix + name!r} is no setting of the magi backend.{hint} There are: " + ", ".join(
        prefix + known for known in valid
    )


def _fields() -> dict[str, FieldInfo]:
    fields: dict[str, FieldInfo] = {}
    for name, field in CompileConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            fields |= {f"{name}.{inner}": info for inner, info in field.annotation.model_fields.items()}
        else:
            fields[name] = field
    return fields


def _nest(values: Mapping[str, object]) -> dict[str, Any]:
    """``{"pass_config.max_tiles": 2}`` as ``{"pass_config": {"max_tiles": 2}}``."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return nested


def _has(values: Mapping[str, Any], name: str) -> bool:
    """Whether the nested *values* give the setting *name*."""
    first, _, rest = name.partition(".")
    if first not in values:
        return False
    inner = values[first]
    if isinstance(inner, BaseModel):
        inner = dict.fromkeys(inner.model_fields_set)
    return not rest or _has(inner, rest)


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
            msg = f"The environment variable {key} names no setting of the magi backend.{hint} There are: {known}"
            raise ConfigError(msg)


def _patch_values(base: CompileConfig, patch: ConfigPatch) -> Mapping[str, object]:
    result: object = patch(base) if callable(patch) else patch
    if isinstance(result, CompileConfig):
        return {
            name: value for (name, value), (_, old) in zip(result.items(), base.items(), strict=True) if value != old
        }
    if isinstance(result, Mapping):
        return result
    msg = (
        f"config_patch gave a {type(result).__name__}. It is a dict of dotted names such as {{'check': True}}, or a "
        "function of the settings so far that returns such a dict or a CompileConfig, for example "
        "config.replace({'check': True})."
    )
    raise ConfigError(msg)


def _check_value(name: str, value: object, origin: str) -> None:
    prefix = "magi." if origin == "options" else ""
    fields = _fields()
    if name not in fields:
        raise ConfigError(unknown_name(name, tuple(fields), prefix=prefix))
    field = fields[name]
    adapter = TypeAdapter[object](Annotated[field.annotation, field])  # type: ignore[arg-type]
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError as error:
        msg = (
            f"{prefix}{name} = {value!r} (a {type(value).__name__}, from {origin}): the setting takes {accepted(name)}."
        )
        raise ConfigError(msg) from error


def accepted(name: str) -> str:
    """What the setting *name* accepts, in words."""
    field = _fields()[name]
    annotation = field.annotation
    if annotation == tuple[str, ...]:
        return "operator names such as 'ns::op', a list or comma-separated"
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


def _explain(error: ValidationError, values: Mapping[str, Any]) -> str:
    """Every bad value of a construction: what it was, where it came from, what its field takes."""
    sentences = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"] if str(part) != "function-before")
        known = next((field for field in field_names() if name == field or name.startswith(field + ".")), None)
        if known is None:
            sentences.append(unknown_name(name, field_names()))
            continue
        where = known if _has(values, known) else f"The environment variable {variable(known)}"
        sentences.append(f"{where} = {problem['input']!r}: the setting {known} takes {accepted(known)}.")
    return " ".join(sentences)
