# SPDX-License-Identifier: Apache-2.0
"""Where walks through code stop: torch, Triton, the standard library, and what they stand on."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
import triton


_FOLDERS = tuple(f"{Path(file).parent}/" for file in (torch.__file__, triton.__file__, __file__))
LIBRARIES = frozenset(
    {"torch", "triton", "torchgen", "functorch", "numpy", "sympy", "magi_tritonwrap", "magi_opschema"}
)


def is_library_module(name: str | None) -> bool:
    """Whether a module's code is fixed by the versions of Python, torch and Triton, and launches nothing of a user."""
    if name is None:
        return False
    root = name.partition(".")[0]
    return root in LIBRARIES or (root in sys.stdlib_module_names and root != "__main__")


def is_library_function(function: FunctionType) -> bool:
    """Whether the code of *function* is a library's.

    The globals decide, not `__module__`: under `functools.wraps` torch's wrapper names the module of the user.
    """
    return is_library_module(function.__globals__.get("__name__"))


def is_library_object(value: Any) -> bool:
    """Whether *value* is a library's module or class, or an instance of a library's class."""
    if isinstance(value, ModuleType):
        return is_library_module(value.__name__)
    cls = value if isinstance(value, type) else type(value)
    return is_library_module(cls.__module__)


def in_library_folder(file: str) -> bool:
    """Whether a source file is torch's, Triton's or ours: users want to hear about lines of their own."""
    return file.startswith(_FOLDERS)
