# SPDX-License-Identifier: Apache-2.0
"""The runners as ops. A compiler sees Tensors, sizes and a handle; the runner itself it never sees."""

from __future__ import annotations

from magi_opschema import ObjectHandle, magi_register_custom_op, register_kernel
from torch import Tensor

from ._runners import NVFP4LinearRunner, NVFP4MoERunner


def _linear_meta(x: Tensor, runner: NVFP4LinearRunner, out_features: int) -> Tensor:
    del runner  # it is the same description for every runner
    return x.new_empty(*x.shape[:-1], out_features)


@magi_register_custom_op("nvfp4::linear_gemm", infer_output_meta_fn=_linear_meta)
def linear_gemm(x: Tensor, runner: ObjectHandle[NVFP4LinearRunner], out_features: int) -> Tensor:
    """X of shape [..., in_features] times the runner's weight: [..., out_features], in the dtype of x."""
    del out_features
    return runner.run_triton(x)


@register_kernel(linear_gemm, "cpu")
def _linear_gemm_cpu(x: Tensor, runner: ObjectHandle[NVFP4LinearRunner], out_features: int) -> Tensor:
    del out_features
    return runner.run(x)


def _moe_meta(
    hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, runner: NVFP4MoERunner, hidden_size: int
) -> Tensor:
    del topk_weights, topk_ids, runner
    return hidden_states.new_empty(hidden_states.shape[0], hidden_size)


@magi_register_custom_op("nvfp4::moe_gemm", infer_output_meta_fn=_moe_meta)
def moe_gemm(
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    runner: ObjectHandle[NVFP4MoERunner],
    hidden_size: int,
) -> Tensor:
    """hidden_states [tokens, hidden_size] through the runner's experts, chosen by topk_ids [tokens, k]."""
    del hidden_size
    return runner.run_triton(hidden_states, topk_weights, topk_ids)


@register_kernel(moe_gemm, "cpu")
def _moe_gemm_cpu(
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    runner: ObjectHandle[NVFP4MoERunner],
    hidden_size: int,
) -> Tensor:
    del hidden_size
    return runner.run(hidden_states, topk_weights, topk_ids)
