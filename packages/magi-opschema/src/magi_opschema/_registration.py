# SPDX-License-Identifier: Apache-2.0
"""The only module that registers anything with torch: one library fragment for each op, and the kernels in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._autograd import Formula, autograd_kernel, make_function, mutation_kernel, transforms_kernel
from ._checks import CallCheck
from ._flat import FlatLayout
from ._signature import SignatureLowering
from ._torch_compat import below_adinplaceorview, destroy, hide_from_dynamo, increment_version
from ._vmap import VmapRule


_lock = threading.Lock()


@dataclass
class Registration:
    """What an op holds in torch; the library's end would be the op's end."""

    library: torch.library.Library
    torch_op: Any
    check: CallCheck
    fake: Callable[..., Any]
    vmap_rule: VmapRule | None = None


def register(
    name: str,
    lowering: SignatureLowering,
    body: Callable[..., Any],
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
        registration = Registration(library, torch_op, CallCheck(lowering, fake), fake)
        library.impl(op_name, checked_kernel(body, registration.check), "CompositeExplicitAutograd")
        torch.library.register_fake(name, fake, lib=library)
        if lowering.mutated:
            library.impl(op_name, mutation_kernel(lowering, torch_op), "Autograd")
            library.impl(op_name, _version_kernel(lowering, torch_op), "ADInplaceOrView")
        else:
            function = make_function(lowering, torch_op, formula, lambda: registration.vmap_rule)
            library.impl(op_name, autograd_kernel(lowering, torch_op, function), "Autograd")
            library.impl(op_name, transforms_kernel(lowering, function), "FuncTorchDynamicLayerFrontMode")
    return registration


def unregister(registration: Registration) -> None:
    """Take an op out of torch, so that its name is free again."""
    with _lock:
        destroy(registration.library)


def checked_kernel(body: Callable[..., Any], check: CallCheck) -> Callable[..., Any]:
    """*body* with the check of the first real call."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        output = body(*args, **kwargs)
        if check.pending:
            check.run(args, kwargs, output)
        return output

    return hide_from_dynamo(kernel)


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
