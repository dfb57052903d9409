# SPDX-License-Identifier: Apache-2.0
"""The type of what the decorator returns, for type checkers, and how it is made."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import torch


P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
F = TypeVar("F", bound=Callable[..., Any])


class RegisteredOp(Protocol[P, R_co]):
    """A function that calls a registered op, with the name, doc, signature, hints and pickle of the user's function.

    Attributes:
        torch_op: the OpOverload that graphs hold, and that torch's own functions accept.
    """

    __name__: str
    __qualname__: str
    __module__: str
    __source__: str
    torch_op: torch._ops.OpOverload

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def register_fake(self, fn: F) -> F: ...
    @overload
    def register_fake(self, fn: None = None) -> Callable[[F], F]: ...

    def register_autograd(self, backward: F, /, *, setup_context: Callable[..., None] | None = None) -> F: ...

    @overload
    def register_kernel(self, device_type: str, fn: F) -> F: ...
    @overload
    def register_kernel(self, device_type: str, fn: None = None) -> Callable[[F], F]: ...

    @overload
    def register_vmap(self, rule: F) -> F: ...
    @overload
    def register_vmap(self, rule: None = None) -> Callable[[F], F]: ...

    def register_autocast(self, device_type: str, dtype: torch.dtype) -> None: ...

    @overload
    def register_sharding(self, rule: F) -> F: ...
    @overload
    def register_sharding(self, rule: None = None) -> Callable[[F], F]: ...


def make_registered_op(
    exposed: Any, torch_op: Any, fn: Callable[..., Any], signature: inspect.Signature, hints: dict[str, object]
) -> Any:
    """*exposed*, which calls *torch_op*, with the identity of *fn* and the methods of `RegisteredOp`.

    *signature* is that of *fn*, and *hints* are its evaluated annotations.
    """
    from magi_opschema._lowering.signature import TORCH_OP_ATTRIBUTE

    from . import rules

    exposed.__name__, exposed.__qualname__, exposed.__module__ = fn.__name__, fn.__qualname__, fn.__module__
    exposed.__doc__, exposed.__signature__, exposed.__annotations__ = fn.__doc__, signature, hints
    exposed.torch_op = torch_op
    setattr(exposed, TORCH_OP_ATTRIBUTE, torch_op)
    for method in (
        rules.register_fake,
        rules.register_autograd,
        rules.register_kernel,
        rules.register_vmap,
        rules.register_autocast,
        rules.register_sharding,
    ):
        setattr(exposed, method.__name__, functools.partial(method, torch_op))
    return exposed
