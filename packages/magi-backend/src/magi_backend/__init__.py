# SPDX-License-Identifier: Apache-2.0
"""The ``torch.compile`` backend ``magi``, which composes magi-opschema, magi-tritonwrap and magi-passes.

Names are loaded when they are used: PyTorch loads the backend's entry point before it knows whether it will compile.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from ._ahead import aot_compile as aot_compile
    from ._backend import magi as magi
    from ._hot.background import wait as wait
    from ._magi_compile import magi_compile as magi_compile
    from ._register import magi_register_custom_op as magi_register_custom_op
    from ._report.explain import Report as Report
    from ._report.explain import explain as explain
    from ._report.run import Comparison as Comparison
    from ._report.run import RunReport as RunReport
    from ._report.run import read_report as read_report
    from ._settings import CompileConfig as CompileConfig
    from ._settings import MagiOptions as MagiOptions
    from ._settings import PassConfig as PassConfig
    from ._warm import WarmStart as WarmStart
    from ._warm import load as load
    from ._warm import save as save
    from .errors import BackendError as BackendError
    from .errors import MismatchError as MismatchError

_NAMES = {
    "_ahead": ("aot_compile",),
    "_backend": ("magi",),
    "_hot.background": ("wait",),
    "_magi_compile": ("magi_compile",),
    "_register": ("magi_register_custom_op",),
    "_report.explain": ("Report", "explain"),
    "_report.run": ("Comparison", "RunReport", "read_report"),
    "_settings": ("CompileConfig", "MagiOptions", "PassConfig"),
    "_warm": ("WarmStart", "load", "save"),
    "errors": ("BackendError", "MismatchError"),
}
_HOMES = dict(sorted((name, home) for home, names in _NAMES.items() for name in names))

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
