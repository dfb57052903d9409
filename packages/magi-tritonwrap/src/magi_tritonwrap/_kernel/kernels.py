# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel as its author decorated it, and whether a compiled graph can reproduce that decoration."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from triton.runtime.autotuner import Autotuner, Heuristics

from magi_tritonwrap._torch_compat.kernels import interpreted_classes, unsupported_autotune_arguments_are_ignored
from magi_tritonwrap.errors import UnsupportedKernelError

from .launchers import kernel_behind


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
