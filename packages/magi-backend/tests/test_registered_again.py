# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""A cell that registers an op is run again: the compiler sees the new body, whatever is left of the earlier op."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import magi_opschema
import pytest
import torch
import triton
import triton.language as tl
from magi_backend import _torch_compat, magi_register_custom_op
from magi_tritonwrap import OpaqueFallbackWarning
from magi_tritonwrap.testing import aot_graphs, launches_of, stub_driver
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx


@triton.jit
def double_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)


def doubled(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    double_kernel[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), BLOCK=128)
    return out


def doubled_twice(x: Tensor) -> Tensor:
    return doubled(doubled(x))


def launches(op: Callable[[Tensor], Tensor]) -> int:
    with stub_driver():
        (graph,) = aot_graphs(lambda x: op(x) + 1, torch.ones(300))
    return len(launches_of(graph))


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("is_compiled_before", [False, True])
def test_the_launches_of_the_new_body_are_seen(ns: str, is_compiled_before: bool, is_kept: bool) -> None:
    kept: list[Any] = []
    for body, count in [(doubled, 1), (doubled_twice, 2), (doubled, 1)]:
        op = magi_register_custom_op(f"{ns}::rerun", override=True)(body)
        gc.collect()
        if is_compiled_before or len(kept) == 2:
            assert launches(op) == count
        kept.append(op if is_kept else None)
        del op


def test_a_later_op_that_is_not_seen_through_has_its_own_results(ns: str) -> None:
    """The dispatcher keeps the first OpOverload of a name, and torch the rule that decomposed it."""

    def launches_or_doubles(x: Tensor) -> Tensor:
        return doubled(x) if x.numel() == 1 else x * 2

    x = torch.arange(4.0)
    first = magi_register_custom_op(f"{ns}::taken")(launches_or_doubles)
    assert torch.equal(torch.compile(lambda x: first(x) + 1, backend="aot_eager", fullgraph=True)(x), x * 2 + 1)
    torch.compiler.reset()

    @magi_opschema.magi_register_custom_op(f"{ns}::taken", override=True)
    def second(x: Tensor) -> Tensor:
        return x * 3

    with pytest.warns(OpaqueFallbackWarning, match="taken stays opaque .* registered again after make_see_through"):
        result = torch.compile(lambda x: second(x) + 1, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(result, x * 3 + 1)


def test_its_kernel_is_known_to_be_written_in_python(ns: str) -> None:
    def register() -> Any:
        return torch.library.custom_op(f"{ns}::rerun", torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor")

    gc.disable()
    try:
        register()
        op = register()
        gc.collect()
    finally:
        gc.enable()
    graph = make_fx(op)(torch.ones(3)).graph
    assert _torch_compat.nodes.python_operators(graph) == (f"{ns}::rerun",)
