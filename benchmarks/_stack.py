# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The model of see_through: a stack of layers with two Triton ops each, and the ways to register these ops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import magi_opschema
import magi_tritonwrap
import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.library import wrap_triton


EPS = 1e-6
CAP = 30.0


@triton.jit
def rms_norm_kernel(x, weight, out, width, EPS: tl.constexpr, BLOCK: tl.constexpr):
    """Normalise one row by its root mean square."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(x + row * width + at, inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / width + EPS)
    normed = values * scale * tl.load(weight + at, inside).to(tl.float32)
    tl.store(out + row * width + at, normed.to(out.dtype.element_ty), inside)


@triton.jit
def silu_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    """Gate one row: SiLU of its first half times its second."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, inside).to(tl.float32)
    tl.store(out + row * width + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), inside)


def launch_rows(kernel: object, rows: int, width: int, *arguments: object, **constants: object) -> None:
    """Launch one program a row; the helper that hides the kernels from a reader of the ops."""
    kernel[(rows,)](*arguments, width, BLOCK=triton.next_power_of_2(width), num_warps=4, **constants)  # type: ignore[index]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm over rows, plain launch."""
    out = torch.empty_like(x)
    launch_rows(rms_norm_kernel, x.shape[0], x.shape[1], x, weight, out, EPS=EPS)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiLU times gate, plain launch."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    launch_rows(silu_mul_kernel, out.shape[0], out.shape[1], gate_up, out)
    return out


def rms_norm_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm with the launch wrapped by hand."""
    out = torch.empty_like(x)
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    wrap_triton(rms_norm_kernel)[(rows,)](x, weight, out, width, EPS=EPS, BLOCK=block, num_warps=4)
    return out


def silu_mul_by_hand(gate_up: Tensor) -> Tensor:
    """SiLU times gate with the launch wrapped by hand."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    rows, width = out.shape
    wrap_triton(silu_mul_kernel)[(rows,)](gate_up, out, width, BLOCK=triton.next_power_of_2(width), num_warps=4)
    return out


def rms_norm_fake(x: Tensor, _weight: Tensor) -> Tensor:
    """What RMSNorm returns, for the compiler."""
    return torch.empty_like(x)


def silu_mul_fake(gate_up: Tensor) -> Tensor:
    """What SiLU times gate returns, for the compiler."""
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@dataclass(frozen=True)
class Ops:
    """The two ops of a layer, registered in one way."""

    norm: Callable[[Tensor, Tensor], Tensor]
    silu_mul: Callable[[Tensor], Tensor]


@functools.cache
def registered() -> dict[str, Ops]:
    """The ops of each arm; torch takes each name once a process."""
    opaque = Ops(
        torch.library.custom_op("see_through_opaque::norm", rms_norm, mutates_args=()),
        torch.library.custom_op("see_through_opaque::silu_mul", silu_mul, mutates_args=()),
    )
    opaque.norm.register_fake(rms_norm_fake)  # type: ignore[attr-defined]
    opaque.silu_mul.register_fake(silu_mul_fake)  # type: ignore[attr-defined]
    register = magi_opschema.magi_register_custom_op
    return {
        "hand": Ops(
            torch.library.triton_op("see_through_hand::norm", rms_norm_by_hand, mutates_args=()),
            torch.library.triton_op("see_through_hand::silu_mul", silu_mul_by_hand, mutates_args=()),
        ),
        "see_through": Ops(
            magi_tritonwrap.triton_op("see_through::norm", rms_norm, mutates_args=()),
            magi_tritonwrap.triton_op("see_through::silu_mul", silu_mul, mutates_args=()),
        ),
        "opaque": opaque,
        "opaque_opschema": Ops(
            register("see_through_opschema::norm", infer_output_meta_fn=rms_norm_fake)(rms_norm),
            register("see_through_opschema::silu_mul", infer_output_meta_fn=silu_mul_fake)(silu_mul),
        ),
    }


@dataclass(frozen=True)
class Case:
    """One size of the stack, and how often it runs between two readings of the clock."""

    name: str
    tokens: int
    width: int
    layers: int
    capped: bool
    calls: int
    repeats: int

    @property
    def flops(self) -> int:
        """Of the linears, up to twice the width and down again."""
        return 6 * self.layers * self.tokens * self.width**2

    @property
    def bytes(self) -> int:
        """What the linears read and write, weights once a call, in bfloat16."""
        return 2 * self.layers * (3 * self.width**2 + 5 * self.tokens * self.width)


class Layer(nn.Module):
    """RMSNorm, SiLU times gate between two linears, residual; capped layers have pointwise work after the norm.

    It reads nothing but what the norm wrote: that is what Inductor can put into the norm's kernel
    (``can_fuse`` in torch/_inductor/scheduler.py, 2.12 to 2.15).
    """

    def __init__(self, ops: Ops, width: int, *, capped: bool) -> None:
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(width, width, bias=False)
        self.capped = capped

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        normed = self.ops.norm(x, self.weight)
        if self.capped:
            normed = CAP * torch.tanh(normed / CAP)
        hidden: Tensor = x + self.down(self.ops.silu_mul(self.up(normed)))
        return hidden


def stack(ops: Ops, case: Case, device: str, dtype: torch.dtype) -> nn.Module:
    """The model of one arm; the seed is the same for all."""
    torch.manual_seed(0)
    layers = (Layer(ops, case.width, capped=case.capped) for _ in range(case.layers))
    with torch.device(device):
        return nn.Sequential(*layers).to(dtype).eval()
