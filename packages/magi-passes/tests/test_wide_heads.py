# SPDX-License-Identifier: Apache-2.0
"""Attention with wide heads, by products, gives the numbers of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from made_passes import calls, rewritten
from magi_passes import PassContext, WideHeadsPass
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext


aten = torch.ops.aten
KERNEL = aten._scaled_dot_product_efficient_attention.default


def _attention(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", **given: Any) -> GraphModule:
    """A graph of the kernel of queries, keys and values of *shape*; of symbolic length if that is negative."""
    mode, sizes = FakeTensorMode(shape_env=ShapeEnv()), tuple(map(abs, shape))
    kinds = [DimDynamic.DYNAMIC if size < 0 else DimDynamic.STATIC for size in shape]
    fake = mode.from_tensor(
        torch.empty(sizes, dtype=dtype, device="meta"),
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds),
    )
    with mode:
        operands = [torch.empty_strided(fake.shape, fake.stride(), dtype=dtype, device=device) for _ in range(3)]
    bias, lse = given.pop("attn_bias", None), given.pop("compute_log_sumexp", False)
    gm = make_fx(lambda q, k, v: KERNEL(q, k, v, bias, lse, **given)[0].neg())(*operands)
    gm.graph.eliminate_dead_code()
    return gm


def _applies(gm: GraphModule) -> bool:
    return bool(WideHeadsPass().is_applicable(gm.graph, PassContext()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "scale"), [((1, 1, 1104, 512), None), ((2, 2, 601, 384), 0.5), ((1, 1, -1030, 300), None)]
)
def test_the_numbers_of_attention(shape: tuple[int, ...], scale: float | None, dtype: torch.dtype) -> None:
    gm = rewritten(_attention(*shape, dtype=dtype, scale=scale), WideHeadsPass())
    assert not calls(gm, KERNEL)
    for product in calls(gm, aten.bmm.dtype):
        # There is no such product on a CPU.
        product.target = lambda a, b, dtype: torch.bmm(a.to(dtype), b.to(dtype))
    for node in gm.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": "cpu"}
    gm.recompile()
    torch.manual_seed(0)
    q, k, v = (torch.randn([abs(size) for size in shape]).to(dtype) for _ in range(3))
    # All scores are far below those of a key of zeros.
    q, k = q.abs(), -k.abs()
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale)
    found = gm(q, k, v)
    assert found.dtype == dtype
    torch.testing.assert_close(-found.double(), exact, rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("shape", "given", "applies"),
    [
        ((1, 1, 4096, 512), {}, True),
        ((1, 1, -4096, 512), {}, True),
        ((1, 1, 4096, 256), {}, False),
        ((1, 1, 512, 512), {}, False),
        ((1, 1, 20000, 512), {}, False),
        ((1, 1, 4096, 512), {"is_causal": True}, False),
        ((1, 1, 4096, 512), {"dropout_p": 0.1}, False),
        ((1, 1, 4096, 512), {"compute_log_sumexp": True}, False),
        ((1, 1, 4096, 512), {"dtype": torch.float32}, False),
        ((1, 1, 4096, 512), {"device": "cpu"}, False),
    ],
)
def test_what_is_rewritten(shape: tuple[int, ...], given: dict[str, Any], applies: bool) -> None:
    assert _applies(_attention(*shape, **given)) is applies


def test_a_longer_sequence_compiles_once_more() -> None:
    gm = _attention(1, 1, -4096, 512)
    length = next(iter(gm.graph.nodes)).meta["val"].shape[2]
    rewritten(gm, WideHeadsPass())
    guards = [str(guard.expr) for guard in length.node.shape_env.guards]
    assert any("268435456" in guard for guard in guards), guards


@pytest.mark.parametrize(("length", "padded"), [(4096, False), (4097, True), (-4096, True)])
def test_rows_of_scores_start_at_multiples_of_16(length: int, padded: bool) -> None:
    gm = rewritten(_attention(1, 1, length, 512), WideHeadsPass())
    scores, _ = calls(gm, aten.bmm.dtype)
    assert len(calls(gm, aten.constant_pad_nd.default)) == 2 * padded
    stride = torch.fx.experimental.symbolic_shapes.statically_known_true(scores.meta["val"].stride(1) % 16 == 0)
    assert stride, scores.meta["val"].stride()
