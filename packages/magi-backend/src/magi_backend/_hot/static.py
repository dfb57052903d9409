# SPDX-License-Identifier: Apache-2.0
"""A captured graph with numbers in place of its symbols."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from . import _torch_compat
from .inputs import StaysSymbolicError


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.fx import GraphModule, Node


def put_numbers(gm: GraphModule, values: Mapping[Any, int], world: _torch_compat.FakeWorld) -> None:
    """Replace the sizes in *gm* by numbers: its inputs that are sizes, and what it computes from them.

    Each other node, also in the graphs inside it, gets the example value that it has at this size, which passes before
    AOTAutograd and the splitting at boundary operators read.
    """
    nodes = [
        node
        for module in gm.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if "example_value" in node.meta
    ]
    twins = Twins(values, world)
    twins.describe([node.meta["example_value"] for node in nodes])
    for node in nodes:
        value = node.meta["example_value"]
        if isinstance(value, torch.SymInt) and node.graph is gm.graph and _torch_compat.as_int(value, values) is None:
            continue  # an int that stays an input
        node.meta["example_value"] = number = twins.of(value)
        if isinstance(value, torch.SymInt) and node.graph is gm.graph:
            _replace(node, number)
    gm.recompile()


def _replace(node: Node, number: int) -> None:
    for user in list(node.users):
        user.args = map_arg(user.args, lambda n: number if n is node else n)
        user.kwargs = map_arg(user.kwargs, lambda n: number if n is node else n)
    node.graph.erase_node(node)


class Twins:
    """The fake tensors of one size: a twin for each captured tensor. Twins share memory as the captured tensors do.

    Args:
        values: The number of each symbol.
        world: The fake mode of the new tensors.
    """

    def __init__(self, values: Mapping[Any, int], world: _torch_compat.FakeWorld) -> None:
        self._values = values
        self._make = _torch_compat.FakeMaker(world)
        self._descriptions: dict[int, Any] = {}
        self._made: dict[int, torch.Tensor] = {}

    def describe(self, trees: Sequence[Any]) -> None:
        """Describe the tensors in *trees*, so that :meth:`of` knows them."""
        tensors = [leaf for tree in trees for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        for tensor, description in zip(tensors, _torch_compat.describe(tensors), strict=True):
            self._descriptions.setdefault(id(tensor), description)

    def of(self, tree: Any) -> Any:
        """*tree* with tensors replaced by their twins, and sizes by their numbers."""
        return pytree.tree_map(self._leaf, tree)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in self._made:
                self._made[id(leaf)] = self.of_description(self._descriptions[id(leaf)])
            return self._made[id(leaf)]
        return self._number(leaf) if isinstance(leaf, torch.SymInt) else leaf

    def of_description(self, description: Any) -> torch.Tensor:
        """The tensor that *description* describes with symbols."""
        made = self._make(self._static(_alone_where_needed(description, self._values)))
        left = _torch_compat.free_symbols(made)
        if left:
            msg = f"a {type(made).__name__} keeps the symbols {', '.join(sorted(map(str, left)))}"
            raise StaysSymbolicError(msg)
        return made

    def _number(self, number: Any) -> int:
        value = _torch_compat.as_int(number, self._values)
        if value is None:
            msg = f"the size {number} does not follow from the sizes of the inputs"
            raise StaysSymbolicError(msg)
        return value

    def _static(self, value: Any) -> Any:
        """*value*, a description or a part of one, without symbols."""
        if isinstance(value, torch.SymInt):
            return self._number(value)
        if isinstance(value, torch.Size):
            return torch.Size([self._static(item) for item in value])
        if isinstance(value, tuple | list):
            items = [self._static(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {key: self._static(item) for key, item in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._static_fields(value)
        return value

    def _static_fields(self, value: Any) -> Any:
        old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        if _torch_compat.is_description(value):
            # The mode and the hints belong to the capture; a gradient is not an input of the graph.
            old |= {name: None for name in ("fake_mode", "grad") if name in old}
            old |= {"dynamo_dynamic_indices": []} if "dynamo_dynamic_indices" in old else {}
            old |= {"dynamo_hint_overrides": {}} if "dynamo_hint_overrides" in old else {}
        new = {name: self._static(item) for name, item in old.items()}
        if all(new[name] is getattr(value, name) for name in new):
            return value
        twin = copy.copy(value)
        for name, item in new.items():
            try:
                setattr(twin, name, item)  # by its own method if it has one: a DTensor's spec resets its hash there
            except dataclasses.FrozenInstanceError:
                object.__setattr__(twin, name, item)
        return twin


def _alone_where_needed(description: Any, values: Mapping[Any, int]) -> Any:
    """*description* without its base, if the sizes of the base do not follow from the inputs.

    Dynamo gives the base of an input symbols that no input binds. Memory that inputs share stays shared; its size
    beyond what the inputs use does not matter.
    """
    changes: dict[str, Any] = {}
    if description.base is not None and _unknown(description.base, values):
        changes |= {"base": None, "is_view": False, "creation_meta": None}
    storage = description.storage
    if storage is not None and _is_unknown(storage.size, values):
        changes["storage"] = dataclasses.replace(storage, size=0)
    return dataclasses.replace(description, **changes) if changes else description


def _unknown(description: Any, values: Mapping[Any, int]) -> bool:
    numbers = [*description.size, *(description.stride or ()), description.storage_offset]
    if description.storage is not None:
        numbers.append(description.storage.size)
    return any(_is_unknown(number, values) for number in numbers) or (
        description.base is not None and _unknown(description.base, values)
    )


def _is_unknown(number: Any, values: Mapping[Any, int]) -> bool:
    return isinstance(number, torch.SymInt) and _torch_compat.as_int(number, values) is None
