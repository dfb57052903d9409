# SPDX-License-Identifier: Apache-2.0
"""A 1 stays a number where the user's Triton kernel asks for numbers. No GPU is needed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from _pretended_gpu import generated
from magi_backend import magi_register_custom_op
from magi_backend._records.collect import Collector, collecting
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


pytestmark = pytest.mark.kernels


def add_tokens(x, out, tokens, scale, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * scale + tokens.to(tl.int64), at < n)


by_name = triton.jit(do_not_specialize=["tokens"])(add_tokens)
by_place = triton.jit(do_not_specialize=[2])(add_tokens)
specialized = triton.jit(add_tokens)
tuned = triton.autotune([triton.Config({"BLOCK": block}) for block in (64, 128)], key=["n"])(
    triton.heuristics({"scale": lambda given: 0.5})(by_name)
)


def op_of(name: str, launch: Callable[[Tensor, Tensor, int], Any]) -> Callable[[Tensor, int], Tensor]:
    @magi_register_custom_op(f"unspecialized_ones::{name}")
    def add(x: Tensor, tokens: int) -> Tensor:
        out = torch.empty_like(x)
        launch(x, out, tokens)
        return out

    return add


OPS = {
    "by name": op_of("by_name", lambda x, out, tokens: by_name[(4,)](x, out, tokens, 0.5, x.numel(), BLOCK=64)),
    "by place": op_of("by_place", lambda x, out, tokens: by_place[(4,)](x, out, n=64, tokens=tokens, scale=2, BLOCK=8)),
    "tuned": op_of("tuned", lambda x, out, tokens: tuned[(4,)](x, out, tokens, n=x.numel())),
    "specialized": op_of(
        "specialized", lambda x, out, tokens: specialized[(4,)](x, out, tokens, 0.5, x.numel(), BLOCK=64)
    ),
}


def types(op: str, tokens: int, backend: str = "magi") -> dict[str, str]:
    """The declared types of the user's kernel, in the code that *backend* has Inductor write."""
    code = generated(lambda x: OPS[op](x, tokens), backend=backend)
    (signature,) = [found for found in re.findall(r"'signature': (\{.*?\})", code) if "'tokens'" in found]
    return dict(re.findall(r"'(\w+)': '([^']+)'", signature))


@pytest.mark.parametrize("op", ["by name", "by place", "tuned"])
def test_it_is_declared_as_a_number(op: str) -> None:
    assert types(op, 1, "inductor")["tokens"] == "constexpr", "torch has mended this: give the defect its end"
    torch.compiler.reset()
    assert types(op, 1)["tokens"] == "i32"


def test_its_kernel_compiles() -> None:
    made = {name: kind for name, kind in types("by name", 1).items() if kind != "constexpr"}
    assert triton.compile(ASTSource(by_name, made, {"BLOCK": 64}), target=GPUTarget("cuda", 90, 32)).asm["ptx"]


def test_other_ones_are_constants_as_in_triton() -> None:
    assert types("specialized", 1)["tokens"] == "constexpr"


@pytest.mark.parametrize(("tokens", "reported"), [(1, ["keep_unspecialized_ones"]), (2, [])])
def test_the_report_names_it_where_it_mattered(tokens: int, reported: list[str]) -> None:
    collector = Collector(fresh=False)
    with collecting(collector):
        assert types("by name", tokens)["tokens"] == "i32"
    (compilation,) = collector.compilations()
    repairs = [repair.name for graph in compilation.graphs for repair in graph.repairs]
    assert [name for name in repairs if name == "keep_unspecialized_ones"] == reported
