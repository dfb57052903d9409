# SPDX-License-Identifier: Apache-2.0
"""Imports of the modules of a library that hold its kernels, without the trainer or the server around them."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any


# Packages whose modules are imported without what the package itself imports.
BARE = {
    "unsloth": ("unsloth", "unsloth.models"),
    "vllm": (
        *("vllm", "vllm.model_executor", "vllm.model_executor.layers"),
        *("vllm.model_executor.layers.fused_moe", "vllm.model_executor.layers.quantization"),
    ),
}
# What the modules of a library import that is not here.
ABSENT = {
    "unsloth": frozenset(("unsloth_zoo", "unsloth.models._utils", "bitsandbytes", "pandas")),
    "vllm": frozenset(("vllm._C_stable_libtorch",)),
}
# flag_gems wants to know its vendor; unsloth asks for a GPU, and does not print by the second.
ENVIRONMENT = {"GEMS_VENDOR": "nvidia", "UNSLOTH_ZOO_IS_PRESENT": "1", "UNSLOTH_ALLOW_CPU": "1"}


def import_only_kernels_of(library: str) -> None:
    """From now on the modules of *library*, a package, are imported where what they import is not here."""
    os.environ.update(ENVIRONMENT)
    for package in BARE.get(library, ()):
        spec = importlib.util.find_spec(package)
        if spec is None:
            raise ModuleNotFoundError(f"{package} is not installed")
        sys.modules[package] = BarePackage(package)
        vars(sys.modules[package]).update(vars(importlib.util.module_from_spec(spec)))
    if library in ABSENT:
        sys.meta_path.insert(0, StandIns(ABSENT[library]))


class Anything(type):
    """The class of all that a module has that is not here: classes that can be called, read, subscripted and united."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else cls  # as a decorator

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __getitem__ = __or__

    def __lt__(cls, other: Any) -> bool:  # a version that is new enough
        return False

    def __ge__(cls, other: Any) -> bool:
        return True


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a module of *absent* as one that has anything."""

    def __init__(self, absent: frozenset[str]) -> None:
        self.absent = absent

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        parents = {fullname.rsplit(".", depth)[0] for depth in range(fullname.count(".") + 1)}
        return (
            None
            if self.absent.isdisjoint(parents)
            else importlib.util.spec_from_loader(fullname, self, is_package=True)
        )

    def create_module(self, spec: Any) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(__version__="99.0")


class StandIn(ModuleType):
    """A module that has anything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class BarePackage(StandIn):
    """A package of which no code ran: it has its modules, and anything beside them."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and importlib.util.find_spec(f"{self.__name__}.{name}"):
            return importlib.import_module(f"{self.__name__}.{name}")
        return super().__getattr__(name)
