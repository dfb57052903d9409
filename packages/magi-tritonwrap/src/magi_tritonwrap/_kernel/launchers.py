# SPDX-License-Identifier: Apache-2.0
"""Objects around a Triton kernel that launch it: a `KernelInterface` of a library, or a class that its owner registers.

flag_gems, for example, puts `@libentry()` above `@triton.jit`: the result keeps compiled kernels in a table of its own,
and the kernel in an attribute `fn`. A graph gets the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from triton.runtime.autotuner import Heuristics

from magi_tritonwrap._identity.library import is_library_module
from magi_tritonwrap._identity.members import is_a, stored
from magi_tritonwrap._torch_compat.kernels import kernel_classes
from magi_tritonwrap.errors import UnsupportedKernelError


_ATTRIBUTES = ("fn", "jit_function")
_MAX_LAYERS = 16
_REGISTERED: dict[type[Any], Callable[[Any], Any]] = {}


def register_launcher(cls: Any, kernel: str | Callable[[Any], Any]) -> None:
    """Say that instances of *cls* launch a Triton kernel, as `instance[grid](...)` or `instance.run(..., grid=grid)`.

    A class that derives from `triton.KernelInterface` and keeps its kernel in `fn` or `jit_function` needs no
    registration. Registering a class again replaces what was said before.

    Args:
        cls: the class; it has a method `run` that takes the kernel's arguments and `grid=`.
        kernel: the attribute that holds the kernel, or a function from an instance to its kernel, without side effects.

    Raises:
        UnsupportedKernelError: *cls* is not a class, or has no method `run`.

    Example:
        >>> class Entry:
        ...     def __init__(self, kernel): self.kernel = kernel
        ...     def run(self, *args, grid, **kwargs): return self.kernel.run(*args, grid=grid, **kwargs)
        ...     def __getitem__(self, grid): return lambda *args, **kwargs: self.run(*args, grid=grid, **kwargs)
        >>> register_launcher(Entry, "kernel")
    """
    if not isinstance(cls, type) or not callable(getattr(cls, "run", None)):
        fix = "Give a class with a method run(*args, grid, **kwargs), through which every launch of it goes."
        raise UnsupportedKernelError(f"register_launcher: {cls!r} is not a class with a method run. {fix}")
    _REGISTERED[cls] = kernel if callable(kernel) else lambda instance: getattr(instance, kernel, None)


def kernel_behind(value: object) -> Any:
    """The Triton kernel that *value* is or launches; None for anything else.

    No code of the user is called, except for the function that was given to `register_launcher`.
    """
    for _ in range(_MAX_LAYERS):
        if is_a(value, kernel_classes()):
            return value
        value = _inside(value)
        if value is None:
            return None
    return None


def is_launcher_class(cls: type[Any]) -> bool:
    """Whether instances of *cls* are launchers of a library or a user, rather than kernels that Triton made."""
    if issubclass(cls, kernel_classes()):
        return False
    return issubclass(cls, tuple(_REGISTERED)) or (
        issubclass(cls, triton.KernelInterface) and not is_library_module(cls.__module__)
    )


def classes_with_own_run() -> tuple[type[Any], ...]:
    """Loaded classes, other than Triton's and torch's, whose own method `run` a launch passes through.

    Classes that compute heuristics are left out, because their `run` goes on to the kernel that they decorate.
    """
    derived = [cls for cls in _subclasses(triton.KernelInterface) if not is_library_module(cls.__module__)]
    candidates = dict.fromkeys([*derived, *_REGISTERED])
    return tuple(cls for cls in candidates if "run" in vars(cls) and not issubclass(cls, Heuristics))


def _inside(value: object) -> object:
    for cls in type(value).__mro__:
        if cls in _REGISTERED:
            return _REGISTERED[cls](value)
    if not is_launcher_class(type(value)):
        return None
    attributes = stored(value)
    return next((attributes[name] for name in _ATTRIBUTES if attributes.get(name) is not None), None)


def _subclasses(cls: type[Any]) -> list[type[Any]]:
    direct = cls.__subclasses__()
    return [*direct, *(below for one in direct for below in _subclasses(one))]
