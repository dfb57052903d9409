# SPDX-License-Identifier: Apache-2.0
"""The declared reasons for which a check is not run, counted against a budget."""

from __future__ import annotations


CUDA_ONLY = "torch has the kernel for CUDA only"
OVERRIDEABLE = "torch has no kernel: a backend must bring one"
NOT_SERVED = "the kernel does not serve these inputs; ATen did"
REFUSED = "ATen refuses these inputs"

UNREACHED = "torch has the kernel for other devices only, or for nested tensors"

UNREGISTERED = "torch registers no kernel for the sparse tensors that it is meant for"

EXCLUDED = {
    "addmm.dtype": CUDA_ONLY,
    "baddbmm.dtype": CUDA_ONLY,
    "bmm.dtype": CUDA_ONLY,
    "conv_depthwise3d": CUDA_ONLY,
    "convolution_backward_overrideable": OVERRIDEABLE,
    "convolution_overrideable": OVERRIDEABLE,
    "indices_copy": UNREGISTERED,
    "linear_backward": UNREACHED,
    "matmul_backward": UNREACHED,
    "max_pool2d_backward": UNREACHED,
    "mm.dtype": CUDA_ONLY,
}
"""By variant, why no input can reach it on a CPU."""

BUDGETS = {CUDA_ONLY: 5, OVERRIDEABLE: 2, UNREACHED: 3, UNREGISTERED: 1}
"""How many variants each reason may exclude; with more, the run fails."""
