# SPDX-License-Identifier: Apache-2.0
"""Functions of unsloth as ops: bodies as one writes them, and inputs."""

from __future__ import annotations

from types import SimpleNamespace

from _library_op import ROWS, SEQUENCES, LibraryOp, Sizes, rotary, rows
from torch import Tensor
from unsloth.kernels.geglu import geglu_exact_forward_kernel
from unsloth.kernels.layernorm import fast_layernorm
from unsloth.kernels.rms_layernorm import fast_rms_layernorm
from unsloth.kernels.rope_embedding import fast_rope_embedding
from unsloth.kernels.swiglu import swiglu_fg_kernel


EPSILON = 1e-6
BATCHES: Sizes = {"small": (4, 1, 1024), "large": (2, 4096, 4096), "tiny": (2, 2, 64)}
"""Sequences, tokens of each, and width."""


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return fast_rms_layernorm(SimpleNamespace(weight=weight, eps=EPSILON), x)  # type: ignore[no-any-return]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    module = SimpleNamespace(weight=weight, bias=bias, eps=EPSILON, elementwise_affine=True)
    return fast_layernorm(module, x)  # type: ignore[no-any-return]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return swiglu_fg_kernel(gate, up)  # type: ignore[no-any-return]


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return geglu_exact_forward_kernel(gate, up)  # type: ignore[no-any-return]


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    # It writes into both where they are contiguous, which an op must not without saying so.
    return fast_rope_embedding(q.clone(), k.clone(), cos, sin)  # type: ignore[no-any-return]


OPS = {
    "unsloth_rms_norm": LibraryOp(rms_norm, ROWS, rows(1, weights=1)),
    "unsloth_layer_norm": LibraryOp(layer_norm, ROWS, rows(1, weights=2)),
    "unsloth_swiglu": LibraryOp(swiglu, BATCHES, rows(2)),
    "unsloth_geglu": LibraryOp(geglu, BATCHES, rows(2)),
    "unsloth_rope": LibraryOp(rope, SEQUENCES, rotary()),
}
