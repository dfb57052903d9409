# SPDX-License-Identifier: Apache-2.0
"""Launch options that a compiled graph can carry."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from triton.runtime.autotuner import Config

from .kernels import Kernel


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
