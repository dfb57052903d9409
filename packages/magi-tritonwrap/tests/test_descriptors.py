# SPDX-License-Identifier: Apache-2.0
"""Tensor descriptors, which the tensor memory accelerator of a GPU loads and stores through, as arguments of launches.

Dynamo takes them in a function that it compiles; `wrap_triton` loses them.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from graph_questions import Ops, launches
from magi_tritonwrap import (
    UnsupportedLaunchError,
    capture_launches,
    see_through_report,
    triton_op,
    unsupported_launches,
    wrap_kernels,
)
from magi_tritonwrap._torch_compat.kernels import static_launcher_refuses_descriptors
from magi_tritonwrap.errors import UndeclaredWriteError
from magi_tritonwrap.testing import aot_graphs, stub_driver
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.tools.tensor_descriptor import TensorDescriptor


TILE = [16, 32]


@triton.jit
def doubled_tile(source, out):  # type: ignore[no-untyped-def]
    at = [tl.program_id(0) * 16, tl.program_id(1) * 32]
    out.store(at, source.load(at) * 2)


@triton.jit
def doubled_tile_by_pointers(source, out, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    tile = source.load([tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS])
    tl.store(out + rows[:, None] * stride + columns[None, :], tile * 2)


def grid(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], TILE[0]), triton.cdiv(x.shape[1], TILE[1])


def described(x: Tensor) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, TILE)


def doubled(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    doubled_tile[grid(x)](described(x), described(out))
    return out


def doubled_by_pointers(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    source = described(x)
    doubled_tile_by_pointers[grid(x)](source, out, out.stride(0), ROWS=TILE[0], COLUMNS=TILE[1], num_warps=2)
    return out


def doubled_columns(x: Tensor) -> Tensor:
    """The first 32 columns, by a descriptor with sizes of its own over the whole Tensor; minus the others."""
    out = -x
    source = TensorDescriptor(x, [x.shape[0], 32], list(x.stride()), TILE)
    target = TensorDescriptor(out, [out.shape[0], 32], list(out.stride()), TILE)
    doubled_tile[grid(x)](source, target)
    return out


BODIES = {"stored": doubled, "by_pointers": doubled_by_pointers, "columns": doubled_columns}


def expected(name: str, x: Tensor) -> Tensor:
    return torch.where(torch.arange(x.shape[1], device=x.device) < 32, x * 2, -x) if name == "columns" else x * 2


def seen(ops: Ops, name: str) -> Any:
    return triton_op(f"{ops.namespace}::{name}", BODIES[name], mutates_args=())


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize(
    ("name", "cloned", "blocks"),
    [
        ("stored", ["out"], {"source": TILE, "out": TILE}),
        ("by_pointers", ["out"], {"source": TILE}),
        ("columns", ["out"], {"source": TILE, "out": TILE}),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_launch_with_descriptors_is_in_the_graph(
    ops: Ops, name: str, cloned: list[str], blocks: dict[str, list[int]], dynamic: bool
) -> None:
    op = seen(ops, name)
    (launch,) = launches(lambda x: op(x.relu()) + 1, torch.ones(40, 64), dynamic=dynamic)
    assert (launch.cloned, launch.blocks) == (cloned, blocks)
    shape = launch.arguments["source"].meta["val"].shape
    assert (int(shape[0]), int(shape[1])) == (40, 32 if name == "columns" else 64)
    assert see_through_report(op).see_through


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("name", BODIES)
def test_a_launch_with_descriptors_of_fake_tensors_is_traced(name: str) -> None:
    """Also where no mode is active, and only the Tensors of its descriptors say that it belongs in a graph."""
    fake = FakeTensorMode().from_tensor(torch.ones(40, 64))
    with capture_launches() as log:
        assert BODIES[name](fake).shape == (40, 64)
    assert len(log.launches) == 1
    assert wrap_kernels(BODIES[name])(fake).shape == (40, 64)


@pytest.mark.usefixtures("stub")
def test_a_write_through_a_descriptor_must_be_declared(ops: Ops) -> None:
    def body(x: Tensor, y: Tensor) -> Tensor:
        doubled_tile[grid(x)](described(x), described(y))
        return x.clone()

    op = triton_op(f"{ops.namespace}::undeclared", body, mutates_args=())
    with pytest.raises(BackendCompilerFailed, match="writes into 'y', which the schema") as caught:
        aot_graphs(op, torch.ones(40, 64), torch.ones(40, 64))
    assert isinstance(caught.value.inner_exception, UndeclaredWriteError)


CAN_ROUND = "round_f32_to_tf32" in inspect.signature(TensorDescriptor).parameters


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize(
    ("argument", "why"),
    [
        (
            lambda x: TensorDescriptor.from_tensor(x, TILE, padding="nan"),
            r"with the TensorDescriptor 'source', made with padding='nan'; Inductor makes it again without",
        ),
        pytest.param(
            lambda x: TensorDescriptor.from_tensor(x, TILE, round_f32_to_tf32=True),
            r"with the TensorDescriptor 'source', made with round_f32_to_tf32=True; Inductor makes it again without",
            marks=pytest.mark.skipif(not CAN_ROUND, reason="from Triton 3.7 on"),
        ),
        (lambda x: (described(x),), r"with tensors inside the tuple 'source'"),
    ],
)
def test_a_descriptor_that_inductor_cannot_make_again_is_refused(ops: Ops, argument: Any, why: str) -> None:
    def body(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        doubled_tile[grid(x)](argument(x), described(out))
        return out

    op = triton_op(f"{ops.namespace}::refused", body, mutates_args=(), on_unsupported="error")
    with pytest.raises(BackendCompilerFailed, match=why) as caught:
        aot_graphs(op, torch.ones(40, 64))
    assert isinstance(caught.value.inner_exception, UnsupportedLaunchError)


@pytest.mark.usefixtures("stub")
def test_inductors_own_launcher_takes_no_descriptor(ops: Ops) -> None:
    op = seen(ops, "stored")
    why = r"'source'; Inductor's own launcher does not know them; leave out static_launch_user_defined_triton_kernels"
    with torch._inductor.config.patch(static_launch_user_defined_triton_kernels=True):
        if not static_launcher_refuses_descriptors():
            pytest.skip("torch has mended it")
        with unsupported_launches("error"), pytest.raises(BackendCompilerFailed, match=why):
            aot_graphs(op, torch.ones(40, 64))


@triton.jit
def add_tile(out, at, tile):  # type: ignore[no-untyped-def]
    out.atomic_add(at, tile)


@triton.jit
def doubled_and_added(source, out, total):  # type: ignore[no-untyped-def]
    at = [tl.program_id(0) * 16, tl.program_id(1) * 32]
    tile = source.load(at)
    out.store(at, tile * 2)
    add_tile(total, at, tile)


@triton.jit
def doubled_and_counted(source, out, total):  # type: ignore[no-untyped-def]
    at = [tl.program_id(0) * 16, tl.program_id(1) * 32]
    out.store(at, source.load(at) * 2)
    tl.atomic_add(total, 1)


@pytest.mark.usefixtures("stub")
def test_a_write_that_torch_does_not_see_is_refused(ops: Ops) -> None:
    """An atomic operation through a descriptor is missing in torch's list; one through a pointer is there."""

    def added(x: Tensor) -> tuple[Tensor, Tensor]:
        out, total = torch.empty_like(x), torch.zeros_like(x)
        doubled_and_added[grid(x)](*map(described, (x, out, total)))
        return out, total

    def counted(x: Tensor) -> tuple[Tensor, Tensor]:
        out, total = torch.empty_like(x), x.new_zeros(1)
        doubled_and_counted[grid(x)](described(x), described(out), total)
        return out, total

    refused = triton_op(f"{ops.namespace}::added", added, mutates_args=())
    why = "'doubled_and_added' writes through a tensor descriptor by an atomic operation; torch does not know"
    with pytest.raises(BackendCompilerFailed, match=why):
        aot_graphs(refused, torch.ones(40, 64))

    op = triton_op(f"{ops.namespace}::counted", counted, mutates_args=())
    (launch,) = launches(op, torch.ones(40, 64))
    assert launch.cloned == ["out", "total"]


