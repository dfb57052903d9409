# SPDX-License-Identifier: Apache-2.0
"""Symbolic paddings that are always zero, made zero for the compiler.

A causal convolution over time that keeps a cache pads by what the cache does not cover:

    x = torch.cat([cache, x], dim=2)
    x = F.pad(x, [1, 1, 1, 1, 2 - cache.shape[2], 0])

With symbolic sizes, the amount ``2 - s`` is in the graph although it is 0 in each call. So a padded copy is written,
and every later index divides by symbols. With a guard that the amount is zero, there is no copy; sizes for which it is
not zero cost one more compilation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from magi_passes import _torch_compat
from magi_passes._framework.graph_pass import MagiInductorPass
from magi_passes._framework.reason import Reason


if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import Graph, Node

    from magi_passes._framework.context import PassContext


# conv3d, conv_transpose2d, convolution.default
_CONVOLUTION = re.compile(r"conv(?:olution|[123]d|_transpose)")
_CONVOLUTION_MODULES = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


@dataclass(frozen=True)
class ZeroPadGuardPass(MagiInductorPass):
    """Guard on symbolic paddings that are zero for the example inputs, so that they leave the graph.

    Only paddings that a convolution reads are changed. Sizes for which such an amount is not zero compile once more,
    with the amount as a symbol, so there are at most two compilations for it. An amount that is not zero for the
    example inputs stays a symbol, and so does one that depends on data.
    """

    hook: ClassVar[str] = "pre_grad_custom_pass"

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:  # noqa: ARG002
        """It applies if some symbolic padding of a convolution is zero for the example inputs."""
        count = sum(1 for _ in _zero_amounts(graph))
        return Reason(count > 0, f"{count} symbolic paddings of convolutions are zero")

    def __call__(self, graph: Graph) -> None:
        """Add a guard for each of these amounts."""
        for amount in _zero_amounts(graph):
            _torch_compat.guard_on(amount == 0)


def _zero_amounts(graph: Graph) -> Iterator[torch.SymInt]:
    """The symbolic amounts that are zero now among those by which inputs of convolutions are padded."""
    pads = _torch_compat.paddings()
    for node in graph.nodes:
        if node.op == "call_function" and node.target in pads and any(map(_convolves, node.users)):
            flat: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("pad", ())
            for entry in flat if isinstance(flat, (list, tuple)) else ():
                amount = _symbolic(entry)
                if amount is not None and amount.node.has_hint() and _torch_compat.size_hint(amount) == 0:
                    yield amount


def _symbolic(entry: object) -> torch.SymInt | None:
    """The symbol that *entry*, one amount of a padding, stands for; None if it is a plain number."""
    if isinstance(entry, torch.fx.Node):
        # Dynamo keeps the value under the first name, AOTAutograd under the second.
        entry = entry.meta.get("example_value", entry.meta.get("val"))
    return entry if isinstance(entry, torch.SymInt) else None


def _convolves(node: Node) -> bool:
    """Whether *node* is a convolution, in the captured graph or after decomposition."""
    if node.op == "call_module":
        owner = node.graph.owning_module
        assert owner is not None
        return isinstance(owner.get_submodule(str(node.target)), _CONVOLUTION_MODULES)
    return node.op == "call_function" and _CONVOLUTION.match(getattr(node.target, "__name__", "")) is not None
