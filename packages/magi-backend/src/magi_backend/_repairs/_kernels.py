# SPDX-License-Identifier: Apache-2.0
"""The user's Triton kernels, as Inductor gets them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from collections.abc import Sequence


def parameters_of(kernel: Any) -> Sequence[Any]:
    """The parameters of *kernel*, read from the function below its autotuner and heuristics."""
    while not hasattr(kernel, "params"):
        kernel = kernel.fn
    return kernel.params  # type: ignore[no-any-return]


def is_of_the_user(body: str) -> bool:
    """Whether *body*, the call that defines a kernel in the generated module, defines a kernel of the user."""
    return "\n@triton_heuristics.user_autotune(\n" in body
