# SPDX-License-Identifier: Apache-2.0
"""The private torch names that the ATen surface uses, one function or constant for each quirk.

Each one works with torch 2.10 to 2.15 unless it says otherwise.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable
from typing import Any

import torch

from magi_opschema._torch_compat import OpOverload as OpOverload
from magi_opschema._torch_compat import are_transforms_active, count_dispatch_modes, count_function_modes


DispatchKeySet = torch._C.DispatchKeySet
"""The class of the first argument of an implementation with `with_keyset=True`."""


def dispatcher_callable(overload: OpOverload) -> Callable[..., Any]:
    """The builtin that `OpOverload.__call__` calls for an overload.

    It is the same dispatch without a Python frame, and takes 0.85 of the time on 16 floats. Dynamo cannot trace it.
    """
    callable_: Callable[..., Any] = overload._op
    return callable_


def find_overload(base: str, name: str) -> OpOverload | None:
    """ATen's overload, `default` for the unnamed one; None if torch does not have it."""
    overload = getattr(getattr(torch.ops.aten, base, None), name, None)
    return overload if isinstance(overload, OpOverload) else None


def arguments(overload: OpOverload) -> list[torch._C.Argument]:
    """The arguments of an overload's schema, including out arguments."""
    return list(overload._schema.arguments)


def written_arguments(overload: OpOverload) -> list[torch._C.Argument]:
    """The arguments that an overload writes, including out arguments."""
    return [a for a in arguments(overload) if a.alias_info is not None and a.alias_info.is_write]


takes_numbers: Callable[[str], bool] = torch._C._should_allow_numbers_as_tensors
"""Whether ATen makes a tensor of a Python number that is given to a base, such as `mul`, where its schema has one."""

dispatcher_schemas: Callable[[], list[torch._C.FunctionSchema]] = torch._C._jit_get_all_schemas
"""The schema of every registered overload, ATen's and others'."""

parsed_schema: Callable[[str], torch._C.FunctionSchema] = torch._C.parse_schema
"""The schema of a text such as `aten::add.Tensor(Tensor self, ...) -> Tensor`."""


def schema_text(overload: OpOverload) -> str:
    """The schema without the name, `(Tensor self, Scalar other) -> Tensor`."""
    text = str(overload._schema)
    return text[text.index("(") :]


_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


def plain_dispatch() -> bool:
    """Whether a call goes directly to the kernel, because no mode, functorch transform or autocast is active.

    It reads the same three stacks as `torch.overrides` and `torch._functorch`.
    """
    return not (
        count_dispatch_modes() or count_function_modes() or _is_any_autocast_enabled() or are_transforms_active()
    )


@ft.cache
def tag_out() -> torch.Tag | None:
    """`torch.Tag.out` if custom operators can have it; before torch 2.13, AOTAutograd refuses an aliased return."""
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    tag: torch.Tag | None = getattr(torch.Tag, "out", None)
    return tag if release >= (2, 13) else None


below_autograd: Callable[[], Any] = torch._C._AutoDispatchBelowAutograd
"""A context in which operators skip their autograd kernels, as in torch/_library/autograd.py."""

below_inplace_or_view: Callable[[], Any] = torch._C._AutoDispatchBelowADInplaceOrView
"""A context in which operators skip ADInplaceOrView, as in torch/_library/custom_ops.py."""


def after_autograd(keyset: DispatchKeySet) -> DispatchKeySet:
    """*keyset* without autograd, as in torch/_library/autograd.py."""
    return keyset & torch._C._after_autograd_keyset


def after_inplace_or_view(keyset: DispatchKeySet) -> DispatchKeySet:
    """*keyset* without ADInplaceOrView, as in torch/_library/custom_ops.py."""
    return keyset & torch._C._after_ADInplaceOrView_keyset


def is_traced_tensor(type_: type) -> bool:
    """Whether tensors of this class are stand-ins of tracing."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return issubclass(type_, (FakeTensor, FunctionalTensor))
