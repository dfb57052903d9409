# SPDX-License-Identifier: Apache-2.0
"""Blocks that repeat in a model, such as the layers of a Llama, which are compiled once and called many times.

A block is what Dynamo captured during one call of a module. Where several are the same, calls, sizes, strides and
dtypes included, the graph is cut before and after each of them, and all share the code of the first:

    embed, layer 0, layer 1, layer 2, head     ->     piece 0 | Layer | Layer | Layer | piece 1

This takes less time because AOTAutograd and Inductor see one layer for many. It is done where nothing is lost by it:
a kernel cannot combine calls before a cut with calls after it, and a convolution needs the whole graph for its layout.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from . import _torch_compat
from ._settings import CompileConfig


SMALLEST, WORTH = 16, 100
"""The fewest calls in a block that is cut out, and the fewest in all blocks but the first, which need no compilation.

A graph more costs 0.2 to 0.3 s to compile and up to 20 µs a call; a call in a graph costs 5 to 20 ms to compile.
"""


@dataclass(frozen=True)
class Block:
    """The calls that one call of a module made, one after another in the graph."""

    path: str
    kind: str
    """The name of the class of the module."""
    nodes: tuple[Node, ...] = field(repr=False)


@dataclass(frozen=True)
class Regions:
    """The blocks of a graph that are cut out, and a sentence on each class of block that could have been."""

    blocks: tuple[Block, ...] = ()
    found: tuple[str, ...] = ()


def regions(gm: GraphModule, config: CompileConfig, inductor: Mapping[str, Any]) -> Regions:
    """The repeated blocks of *gm* that are compiled once, as ``magi.regions`` and the options of Inductor allow."""
    wanted = config.regions
    if wanted is False:
        return Regions()
    groups = [blocks for blocks in _repeated(gm) if wanted is True or blocks[0].kind in wanted]
    whole = _whole(gm, inductor) if groups else ""
    chosen, found, taken = list[Block](), list[str](), set[Node]()
    for blocks in groups:
        free = [block for block in blocks if taken.isdisjoint(block.nodes)]
        name, calls = blocks[0].kind, len(blocks[0].nodes)
        if len(free) < 2:  # what they are in is cut out
            continue
        reason = whole or (_unsuitable(free) if wanted is True else "")
        if reason:
            found.append(f"{len(free)} blocks {name} of {calls} calls are compiled each by itself: {reason}")
            continue
        chosen += free
        taken.update(*(block.nodes for block in free))
        found.append(f"{len(free)} blocks {name} of {calls} calls are compiled once")
    return Regions(tuple(chosen), tuple(found))


def _whole(gm: GraphModule, inductor: Mapping[str, Any]) -> str:
    """Why no graph can be cut under these settings, or why *gm* cannot; empty if it can."""
    if _torch_compat.compiling.is_saved():
        return "the result is saved, for which torch needs one graph"
    if _torch_compat.compiling.inductor_value("triton.cudagraphs", inductor):
        return "with CUDA graphs, one graph of everything is replayed faster than many"
    if _torch_compat.compiling.inductor_value("freezing", inductor):
        return "with freezing, the parameters of each are part of its code"
    if any(node.meta.get("unbacked_bindings") for node in gm.graph.nodes):
        return "the graph has a size that depends on data"
    return ""


def _unsuitable(blocks: Sequence[Block]) -> str:
    """Why equal *blocks* are better compiled as a part of what they are in; empty if they are not."""
    (first, *rest) = blocks
    names = {_torch_compat.nodes.called_name(node) for node in first.nodes}
    if any("conv" in name and "1d" not in name for name in names):
        return "convolutions choose their memory format for the whole graph"
    if not names & _PRODUCTS:
        return "without a matrix product, the calls before and after one can become one kernel with it"
    saved = sum(len(block.nodes) for block in rest)
    return f"{saved} calls less are not worth the cuts" if saved < WORTH else ""


_PRODUCTS = frozenset(("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention"))


def _repeated(gm: GraphModule) -> list[list[Block]]:
    """The blocks that are equal to another one, those with most calls first."""
    sketches: dict[Hashable, list[Block]] = {}
    for block in _blocks(gm):
        if len(block.nodes) >= SMALLEST:
            sketch = (block.kind, *((node.op, node.target) for node in block.nodes))
            sketches.setdefault(sketch, []).append(block)
    groups: dict[Hashable, list[Block]] = {}
    for alike in sketches.values():
        for block in alike if len(alike) > 1 else ():
            inputs = {n: None for node in block.nodes for n in node.all_input_nodes}
            outside = [n for n in inputs if n not in set(block.nodes)]
            groups.setdefault(_structure(gm, outside, block.nodes), []).append(block)
    return sorted((group for group in groups.values() if len(group) > 1), key=lambda group: -len(group[0].nodes))


def _blocks(gm: GraphModule) -> Iterator[Block]:
    """Each run of calls during one call of a module, where the graph can be cut before and after it."""
    calls = [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
    cuttable = _cuttable(calls)
    since: dict[tuple[str, type], int] = {}
    for place in range(len(calls) + 1):
        stack = calls[place].meta.get("nn_module_stack") or {} if place < len(calls) else {}
        modules = dict.fromkeys(stack.values())
        for module in [module for module in since if module not in modules]:
            start = since.pop(module)
            if cuttable[start] and cuttable[place]:
                yield Block(module[0], getattr(module[1], "__name__", str(module[1])), tuple(calls[start:place]))
        for module in modules:
            since.setdefault(module, place)


def _cuttable(calls: Sequence[Node]) -> list[bool]:
    """Whether the graph can be cut before each of *calls*, and at its end.

    It cannot between the two calls that open and close a region of autocast, grad mode, ``torch.func`` or similar.
    """
    found, depth = list[bool](), 0
    grad_mode: object = torch.is_grad_enabled()
    for node in calls:
        found.append(depth == 0 and grad_mode == torch.is_grad_enabled())
        depth += _torch_compat.nodes.nesting(node)
        depth += (node.target is _torch_compat.nodes.ENTER_AUTOCAST) - (
            node.target is _torch_compat.nodes.EXIT_AUTOCAST
        )
        if node.target is _torch_compat.nodes.SET_GRAD_MODE:
            grad_mode = node.args[0]
    return [*found, True]


def piece_structure(gm: GraphModule) -> Hashable:
    """What decides the code of a piece: two with equal values can share theirs."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return _structure(gm, placeholders, [node for node in gm.graph.nodes if node.op != "placeholder"])


