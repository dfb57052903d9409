# SPDX-License-Identifier: Apache-2.0
"""What generated modules import: cells, the choice between variants, and the forms of `out=` that ATen lacks."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from ._dispatch.kernels import out_options as out_options
from ._dispatch.kernels import write_out as write_out
from ._dispatch.slots import op as op


class _Unset:
    """The type of `UNSET`."""

    def __repr__(self) -> str:
        return "<not given>"


UNSET: Any = _Unset()
"""The default of a parameter whose absence distinguishes overloads."""

Kind = tuple[type, ...]
TENSOR: Kind = (Tensor,)
BOOL: Kind = (bool, torch.SymBool)
INT: Kind = (int, torch.SymInt)
FLOAT: Kind = (*INT, float, torch.SymFloat)
NUMBER: Kind = (*FLOAT, *BOOL, complex)
STR: Kind = (str,)
LIST: Kind = (list, tuple)
INT_OR_LIST: Kind = (*INT, *LIST)
DTYPE: Kind = (torch.dtype,)
ANY: Kind = (object,)


def maybe(kind: Kind) -> Kind:
    """A kind that accepts *kind* or None."""
    return (*kind, NoneType)


def refuse(overload: str, **given: object) -> None:
    """Raise for parameters that *overload*, which the other arguments chose, does not have."""
    names = [name for name, value in given.items() if value is not UNSET]
    if names:
        msg = f"aten::{overload} takes no {' and no '.join(names)}, and no other overload takes it with these arguments"
        raise TypeError(msg)


class Candidate:
    """One variant of a `Choice`: its function, and the kinds of its parameters in order."""

    def __init__(
        self, function: Callable[..., Any], *, required: dict[str, Kind], optional: dict[str, Kind], keyword: set[str]
    ) -> None:
        self.function = function
        self.required = tuple(required)
        self.kinds = required | optional
        self.positional = tuple((name, kind) for name, kind in self.kinds.items() if name not in keyword)

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether these arguments bind to the parameters, and each is of a kind that its parameter accepts."""
        if len(args) > len(self.positional):
            return False
        bound = [name for name, _ in self.positional[: len(args)]]
        for value, (_, kind) in zip(args, self.positional, strict=False):
            if not isinstance(value, kind):
                return False
        for name, value in kwargs.items():
            if name in bound or name not in self.kinds or not isinstance(value, self.kinds[name]):
                return False
        return all(name in bound or name in kwargs for name in self.required)

    def __str__(self) -> str:
        parts = [name if name in self.required else f"{name}=..." for name, _ in self.positional]
        keyword = [name for name in self.kinds if name not in dict(self.positional)]
        parts += ["*", *(name if name in self.required else f"{name}=..." for name in keyword)] if keyword else []
        return f"({', '.join(parts)})"


class Choice:
    """The variants of a base that cannot be merged into one signature, in the order in which they are tried."""

    def __init__(self, name: str, *candidates: Candidate) -> None:
        self.name = name
        self.candidates = candidates
        self._by_types: dict[tuple[type, ...], Callable[..., Any]] = {}

    def pick(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """The function of the first variant that fits."""
        if kwargs or torch.compiler.is_dynamo_compiling():
            return self._first_fit(args, kwargs)
        types = tuple(map(type, args))
        function = self._by_types.get(types)
        if function is None:
            function = self._by_types[types] = self._first_fit(args, kwargs)
        return function

    def _first_fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        for candidate in self.candidates:
            if candidate.fits(args, kwargs):
                return candidate.function
        given = [type(value).__name__ for value in args]
        given += [f"{name}: {type(value).__name__}" for name, value in kwargs.items()]
        forms = ", ".join(f"{self.name}{candidate}" for candidate in self.candidates)
        raise TypeError(f"no form of {self.name} takes ({', '.join(given)}); there are {forms}")
