# SPDX-License-Identifier: Apache-2.0
"""The four packages as they are installed, short enough for freshly built wheels. Nothing here reads the checkout.

What each does alone is in its README, which `nox -s wheels` runs as well.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch
import triton
import triton.language as tl
from magi_backend import explain, magi_compile, magi_register_custom_op
from magi_tritonwrap import see_through_report
from torch import Tensor


pytestmark = pytest.mark.smoke


@dataclass(frozen=True)
class Window:
    size: int = 4
    scale: float = 0.5


@dataclass(frozen=True)
class Blend:
    window: Window = field(default_factory=Window)
    mode: Literal["sum", "mean"] = "sum"


@triton.jit
def blend_kernel(x, out, n, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * scale, at < n)


@magi_register_custom_op(
    "magi_smoke::blend",
    infer_output_meta_fn=["x"],
    setup_context_fn=lambda ctx, inputs, output: setattr(ctx, "cfg", inputs[1]),
    backward_fn=lambda ctx, grad: (grad * ctx.cfg.window.scale, None),
)
def blend(x: Tensor, cfg: Blend) -> Tensor:
    return x * cfg.window.scale


@magi_register_custom_op("magi_smoke::launch")
def launch(x: Tensor, cfg: Blend) -> Tensor:
    out = torch.empty_like(x)
    blend_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), cfg.window.scale, BLOCK=64)
    return out


@pytest.mark.parametrize("distribution", ["magi-backend", "magi-opschema", "magi-passes", "magi-tritonwrap"])
def test_installed(distribution: str) -> None:
    module = importlib.import_module(distribution.replace("-", "_"))

    assert importlib.metadata.version(distribution) == importlib.metadata.version("magi-opschema")
    assert (importlib.resources.files(module) / "py.typed").is_file()
    assert module.__all__ == sorted(module.__all__)
    assert set(dir(module)) >= set(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_the_entry_point_is_declared() -> None:
    (entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="magi")

    assert entry.value == "magi_backend._entry_point:magi"
    assert entry.load() is importlib.import_module("magi_backend").magi


def test_a_launching_operator_takes_its_fake_from_its_body() -> None:
    assert see_through_report(launch).kernels[0].name == "blend_kernel"
    with torch._subclasses.FakeTensorMode():
        out = launch(torch.empty(5, 7, dtype=torch.float16), Blend())

    assert (out.shape, out.dtype) == ((5, 7), torch.float16)


def test_explain_reports_a_magi_compiled_function_forward_and_backward() -> None:
    settings = Blend()

    @magi_compile(dynamic_arg_dims={"x": 0}, model_tag="smoke")
    def centred(x: Tensor) -> Tensor:
        return blend(x - x.mean(0), settings)

    report = explain(centred)(torch.randn(5, 3, requires_grad=True))

    assert report.agrees
    assert any(difference.name.startswith("gradient") for difference in report.calls[0].differences)
    assert [(op.name, op.path) for op in report.compilations[0].ops] == [("magi_smoke::blend", "flattened")]
    for text in (report.to_text(), report.to_json(), report.to_html()):
        assert "NDTilingWorkaroundPass" in text
        assert "flattened" in text
        assert "smoke" in text
