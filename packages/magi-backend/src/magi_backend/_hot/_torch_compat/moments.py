# SPDX-License-Identifier: Apache-2.0
"""The state of a thread and of a process: compilations, modes that observe calls, and configuration."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


def autocast_devices() -> tuple[str, ...]:
    """The kinds of device that autocast knows in this build."""
    return tuple(torch._C._autocast_supported_devices())


def config_values() -> tuple[dict[str, Any], ...]:
    """The configuration of Inductor and of AOTAutograd on this thread."""
    return tuple(module.get_config_copy() for module in _config_modules())


@contextlib.contextmanager
def configured(values: tuple[dict[str, Any], ...]) -> Iterator[None]:
    """A context in which both configurations have *values*.

    From torch 2.12 on, threads have separate configurations.
    """
    with contextlib.ExitStack() as stack:
        for module, wanted, now in zip(_config_modules(), values, config_values(), strict=True):
            changed = {key: value for key, value in wanted.items() if now.get(key) != value}
            if changed:
                stack.enter_context(module.patch(changed))
        yield


def _config_modules() -> tuple[Any, ...]:
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    return inductor, functorch


def dispatch_keys_kept() -> contextlib.AbstractContextManager[Any]:
    """A context at whose end dispatch keys are restored, as Dynamo does around its compilations."""
    return torch._C._PreserveDispatchKeyGuard()


@contextlib.contextmanager
def no_function_modes() -> Iterator[None]:
    """A context without the modes that see calls of torch's functions."""
    from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily

    with contextlib.ExitStack() as stack:
        for _ in _get_current_function_mode_stack():
            stack.enter_context(_pop_mode_temporarily())
        yield


def is_compiling() -> bool:
    """Whether this thread compiles, or any thread traces, for which torch has a single flag."""
    from torch._guards import TracingContext
    from torch.fx import _symbolic_trace

    return TracingContext.try_get() is not None or _symbolic_trace._is_fx_tracing_flag


def is_dispatch_observed() -> bool:
    """Whether a dispatch mode or a transform of ``torch.func`` is active."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return bool(_get_current_dispatch_mode_stack()) or torch._C._functorch.peek_interpreter_stack() is not None


def compile_lock() -> Any:
    """The lock that Dynamo holds while it compiles."""
    from torch._dynamo.convert_frame import compile_lock as lock

    return lock


top_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""A function that returns the innermost hooks for saved tensors, or None. With its argument, also while tracing."""


@dataclass(frozen=True)
class Region:
    """A region under ``torch.utils.checkpoint``.

    Attributes:
        frame: An object that its forward and its recomputations share; None if this torch does not have it.
        recomputes: Whether this is a recomputation.
        hook: An object of the forward or of one recomputation.
    """

    frame: Any
    recomputes: bool
    hook: Any


def checkpoint_region(hooks: Any) -> Region | None:
    """The region that saved-tensor *hooks* belong to; None if they are not those of ``torch.utils.checkpoint``.

    Its hooks are closures: that of the forward over ``frame``, that of a recomputation over ``target_frame_ref``.
    """
    hook = hooks[0]
    inner: Any = inspect.unwrap(hook)
    if getattr(inner, "__module__", "") != "torch.utils.checkpoint":
        return None
    code = getattr(inner, "__code__", None)
    cells = dict(zip(code.co_freevars, inner.__closure__ or (), strict=True)) if code is not None else {}
    if "frame" in cells:
        return Region(cells["frame"].cell_contents, recomputes=False, hook=hook)
    if "target_frame_ref" in cells:
        return Region(cells["target_frame_ref"].cell_contents(), recomputes=True, hook=hook)
    return Region(None, recomputes=False, hook=hook)
