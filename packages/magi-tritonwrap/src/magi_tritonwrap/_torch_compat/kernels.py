# SPDX-License-Identifier: Apache-2.0
"""Kernels and launches: the classes that Triton makes, and what torch puts around them."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable
from types import FrameType, FunctionType
from typing import Any, cast

import torch
import triton
from torch._higher_order_ops.triton_kernel_wrap import TraceableTritonKernelWrapper
from torch._library import triton as torch_triton
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import JITFunction


_INTERPRETER = "triton.runtime.interpreter"


def launch_classes() -> tuple[type[Any], ...]:
    """Classes whose `run` a launch ends in (Triton 3.2 on: `kernel[grid](...)` calls `self.run`)."""
    return (JITFunction, Autotuner, *interpreted_classes())


def kernel_classes() -> tuple[type[Any], ...]:
    """Everything that `triton.jit`, `triton.autotune` and `triton.heuristics` return."""
    return (JITFunction, Autotuner, Heuristics, *interpreted_classes())


def interpreted_classes() -> tuple[type[Any], ...]:
    """The class of kernels made under TRITON_INTERPRET=1; none if there cannot be such a kernel yet.

    Its module imports numpy, which Triton does not declare (3.6 to 3.9); without the interpreter nobody needs it.
    """
    if _INTERPRETER not in sys.modules and not triton.knobs.runtime.interpret:
        return ()
    return (importlib.import_module(_INTERPRETER).InterpretedFunction,)


def triton_wrappers() -> tuple[object, ...]:
    """The functions that put a kernel into a graph: `wrap_triton`, and the older name that some code imports."""
    return (torch.library.wrap_triton, torch_triton.capture_triton)


def kernel_in_wrapper(value: object) -> Any:
    """The kernel inside what `torch.library.wrap_triton` returned; None for anything else."""
    is_wrapper = issubclass(type(value), TraceableTritonKernelWrapper)  # isinstance would ask a proxy for its class
    return cast("Any", value).kernel if is_wrapper else None


def calling_frame() -> FrameType:
    """The frame that called the caller. `inspect.stack` would read source files, which is too slow for a launch."""
    return sys._getframe(2)


def unsupported_autotune_arguments_are_ignored() -> bool:
    """Whether the user asked Inductor to ignore autotune settings that it does not support (torch 2.6 on)."""
    from torch._inductor import config

    return bool(config.unsafe_ignore_unsupported_triton_autotune_args)


def has_triton_driver() -> bool:
    """Whether Triton can launch anything. Without a GPU, its driver raises a RuntimeError when used (3.2 to 3.9)."""
    try:
        triton.runtime.driver.active.get_current_target()
    except RuntimeError:
        return False
    return True


def refuses_cpu_tensors(error: Exception) -> bool:
    """Whether an error of a launch says that there is no GPU, or that a tensor is not on it (Triton 3.2 to 3.9)."""
    return "active drivers" in str(error) or "cannot be accessed from Triton" in str(error)


def settings_of(kernel: JITFunction[Any]) -> dict[str, Any]:
    """The arguments of `triton.jit` that decide what *kernel* compiles to, as its author gave them.

    `repr` and `launch_metadata` are left out: they name a kernel and describe a launch to a profiler.
    """
    names = ("version", "do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline")
    return {name: getattr(kernel, name) for name in names}


def new_kernel(like: JITFunction[Any], function: FunctionType, source: str) -> Any:
    """A JITFunction with the settings of *like*, of another function and source.

    Triton keeps `repr=` in a private attribute and a table of kernels by name, which the new one must not enter; a
    source is set by `_unsafe_update_src` (3.4 on) or by assignment.
    """
    from triton.runtime import jit

    table: dict[str, Any] = getattr(jit, "_triton_jit_function_registry", {})
    before = dict(table)
    parameters = inspect.signature(function).parameters
    settings = settings_of(like)
    for setting in ("do_not_specialize", "do_not_specialize_on_alignment"):
        settings[setting] = [name for name in _names(settings[setting], like) if name in parameters]
    kernel = type(like)(function, repr=getattr(like, "_repr", None), launch_metadata=like.launch_metadata, **settings)
    table.clear()
    table.update(before)
    if hasattr(kernel, "_unsafe_update_src"):
        kernel._unsafe_update_src(source)
    else:
        kernel.src = source
    return kernel


def _names(parameters: Iterable[int | str], kernel: Any) -> list[str]:
    """The names of *parameters*, each of which is a name or a position."""
    return [kernel.arg_names[one] if isinstance(one, int) else one for one in parameters]
