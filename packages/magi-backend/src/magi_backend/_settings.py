# SPDX-License-Identifier: Apache-2.0
"""Settings of the backend, each with the place that it came from, and the arguments of one call of the backend.

A setting has one name in three spellings: the field ``pass_config.max_tiles``, the option
``magi.pass_config.max_tiles``, and the environment variable ``MAGI_COMPILE_PASS_CONFIG__MAX_TILES``. If several give a
value, the options take precedence over ``config_patch``, that over the environment, and that over the default. The
command line is never read.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, cast, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo

from . import _torch_compat
from .errors import ConfigError, OptionError, did_you_mean


Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _names(value: object) -> object:
    """*value*, which may be text such as ``"ns::a, ns::b"`` from an environment variable, as a tuple of names."""
    return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else _tuple(value)


_SWITCH = {"true": True, "1": True, "false": False, "0": False}
_Number = Annotated[int, Field(ge=0, strict=True)]
_Sizes = Mapping[str, _Number | Annotated[tuple[_Number, ...], BeforeValidator(_tuple)]]
_SizeSets = Annotated[
    tuple[Annotated[_Sizes, Field(min_length=1)], ...],
    Field(description="a sequence of dicts of input to shape or number, such as ({'x': (1, 16, 68, 120)},), or JSON"),
    BeforeValidator(lambda value: _tuple(json.loads(value) if isinstance(value, str) else value)),
]
_Bucket = Annotated[int, Field(ge=1, strict=True)]
_Ascending = Annotated[
    tuple[_Bucket, ...],
    Field(min_length=1),
    BeforeValidator(_tuple),
    AfterValidator(lambda sizes: tuple(sorted({*sizes}))),
]
_Buckets = Annotated[
    Mapping[str, Annotated[Mapping[int, _Ascending], Field(min_length=1)]],
    Field(description="a dict of input to dimension to sizes, such as {'input_ids': {1: (128, 256)}}, or JSON"),
    BeforeValidator(lambda value: json.loads(value) if isinstance(value, str) else value),
]
_OpNames = Annotated[
    tuple[str, ...],
    Field(description="operator names such as 'ns::op', a list or comma-separated"),
    BeforeValidator(_names),
]

_Regions = Annotated[
    bool | tuple[str, ...],
    Field(description="True, False, or names of module classes, a list or comma-separated"),
    BeforeValidator(lambda value: _SWITCH.get(value.lower() if isinstance(value, str) else "", _names(value))),
]


def _setting(default: Any, scope: str = "a compilation", torch: str = "2.10 and newer", **bounds: Any) -> Any:
    """A field, and for the page on settings what one value of it holds for, and the releases of torch that heed it."""
    return Field(default=default, json_schema_extra={"scope": scope, "torch": torch}, **bounds)


_WITH_SYMBOLS = "a captured graph with symbolic sizes"
_PREFIX = "magi."


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

    enable_nd_tiling_workaround: bool = _setting(True, torch="2.10; later releases need no workaround")
    enable_conv_layout: bool = _setting(True)
    enable_temporal_conv: bool = _setting(True)
    max_tiles: int = _setting(3, ge=2, le=3)

    if not TYPE_CHECKING:  # type checkers know the fields

        def __init__(self, **values: Any) -> None:
            _checked(_flat({"pass_config": values}), "")
            super().__init__(**values)


class CompileConfig(BaseModel):
    """All settings of one compilation. ``print(config)`` shows each value and where it came from.

    Attributes:
        mode: The ``mode`` of ``torch.compile``, which does not accept ``mode=`` together with ``options=``.
        check: Compare the first call of each compiled piece with eager, forward and backward.
        tune: Measure the settings that could suit a graph and keep the fastest.
        tune_seconds: How long ``tune`` may take for each graph, in seconds; None sets no end. The candidates that are
            expected to be fastest come first, and what would not be compiled in the time that is left is not tried.
        progress: Show what is being compiled, and how long it may still take by what earlier compilations took, on a
            terminal only.
        boundary_ops: Names of operators at which a graph is split, besides those registered as subgraph boundaries.
        regions: Compile blocks that repeat in a model, such as the layers of a Llama, once and call that code for each.
            True does it where nothing is lost by it, names of their classes do it for these alone, in any case.
        memory_budget: Share of the activations, from 0 to 1, that a training graph may save; the rest is recomputed.
            None leaves the choice to torch, which saves what its partitioner finds cheapest.
        compile_sizes: Sizes for which a graph with symbols gets code of its own at its first call. Each is a dict from
            an input to its shape, or to a number if the input is an int, such as ``{"x": (1, 16, 5, 68, 120)}``. In the
            environment it is JSON.
        hot_sizes: How many sizes that came back may have code of their own at a time, for each graph; 0 turns this off.
            One that has saved less is dropped for one that would save more.
        hot_after: The number of the call with the same sizes, counted from 1, from which on that code may be made.
        hot_in_background: Make that code on another thread, while calls run the code for any size. With several ranks
            it always is.
        graphs: How many CUDA graphs a captured graph may have at a time, each recorded for one size, and its backward
            as many; other sizes run without. 0 leaves it to ``triton.cudagraphs``, which records every size.
        buckets: Sizes to which a dimension of an input is padded, such as ``{"input_ids": {1: (128, 256)}}``; the
            outputs are cut back. Larger sizes run as they are. A graph that mixes the rows of that dimension is an
            error. In the environment it is JSON.
        first_call: What answers the first call of a captured graph: ``"compiled"`` code, for which the call waits, or
            ``"eager"`` until that code is made on another thread.
        report: A folder in which each compilation is recorded while it happens, for ``magi report FOLDER``.
        profile: Measure the kernels of each graph in a few of its first calls, for the report; without CUDA graphs.
        strict: Raise where compiling a graph fails, although it might succeed without our passes, options and repairs.
            By default it is compiled once more without them, with a warning.
        on_unsupported: What to do with an operator whose Triton kernels or launches no graph can carry: ``"opaque"``
            keeps the operator opaque, with a warning; ``"error"`` raises. If such a kernel is found in the source, this
            is decided at decoration, where only the environment counts.
        pass_config: Which graph passes may run.

    A variable in the environment that starts with ``MAGI_COMPILE_`` and names no field, or is near to one that does, is
    not read, and a warning says so once.

    Raises:
        ConfigError: A value, for example from the environment, that its field does not accept; or an unknown name.

    Example:
        >>> CompileConfig(check=True).check
        True
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    mode: Mode = _setting("default")
    check: bool = _setting(False, "each compiled piece, at its first call")
    tune: bool = _setting(False, "each graph with convolutions")
    tune_seconds: float | None = _setting(None, "each graph with convolutions that is tuned", gt=0.0)
    progress: bool = _setting(True, "a process, which shows one line")
    boundary_ops: _OpNames = _setting(())
    regions: _Regions = _setting(True, "a captured graph")
    memory_budget: float | None = _setting(None, "each training graph", ge=0.0, le=1.0)
    compile_sizes: _SizeSets = _setting((), _WITH_SYMBOLS)
    hot_sizes: int = _setting(0, _WITH_SYMBOLS, ge=0)
    hot_after: int = _setting(3, _WITH_SYMBOLS, ge=1)
    hot_in_background: bool = _setting(False, _WITH_SYMBOLS)
    graphs: int = _setting(0, "each captured graph", ge=0)
    buckets: _Buckets = _setting({}, _WITH_SYMBOLS)
    first_call: Literal["compiled", "eager"] = _setting("compiled", "each captured graph")
    report: str | None = _setting(None, "a process; several may share a folder")
    profile: bool = _setting(False, "each compiled graph")
    strict: bool = _setting(False, "each compiled graph")
    on_unsupported: Literal["error", "opaque"] = _setting("opaque", "a compilation, or a process at decoration")
    pass_config: PassConfig = Field(default_factory=PassConfig)

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, **values: Any) -> None:
        given = _checked(_flat(values), "")
        names = _variables()
        if unread := unread_variables():
            found = "; ".join(key + (f" (did you mean {near}?)" if near else "") for key, near in unread.items())
            _warn_once(f"The magi backend reads no setting from {found}. The variables are: {', '.join(names)}")
        texts = {names[key.upper()]: text for key, text in os.environ.items() if key.upper() in names}
        environment = {name: text for name, text in texts.items() if name not in given}
        super().__init__(**_nested(_checked(environment, "environment") | given))
        self._origins |= {name: f"environment {variable(name)}" for name in environment}
        self._origins |= dict.fromkeys(given, "argument")

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
        config = cls()
        if config_patch is not None:
            patch: object = config_patch(config) if callable(config_patch) else config_patch
            if isinstance(patch, CompileConfig):
                pairs = zip(patch.items(), config.items(), strict=True)
                patch = {name: value for (name, value), (_, old) in pairs if value != old}
            elif not isinstance(patch, Mapping):
                raise ConfigError(f"config_patch gave a {type(patch).__name__}. {_VALUES}")
            config = config.replace(patch, origin="config_patch")
        return config.replace(options, origin="options") if options else config

    def replace(self, values: Mapping[str, object], *, origin: str = "argument") -> CompileConfig:
        """A copy with *values*, by dotted name, each checked strictly: ``"yes"`` is not a bool here.

        Raises:
            ConfigError: An unknown name, or a value of the wrong type.
        """
        given: object = values
        if not isinstance(given, Mapping):
            raise ConfigError(f"{origin} = {given!r} is a {type(given).__name__}. {_VALUES}")
        changed = type(self)(**_nested(dict(self.items()) | _checked(given, origin)))
        changed._origins = self._origins | dict.fromkeys(given, origin)  # noqa: SLF001 - of the same class
        return changed

    def items(self) -> Iterator[tuple[str, object]]:
        """Each setting's dotted name and value, in the order of the fields."""
        yield from _flat(dict(self)).items()

    def origin(self, name: str) -> str:
        """Where the value of the setting *name* came from: "default", "environment VARIABLE", "options", ….

        Raises:
            ConfigError: There is no such setting.
        """
        if name not in fields():
            raise ConfigError(_unknown_name(name))
        return self._origins.get(name, "default")

    def __str__(self) -> str:
        rows = [(name, repr(value), self.origin(name)) for name, value in self.items()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows)


