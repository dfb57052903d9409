# SPDX-License-Identifier: Apache-2.0
"""A body runs once for its fake and once for the traces of one compilation, which replay what it did."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import tritonwrap_patterns as patterns
from graph_questions import Ops, launches, operators
from magi_tritonwrap import OpaqueFallbackWarning, triton_op
from magi_tritonwrap._launch import capture, normalise
from magi_tritonwrap.testing import aot_graphs, launches_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, is_fake


pytestmark = pytest.mark.usefixtures("stub")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often the body of an op of `counting` has run, and a launch was resolved."""
    found = {"body": 0, "resolved": 0}
    resolve = normalise.resolve

    def counted(*args: Any) -> Any:
        found["resolved"] += 1
        return resolve(*args)

    monkeypatch.setattr(capture, "resolve", counted)
    return found


def counting(ops: Ops, runs: dict[str, int], body: Callable[..., Tensor], schema: str = "(Tensor x) -> Tensor") -> Any:
    def counted(*args: Any) -> Tensor:
        runs["body"] += 1
        return body(*args)

    return triton_op(f"{ops.namespace}::counted", counted, mutates_args=(), schema=schema)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("size", [(300,), (20, 20), (2, 3, 50)])
def test_a_body_runs_twice_for_a_graph(
    ops: Ops, runs: dict[str, int], size: tuple[int, ...], dynamic: bool, trains: bool
) -> None:
    op = counting(ops, runs, patterns.several_kernels)
    weight = torch.ones(size, requires_grad=trains)
    device = "cpu" if trains else "cuda"
    graphs = aot_graphs(lambda x, w: op(x) * w, torch.ones(size), weight, dynamic=dynamic, device=device)
    assert len(launches_of(graphs[0])) == 2
    assert runs == {"body": 2, "resolved": 2}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("is_named", [False, True])
