# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The backend as one of torch's: its entry point, threads, ahead-of-time compilation, operators with kernels."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from _pretended_gpu import generated
from _python import python
from magi_backend import _torch_compat, explain, magi_register_custom_op
from magi_opschema import op_def, use_implementation
from magi_tritonwrap import capture_launches, see_through_report
from magi_tritonwrap.errors import UnknownOpError
from magi_tritonwrap.testing import aot_graphs, launches_of, stub_driver
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import wrap_triton


def test_importing_loads_no_torch() -> None:
    heavy = ("torch", "triton", "pydantic", "rich", "click", "magi_opschema", "magi_passes", "magi_tritonwrap")

    program = f"import sys, magi_backend; magi_backend.magi; print([n for n in {heavy} if n in sys.modules])"
    assert python("-c", program) == "[]\n"


def test_threads_may_be_the_first_to_name_the_backend() -> None:
    """Each loads the entry point and registers it, for torch has no lock there."""
    program = """
import threading, torch
from concurrent.futures import ThreadPoolExecutor

start = threading.Barrier(8)

def name_it(_):
    start.wait()
    torch.compile(torch.sin, backend="magi")

with ThreadPoolExecutor(8) as threads:
    list(threads.map(name_it, range(8)))
registered = torch._dynamo.lookup_backend("magi")
print(registered.__module__, "magi" in torch._dynamo.list_backends())
"""
    assert python("-c", program) == "magi_backend._backend True\n"


@pytest.mark.parametrize("before", ["", "import torch._inductor.codegen.cuda.device_op_overrides"], ids=["", "others"])
def test_a_repair_of_one_device_leaves_the_others_to_inductor(before: str) -> None:
    program = f"""
{before}
from magi_backend._repairs._defect import known_defects
from torch._inductor.codegen import common

for defect in known_defects():
    defect.patch()
print(sorted({{"cpu", "cuda", "mps", "xpu"}} - common.device_op_overrides_dict.keys()))
"""
    assert python("-c", program) == "[]\n"


def test_an_unknown_backend_is_still_refused() -> None:
    torch.compile(torch.sin, backend="magi")  # names the backend, which registers it

    with pytest.raises(torch._dynamo.exc.InvalidBackend, match="magie"):
        torch.compile(torch.sin, backend="magie")


def test_a_malformed_environment_does_not_break_the_import() -> None:
    program = "import os; os.environ['MAGI_COMPILE_CHECK'] = 'maybe'; import magi_backend as m; print(m.CompileConfig)"

    assert "CompileConfig" in python("-c", program)


@dataclass(frozen=True)
class Settings:
    factor: float = 3.0


@pytest.mark.xfail(
    torch.__version__.startswith(("2.10.", "2.11.")),
    reason="torch.compile itself fails in several threads, at times with a crash: Metric(s) {'is_forward'} have ...",
    run=False,
)
def test_two_models_compiled_from_two_threads() -> None:
    functions = [lambda x: (x.sin() + 1).relu(), lambda x: (x.cos() * 2).tanh()]
    both = threading.Barrier(2)

    def is_right(fn: Any) -> bool:
        x = torch.linspace(0, 3, 7)
        both.wait()
        return torch.allclose(torch.compile(fn, backend="magi")(x), fn(x))

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(is_right, functions))


def test_only_the_thread_that_traces_is_refused() -> None:
    compiled = torch.compile(lambda x: x.relu() + 1, backend="magi")
    compiled(torch.ones(3))
    found: list[Tensor] = []

    def waits_for_another(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: found.append(compiled(torch.ones(3))))
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="using FX to symbolically trace a dynamo-optimized function"):
            compiled(x)
        return x + 1

    torch.fx.symbolic_trace(waits_for_another)

    assert [result.tolist() for result in found] == [[2.0, 2.0, 2.0]]


def exponential(x: Tensor) -> Tensor:
    return x.exp() + 1


