# SPDX-License-Identifier: Apache-2.0
"""NVFP4 weights behind object handles: quantised linear and mixture-of-experts layers as ordinary ops.

python -m nvfp4          # from the folder examples/: quantise a small Llama, compile it, compare
"""

from __future__ import annotations

from ._format import NVFP4Tensor as NVFP4Tensor
from ._format import dequantize_nvfp4 as dequantize_nvfp4
from ._format import quantize_nvfp4 as quantize_nvfp4
from ._modules import NVFP4Linear as NVFP4Linear
from ._modules import NVFP4MoE as NVFP4MoE
from ._modules import ReferenceMoE as ReferenceMoE
from ._modules import quantize_linears as quantize_linears
from ._ops import linear_gemm as linear_gemm
from ._ops import moe_gemm as moe_gemm
from ._runners import NVFP4LinearRunner as NVFP4LinearRunner
from ._runners import NVFP4MoERunner as NVFP4MoERunner


__all__ = [
    "NVFP4Linear",
    "NVFP4LinearRunner",
    "NVFP4MoE",
    "NVFP4MoERunner",
    "NVFP4Tensor",
    "ReferenceMoE",
    "dequantize_nvfp4",
    "linear_gemm",
    "moe_gemm",
    "quantize_linears",
    "quantize_nvfp4",
]