MagiOptions = TypedDict(
    "MagiOptions",
    {
        "magi.mode": Mode,
        "magi.check": bool,
        "magi.tune": bool,
        "magi.tune_seconds": float | None,
        "magi.progress": bool,
        "magi.boundary_ops": Sequence[str],
        "magi.regions": bool | str | Sequence[str],
        "magi.memory_budget": float | None,
        "magi.compile_sizes": Sequence[Mapping[str, int | Sequence[int]]],
        "magi.hot_sizes": int,
        "magi.hot_after": int,
        "magi.hot_in_background": bool,
        "magi.graphs": int,
        "magi.buckets": Mapping[str, Mapping[int, Sequence[int]]],
        "magi.first_call": Literal["compiled", "eager"],
        "magi.report": str | None,
        "magi.profile": bool,
        "magi.strict": bool,
        "magi.on_unsupported": Literal["error", "opaque"],
        "magi.pass_config.enable_nd_tiling_workaround": bool,
        "magi.pass_config.enable_conv_layout": bool,
        "magi.pass_config.enable_temporal_conv": bool,
        "magi.pass_config.max_tiles": int,
    },
    total=False,
)
"""The options of this backend by name, for editors and type checkers; ``options=`` takes Inductor's keys besides."""

ConfigPatch = Mapping[str, object] | Callable[[CompileConfig], "CompileConfig | Mapping[str, object]"]

