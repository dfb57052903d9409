# SPDX-License-Identifier: Apache-2.0
"""The keys of the dispatcher: which of them a call goes through, and what runs at them."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context in which dispatch skips the autograd keys; custom_op uses the same one (torch/_library/autograd.py)."""

below_adinplaceorview = torch._C._AutoDispatchBelowADInplaceOrView
"""Like `below_autograd`, but it also skips the key that bumps version counters."""

any_requires_grad: Callable[..., bool] = torch._C._any_requires_grad
"""True if one of the arguments, or of the Tensors in a list among them, requires a gradient."""

are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""True inside torch.func transforms, whose levels need every key of the dispatcher."""

forward_ad: Any = torch.autograd.forward_ad
"""The module whose `_current_level` is -1 outside of forward-mode AD; torch.func.jvp and dual numbers enter a level."""


def is_forward_ad_active() -> bool:
    """True inside of torch.func.jvp, jacfwd, linearize and `dual_level`; there is no public way to ask."""
    return forward_ad._current_level >= 0  # type: ignore[no-any-return]


def is_functionalizing() -> bool:
    """True if torch.func.functionalize is the innermost transform."""
    from torch._C._functorch import TransformType, peek_interpreter_stack

    return bool(peek_interpreter_stack().key() == TransformType.Functionalize)


def run_functionalized(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call *op*, which writes into nothing, below the innermost transform, a torch.func.functionalize.

    An autograd.Function cannot be applied there (torch/_functorch/autograd_function.py has no rule for it).
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


has_torch_function: Callable[..., bool] = torch.overrides.has_torch_function_variadic
"""True if a mode or one of the arguments has a `__torch_function__` that must see the call."""

has_torch_function_among: Callable[[Iterable[object]], bool] = torch.overrides.has_torch_function
"""Like `has_torch_function`, for the items of a list."""

tracing_state: Callable[[], object] = torch._C._get_tracing_state
"""None outside of torch.jit.trace."""

dispatch: Callable[..., Any] = torch._C._dispatch_call_boxed
"""`dispatch(handle_of(op), *args)` only calls the dispatcher for *op*.

The call of an OpOverload goes through the bindings of TorchScript (torch/_ops.py, `OpOverload.__call__`), which check
each argument twice more: for `__torch_function__`, and to record the call in torch.jit.trace. If neither applies, this
takes three quarters of the time.
"""


def handle_of(op: Any) -> Any:
    """The dispatcher's handle of an OpOverload, for `dispatch`."""
    return op._handle


def _keys(*names: str) -> Any:
    keys = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in names)
    return functools.reduce(operator.or_, keys)


_AUTOGRAD = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")


@dataclass(frozen=True)
class ContextPool:
    """Contexts that can be entered again, because making one takes as long as entering and leaving it.

    The list is shared by threads. A thread that pops a context is the only one that has it, and appends it after
    leaving it. The contexts are those of `below_autograd` and `below_adinplaceorview`, which can be entered only once
    (torch/csrc/autograd/init.cpp, `py_context_manager_DEPRECATED`).
    """

    make: Callable[[], Any]
    unused: list[Any] = field(default_factory=list)


below_autograd_pool = ContextPool(functools.partial(torch._C._ExcludeDispatchKeyGuard, _keys(*_AUTOGRAD)))
below_adinplaceorview_pool = ContextPool(
    functools.partial(torch._C._ExcludeDispatchKeyGuard, _keys(*_AUTOGRAD, "ADInplaceOrView"))
)


@functools.cache
def _keys_of_a_new_thread() -> tuple[Any, Any]:
    found: list[tuple[Any, Any]] = []
    thread = threading.Thread(target=lambda: found.append(_keys_of_this_thread()))
    thread.start()
    thread.join()
    return found[0]


def _keys_of_this_thread() -> tuple[Any, Any]:
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def is_dispatch_plain() -> bool:
    """True if a call involves only `__torch_function__` and the kernels at the keys of its Tensors.

    Modes, autocast, transforms, inference mode, torch.jit.trace and the contexts of this module add a key to the
    dispatcher's, or take one away. Forward-mode AD has a level instead.
    """
    return forward_ad._current_level < 0 and _keys_of_this_thread() == _keys_of_a_new_thread()


def apply_in_eager(function: Any) -> Callable[..., Any]:
    """`function.apply` without the check of torch.func levels that torch/autograd/function.py does first.

    It works only outside of transforms.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[no-any-return]


def dispatch_key_of(device_type: str) -> str:
    """The dispatch key of a device type: "CUDA" for "cuda", as in torch.library.register_kernel."""
    return str(torch._C._dispatch_key_for_device(device_type))
