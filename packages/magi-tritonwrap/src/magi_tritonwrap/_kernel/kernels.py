# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel as its author decorated it: what launches it, with which options, and whether a graph can hold it.

A library may put an object of its own around a kernel. flag_gems, for example, puts `@libentry()` above `@triton.jit`:
the result keeps compiled kernels in a table of its own, and the kernel in an attribute `fn`. A graph gets the kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
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


def can_pass(kernel: Kernel, name: str) -> bool:
    """Whether a launch may pass the keyword *name* and still be compiled."""
    return name in kernel.jit.arg_names or name in CONFIG_FIELDS or name in ("grid", "warmup")


def cannot_pass(names: Sequence[str]) -> str:
    """A sentence that says why a launch with the keywords *names* cannot be compiled."""
    options = ", ".join(f"{name}=" for name in names)
    known = ", ".join(f"{name}=" for name in CONFIG_FIELDS)
    return (
        f"is launched with {options}, which is neither a parameter of it nor an option that a graph can carry "
        f"({known}); leave it out"
    )


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

    @cached_property
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
    if kernel.is_interpreted:
        return
    _check_single_autotuner(kernel)
    for position, layer in enumerate(kernel.layers):
        if isinstance(layer, Autotuner):
            _check_autotuner(kernel, layer)
            _check_heuristics_above(kernel, layer, kernel.layers[:position])
    is_gluon = getattr(kernel.jit, "is_gluon", None)
    if is_gluon is not None and is_gluon():
        raise _unsupported(
            kernel, "is a Gluon kernel, which Inductor cannot emit again", "Register its op as an opaque custom op."
        )


def _check_single_autotuner(kernel: Kernel) -> None:
    if len(kernel.autotuners) > 1:
        raise _unsupported(
            kernel,
            f"has {len(kernel.autotuners)} @triton.autotune decorators, and torch supports one",
            "Merge their configs into one @triton.autotune.",
        )


def _check_autotuner(kernel: Kernel, autotuner: Any) -> None:
    if unsupported_autotune_arguments_are_ignored():
        return
    hooks = [
        name for name in ("pre_hook", "post_hook") if getattr(autotuner, f"user_defined_{name}", False) is not False
    ]
    if hooks:
        raise _unsupported(
            kernel,
            f"is autotuned with {' and '.join(hooks)}=, arbitrary Python that a compiled graph cannot run at a launch",
            "Do what the hook does in the op's body, or use reset_to_zero= and restore_value=.",
        )
    if any(config.pre_hook is not None for config in autotuner.configs):
        raise _unsupported(
            kernel,
            "has a triton.Config with pre_hook=, arbitrary Python that a compiled graph cannot run at a launch",
            "Do what the hook does in the op's body.",
        )
    settings = [name for name, value in _benchmark_settings(autotuner).items() if value]
    if settings:
        raise _unsupported(
            kernel,
            f"sets {', '.join(settings)} in @triton.autotune, and Inductor benchmarks in its own way",
            "Leave them out; or set torch._inductor.config.unsafe_ignore_unsupported_triton_autotune_args = True.",
        )


def _benchmark_settings(autotuner: Any) -> dict[str, bool]:
    """The settings of autotune's own benchmark that differ from Triton's defaults."""
    parameters = inspect.signature(Autotuner.__init__).parameters

    def differs(parameter: str, attribute: str, defaults: tuple[object, ...]) -> bool:
        if parameter not in parameters:
            return False
        value = getattr(autotuner, attribute, getattr(autotuner, parameter, parameters[parameter].default))
        return value != parameters[parameter].default and value not in defaults

    return {
        "warmup=": differs("warmup", "num_warmups", (25, None)),
        "rep=": differs("rep", "num_reps", (100, None)),
        "use_cuda_graph=": differs("use_cuda_graph", "use_cuda_graph", (False,)),
    }


def _check_heuristics_above(kernel: Kernel, autotuner: Any, above: tuple[Any, ...]) -> None:
    tuned = {name for config in autotuner.configs for name in config.kwargs}
    clashes = sorted(tuned & {name for layer in above for name in layer.values})
    if clashes:
        raise _unsupported(
            kernel,
            f"computes {', '.join(clashes)} in @triton.heuristics above an @triton.autotune whose configs set the same",
            "The accepted order is @triton.autotune, then @triton.heuristics, then @triton.jit; "
            "and a name is either tuned or computed.",
        )


def _unsupported(kernel: Kernel, why: str, fix: str) -> UnsupportedKernelError:
    return UnsupportedKernelError(f"Triton kernel '{kernel.name}' {why}. {fix} ({kernel.file}:{kernel.line})")
