# SPDX-License-Identifier: Apache-2.0
"""Canonical names of operators and parameters, and the way back to ATen's names.

`linalg_norm` is `linalg.norm`, `special_erf` is `special.erf`, `_softmax` is `internal.softmax`; a name that Python or
this package already uses gets a trailing underscore: parameter `from` is `from_`. Both maps are exact inverses.
"""

from __future__ import annotations

import difflib
import keyword
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterable


SUBMODULES = ("fft", "internal", "linalg", "special")

PUBLIC_NAMES = frozenset(
    {
        "errors",
        "load",
        "metadata",
        "op_names",
        "pin",
        "prepare_out",
        "register_slot",
        "slots",
        "testing",
        "unregister_slot",
        "use_slot",
    }
)
"""What `magi_opschema.aten` itself defines; an operator of the same name gets a trailing underscore."""

_RESERVED = PUBLIC_NAMES | frozenset(SUBMODULES)


def python_name(name: str) -> str:
    """*name*, with an underscore appended if Python does not allow it: `from` is `from_`."""
    return f"{name}_" if keyword.iskeyword(name.rstrip("_")) else name


def schema_name(name: str) -> str:
    """The inverse of `python_name`."""
    return name[:-1] if name.endswith("_") and keyword.iskeyword(name.rstrip("_")) else name


def split_base(base: str) -> tuple[str | None, str]:
    """The submodule and the name in it: `linalg_norm` is `("linalg", "norm")`, `add` is `(None, "add")`."""
    if base.startswith("_"):
        return "internal", _safe(base[1:], reserved=frozenset())
    prefix, _, rest = base.partition("_")
    if prefix in SUBMODULES and rest:
        return prefix, _safe(rest, reserved=frozenset())
    return None, _safe(base, reserved=_RESERVED)


def canonical_name(base: str) -> str:
    """The name under `magi_opschema.aten`: `linalg_norm` is `linalg.norm`."""
    submodule, name = split_base(base)
    return name if submodule is None else f"{submodule}.{name}"


def base_name(canonical: str) -> str:
    """The ATen name of a canonical one, the inverse of `canonical_name`."""
    submodule, _, name = canonical.rpartition(".")
    if not submodule:
        return _unsafe(name, reserved=_RESERVED)
    name = _unsafe(name, reserved=frozenset())
    return f"_{name}" if submodule == "internal" else f"{submodule}_{name}"


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'softmax'?"`, or an empty string if no known name is close."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _safe(name: str, reserved: frozenset[str]) -> str:
    stem = name.rstrip("_")
    return f"{name}_" if keyword.iskeyword(stem) or stem in reserved else name


def _unsafe(name: str, reserved: frozenset[str]) -> str:
    stem = name.rstrip("_")
    return name[:-1] if name.endswith("_") and (keyword.iskeyword(stem) or stem in reserved) else name
