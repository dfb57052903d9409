# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel as its author decorated it: what launches it, with which options, and whether a graph can hold it.

A library may put an object of its own around a kernel. flag_gems, for example, puts `@libentry()` above `@triton.jit`:
the result keeps compiled kernels in a table of its own, and the kernel in an attribute `fn`. A graph gets the kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.runtime.autotuner import Autotuner, Config, Heuristics

from magi_tritonwrap._identity.library import is_library_module
from magi_tritonwrap._identity.members import is_a, stored
from magi_tritonwrap._torch_compat.kernels import (
    interpreted_classes,
    kernel_classes,
    unsupported_autotune_arguments_are_ignored,
)
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


CONFIG_FIELDS = tuple(
    name for name in inspect.signature(Config.__init__).parameters if name not in ("self", "kwargs", "pre_hook")
)
"""Launch options that a triton.Config can carry: num_warps, num_stages, num_ctas, maxnreg, ..."""


@dataclass(frozen=True)
class Kernel:
    """A kernel and its decorators, the outermost first.

    `autotune(heuristics(jit))` has the layers `(Autotuner, Heuristics)`.
    """

    outermost: Any
    layers: tuple[Any, ...]
    jit: Any

    @property
    def name(self) -> str:
        """Qualified name of the decorated function."""
        return str(self.function.__qualname__)

    @property
    def function(self) -> Any:
        """The Python function under all decorators."""
        return self.jit.fn

    @property
    def file(self) -> str:
        """File that defines the kernel."""
        return str(self.function.__code__.co_filename)

    @property
    def line(self) -> int:
        """Line of the kernel's first decorator, as `inspect` counts."""
        return int(self.function.__code__.co_firstlineno)

    @property
    def is_interpreted(self) -> bool:
        """Whether the kernel was made under TRITON_INTERPRET=1, so that there is nothing to compile."""
        return isinstance(self.jit, interpreted_classes())

    @property
    def autotuners(self) -> tuple[Any, ...]:
        """The `@triton.autotune` layers."""
        return tuple(layer for layer in self.layers if isinstance(layer, Autotuner))


def is_kernel(value: object) -> bool:
    """Whether *value* is what `triton.jit`, `triton.autotune` or `triton.heuristics` returned, or launches it."""
    return kernel_behind(value) is not None


def as_kernel(value: Any) -> Kernel:
    """The kernel that *value* is or launches, with its decorators; `is_kernel(value)` must be True.

    A library's own launcher around the kernel is left out: `outermost` is what Triton made.
    """
    layers: list[Any] = []
    outermost = inner = kernel_behind(value)
    while isinstance(inner, Autotuner | Heuristics):
        layers.append(inner)
        inner = inner.fn
    return Kernel(outermost, tuple(layers), inner)


def check_supported(kernel: Kernel) -> None:
    """Raise for a decoration that torch would refuse or silently change.

    Raises:
        UnsupportedKernelError: the error names the kernel, its file and line, and the fix.
    """
    why, fix = next(_faults(kernel), ("", ""))
    if why and not kernel.is_interpreted:
        raise UnsupportedKernelError(f"Triton kernel '{kernel.name}' {why}. {fix} ({kernel.file}:{kernel.line})")


def _faults(kernel: Kernel) -> Iterator[tuple[str, str]]:
    """What torch cannot compile of a kernel's decorators, each with the fix."""
    if len(kernel.autotuners) > 1:
        why = f"has {len(kernel.autotuners)} @triton.autotune decorators, and torch supports one"
        yield why, "Merge their configs into one @triton.autotune."
    for position, layer in enumerate(kernel.layers):
        if isinstance(layer, Autotuner):
            hooked = any(config.pre_hook is not None for config in layer.configs)
            if hooked and not unsupported_autotune_arguments_are_ignored():
                why = (
                    "has a triton.Config with pre_hook=, arbitrary Python that a compiled graph cannot run at a launch"
                )
                yield why, "Do what the hook does in the op's body."
            tuned = {name for config in layer.configs for name in config.kwargs}
            clashes = sorted(tuned & {name for outer in kernel.layers[:position] for name in outer.values})
            if clashes:
                above = "in @triton.heuristics above an @triton.autotune whose configs set the same"
                order = "The accepted order is @triton.autotune, then @triton.heuristics, then @triton.jit; "
                yield f"computes {', '.join(clashes)} {above}", f"{order}and a name is either tuned or computed."
    if getattr(kernel.jit, "is_gluon", bool)():
        yield "is a Gluon kernel, which Inductor cannot write down again", "Its op can only be opaque."
