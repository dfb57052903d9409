# SPDX-License-Identifier: Apache-2.0
"""The public face of the four packages, short enough for freshly built wheels. Nothing here reads the checkout."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch
import triton
import triton.language as tl
from magi_backend import explain, magi_compile, magi_register_custom_op
from magi_opschema import lower_signature, op_def
from magi_passes import MagiInductorPass, PassPipeline, Reason, collect_records, is_dynamic
from magi_tritonwrap import capture_launches, find_kernels, see_through_report
from torch import Tensor


pytestmark = pytest.mark.smoke

DISTRIBUTIONS = ("magi-backend", "magi-opschema", "magi-passes", "magi-tritonwrap")


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


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_installed(distribution: str) -> None:
    module = importlib.import_module(distribution.replace("-", "_"))

    assert importlib.metadata.version(distribution) == importlib.metadata.version("magi-opschema")
    assert (importlib.resources.files(module) / "py.typed").is_file()
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_the_entry_point_is_declared() -> None:
    (entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="magi")

    assert entry.value == "magi_backend._entry_point:magi"
    assert entry.load() is importlib.import_module("magi_backend").magi


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("magi_opschema", ("triton", "torch._inductor", "pydantic", "magi_passes", "magi_tritonwrap", "magi_backend")),
        ("magi_tritonwrap", ("pydantic", "magi_opschema", "magi_passes", "magi_backend")),
        ("magi_passes", ("pydantic", "magi_opschema", "magi_tritonwrap", "magi_backend")),
        ("magi_backend", ("torch", "triton", "pydantic", "rich", "magi_opschema", "magi_passes", "magi_tritonwrap")),
    ],
)
def test_an_import_loads_no_more_than_it_says(module: str, absent: tuple[str, ...]) -> None:
    program = f"import sys, {module}\nprint(*(name for name in {absent!r} if name in sys.modules))"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.split() == []


def test_a_signature_is_lowered() -> None:
    lowering = lower_signature(blend_body)

    assert lowering.path == "flattened"
    assert [leaf.name for leaf in lowering.leaves] == ["x", "cfg__window__size", "cfg__window__scale", "cfg__mode"]


def blend_body(x: Tensor, cfg: Blend) -> Tensor:
    return x


def test_an_operator_works_eager_compiled_and_backward() -> None:
    x = torch.randn(6, requires_grad=True)
    compiled = torch.compile(lambda x: blend(x.sin(), Blend(Window(scale=0.25))).sum(), backend="magi", fullgraph=True)

    expected = blend(x.sin(), Blend(Window(scale=0.25))).sum()
    (wanted,) = torch.autograd.grad(expected, x)
    actual = compiled(x)
    (found,) = torch.autograd.grad(actual, x)

    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(found, wanted)


def test_a_launch_is_found_and_captured() -> None:
    (kernel,) = find_kernels(op_def(launch).fn).kernels
    assert kernel.name == "blend_kernel"

    with capture_launches(drop=True) as log:
        op_def(launch).fn(torch.ones(3), Blend())
    assert [launch.name for launch in log.launches] == ["blend_kernel"]
    assert see_through_report(launch).kernels[0].name == "blend_kernel"
    assert see_through_report(launch) == see_through_report(op_def(launch).torch_op)
    assert "1 Triton kernel" in str(op_def(launch))


def test_a_launching_operator_takes_its_fake_from_its_body() -> None:
    with torch._subclasses.FakeTensorMode():
        out = launch(torch.empty(5, 7, dtype=torch.float16), Blend())

    assert (out.shape, out.dtype) == ((5, 7), torch.float16)


@dataclass(frozen=True)
class Tiles(MagiInductorPass):
    inductor_config_keys_potentially_mutated_by_this_pass = ("triton.max_tiles",)

    def is_applicable(self, graph: torch.fx.Graph, context: object) -> Reason:
        return Reason(is_dynamic(graph), "sizes are symbolic" if is_dynamic(graph) else "sizes are fixed")

    def __call__(self, graph: torch.fx.Graph) -> None:
        torch._inductor.config.triton.max_tiles = 2


def test_a_pass_runs_where_it_applies_and_leaks_nothing() -> None:
    compiled = torch.compile(torch.cos, dynamic=True, options=PassPipeline([Tiles()]).inductor_options())

    with collect_records() as records:
        compiled(torch.ones(4, 6))

    assert [(record.pass_name, record.reason) for record in records] == [("Tiles", "sizes are symbolic")]
    assert torch._inductor.config.triton.max_tiles is None


def test_explain_reports_a_magi_compiled_function() -> None:
    settings = Blend()

    @magi_compile(dynamic_arg_dims={"x": 0}, model_tag="smoke")
    def centred(x: Tensor) -> Tensor:
        return blend(x - x.mean(0), settings)

    report = explain(centred)(torch.randn(5, 3))

    assert report.agrees
    assert [(op.name, op.path) for op in report.compilations[0].ops] == [("magi_smoke::blend", "flattened")]
    for text in (report.to_text(), report.to_json(), report.to_html()):
        assert "NDTilingWorkaroundPass" in text
        assert "flattened" in text
        assert "smoke" in text
