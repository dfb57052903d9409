# SPDX-License-Identifier: Apache-2.0
"""A wrong compiler, to plant a defect that `magi.check` and `explain` must find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass


aten = torch.ops.aten


@dataclass(frozen=True)
class Becomes(CustomGraphPass):
    """Calls *other* in place of *target*; with *before*, only where that is called on the result."""

    target: Any
    other: Any = aten.abs.default
    before: Any = None

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=self.target):
            if self.before is None or any(user.target is self.before for user in node.users):
                node.target = self.other

    def uuid(self) -> None:
        return None


COS_BECOMES_SIN = Becomes(aten.cos.default, aten.sin.default)
