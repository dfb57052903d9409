# SPDX-License-Identifier: Apache-2.0
"""The state of the thread and of the process that a compilation reads, and what a call runs under."""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import TracingContext
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .compiling import configs


@dataclass(frozen=True)
class CompileState:
    """What a compilation reads of the thread and of the process.

    Attributes:
        inference: Inference mode.
        grad: Grad mode.
        autocast: For each kind of device that has autocast: its name, whether it is on, and the dtype.
        autocast_cache: Whether autocast keeps converted weights.
        deterministic: Whether deterministic algorithms are required.
        warn_only: Whether an operator without one only warns.
        dtype: The default dtype.
        configs: The configuration of Inductor and of AOTAutograd; from torch 2.12 on, threads have separate ones.
    """

    inference: bool
    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    deterministic: bool
    warn_only: bool
    dtype: torch.dtype
    configs: tuple[dict[str, Any], ...]

    @classmethod
    def now(cls) -> CompileState:
        """The current state."""
        return cls(
            inference=torch.is_inference_mode_enabled(),
            grad=torch.is_grad_enabled(),
            autocast=tuple(
                (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in torch._C._autocast_supported_devices()
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            dtype=torch.get_default_dtype(),
            configs=tuple(module.get_config_copy() for module in configs()),
        )

    def is_of_process(self) -> bool:
        """Whether what belongs to the process rather than to a thread is now as it was."""
        algorithms = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        return (*algorithms, torch.get_default_dtype()) == (self.deterministic, self.warn_only, self.dtype)

    @contextlib.contextmanager
    def restored(self, *, beside_others: bool = False) -> Iterator[None]:
        """A context to compile in this state. At its end the current state is restored, random numbers included.

        With *beside_others*, other threads go on, so nothing that belongs to the process is set.
        """
        before = CompileState.now()
        with contextlib.ExitStack() as stack:
            if beside_others:
                stack.callback(is_beside_others.reset, is_beside_others.set(True))
            else:
                stack.callback(random.setstate, random.getstate())
                stack.callback(before._set_process)
                # Without a list of devices `fork_rng` warns where there is more than one (torch/random.py).
                stack.enter_context(torch.random.fork_rng(list(range(torch.cuda.device_count()))))
                self._set_process()
            # As Dynamo does around its compilations.
            stack.enter_context(torch._C._PreserveDispatchKeyGuard())
            # A default device is such a mode; its effect is already in the captured graph.
            for _ in _get_current_function_mode_stack():
                stack.enter_context(_pop_mode_temporarily())
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for autocast, now in zip(self.autocast, before.autocast, strict=True):
                if autocast != now or self.autocast_cache != before.autocast_cache:
                    device, enabled, dtype = autocast
                    stack.enter_context(torch.autocast(device, dtype, enabled, self.autocast_cache))
            for module, wanted in zip(configs(), self.configs, strict=True):
                now = module.get_config_copy()
                changed = {key: value for key, value in wanted.items() if now.get(key) != value}
                if changed:
                    stack.enter_context(module.patch(changed))
            if beside_others:  # otherwise the first backward compiles, in the call (2.10 to 2.15)
                stack.enter_context(configs()[1].patch(force_non_lazy_backward_lowering=True))
            yield

    def _set_process(self) -> None:
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.set_default_dtype(self.dtype)


is_beside_others: ContextVar[bool] = ContextVar("magi_beside_others", default=False)
"""Whether this thread compiles while others go on."""


def setters_of_random_numbers() -> list[Any]:
    """The modules that call ``preserve_rng_state``, each by a name of its own (2.10 to 2.15).

    Modules that are imported later take what stands in torch/_dynamo/utils.py then.
    """
    preserve_rng_state = torch._dynamo.utils.preserve_rng_state
    modules = [module for name, module in tuple(sys.modules.items()) if name.startswith("torch.")]
    return [module for module in modules if vars(module).get("preserve_rng_state") is preserve_rng_state]


def is_compiling() -> bool:
    """Whether this thread compiles or traces; `torch.compiler.is_compiling` answers for all threads."""
    fx = torch.fx._symbolic_trace  # whose function a repair replaces
    return TracingContext.try_get() is not None or torch.compiler.is_compiling() or fx.is_fx_symbolic_tracing()


def is_dispatch_observed() -> bool:
    """Whether a dispatch mode or a transform of ``torch.func`` is active."""
    return bool(_get_current_dispatch_mode_stack()) or torch._C._functorch.peek_interpreter_stack() is not None


def compile_lock() -> Any:
    """The lock that Dynamo holds while it compiles."""
    return torch._dynamo.convert_frame.compile_lock


top_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""A function that returns the innermost hooks for saved tensors, or None. With its argument, also while tracing."""


def checkpoint_region(hooks: Any) -> tuple[Any, bool] | None:
    """The region that saved-tensor *hooks* belong to; None if they are not those of ``torch.utils.checkpoint``.

    It is an object that its forward and its recomputations share, or None if this torch does not have it, and whether
    this is a recomputation. The hooks are closures: that of the forward over ``frame``, that of a recomputation over
    ``target_frame_ref``.
    """
    inner: Any = inspect.unwrap(hooks[0])
    if getattr(inner, "__module__", "") != "torch.utils.checkpoint":
        return None
    code = getattr(inner, "__code__", None)
    cells = dict(zip(code.co_freevars, inner.__closure__ or (), strict=True)) if code is not None else {}
    if "frame" in cells:
        return cells["frame"].cell_contents, False
    return (cells["target_frame_ref"].cell_contents(), True) if "target_frame_ref" in cells else (None, False)