_VALUES = (
    "It is a dict of dotted names such as {'check': True}, or a function of the settings so far that returns such a "
    "dict or a CompileConfig, for example config.replace({'check': True})."
)


@functools.cache
def fields() -> dict[str, tuple[FieldInfo, TypeAdapter[object]]]:
    """Each setting by its dotted name, with what checks a value of it."""
    found: dict[str, FieldInfo] = {}
    for name, field in CompileConfig.model_fields.items():
        groups = PassConfig.model_fields.items() if field.annotation is PassConfig else ()
        found |= {f"{name}.{inner}": info for inner, info in groups} or {name: field}
    kinds: dict[str, Any] = {name: Annotated[field.annotation, field] for name, field in found.items()}
    return {name: (found[name], TypeAdapter(kind)) for name, kind in kinds.items()}


def variable(name: str) -> str:
    """The environment variable of the setting *name*."""
    return "MAGI_COMPILE_" + name.replace(".", "__").upper()


@functools.cache
def _variables() -> dict[str, str]:
    """The setting of each environment variable."""
    return {variable(name): name for name in fields()}


def described(name: str) -> dict[str, str]:
    """What a user may want to know of the setting *name*, for the page on settings and the command line.

    Raises:
        ConfigError: There is no such setting.
    """
    if name not in fields():
        raise ConfigError(_unknown_name(name))
    field, (group, _, inner) = fields()[name][0], name.rpartition(".")
    documented = inspect.getdoc(PassConfig if group else CompileConfig) or ""
    found = re.search(rf"^    {inner}: (.*(?:\n        .*)*)", documented, re.MULTILINE)
    extra = cast("dict[str, str]", field.json_schema_extra)
    return {
        "does": " ".join(found[1].split()) if found else "",
        "option": _PREFIX + name,
        "variable": variable(name),
        "takes": _accepted(field),
        "default": repr(field.default),
        "holds for": extra["scope"],
        "torch": extra["torch"],
    }


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def unread_variables() -> dict[str, str]:
    """The environment variables that look like one of ours and are none, each with the nearest one, or empty text."""
    known, unread = _variables(), dict[str, str]()
    for key in map(str.upper, os.environ):
        if key.startswith("MAGI_COMPILE_") and key not in known:
            whole = key.removeprefix("MAGI_").lower()  # MAGI_COMPILE_SIZES lacks one of two COMPILE_
            name = whole if whole in fields() else nearest(key.removeprefix("MAGI_COMPILE_"))
            unread[key] = variable(name) if name else ""
        elif key.startswith("MAGI") and key not in known:
            # Other programs have such variables too, so a name must be very near, and MAGI_MODEL is not near enough.
            asked = f"MAGI_COMPILE_{key.removeprefix('MAGI_')}"
            close = get_close_matches(key, known, 1, 0.93) or get_close_matches(asked, known, 1, 0.93)
            if close and (asked == close[0] or not asked.startswith(close[0])):
                unread[key] = close[0]
    return unread


