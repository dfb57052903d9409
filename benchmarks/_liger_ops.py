# SPDX-License-Identifier: Apache-2.0
"""Functions of Liger as ops: bodies as one writes them, and inputs."""

from __future__ import annotations

import torch
from _library_op import ROWS, SEQUENCES, VOCABULARY, Inputs, LibraryOp, rotary, rows
from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
from liger_kernel.ops.dyt import LigerDyTFunction
from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
from liger_kernel.ops.geglu import LigerGELUMulFunction
from liger_kernel.ops.group_norm import LigerGroupNormFunction
from liger_kernel.ops.jsd import LigerJSDFunction
from liger_kernel.ops.kl_div import LigerKLDivLossFunction
from liger_kernel.ops.layer_norm import LigerLayerNormFunction
from liger_kernel.ops.poly_norm import LigerPolyNormFunction
from liger_kernel.ops.relu_squared import LigerReLUSquaredFunction
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.rope import LigerRopeFunction
from liger_kernel.ops.softmax import LigerSoftmaxFunction
from liger_kernel.ops.swiglu import LigerSiLUMulFunction
from liger_kernel.ops.tvd import LigerTVDLossFunction
from torch import Tensor


EPSILON = 1e-6


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return LigerRMSNormFunction.apply(x, weight, EPSILON)  # type: ignore[no-any-return]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return LigerLayerNormFunction.apply(x, weight, bias, EPSILON)  # type: ignore[no-any-return]


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return LigerGroupNormFunction.apply(x, weight, bias, x.shape[1], 8, EPSILON)  # type: ignore[no-any-return]


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPSILON)[0]  # type: ignore[no-any-return]


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return LigerPolyNormFunction.apply(x, weight, bias)  # type: ignore[no-any-return]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return LigerSiLUMulFunction.apply(gate, up)  # type: ignore[no-any-return]


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return LigerGELUMulFunction.apply(gate, up)  # type: ignore[no-any-return]


def relu_squared(x: Tensor) -> Tensor:
    return LigerReLUSquaredFunction.apply(x)  # type: ignore[no-any-return]


def softmax(x: Tensor) -> Tensor:
    return LigerSoftmaxFunction.apply(x)  # type: ignore[no-any-return]


def dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return LigerDyTFunction.apply(x, alpha, gamma, beta)  # type: ignore[no-any-return]


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    # It writes into both, which an op must not without saying so, and which would change what the next call gets.
    return LigerRopeFunction.apply(q.clone(), k.clone(), cos, sin)  # type: ignore[no-any-return]


def kl_div(predicted: Tensor, wanted: Tensor) -> Tensor:
    return LigerKLDivLossFunction.apply(predicted, wanted)  # type: ignore[no-any-return]


def jsd(predicted: Tensor, wanted: Tensor) -> Tensor:
    return LigerJSDFunction.apply(predicted, wanted)  # type: ignore[no-any-return]


def tvd(p: Tensor, q: Tensor) -> Tensor:
    return LigerTVDLossFunction.apply(p, q)  # type: ignore[no-any-return]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return LigerCrossEntropyFunction.apply(logits, labels, None)[0]  # type: ignore[no-any-return]


def _channels(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    channels = size[2] * size[0] if size[2] * size[0] % 8 == 0 else 8
    x = torch.randn(size[0], channels, size[1] * size[3] // 4, dtype=dtype)
    return x, torch.randn(channels, dtype=dtype), torch.randn(channels, dtype=dtype)


def _polynomial(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch.randn(size, dtype=dtype), torch.ones(3, dtype=dtype) / 3, torch.ones(1, dtype=dtype)


def _with_scalar(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    x, gamma, beta = rows(1, weights=2)(size, dtype)
    return x, torch.ones(1, dtype=dtype), gamma, beta


def _distributions(*, logs: int) -> Inputs:
    """Two distributions, the first of which, as many as *logs*, are given by their logarithms."""

    def make(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        drawn = [torch.randn(size) for _ in range(2)]
        return tuple((x.log_softmax(-1) if at < logs else x.softmax(-1)).to(dtype) for at, x in enumerate(drawn))

    return make


def _logits_and_labels(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch.randn(size, dtype=dtype), torch.randint(0, size[1], size[:1])


OPS = {
    "liger_rms_norm": LibraryOp(rms_norm, ROWS, rows(1, weights=1)),
    "liger_layer_norm": LibraryOp(layer_norm, ROWS, rows(1, weights=2)),
    "liger_group_norm": LibraryOp(group_norm, SEQUENCES, _channels),
    "liger_fused_add_rms_norm": LibraryOp(fused_add_rms_norm, ROWS, rows(2, weights=1)),
    "liger_poly_norm": LibraryOp(poly_norm, ROWS, _polynomial),
    "liger_swiglu": LibraryOp(swiglu, ROWS, rows(2)),
    "liger_geglu": LibraryOp(geglu, ROWS, rows(2)),
    "liger_relu_squared": LibraryOp(relu_squared, ROWS, rows(1)),
    "liger_softmax": LibraryOp(softmax, ROWS, rows(1)),
    "liger_dyt": LibraryOp(dyt, ROWS, _with_scalar),
    "liger_rope": LibraryOp(rope, SEQUENCES, rotary(batch=(1,))),
    "liger_kl_div": LibraryOp(kl_div, VOCABULARY, _distributions(logs=1)),
    "liger_jsd": LibraryOp(jsd, VOCABULARY, _distributions(logs=2)),
    "liger_tvd": LibraryOp(tvd, VOCABULARY, _distributions(logs=0)),
    "liger_cross_entropy": LibraryOp(cross_entropy, VOCABULARY, _logits_and_labels),
}
