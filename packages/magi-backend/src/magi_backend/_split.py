# SPDX-License-Identifier: Apache-2.0
"""Cut a captured graph at boundary operators, and around blocks that repeat.

Each boundary operator becomes a piece of its own, which is not compiled; so does each block, and the calls between two
of them. Calls keep their order, so that writes into a tensor happen at the same place:

    a = x.relu(); b = ns::attend(a); c = b + 1     ->     piece 0: relu | ns::attend | piece 1: add
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from magi_passes import AttentionMaskPass, collect_records
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module

from . import _torch_compat
from ._regions import Block, opened
from ._register import registered
from .errors import BoundaryOpError, did_you_mean


@dataclass(frozen=True)
class Split:
    """A graph whose calls are in submodules, one for each piece, in order."""

    module: GraphModule
    titles: dict[str, str]
    """The title of each submodule in the report: "piece 3", or the name of the boundary operator."""
    boundaries: frozenset[str]
    """The submodules that are boundary operators, which are not compiled."""
    changed: tuple[str, ...]
    """A sentence for what was changed in the graph before it was cut."""


def boundary_overloads(names: Collection[str]) -> frozenset[str]:
    """The full names of the overloads of operators called *names*, ``ns::op`` or ``ns::op.overload``.

    They are names, because an operator that was registered again may have several OpOverloads: torch makes another one
    when it collects the earlier library (torch/library.py, ``_clear_torch_ops_cache``).

    Raises:
        BoundaryOpError: There is no such operator.
    """
    found: set[str] = set()
    for name in names:
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        packet: Any = getattr(getattr(torch.ops, namespace, None), base, None) if base else None
        if not _torch_compat.nodes.overloads_of(packet):
            close = get_close_matches(name, _torch_compat.nodes.operator_names(), n=3)
            raise BoundaryOpError(
                f"magi.boundary_ops names {name!r}, but no such operator is registered.{did_you_mean(close)} "
                "Names have the form 'namespace::op'; import the module that registers it before the first call."
            )
        found |= {getattr(packet, each).name() for each in ([overload] if overload else packet.overloads())}
    return frozenset(found)


def split_at(gm: GraphModule, named: frozenset[str], blocks: Collection[Block] = ()) -> Split | None:
    """Split *gm* at registered subgraph boundaries, at the overloads *named*, and around *blocks*; None without any."""
    boundaries = [node for node in gm.graph.nodes if is_boundary(node, named)]
    if not boundaries and not blocks:
        return None
    with collect_records() as of_masks:
        AttentionMaskPass()(gm.graph)  # what a mask is computed from is in another piece than attention
    for node in list(gm.graph.nodes):
        # ``y = x.add_(1); f(y)`` becomes ``x.add_(1); f(x)``: the tensor has one name before and after the write.
        value = node.meta.get("example_value")
        if node.op.startswith("call_") and isinstance(value, torch.Tensor):
            written = next((n for n in node.all_input_nodes if n.meta.get("example_value") is value), None)
            if written is not None:
                node.replace_all_uses_with(written)
    titles: dict[int, str] = {}
    places = _places(gm, frozenset(boundaries), {node: block for block in blocks for node in block.nodes}, titles)
    _copy_to_users(gm, places)
    module = split_module(gm, None, places.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
    pieces = {int(str(node.target).removeprefix("submod_")) for node in module.graph.find_nodes(op="call_module")}
    unnamed = (place for place in sorted(pieces) if place not in titles)
    titles |= {place: f"piece {index}" for index, place in enumerate(unnamed)}
    return Split(
        module,
        {f"submod_{place}": titles[place] for place in sorted(pieces)},
        frozenset(f"submod_{places[node]}" for node in boundaries),
        tuple(f"before the cuts: {record.reason}" for record in of_masks if record.ran),
    )


def uncut_boundaries(gm: GraphModule, named: frozenset[str]) -> tuple[str, ...]:
    """A sentence for each boundary operator inside the body of a higher-order operator, where *gm* cannot be cut."""
    found: dict[str, None] = {}
    for node in gm.graph.nodes:
        for body in _torch_compat.nodes.bodies(gm, node):
            inside = [each for each in _torch_compat.nodes.nodes_in(body) if is_boundary(each, named)]
            for name in dict.fromkeys(map(_torch_compat.nodes.called_overload, inside)):
                written = _WRITTEN.get(str(node.target), f"the higher-order operator {node.target}")
                found[
                    f"{name} is a subgraph boundary, but the graph is not cut there, because the call is inside "
                    f"{written}, whose body is compiled as a whole. Call it outside of that, or compile the parts "
                    "around it by themselves."
                ] = None
    return tuple(found)


_WRITTEN = {
    "invoke_subgraph": "torch.compiler.nested_compile_region",
    "tag_activation_checkpoint": "torch.utils.checkpoint",
    "autograd_function_apply": "a torch.autograd.Function",
    "cond": "torch.cond",
}
"""What users write for a higher-order operator of another name."""


def is_boundary(node: Node, named: frozenset[str]) -> bool:
    """Whether *node* calls a boundary operator: one of those *named*, or one that was registered as such."""
    if node.op != "call_function":
        return False
    definition = registered(node.target)
    if definition is not None and "subgraph_boundary" in definition.traits:
        return True
    return bool(named) and _torch_compat.nodes.called_overload(node) in named


def _places(
    gm: GraphModule, boundaries: frozenset[Node], blocks: Mapping[Node, Block], titles: dict[int, str]
) -> dict[Node, int]:
    """The number of the piece that each node belongs to; *titles* gets those of boundary operators and of *blocks*."""
    places: dict[Node, int] = {}
    piece: object = None
    current = 0
    for node in gm.graph.nodes:
        if not node.op.startswith("call_"):
            continue
        if (source := _torch_compat.nodes.tuple_of(node)) in places:
            # A tuple must not be passed between pieces, so its items are taken in the piece that makes it.
            places[node] = places[source]
            continue
        own = node if node in boundaries else blocks.get(node)
        if own is not piece:
            current, piece = current + 1, own
            if own is not None:
                titles[current] = own.kind if isinstance(own, Block) else _torch_compat.nodes.called_overload(own)
        places[node] = current
    return places


def _copy_to_users(gm: GraphModule, places: dict[Node, int]) -> None:
    """Give each piece its own copy of the numbers and the views that it uses.

    With dynamic sizes, Dynamo makes a tensor of a float input and reads it back by ``.item()``. A number that is passed
    from one piece to the next would be an output of a compiled piece, and only tensors and sizes can be outputs. If a
    tensor and a view of it enter a piece that writes into one of them, the piece must know that they share memory. So
    only the tensor is passed, and each piece makes the views that it uses.

    A view that is made where gradients are off has none, so its copy must not be made where they are on, nor the other
    way round. It is copied to the start of a piece, and passed to one that starts inside another region than it.
    """
    regions = {node: inside[:2] for node, inside in zip(places, opened(list(places)), strict=False)}
    starts: dict[int, Node] = {}
    for node, place in places.items():
        starts.setdefault(place, node)
    numbers, views = _numbers(places), set(filter(_is_view, places))
    copies: dict[tuple[Node, int], Node] = {}

    def copy_in(original: Node, place: int) -> Node:
        is_moved = original in numbers or (original in views and regions[original] == regions[starts[place]])
        if not is_moved or places[original] == place:
            return original
        if (original, place) not in copies:
            inputs = {n: copy_in(n, place) for n in original.all_input_nodes}
            with gm.graph.inserting_before(starts[place]):
                twin = gm.graph.node_copy(original, inputs.__getitem__)
            copies[original, place] = twin
            places[twin] = place
        return copies[original, place]

    for node in list(places):
        if node not in numbers | views:
            for used in node.all_input_nodes:
                node.replace_input_with(used, copy_in(used, places[node]))
    for node in reversed(list(gm.graph.nodes)):
        if node in numbers | views and not node.users:
            gm.graph.erase_node(node)
            del places[node]


def _numbers(nodes: Iterable[Node]) -> set[Node]:
    """The numbers among *nodes* that are computed only from inputs of the graph, and the shapes of tensors.

    A shape is a tuple, which no piece returns, and each piece can ask the tensor for it.
    """
    found: set[Node] = set()
    for node in nodes:
        value = node.meta.get("example_value")
        is_number = isinstance(value, torch.SymFloat | torch.SymBool | float)
        is_of_inputs = is_number and all(n.op == "placeholder" or n in found for n in node.all_input_nodes)
        if is_of_inputs or isinstance(value, torch.Size):
            found.add(node)
    return found


def _is_view(node: Node) -> bool:
    """Whether *node* is a view of its inputs, or a tuple of views, whose gradient is that of a view."""
    if (source := _torch_compat.nodes.tuple_of(node)) is not None:
        return _is_view(source)  # an item of an operator's result shares its memory, but is not a view
    # Such as an autograd.Function that gives a view.
    has_body = _torch_compat.nodes.is_higher_order(node.target)
    if not node.op.startswith("call_") or has_body or _torch_compat.nodes.written_tensors(node):
        return False
    results, inputs = _storages(node), {storage for n in node.all_input_nodes for storage in _storages(n)}
    return bool(results) and all(storage in inputs for storage in results)


def _storages(node: Node) -> list[int]:
    return [_torch_compat.values.storage_id(tensor) for tensor in _torch_compat.nodes.tensors_of(node)]


def compile_pieces(
    split: Split, compile_piece: Callable[[GraphModule, list[Any], str], Callable[..., Any]]
) -> Callable[..., Any]:
    """Compile each piece except boundary operators, with the fake inputs that Dynamo left in the graph.

    Returns:
        The function of the split module, which calls those of its pieces. None is called as a module, which costs a
        microsecond each, and runs the hooks that a user put on all modules.
    """
    for attribute, title in split.titles.items():
        part = split.module.get_submodule(attribute)
        assert isinstance(part, GraphModule)
        if attribute in split.boundaries:
            compiled: Callable[..., Any] = GraphModule(part, part.graph).forward  # that of a lazy one calls the module
        else:
            inputs = [node.meta["example_value"] for node in part.graph.find_nodes(op="placeholder")]
            compiled = compile_piece(part, _torch_compat.compiling.backend_fakes(inputs), title)
        delattr(split.module, attribute)
        vars(split.module)[attribute] = compiled
    return split.module.forward