@triton.jit
def miscounted(x, total):  # type: ignore[no-untyped-def]
    tl.static_assert(total.dtype.element_ty == tl.float64)
    tl.atomic_add(total, tl.load(x))


@pytest.mark.usefixtures("stub")
def test_a_kernel_without_triton_ir_writes_all_its_tensors(ops: Ops) -> None:
    """As torch has it: whether it compiles is known when it runs."""

    def body(x: Tensor, total: Tensor) -> None:
        miscounted[(1,)](x, total)

    op = triton_op(f"{ops.namespace}::miscounted", body, mutates_args=("total",))
    assert launches(lambda x, total: op(x.relu(), total), torch.ones(1), torch.zeros(1))[0].cloned == ["x", "total"]


def test_a_gpu_without_descriptors_is_named(ops: Ops) -> None:
    op = seen(ops, "stored")
    why = "'source'; torch takes it in a graph for GPUs of compute capability 9.0 or more"
    with stub_driver(GPUTarget("cuda", 80, 32)), pytest.raises(BackendCompilerFailed, match=why):
        aot_graphs(op, torch.ones(40, 64))


@pytest.mark.gpu
@pytest.mark.notices_broken_kernels
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="before Hopper")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_descriptors_on_the_gpu(ops: Ops, name: str, dynamic: bool) -> None:
    op = seen(ops, name)
    x = torch.randn(40, 64, device="cuda")
    torch.testing.assert_close(op(x), expected(name, x))

    torch.compiler.reset()
    compiled = torch.compile(lambda value: op(value.relu()) + 1, fullgraph=True, dynamic=dynamic)
    result, (code, *_) = run_and_get_code(compiled, x)
    torch.testing.assert_close(result, expected(name, x.relu()) + 1)
    assert f"torch.ops.{ops.namespace}" not in code
    assert "TensorDescriptor.from_tensor(" in code
    other = torch.randn(72, 96, device="cuda")
    torch.testing.assert_close(compiled(other), expected(name, other.relu()) + 1)
