# SPDX-License-Identifier: Apache-2.0
"""Float arguments of the user's Triton kernels have 32 bits, as Triton's own launcher has it. No GPU is needed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from _pretended_gpu import generated, module_of
from magi_backend import magi_register_custom_op
from magi_backend._records.collect import Collector, collecting
from magi_backend._repairs._defect import active_defects
from magi_backend._torch_compat.compiling import torch_release
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(
        "keep_float_arguments" not in {defect.name for defect in active_defects(torch_release())},
        reason="torch has mended it",
    ),
]


@triton.jit
def scale_kernel(x, out, scale, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * scale, at < n)


@triton.jit
def wide_kernel(x, out, scale: tl.float64, shift, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * scale + shift, at < n)


tuned_kernel = triton.autotune([triton.Config({"BLOCK": block}) for block in (64, 128)], key=["n"])(scale_kernel)


@magi_register_custom_op("float_arguments::by_position")
def by_position(x: Tensor, scale: float) -> Tensor:
    out = torch.empty_like(x)
    scale_kernel[(4,)](x, out, scale, x.numel(), BLOCK=64)
    return out


@magi_register_custom_op("float_arguments::by_name")
def by_name(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    scale_kernel[(4,)](x, out, n=x.numel(), BLOCK=64, scale=1e-3)
    return out


@magi_register_custom_op("float_arguments::tuned")
def tuned(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    tuned_kernel[(4,)](x, out, 0.125, x.numel())
    return out


@magi_register_custom_op("float_arguments::annotated")
def annotated(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    wide_kernel[(4,)](x, out, 0.125, 2.0, x.numel(), BLOCK=64)
    return out


@magi_register_custom_op("float_arguments::of_an_int")
def of_an_int(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    scale_kernel[(4,)](x, out, 3, x.numel(), BLOCK=64)
    return out


def scaled(x: Tensor) -> Tensor:
    return by_position(x, 0.5)


def by_magi(fn: Callable[[Tensor], Any]) -> tuple[str, list[str]]:
    """The code that the backend has Inductor write, and the names of the repairs that it reports."""
    collector = Collector(fresh=False)
    with collecting(collector):
        code = generated(fn, backend="magi")
    (compilation,) = collector.compilations()
    return code, [repair.name for graph in compilation.graphs for repair in graph.repairs]


def types(code: str) -> dict[str, str]:
    """The declared types of the user's kernel in *code*."""
    (signature,) = [found for found in re.findall(r"'signature': (\{.*?\})", code) if "'scale'" in found]
    return dict(re.findall(r"'(\w+)': '([^']+)'", signature))


@pytest.mark.parametrize("fn", [scaled, by_name, tuned], ids=["by position", "by name", "tuned"])
def test_floats_are_32_bits_wide(fn: Callable[[Tensor], Tensor]) -> None:
    assert types(generated(fn))["scale"] == "fp64", "torch has mended this: give the defect its end"
    torch.compiler.reset()
    code, repairs = by_magi(fn)
    assert types(code)["scale"] == "fp32"
    assert repairs == ["keep_float_arguments"]


def test_an_annotated_parameter_keeps_its_type() -> None:
    code, repairs = by_magi(annotated)
    assert (types(code)["scale"], types(code)["shift"]) == ("fp64", "fp32")
    assert repairs == ["keep_float_arguments"]


def test_a_kernel_without_floats_has_no_repair() -> None:
    assert by_magi(of_an_int)[1] == []


def test_the_arithmetic_is_that_of_a_launch(tmp_path: Path) -> None:
    source = Path(__file__).read_text().split("@triton.jit\n", 2)[1].split("\n\n\n")[0]
    kernel = module_of(f"import triton\nimport triton.language as tl\n@triton.jit\n{source}\n", tmp_path).scale_kernel
    wide = {}
    for code in (generated(scaled), by_magi(scaled)[0]):
        torch.compiler.reset()
        declared = {name: kind for name, kind in types(code).items() if kind != "constexpr"}
        made = triton.compile(ASTSource(kernel, declared, {"BLOCK": 64}), target=GPUTarget("cuda", 90, 32))
        wide[declared["scale"]] = "mul.f64" in made.asm["ptx"] or ".f64" in made.asm["ptx"]
    assert wide == {"fp64": True, "fp32": False}
