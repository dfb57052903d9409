# SPDX-License-Identifier: Apache-2.0
"""Pointwise work goes into the user's kernel in front of it, where that is right, and computes what it did apart.

There is no GPU here: Inductor generates code for fake CUDA tensors, and Triton compiles it to its IR.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from _card import card
from _pretended_gpu import generated, module_of
from magi_backend import magi_register_custom_op
from magi_backend._passes import _reads_only
from magi_backend._records.log import Collector, collecting
from magi_backend._repairs.scheduling import MATCH_EPILOGUE_INDICES
from magi_backend._torch_compat.compiling import epilogue_keys, torch_release
from magi_tritonwrap.testing import stub_driver
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import generate_ttir
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not epilogue_keys(), reason="torch has had epilogues of user kernels since 2.12"),
]


@triton.jit
def double_kernel(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tmp0 = tl.load(x + at, at < n)
    tl.store(out + at, tmp0 * 2, at < n)


def double(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    out = torch.empty_like(x, dtype=dtype)
    double_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out


def stock(fn: Callable[[Tensor], Any], *tensors: Tensor, **how: Any) -> str:
    return generated(fn, *tensors, options={epilogue_keys()[0]: True}, **how)


def magi(fn: Callable[[Tensor], Any], *tensors: Tensor, **how: Any) -> tuple[str, str]:
    """The code with the backend, and why the pass did what it did."""
    with collecting(Collector()) as collector:
        code = generated(fn, *tensors, backend="magi", **how)
    (compilation,) = collector.compilations()
    (reason,) = (p.reason for graph in compilation.graphs for p in graph.passes if p.name == "EpilogueFusion")
    return code, reason


def body(code: str) -> str:
    """The lines of the user's kernel in *code*."""
    lines = code.split("def double_kernel", 1)[1].splitlines()
    return "\n".join(line.strip() for line in lines[1 : lines.index("''', device_str='cuda')")])


def compiles(code: str, tmp_path: Path, dtype: torch.dtype) -> None:
    """Let Triton compile the kernel in *code*."""
    lines = code.split("@triton.jit\ndef double_kernel", 1)[1].split("''', device_str='cuda')", 1)[0]
    header = "import triton\nimport triton.language as tl\n"
    module = module_of(f"{header}\n@triton.jit\ndef double_kernel{lines}", tmp_path)
    with stub_driver(), FakeTensorMode():
        x = torch.empty(256, device="cuda", dtype=dtype)
        generate_ttir(module.double_kernel, {"x": x, "out": x, "n": 256, "BLOCK": 64}, {})


