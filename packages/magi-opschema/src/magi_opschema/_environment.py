# SPDX-License-Identifier: Apache-2.0
"""The environment variables of magi-opschema: their names, and what they may be set to."""

from __future__ import annotations

import os
from pathlib import Path

from ._text import nearest
from .errors import EnvironmentVariableError


CHECK = "MAGI_OPSCHEMA_CHECK"
DUMP = "MAGI_OPSCHEMA_DUMP"
CACHE_DIR = "MAGI_OPSCHEMA_CACHE_DIR"
IMPLEMENTATIONS = "MAGI_OPSCHEMA_IMPLEMENTATIONS"

_VARIABLES = {
    CHECK: "1 checks every call of an op",
    DUMP: "a folder for generated code",
    CACHE_DIR: "a folder for the ATen surface",
    IMPLEMENTATIONS: "which body ops run, namespace::op=implementation with commas between",
}

_checked = {"number": -1}
"""The number of variables when the names were last checked, because reading all takes a tenth of a decoration."""


def refuse_unknown_variables() -> None:
    """Raise an EnvironmentVariableError for an unknown variable with this package's prefix.

    Names are checked again when their number changes.
    """
    if len(os.environ) == _checked["number"]:
        return
    for name in os.environ:
        if name.startswith("MAGI_OPSCHEMA_") and name not in _VARIABLES:
            known = "; ".join(f"{variable}: {meaning}" for variable, meaning in _VARIABLES.items())
            text = f"the environment variable {name} is not a setting of magi-opschema.{nearest(name, _VARIABLES)}"
            raise EnvironmentVariableError(f"{text} Choose one of these ({known}), or unset it.")
    _checked["number"] = len(os.environ)


def is_set(name: str) -> bool:
    """Whether a variable that is a switch is on.

    Raises:
        EnvironmentVariableError: its value is neither 0 nor 1.
    """
    text = os.environ.get(name, "")
    if text not in {"", "0", "1"}:
        raise EnvironmentVariableError(f"{name}={text!r} is neither on nor off. Set it to 1 or 0, or unset it.")
    return text == "1"


def folder(name: str) -> Path | None:
    """The folder that a variable names; None if it is not set."""
    text = os.environ.get(name)
    return Path(text).absolute() if text else None
