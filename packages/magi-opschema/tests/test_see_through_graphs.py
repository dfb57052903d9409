# SPDX-License-Identifier: Apache-2.0
"""Objects that are taken apart in compiled code: one graph, Tensors that stay in place, numbers that are constants."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from magi_opschema import ObjectHandle, magi_register_custom_op, op_def, register_object, see_through_object
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._guards import TracingContext
from torch.fx.experimental.proxy_tensor import make_fx


EYE = torch.eye(4)
Op = Callable[..., Tensor]


@dataclass(frozen=True)
class Tile:
    block: int = 16
    factor: float = 1.0
    sizes: tuple[int, ...] = (1, 2)


@see_through_object
class Runner:
    packed: Tensor
    shift: Tensor | None
    tile: Tile
    mode: Literal["plain", "twice"]

    def __init__(self, scale: float, tile: Tile = Tile(), mode: Any = "plain") -> None:
        self.packed, self.shift, self.tile, self.mode = EYE * scale, None, tile, mode

    def run(self, x: Tensor) -> Tensor:
        constants = [self.tile.block, *self.tile.sizes, self.tile.factor]
        assert [type(value) for value in constants] == [int] * (len(constants) - 1) + [float]
        return x @ self.packed * self.tile.factor * (2 if self.mode == "twice" else 1)


@dataclass(frozen=True)
class Frozen:
    packed: Tensor
    block: int = 16

    def run(self, x: Tensor) -> Tensor:
        assert type(self.block) is int
        return x @ self.packed


class Layer(nn.Module):
    def __init__(self, run: Op, scale: float, place: str = "object") -> None:
        super().__init__()
        self.run = run
        self.register_buffer("packed", EYE * scale)
        self.runner: Any = Frozen(EYE * scale) if place == "frozen" else Runner(scale)
        if place == "buffer":
            setattr(self.runner, "packed", self.packed)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.runner) + 1


def make(ns: str, annotation: Any = Runner) -> Op:
    @magi_register_custom_op(f"{ns}::run", infer_output_meta_fn=["x"])
    def run(x: Tensor, runner: ObjectHandle[annotation]) -> Tensor:
        out: Tensor = runner.run(x)
        return out

    return run


@pytest.fixture
def x() -> Tensor:
    return torch.arange(8.0).view(2, 4)


class Compiled:
    """Counts the graphs of a function, and keeps which of their inputs AOTAutograd takes to stay where they are."""

    def __init__(self, fn: Callable[..., Any], *, dynamic: bool | None = None) -> None:
        self.graphs: list[Any] = []
        self.static: list[list[int]] = []
        self._traced: Any = None
        compiler = aot_autograd(fw_compiler=self._forward)

        def backend(graph: Any, inputs: Any) -> Any:
            self._traced = graph  # torch may start again with a float as a constant, before anything is compiled
            return compiler(graph, inputs)

        self.call = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)

    def _forward(self, graph: Any, _: Any) -> Any:
        self.graphs.append(self._traced)
        metadata: Any = TracingContext.get().fw_metadata
        self.static.append(list(metadata.static_input_indices))
        return graph

    def static_names(self, at: int = 0) -> list[str]:
        names = [node.name for node in self.graphs[at].graph.nodes if node.op == "placeholder"]
        return [names[i] for i in self.static[at]]


@pytest.mark.parametrize("place", ["object", "buffer", "frozen"])
@pytest.mark.parametrize("dynamic", [None, False, True])
def test_32_layers_share_one_graph(ns: str, x: Tensor, place: str, dynamic: bool | None) -> None:
    run = make(ns, Frozen if place == "frozen" else Runner)
    compiled = Compiled(lambda layer, x: layer(x), dynamic=dynamic)
    for i in range(32):
        torch.testing.assert_close(compiled.call(Layer(run, float(i), place), x), x * i + 1)
    assert len(compiled.graphs) == 1
    assert all("packed" in name for name in compiled.static_names())
    assert len(compiled.static_names()) == 1


@pytest.mark.parametrize("dynamic", [None, False, True])
@pytest.mark.parametrize("annotation", [Runner, Frozen])
def test_32_objects_as_arguments_share_one_graph(ns: str, x: Tensor, dynamic: bool | None, annotation: Any) -> None:
    run = make(ns, annotation)
    compiled = Compiled(lambda runner, x: run(x, runner), dynamic=dynamic)
    for i in range(32):
        runner = Runner(i) if annotation is Runner else Frozen(EYE * i)
        torch.testing.assert_close(compiled.call(runner, x), x * i)
    assert len(compiled.graphs) == 1
    assert compiled.static_names() == ["l_runner_packed"]


def test_32_layers_in_one_model(ns: str, x: Tensor) -> None:
    run = make(ns)
    stack = nn.Sequential(*(Layer(run, 1.0 + i / 100) for i in range(32)))
    compiled = Compiled(stack)
    torch.testing.assert_close(compiled.call(x), stack(x))
    assert len(compiled.graphs) == 1
    assert len(compiled.static_names()) == 32


def python_guards(compiled: Any) -> list[str]:
    """The guards of the first graph of *compiled* that run Python at every call, without those about all graphs."""
    entries = _debug_get_cache_entry_list(compiled._torchdynamo_orig_callable.__code__)
    lines = str(entries[0].guard_manager).splitlines()
    return [line for line in lines if "LAMBDA_GUARD" in line and "init_ambient_guards" not in line]


@pytest.mark.parametrize("annotation", [Runner, Frozen])
def test_no_guard_of_an_object_runs_python(ns: str, x: Tensor, annotation: Any) -> None:
    run = make(ns, annotation)
    runners = [Runner(float(i), Tile()) if annotation is Runner else Frozen(EYE * i) for i in range(4)]

    def program(x: Tensor, runners: list[Any]) -> Tensor:
        for runner in runners:
            x = run(x, runner)
        return x

    compiled = torch.compile(program, backend="eager", fullgraph=True)
    compiled(x, runners)
    assert python_guards(compiled) == []


def test_the_class_is_guarded(ns: str, x: Tensor) -> None:
    class Other(Runner):
        pass

    compiled = torch.compile(make(ns), backend="eager", fullgraph=True)
    compiled(x, Runner(1.0))
    with pytest.raises(Exception, match="expected a Runner, not a subclass"):
        compiled(x, Other(1.0))
    torch.testing.assert_close(compiled(x, Runner(2.0)), x * 2)


def test_a_tensor_that_was_read_before_stays_in_place_too(ns: str, x: Tensor) -> None:
    run = make(ns)
    compiled = Compiled(lambda runner, x: run(x * runner.packed.sum(), runner))
    compiled.call(Runner(1.0), x)
    assert compiled.static_names() == ["l_runner_packed"]


def test_no_mark_is_left_on_tensors(ns: str, x: Tensor) -> None:
    runner = Runner(1.0)
    torch.compile(make(ns), backend="aot_eager", fullgraph=True)(x, runner)
    assert not vars(runner.packed)


@pytest.mark.parametrize("dynamic", [None, False, True])
@pytest.mark.parametrize(
    "tiles",
    [
        [Tile(8), Tile(16), Tile(24), Tile(8)],
        [Tile(factor=0.5), Tile(factor=0.25), Tile(factor=0.75), Tile(factor=0.5)],
        [Tile(sizes=(3, 4)), Tile(sizes=(5, 6)), Tile(sizes=(7,)), Tile(sizes=(3, 4))],
    ],
)
def test_constants_are_constants_and_equal_ones_share_a_graph(
    ns: str, x: Tensor, dynamic: bool | None, tiles: list[Tile]
) -> None:
    run = make(ns)
    compiled = Compiled(lambda runner, x: run(x, runner), dynamic=dynamic)
    for tile in tiles * 3:
        torch.testing.assert_close(compiled.call(Runner(3.0, tile), x), x * 3 * tile.factor)
    assert len(compiled.graphs) == 3
    nodes = [node for node in compiled.graphs[-1].graph.nodes if node.target is op_def(run).torch_op]
    assert not any(isinstance(argument, torch.fx.Node) for argument in nodes[0].args[3:])


def test_a_text_is_a_constant(ns: str, x: Tensor) -> None:
    compiled = Compiled(make(ns))
    for mode in ("plain", "twice", "plain"):
        torch.testing.assert_close(compiled.call(x, Runner(1.0, mode=mode)), x * (2 if mode == "twice" else 1))
    assert len(compiled.graphs) == 2


def test_a_replaced_weight_is_seen_without_another_graph(ns: str, x: Tensor) -> None:
    runner = Runner(2.0)
    compiled = torch.compile(make(ns), fullgraph=True)
    torch.testing.assert_close(compiled(x, runner), x * 2)
    with torch.compiler.set_stance("fail_on_recompile"):
        runner.packed = EYE * 3
        torch.testing.assert_close(compiled(x, runner), x * 3)
        runner.packed.mul_(2)
        torch.testing.assert_close(compiled(x, runner), x * 6)


def test_a_tensor_that_appears_or_disappears_needs_another_graph(ns: str, x: Tensor) -> None:
    compiled, runner = Compiled(make(ns)), Runner(2.0)
    for shift in (None, EYE[0], None, EYE[1]):
        runner.shift = shift
        torch.testing.assert_close(compiled.call(x, runner), x * 2)
    assert len(compiled.graphs) == 2
    assert compiled.static_names(1) == ["l_runner_packed", "l_runner_shift"]


def test_tensors_that_two_objects_or_the_call_share(ns: str, x: Tensor) -> None:
    run = make(ns)
    first, second = Runner(2.0), Runner(3.0)
    second.packed = first.packed
    compiled = Compiled(lambda a, b, x: run(run(x, a), b))
    for a, b in ((first, second), (first, first), (first, Runner(3.0)), (second, first)):
        torch.testing.assert_close(compiled.call(a, b, x), run(run(x, a), b))
        torch.testing.assert_close(compiled.call(a, b, a.packed), run(run(a.packed, a), b))


def test_an_object_made_in_compiled_code(ns: str, x: Tensor) -> None:
    run = make(ns, Frozen)
    compiled = Compiled(lambda x, weight: run(x, Frozen(weight * 2, 4)))
    torch.testing.assert_close(compiled.call(x, EYE), x * 2)
    assert compiled.static_names() == []


def test_a_handle_stays_opaque_and_one_graph_serves_all(ns: str, x: Tensor) -> None:
    run = make(ns)
    compiled = Compiled(lambda runner, x: run(x, runner))
    runners = [Runner(float(i)) for i in range(12)]
    for i, handle in enumerate([register_object(runner, weak=True) for runner in runners]):
        torch.testing.assert_close(compiled.call(handle, x), x * i)
    assert len(compiled.graphs) == 1
    by_handle = op_def(run).by_handle
    assert by_handle is not None
    assert [n.target for n in compiled.graphs[0].graph.nodes if n.op == "call_function"] == [by_handle.torch_op]


@pytest.mark.parametrize("strict", [False, True])
def test_export(ns: str, x: Tensor, strict: bool) -> None:
    run = make(ns)
    for place in ("object", "buffer"):
        layer = Layer(run, 2.0, place)
        program = torch.export.export(layer, (x,), strict=strict)
        torch.testing.assert_close(program.module()(x), x * 2 + 1)
        (node,) = [node for node in program.graph.nodes if node.target is op_def(run).torch_op]
        assert node.args[2:] == (None, 16, 1.0, [1, 2], "plain")
        if place == "buffer":
            assert program.graph_signature.buffers == ("packed",)


def test_make_fx(ns: str, x: Tensor) -> None:
    run = make(ns, Frozen)
    graph = make_fx(lambda x, weight: run(x, Frozen(weight)))(x, EYE)
    torch.testing.assert_close(graph(x, EYE * 3), x * 3)


def test_vmap_over_the_input_and_over_the_weight(ns: str, x: Tensor) -> None:
    run = make(ns, Frozen)
    torch.testing.assert_close(torch.vmap(run, in_dims=(0, None))(x.expand(3, 2, 4), Frozen(EYE)), x.expand(3, 2, 4))
    weights = torch.stack([EYE, EYE * 2])
    torch.testing.assert_close(torch.vmap(lambda w: run(x, Frozen(w)))(weights), torch.stack([x, x * 2]))


def test_threads_share_one_graph(ns: str, x: Tensor) -> None:
    compiled = Compiled(make(ns))
    compiled.call(x, Runner(1.0))
    wrong: list[int] = []

    def work(i: int) -> None:
        wrong.extend(i for _ in range(30) if not torch.equal(compiled.call(x, Runner(float(i))), x * i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(compiled.graphs) == 1


class Tagged(Tensor):
    pass


def test_a_tensor_subclass(ns: str, x: Tensor) -> None:
    run, runner = make(ns), Runner(2.0)
    runner.packed = runner.packed.as_subclass(Tagged)
    for fn in (run, torch.compile(run, backend="eager", fullgraph=True)):
        found = fn(x, runner)
        assert type(found) is Tagged
        torch.testing.assert_close(found.as_subclass(Tensor), x * 2)