def in_halves(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    half = x.numel() // 2
    double_kernel[(2,)](x, out, half, BLOCK=64)
    double_kernel[(4,)](x, out, half, BLOCK=64)
    return out


def as_integers(x: Tensor) -> Tensor:
    return double(x, torch.int32)


double_op, in_halves_op, as_integers_op = (
    magi_register_custom_op(f"magi_backend_epilogue::{fn.__name__}")(fn) for fn in (double, in_halves, as_integers)
)


def test_an_epilogue_is_fused_by_magi_and_not_by_default() -> None:
    apart = generated(lambda x: double_op(x).relu())
    together, reason = magi(lambda x: double_op(x).relu())

    assert apart.count("async_compile.triton(") == 2
    assert together.count("async_compile.triton(") == 1
    assert reason == "a pointwise operator reads only what 1 of 1 Triton launches wrote"
    assert not torch._inductor.config.epilogue_fusion_user_defined_triton_kernel


def test_a_constant_is_not_another_tensor() -> None:
    graph = make_fx(lambda y: torch.where(y > 0, 1.0, 2.0))(torch.ones(4)).graph
    (result,), (where,) = (
        graph.find_nodes(op=op, target=to)
        for op, to in (("placeholder", "y_1"), ("call_function", torch.ops.aten.where.self))
    )

    assert any(node.target is torch.ops.aten.scalar_tensor.default for node in where.all_input_nodes)
    assert _reads_only(result, where)


def test_stock_overwrites_a_variable_and_does_not_compile_on_16_bits(tmp_path: Path) -> None:
    fn = lambda x: double_op(x).sigmoid()  # noqa: E731
    wrong, (right, _) = stock(fn, dtype=torch.bfloat16), magi(fn, dtype=torch.bfloat16)

    assert body(wrong).splitlines()[2:4] == ["tmp0 = tmp0 * 2", "tmp1 = tl.sigmoid(tmp0)"]
    # torch 2.12 leaves the last cast to the store.
    stored = "epilogue_tmp1" if torch_release() < (2, 13) else "epilogue_tmp2"
    assert body(right).splitlines()[1:] == [
        "tmp0 = tl.load(x + at, at < n)",
        "epilogue_tmp0 = tl.cast(tmp0 * 2, tl.bfloat16).to(tl.float32)",
        "epilogue_tmp1 = tl.sigmoid(epilogue_tmp0)",
        *(["epilogue_tmp2 = epilogue_tmp1.to(tl.bfloat16)"] if stored == "epilogue_tmp2" else []),
        f"tl.store(out + at, {stored}, at < n)",
    ]
    with pytest.raises(Exception, match=r"tl\.sigmoid\(tmp0\)"):
        compiles(wrong, tmp_path, torch.bfloat16)
    compiles(right, tmp_path, torch.bfloat16)


def test_what_the_store_rounds_is_rounded() -> None:
    fn = lambda x: as_integers_op(x) * 3  # noqa: E731

    assert "tmp0 = tmp0 * 2\n" in body(stock(fn))
    assert "= tl.cast(tmp0 * 2, tl.int32).to(tl.int32)\n" in body(magi(fn)[0])


def test_a_tensor_that_two_launches_write_is_left_alone() -> None:
    fn = lambda x: in_halves_op(x).relu()  # noqa: E731
    code, reason = magi(fn)

    if torch_release() < (2, 13):
        assert stock(fn).count(".run(") == 1, "the first launch is lost"
    else:
        with pytest.raises(AssertionError, match=r"list\.remove"):
            stock(fn)
    assert code.count(".run(") == 3, "two launches and the relu"
    assert reason == "'out' of double_kernel is not written by that launch alone"


@pytest.mark.parametrize("also", [lambda y: y, lambda y: y.view(16, 16)], ids=["itself", "a view"])
def test_a_tensor_that_the_graph_returns_is_left_alone(also: Callable[[Tensor], Tensor]) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = double_op(x)
        return y.relu(), also(y)

    wrong, (right, reason) = stock(fn), magi(fn)

    assert wrong.count(".run(") == 1, "one launch, which writes one of two tensors"
    assert right.count(".run(") == 2
    assert reason == "the graph returns what double_kernel wrote as well"


def copied(x: Tensor) -> Tensor:
    """*x* in the order of its dimensions, without the guard of a device that ``contiguous`` takes."""
    return x.clone(memory_format=torch.contiguous_format)


def with_itself_flipped(x: Tensor) -> Tensor:
    return x + x.flip(0)


MOVED: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any]]] = {
    "flipped": ((256,), lambda x: double_op(x).relu().flip(0)),
    "transposed": ((32, 32), lambda x: copied(double_op(x).relu().t())),
    "permuted": ((8, 8, 32), lambda x: copied(double_op(x).relu().permute(1, 0, 2))),
    "diagonal repeated": ((16, 16), lambda x: copied(double_op(x).relu().diagonal().expand(16, 16))),
    "with itself flipped": ((16, 16), lambda x: with_itself_flipped(double_op(x))),
    "transposed beside another's relu": (
        (16, 16),
        lambda x: (double_op(x + 1).relu(), copied(double_op(x).t())),
    ),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", MOVED)
def test_what_moves_elements_stays_apart(case: str, dynamic: bool) -> None:
    size, fn = MOVED[case]
    code, _ = magi(fn, torch.empty(size), dynamic=dynamic)
    apart = generated(fn, torch.empty(size), dynamic=dynamic)  # torch does not fuse by default

    another_is_fused = case == "transposed beside another's relu"
    assert code.count(".run(") == apart.count(".run(") - another_is_fused


@pytest.mark.skipif(not MATCH_EPILOGUE_INDICES.concerns(torch_release()), reason="torch compares the indices itself")
@pytest.mark.parametrize("case", ["flipped", "transposed", "permuted"])
def test_stock_fuses_what_moves_elements(case: str) -> None:
    size, fn = MOVED[case]
    by_the_user = generated(fn, torch.empty(size), backend="magi", options={epilogue_keys()[0]: True})

    assert stock(fn, torch.empty(size)).count(".run(") == 1, "torch has mended this: give the defect its last release"
    assert by_the_user.count(".run(") == 2


# Each kind of epilogue in three dimensions, and one kind in each number of dimensions.
FUSED: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "relu": ((256,), lambda x: double_op(x).relu()),
    "relu of a matrix": ((32, 32), lambda x: double_op(x).relu()),
    "relu of a volume": ((4, 8, 16), lambda x: double_op(x).relu()),
    "a diamond": ((4, 8, 16), lambda x: F.silu(double_op(x))),
    "a chain": ((4, 8, 16), lambda x: (double_op(x) * 3 + 1).tanh()),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", FUSED)
def test_what_moves_nothing_is_fused(case: str, dynamic: bool) -> None:
    size, fn = FUSED[case]
    code, _ = magi(fn, torch.empty(size), dynamic=dynamic)

    assert code.count(".run(") == 1


COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "a cast": lambda y: y.to(torch.float16 if y.dtype is torch.float32 else torch.float32),
    "a scale and a cast": lambda y: (y * 0.3).to(torch.float16 if y.dtype is torch.float32 else torch.float32),
    "a comparison": lambda y: y > 0.5,
    "a diamond": F.silu,
    "a chain": lambda y: (y * 3 + 1).tanh(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", COMPUTED)
def test_what_is_fused_computes_what_it_did_apart(case: str, dtype: torch.dtype) -> None:
    """Triton's interpreter runs the programs."""
    x = torch.linspace(-4, 4, 300).to(dtype)

    def run(options: dict[str, Any]) -> tuple[Tensor, int]:
        torch._dynamo.reset()
        with card() as programs:
            found = torch.compile(lambda x: COMPUTED[case](double_op(x)), backend="magi", options=options)(x)
        assert not programs.only_compiled
        return found, programs.launches.total()

    together, launches = run({})
    apart, others = run({epilogue_keys()[0]: False})
    changes_dtype = together.dtype is not dtype
    assert (launches, others) == (2 if changes_dtype and torch_release() < (2, 13) else 1, 2)
    assert torch.equal(together, apart)


@pytest.mark.parametrize(
    ("fn", "sentence"),
    [
        (lambda x: x.relu(), "no Triton launch"),
        (double_op, "no pointwise operator reads only what a Triton kernel wrote"),
        (lambda x: double_op(x) * x, "no pointwise operator reads only what a Triton kernel wrote"),
        (lambda x: double_op(x) * (x.exp() + 1), "no pointwise operator reads only what a Triton kernel wrote"),
    ],
    ids=["no launch", "no operator", "an input as well", "another operator's as well"],
)
def test_where_there_is_nothing_to_fuse(fn: Callable[[Tensor], Tensor], sentence: str) -> None:
    assert magi(fn)[1] == sentence
