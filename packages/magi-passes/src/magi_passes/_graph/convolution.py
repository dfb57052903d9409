# SPDX-License-Identifier: Apache-2.0
"""A convolution node read into plain numbers, and nodes written back with their fake values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from magi_passes._torch_compat.graphs import symbolic_dispatch


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.fx import Graph, Node


aten = torch.ops.aten


@dataclass(frozen=True)
class Convolution:
    """One `aten.convolution.default` that is not transposed, with one number per spatial dimension.

    Attributes:
        node: The call.
        x: Its input, of shape (batch, channels, *space).
        weight: Its weight, of shape (out channels, channels / groups, *kernel).
        bias: Its bias or None.
        stride: One int per spatial dimension, like *padding* and *dilation*.
    """

    node: Node
    x: Node
    weight: Node
    bias: Node | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def kernel(self) -> tuple[int, ...]:
        """The extents of the kernel."""
        return tuple(self.weight.meta["val"].shape[2:])

    @property
    def reach(self) -> tuple[int, ...]:
        """How far each kernel extends beyond its first tap: ``(k - 1) * dilation``."""
        return tuple((k - 1) * d for k, d in zip(self.kernel, self.dilation, strict=True))


def read_convolution(node: Node) -> Convolution | None:
    """*node* as a `Convolution`; None for any other call, and for a transposed, unbatched or not constant one."""
    if node.target is not aten.convolution.default or node.kwargs:
        return None
    arguments: Any = node.args
    x, weight, bias, stride, padding, dilation, transposed, _, groups = arguments
    image, kernel = (getattr(operand, "meta", {}).get("val") for operand in (x, weight))
    if transposed is not False or not isinstance(image, torch.Tensor) or not isinstance(kernel, torch.Tensor):
        return None
    space = kernel.dim() - 2
    lists = [_per_dimension(values, space) for values in (stride, padding, dilation)]
    constants = (*kernel.shape, groups, *(n for values in lists for n in values))
    if image.dim() != kernel.dim() or () in lists or not all(type(n) is int for n in constants):
        return None
    return Convolution(node, x, weight, bias, lists[0], lists[1], lists[2], groups)


def _per_dimension(values: Iterable[int], space: int) -> tuple[int, ...]:
    """*values*, one for each of *space* dimensions; empty if their number does not fit.

    ``padding="same"`` and ``"valid"`` trace to lists of length one, which stand for every dimension.
    """
    listed = tuple(values)
    if len(listed) == 1:
        return listed * space
    return listed if len(listed) == space else ()


class Writer:
    """Inserts calls before a node, with the fake values that Inductor and later passes read.

    Example: ``Writer(graph, node)(aten.relu.default, x)`` is the node of ``x.relu()``.
    """

    def __init__(self, graph: Graph, before: Node) -> None:
        self._graph, self._before = graph, before

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Insert ``target(*args, **kwargs)``, of plain keyword values, and return its node."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args, kwargs)
        node.meta["val"] = fake_value(target, torch.fx.node.map_arg(args, lambda n: n.meta["val"]), kwargs)
        for key in ("stack_trace", "nn_module_stack", "original_aten", "from_node"):
            if key in self._before.meta:
                node.meta[key] = self._before.meta[key]
        return node

    def after(self, x: Node) -> Writer:
        """A writer that inserts right after *x*, or after the last placeholder when *x* is one."""
        place = x.next
        while place.op == "placeholder":
            place = place.next
        return Writer(self._graph, place)

    def size(self, x: Node, dim: int) -> Any:
        """The extent of *x* along *dim*: an int, or the node of a symbol."""
        extent = x.meta["val"].shape[dim]
        return extent if isinstance(extent, int) else self(aten.sym_size.int, x, dim)


def fake_value(target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``target(*args, **kwargs)`` in the mode of the fake tensors among *args*."""
    mode = _fake_mode(args)
    if mode is None:
        return target(*args, **kwargs)
    with mode, symbolic_dispatch():
        return target(*args, **kwargs)


def _fake_mode(values: Any) -> Any:
    found: list[Any] = []
    torch.utils._pytree.tree_map_only(  # noqa: SLF001
        torch.Tensor, lambda t: found.append(getattr(t, "fake_mode", None)), values
    )
    return next((mode for mode in found if mode is not None), None)


def replace_by(node: Node, new: Node) -> None:
    """Replace *node* by *new* in all its users, and erase *node* with the nodes that only it used."""
    node.replace_all_uses_with(new)
    new.meta.update({key: value for key, value in node.meta.items() if key not in new.meta})
    todo = [node]
    while todo:
        dead = todo.pop()
        if not dead.users and dead.op == "call_function" and not dead.is_impure():
            inputs = dead.all_input_nodes
            dead.graph.erase_node(dead)
            todo += inputs
