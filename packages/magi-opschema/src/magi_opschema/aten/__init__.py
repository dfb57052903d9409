# SPDX-License-Identifier: Apache-2.0
"""ATen's out-capable operators under one calling convention, generated from the installed torch.

`magi_opschema.aten.softmax(x, -1)` and `magi_opschema.aten.linalg.norm(x, out=o)` need no earlier step: at the first
use, the surface of the shipped allowlist is generated into a cache folder. Importing this package does not load torch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import sys
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from . import errors as errors
    from ._dispatch.kernels import prepare_out as prepare_out
    from ._dispatch.slots import load as load
    from ._dispatch.slots import pin as pin
    from ._dispatch.slots import register_slot as register_slot
    from ._dispatch.slots import slots as slots
    from ._dispatch.slots import unregister_slot as unregister_slot
    from ._dispatch.slots import use_slot as use_slot
    from ._stubs import *  # noqa: F403  # the names that mypy sees

_OF_SLOTS = ("load", "pin", "register_slot", "slots", "unregister_slot", "use_slot")
_HOMES = {"prepare_out": "_dispatch.kernels", **dict.fromkeys(_OF_SLOTS, "_dispatch.slots")}


def _attribute(module: dict[str, Any], name: str, submodule: str = "") -> Any:
    """An attribute of the default surface or of its *submodule*, which the namespace *module* keeps."""
    if name.startswith("_") and not (submodule and name == "__all__"):
        # Python and its tools look these names up; no operator has such a name, and no surface must be generated
        # for them.
        raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
    value = module[name] = importlib.import_module(f"{__name__}._dispatch.slots").attribute(name, submodule)
    return value


if not TYPE_CHECKING:  # with it, a type checker would accept any name
    for _name in ("fft", "linalg", "special"):
        _spec = importlib.machinery.ModuleSpec(f"{__name__}.{_name}", None)
        _module = globals()[_name] = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
        _module.__getattr__ = functools.partial(_attribute, vars(_module), submodule=_name)

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        if name == "errors":
            return importlib.import_module(f"{__name__}.errors")
        return _attribute(globals(), name)


def __dir__() -> list[str]:
    surface = importlib.import_module(f"{__name__}._dispatch.slots").default_surface()
    return sorted([*_HOMES, "errors", *surface.__all__])
