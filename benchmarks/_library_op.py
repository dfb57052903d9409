# SPDX-License-Identifier: Apache-2.0
"""A function of a library of Triton kernels as an op: its body, its inputs, and how a model calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


Sizes = Mapping[str, tuple[int, ...]]
Body = Callable[..., Any]
Inputs = Callable[[tuple[int, ...], torch.dtype], tuple[Tensor, ...]]

ROWS: Sizes = {"small": (4, 1024), "large": (8192, 4096), "tiny": (4, 64)}
"""Tokens and width: a step of decoding, a long prompt, one for the interpreter."""

VOCABULARY: Sizes = {"small": (4, 4096), "large": (4096, 32000), "tiny": (4, 64)}
"""Tokens and logits."""

SEQUENCES: Sizes = {"small": (1, 64, 4, 64), "large": (2, 4096, 16, 128), "tiny": (1, 64, 2, 16)}
"""Batch, tokens, heads and width of a head, for ops that work in chunks."""

STEPS: Sizes = {"small": (1, 1, 4, 64), "large": (64, 64, 16, 128), "tiny": (1, 4, 2, 16)}
"""The same for ops that go token by token."""


@dataclass(frozen=True)
class LibraryOp:
    """An op of a library.

    Attributes:
        body: What is registered: the library's call, with the annotations of an op.
        sizes: What `inputs` is given, by "small", "large" and "tiny".
        inputs: Makes the tensors of a call on the default device, those of floating point in a type.
        library: The library's call as a user of it writes it, where that is not `body`.
    """

    body: Body
    sizes: Sizes
    inputs: Inputs
    library: Body | None = None


@dataclass(frozen=True)
class Program:
    """What is compiled.

    Attributes:
        ops: The ops in it by name.
        build: Makes what is called, of what stands for each op, on the default device in a type.
        sizes: As of an op.
        inputs: As of an op.
    """

    ops: Mapping[str, LibraryOp]
    build: Callable[[Mapping[str, Body], torch.dtype], Body]
    sizes: Sizes
    inputs: Inputs


def program_of(name: str, op: LibraryOp) -> Program:
    """One op, in a model."""
    return Program({name: op}, lambda made, _: _in_a_model(made[name]), op.sizes, op.inputs)


def _in_a_model(op: Body) -> Body:
    """*op* with pointwise work around it: its first input is scaled, and its outputs are as well.

    An output that is shaped like the first input is added to it, as a residual.
    """

    def call(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        out = op(x * 0.5, *rest)
        outputs: tuple[Tensor, ...] = out if isinstance(out, tuple) else (out,)
        return tuple(x + one * 0.5 if one.shape == x.shape else one * 0.5 for one in outputs)

    return call


def rows(count: int, *, weights: int = 0) -> Inputs:
    """*count* tensors of the size, and *weights* vectors of its last dimension."""

    def make(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        each = [torch.randn(size, dtype=dtype) for _ in range(count)]
        return (*each, *(torch.randn(size[-1], dtype=dtype) for _ in range(weights)))

    return make


def rotary(*, batch: tuple[int, ...] = ()) -> Inputs:
    """Queries, half as many keys, and the cosines and sines of angles, with dimensions of *batch* before the tokens."""

    def make(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        sequences, tokens, heads, width = size
        q = torch.randn(sequences, tokens, heads, width, dtype=dtype).transpose(1, 2)
        k = torch.randn(sequences, tokens, heads // 2, width, dtype=dtype).transpose(1, 2)
        angles = torch.randn(*batch, tokens, width)
        return q, k, angles.cos().to(dtype), angles.sin().to(dtype)

    return make
