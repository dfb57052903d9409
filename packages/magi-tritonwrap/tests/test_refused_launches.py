# SPDX-License-Identifier: Apache-2.0
"""Bodies and launches that stay opaque or are errors, and what is said of them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton
import triton.language as tl
import tritonwrap_patterns as patterns
from magi_tritonwrap import (
    OpaqueFallbackWarning,
    UnsupportedKernelError,
    UnsupportedLaunchError,
    make_see_through,
    see_through_report,
)
from magi_tritonwrap.errors import NotAnOpError
from magi_tritonwrap.testing import aot_graphs, launches_of
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed


if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Ops
from graph_questions import op_stays


pytestmark = pytest.mark.usefixtures("stub")


@contextmanager
def refused(error: type[Exception], sentence: str) -> Iterator[None]:
    """The compilation raises *error*; Dynamo carries it in an error of its own, with the same sentence."""
    with pytest.raises(BackendCompilerFailed, match=sentence) as caught:
        yield
    assert isinstance(caught.value.inner_exception, error)


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
    with refused(UnsupportedLaunchError, r"enable_fp_fusion=.*launched at .*test_refused_launches\.py"):
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
    with pytest.raises(NotAnOpError, match=r"is not a registered operator.*Pass an OpOverload"):
        make_see_through("mylib::norm", patterns.helper)  # type: ignore[arg-type]
    with pytest.raises(NotAnOpError, match="It is a Triton kernel; pass the operator whose body launches it"):
        make_see_through(patterns.double_kernel, patterns.helper)
    op = ops.define("op", patterns.helper)
    with pytest.raises(NotAnOpError, match=r"is a set of overloads; pass one"):
        make_see_through(getattr(torch.ops, ops.namespace).op, patterns.helper)
    with pytest.raises(NotAnOpError, match=r"fn is None; pass the op's Python body"):
        make_see_through(op, None)  # type: ignore[arg-type]


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
