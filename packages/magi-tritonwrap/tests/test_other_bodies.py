# SPDX-License-Identifier: Apache-2.0
"""Bodies for one type of device, bodies that are replaced, ops that are registered again, and wrapping repeatedly."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import tritonwrap_patterns as patterns
from graph_questions import Ops, launch_count, op_stays
from magi_tritonwrap import OpaqueFallbackWarning, make_see_through, triton_op, wrap_kernels
from magi_tritonwrap.testing import launches_of
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx


pytestmark = pytest.mark.usefixtures("stub")


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