def nearest(name: str) -> str:
    """The setting that *name*, in any of the three spellings, is nearest to; empty if it is near to none."""
    spelt = name.lower().replace("-", "_").replace("__", ".").removeprefix(_PREFIX)
    inner = {known.rpartition(".")[2]: known for known in fields()}
    if close := get_close_matches(spelt.rpartition(".")[2], inner, n=1, cutoff=0.75):
        return inner[close[0]]
    return next(iter(get_close_matches(spelt, fields(), n=1)), "")


def _nested(values: Mapping[str, object]) -> dict[str, Any]:
    """``{"pass_config.max_tiles": 2}`` as ``{"pass_config": {"max_tiles": 2}}``."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        group, _, inner = name.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[inner] = value
    return nested


def _flat(values: Mapping[str, object]) -> dict[str, object]:
    """``{"pass_config": {"max_tiles": 2}}`` as ``{"pass_config.max_tiles": 2}``."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        inner = dict(value) if isinstance(value, PassConfig) else value
        if name == "pass_config" and isinstance(inner, Mapping):
            flat |= {f"{name}.{key}": item for key, item in inner.items()}
        else:
            flat[name] = value
    return flat


def _checked(values: Mapping[str, object], origin: str) -> dict[str, object]:
    """*values*, by dotted name, as the settings hold them; those from the environment are text.

    The error says of every bad value what it is, where it came from (*origin*), and what its setting takes.
    """
    found, bad, cause = {}, [], None
    prefix = _PREFIX if origin == "options" else ""
    for name, value in values.items():
        if name not in fields():
            is_group = name == "pass_config" and not origin
            takes = "a PassConfig or a dict such as {'max_tiles': 2}"
            wrong = f"{name} = {value!r}: the settings {name} take {takes}."
            bad.append(wrong if is_group else _unknown_name(name, prefix))
            continue
        field, adapter = fields()[name]
        try:
            found[name] = adapter.validate_python(value, strict=None if origin == "environment" else True)
        except ValidationError as error:
            cause = error
            takes = f"takes {_accepted(field)}.{_nearest_choice(value, _choices(field.annotation))}"
            if origin in {"", "environment"}:
                where = f"The environment variable {variable(name)}" if origin else name
                bad.append(f"{where} = {value!r}: the setting {name} {takes}")
            else:
                given = f"{prefix}{name} = {value!r} (a {type(value).__name__}, from {origin})"
                bad.append(f"{given}: the setting {takes}")
    if bad:
        raise (OptionError if origin == "options" else ConfigError)(" ".join(bad)) from cause
    return found


