# SPDX-License-Identifier: Apache-2.0
"""Expressions that read a buffer are computed before an operator writes to it (torch >= 2.10).

``FallbackKernel`` first registers itself as an operation, and then, in ``MutationOutput``, realizes the pointwise
expressions that read the old value. So these are computed after the write, and read the new value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ._defect import Defect
from ._scope import is_active, replace, report_if


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


NAME = "realize_readers_first"


def _readers(kernel: Any, tensors: Any, others: Any, unflatten: Any) -> Iterator[Any]:
    """The buffers that read the arguments that *kernel* writes to, and that may not be computed yet."""
    from torch._inductor.virtualized import V

    args, kwargs = unflatten(tensors, others)
    for info, arg in torch._library.utils.zip_schema(kernel._schema, args, kwargs):
        if info.alias_info is not None and info.alias_info.is_write:
            for tensor in arg if isinstance(arg, (list, tuple)) else (arg,):
                if tensor is not None:
                    yield from list(V.graph.name_to_users.get(tensor.get_name(), ()))


def _realize(readers: Iterator[Any]) -> None:
    """Compute *readers* here, and report the repair if any of them is used in the end."""
    from torch._inductor.virtualized import V

    graph = V.graph
    known = len(graph.operations)
    for reader in readers:
        reader.realize()
    names = [operation.get_operation_name() for operation in graph.operations[known:]]
    # The scheduler drops buffers that nothing uses, whichever value they would have read.
    if names:
        report_if(NAME, lambda: any(name not in graph.removed_operations for name in names))


def patch() -> None:
    """Realize the readers before the operator is registered."""
    from torch._inductor.ir import FallbackKernel

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(  # noqa: N807 - it takes the place of one
            self: Any, layout: Any, kernel: Any, tensors: Any, others: Any, unflatten: Any, *args: Any, **kwargs: Any
        ) -> None:
            if is_active(NAME) and isinstance(kernel, torch._ops.OpOverload) and kernel._schema.is_mutable:
                _realize(_readers(kernel, tensors, others, unflatten))
            original(self, layout, kernel, tensors, others, unflatten, *args, **kwargs)

        return __init__

    replace(FallbackKernel, "__init__", make)


DEFECT = Defect(
    name=NAME,
    effect="what was computed from a buffer before a custom operator writes to it is computed from the new value",
    severity="wrong code",
    since=(2, 10, 0),
    fixed=None,
    repair="the old value is read before the write",
    patch=patch,
)
