# SPDX-License-Identifier: Apache-2.0
"""The registered operators that a graph calls."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import magi_opschema
from magi_opschema.errors import UnknownOpError
from torch.fx import GraphModule

from magi_backend import _torch_compat

from .records import OpUse


if TYPE_CHECKING:
    from magi_opschema import OpDef


def op_uses(gm: GraphModule) -> tuple[OpUse, ...]:
    """Each operator registered through magi-opschema that *gm* calls, also in nested graphs, in order of appearance."""
    calls: Counter[Any] = Counter(
        node.target
        for module in gm.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
        if node.op == "call_function"
    )
    found = ((registered(target), count) for target, count in calls.items())
    return tuple(_use(definition, count) for definition, count in found if definition is not None)


def registered(target: object) -> OpDef | None:
    """The definition of the operator that a graph node calls; None if it was not registered with magi-opschema."""
    if not _torch_compat.is_operator(target):
        return None
    try:
        return magi_opschema.op_def(target)
    except UnknownOpError:
        return None


def _use(definition: OpDef, calls: int) -> OpUse:
    return OpUse(
        name=definition.name,
        path=definition.path,
        calls=calls,
        description=str(definition),
        boundary="subgraph_boundary" in definition.traits,
        compute_sensitive="compute_sensitive" in definition.traits,
        floats=tuple(
            ".".join(map(str, leaf.path)) for leaf in definition.lowering.leaves if leaf.schema_type.startswith("float")
        ),
    )
