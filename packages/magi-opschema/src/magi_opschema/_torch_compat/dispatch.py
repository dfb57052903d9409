# SPDX-License-Identifier: Apache-2.0
"""The keys of the dispatcher: which of them a call goes through, and what runs at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context in which dispatch skips the autograd keys; custom_op enters the same (torch/_library/autograd.py)."""

below_adinplaceorview = torch._C._AutoDispatchBelowADInplaceOrView
"""As `below_autograd`, and the key that bumps version counters too."""

any_requires_grad: Callable[..., bool] = torch._C._any_requires_grad
"""True if one of the arguments, or of the Tensors in a list among them, requires a gradient. Others are passed over."""

are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""True inside torch.func transforms, whose levels need every key of the dispatcher."""

forward_ad: Any = torch.autograd.forward_ad
"""The module whose `_current_level` is -1 outside of forward-mode AD; torch.func.jvp and dual numbers enter a level."""


def is_forward_ad_active() -> bool:
    """True inside of torch.func.jvp, jacfwd, linearize and `dual_level`; there is no public way to ask."""
    return forward_ad._current_level >= 0  # type: ignore[no-any-return]


def is_functionalizing() -> bool:
    """True where torch.func.functionalize is the innermost transform."""
    from torch._C._functorch import TransformType, peek_interpreter_stack

    return bool(peek_interpreter_stack().key() == TransformType.Functionalize)


def run_functionalized(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call *op*, which writes into nothing, below the innermost transform, a torch.func.functionalize.

    No autograd.Function can be applied there (torch/_functorch/autograd_function.py has no rule for it).
    """
    from torch._functorch.pyfunctorch import FunctionalizeInterpreter, retrieve_current_functorch_interpreter
    from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI

    interpreter = retrieve_current_functorch_interpreter()
    assert isinstance(interpreter, FunctionalizeInterpreter)
    functional: Any = FunctorchFunctionalizeAPI(interpreter)
    args, kwargs = functional.unwrap_tensors((args, kwargs))
    with functional.redispatch_to_next():
        output = op(*args, **kwargs)
    return functional.wrap_tensors(output)


def dispatch(op: Any) -> Callable[..., Any]:
    """The C function behind an OpOverload: the call without one Python frame (torch/_ops.py, `OpOverload.__call__`)."""
    return op._op  # type: ignore[no-any-return]


def apply_in_eager(function: Any) -> Callable[..., Any]:
    """`function.apply` without the look at torch.func levels that torch/autograd/function.py puts in front of it.

    Only for calls outside of transforms.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[no-any-return]


def dispatch_key_of(device_type: str) -> str:
    """The dispatch key of a device type: "CUDA" for "cuda". torch.library.register_kernel asks the same."""
    return str(torch._C._dispatch_key_for_device(device_type))
