# SPDX-License-Identifier: Apache-2.0
"""Functions of vLLM as ops: bodies as one writes them, and inputs."""

from __future__ import annotations

import torch
from _library_op import ROWS, SEQUENCES, LibraryOp, Sizes, rows
from torch import Tensor
from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum
from vllm.model_executor.layers.mamba.ops.layernorm_gated import rms_norm_gated as vllm_rms_norm_gated
from vllm.model_executor.layers.quantization.awq_triton import awq_gemm_triton
from vllm.models.common.ops.fused_qk_rmsnorm import fused_q_kv_rmsnorm
from vllm.v1.attention.ops.triton_merge_attn_states import merge_attn_states
from vllm.v1.attention.ops.triton_prefill_attention import context_attention_fwd


EPSILON = 1e-6
EXPERTS: Sizes = {"small": (4, 8, 1024), "large": (4096, 8, 4096), "tiny": (4, 2, 64)}
"""Tokens, experts of each, and width."""

PACKED: Sizes = {"small": (4, 1024, 1024), "large": (256, 4096, 4096), "tiny": (4, 128, 64)}
"""Tokens, and the columns and rows of a weight of 4 bits."""

LATENTS: Sizes = {"small": (4, 1536, 512), "large": (8192, 1536, 512), "tiny": (4, 64, 32)}
"""Tokens, and the widths of the latent queries and of the latent keys and values."""


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return vllm_rms_norm_gated(x, weight, None, gate, EPSILON)  # type: ignore[no-any-return]


def fused_qk_norm(q: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor) -> tuple[Tensor, Tensor]:
    return fused_q_kv_rmsnorm(q, kv, q_weight, kv_weight, EPSILON)  # type: ignore[no-any-return]


def merged_attention(prefix: Tensor, prefix_lse: Tensor, suffix: Tensor, suffix_lse: Tensor) -> Tensor:
    output = torch.empty_like(prefix)
    merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse)
    return output


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    output = torch.empty_like(q)
    context_attention_fwd(q, k, v, output, starts, lengths, len(q) // len(lengths))
    return output


def sum_of_experts(outputs: Tensor, weights: Tensor) -> Tensor:
    return moe_fused_mul_sum(outputs, weights)  # type: ignore[no-any-return]


def awq_product(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return awq_gemm_triton(x, weight, scales, zeros, 8)  # type: ignore[no-any-return]


def _attention_states(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    batch, tokens, heads, width = size

    def part() -> tuple[Tensor, Tensor]:
        return torch.randn(batch * tokens, heads, width, dtype=dtype), torch.randn(heads, batch * tokens)

    return (*part(), *part())


def _prompts(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    batch, tokens, heads, width = size
    q, k, v = (torch.randn(batch * tokens, each, width, dtype=dtype) for each in (heads, heads // 2, heads // 2))
    lengths = torch.full((batch,), tokens, dtype=torch.int32)
    return q, k, v, torch.arange(batch, dtype=torch.int32) * tokens, lengths


def _latents(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    tokens, *widths = size
    x = torch.randn(tokens, sum(widths), dtype=dtype)
    return (*x.split(widths, -1), *(torch.randn(width, dtype=dtype) for width in widths))


def _experts(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch.randn(size, dtype=dtype), torch.randn(size[:2]).softmax(-1)


def _packed(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    tokens, columns, rows_of_weight = size
    groups = columns // 64
    # Its kernel adds up in the type of the scales, which Triton refuses for bfloat16.
    dtype = torch.float16 if dtype is torch.bfloat16 else dtype

    def words(count: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, (count, rows_of_weight // 8), dtype=torch.int32)

    scales = torch.rand(groups, rows_of_weight).to(dtype) / 64
    return torch.randn(tokens, columns, dtype=dtype), words(columns), scales, words(groups)


OPS = {
    "vllm_rms_norm_gated": LibraryOp(rms_norm_gated, ROWS, rows(2, weights=1)),
    "vllm_fused_qk_norm": LibraryOp(fused_qk_norm, LATENTS, _latents),
    "vllm_merge_attention": LibraryOp(merged_attention, SEQUENCES, _attention_states),
    "vllm_prefill_attention": LibraryOp(prefill_attention, SEQUENCES, _prompts),
    "vllm_sum_of_experts": LibraryOp(sum_of_experts, EXPERTS, _experts),
    "vllm_awq_product": LibraryOp(awq_product, PACKED, _packed),
}
