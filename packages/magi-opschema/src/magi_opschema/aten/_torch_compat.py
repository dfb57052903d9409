# SPDX-License-Identifier: Apache-2.0
"""The private torch names that the ATen surface uses, one function per quirk."""

from __future__ import annotations

import functools as ft
from typing import TYPE_CHECKING, Any

import torch


if TYPE_CHECKING:
    from collections.abc import Callable


OpOverload = torch._ops.OpOverload


def dispatcher_callable(overload: OpOverload) -> Callable[..., Any]:
    """The builtin behind an overload, which `OpOverload.__call__` only forwards to (torch 2.10 to 2.15).

    The same dispatch without a Python frame: 0.85 of the time on 16 floats. Dynamo cannot trace it.
    """
    callable_: Callable[..., Any] = overload._op
    return callable_


def find_overload(base: str, name: str) -> OpOverload | None:
    """ATen's overload, `default` for the unnamed one; None where torch has none (torch 2.10 to 2.15)."""
    overload = getattr(getattr(torch.ops.aten, base, None), name, None)
    return overload if isinstance(overload, OpOverload) else None


def arguments(overload: OpOverload) -> list[torch._C.Argument]:
    """The arguments of an overload's schema, out arguments among them (torch 2.10 to 2.15)."""
    return list(overload._schema.arguments)


def schema_text(overload: OpOverload) -> str:
    """The schema behind the name, `(Tensor self, Scalar other) -> Tensor` (torch 2.10 to 2.15)."""
    text = str(overload._schema)
    return text[text.index("(") :]


def plain_dispatch() -> bool:
    """Whether a call goes straight to the kernel: no mode, no functorch transform, no autocast is active.

    torch 2.10 to 2.15; the same three stacks that `torch.overrides` and `torch._functorch` keep.
    """
    c = torch._C
    return not (
        c._len_torch_dispatch_stack()
        or c._len_torch_function_stack()
        or c._is_any_autocast_enabled()
        or c._functorch.peek_interpreter_stack() is not None
    )


@ft.cache
def supports_tag_out() -> bool:
    """Whether `torch.Tag.out` serves custom operators; before torch 2.13 AOTAutograd refuses an aliased return."""
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return release >= (2, 13) and hasattr(torch.Tag, "out")


def below_autograd() -> Any:
    """A context in which operators skip their autograd kernels (torch 2.10 to 2.15, as torch/_library/autograd.py)."""
    return torch._C._AutoDispatchBelowAutograd()


def after_autograd(keyset: torch._C.DispatchKeySet) -> torch._C.DispatchKeySet:
    """*keyset* without autograd (torch 2.10 to 2.15, as torch/_library/autograd.py)."""
    return keyset & torch._C._after_autograd_keyset


def after_inplace_or_view(keyset: torch._C.DispatchKeySet) -> torch._C.DispatchKeySet:
    """*keyset* without ADInplaceOrView (torch 2.10 to 2.15, as torch/_library/custom_ops.py)."""
    return keyset & torch._C._after_ADInplaceOrView_keyset


def below_inplace_or_view() -> Any:
    """A context in which operators skip ADInplaceOrView (torch 2.10 to 2.15, as torch/_library/custom_ops.py)."""
    return torch._C._AutoDispatchBelowADInplaceOrView()


def is_traced_tensor(type_: type) -> bool:
    """Whether tensors of this class stand for others while a graph is made (torch 2.10 to 2.15)."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return issubclass(type_, (FakeTensor, FunctionalTensor))
