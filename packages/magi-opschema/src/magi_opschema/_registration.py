# SPDX-License-Identifier: Apache-2.0
"""The only module that registers anything with torch: one library fragment for each op, and the kernels in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ._autograd import AutogradBridge, Formula, autograd_kernel, mutation_kernel, transforms_kernel
from ._checks import CallCheck
from ._flat import FlatLayout, as_output
from ._lowered import compile_lowered
from ._lowering import SignatureLowering
from ._torch_compat import below_adinplaceorview, destroy, hide_from_dynamo, increment_version
from ._tree import dotted
from ._vmap import VmapRule, vmap_by_loop
from .errors import RuleError


_lock = threading.Lock()


@dataclass
class Registration:
    """What an op holds in torch; the library's end would be the op's end."""

    library: torch.library.Library
    torch_op: Any
    check: CallCheck
    vmap_rule: VmapRule | None = None
    device_keys: set[str] = field(default_factory=set)
    """Dispatch keys of the device types that have a body of their own."""


def register(
    name: str,
    lowering: SignatureLowering,
    fn: Callable[..., Any],
    fake: Callable[..., Any],
    formula: Formula | None,
    tags: Sequence[torch.Tag],
) -> Registration:
    """Define `namespace::op` and register its kernels.

    | key | kernel |
    |---|---|
    | CompositeExplicitAutograd | the body, for every device type without a body of its own |
    | Meta and FakeTensor | the fake |
    | Autograd | the bridge; of a mutating op, the error where a gradient would be wrong |
    | FuncTorchDynamicLayerFrontMode | the bridge, for torch.func transforms |
    | ADInplaceOrView | of a mutating op, the bump of version counters |
    """
    namespace, op_name = name.split("::")
    with _lock:
        library = torch.library.Library(namespace, "FRAGMENT")
        schema = lowering.schema.replace(lowering.name, op_name, 1)
        library.define(schema, tags=tuple({torch.Tag.pt2_compliant_tag, *tags}))
        torch_op = getattr(getattr(torch.ops, namespace), op_name).default
        registration = Registration(library, torch_op, CallCheck(lowering, torch_op))
        library.impl(op_name, body_kernel(lowering, fn, registration.check), "CompositeExplicitAutograd")
        torch.library.register_fake(name, fake, lib=library)
        if lowering.mutated:
            library.impl(op_name, mutation_kernel(lowering, torch_op), "Autograd")
            library.impl(op_name, _version_kernel(lowering, torch_op), "ADInplaceOrView")
            torch.library.register_vmap(name, _batched_mutation(lowering, registration), lib=library)
        else:
            bridge = AutogradBridge(lowering, torch_op, formula, lambda: registration.vmap_rule)
            library.impl(op_name, autograd_kernel(bridge), "Autograd")
            library.impl(op_name, transforms_kernel(bridge), "FuncTorchDynamicLayerFrontMode")
    return registration


def unregister(registration: Registration) -> None:
    """Take an op out of torch, so that its name is free again."""
    with _lock:
        destroy(registration.library)


def body_kernel(lowering: SignatureLowering, fn: Callable[..., Any], check: CallCheck) -> Callable[..., Any]:
    """The kernel of one body: *fn*, which has the user's signature, and the check of the first real call."""
    return hide_from_dynamo(compile_lowered(lowering, fn, "kernel", check))


def _batched_mutation(lowering: SignatureLowering, registration: Registration) -> Callable[..., Any]:
    """Vmap of a mutating op, which no autograd.Function can carry: by the user's rule, or element by element."""
    layout = FlatLayout.of_arguments(lowering.arguments)
    mutated = [(layout.names.index(argument.name), dotted(argument.leaves[0].path)) for argument in lowering.mutated]

    def batched(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        flat = layout.fill(args, {})
        dims = (*in_dims, *(None for _ in range(len(flat) - len(in_dims))))
        if registration.vmap_rule is not None:
            output, out_dims = registration.vmap_rule(info, dims, *flat)
            return as_output(output), as_output(out_dims)
        for position, path in mutated:
            if flat[position] is not None and dims[position] is None:
                text = f"under vmap every element of the batch would write into '{path}', which has no batch dimension."
                raise RuleError(lowering.sentence(f"{text} Expand it, or give a rule with register_vmap."))
        return vmap_by_loop(info, dims, flat, lambda *values: layout.call(registration.torch_op, values))

    return batched


def _version_kernel(lowering: SignatureLowering, op: Any) -> Callable[..., Any]:
    layout = FlatLayout.of_arguments(lowering.arguments)
    positions = [layout.names.index(argument.name) for argument in lowering.mutated]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        flat = layout.fill(args, kwargs)
        for position in positions:
            value = flat[position]
            increment_version((value,) if isinstance(value, torch.Tensor) else value or ())
        with below_adinplaceorview():
            return op(*args, **kwargs)

    return kernel
