# SPDX-License-Identifier: Apache-2.0
"""Whose code a module is, which decides where walks through code stop or read less."""

from __future__ import annotations

import builtins
import enum
import functools
import hashlib
import os
import re
import sys
import sysconfig
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from .members import is_a, stored


LIBRARIES = frozenset({"torch", "triton", "torchgen", "functorch", "numpy", "sympy", "filelock"})
"""Torch, Triton and what torch stands on: a walk stops there, and their release stands for their code."""
OURS = frozenset({"magi_backend", "magi_opschema", "magi_passes", "magi_tritonwrap"})
_IS_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


class Standing(enum.Enum):
    """Whose code something is.

    Attributes:
        LIBRARY: torch, Triton, the standard library, and what torch stands on.
        OURS: one of the packages of this project.
        INSTALLED: another installed distribution.
        OPEN: anything else: the author's own, a script, a notebook.
    """

    LIBRARY = enum.auto()
    OURS = enum.auto()
    INSTALLED = enum.auto()
    OPEN = enum.auto()


def standing_of_module(name: str | None, own: frozenset[str] = frozenset()) -> Standing:
    """Whose code the module *name* is. *own* are the top-level packages of the author, installed or not."""
    root = (name or "").partition(".")[0]
    if root in LIBRARIES or _is_python(root):
        return Standing.LIBRARY
    if root in OURS:
        return Standing.OURS
    return Standing.INSTALLED if root not in own and _is_installed(root, _file_of(root)) else Standing.OPEN


def standing_of(value: Any, own: frozenset[str] = frozenset()) -> Standing:
    """Whose code a function, a class or a module is, or the class of an instance.

    The globals of a function decide, not its `__module__`: under `functools.wraps` torch's wrapper names the module of
    the user.
    """
    if is_a(value, ModuleType):
        return standing_of_module(stored(value).get("__name__"), own)
    if is_a(value, FunctionType):
        return standing_of_module(value.__globals__.get("__name__"), own)
    cls = value if is_a(value, type) else type(value)
    if cls.__module__ == "builtins" and cls.__flags__ & _IS_HEAP_TYPE and vars(builtins).get(cls.__name__) is not cls:
        return Standing.OPEN  # made by exec() in a namespace without a __name__
    return standing_of_module(cls.__module__, own)


def is_library_module(name: str | None) -> bool:
    """Whether the code of a module is torch's, Triton's, Python's or ours, which launches no kernel of a user."""
    return standing_of_module(name) in (Standing.LIBRARY, Standing.OURS)


def root_of(value: Any) -> str:
    """The top-level package of a function, a class, or an object with a module."""
    if is_a(value, MethodType):
        return root_of(value.__func__)
    is_code = is_a(value, (type, FunctionType))
    module = value.__module__ if is_code else stored(value).get("__module__", type(value).__module__)
    return str(module or "").partition(".")[0]


@functools.cache
def version_of(root: str) -> str:
    """The distributions that provide a top-level package, with their releases; empty where it is not installed."""
    try:
        return f"{root} {metadata.version(root)}"
    except metadata.PackageNotFoundError:
        names = metadata.packages_distributions().get(root, ())
        return ", ".join(f"{name} {metadata.version(name)}" for name in sorted(set(names)))


def content_of_package(root: str) -> str:
    """A digest of all source files of a loaded package, or of a module that is one file."""
    module = stored(sys.modules.get(root))
    folders = [str(folder) for folder in module.get("__path__", ())]
    found = (
        Path(folder, file) for top in folders for folder, _, files in os.walk(top, followlinks=True) for file in files
    )
    files = sorted(str(file) for file in found if file.suffix == ".py") or [str(module.get("__file__"))]
    return hashlib.sha256("".join(map(content_of, files)).encode()).hexdigest()


def content_of_module(name: str) -> str:
    """A digest of the file of a module, found without loading it; empty for a library's, and where there is none."""
    if standing_of_module(name) is Standing.LIBRARY:
        return ""
    path, spec = None, None
    for depth in range(1, name.count(".") + 2):
        spec = PathFinder.find_spec(".".join(name.split(".")[:depth]), path)
        path = None if spec is None else spec.submodule_search_locations
        if spec is None or path is None:
            break
    return content_of(None if spec is None else spec.origin)


def content_of(file: str | None) -> str:
    """A digest of the content of a file, read again after the file was written to; empty if it cannot be read."""
    if not file:
        return ""
    try:
        state = Path(file).stat()
        return _content(file, state.st_mtime_ns, state.st_size)
    except OSError:
        return ""


@functools.lru_cache(maxsize=4096)
def _content(file: str, _time: int, _size: int) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _is_python(root: str) -> bool:
    """Whether *root* is a module of Python. A script called `queue.py` has the name of one, but another location."""
    if root not in sys.stdlib_module_names or root == "__main__":
        return False
    file = _file_of(root)
    return not file or (file.startswith(_folders("stdlib", "platstdlib")) and not _is_installed(root, file))


def _file_of(root: str) -> str:
    """The file or folder of a top-level module; empty where it is not loaded or has none."""
    module = stored(sys.modules.get(root))
    file = module.get("__file__")
    return str(file) if file else next((str(path) for path in module.get("__path__", ())), "")


def _is_installed(root: str, file: str) -> bool:
    if file.startswith(_folders("purelib", "platlib")) or "/site-packages/" in file or "/dist-packages/" in file:
        return True
    return root in _installed_in(file.rpartition(f"/{root}")[0])


@functools.cache
def _installed_in(folder: str) -> frozenset[str]:
    """The top-level modules that an installer says it put into *folder*: `pip install --target`, and unpacked archives.

    An editable installation has its record elsewhere than beside the source.
    """
    records = Path(folder).glob("*.dist-info/RECORD") if folder else ()
    return frozenset(root for file in records for root in re.findall(r"^[^./,]+", file.read_text(), re.MULTILINE))


@functools.cache
def _folders(*names: str) -> tuple[str, ...]:
    return tuple(sysconfig.get_path(name) for name in names)
