# SPDX-License-Identifier: Apache-2.0
"""Blocks that repeat in a model, such as the layers of a Llama, which are compiled once and called many times.

A block is what Dynamo captured during one call of a module. Where several are the same, calls, sizes, strides and
dtypes included, the graph is cut before and after each of them, and all share the code of the first:

    embed, layer 0, layer 1, layer 2, head     ->     piece 0 | Layer | Layer | Layer | piece 1

This takes less time because AOTAutograd and Inductor see one layer for many. It is done where nothing is lost by it:
a kernel cannot combine calls before a cut with calls after it, and a convolution needs the whole graph for its layout.
Without gradients, the cut is made where no kernel would combine anything: before the first product of a layer, so that
its norm is one kernel with the residual of the layer before.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from . import _torch_compat
from ._settings import CompileConfig


SMALLEST, WORTH = 16, 1000
"""The fewest calls in a block that is cut out, and the fewest in all blocks but the first, which need no compilation.

A call in a graph costs 5 to 20 ms to compile. A cut costs kernels: with gradients, the residual of a block and the norm
of the next, and always the mask that several blocks need, are no longer parts of others. Beside large products that is
nothing, but small models are slower by it: a call of 8 layers of a Llama with 6 tokens by a tenth, the kernels of 6
blocks of PixArt by a twentieth, both cut before their norms (one H100, torch 2.11).
"""


@dataclass(frozen=True)
class Block:
    """The calls that one call of a module made, one after another in the graph."""

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
    whole = _whole(gm, config, inductor) if groups else ""
    chosen, found, taken = list[list[Block]](), list[str](), set[Node]()
    for blocks in groups:
        # Others are in a larger block that is cut out, or have smaller ones in them that are.
        free = [block for block in blocks if taken.isdisjoint(block.nodes)]
        if len(free) < 2 or (wanted is True and not _is_worth_it(free)):
            continue
        same = f"{len(free)} blocks {free[0].kind} of {len(free[0].nodes)} calls are"
        names = map(_torch_compat.nodes.called_name, free[0].nodes)
        if wanted is True and any("conv" in name and "1d" not in name for name in names):
            found.append(f"{same} each compiled: convolutions choose their memory format for a whole graph")
            continue  # smaller blocks inside these may have none
        taken.update(*(block.nodes for block in free))
        reason = whole
        if not reason and _are_written_after_a_cut(gm, [block for alike in (*chosen, free) for block in alike]):
            reason = "a tensor that a backward may need is written after a cut"
        chosen += [] if reason else [free]
        found.append(f"{same} each compiled: {reason}" if reason else f"{same} compiled once")
    if wanted is not True:
        repeated = {blocks[0].kind for blocks in groups}
        found += [
            f"magi.regions names {name}, of which no two blocks are equal" for name in wanted if name not in repeated
        ]
    return Regions(tuple(_from_product_to_product(gm, chosen)), tuple(found))


def _whole(gm: GraphModule, config: CompileConfig, inductor: Mapping[str, Any]) -> str:
    """Why no graph can be cut under these settings, or why *gm* cannot; empty if it can."""
    if _torch_compat.compiling.is_result_saved():
        return "the result is saved, for which torch needs one graph"
    if config.graphs or _torch_compat.compiling.inductor_value("triton.cudagraphs", inductor):
        return "with CUDA graphs, one graph of everything is replayed faster than many"
    if _torch_compat.compiling.inductor_value("freezing", inductor):
        return "with freezing, the parameters of each are part of its code"
    if any(node.meta.get("unbacked_bindings") for node in gm.graph.nodes):
        return "the graph has a size that depends on data"
    tensors = (tensor for node in gm.graph.nodes for tensor in _torch_compat.nodes.tensors_of(node))
    if any(map(_torch_compat.values.is_wrapper, tensors)):
        return "a tensor of a subclass is in the graph"
    if any(map(_torch_compat.nodes.changes_sizes, gm.graph.nodes)):
        return "a call changes the sizes of a tensor in place, after which Dynamo knows only the last ones"
    return ""


_PRODUCTS = frozenset(("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention"))


def _is_worth_it(blocks: Sequence[Block]) -> bool:
    """Whether equal *blocks* save enough calls, and have a product, beside which a kernel more at a cut takes no time.

    Whatever else is around a cut could be one kernel.
    """
    return _saved(blocks) >= WORTH and any(
        _torch_compat.nodes.called_name(node) in _PRODUCTS for node in blocks[0].nodes
    )


def _from_product_to_product(gm: GraphModule, groups: Sequence[Sequence[Block]]) -> list[Block]:
    """The blocks of all *groups*, each from its first product of what the block before it gives to that of the next.

    A layer of a Llama, norm | product … product + residual, then ends with the norm of the next one. Where gradients
    are needed, blocks stay as they are: the result of the norm would be saved for the backward, which otherwise
    computes it again.
    """
    blocks = [block for alike in groups for block in alike]
    tensors_of = _torch_compat.nodes.tensors_of
    if any(tensor.requires_grad for block in blocks for node in block.nodes for tensor in tensors_of(node)):
        return blocks
    calls = [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
    following, inside = dict(itertools.pairwise((*calls, None))), dict(zip(calls, opened(calls), strict=False))
    from_first: dict[Node | None, Block] = {block.nodes[0]: block for block in blocks}
    after = {block: from_first.get(following[block.nodes[-1]]) for block in blocks}
    before = {later: block for block, later in after.items() if later is not None}
    starts: dict[Block | None, int] = {None: 0}
    for alike in groups:
        reading = next((block for block in alike if block in before), None)
        start = 0 if reading is None else _first_product_of(before[reading].nodes, reading.nodes)
        can_be_cut = not any(any(inside[block.nodes[start]]) for block in alike)
        starts |= dict.fromkeys(alike, start if can_be_cut else 0)
    return [
        Block(block.kind, block.nodes[starts[block] :] + (() if later is None else later.nodes[: starts[later]]))
        for block, later in after.items()
    ]


def _first_product_of(given: Sequence[Node], nodes: Sequence[Node]) -> int:
    """The place in *nodes* of the first product of something that is computed from *given*; 0 if there is none."""
    reached = set(given)
    for place, node in enumerate(nodes):
        if not reached.isdisjoint(node.all_input_nodes):
            if _torch_compat.nodes.called_name(node) in _PRODUCTS:
                return place
            reached.add(node)
    return 0


def _are_written_after_a_cut(gm: GraphModule, blocks: Sequence[Block]) -> bool:
    """Whether a piece would write to a tensor of an earlier one that has a backward, if *gm* is cut around *blocks*.

    Autograd refuses a backward for which a tensor was saved before such a write. That may be any tensor of a piece,
    because the partitioner can save what a value is computed from in place of the value.
    """
    block_of = {node: place for place, block in enumerate(blocks) for node in block.nodes}
    storage, tensors_of = _torch_compat.values.storage_id, _torch_compat.nodes.tensors_of
    earlier, current = set[int](), set[int]()
    before: int | None = None
    has_backward = False
    for node in gm.graph.nodes:
        if not node.op.startswith("call_"):
            continue
        if block_of.get(node) != before:
            before = block_of.get(node)
            earlier |= current if has_backward else set()
            current, has_backward = set(), False
        written = _torch_compat.nodes.written_tensors(node)
        if any(storage(tensor) in earlier for tensor in written):
            return True
        made, used = tensors_of(node), [tensor for n in node.all_input_nodes for tensor in tensors_of(n)]
        has_backward |= any(tensor.requires_grad for tensor in (*made, *written))
        current.update(map(storage, (*made, *used)))
    return False


def _repeated(gm: GraphModule) -> list[list[Block]]:
    """The blocks that are equal to another one, those first of which one for all saves most calls."""
    sketches: dict[Hashable, list[Block]] = {}
    for block in _blocks(gm):
        if len(block.nodes) >= SMALLEST:
            sketch = (block.kind, *((node.op, node.target) for node in block.nodes))
            sketches.setdefault(sketch, []).append(block)
    several = [alike for alike in sketches.values() if len(alike) > 1]
    if several:
        _torch_compat.symbols.capture_with_constants(gm)
    groups: dict[Hashable, list[Block]] = {}
    for alike in several:
        for block in alike:
            inside, used = set(block.nodes), {n: None for node in block.nodes for n in node.all_input_nodes}
            structure = _structure(gm, [n for n in used if n not in inside], block.nodes)
            groups.setdefault(structure, []).append(block)
    return sorted((group for group in groups.values() if len(group) > 1), key=_saved, reverse=True)


def _saved(blocks: Sequence[Block]) -> int:
    """The number of calls that need not be compiled if one of *blocks* is compiled for all."""
    return sum(len(block.nodes) for block in blocks[1:])


def _blocks(gm: GraphModule) -> Iterator[Block]:
    """Each run of calls during one call of a module, where the graph can be cut before and after it."""
    calls = [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
    inside = opened(calls)
    stacks: list[dict[Any, Any]] = [node.meta.get("nn_module_stack") or {} for node in calls]
    # Dynamo does not say which module opens or closes a context, so it is the one of the call after or before that.
    for place in reversed(range(len(calls) - 1)):
        if not stacks[place] and inside[place + 1] > inside[place]:
            stacks[place] = stacks[place + 1]
    since: dict[tuple[str, type], int] = {}
    for place, stack in enumerate((*stacks, {})):
        if not stack and place and any(inside[place]) and place < len(calls):
            continue
        modules = dict.fromkeys(stack.values())
        for module in [module for module in since if module not in modules]:
            start = since.pop(module)
            if not any(inside[start] + inside[place]):
                yield Block(getattr(module[1], "__name__", str(module[1])), tuple(calls[start:place]))
        for module in modules:
            since.setdefault(module, place)


def opened(calls: Sequence[Node]) -> list[tuple[int, bool, int]]:
    """What is open before each of *calls*, and after: regions of ``torch.func`` or similar, grad mode, and autocast.

    That is how many, whether the mode is the other one, and how many. The calls that open and close a region are in
    the graph, which cannot be cut between them.
    """
    found, nesting, autocast = list[tuple[int, bool, int]](), 0, 0
    grad_mode: object = torch.is_grad_enabled()
    for node in calls:
        found.append((nesting, grad_mode != torch.is_grad_enabled(), autocast))
        nesting += _torch_compat.nodes.nesting(node)
        autocast += node.target is _torch_compat.nodes.ENTER_AUTOCAST
        autocast -= node.target is _torch_compat.nodes.EXIT_AUTOCAST
        if node.target is _torch_compat.nodes.SET_GRAD_MODE:
            grad_mode = node.args[0]
    return [*found, (0, False, 0)]


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
        if isinstance(value, torch.Tensor) and _torch_compat.values.is_plain_fake(value):
            shared = storages.setdefault(_torch_compat.values.storage_id(value), len(storages))
            flags = (value.requires_grad, value.is_leaf, value.is_conj(), value.is_neg())
            numbers = (*value.shape, *value.stride(), value.storage_offset(), _torch_compat.values.float_memo(value))
            symbolic = (torch.SymInt, torch.SymFloat)
            expressions = tuple(each.node.expr if isinstance(each, symbolic) else each for each in numbers)
            return (type(value), value.dtype, value.device, flags, expressions, shared)
        if isinstance(value, (tuple, list)):
            return (type(value), *map(of, value))
        if isinstance(value, dict):
            return (dict, *((name, of(each)) for name, each in value.items()))
        if isinstance(value, (slice, functools.partial)):
            return (type(value), of(value.__reduce__()[1:]))
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
            # Which of its calls ``torch.utils.checkpoint`` saves is an attribute of a body.
            target = (piece_structure(body), of(body.meta)) if isinstance(body, GraphModule) else _Itself(body)
        used_outside = any(user not in places for user in node.users)
        annotation = repr(node.meta.get("custom"))
        return (node.op, target, of(node.args), of(kwargs), result(node), used_outside, annotation)

    def result(node: Node) -> Hashable:
        # Any other object, such as the context of autocast, follows from the call that makes it.
        leaves = pytree.tree_leaves(node.meta.get("example_value"))
        return tuple(of(leaf) if isinstance(leaf, _NUMBERS) else type(leaf) for leaf in leaves)

    given = tuple(call(node) if node in held else of(node.meta.get("example_value")) for node in inputs)
    return (given, tuple(call(node) for node in nodes))


_NUMBERS = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float)


@dataclass(frozen=True)
class _Itself:
    """An object that is equal to itself only, if it has no equality of its own that is known to mean the same code."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
