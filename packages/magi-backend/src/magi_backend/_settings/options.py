# SPDX-License-Identifier: Apache-2.0
"""The arguments of one call of the backend, split into our settings and Inductor's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args

from magi_backend import _torch_compat
from magi_backend.errors import OptionError

from .config import CompileConfig, ConfigPatch, Mode, field_names


_PREFIX = "magi."


@dataclass(frozen=True)
class Request:
    """The request of a user for one compilation.

    Attributes:
        config: Our settings.
        inductor: Inductor's configuration keys: those of the mode, then those that the user gave.
        explicit: The keys among them that the user gave by name.
        label: A name for the report and the progress line; empty if there is none.
    """

    config: CompileConfig
    inductor: Mapping[str, Any]
    explicit: frozenset[str] = frozenset()
    label: str = ""


def read_request(
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    config_patch: ConfigPatch | None = None,
    label: str = "",
) -> Request:
    """Check the arguments of ``torch.compile``, and split them into our settings and Inductor's configuration.

    Args:
        mode: As in ``torch.compile(mode=...)``.
        options: ``magi.*`` settings and keys of ``torch._inductor.config``.
        config_patch: As for ``magi_compile``. The options take precedence over it, and it over the environment.
        label: A name for the report.

    Raises:
        OptionError: An unknown key, a value of the wrong type, or a mode given twice with different values.
        ConfigError: A malformed environment variable or ``config_patch``.
    """
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
            msg = f"mode={mode!r} is not a mode of the magi backend. Choose one of: {', '.join(modes)}"
            raise OptionError(msg)
        if mode != other:
            msg = f'mode={mode!r} and options={{"magi.mode": {other!r}}} contradict each other. Give one of them.'
            raise OptionError(msg)
        ours["mode"] = mode
    config = CompileConfig.resolve(config_patch=config_patch)
    config = config.replace(ours, origin="options") if ours else config
    patches = {} if config.mode == "default" else _torch_compat.compiling.mode_options(config.mode)
    return Request(config, patches | inductor, frozenset(inductor), label)


def _check_inductor_options(values: Mapping[str, object]) -> None:
    known = _torch_compat.compiling.inductor_keys() if values else []
    for key, value in values.items():
        if key not in known:
            ours = [_PREFIX + field for field in field_names()]
            close = get_close_matches(key, [*ours, *known], n=3, cutoff=0.5)
            hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
            msg = (
                f"Unknown option {key!r} for the magi backend.{hint} Its own options are {', '.join(ours)}; "
                "every key of torch._inductor.config is accepted too (torch._inductor.list_options() lists them)."
            )
            raise OptionError(msg)
        kind = _torch_compat.compiling.inductor_type(key)
        if kind is not None and not isinstance(value, (int, float) if kind is float else kind):
            msg = (
                f"The option {key} = {value!r} is a {type(value).__name__}; torch._inductor.config.{key} takes "
                f"{'True or False' if kind is bool else f'a value of type {kind.__name__}'}."
            )
            raise OptionError(msg)
