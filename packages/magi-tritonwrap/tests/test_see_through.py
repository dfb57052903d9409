# SPDX-License-Identifier: Apache-2.0
"""What `make_see_through` promises of ops beyond the launch patterns: nesting, modes, sizes, settings, reports."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
import tritonwrap_patterns as patterns
from graph_questions import Ops, launch_count, launch_of
from magi_tritonwrap import make_see_through, see_through_report, triton_op, wrap_kernels
from magi_tritonwrap.errors import UnknownOpError
from magi_tritonwrap.testing import aot_graphs, launches_of
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation


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

    (graph,) = aot_graphs(program, torch.ones(300))
    first, second = launches_of(graph)
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
