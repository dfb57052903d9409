# SPDX-License-Identifier: Apache-2.0
"""What a captured graph exchanges with other ranks.

A rank decides alone about a graph that exchanges nothing: no other rank waits for anything in it, so none sees which
code it runs. `ranks.py` says why other graphs need more, and what.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from magi_backend._register import registered
from magi_backend._split import boundary_overloads, is_boundary
from magi_backend._torch_compat import distributed, symbols, values
from magi_backend._torch_compat.nodes import is_higher_order, nodes_in, operator_name, tensors_of

from .captured import Captured, reason_of


_ALIKE = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")
"""The collectives that take tensors of the same shape on all ranks."""

_OF_TORCH = ("aten", "prim", "prims", "rngprims", "inductor", "profiler", "quantized", "quantized_decomposed")
"""The namespaces of torch's operators that exchange nothing."""


@dataclass(frozen=True)
class Exchange:
    """What a captured graph exchanges with other ranks.

    Attributes:
        why: Why the ranks cannot decide together about its sizes, or empty.
        group: The name of the process group.
        device: The type of device of the tensors that are exchanged.
        alike: The symbols that have the same value on all ranks.
        path: The graph, in the store.
    """

    why: str = ""
    group: str = ""
    device: str = ""
    alike: frozenset[Any] = frozenset()
    path: str = ""

    def of_sizes(self, captured: Captured) -> Exchange:
        """The same, with a reason if a size may be another one on another rank in the same call."""
        for size in captured.inputs.sizes:
            if not self.why and not symbols.free_symbols(captured.fakes[size.place]) <= self.alike:
                why = (
                    f"ranks may see different {size.path} ({size.symbol}) in one call: it is a size of no DTensor, nor "
                )
                return replace(self, why=f"{why}of what a collective that needs the same shape on all ranks exchanges")
        return self

    def operations(self) -> int:
        """The number of operations that the group has begun."""
        return distributed.operations(self.group, self.device)


def exchange_of(gm: GraphModule, boundary_ops: Sequence[str]) -> Exchange | None:
    """What the captured graph *gm* exchanges with other ranks; None if nothing.

    What happens outside of the graph, such as what DDP and FSDP2 do around it, is not part of it. Neither is a boundary
    operator, one of *boundary_ops* or another: the graph is cut there, and it is called in its place by all code.
    """
    if distributed.ranks() == 1:
        return None
    named, found = boundary_overloads(boundary_ops), dict[str, Exchange]()
    for node in nodes_in(gm):
        runs_always = node.graph is gm.graph
        exchange = None if runs_always and is_boundary(node, named) else _exchange(node)
        if exchange is not None and exchange.why:
            return exchange
        if exchange is not None:
            before = found.get(exchange.group, Exchange()).alike
            found[exchange.group] = replace(exchange, alike=before | exchange.alike if runs_always else before)
    if len(found) > 1:
        return Exchange(f"it exchanges in {len(found)} process groups, which do not count together")
    for exchange in found.values():
        try:
            exchange.operations()
        except Exception as error:  # noqa: BLE001 - each kind of group has its own
            return Exchange(f"its process group does not count what it does: {reason_of(error)}")
        return replace(exchange, path=_path(gm, exchange))
    return None


_captured: Counter[str] = Counter()


def _path(gm: GraphModule, exchange: Exchange) -> str:
    """What to call *gm* in the store: by its nodes, its ranks, and how many such graphs were captured before it.

    If that is not the same on all ranks, they do not decide together.
    """
    nodes = [(node.name, [tuple(each.shape) for each in tensors_of(node)]) for node in nodes_in(gm)]
    digest = hashlib.sha256(f"{distributed.members(exchange.group)} {nodes}".encode()).hexdigest()[:16]
    path = f"magi/{digest}"
    _captured[path] += 1
    return f"{path}/{_captured[path]}"


def _exchange(node: Node) -> Exchange | None:
    """What *node* exchanges with other ranks, if anything."""
    tensors = tensors_of(node)
    for wrapper in filter(values.is_wrapper, tensors):
        group = distributed.group_of_wrapper(wrapper)
        if group is None:
            return Exchange(f"{node.name} is a {type(wrapper).__name__}, whose operators may wait for other ranks")
        return Exchange(group=group, device=wrapper.device.type, alike=_alike(tensors))
    if node.op != "call_function":
        return None
    namespace, _, name = operator_name(node.target).partition("::")
    if namespace.startswith("_c10d_functional"):
        if name == "wait_tensor":
            return None
        names = [each for each in (*node.args, *node.kwargs.values()) if isinstance(each, str)]
        given = [tensor for each in node.all_input_nodes for tensor in tensors_of(each)]
        if not names or not given:
            return Exchange(f"which ranks {namespace}::{name} waits for cannot be read from it")
        takes_alike = name.rstrip("_").removesuffix("_coalesced").removesuffix("_out") in _ALIKE
        return Exchange(group=names[-1], device=given[0].device.type, alike=_alike(given if takes_alike else ()))
    if namespace:
        definition = registered(node.target)
        is_local = definition is not None and "subgraph_boundary" not in definition.traits
        may_wait = namespace not in _OF_TORCH and not is_local
        name = f"{namespace}::{name}"
    else:
        module, name = str(getattr(node.target, "__module__", "")), getattr(node.target, "__qualname__", node.name)
        is_local = module.partition(".")[0] in ("torch", "math", "einops") and not module.startswith(
            "torch.distributed"
        )
        may_wait = not (is_local or inspect.isbuiltin(node.target) or is_higher_order(node.target))
    way_out = "name an operator in magi.boundary_ops, and it is called outside of compiled code"
    return Exchange(f"whether {name} waits for other ranks cannot be read from it; {way_out}") if may_wait else None


def _alike(tensors: Sequence[torch.Tensor]) -> frozenset[Any]:
    """The symbols that are a size of one of *tensors*, or a multiple of which is."""
    sizes: list[Any] = [size for tensor in tensors for size in tensor.shape]
    each = ((size.node.expr, symbol) for size in sizes for symbol in symbols.free_symbols(size))
    return frozenset(symbol for expression, symbol in each if (expression / symbol).is_number)