def _unknown_name(name: object, prefix: str = "") -> str:
    valid = [prefix + known for known in fields()]
    if not isinstance(name, str):
        return f"{name!r} (a {type(name).__name__}) is not the name of a setting. Names are such as {valid[0]!r}."
    hint = did_you_mean(prefix + close for close in [nearest(name)] if close)
    return f"{prefix + name!r} is not a setting of the magi backend.{hint} The settings are: {', '.join(valid)}"


def _choices(kind: object) -> tuple[str, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _nearest_choice(given: object, choices: Sequence[str]) -> str:
    return did_you_mean(get_close_matches(given.lower(), choices, n=1)) if isinstance(given, str) else ""


def _accepted(field: FieldInfo) -> str:
    """What *field* accepts, in words."""
    kind = field.annotation
    if field.description or kind is bool:
        return field.description or "True or False"
    if choices := _choices(kind):
        return "one of " + ", ".join(map(repr, choices))
    bounds = "".join(
        f" {word} {getattr(part, attribute):g}"
        for attribute, word in (("ge", "from"), ("le", "to"))
        for part in field.metadata
        if hasattr(part, attribute)
    )
    kinds = get_args(kind) or (kind,)
    return " or ".join("None" if each is type(None) else f"{each.__name__}{bounds}" for each in kinds)


@dataclass(frozen=True)
class Request:
    """The request of a user for one compilation; *label* is a name for the report and the progress line, or empty."""

    config: CompileConfig
    inductor: Mapping[str, Any]
    """Inductor's configuration keys: those of the mode, then those that the user gave."""
    label: str = ""


def read_request(
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    config_patch: ConfigPatch | None = None,
    label: str = "",
) -> Request:
    """The arguments of ``torch.compile`` and ``magi_compile``, checked, and split into our settings and Inductor's."""
    ours: dict[str, object] = {}
    inductor: dict[str, Any] = {}
    given: object = {} if options is None else options
    if not isinstance(given, Mapping):
        msg = f"options={options!r} is a {type(options).__name__}. It is a dict such as {{'magi.check': True}}."
        raise OptionError(msg)
    for key, value in given.items():
        if not isinstance(key, str):
            msg = f"The option {key!r} is a {type(key).__name__}; options have names, such as 'magi.check'."
            raise OptionError(msg)
        if key.startswith(_PREFIX):
            ours[key.removeprefix(_PREFIX)] = value
        else:
            inductor[key.replace("-", "_")] = value  # torch.compile accepts dashes too
    _check_inductor_options(inductor)
    if mode is not None:
        modes, other = get_args(Mode), ours.get("mode", mode)
        if mode not in modes:
            hint = _nearest_choice(mode, modes)
            msg = f"mode={mode!r} is not a mode of the magi backend.{hint} Choose one of: {', '.join(modes)}"
            raise OptionError(msg)
        if mode != other:
            msg = f'mode={mode!r} and options={{"magi.mode": {other!r}}} contradict each other. Give one of them.'
            raise OptionError(msg)
        ours["mode"] = mode
    config = CompileConfig.resolve(config_patch=config_patch)
    config = config.replace(ours, origin="options") if ours else config
    patches = {} if config.mode == "default" else _torch_compat.compiling.mode_options(config.mode)
    return Request(config, patches | inductor, label)


def _check_inductor_options(values: Mapping[str, object]) -> None:
    known = _torch_compat.compiling.inductor_keys() if values else []
    for key, value in values.items():
        if key not in known:
            ours = [_PREFIX + field for field in fields()]
            near = [_PREFIX + meant] if (meant := nearest(key)) else []
            near += get_close_matches(key, known, n=3 - len(near), cutoff=0.5)
            hint = did_you_mean(near)
            raise OptionError(
                f"Unknown option {key!r} for the magi backend.{hint} Its own options are {', '.join(ours)}; "
                "every key of torch._inductor.config is accepted too (torch._inductor.list_options() lists them)."
            )
        kind = _torch_compat.compiling.inductor_type(key)
        if kind is not None and not isinstance(value, (int, float) if kind is float else kind):
            raise OptionError(
                f"The option {key} = {value!r} is a {type(value).__name__}; torch._inductor.config.{key} takes "
                f"{'True or False' if kind is bool else f'a value of type {kind.__name__}'}."
            )
