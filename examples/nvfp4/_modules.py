# SPDX-License-Identifier: Apache-2.0
"""Modules in place of nn.Linear and of a mixture of experts; their weights are buffers, which runners are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ._format import NVFP4Tensor, quantize_nvfp4, stack
from ._ops import linear_gemm, moe_gemm
from ._runners import NVFP4LinearRunner, NVFP4MoERunner, NVFP4Weight


class _Quantized(nn.Module):
    """Buffers that hold NVFP4 tensors.

    A runner is made of them for each call, so that nothing has to follow what moves, loads or replaces them. The scales
    keep their types whatever `.to(dtype)` or `.half()` does to the model. No parameter holds a weight: optimizers and
    FSDP leave it alone.
    """

    def _hold(self, name: str, tensor: NVFP4Tensor) -> None:
        weight = NVFP4Weight.of(tensor)
        for part in ("codes", "scales", "tensor_scale"):
            self.register_buffer(f"{name}_{part}", getattr(weight, part))

    def _held(self, name: str, columns: int, features: int) -> NVFP4Weight:
        # Read by the name of the buffer rather than as an attribute: compiled code looks at fewer things in each call.
        held: dict[str, Any] = self._buffers
        parts = held[f"{name}_codes"], held[f"{name}_scales"], held[f"{name}_tensor_scale"]
        return NVFP4Weight(*parts, columns, features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Quantized:
        scales = {name: buffer for name, buffer in self._buffers.items() if name.endswith("tensor_scale")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, scale in scales.items():
            moved = self._buffers[name]
            if scale is not None and moved is not None and moved.dtype != scale.dtype:
                self._buffers[name] = scale.to(moved.device)
        return self


class NVFP4Linear(_Quantized):
    """`nn.Linear` with a frozen NVFP4 weight; bias and activations keep their type, gradients go to x and the bias."""

    def __init__(self, weight: NVFP4Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.packed.shape[0], weight.packed.shape[1] * 2
        self._hold("weight", weight)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)

    @classmethod
    def from_float(cls, linear: nn.Linear) -> NVFP4Linear:
        """Quantise the weight of *linear*; its in_features are a multiple of 16."""
        return cls(quantize_nvfp4(linear.weight), linear.bias)

    @property
    def runner(self) -> NVFP4LinearRunner:
        """What the op takes: the weight as it is now."""
        return NVFP4LinearRunner(self._held("weight", self.out_features, self.in_features))

    def forward(self, x: Tensor) -> Tensor:
        """X of shape [..., in_features] to [..., out_features]."""
        # What `runner` says, without the property, at which compiled code would look in each call.
        out = linear_gemm(x, NVFP4LinearRunner(self._held("weight", self.out_features, self.in_features)))
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        """Sizes, as nn.Linear shows them."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class ReferenceMoE(nn.Module):
    """A mixture of SwiGLU experts in float, routed by the top k of a softmax.

    Args:
        hidden: width of the tokens.
        intermediate: width inside an expert.
        experts: number of experts.
        k: experts for each token.
    """

    def __init__(self, hidden: int, intermediate: int, experts: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * intermediate, hidden) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, intermediate) / intermediate**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """X of shape [tokens, hidden]."""
        weights, ids = route(self.router, x, self.k)
        inner = torch.einsum("th,tkih->tki", x, self.gate_up[ids])
        gate, up = inner.chunk(2, -1)
        outer = torch.einsum("tki,tkhi->tkh", functional.silu(gate) * up, self.down[ids])
        return (outer * weights.unsqueeze(-1)).sum(1)


def route(router: nn.Module, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Weights, which sum to 1, and numbers of the k experts for each token."""
    weights, ids = router(x).float().softmax(-1).topk(k)
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), ids


class NVFP4MoE(_Quantized):
    """`ReferenceMoE` with NVFP4 experts, each with its own tensor scale; the router stays as it is."""

    def __init__(self, router: nn.Module, gate_up: NVFP4Tensor, down: NVFP4Tensor, k: int) -> None:
        super().__init__()
        self.router, self.k = router, k
        self.hidden, self.intermediate = down.packed.shape[-2], down.packed.shape[-1] * 2
        self._hold("gate_up", gate_up)
        self._hold("down", down)

    @classmethod
    def from_float(cls, moe: ReferenceMoE) -> NVFP4MoE:
        """Quantise the experts of *moe*."""
        gate_up, down = (stack([quantize_nvfp4(expert) for expert in part]) for part in (moe.gate_up, moe.down))
        return cls(moe.router, gate_up, down, moe.k)

    @property
    def runner(self) -> NVFP4MoERunner:
        """What the op takes: the weights as they are now."""
        return NVFP4MoERunner(
            self._held("gate_up", 2 * self.intermediate, self.hidden),
            self._held("down", self.hidden, self.intermediate),
        )

    def forward(self, x: Tensor) -> Tensor:
        """X of shape [tokens, hidden]."""
        weights, ids = route(self.router, x, self.k)
        return moe_gemm(x, weights, ids, self.runner)