@pytest.mark.kernels
@pytest.mark.skipif(not hasattr(torch.compile(exponential, fullgraph=True), "aot_compile"), reason="torch has none")
def test_aot_compile_and_load(tmp_path: Path) -> None:
    compiled: Any = torch.compile(exponential, backend="magi", fullgraph=True)
    ahead = compiled.aot_compile(((torch.randn(5),), {}))
    file = tmp_path / "compiled"
    ahead.save_compiled_function(str(file))

    with file.open("rb") as stream:
        loaded = torch.compiler.load_compiled_function(stream)

    x = torch.ones(5)
    torch.testing.assert_close(ahead(x), exponential(x))
    torch.testing.assert_close(loaded(x), exponential(x))


@triton.jit
def scale_kernel(x, out, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * factor, at < n)


def test_an_operator_without_a_launch_stays_opaque(ns: str) -> None:
    @magi_register_custom_op(f"{ns}::scale", infer_output_meta_fn=["x"])
    def scale(x: Tensor, settings: Settings) -> Tensor:
        return x * settings.factor

    with pytest.raises(UnknownOpError):
        see_through_report(op_def(scale).torch_op)
    with pytest.raises(UnknownOpError, match="opaque"):
        see_through_report(scale)
    assert "see-through" not in str(op_def(scale))


def test_a_body_that_wraps_its_launches_is_launched_directly_by_eager_calls(
    ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @magi_register_custom_op(f"{ns}::scale")
    def scale(x: Tensor, settings: Settings = Settings()) -> Tensor:
        out = torch.empty_like(x)
        wrap_triton(scale_kernel)[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), settings.factor, BLOCK=64)
        return out

    with stub_driver():
        (graph,) = aot_graphs(lambda x: scale(x, Settings()), torch.randn(128))
    (launch,) = launches_of(graph)
    assert launch.cloned == ["out"]

    def refuse(*args: object, **kwargs: object) -> None:
        pytest.fail("an eager call went through the higher-order op")

    wrapping = torch._higher_order_ops.triton_kernel_wrap
    monkeypatch.setattr(type(wrapping.tracing_triton_hopifier_singleton), "call_HOP", refuse)
    monkeypatch.setattr(type(wrapping.triton_kernel_wrapper_mutation), "__call__", refuse)
    with capture_launches(drop=True) as log:
        scale(torch.randn(128))
    assert [launch.name for launch in log.launches] == ["scale_kernel"]


def test_a_registration_that_is_refused_names_the_place_of_a_body_that_wraps_its_launches(ns: str) -> None:
    with pytest.raises(Exception, match=Path(__file__).name):

        @magi_register_custom_op(f"{ns}::bad")
        def bad(x, n: set[int]) -> Tensor:
            wrap_triton(scale_kernel)[(1,)](x, x, 1, 2.0, BLOCK=64)
            return x  # type: ignore[no-any-return]


