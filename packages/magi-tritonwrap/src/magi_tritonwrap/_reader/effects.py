# SPDX-License-Identifier: Apache-2.0
"""What a call does besides computing.

A body that reads files or communicates with other ranks is never run as a test.
"""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from magi_tritonwrap._kernel.bodies import as_overload
from magi_tritonwrap._torch_compat.operators import is_collective


_STREAMS = frozenset(
    ("_io", "io", "os", "posix", "nt", "shutil", "subprocess", "socket", "_socket", "ssl", "http", "urllib", "requests")
) | frozenset(("sqlite3", "tempfile", "pathlib", "multiprocessing", "asyncio", "select", "signal", "ftplib", "smtplib"))
_QUESTIONS = ("get", "is_", "cpu_count", "fspath", "environ")
_METHODS_OF_STREAMS = frozenset(
    ("write", "writelines", "write_text", "write_bytes", "read", "readline", "readlines", "read_text", "read_bytes")
) | frozenset(("unlink", "mkdir", "rmdir", "touch", "flush", "send", "sendall", "recv", "connect", "accept"))

# Attributes of a value known only at run time that do not lead to a launch.
_PLAIN_TYPES = (torch.Tensor, torch.Size, torch.Generator, str, bytes, list, tuple, dict, set, int, float, complex)
_HARMLESS_NAMES = frozenset(name for cls in (*_PLAIN_TYPES, torch.autograd.function.FunctionCtx) for name in dir(cls))


def effect_of(obj: Any) -> str:
    """What calling *obj* does besides computing, in words; empty if it does nothing else."""
    if obj is print or obj is input:
        return "writes to the terminal" if obj is print else "reads from the terminal"
    if obj is torch.save or obj is torch.load:
        return "reads or writes a file"
    if isinstance(obj, OpOverload | OpOverloadPacket):
        return "communicates with other ranks" if is_collective(as_overload(obj)) else ""
    module, name = _module_and_name(obj)
    if name.startswith(_QUESTIONS):
        return ""
    if module.startswith("torch.distributed.") and not isinstance(obj, type):
        return "communicates with other ranks"
    if (module, name) == ("time", "sleep"):
        return "waits"
    return "reads or writes files or streams" if module.partition(".")[0] in _STREAMS else ""


def effect_of_method(name: str) -> str:
    """What the method *name* of an object known only at run time may do besides computing.

    Empty if nothing is suspected.
    """
    return "may read or write a stream" if name in _METHODS_OF_STREAMS else ""


def is_harmless_name(name: str) -> bool:
    """Whether tensors and plain values have a method called *name*, so that it does not lead to code of the author."""
    return name in _HARMLESS_NAMES


def _module_and_name(obj: Any) -> tuple[str, str]:
    """The module and the name of a function or class, or of the class of any other object."""
    if isinstance(obj, FunctionType):
        return str(obj.__globals__.get("__name__", "")), obj.__name__
    if isinstance(obj, BuiltinFunctionType | MethodType) and not isinstance(obj.__self__, ModuleType):
        owner = obj.__self__ if isinstance(obj.__self__, type) else type(obj.__self__)
        return owner.__module__, obj.__name__
    if isinstance(obj, BuiltinFunctionType | type):
        return str(obj.__module__), obj.__name__
    return type(obj).__module__, ""
