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


def are_epilogues_fused_by_user() -> bool:
    """Whether the user turned the fusion of epilogues on. Torch does not fuse by default: stock torch is then right."""
    from torch._inductor import config

    return bool(getattr(config, "epilogue_fusion_user_defined_triton_kernel", False))
