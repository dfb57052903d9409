# SPDX-License-Identifier: Apache-2.0
"""What `make_see_through` promises beyond the launch patterns: bodies, modes, reports, fall-backs."""

from __future__ import annotations

import linecache
import sys
import types
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton
import triton.language as tl
import tritonwrap_patterns as patterns
from magi_tritonwrap import (
    LostSettingWarning,
    NotAnOpError,
    OpaqueFallbackWarning,
    UnknownOpError,
    UnsupportedKernelError,
    UnsupportedLaunchError,
    capture_launches,
    find_kernels,
    make_see_through,
    see_through_report,
    triton_op,
    wrap_kernels,
)
from magi_tritonwrap.testing import aot_graphs, launches_of
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch.fx.experimental.proxy_tensor import make_fx


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import Ops


pytestmark = pytest.mark.usefixtures("stub")


def launch_count(op: Any, *inputs: Any, dynamic: bool | None = None) -> int:
    (graph,) = aot_graphs(lambda *args: op(*args) + 1, *(inputs or (torch.ones(300),)), dynamic=dynamic)
    assert op not in {node.target for node in graph.graph.nodes}
    return len(launches_of(graph))


def op_stays(op: Any, *inputs: Any) -> bool:
    (graph,) = aot_graphs(lambda *args: op(*args) + 1, *(inputs or (torch.ones(300),)))
    return op in {node.target for node in graph.graph.nodes}


def test_generated_function_that_calls_the_users_body(ops: Ops) -> None:
    text = "def lowered(x):\n    return _m_fn(x)\n"
    name = "<generated lowered>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"_m_fn": patterns.helper}
    exec(compile(text, name, "exec"), namespace)
    lowered = namespace["lowered"]
    op = ops.define("lowered", lowered)

    report = make_see_through(op, lowered)

    assert [kernel.name for kernel in report.kernels] == ["double_kernel"]
    assert launch_count(op) == 1


def test_body_without_source_is_captured_and_the_report_says_so(ops: Ops) -> None:
    namespace: dict[str, Any] = {"torch": torch, "kernel": patterns.double_kernel, "blocks": patterns.blocks}
    exec(
        "def body(x):\n"
        "    out = torch.empty_like(x)\n"
        "    kernel[blocks(x.numel())](x, out, x.numel(), BLOCK=128)\n"
        "    return out\n",
        namespace,
    )
    op = ops.define("executed", namespace["body"])

    before = make_see_through(op, namespace["body"])
    assert before.kernels == ()
    (unresolved,) = before.unresolved
    assert "the source of body is not available" in str(unresolved)

    assert launch_count(op) == 1
    after = see_through_report(op)
    assert [(kernel.name, kernel.how) for kernel in after.kernels] == [("double_kernel", "captured at compilation")]
    assert after.unresolved == ()