@pytest.fixture
def rows_op(ns: str) -> Iterator[Any]:
    """Another library's operator, which is written in C++ as far as a search can tell; its output is a row sum."""
    library = torch.library.Library(f"{ns}_other", "FRAGMENT")
    library.define("rows(Tensor x) -> Tensor")
    library.impl("rows", lambda x: x.sum(1), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{ns}_other::rows", lambda x: x.new_empty(x.shape[0]), lib=library)
    yield getattr(torch.ops, f"{ns}_other").rows.default
    library._destroy()


@pytest.mark.parametrize("is_given", [False, True])
def test_an_operator_over_one_of_another_library(is_given: bool, ns: str, rows_op: Any) -> None:
    infer = (lambda x, settings: x.new_empty(x.shape[0])) if is_given else None

    @magi_register_custom_op(f"{ns}::rows", infer_output_meta_fn=infer)
    def rows(x: Tensor, settings: Settings) -> Tensor:
        result: Tensor = rows_op(x * settings.factor)
        return result

    note = f"{ns}_other::rows is opaque if called: torch keeps no Python body of it"
    assert op_def(rows).notes["see-through"] == note
    assert [inner.op for inner in see_through_report(rows).inner_ops] == [f"{ns}_other::rows"]
    with stub_driver():
        (graph,) = aot_graphs(lambda x: rows(x, Settings()), torch.ones(4, 3))
    assert rows_op in {node.target for node in graph.graph.nodes}
    compiled = torch.compile(lambda x: rows(x, Settings()), backend="magi", fullgraph=True)
    assert torch.equal(compiled(torch.ones(4, 3)), torch.full((4,), 9.0))


def test_an_operator_over_one_of_ours_that_launches_nothing_stays_opaque(ns: str) -> None:
    @magi_register_custom_op(f"{ns}::inner")
    def inner(x: Tensor) -> Tensor:
        return x + 1

    @magi_register_custom_op(f"{ns}::outer")
    def outer(x: Tensor) -> Tensor:
        result: Tensor = getattr(torch.ops, ns).inner(x)
        return result

    assert "see-through" not in op_def(outer).notes
    (graph,) = aot_graphs(outer, torch.ones(4))
    assert op_def(outer).torch_op in {node.target for node in graph.graph.nodes}


def doubled(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    scale_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), 2, BLOCK=64)
    return out


@pytest.mark.kernels
def test_a_report_says_that_the_body_for_the_cpu_ran_in_place_of_the_kernel(ns: str) -> None:
    @magi_register_custom_op(f"{ns}::doubled")
    def op(x: Tensor) -> Tensor:
        return doubled(x)

    @magi_register_custom_op(f"{ns}::apart", is_subgraph_boundary=True)
    def apart(x: Tensor) -> Tensor:
        return x + 1

    torch.library.register_kernel(f"{ns}::doubled", "cpu", lambda x: x * 2)
    report = explain(lambda x: apart(op(x).sin()).cos(), repeats=0)(torch.ones(4))

    (compilation,) = report.compilations
    assert [(use.name, use.stays) for use in compilation.ops] == [(f"{ns}::doubled", True), (f"{ns}::apart", True)]
    text = " ".join(report.to_text().split())
    said = "calls 1, of the operator itself: nothing of its body is in the compiled code"
    assert f"see-through 1 Triton kernel in its body {said}" in text


def doubled_twice(x: Tensor) -> Tensor:
    return doubled(doubled(x))


def launches_in(op: Callable[[Tensor], Tensor]) -> int:
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
            assert launches_in(op) == count
        kept.append(op if is_kept else None)
        del op


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


@triton.jit
def long_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)


@triton.jit
def short_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)


@magi_register_custom_op("magi_implementations::double")
def double(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    long_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out


@double.implementation(when=lambda x: x.numel() <= 64, devices=("cuda",), priority=1)
def short(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    short_kernel[(1,)](x, out, x.numel(), BLOCK=64)
    return out


@magi_register_custom_op("magi_implementations::negate")
def negate(x: Tensor) -> Tensor:
    return -x


@negate.implementation(devices=("cuda",))
def negate_by_kernel(x: Tensor) -> Tensor:
    return -double(x) / 2


def code(fn: object, size: int, **how: object) -> str:
    torch._dynamo.reset()
    return generated(fn, torch.empty(size, device="cpu"), backend="magi", **how)  # type: ignore[arg-type]


@pytest.mark.kernels
def test_the_kernel_of_the_implementation_is_in_the_code() -> None:
    assert "short_kernel" in code(double, 48)
    assert "long_kernel" not in code(double, 48)
    assert "long_kernel" in code(double, 96)
    with use_implementation(double, "default"):
        assert "long_kernel" in code(double, 48)
    found = {kernel.name for kernel in see_through_report(double).kernels}
    assert found == {"long_kernel", "short_kernel"}
    assert set(op_def(double).served) == {"default", "short"}


@pytest.mark.kernels
def test_an_op_of_torch_operators_is_seen_through_to_an_implementation_with_a_kernel() -> None:
    assert "short_kernel" in code(negate, 48)
