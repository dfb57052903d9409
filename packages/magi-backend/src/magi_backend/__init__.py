# SPDX-License-Identifier: Apache-2.0
"""The ``torch.compile`` backend ``magi``, which composes magi-opschema, magi-tritonwrap and magi-passes.

Names are loaded when they are used: PyTorch loads the backend's entry point before it knows whether it will compile.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from ._ahead import aot_compile
    from ._backend import magi
    from ._magi_compile import magi_compile
    from ._records.records import (
        Compilation,
        GraphBreak,
        GraphChange,
        GraphRecord,
        KernelRun,
        OpUse,
        PassOutcome,
        Recompilation,
        RepairOutcome,
        SizesOutcome,
        SizeUse,
    )
    from ._register import magi_register_custom_op
    from ._report.explain import explain
    from ._report.report import Report
    from ._report.run import Comparison, RunReport, read_report
    from ._report.sections import CallRecord
    from ._settings.config import CompileConfig, PassConfig
    from ._verify.compare import Difference
    from .errors import (
        BackendError,
        BoundaryOpError,
        CompileSizesError,
        ConfigError,
        MismatchError,
        OptionError,
        PackageError,
        ReportError,
        TargetError,
        TargetTypeError,
    )


__all__ = [
    "BackendError",
    "BoundaryOpError",
    "CallRecord",
    "Comparison",
    "Compilation",
    "CompileConfig",
    "CompileSizesError",
    "ConfigError",
    "Difference",
    "GraphBreak",
    "GraphChange",
    "GraphRecord",
    "KernelRun",
    "MismatchError",
    "OpUse",
    "OptionError",
    "PackageError",
    "PassConfig",
    "PassOutcome",
    "Recompilation",
    "RepairOutcome",
    "Report",
    "ReportError",
    "RunReport",
    "SizeUse",
    "SizesOutcome",
    "TargetError",
    "TargetTypeError",
    "aot_compile",
    "explain",
    "magi",
    "magi_compile",
    "magi_register_custom_op",
    "read_report",
]

_HOMES = {
    "_ahead.compile": ("aot_compile",),
    "_backend": ("magi",),
    "_verify.compare": ("Difference",),
    "_settings.config": ("CompileConfig", "PassConfig"),
    "_report.explain": ("explain",),
    "_magi_compile": ("magi_compile",),
    "_records.records": (
        "Compilation",
        "GraphBreak",
        "GraphChange",
        "GraphRecord",
        "RepairOutcome",
        "KernelRun",
        "OpUse",
        "PassOutcome",
        "Recompilation",
        "SizesOutcome",
        "SizeUse",
    ),
    "_register": ("magi_register_custom_op",),
    "_report.calls": ("CallRecord",),
    "_report.report": ("Report",),
    "_report.run": ("Comparison", "RunReport", "read_report"),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f".{home}", __name__), name)
            globals()[name] = value
            return value
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
