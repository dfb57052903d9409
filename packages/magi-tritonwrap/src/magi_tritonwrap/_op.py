# SPDX-License-Identifier: Apache-2.0
"""A custom op whose body launches Triton kernels: `torch.library.triton_op` without `wrap_triton`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from ._find import find_kernels
from ._launch.body_as_fake import fake_from_body
from ._launch.capture import launch_directly
from ._launch.on_cpu import translate_cpu_errors
from ._see_through import OnUnsupported, define_see_through, why_refused
from ._torch_compat.operators import overload_of


if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef


Body = TypeVar("Body", bound=Callable[..., Any])


@overload
def triton_op(
    name: str,
    fn: None = None,
    /,
    *,
    mutates_args: str | Iterable[str],
    schema: str | None = None,
    on_unsupported: OnUnsupported = ...,
) -> Callable[[Callable[..., Any]], CustomOpDef]: ...


@overload
def triton_op(
    name: str,
    fn: Callable[..., Any],
    /,
    *,
    mutates_args: str | Iterable[str],
    schema: str | None = None,
    on_unsupported: OnUnsupported = ...,
) -> CustomOpDef: ...


def triton_op(
    name: str,
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mutates_args: str | Iterable[str],
    schema: str | None = None,
    on_unsupported: OnUnsupported = "error",
) -> CustomOpDef | Callable[[Callable[..., Any]], CustomOpDef]:
    """Create a custom op that `torch.compile` sees through, from a body with plain Triton launches.

    Like `torch.library.triton_op`, but the body needs no `wrap_triton`, helpers in other modules count, `schema` is
    honoured (torch ignores it), and everything that shapes the graph reaches the compile cache.

    Args:
        name: `namespace::name`.
        fn: the body; it may consist of PyTorch operators and Triton launches. Without one, a decorator is returned.
        mutates_args: names of the arguments that the body writes; this must be accurate.
        on_unsupported: as for `make_see_through`.
        schema: for example `"(Tensor x, int[] sizes) -> Tensor"`; without one it is inferred from the annotations.

    Returns:
        torch.library.CustomOpDef: for `register_autograd`, `register_kernel("cpu")` and the rest of torch's methods.

    Raises:
        UnsupportedKernelError: a kernel is decorated in a way that torch cannot compile.

    Example:
        >>> import torch
        >>> @triton_op("doc_triton_op::double", mutates_args=())
        ... def double(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 2
        >>> double(torch.ones(2))
        tensor([2., 2.])
    """
    if fn is None:
        return lambda body: _define(name, body, mutates_args, schema, on_unsupported)
    return _define(name, fn, mutates_args, schema, on_unsupported)


def _define(
    name: str,
    fn: Callable[..., Any],
    mutates_args: str | Iterable[str],
    schema: str | None,
    on_unsupported: OnUnsupported,
) -> CustomOpDef:
    found = find_kernels(fn)
    why_refused(found, on_unsupported)
    eager = launch_directly(fn) if found.may_wrap else fn
    eager = translate_cpu_errors(eager, name) if found.kernels else eager
    mutated = mutates_args if isinstance(mutates_args, str) else tuple(mutates_args)
    text = schema if schema is not None else torch.library.infer_schema(fn, mutates_args=mutated)
    op: CustomOpDef = torch.library.custom_op(name, eager, mutates_args=mutated, schema=text)
    op.register_fake(fake_from_body(fn))
    define_see_through(overload_of(op), fn, found, on_unsupported)
    return op
