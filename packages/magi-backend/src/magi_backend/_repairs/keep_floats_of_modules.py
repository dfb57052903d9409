# SPDX-License-Identifier: Apache-2.0
"""A float attribute of a module is a constant of the graph until it changes, with ``dynamic=True`` too (all releases).

With ``dynamic=True``, Dynamo makes a symbol for each float (`wrap_symfloat` in torch/_dynamo/variables/builder.py). The
epsilon of each norm and the scale of each attention become tensors of one element on the CPU, which are made and read
in each call. Fewer kernels fuse, because a scale that is a tensor cannot be part of the kernel that reads it. A Llama
of 8 layers makes 45 such tensors in each call, which take 0.1 of 3.3 ms of CPU time at 256 tokens (one H200, torch
2.11). With ``dynamic=None``, a float is a constant with a guard; the first call with another value compiles once more,
and the float is a symbol from then on. The repair does the same for attributes of modules. Arguments of the function
are symbols from the start, as ``dynamic=True`` requires.

Dynamo does this before the backend is called, so this repair checks that the captured frame is for a backend of ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from magi_backend._torch_compat.compiling import is_our_backend

from ._defect import Defect
from ._scope import note_in_capture, replace


if TYPE_CHECKING:
    from collections.abc import Callable


NAME = "keep_floats_of_modules"


def patch() -> None:
    """Treat these floats as Dynamo does with ``dynamic=None``."""
    from torch._dynamo import config
    from torch._dynamo.variables.builder import VariableBuilder

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrap_symfloat(self: Any, value: float) -> Any:
            output = self.tx.output
            is_of_module = self.source.guard_source.is_unspecialized_nn_module()
            if config.assume_static_by_default or not is_of_module or not is_our_backend(output.compiler_fn):
                return original(self, value)
            with config.patch(assume_static_by_default=True):
                found = original(self, value)
            if found.is_python_constant():
                note_in_capture(output, NAME)
            return found

        return wrap_symfloat

    replace(VariableBuilder, "wrap_symfloat", make)


DEFECT = Defect(
    name=NAME,
    effect="each float attribute of a module is a tensor that every call makes and reads, and kernels fuse less",
    severity="slower code",
    since=(2, 10, 0),
    fixed=None,
    repair="float attributes of modules are constants until they change",
    patch=patch,
    is_in_capture=True,
)
