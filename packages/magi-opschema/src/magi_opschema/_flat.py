# SPDX-License-Identifier: Apache-2.0
"""Flat argument tuples at run time: defaults put back, lists of Tensors spread out for autograd and gathered again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ._schema import Argument


Flat = tuple[Any, ...]


@dataclass(frozen=True)
class FlatLayout:
    """Positions of one op's flat arguments, or of its flat outputs."""

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    keyword_only: tuple[str, ...]
    tensor_lists: tuple[int, ...]
    """Positions of `Tensor[]` and `Tensor[]?`, which autograd.Function does not look into."""

    @staticmethod
    def of_arguments(arguments: Sequence[Argument]) -> FlatLayout:
        """The layout of a schema's arguments."""
        return FlatLayout(
            tuple(argument.name for argument in arguments),
            tuple(argument.default for argument in arguments),
            tuple(argument.name for argument in arguments if argument.is_keyword_only),
            _tensor_lists([argument.schema_type for argument in arguments]),
        )

    @staticmethod
    def of_outputs(schema_types: Sequence[str]) -> FlatLayout:
        """The layout of a schema's returns."""
        return FlatLayout(tuple(schema_types), (), (), _tensor_lists(schema_types))

    def fill(self, args: Flat, kwargs: dict[str, Any]) -> Flat:
        """All arguments by position. The dispatcher leaves out those that equal the schema's default."""
        missing = len(self.names) - len(args)
        if not missing:
            return args
        rest = zip(self.names[-missing:], self.defaults[-missing:], strict=True)
        return (*args, *(kwargs.get(name, default) for name, default in rest))

    def call(self, op: Callable[..., Any], flat: Flat) -> Any:
        """*op* on the arguments by position, the keyword-only ones by name."""
        if not self.keyword_only:
            return op(*flat)
        split = len(flat) - len(self.keyword_only)
        return op(*flat[:split], **dict(zip(self.keyword_only, flat[split:], strict=True)))

    def spread(self, flat: Flat) -> Flat:
        """Each Tensor on its own: `(x, [a, b], 3)` as `((2,), x, a, b, 3)`; unchanged where there is no list."""
        if not self.tensor_lists:
            return flat
        counts = tuple(None if flat[i] is None else len(flat[i]) for i in self.tensor_lists)
        items: list[Any] = []
        for i, value in enumerate(flat):
            if i in self.tensor_lists:
                items += value or ()
            else:
                items.append(value)
        return (counts, *items)

    def gather(self, spread: Flat, counts: tuple[int | None, ...] | None = None) -> Flat:
        """The inverse of `spread`; *counts* where the first item does not hold them, as among gradients."""
        if not self.tensor_lists:
            return spread
        lengths = iter(spread[0] if counts is None else counts)
        items = iter(spread[1:])
        flat: list[Any] = []
        for i in range(len(self.names)):
            if i in self.tensor_lists:
                length = next(lengths)
                flat.append(None if length is None else [next(items) for _ in range(length)])
            else:
                flat.append(next(items))
        return tuple(flat)


def _tensor_lists(schema_types: Sequence[str]) -> tuple[int, ...]:
    return tuple(i for i, text in enumerate(schema_types) if text.startswith("Tensor[]"))


def as_tuple(output: Any, count: int) -> Flat:
    """What an op of *count* outputs returned, as a tuple."""
    if count == 0:
        return ()
    return (output,) if count == 1 else tuple(output)


def as_output(flat: Flat) -> Any:
    """The inverse of `as_tuple`."""
    if not flat:
        return None
    return flat[0] if len(flat) == 1 else flat
