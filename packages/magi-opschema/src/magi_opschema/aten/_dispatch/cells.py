# SPDX-License-Identifier: Apache-2.0
"""Where the calls of a base go: one mutable cell for each base, which generated functions read and slots change.

A cell has two namespaces of callables, one attribute per overload. `traced` is read under Dynamo and holds `OpOverload`
objects, which it inlines; it guards on them, so that a changed slot recompiles. `eager` holds the dispatcher's own
callables (`OpOverload._op`), which saves the Python frame of `OpOverload.__call__`, a fifth of a small call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from magi_opschema.aten._generate.names import nearest, python_name
from magi_opschema.aten._torch_compat import OpOverload, dispatcher_callable, find_overload
from magi_opschema.aten.errors import SurfaceError, UnknownOpError


if TYPE_CHECKING:
    from collections.abc import Callable


class Namespace:
    """Callables by overload: `namespace.Tensor`, `namespace.out`."""

    def __init__(self, callables: dict[str, Callable[..., Any]]) -> None:
        self.__dict__.update(callables)


@dataclass(frozen=True)
class Pair:
    """The two overloads of a variant, by name (`default` for the unnamed one); one may be missing."""

    functional: str | None
    out: str | None

    @property
    def leading(self) -> str:
        """The overload that names the variant."""
        return str(self.functional or self.out)


class Cell:
    """One base: its variants, ATen's callables, and the namespaces that generated functions read."""

    __slots__ = ("aten_eager", "aten_traced", "base", "eager", "overloads", "pairs", "traced")

    def __init__(self, base: str, pairs: tuple[Pair, ...], settle: Callable[[Cell], None]) -> None:
        self.base = base
        self.pairs = pairs
        self.overloads = {name: _overload(base, name) for pair in pairs for name in (pair.functional, pair.out) if name}
        callables = {python_name(name): overload for name, overload in self.overloads.items()}
        self.aten_traced = Namespace(dict(callables))
        self.aten_eager = Namespace({name: dispatcher_callable(overload) for name, overload in callables.items()})
        self.traced = self.aten_traced
        self.eager: Any = _FirstCall(self, settle)


class _FirstCall:
    """The `eager` of a cell until the base's first call, which sets the final one."""

    def __init__(self, cell: Cell, settle: Callable[[Cell], None]) -> None:
        self._cell, self._settle = cell, settle

    def __getattr__(self, overload: str) -> Any:
        self._settle(self._cell)
        return getattr(self._cell.eager, overload)


_cells: dict[str, Cell] = {}


def shared_cell(base: str, pairs: tuple[Pair, ...], settle: Callable[[Cell], None]) -> Cell:
    """The cell of *base*, made when it is first needed; loaded surfaces share it, and so its slots.

    *settle* is called with it at the base's first eager call, and sets `eager`.
    """
    cell = _cells.get(base)
    if cell is None:
        cell = _cells[base] = Cell(base, pairs, settle)
    elif cell.pairs != pairs:
        msg = f"aten::{base} is loaded with other overloads; both surfaces must come from the same torch"
        raise SurfaceError(msg)
    return cell


def cell_of(base: str) -> Cell:
    """The cell of a loaded base.

    Raises:
        UnknownOpError: No loaded surface has the base.
    """
    if base not in _cells:
        msg = f"no operator {base!r} in the loaded ATen surface{nearest(base, _cells)}"
        raise UnknownOpError(msg)
    return _cells[base]


def loaded_cells() -> dict[str, Cell]:
    """Every cell by base name."""
    return dict(_cells)


def _overload(base: str, name: str) -> OpOverload:
    overload = find_overload(base, name)
    if overload is None:
        dotted = base if name == "default" else f"{base}.{name}"
        msg = (
            f"torch {torch.__version__} has no aten::{dotted}; generate the surface again with `magi-opschema aten gen`"
        )
        raise SurfaceError(msg)
    return overload
