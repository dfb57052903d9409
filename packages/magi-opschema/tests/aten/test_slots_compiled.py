# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002, A006  # kernels name their parameters as ATen does
"""Kernels of slots under what traces a call: compilation, export, fakes, modes, subclasses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _slot_kernels import Counted
from magi_opschema import aten
from magi_opschema.aten import _torch_compat
from magi_opschema.aten._dispatch import route
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


Slot = Callable[..., None]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_code_calls_the_kernel_and_recompiles_on_a_change(slot: Slot, backend: str) -> None:
    kernel = Counted(1.0)
    slot("softmax", 1, kernel)
    x = torch.randn(3, 4)
    compiled = torch.compile(lambda x: aten.softmax(x, -1) * 2, fullgraph=True, backend=backend)

    torch.testing.assert_close(compiled(x), 2 * (x.softmax(-1) + 1))
    with aten.use_slot("softmax", 8):
        torch.testing.assert_close(compiled(x), 2 * x.softmax(-1))
    torch.testing.assert_close(compiled(x), 2 * (x.softmax(-1) + 1))
    aten.pin("softmax", 8)
    torch.testing.assert_close(compiled(x), 2 * x.softmax(-1))
    aten.pin("softmax", None)
    torch.testing.assert_close(compiled(x), 2 * (x.softmax(-1) + 1))
    aten.register_slot("softmax", 0, Counted(5.0))
    try:
        torch.testing.assert_close(compiled(x), 2 * (x.softmax(-1) + 5))
    finally:
        aten.unregister_slot("softmax", 0)


def test_a_change_of_slot_recompiles_once(slot: Slot) -> None:
    slot("softmax", 1, Counted(1.0))
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    compiled = torch.compile(lambda x: aten.softmax(x, -1), fullgraph=True, backend=backend)
    x = torch.randn(2)
    for _ in range(2):
        compiled(x)
        with aten.use_slot("softmax", 8):
            compiled(x)
    assert len(graphs) == 2
    assert graphs[1] == [torch.ops.aten.softmax.int]


@pytest.mark.parametrize("tag_out", [True, False])
def test_compiled_out_calls_reach_the_kernel(slot: Slot, tag_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tag = _torch_compat.tag_out() if tag_out else None
    if tag_out and tag is None:
        pytest.skip("Tag.out serves from torch 2.13")
    monkeypatch.setattr(route, "tag_out", lambda: tag)
    base, function = ("exp", torch.exp) if tag_out else ("exp2", torch.exp2)

    def kernel(input: Tensor) -> Tensor:
        return torch.add(function(input), 1)

    # An operator stays defined, with or without the tag. No other test asks for this one, which prefers the slot 6.
    slot(base, 6, kernel)
    surface = getattr(aten, base)

    def run(x: Tensor, out: Tensor) -> Any:
        return surface(x, out=out) * 1

    x, out = torch.randn(3), torch.empty(3)
    with aten.use_slot(base, 6):
        got = torch.compile(run, fullgraph=True, backend="aot_eager")(x, out)
    torch.testing.assert_close(got, function(x) + 1)
    torch.testing.assert_close(out, function(x) + 1)
    op = route.library_ops[f"{base}__out__use6"]
    assert len(op._schema.returns) == (1 if tag_out else 0)


def test_an_out_operator_takes_symbolic_shapes_where_atens_own_fake_does_not(slot: Slot) -> None:
    slot("angle", 1, lambda input: torch.angle(input) + 1)

    def run(x: Tensor, out: Tensor) -> Tensor:
        return aten.angle(x, out=out) * 1

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (3, 5):
        x, out = torch.randn(size), torch.zeros(size)
        torch.testing.assert_close(compiled(x, out), torch.angle(x) + 1)
        torch.testing.assert_close(out, torch.angle(x) + 1)


def test_exported_programs_hold_the_library_operator(slot: Slot) -> None:
    slot("softmax", 1, Counted(1.0))

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return aten.softmax(x, -1)

    x = torch.randn(3, 4)
    for strict in (True, False):
        program = torch.export.export(Model(), (x,), strict=strict)
        assert "magi_aten" in str(program.graph)
        torch.testing.assert_close(program.module()(x), x.softmax(-1) + 1)


def test_fake_tensors_take_atens_meta(slot: Slot) -> None:
    kernel = Counted()
    slot("softmax", 1, kernel)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.randn(3, 4))
        assert aten.softmax(fake, -1).shape == (3, 4)
    assert aten.softmax(fake, -1).shape == (3, 4)  # outside the mode too
    assert kernel.calls == 0


def test_vmap_and_autocast_are_atens(slot: Slot) -> None:
    kernel = Counted(1.0)
    slot("softmax", 1, kernel)
    x = torch.randn(5, 3)
    torch.testing.assert_close(torch.func.vmap(lambda row: aten.softmax(row, 0))(x), x.softmax(-1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert aten.softmax(x.bfloat16(), 0).dtype == torch.softmax(x.bfloat16(), 0).dtype
    torch.testing.assert_close(
        torch.func.grad(lambda t: aten.softmax(t, 0)[0])(x[0]), torch.func.grad(lambda t: t.softmax(0)[0])(x[0])
    )


def test_dispatch_modes_see_one_operator(slot: Slot, recorder: Any) -> None:
    slot("softmax", 1, Counted())
    x = torch.ones(2)
    with recorder:
        aten.softmax(x, 0)
    assert str(recorder.seen[0]) == "magi_aten.softmax__int.default"


def test_wrapper_subclasses_keep_atens_operators(slot: Slot) -> None:
    kernel = Counted(1.0)
    slot("softmax", 1, kernel)
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(torch.randn(3), torch.randn(3))
    assert isinstance(aten.softmax(x, 0), TwoTensor)
    assert kernel.calls == 0


def test_inference_mode(slot: Slot) -> None:
    slot("softmax", 1, Counted(1.0))
    with torch.inference_mode():
        x, out = torch.ones(2), torch.empty(2)
        torch.testing.assert_close(aten.softmax(x, 0, out=out), x.softmax(0) + 1)


def test_parameters_and_lists_reach_the_kernel(slot: Slot) -> None:
    calls = []

    def cat(tensors, dim=0):  # type: ignore[no-untyped-def]
        calls.append(len(tensors))
        return torch.cat(tensors, dim)

    slot("cat", 1, cat)
    weight = torch.nn.Parameter(torch.ones(2))
    aten.cat([torch.ones(2), torch.ones(1)])
    with torch.no_grad():
        aten.cat([weight, weight, weight])
    assert calls == [2, 3]
    aten.cat([weight]).sum().backward()
    assert calls == [2, 3]
    assert weight.grad is not None