def _structure(gm: GraphModule, inputs: Sequence[Node], nodes: Sequence[Node]) -> Hashable:
    """The calls *nodes* of *gm*, in which a node stands for its position and a tensor for what code depends on.

    That is also which inputs share memory, and which results are used elsewhere.
    """
    places = {node: place for place, node in enumerate((*inputs, *nodes))}
    storages: dict[int, int] = {}
    held = {node for node in inputs if node.op == "get_attr"}

    def of(value: Any) -> Hashable:
        if isinstance(value, Node):
            return ("node", places[value])
        if isinstance(value, torch.Tensor):
            return _of_tensor(value, storages)
        if isinstance(value, (tuple, list)):
            return (type(value), *map(of, value))
        if isinstance(value, dict):
            return (dict, *((name, of(each)) for name, each in value.items()))
        if isinstance(value, slice):
            return (slice, of(value.start), of(value.stop), of(value.step))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return (type(value), value.node.expr)
        if isinstance(value, (int, float, complex, str)):
            return (type(value), repr(value))
        # A device is made anew for each node, unlike a dtype or None.
        return value if isinstance(value, torch.device) else _Itself(value)

    def call(node: Node) -> Hashable:
        kwargs = _torch_compat.nodes.launch_constants(node) or node.kwargs
        target: Hashable = node.target
        if node.op == "get_attr":
            body = operator.attrgetter(str(node.target))(gm)
            target = piece_structure(body) if isinstance(body, GraphModule) else _Itself(body)
        used_outside = any(user not in places for user in node.users)
        annotation = repr(node.meta.get("custom"))
        return (
            node.op,
            target,
            of(node.args),
            of(kwargs),
            of(node.meta.get("example_value")),
            used_outside,
            annotation,
        )

    given = tuple(call(node) if node in held else of(node.meta.get("example_value")) for node in inputs)
    return (given, tuple(call(node) for node in nodes))


@dataclass(frozen=True)
class _Itself:
    """An object that is equal to itself only, if it has no equality of its own that is known to mean the same code."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _of_tensor(value: torch.Tensor, storages: dict[int, int]) -> Hashable:
    if _torch_compat.values.is_plain_fake(value):
        shared = storages.setdefault(_torch_compat.values.storage_id(value), len(storages))
        numbers = (*value.shape, *value.stride(), value.storage_offset())
        memo = _torch_compat.values.float_memo(value)
        return (
            (
                type(value),
                value.dtype,
                value.device,
                value.requires_grad,
                value.is_leaf,
                value.is_conj(),
                value.is_neg(),
            ),
            tuple(each.node.expr if isinstance(each, torch.SymInt) else each for each in numbers),
            None if memo is None else memo.node.expr,
            shared,
        )
    return _Itself(value)