def test_kernel_known_at_run_time_only(ops: Ops) -> None:
    kernels: dict[str, Any] = {}

    def body(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernels["late"][patterns.blocks(x.numel())](x, out, x.numel(), BLOCK=128)
        return out

    op = ops.define("late", body)
    report = make_see_through(op, body)
    assert report.see_through
    kernels["late"] = patterns.double_kernel

    assert launch_count(op) == 1
    assert [kernel.name for kernel in see_through_report(op).kernels] == ["double_kernel"]


@contextmanager
def refused(error: type[Exception], sentence: str) -> Iterator[None]:
    """The compilation raises *error*; Dynamo carries it in an error of its own, with the same sentence."""
    with pytest.raises(BackendCompilerFailed, match=sentence) as caught:
        yield
    assert isinstance(caught.value.inner_exception, error)


def make_package(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder / "site-packages" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "kernels.py").write_text(
        "import triton, triton.language as tl\n"
        "@triton.jit\n"
        "def third_kernel(x, out, n, BLOCK: tl.constexpr):\n"
        "    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
        "    tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)\n"
    )
    (package / "ops.py").write_text(
        "import torch, triton\n"
        "from .kernels import third_kernel\n"
        "def double(x):\n"
        "    out = torch.empty_like(x)\n"
        "    third_kernel[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), BLOCK=128)\n"
        "    return out\n"
        "def lazily(x):\n"
        "    from . import kernels\n"
        "    out = torch.empty_like(x)\n"
        "    kernels.third_kernel[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), BLOCK=128)\n"
        "    return out\n"
    )
    monkeypatch.syspath_prepend(str(folder / "site-packages"))


def test_helper_in_an_installed_package(ops: Ops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_package(tmp_path, "third_party_kernels", monkeypatch)
    import third_party_kernels.ops as third_party  # type: ignore[import-not-found]

    def body(x: Tensor) -> Tensor:
        result: Tensor = third_party.double(x)
        return result

    op = ops.define("third", body)
    report = make_see_through(op, body)

    (kernel,) = report.kernels
    assert kernel.name == "third_kernel"
    assert kernel.file.endswith("third_party_kernels/kernels.py")
    assert kernel.line == 2
    (site,) = kernel.launches
    assert site == (kernel.file.replace("kernels.py", "ops.py"), 5)
    assert launch_count(op) == 1


def test_module_imported_by_the_body_and_not_loaded_before(
    ops: Ops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_package(tmp_path, "lazy_kernels", monkeypatch)

    def body(x: Tensor) -> Tensor:
        from lazy_kernels.ops import lazily  # type: ignore[import-not-found]

        result: Tensor = lazily(x)
        return result

    op = ops.define("lazy", body)
    report = make_see_through(op, body)

    assert "lazy_kernels" not in sys.modules
    assert [launch.reason for launch in report.unresolved] == [
        "the module 'lazy_kernels.ops' is imported by the body and not loaded yet"
    ]
    assert launch_count(op) == 1
    assert [kernel.name for kernel in see_through_report(op).kernels] == ["third_kernel"]


def test_op_nested_in_an_op(ops: Ops) -> None:
    inner = ops.define("inner", patterns.helper)
    make_see_through(inner, patterns.helper)

    def body(x: Tensor) -> Tensor:
        result: Tensor = inner(inner(x))
        return result

    outer = ops.define("outer", body)
    report = make_see_through(outer, body)

    assert [kernel.name for kernel in report.kernels] == ["double_kernel"]
    assert launch_count(outer) == 2


def test_torch_triton_op_nested_in_an_op(ops: Ops) -> None:
    def wrapped(x: Tensor) -> Tensor:
        return patterns.wrapped_outside(x)

    inner = torch.library.triton_op(f"{ops.namespace}::torch_inner", wrapped, mutates_args=())

    def body(x: Tensor) -> Tensor:
        result: Tensor = inner(x)
        return result

    outer = ops.define("outer", body)
    report = make_see_through(outer, body)

    assert [(kernel.name, kernel.wrapped) for kernel in report.kernels] == [("double_kernel", True)]
    assert launch_count(outer) == 1


def test_opaque_op_in_the_body_stays(ops: Ops) -> None:
    opaque = ops.define("opaque", patterns.helper)

    def body(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        patterns.launch_double(opaque(x), out)
        return out

    op = ops.define("around", body)
    make_see_through(op, body)

    (graph,) = aot_graphs(op, torch.ones(300))
    assert len(launches_of(graph)) == 1
    assert opaque in {node.target for node in graph.graph.nodes}


def test_two_ops_share_a_kernel(ops: Ops) -> None:
    first = ops.define("first", patterns.module_level)
    second = ops.define("second", patterns.closure_body)
    make_see_through(first, patterns.module_level)
    make_see_through(second, patterns.closure_body)

    (graph,) = aot_graphs(lambda x: second(first(x)), torch.ones(300))
    assert [launch.kernel for launch in launches_of(graph)] == [patterns.double_kernel] * 2


def test_mutating_op(ops: Ops) -> None:
    def double_in_place(x: Tensor) -> None:
        patterns.double_kernel[patterns.blocks(x.numel())](x, x, x.numel(), BLOCK=128)

    op = ops.define("in_place", double_in_place, "(Tensor(a!) x) -> ()", fake=lambda x: None)
    make_see_through(op, double_in_place)

    def program(x: Tensor) -> Tensor:
        y = x.relu()
        op(y)
        op(y)
        return y

    (graph,) = aot_graphs(program, torch.ones(300))
    first, second = launches_of(graph)
    assert first.cloned == second.cloned == ["out"]
    assert second.arguments["out"].args[1] == "out", "the second launch writes what the first one wrote"


def test_autograd_around_the_op(ops: Ops) -> None:
    op = ops.define("with_gradient", patterns.helper)
    make_see_through(op, patterns.helper)
    torch.library.register_autograd(f"{ops.namespace}::with_gradient", lambda ctx, grad: op(grad), lib=ops.library)

    graphs = aot_graphs(lambda x: op(x).sum(), torch.ones(300, requires_grad=True), device="cpu")

    assert launches_of(graphs[0])
    assert op not in {node.target for node in graphs[0].graph.nodes}


def test_symbolic_size_is_not_specialised(ops: Ops) -> None:
    op = ops.define("symbolic", patterns.module_level)
    make_see_through(op, patterns.module_level)

    (graph,) = aot_graphs(op, torch.ones(300), dynamic=True)

    (launch,) = launches_of(graph)
    assert isinstance(launch.arguments["n"], torch.fx.Node)
    assert isinstance(launch.grids[0][0], torch.fx.Node)


def test_launch_options_reach_the_graph(ops: Ops) -> None:
    def body(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        patterns.double_default_kernel[patterns.by_block(x)](x, out, x.numel(), num_warps=8, num_ctas=2, maxnreg=64)
        return out

    op = ops.define("options", body)
    make_see_through(op, body)

    with pytest.warns(LostSettingWarning, match=r"launched with (num_ctas|maxnreg)=, which .* Inductor leaves out"):
        (graph,) = aot_graphs(op, torch.ones(300))
    (launch,) = launches_of(graph)
    (config,) = launch.kernel.configs
    assert (config.num_warps, config.num_ctas, config.maxnreg) == (8, 2, 64)
    assert launch.arguments["BLOCK"] == 128
    assert launch.grids == [(3, 1, 1)]


def test_pruned_configs_and_their_settings(ops: Ops) -> None:
    op = ops.define("pruned", patterns.PATTERNS["autotune_pruned"].body)
    make_see_through(op, patterns.PATTERNS["autotune_pruned"].body)

    (graph,) = aot_graphs(op, torch.ones(300))
    (launch,) = launches_of(graph)
    assert [config.kwargs["BLOCK"] for config in launch.kernel.configs] == [128, 256]
    assert launch.grids == [(3, 1, 1), (2, 1, 1)]


@triton.autotune(
    configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})],
    key=["n"],
    reset_to_zero=["out"],
    restore_value=["x"],
)
@triton.heuristics({"EVEN": lambda args: args["num_warps"] == 4})
@triton.jit
def accumulate_kernel(x, out, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + at, tl.load(x + at, at < n), at < n)


def test_autotuner_that_is_rebuilt_keeps_what_it_resets(ops: Ops) -> None:
    def body(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        accumulate_kernel[patterns.by_block(x)](x, out, x.numel())
        return out

    op = ops.define("accumulate", body)
    make_see_through(op, body)

    (graph,) = aot_graphs(op, torch.ones(300))
    (launch,) = launches_of(graph)
    assert launch.kernel.reset_to_zero == ["out"]
    assert launch.kernel.restore_value == ["x"]
    assert [config.kwargs["EVEN"] for config in launch.kernel.configs] == [True, True]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["register_kernel", "impl", "custom_op"])
def test_another_body_for_cpu(ops: Ops, how: str, when: str) -> None:
    calls: list[str] = []

    def on_cpu(x: Tensor) -> Tensor:
        calls.append("cpu")
        return x * 2

    def register() -> None:
        if how == "impl":
            ops.library.impl("two_bodies", on_cpu, "CPU")
        else:
            torch.library.register_kernel(op, "cpu", on_cpu)

    if how == "custom_op":
        definition = torch.library.custom_op(
            f"{ops.namespace}::two_bodies", patterns.module_level, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        definition.register_fake(torch.empty_like)
        op = definition._opoverload
    else:
        op = ops.define("two_bodies", patterns.module_level)
    if when == "before":
        register()
    make_see_through(op, patterns.module_level)
    if when == "after":
        register()

    x = torch.arange(4.0)
    assert torch.equal(op(x), x * 2)
    torch.compiler.reset()
    assert torch.equal(torch.compile(op, backend="aot_eager", fullgraph=True)(x), x * 2)
    assert calls == ["cpu", "cpu"]
    assert launch_count(op) == 1, "CUDA tensors still get the launch"


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_body_for_one_device_type_replaced_later(ops: Ops) -> None:
    ops.library.define("single(Tensor x) -> Tensor")
    ops.library.impl("single", patterns.module_level, "CUDA")
    torch.library.register_fake(f"{ops.namespace}::single", torch.empty_like, lib=ops.library)
    op = getattr(torch.ops, ops.namespace).single.default
    make_see_through(op, patterns.module_level)
    assert launch_count(op) == 1

    ops.library.impl("single", lambda x: x * 2, "CUDA", allow_override=True)

    assert op_stays(op)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_export_keeps_the_op(ops: Ops) -> None:
    op = ops.define("exported", patterns.module_level)
    make_see_through(op, patterns.module_level)

    class Program(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = op(x)
            return result

    for strict in (False, True):
        program = torch.export.export(Program(), (torch.ones(4),), strict=strict).run_decompositions()
        assert op in {node.target for node in program.graph.nodes}


def test_eager_call_does_not_meet_the_higher_order_op(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(
        type(triton_kernel_wrapper_mutation), "__call__", lambda *args, **kwargs: ran.append("higher-order op")
    )
    monkeypatch.setattr(patterns.double_kernel, "run", lambda *args, **kwargs: ran.append("kernel"), raising=False)
    definition = triton_op(f"{ops.namespace}::eager", patterns.bare_and_wrapped, mutates_args=())

    definition(torch.ones(300))
    wrap_kernels(patterns.helper)(torch.ones(300))

    assert ran == ["kernel"] * 3


def test_nothing_of_the_user_is_changed(ops: Ops) -> None:
    modules = (patterns, triton, tl)
    before = [dict(vars(module)) for module in modules]
    kernels = [value for value in vars(patterns).values() if hasattr(value, "arg_names")]
    states = [dict(vars(kernel)) for kernel in kernels]
    for name in ("closure", "autotune_pruned", "autotune_above_heuristics", "heuristics_above_autotune", "helper"):
        body = patterns.PATTERNS[name].body
        cells = [cell.cell_contents for cell in body.__closure__ or ()]
        op = ops.define(name, body)
        make_see_through(op, body)
        assert launch_count(op) == 1
        assert [cell.cell_contents for cell in body.__closure__ or ()] == cells

    assert [dict(vars(module)) for module in modules] == before
    for kernel, state in zip(kernels, states, strict=True):
        state.pop("hash", None)  # Triton's own memo, and what it saw of the globals
        state.pop("used_global_vals", None)
        now = {name: value for name, value in vars(kernel).items() if name in state}
        assert now == state


def test_repeating_make_see_through_changes_nothing(ops: Ops) -> None:
    op = ops.define("again", patterns.module_level)
    first = make_see_through(op, patterns.module_level)
    assert make_see_through(op, patterns.module_level) == first
    assert launch_count(op) == 1


def test_a_second_body_replaces_the_first(ops: Ops) -> None:
    op = ops.define("replaced", patterns.module_level)
    make_see_through(op, patterns.module_level)
    make_see_through(op, patterns.several_kernels)
    assert launch_count(op) == 2


def test_op_defined_again_under_the_same_name_is_not_seen_through(ops: Ops) -> None:
    op = ops.define("redefined", patterns.module_level)
    make_see_through(op, patterns.module_level)
    ops.library._destroy()
    ops.library = torch.library.Library(ops.namespace, "FRAGMENT")

    again = ops.define("redefined", patterns.module_level)

    assert again is not op
    assert op_stays(again)
    make_see_through(again, patterns.module_level)
    assert launch_count(again) == 1


def test_body_that_cannot_be_traced_stays_opaque_and_says_so(ops: Ops) -> None:
    def body(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        patterns.launch_double(x, out)
        assert x.data_ptr() % 16 == 0
        return out

    op = ops.define("untraceable", body)
    make_see_through(op, body)

    with pytest.warns(OpaqueFallbackWarning, match=r"untraceable stays opaque .* cannot be traced.*data"):
        assert op_stays(op)
    (fallback,) = see_through_report(op).fallbacks
    assert f"{__file__}:{body.__code__.co_firstlineno + 3}" in fallback
    assert "fall-back" in str(see_through_report(op))


def test_failed_attempt_leaves_no_trace_of_its_launches(ops: Ops) -> None:
    def body(x: Tensor) -> None:
        patterns.double_kernel[patterns.blocks(x.numel())](x, x, x.numel(), BLOCK=128)
        assert x.data_ptr()

    op = ops.define("partial", body, "(Tensor(a!) x) -> ()", fake=lambda x: None)
    make_see_through(op, body)

    def program(x: Tensor) -> Tensor:
        y = x.relu()
        op(y)
        return y

    with pytest.warns(OpaqueFallbackWarning):
        (graph,) = aot_graphs(program, torch.ones(300))
    assert launches_of(graph) == []


def test_reports(ops: Ops) -> None:
    with pytest.raises(UnknownOpError, match=r"was never given to make_see_through"):
        see_through_report("nowhere::nothing")
    op = ops.define("reported", patterns.helper_of_helper)
    make_see_through(op, patterns.helper_of_helper)
    text = str(see_through_report(op))
    assert text.startswith(f"{ops.namespace}::reported: sees through 1 Triton kernel\n")
    assert "double_kernel (" in text
    assert "global 'double_kernel'" in text
    assert str(find_kernels(patterns.twice)) == "no Triton launch"
    assert not find_kernels(patterns.twice).may_launch


def test_triton_op_honours_the_schema(ops: Ops) -> None:
    definition = triton_op(
        f"{ops.namespace}::schema",
        lambda x, sizes=None: patterns.module_level(x),
        mutates_args=(),
        schema="(Tensor x, int[]? sizes=None) -> Tensor",
    )
    assert str(definition._opoverload._schema).endswith("schema(Tensor x, int[]? sizes=None) -> Tensor")
    assert launch_count(definition._opoverload) == 1


def test_make_fx_and_fake_tensors_see_launches_in_a_scope() -> None:
    graph = make_fx(wrap_kernels(patterns.helper), tracing_mode="fake")(torch.ones(300))
    assert len(launches_of(graph)) == 1


@pytest.mark.parametrize("times", [1, 2, 3])
def test_wrapping_repeatedly_is_wrapping_once(ops: Ops, times: int) -> None:
    body: Callable[[Tensor], Tensor] = patterns.bare_and_wrapped
    for _ in range(times):
        body = wrap_kernels(body)
    graph = make_fx(body, tracing_mode="fake")(torch.ones(300))
    assert len(launches_of(graph)) == 2
    op = ops.define("wrapped", body)
    assert [kernel.name for kernel in make_see_through(op, body).kernels] == ["double_kernel"]
    assert launch_count(op) == 2


def test_capture_in_a_scope_within_a_scope() -> None:
    with capture_launches(drop=True) as outer:
        patterns.module_level(torch.ones(4))
        with capture_launches(drop=True) as inner:
            patterns.several_kernels(torch.ones(4))
        patterns.module_level(torch.ones(4))
    assert [launch.name for launch in inner.launches] == ["double_kernel", "increment_kernel"]
    assert [launch.name for launch in outer.launches] == ["double_kernel", "double_kernel"]
    assert outer.launches[0].file == patterns.__file__


def test_unsupported_kernel_first_seen_at_compilation(ops: Ops) -> None:
    kernels: dict[str, Any] = {}

    def body(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernels["late"][patterns.by_block(x)](x, out, x.numel())
        return out

    op = ops.define("unsupported", body)
    make_see_through(op, body)
    kernels["late"] = triton.autotune(
        configs=[triton.Config({"BLOCK": 128})], key=[], pre_hook=lambda *args, **kwargs: None
    )(patterns.double_kernel)

    with refused(UnsupportedKernelError, r"double_kernel.*pre_hook=.*tritonwrap_patterns\.py:\d+"):
        aot_graphs(op, torch.ones(300))


def test_launch_that_no_graph_can_carry(ops: Ops) -> None:
    options: dict[str, Any] = {"enable_fp_fusion": False}

    def body(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        patterns.double_kernel[patterns.blocks(x.numel())](x, out, x.numel(), BLOCK=128, **options)
        return out

    op = ops.define("options", body)
    make_see_through(op, body)
    with refused(UnsupportedLaunchError, r"enable_fp_fusion=.*launched at .*test_see_through\.py"):
        aot_graphs(op, torch.ones(300))


@triton.jit
def table_kernel(pointers, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    out = tl.load(pointers).to(tl.pointer_type(tl.float32))
    tl.store(out + tl.arange(0, BLOCK), n)


def test_launch_that_torch_would_drop(ops: Ops) -> None:
    def body(x: Tensor) -> Tensor:
        pointers = torch.zeros(1, dtype=torch.int64, device=x.device)
        table_kernel[(1,)](pointers, x.numel(), BLOCK=128)
        return x.clone()

    op = ops.define("table", body)
    make_see_through(op, body)
    with refused(UnsupportedLaunchError, r"table_kernel' writes none of its tensors as far as torch can tell"):
        aot_graphs(op, torch.ones(300))


def test_errors_of_make_see_through(ops: Ops) -> None:
    with pytest.raises(NotAnOpError, match=r"is no registered operator.*Pass an OpOverload"):
        make_see_through("mylib::norm", patterns.helper)  # type: ignore[arg-type]
    with pytest.raises(NotAnOpError, match="It is a Triton kernel; pass the operator whose body launches it"):
        make_see_through(patterns.double_kernel, patterns.helper)
    op = ops.define("op", patterns.helper)
    with pytest.raises(NotAnOpError, match=r"is a set of overloads; pass one"):
        make_see_through(getattr(torch.ops, ops.namespace).op, patterns.helper)
    with pytest.raises(NotAnOpError, match=r"fn is None; pass the op's Python body"):
        make_see_through(op, None)  # type: ignore[arg-type]


def test_importing_patches_nothing() -> None:
    import subprocess

    program = (
        "import sys; from triton.runtime.jit import JITFunction; run = JITFunction.run\n"
        "import magi_tritonwrap\n"
        "assert JITFunction.run is run\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_no_warning_on_the_way(ops: Ops) -> None:
    op = ops.define("quiet", patterns.helper)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_see_through(op, patterns.helper)
        assert launch_count(op) == 1


def test_bound_method_and_callable_object_as_bodies(ops: Ops) -> None:
    for name, body in (("method", patterns.doubler.forward), ("object", patterns.doubler)):
        op = ops.define(name, body)
        assert [kernel.name for kernel in make_see_through(op, body).kernels] == ["double_kernel"]
        assert launch_count(op) == 1


def test_module_with_lazy_attributes(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = types.ModuleType("lazy_module_for_test")
    lazy.__getattr__ = lambda name: patterns.double_kernel  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_module_for_test", lazy)

    def body(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        lazy.kernel[patterns.blocks(x.numel())](x, out, x.numel(), BLOCK=128)
        return out

    op = ops.define("lazy_attribute", body)
    make_see_through(op, body)
    assert launch_count(op) == 1


@triton.jit
def move_kernel(x, work, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n)
    tl.store(work + at, value, at < n)
    tl.store(out + at, value, at < n)


def _moved(x: Tensor, work: Tensor) -> Tensor:
    out = torch.empty_like(x)
    move_kernel[(3,)](x, work, out, x.numel(), BLOCK=128)
    return out


def test_a_launch_that_writes_what_the_schema_does_not_say(ops: Ops) -> None:
    schema, fake = "(Tensor x, Tensor work) -> Tensor", lambda x, work: torch.empty_like(x)
    op = ops.define("moved", _moved, schema, fake=fake)
    make_see_through(op, _moved)
    text = r"moved: the body launches a kernel that writes into 'work', which the schema .* mutates_args=\('work',\)"
    x, work = torch.ones(300), torch.ones(300)
    for program in (op, lambda x, work: op(x, work.add_(1)), lambda x, work: op(x, work.view(300))):
        with pytest.raises(Exception, match=text):
            aot_graphs(program, x, work)

    named = ops.define("named", _moved, schema.replace("Tensor work", "Tensor(a!) work"), fake=fake)
    make_see_through(named, _moved)
    for program in (named, lambda x, work: named(x, work.add_(1)), lambda x, work: named(work.view(300), work)):
        (graph,) = aot_graphs(program, x, work)
        assert len(launches_of(graph)) == 1


def test_a_write_into_a_list_of_tensors(ops: Ops) -> None:
    def body(x: Tensor, works: list[Tensor]) -> Tensor:
        return _moved(x, works[1])

    op = ops.define("listed", body, "(Tensor x, Tensor[] works) -> Tensor", fake=lambda x, works: torch.empty_like(x))
    make_see_through(op, body)
    with pytest.raises(Exception, match="writes into 'works', which the schema"):
        aot_graphs(lambda x, a, b: op(x, [a, b]), *(torch.ones(300) for _ in range(3)))
