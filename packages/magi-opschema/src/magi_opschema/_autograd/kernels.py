# SPDX-License-Identifier: Apache-2.0
"""What the dispatcher runs at the keys of autograd and of torch.func: a Function if a derivative is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from magi_opschema._model.layout import tensors_in
from magi_opschema._model.lowering import SignatureLowering
from magi_opschema._torch_compat import (
    any_requires_grad,
    below_autograd,
    below_autograd_pool,
    dispatch,
    forward_ad,
    handle_of,
    hide_from_dynamo,
    is_forward_ad_active,
    is_functionalizing,
    run_functionalized,
)
from magi_opschema.errors import MutationError

from .functions import AutogradFunctions, refuse_forward_mode


def _has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def autograd_kernel(functions: AutogradFunctions) -> Callable[..., Any]:
    """The kernel at the Autograd key: it applies a Function only if a derivative may be wanted."""
    is_grad_enabled, make, unused = torch.is_grad_enabled, below_autograd_pool.make, below_autograd_pool.unused
    handle = handle_of(functions.op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if (is_grad_enabled() and any_requires_grad(*args, **kwargs)) or is_forward_ad_active():
            return functions.call(functions.eager, args, kwargs)
        try:
            context = unused.pop()
        except IndexError:
            context = make()
        with context:
            output = dispatch(handle, *args, **kwargs)
        unused.append(context)
        return output

    return hide_from_dynamo(kernel)


def transforms_kernel(functions: AutogradFunctions) -> Callable[..., Any]:
    """The kernel at the key above all torch.func transforms."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if is_functionalizing():
            return run_functionalized(functions.op, args, kwargs)
        return functions.call(functions.transforms, args, kwargs)

    return hide_from_dynamo(kernel)


def mutation_kernel(lowering: SignatureLowering, op: Any) -> Callable[..., Any]:
    """The kernel at the Autograd key of an op that writes into its arguments."""
    layout = lowering.layout

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if is_forward_ad_active() and any(map(_has_tangent, tensors_in((*args, *kwargs.values())))):
            refuse_forward_mode(lowering)
        if torch.is_grad_enabled():
            flat = layout.fill(args, kwargs)
            for position, path in layout.mutated.items():
                if any_requires_grad(flat[position]):
                    text = (
                        f"'{path}' is written into, and it requires a gradient or is part of a graph, "
                        "which would be wrong afterwards. "
                        "Call the op under torch.no_grad(), on a detached Tensor, or on a buffer."
                    )
                    raise MutationError(lowering.sentence(text))
        with below_autograd():
            return op(*args, **kwargs)

    return hide_from_dynamo(kernel)
