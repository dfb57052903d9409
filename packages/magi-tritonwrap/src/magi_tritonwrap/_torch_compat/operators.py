# SPDX-License-Identifier: Apache-2.0
"""Operators: their names and bodies, and torch's tables of decompositions and kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library import triton as torch_triton
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._library.simple_registry import singleton
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensorMode


_COLLECTIVES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
NAMESPACES_OF_TORCH = frozenset(
    (
        *_COLLECTIVES,
        *("aten", "prim", "prims", "rngprims", "debugprims", "higher_order", "inductor", "_dtensor", "fsdp", "streams"),
        *("quantized", "_quantized", "quantized_decomposed", "sparse", "mkl", "mkldnn", "mkldnn_prepacked", "onednn"),
        *("onnx", "profiler", "prepacked", "xnnpack", "cuda", "debug", "export"),
    )
)
"""Those in which torch itself registers operators (torch 2.10 to 2.15)."""


def set_decomposition_rule(op: OpOverload, rule: Any) -> None:
    """Make *rule* decompose *op* under AOTAutograd's functional mode (torch 2.6 on), in place of any earlier rule.

    `torch.library.register_torch_dispatch` refuses a second rule, and its registration cannot be taken back; the table
    it fills is the same since torch 2.6.
    """
    name = op.name()
    if name in OPDEFS:
        OPDEFS[name].register_torch_dispatch(FunctionalTensorMode, rule)
        return
    singleton.find(name).torch_dispatch_rules._data[FunctionalTensorMode] = rule


def overload_of(definition: CustomOpDef) -> OpOverload:
    """The operator behind what `torch.library.custom_op` returns."""
    return definition._opoverload


def schemas_of(op: Any) -> list[str]:
    """The schemas of *op*, with the defaults that torch puts into generated code but not into its cache keys."""
    overloads = [getattr(op, name) for name in op.overloads()] if hasattr(op, "overloads") else [op]
    return [str(overload._schema) for overload in overloads]


def torch_triton_ops() -> tuple[str, ...]:
    """Names of the operators that AOTAutograd decomposes into Triton launches (torch 2.7 on)."""
    return tuple(torch_triton.triton_ops_to_kernels)


def body_of_torch_triton_op(name: str) -> Callable[..., Any] | None:
    """The body given to `torch.library.triton_op`, which registers it as the op's fake as well; None otherwise."""
    definition = OPDEFS.get(name) if name in torch_triton.triton_ops_to_kernels else None
    return None if definition is None else definition._abstract_fn


def custom_op_named(name: str) -> OpOverload:
    """The operator of that name that `torch.library.custom_op` made."""
    return overload_of(OPDEFS[name])


def body_of_custom_op(name: str) -> Callable[..., Any] | None:
    """The body given to `torch.library.custom_op`; None for any other operator, and for a `triton_op`."""
    definition = None if name in torch_triton.triton_ops_to_kernels else OPDEFS.get(name)
    return None if definition is None else definition._init_fn


def has_decomposition_rule(name: str) -> bool:
    """Whether an operator of `torch.library.custom_op` has a rule under AOTAutograd's functional mode already."""
    return FunctionalTensorMode in OPDEFS[name]._torch_dispatch_fns


def names_of_ops() -> list[str]:
    """The qualified names of all operators (private, all)."""
    return list(torch._C._dispatch_get_all_op_names())


def is_collective(op: object) -> bool:
    """Whether an operator communicates with other ranks: torch registers those in namespaces of their own."""
    return isinstance(op, OpOverload) and op.namespace in _COLLECTIVES


def fakes_of(op: OpOverload) -> tuple[object, ...]:
    """The fakes that are registered for *op*. A library takes its own out when it is destroyed (torch 2.10 to 2.15)."""
    return tuple(singleton.find(op.name()).fake_impl.kernels)


def set_cache_key_entries(op: OpOverload, entries: list[object]) -> None:
    """Put *entries* into the table of kernels that AOTAutograd's cache key reads, for graphs that call *op*.

    torch asks of an entry what it asks of a JITFunction: `.src`, `.__name__` and `.fn` (torch 2.7 on).
    """
    torch_triton.triton_ops_to_kernels[op.name()] = entries


def has_kernel_for_device(op: OpOverload, device_type: str) -> bool:
    """Whether a body was registered for this device type itself, not through a composite key (private, all)."""
    key = torch._C._dispatch_key_for_device(device_type)
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def has_composite_kernel(op: OpOverload) -> bool:
    """Whether one body was registered for every device type."""
    keys = ("CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys)


def registration_of(op: OpOverload) -> dict[str, object]:
    """By device type, a value that changes whenever that type gets another body.

    The dispatcher keeps no Python function, but its dump has a line for each registration, replaced ones included. A
    `torch.library.custom_op` keeps its bodies in a table of its own.
    """
    lines: dict[str, list[str]] = {}
    for line in torch._C._dispatch_dump(op.name()).splitlines():
        key, separator, registration = line.partition(":")
        if separator:
            lines.setdefault(key.removesuffix(" (inactive)").lower(), []).append(registration)
    definition = OPDEFS.get(op.name())
    bodies = {} if definition is None else definition._backend_fns
    return {key: (tuple(found), bodies.get(key)) for key, found in lines.items()}
