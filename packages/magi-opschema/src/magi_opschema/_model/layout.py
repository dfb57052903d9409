# SPDX-License-Identifier: Apache-2.0
"""Flat argument tuples at run time.

    arguments  as the schema has them         x, packed_Tensor=[a, b], packed_float=[1.0, ...]
    slots      each Tensor leaf separate    x, a, b, packed_float=[1.0, ...]
    spread     each Tensor separate, also those of the user's lists, as autograd.Function requires

Only ops with more than 64 leaves have slots that differ from their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .schema import Argument, slots_of
from .tree import dotted


Flat = tuple[Any, ...]


@dataclass(frozen=True)
class Bundle:
    """Tensor leaves that share one argument."""

    count: int
    mask: int | None
    """The position of the argument that says which of them are not None; None if all are there."""


@dataclass(frozen=True)
class FlatLayout:
    """Positions of one op's slots, or of its flat outputs."""

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    keyword_only: tuple[str, ...]
    tensor_lists: tuple[int, ...]
    """Positions of `Tensor[]` and `Tensor[]?`, in which autograd.Function does not look for Tensors."""
    bundles: Mapping[int, Bundle] = field(default_factory=dict)
    """The bundles by the position of their argument; empty for an op whose slots are its arguments."""
    mutated: Mapping[int, str] = field(default_factory=dict)
    """The dotted path of each slot that the op writes into, by position."""

    @staticmethod
    def of_arguments(arguments: Sequence[Argument]) -> FlatLayout:
        """The layout of a schema's arguments."""
        slots = slots_of(arguments)
        return FlatLayout(
            tuple(slot.name for slot in slots),
            tuple(slot.default for slot in slots),
            tuple(slot.name for slot in slots if slot.is_keyword_only),
            _tensor_lists([slot.schema_type for slot in slots]),
            _bundles(arguments),
            {i: dotted(slot.leaves[0].path) for i, slot in enumerate(slots) if slot.alias},
        )

    @staticmethod
    def of_outputs(schema_types: Sequence[str]) -> FlatLayout:
        """The layout of a schema's returns."""
        return FlatLayout(tuple(schema_types), (), (), _tensor_lists(schema_types))

    def fill(self, args: Flat, kwargs: dict[str, Any]) -> Flat:
        """All slots by position, with the defaults of arguments that the dispatcher left out."""
        if self.bundles:
            return self.open(args)
        missing = len(self.names) - len(args)
        if not missing:
            return args
        rest = zip(self.names[-missing:], self.defaults[-missing:], strict=True)
        return (*args, *(kwargs.get(name, default) for name, default in rest))

    def call(self, op: Callable[..., Any], flat: Flat) -> Any:
        """Call *op* with the slots, as arguments by position and keyword-only ones by name."""
        return self.apply(op, self._close(flat) if self.bundles else flat)

    def apply(self, op: Callable[..., Any], flat: Flat) -> Any:
        """Call *op* with all arguments; no op has both bundles and keyword-only arguments."""
        if not self.keyword_only:
            return op(*flat)
        split = len(flat) - len(self.keyword_only)
        return op(*flat[:split], **dict(zip(self.keyword_only, flat[split:], strict=True)))

    def open(self, arguments: Flat, masks: Flat | None = None) -> Flat:
        """*arguments*, with an entry for each argument, as one for each slot; *masks* says which are there."""
        if not self.bundles:
            return arguments
        values = arguments if masks is None else masks
        hidden = {bundle.mask for bundle in self.bundles.values()}
        slots: list[Any] = []
        for i, said in enumerate(arguments):
            bundle = self.bundles.get(i)
            if bundle is None:
                slots += [] if i in hidden else [said]
            elif bundle.mask is None:
                slots += [None] * bundle.count if said is None else said
            else:
                items = iter(said or ())
                slots += [next(items, None) if there else None for there in values[bundle.mask]]
        return tuple(slots)

    def _close(self, slots: Flat) -> Flat:
        """The inverse of `open`."""
        items = iter(slots)
        masks = {bundle.mask for bundle in self.bundles.values()} - {None}
        arguments: list[Any] = [None] * (len(slots) + sum(1 - b.count for b in self.bundles.values()) + len(masks))
        for i in range(len(arguments)):
            if i in masks:
                continue
            bundle = self.bundles.get(i)
            if bundle is None:
                arguments[i] = next(items)
                continue
            tensors = [next(items) for _ in range(bundle.count)]
            arguments[i] = [tensor for tensor in tensors if tensor is not None]
            if bundle.mask is not None:
                arguments[bundle.mask] = [tensor is not None for tensor in tensors]
        return tuple(arguments)

    def spread(self, flat: Flat) -> Flat:
        """*flat* with each Tensor separate: `(x, [a, b], 3)` as `((2,), x, a, b, 3)`; unchanged if there is no list."""
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
        """The inverse of `spread`; *counts* are given if the first item does not hold them, as for gradients."""
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


def _bundles(arguments: Sequence[Argument]) -> dict[int, Bundle]:
    mask_of = {a.leaves: i for i, a in enumerate(arguments) if a.is_bundle and a.schema_type == "bool[]"}
    return {
        i: Bundle(len(argument.leaves), mask_of.get(argument.leaves))
        for i, argument in enumerate(arguments)
        if argument.is_bundle and argument.schema_type == "Tensor[]"
    }


def _tensor_lists(schema_types: Sequence[str]) -> tuple[int, ...]:
    return tuple(i for i, text in enumerate(schema_types) if text.startswith("Tensor[]"))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The Tensors of a flat value, which may be a list or a tuple of others."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def as_tuple(output: Any, count: int) -> Flat:
    """*output*, the output of an op with *count* outputs, as a tuple."""
    if count == 0:
        return ()
    return (output,) if count == 1 else tuple(output)


def as_output(flat: Flat) -> Any:
    """The inverse of `as_tuple`."""
    if not flat:
        return None
    return flat[0] if len(flat) == 1 else flat
