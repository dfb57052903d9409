# SPDX-License-Identifier: Apache-2.0
"""What `backward_fn` returned, checked and taken apart: one gradient for each flat argument."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._model.tree import Leaf, ListOrTuple, MaskedList, Node, Optional, Record, Sequence, dotted, leaves
from magi_opschema._text import nearest, show_value
from magi_opschema._torch_compat import is_dynamo_compiling
from magi_opschema.errors import GradientError


Shapes = Mapping[str, Any]
"""By leaf name, for the inputs of the forward: the shape of a Tensor, the shapes of a list of them, None for None; for
a list of optional Tensors also its mask."""


def flatten_gradients(returned: Any, lowering: SignatureLowering, shapes: Shapes) -> dict[str, Any]:
    """The gradient of each Tensor leaf, by leaf name; leaves without one are absent.

    Raises:
        GradientError: a wrong count, an unknown field, a gradient for a leaf that is not a Tensor, a wrong shape.
    """
    names = [parameter.name for parameter in lowering.parameters]
    if len(names) == 1 and type(returned) is not tuple:  # a named tuple is the gradient of a record
        returned = (returned,)
    flattener = _Flattener(lowering, shapes)
    if not isinstance(returned, tuple):
        flattener.fail(
            "", f"returned {_kind(returned)}, expected a tuple with one gradient for each of ({', '.join(names)})"
        )
    if len(returned) != len(names):
        flattener.fail(
            "", f"returned {len(returned)} gradients, expected {len(names)}, one for each of ({', '.join(names)})"
        )
    found: dict[str, Any] = {}
    for parameter, gradient in zip(lowering.parameters, returned, strict=True):
        found |= flattener.flatten(parameter.node, gradient)
    return found


@dataclass(frozen=True)
class _Flattener:
    lowering: SignatureLowering
    shapes: Shapes

    def fail(self, path: str, text: str, fix: str = "") -> NoReturn:
        of = f" for '{path}'" if path else ""
        raise GradientError(self.lowering.sentence(f"backward_fn{of} {text}.{fix}"))

    def flatten(self, node: Node, gradient: Any) -> dict[str, Any]:
        if gradient is None:
            return {}
        match node:
            case Leaf():
                return {node.name: self._leaf(node, gradient)}
            case Record():
                return self._record(node, gradient)
            case Sequence():
                return self._sequence(node, gradient)
            case Optional() | ListOrTuple():
                return self.flatten(node.inner, gradient)
            case MaskedList():
                return self._masked(node, gradient)

    def _leaf(self, leaf: Leaf, gradient: Any) -> Any:
        path = dotted(leaf.path)
        if not leaf.is_tensor:
            self.fail(path, f"returned {_kind(gradient)}, expected None: a {leaf.schema_type} has no gradient")
        shape = self.shapes.get(leaf.name)
        if shape is None:
            self.fail(path, f"returned {_kind(gradient)}, expected None: this call passed None")
        if not leaf.is_list:
            self._check_tensor(path, gradient, shape)
            return gradient
        if not isinstance(gradient, (list, tuple)) or len(gradient) != len(shape):
            self.fail(path, f"returned {_kind(gradient)}, expected None or a list of {len(shape)}")
        for i, (item, item_shape) in enumerate(zip(gradient, shape, strict=True)):
            if item is not None:
                self._check_tensor(f"{path}[{i}]", item, item_shape)
        return list(gradient)

    def _check_tensor(self, path: str, gradient: Any, shape: torch.Size) -> None:
        if not isinstance(gradient, torch.Tensor):
            self.fail(path, f"returned {_kind(gradient)}, expected None or a Tensor of shape {tuple(shape)}")
        if is_dynamo_compiling():  # This is compiled autograd, where Dynamo sees a symbolic size as an int.
            return
        sizes = (*gradient.shape, *shape)
        # A symbolic size is compared by the compiler; a comparison here would add a guard.
        if all(type(size) is int for size in sizes) and not _sums_to(gradient.shape, shape):
            self.fail(path, f"returned shape {tuple(gradient.shape)}, expected {tuple(shape)} or one that sums to it")

    def _record(self, record: Record, gradient: Any) -> dict[str, Any]:
        path, fields = dotted(record.path), {part.name: part.node for part in record.fields}
        if isinstance(gradient, Mapping):
            for name in gradient:
                if name not in fields:
                    text = f"names the field {show_value(name)}, which {record.label} does not have; it has"
                    self.fail(path, f"{text} {', '.join(fields)}", nearest(name, fields))
            given: Mapping[str, Any] = gradient
        elif record.kind in {"dataclass", "object"} and isinstance(gradient, record.cls):
            # Fields that are not Tensors hold the values that the instance was built with, which mean nothing here.
            given = {name: getattr(gradient, name) for name, node in fields.items() if _holds_tensors(node)}
        elif isinstance(gradient, (tuple, list)):
            if len(gradient) != len(fields):
                text = f"returned {len(gradient)} gradients, expected {len(fields)}"
                self.fail(path, f"{text}, one for each of ({', '.join(fields)})")
            given = dict(zip(fields, gradient, strict=True))
        else:
            forms = f"None, a dict by field, a {record.label}, or a tuple in field order"
            self.fail(path, f"returned {_kind(gradient)}, expected {forms}")
        found: dict[str, Any] = {}
        for name, value in given.items():
            found |= self.flatten(fields[name], value)
        return found

    def _sequence(self, sequence: Sequence, gradient: Any) -> dict[str, Any]:
        items = self._items(sequence.path, gradient, len(sequence.items))
        found: dict[str, Any] = {}
        for node, value in zip(sequence.items, items, strict=True):
            found |= self.flatten(node, value)
        return found

    def _masked(self, node: MaskedList, gradient: Any) -> dict[str, Any]:
        present = self.shapes.get(node.present.name) or []
        items = self._items(node.path, gradient, len(present))
        for i, (item, there) in enumerate(zip(items, present, strict=True)):
            if item is not None and not there:
                self.fail(f"{dotted(node.path)}[{i}]", f"returned {_kind(item)}, expected None: this call passed None")
        return {
            node.values.name: self._leaf(
                node.values, [item for item, there in zip(items, present, strict=True) if there]
            )
        }

    def _items(self, path: tuple[str, ...], gradient: Any, count: int) -> AbstractSequence[Any]:
        if not isinstance(gradient, (list, tuple)) or len(gradient) != count:
            self.fail(dotted(path), f"returned {_kind(gradient)}, expected None or a tuple of {count}")
        return gradient


def _holds_tensors(node: Node) -> bool:
    return any(leaf.is_tensor for leaf in leaves(node))


def _sums_to(shape: torch.Size, target: torch.Size) -> bool:
    """True if a gradient of *shape* sums to *target*, as autograd sums over broadcast dimensions."""
    if len(shape) < len(target):
        return False
    rest = shape[len(shape) - len(target) :]
    return all(want in (have, 1) for have, want in zip(rest, target, strict=True))


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a Tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
