# SPDX-License-Identifier: Apache-2.0
"""Functions of flash-linear-attention as ops: bodies as one writes them, and inputs."""

from __future__ import annotations

import torch
from _library_op import ROWS, SEQUENCES, STEPS, Inputs, LibraryOp, rows
from fla.modules.activations import swiglu as fla_swiglu
from fla.modules.causal_conv1d import causal_conv1d
from fla.modules.norm.fused_norm_gate import rms_norm_gated as fla_rms_norm_gated
from fla.modules.norm.l2norm import l2norm as fla_l2norm
from fla.modules.norm.layernorm import layer_norm as fla_layer_norm
from fla.modules.rotary import rotary_embedding as fla_rotary_embedding
from fla.modules.token_shift import token_shift as fla_token_shift
from fla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.gla import chunk_gla, fused_recurrent_gla
from fla.ops.hgrn import fused_recurrent_hgrn
from fla.ops.retention import chunk_retention, fused_recurrent_retention
from fla.ops.simple_gla import chunk_simple_gla
from fla.ops.utils.cumsum import chunk_global_cumsum, chunk_local_cumsum
from torch import Tensor
from torch.nn import functional


def l2norm(x: Tensor) -> Tensor:
    return fla_l2norm(x)  # type: ignore[no-any-return]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return fla_layer_norm(x, weight, bias)  # type: ignore[no-any-return]


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return fla_rms_norm_gated(x, gate, weight, None)  # type: ignore[no-any-return]


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return fla_swiglu(x, y)  # type: ignore[no-any-return]


def token_shift(x: Tensor) -> Tensor:
    return fla_token_shift(x)  # type: ignore[no-any-return]


def short_convolution(x: Tensor, weight: Tensor) -> Tensor:
    return causal_conv1d(x, weight, activation="silu")[0]  # type: ignore[no-any-return]


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return fla_rotary_embedding(x, cos, sin)  # type: ignore[no-any-return]


def local_cumsum(gate: Tensor) -> Tensor:
    return chunk_local_cumsum(gate, 64)  # type: ignore[no-any-return]


def global_cumsum(gate: Tensor) -> Tensor:
    return chunk_global_cumsum(gate)  # type: ignore[no-any-return]


def chunked_gla(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return chunk_gla(q, k, v, gate)[0]  # type: ignore[no-any-return]


def recurrent_gla(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return fused_recurrent_gla(q, k, v, gate)[0]  # type: ignore[no-any-return]


def chunked_simple_gla(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return chunk_simple_gla(q, k, v, gate)[0]  # type: ignore[no-any-return]


def chunked_retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return chunk_retention(q, k, v)[0]  # type: ignore[no-any-return]


def recurrent_retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fused_recurrent_retention(q, k, v)[0]  # type: ignore[no-any-return]


def chunked_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    return chunk_delta_rule(q, k, v, beta)[0]  # type: ignore[no-any-return]


def recurrent_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    return fused_recurrent_delta_rule(q, k, v, beta)[0]  # type: ignore[no-any-return]


def chunked_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor) -> Tensor:
    return chunk_gated_delta_rule(q, k, v, gate, beta)[0]  # type: ignore[no-any-return]


def recurrent_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor) -> Tensor:
    return fused_recurrent_gated_delta_rule(q, k, v, gate, beta=beta)[0]  # type: ignore[no-any-return]


def recurrent_hgrn(x: Tensor, gate: Tensor) -> Tensor:
    return fused_recurrent_hgrn(x, gate)[0]  # type: ignore[no-any-return]


def _tokens(weights: tuple[int, ...] = ()) -> Inputs:
    """A sequence of tokens, heads side by side, and a weight for each of their features."""

    def make(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        batch, tokens, heads, width = size
        x = torch.randn(batch, tokens, heads * width, dtype=dtype)
        return (x, torch.randn(heads * width, *weights, dtype=dtype)) if weights else (x,)

    return make


def _heads(*, gate: str = "", beta: bool = False) -> Inputs:
    """Queries, keys of length 1, values; a gate for each head or "feature" of it, and beta, where there are such."""

    def make(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        q, k, v = (torch.randn(size, dtype=dtype) for _ in range(3))
        found = [q, functional.normalize(k, dim=-1), v]
        if gate:
            found.append(functional.logsigmoid(torch.randn(size if gate == "feature" else size[:3])).to(dtype))
        if beta:
            found.append(torch.rand(size[:3]).to(dtype))
        return tuple(found)

    return make


def _rotary(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    angles = torch.randn(size[1], size[3] // 2)
    return torch.randn(size, dtype=dtype), angles.cos().to(dtype), angles.sin().to(dtype)


def _gate(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (functional.logsigmoid(torch.randn(size[:3])).to(dtype),)


def _gated_tokens(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    (x,) = _tokens()(size, dtype)
    return x, functional.logsigmoid(torch.randn(x.shape)).to(dtype)


OPS = {
    "fla_l2norm": LibraryOp(l2norm, SEQUENCES, rows(1)),
    "fla_layer_norm": LibraryOp(layer_norm, ROWS, rows(1, weights=2)),
    "fla_rms_norm_gated": LibraryOp(rms_norm_gated, ROWS, rows(2, weights=1)),
    "fla_swiglu": LibraryOp(swiglu, ROWS, rows(2)),
    "fla_token_shift": LibraryOp(token_shift, SEQUENCES, _tokens()),
    "fla_short_convolution": LibraryOp(short_convolution, SEQUENCES, _tokens((4,))),
    "fla_rotary": LibraryOp(rotary, SEQUENCES, _rotary),
    "fla_local_cumsum": LibraryOp(local_cumsum, SEQUENCES, _gate),
    "fla_global_cumsum": LibraryOp(global_cumsum, SEQUENCES, _gate),
    "fla_chunk_gla": LibraryOp(chunked_gla, SEQUENCES, _heads(gate="feature")),
    "fla_fused_recurrent_gla": LibraryOp(recurrent_gla, STEPS, _heads(gate="feature")),
    "fla_chunk_simple_gla": LibraryOp(chunked_simple_gla, SEQUENCES, _heads(gate="head")),
    "fla_chunk_retention": LibraryOp(chunked_retention, SEQUENCES, _heads()),
    "fla_fused_recurrent_retention": LibraryOp(recurrent_retention, STEPS, _heads()),
    "fla_chunk_delta_rule": LibraryOp(chunked_delta_rule, SEQUENCES, _heads(beta=True)),
    "fla_fused_recurrent_delta_rule": LibraryOp(recurrent_delta_rule, STEPS, _heads(beta=True)),
    "fla_chunk_gated_delta_rule": LibraryOp(chunked_gated_delta_rule, SEQUENCES, _heads(gate="head", beta=True)),
    "fla_fused_recurrent_gated_delta_rule": LibraryOp(
        recurrent_gated_delta_rule, STEPS, _heads(gate="head", beta=True)
    ),
    "fla_fused_recurrent_hgrn": LibraryOp(recurrent_hgrn, STEPS, _gated_tokens),
}
