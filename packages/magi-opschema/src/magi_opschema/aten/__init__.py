# SPDX-License-Identifier: Apache-2.0
"""ATen's out-capable operators under one calling convention, generated from the installed torch.

`magi_opschema.aten.softmax(x, -1)` and `magi_opschema.aten.linalg.norm(x, out=o)` need no earlier step: at the first
use, the surface of the shipped allowlist is generated into a cache folder. Importing this package does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from . import errors as errors
    from ._dispatch.load import load as load
    from ._dispatch.out import prepare_out as prepare_out
    from ._dispatch.slots import pin as pin
    from ._dispatch.slots import register_slot as register_slot
    from ._dispatch.slots import slots as slots
    from ._dispatch.slots import unregister_slot as unregister_slot
    from ._dispatch.slots import use_slot as use_slot
    from ._stubs import *  # noqa: F403  # the names that mypy sees

_MODULES = frozenset({"errors", "fft", "linalg", "special"})

_HOMES = {
    "load": "_dispatch.load",
    "pin": "_dispatch.slots",
    "prepare_out": "_dispatch.out",
    "register_slot": "_dispatch.slots",
    "slots": "_dispatch.slots",
    "unregister_slot": "_dispatch.slots",
    "use_slot": "_dispatch.slots",
}


if not TYPE_CHECKING:  # with it, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name.startswith("_"):
            # Python and its tools look these names up; no operator has such a name, and no surface must be generated
            # for them.
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        value = globals()[name] = importlib.import_module(f"{__name__}._dispatch.load").attribute(name)
        return value


def __dir__() -> list[str]:
    surface = importlib.import_module(f"{__name__}._dispatch.load").default_surface()
    return sorted([*_HOMES, "errors", *surface.__all__])