def test_a_body_that_computes_nothing_on_fake_tensors(ops: Ops, is_named: bool, dynamic: bool) -> None:
    """Libraries write their fakes so; the launch belongs in the graph all the same."""

    def named(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        if not isinstance(x, FakeTensor):
            patterns.double_kernel[(1,)](x, out, x.numel(), BLOCK=512)
        return out

    def by_path(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        if not isinstance(x, torch._subclasses.FakeTensor):
            patterns.double_kernel[(1,)](x, out, x.numel(), BLOCK=512)
        return out

    op = triton_op(f"{ops.namespace}::careful", named if is_named else by_path, mutates_args=())
    assert len(launches(op, torch.ones(300), dynamic=dynamic)) == 1


def test_a_body_that_finds_the_fake_tensor_of_a_trace(ops: Ops) -> None:
    def body(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        if not is_fake(x):
            patterns.double_kernel[(1,)](x, out, x.numel(), BLOCK=512)
        return out

    op = triton_op(f"{ops.namespace}::too_careful", body, mutates_args=())
    with pytest.warns(OpaqueFallbackWarning, match="asks whether a tensor is fake, and launches nothing on those"):
        (graph,) = aot_graphs(op, torch.ones(300))
    assert str(op._opoverload) in operators(graph)


def test_equal_calls_of_one_graph_share_a_run(ops: Ops, runs: dict[str, int]) -> None:
    op = counting(ops, runs, patterns.module_level)
    assert len(launches(lambda x, y: (op(op(x)), op(y)), torch.ones(300), torch.ones(100))) == 3
    assert runs["resolved"] == 2, "one for each size"
    torch.compiler.reset()
    aot_graphs(op, torch.ones(300))
    assert runs["resolved"] == 3, "nothing is kept for another compilation"


def scaled(x: Tensor, by: float, twice: bool, sizes: list[int]) -> Tensor:
    out = patterns.module_level(x * by).reshape(sizes)
    return patterns.module_level(out) if twice else out


def test_a_device_that_launches_nothing(ops: Ops, runs: dict[str, int]) -> None:
    op = counting(ops, runs, patterns.module_level)
    (graph,) = aot_graphs(lambda x: op(x) + 1, torch.ones(300), device="meta")
    assert f"{ops.namespace}.counted.default" in operators(graph)


def test_arguments_that_are_no_tensors_count(ops: Ops, runs: dict[str, int]) -> None:
    op = counting(ops, runs, scaled, "(Tensor x, float by, bool twice, SymInt[] sizes) -> Tensor")
    (graph,) = aot_graphs(
        lambda x: op(x, 2.0, False, [300]) + op(x, 3.0, False, [300]) + op(x, 2.0, True, [300]), torch.ones(300)
    )
    assert len(launches_of(graph)) == 4
    factors = [node.args[1] for node in graph.graph.nodes if str(node.target) == "aten.mul.Tensor"]
    assert factors == [2.0, 3.0, 2.0]


def test_symbols_of_the_trace_are_those_of_the_arguments(ops: Ops, runs: dict[str, int]) -> None:
    op = counting(ops, runs, patterns.module_level)

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return op(x) + 1, op(y) + 1

    (graph,) = aot_graphs(program, torch.ones(300), torch.ones(200), dynamic=True)
    grids = [str(launch.grids[0][0]) for launch in launches_of(graph)]
    assert len(set(grids)) == 2
    added = [node.meta["val"] for node in graph.graph.nodes if str(node.target) == "aten.add.Tensor"]
    assert len({str(value.shape[0]) for value in added}) == 2


def test_what_a_body_asks_of_a_size_is_a_guard(ops: Ops, runs: dict[str, int]) -> None:
    op = counting(ops, runs, lambda x: patterns.module_level(x) if x.shape[0] % 2 == 0 else x.clone())
    for size, count in ((300, 1), (301, 0)):
        assert len(launches(lambda x: op(x) + 1, torch.ones(size), dynamic=True)) == count


def with_constant(x: Tensor) -> Tensor:
    return patterns.module_level(x) + torch.tensor([1.0, 2.0, 3.0], device=x.device)[1]


def in_place(x: Tensor) -> Tensor:
    out = x.clone()
    out[1:].mul_(2)
    view = out.view(-1, 2)
    patterns.double_kernel[patterns.blocks(x.numel())](view, view, x.numel(), BLOCK=128)
    out.add_(view[0, 0])
    return out


@pytest.mark.parametrize("body", [with_constant, in_place])
def test_constants_and_writes_are_replayed(ops: Ops, runs: dict[str, int], body: Callable[..., Tensor]) -> None:
    op = counting(ops, runs, body)
    (graph,) = aot_graphs(lambda x: op(x.relu()) + 1, torch.ones(300), device="cpu")
    assert len(launches_of(graph)) == 1
    assert f"{ops.namespace}.counted.default" not in operators(graph)
    assert runs["body"] == 2


def test_a_replay_keeps_the_annotations_of_the_node(ops: Ops, runs: dict[str, int]) -> None:
    op = counting(ops, runs, patterns.module_level)
    (graph,) = aot_graphs(lambda x: op(x.relu()), torch.ones(300))
    (launch,) = (node for node in graph.graph.nodes if "triton" in str(node.target))
    assert "op(x.relu())" in launch.meta["stack_trace"]


LOOKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "offset": lambda x, y: torch.as_strided(x, (2,), (1,), x.storage_offset()) * 2,
    "gradient": lambda x, y: x * 2 if x.requires_grad else x * 3,
    "memory": lambda x, y: x * 2 if x.untyped_storage()._cdata == y.untyped_storage()._cdata else x * 3,
    "bytes": lambda x, y: x * x.untyped_storage().nbytes(),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", LOOKS)
def test_a_body_sees_of_its_tensors_what_it_sees_in_eager(
    ops: Ops, runs: dict[str, int], name: str, dynamic: bool
) -> None:
    op = counting(ops, runs, LOOKS[name], "(Tensor x, Tensor y) -> Tensor")

    def program(x: Tensor, learnt: Tensor) -> tuple[Tensor, ...]:
        return op(x[4:], x[2:]), op(x[2:], x.clone()), op(x.clone(), x), op(learnt, x)

    given = torch.arange(10.0), torch.ones(10, requires_grad=True)
    compiled = torch.compile(program, backend="aot_eager", dynamic=dynamic, fullgraph=True)
    with torch.no_grad():
        for ours, eager in zip(compiled(*given), program(*given), strict=True):
            assert torch.equal(ours, eager)


class Scaled:
    """Equal to any other, and not to be hashed."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, x: Tensor, sign: float) -> Tensor:
        return x * self.by * math.copysign(1.0, sign)


def test_recordings_are_told_apart(ops: Ops) -> None:
    """By bodies that are equal, and by numbers that are."""
    schema = "(Tensor x, float sign) -> Tensor"
    two, three = (triton_op(f"{ops.namespace}::by_{by}", Scaled(by), mutates_args=(), schema=schema) for by in (2, 3))

    def program(x: Tensor) -> list[Tensor]:
        return [op(x, sign) for op in (two, three) for sign in (0.0, -0.0)]

    found = torch.compile(program, backend="aot_eager", fullgraph=True)(torch.ones(3))
    assert [float(each[0]) for each in found] == [2.0, -2.0, 3.0, -3.0]
