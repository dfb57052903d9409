# SPDX-License-Identifier: Apache-2.0
"""Symbolic sizes as 32-bit integers in the kernels of dynamic graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.fx.experimental.symbolic_shapes import has_free_symbols

from magi_passes import _torch_compat
from magi_passes._framework.compilation import current_compilation
from magi_passes._framework.context import Reason
from magi_passes._framework.graph_pass import MagiInductorPass


if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from typing import Any

    from torch.fx import Graph

    from magi_passes._framework.context import PassContext


@dataclass(frozen=True)
class NarrowSizesPass(MagiInductorPass):
    """Pass symbolic sizes to Triton kernels in 32 bits if the kernel counts its elements in 32 bits.

    Inductor passes them in 64 bits, so every index with a symbol is computed and divided in 64 bits. Guards ensure that
    everything that a kernel computes from sizes stays below 2**31; a larger size compiles once more, with 64 bits where
    they are needed. Nothing else in the kernel changes, and static graphs are not changed.

    Example:
        >>> from magi_passes import NarrowSizesPass, PassPipeline
        >>> options = PassPipeline([NarrowSizesPass()]).inductor_options()
    """

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:  # noqa: ARG002
        """It applies if a size is a symbol, on a GPU, and the call of Inductor passed through this package."""
        values = [value for node in graph.nodes if isinstance(value := node.meta.get("val"), torch.Tensor)]
        if not any(value.device.type == "cuda" and has_free_symbols(value) for value in values):
            return Reason(False, "no tensor of symbolic size on CUDA")
        if current_compilation() is None:
            return Reason(False, "called outside of a compilation")
        return Reason(True, "symbolic sizes")

    def __call__(self, graph: Graph) -> None:  # noqa: ARG002
        """Make code generation pass sizes in 32 bits."""
        compilation = current_compilation()
        if compilation is not None:
            compilation.requests.add(type(self).__name__)
            _torch_compat.kernels.install_narrow_sizes(_fitting_of_current)


def _fitting_of_current() -> MutableMapping[Any, bool] | None:
    compilation = current_compilation()
    is_asked = compilation is not None and NarrowSizesPass.__name__ in compilation.requests
    return compilation.fitting if compilation is not None and is_asked else None
