# SPDX-License-Identifier: Apache-2.0
"""What `make_see_through` promises of ops beyond the launch patterns.

Nesting, modes, sizes, settings, reports; bodies for one type of device, and ones that are replaced; ops that are
registered again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
import tritonwrap_patterns as patterns
from graph_questions import Ops, launch_count, launch_of, launches, op_stays
from magi_tritonwrap import (
    OpaqueFallbackWarning,
    make_see_through,
    probe_launches,
    see_through_report,
    triton_op,
    wrap_kernels,
)
from magi_tritonwrap.errors import UnknownOpError
from magi_tritonwrap.testing import aot_graphs, launches_of
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx


pytestmark = pytest.mark.usefixtures("stub")


def seen_op(ops: Ops) -> Callable[[Tensor], Tensor]:
    return ops.seen("inner", patterns.helper)


def torch_triton_op(ops: Ops) -> Callable[[Tensor], Tensor]:
    return torch.library.triton_op(f"{ops.namespace}::torch_inner", patterns.wrapped_outside, mutates_args=())


@pytest.mark.parametrize("make", [seen_op, torch_triton_op])
def test_op_nested_in_an_op(ops: Ops, make: Callable[[Ops], Callable[[Tensor], Tensor]]) -> None:
    inner = make(ops)

    def body(x: Tensor) -> Tensor:
        return inner(inner(x))

    outer = ops.define("outer", body)
    report = make_see_through(outer, body)

    assert [kernel.name for kernel in report.kernels] == ["double_kernel"]
    assert launch_count(outer) == 2


def test_mutating_op(ops: Ops) -> None:
    def double_in_place(x: Tensor) -> None:
        patterns.double_kernel[patterns.blocks(x.numel())](x, x, x.numel(), BLOCK=128)

    op = ops.seen("in_place", double_in_place, "(Tensor(a!) x) -> ()", fake=lambda x: None)

    def program(x: Tensor) -> Tensor:
        y = x.relu()
        op(y)
        op(y)
        return y

    first, second = launches(program, torch.ones(300))
    assert first.cloned == second.cloned == ["out"]
    assert second.arguments["out"].args[1] == "out", "the second launch writes what the first one wrote"


def test_autograd_around_the_op(ops: Ops) -> None:
    op = ops.seen("with_gradient", patterns.helper)
    torch.library.register_autograd(f"{ops.namespace}::with_gradient", lambda ctx, grad: op(grad), lib=ops.library)

    graphs = aot_graphs(lambda x: op(x).sum(), torch.ones(300, requires_grad=True), device="cpu")

    assert launches_of(graphs[0])
    assert op not in {node.target for node in graphs[0].graph.nodes}


def test_symbolic_size_is_not_specialised(ops: Ops) -> None:
    launch = launch_of(ops.seen("symbolic", patterns.module_level), torch.ones(300), dynamic=True)
    assert isinstance(launch.arguments["n"], torch.fx.Node)
    assert isinstance(launch.grids[0][0], torch.fx.Node)


def test_pruned_configs_and_their_settings(ops: Ops) -> None:
    launch = launch_of(ops.seen("pruned", patterns.PATTERNS["autotune_pruned"].body))
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
    launch = launch_of(ops.seen("accumulate", patterns.through(accumulate_kernel)))
    assert launch.kernel.reset_to_zero == ["out"]
    assert launch.kernel.restore_value == ["x"]
    assert [config.kwargs["EVEN"] for config in launch.kernel.configs] == [True, True]


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_export_keeps_the_op(ops: Ops) -> None:
    op = ops.seen("exported", patterns.module_level)

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

    assert ran == ["kernel"] * 4


def test_nothing_of_the_user_is_changed(ops: Ops) -> None:
    modules = (patterns, triton, tl)
    before = [dict(vars(module)) for module in modules]
    kernels = [value for value in vars(patterns).values() if hasattr(value, "arg_names")]
    states = [dict(vars(kernel)) for kernel in kernels]
    for name in ("closure", "autotune_pruned", "autotune_above_heuristics", "heuristics_above_autotune", "helper"):
        body = patterns.PATTERNS[name].body
        cells = [cell.cell_contents for cell in body.__closure__ or ()]
        assert launch_count(ops.seen(name, body)) == 1
        assert [cell.cell_contents for cell in body.__closure__ or ()] == cells

    assert [dict(vars(module)) for module in modules] == before
    for kernel, state in zip(kernels, states, strict=True):
        state.pop("hash", None)  # Triton's own memo, and what it saw of the globals
        state.pop("used_global_vals", None)
        now = {name: value for name, value in vars(kernel).items() if name in state}
        assert now == state


def test_reports(ops: Ops) -> None:
    with pytest.raises(UnknownOpError, match=r"was never given to make_see_through"):
        see_through_report("nowhere::nothing")
    op = ops.seen("reported", patterns.helper)
    text = str(see_through_report(op))
    assert text.startswith(f"{ops.namespace}::reported: sees through 1 Triton kernel\n")
    assert "double_kernel (" in text
    assert "global 'double_kernel'" in text


def test_triton_op_honours_the_schema(ops: Ops) -> None:
    definition = triton_op(
        f"{ops.namespace}::schema",
        lambda x, sizes=None: patterns.module_level(x),
        mutates_args=(),
        schema="(Tensor x, int[]? sizes=None) -> Tensor",
    )
    assert str(definition._opoverload._schema).endswith("schema(Tensor x, int[]? sizes=None) -> Tensor")
    assert launch_count(definition._opoverload) == 1


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
        op = ops.custom_op("two_bodies", patterns.module_level)._opoverload
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


def test_a_second_body_replaces_the_first(ops: Ops) -> None:
    op = ops.define("replaced", patterns.module_level)
    first = make_see_through(op, patterns.module_level)
    assert make_see_through(op, patterns.module_level) == first
    assert launch_count(op) == 1
    make_see_through(op, patterns.several_kernels)
    assert launch_count(op) == 2


def with_a_fake_in_python(ops: Ops) -> OpOverload:
    return ops.define("redefined", patterns.module_level)


def with_a_meta_kernel(ops: Ops) -> OpOverload:
    """Its OpOverload is all that tells it apart."""
    ops.library.define("redefined(Tensor x) -> Tensor")
    ops.library.impl("redefined", patterns.module_level, "CompositeExplicitAutograd")
    ops.library.impl("redefined", torch.empty_like, "Meta")
    op: OpOverload = getattr(torch.ops, ops.namespace).redefined.default
    return op


@pytest.mark.parametrize("define", [with_a_fake_in_python, with_a_meta_kernel])
def test_op_defined_again_under_the_same_name_is_not_seen_through(
    ops: Ops, define: Callable[[Ops], OpOverload]
) -> None:
    op = define(ops)
    make_see_through(op, patterns.module_level)
    assert launch_count(op) == 1
    ops.again()

    again = define(ops)

    assert again is not op
    with pytest.warns(OpaqueFallbackWarning, match="redefined stays opaque .* registered again .* make_see_through"):
        assert op_stays(again)
    make_see_through(again, patterns.module_level)
    assert launch_count(again) == 1


def by_library(ops: Ops) -> OpOverload:
    ops.again()
    return ops.seen("rerun", patterns.module_level)


def by_custom_op(ops: Ops) -> OpOverload:
    op = ops.custom_op("rerun", patterns.module_level)
    make_see_through(op, patterns.module_level)
    return op._opoverload


def by_triton_op(ops: Ops) -> OpOverload:
    name = f"{ops.namespace}::rerun"
    return triton_op(name, patterns.module_level, mutates_args=(), schema="(Tensor x) -> Tensor")._opoverload


@pytest.mark.parametrize("registered", [by_library, by_custom_op, by_triton_op])
@pytest.mark.parametrize("is_compiled_between", [False, True])
def test_a_cell_that_is_run_again(ops: Ops, registered: Callable[[Ops], OpOverload], is_compiled_between: bool) -> None:
    """The finalizer of the first library runs late. In torch 2.13 it clears `torch.ops` of the second op."""
    gc.disable()
    try:
        earlier = [registered(ops), ops.library]
        earlier.append(earlier)  # garbage that waits for a collection
        assert launch_count(earlier[0]) == 1
        again = registered(ops)
        if is_compiled_between:
            assert launch_count(again) == 1
        torch.compiler.reset()
        del earlier
        gc.collect()
        assert launch_count(again) == 1
        assert launch_count(getattr(torch.ops, ops.namespace).rerun.default) == 1
    finally:
        gc.enable()


@pytest.mark.parametrize("times", [1, 2, 3])
def test_wrapping_repeatedly_is_wrapping_once(ops: Ops, times: int) -> None:
    body: Callable[[Tensor], Tensor] = patterns.bare_and_wrapped
    for _ in range(times):
        body = wrap_kernels(body)
    graph = make_fx(body, tracing_mode="fake")(torch.ones(300))
    assert len(launches_of(graph)) == 3
    op = ops.define("wrapped", body)
    assert [kernel.name for kernel in make_see_through(op, body).kernels] == ["double_kernel"]
    assert launch_count(op) == 3


@pytest.mark.parametrize("times", [1, 2])
def test_a_wrapped_body_is_its_own_fake(ops: Ops, times: int) -> None:
    body: Callable[[Tensor], Tensor] = patterns.helper
    for _ in range(times):
        body = wrap_kernels(body)
    op = triton_op(f"{ops.namespace}::wrapped", body, mutates_args=(), schema="(Tensor x) -> Tensor")
    assert launch_count(op._opoverload) == 1
    probe = probe_launches(body, (torch.ones(300),), {})
    assert [launch.name for launch in probe.launches] == ["double_kernel"]
