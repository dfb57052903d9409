# SPDX-License-Identifier: Apache-2.0
"""NVFP4 weights behind runner objects: quantised linear and mixture-of-experts layers as ordinary ops.

python -m nvfp4          # from the folder examples/: quantise a small Llama, compile it, compare
"""

from __future__ import annotations

from ._format import NVFP4Tensor as NVFP4Tensor
from ._format import dequantize_nvfp4 as dequantize_nvfp4
from ._format import quantize_nvfp4 as quantize_nvfp4
from ._modules import NVFP4Linear as NVFP4Linear
from ._modules import NVFP4MoE as NVFP4MoE
from ._modules import ReferenceMoE as ReferenceMoE
from ._ops import linear_gemm as linear_gemm
from ._ops import moe_gemm as moe_gemm
from ._quantise import QuantisedLayer as QuantisedLayer
from ._quantise import QuantiseReport as QuantiseReport
from ._quantise import quantise_ as quantise_
from ._runners import NVFP4LinearRunner as NVFP4LinearRunner
from ._runners import NVFP4MoERunner as NVFP4MoERunner
from ._runners import NVFP4Weight as NVFP4Weight


__all__ = [
    "NVFP4Linear",
    "NVFP4LinearRunner",
    "NVFP4MoE",
    "NVFP4MoERunner",
    "NVFP4Tensor",
    "NVFP4Weight",
    "QuantiseReport",
    "QuantisedLayer",
    "ReferenceMoE",
    "dequantize_nvfp4",
    "linear_gemm",
    "moe_gemm",
    "quantise_",
    "quantize_nvfp4",
]
