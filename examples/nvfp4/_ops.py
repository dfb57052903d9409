# SPDX-License-Identifier: Apache-2.0
"""The runners as ops, with gradients. A compiler sees their Tensors and, on a GPU, every launch."""

from __future__ import annotations

from typing import Any

import torch
from magi_backend import magi_register_custom_op
from magi_opschema import register_kernel
from torch import Tensor

from ._runners import NVFP4LinearRunner, NVFP4MoERunner, NVFP4Weight


NAMESPACE = __name__.split(".")[-2]
"""The name of this folder: a copy under another name has ops of its own."""


def _linear_grad_meta(grad: Tensor, runner: NVFP4LinearRunner) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], runner.weight.features)


@magi_register_custom_op(f"{NAMESPACE}::linear_grad", infer_output_meta_fn=_linear_grad_meta)
def linear_grad(grad: Tensor, runner: NVFP4LinearRunner) -> Tensor:
    """The gradient of `linear_gemm` with respect to x: grad [..., out_features] to [..., in_features]."""
    return runner.run_transposed_triton(grad)


@register_kernel(linear_grad, "cpu")
def _linear_grad_cpu(grad: Tensor, runner: NVFP4LinearRunner) -> Tensor:
    return runner.run_transposed(grad)


def _linear_save(ctx: Any, inputs: tuple[Tensor, NVFP4LinearRunner], output: Tensor) -> None:
    del output
    weight = inputs[1].weight
    ctx.save_for_backward(*_tensors(weight))
    ctx.sizes = _sizes(weight)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return linear_grad(grad, NVFP4LinearRunner(NVFP4Weight(*ctx.saved_tensors, *ctx.sizes))), None


def _tensors(weight: NVFP4Weight) -> tuple[Tensor, Tensor, Tensor]:
    return weight.codes, weight.scales, weight.tensor_scale


def _sizes(weight: NVFP4Weight) -> tuple[int, int]:
    return weight.columns, weight.features


def _linear_meta(x: Tensor, runner: NVFP4LinearRunner) -> Tensor:
    return x.new_empty(*x.shape[:-1], runner.weight.columns)


@magi_register_custom_op(
    f"{NAMESPACE}::linear_gemm",
    infer_output_meta_fn=_linear_meta,
    setup_context_fn=_linear_save,
    backward_fn=_linear_backward,
)
def linear_gemm(x: Tensor, runner: NVFP4LinearRunner) -> Tensor:
    """X of shape [..., in_features] times the runner's weight: [..., out_features], in the dtype of x."""
    return runner.run_triton(x)


@register_kernel(linear_gemm, "cpu")
def _linear_gemm_cpu(x: Tensor, runner: NVFP4LinearRunner) -> Tensor:
    return runner.run(x)


def _moe_grad_meta(
    grad: Tensor, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, runner: NVFP4MoERunner
) -> tuple[Tensor, Tensor]:
    del grad, topk_ids, runner
    return torch.empty_like(hidden_states), torch.empty_like(topk_weights)


@magi_register_custom_op(f"{NAMESPACE}::moe_grad", infer_output_meta_fn=_moe_grad_meta)
def moe_grad(
    grad: Tensor, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, runner: NVFP4MoERunner
) -> tuple[Tensor, Tensor]:
    """The gradients of `moe_gemm` with respect to hidden_states and topk_weights; the inner layer is computed again."""
    return runner.run_gradients(grad, hidden_states, topk_weights, topk_ids)


def _moe_save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, NVFP4MoERunner], output: Tensor) -> None:
    del output
    hidden_states, topk_weights, topk_ids, runner = inputs
    parts = *_tensors(runner.gate_up), *_tensors(runner.down)
    ctx.save_for_backward(hidden_states, topk_weights, topk_ids, *parts)
    ctx.sizes = _sizes(runner.gate_up), _sizes(runner.down)


def _moe_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    hidden_states, topk_weights, topk_ids, *parts = ctx.saved_tensors
    of_gate_up, of_down = ctx.sizes
    runner = NVFP4MoERunner(NVFP4Weight(*parts[:3], *of_gate_up), NVFP4Weight(*parts[3:], *of_down))
    return (*moe_grad(grad, hidden_states, topk_weights, topk_ids, runner), None, None)


def _moe_meta(hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, runner: NVFP4MoERunner) -> Tensor:
    del topk_weights, topk_ids
    return hidden_states.new_empty(hidden_states.shape[0], runner.down.columns)


@magi_register_custom_op(
    f"{NAMESPACE}::moe_gemm", infer_output_meta_fn=_moe_meta, setup_context_fn=_moe_save, backward_fn=_moe_backward
)
def moe_gemm(hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, runner: NVFP4MoERunner) -> Tensor:
    """hidden_states [tokens, hidden] through the runner's experts, chosen by topk_ids [tokens, k]."""
    return runner.run_triton(hidden_states, topk_weights, topk_ids)


@register_kernel(moe_gemm, "cpu")
def _moe_gemm_cpu(hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, runner: NVFP4MoERunner) -> Tensor:
    return runner.run(hidden_states, topk_weights, topk_ids)
