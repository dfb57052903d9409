# SPDX-License-Identifier: Apache-2.0
"""Objects that an op takes apart: what body and fake get, every error of that, and one graph in compiled code."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import pytest
import torch
from magi_opschema import (
    ObjectHandle,
    errors,
    magi_register_custom_op,
    op_def,
    opcheck,
    register_object,
    see_through_object,
)
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._guards import TracingContext


class Point(NamedTuple):
    packed: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Tile:
    block: int = 16
    factor: float = 1.0
    sizes: tuple[int, ...] = (1, 2)


@see_through_object
class Linear:
    kind: ClassVar[str] = "linear"
    weight: Tensor
    bias: Tensor | None
    tile: Tile
    mode: Literal["plain", "twice"]

    def __init__(self, weight: Tensor, bias: Tensor | None = None, tile: Tile = Tile(), mode: Any = "plain") -> None:
        self.weight, self.bias, self.tile, self.mode, self.calls = weight, bias, tile, mode, 0

    def run(self, x: Tensor) -> Tensor:
        constants = [self.tile.block, *self.tile.sizes, self.tile.factor]
        assert [type(value) for value in constants] == [int] * (len(constants) - 1) + [float]
        out = x @ self.weight * self.tile.factor * (2 if self.mode == "twice" else 1)
        return out if self.bias is None else out + self.bias


@see_through_object(tensor_fields=("weight",), constant_fields={"factor": float})
class Slotted:
    __slots__ = ("calls", "factor", "weight")

    def __init__(self, weight: Tensor, factor: float = 1.0) -> None:
        self.weight, self.factor, self.calls = weight, factor, 0

    def run(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.factor


@dataclass(frozen=True)
class Frozen:
    weight: Tensor
    factor: float = 1.0
    block: int = 16

    def run(self, x: Tensor) -> Tensor:
        assert type(self.block) is int
        return x @ self.weight * self.factor


class Derived(Linear):
    def run(self, x: Tensor) -> Tensor:
        return super().run(x) * 10


@see_through_object(tensor_fields=("weight",))
class Module(nn.Linear):
    def run(self, x: Tensor) -> Tensor:
        return x @ self.weight


EYE = torch.eye(4)
_HANDLE: Any = ObjectHandle
Op = Callable[..., Tensor]


def make(ns: str, annotation: Any, name: str = "run", **options: Any) -> Op:
    @magi_register_custom_op(f"{ns}::{name}", **{"infer_output_meta_fn": ["x"], **options})
    def run(x: Tensor, runner: annotation) -> Tensor:
        out: Tensor = runner.run(x)
        return out

    return run


@pytest.fixture
def x() -> Tensor:
    return torch.arange(8.0).view(2, 4)


OF_LINEAR = (
    "Tensor runner__weight, Tensor? runner__bias, SymInt runner__tile__block, float runner__tile__factor, "
    "SymInt[] runner__tile__sizes, str runner__mode"
)


@pytest.mark.parametrize(
    ("annotation", "runner", "schema"),
    [
        (Linear, Linear(EYE * 2, EYE[0]), OF_LINEAR),
        (Slotted, Slotted(EYE, 3.0), "Tensor runner__weight, float runner__factor"),
        (Frozen, Frozen(EYE, 3.0), "Tensor runner__weight, float runner__factor, SymInt runner__block"),
        (Derived, Derived(EYE), OF_LINEAR),
        (Module, Module(4, 4), "Tensor runner__weight"),
    ],
)
@pytest.mark.parametrize("is_handle", [True, False])
def test_an_object_is_taken_apart(
    ns: str, x: Tensor, annotation: Any, runner: Any, schema: str, is_handle: bool
) -> None:
    run = make(ns, _HANDLE[annotation] if is_handle else annotation)
    with torch.no_grad():
        torch.testing.assert_close(run(x, runner), runner.run(x))
    assert op_def(run).lowering.schema == f"run(Tensor x, {schema}) -> Tensor"
    assert op_def(run).lowering.objects == {"runner": annotation}


def test_the_body_gets_the_tensors_themselves_and_methods_but_no_other_attribute(ns: str, x: Tensor) -> None:
    given = Linear(EYE * 2)

    @magi_register_custom_op(f"{ns}::run", infer_output_meta_fn=["x"])
    def run(x: Tensor, runner: ObjectHandle[Linear]) -> Tensor:
        assert isinstance(runner, Linear)
        assert runner is not given
        assert type(runner).__name__ == "Linear"
        assert (runner.weight.data_ptr(), runner.kind) == (given.weight.data_ptr(), "linear")
        return runner.run(x)

    torch.testing.assert_close(run(x, given), x * 2)


def test_the_fake_and_the_gradient_see_the_fields(ns: str, x: Tensor) -> None:
    def fake(x: Tensor, runner: Linear) -> Tensor:
        return x.new_empty(x.shape[0], runner.weight.shape[1] * (runner.tile.block // 16))

    def save(ctx: Any, inputs: Any, _: Any) -> None:
        ctx.x, ctx.runner = inputs

    def backward(ctx: Any, grad: Tensor) -> Any:
        return run(grad, Linear(ctx.runner.weight.mT)), {"weight": ctx.x.mT @ grad}

    run = make(ns, ObjectHandle[Linear], infer_output_meta_fn=fake, setup_context_fn=save, backward_fn=backward)
    weight = torch.randn(4, 3, requires_grad=True)
    leaf = x.clone().requires_grad_()
    for fn in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        found = torch.autograd.grad(fn(leaf, Linear(weight)).sum(), (leaf, weight))
        torch.testing.assert_close(found, torch.autograd.grad((leaf @ weight).sum(), (leaf, weight)))
    torch.testing.assert_close(
        torch.func.grad(lambda weight: run(x, Linear(weight)).sum())(weight.detach()), x.mT @ torch.ones(2, 3)
    )


def test_objects_in_objects_and_in_records(ns: str, x: Tensor) -> None:
    @see_through_object
    class Pair:
        first: Linear
        second: Linear | None
        point: Point
        more: list[Tensor]

        def __init__(self, first: Linear, second: Linear | None, point: Point, more: list[Tensor]) -> None:
            self.first, self.second, self.point, self.more = first, second, point, more

        def run(self, x: Tensor) -> Tensor:
            out = self.first.run(x) + x @ self.point.packed * self.point.scale
            for weight in self.more:
                out = out + x @ weight
            return out if self.second is None else self.second.run(out)

    @dataclass(frozen=True)
    class Job:
        pair: ObjectHandle[Pair]
        shift: float = 0.0

    @magi_register_custom_op(f"{ns}::run", infer_output_meta_fn=["x"])
    def run(x: Tensor, job: Job, both: tuple[ObjectHandle[Linear], ObjectHandle[Linear] | None]) -> Tensor:
        return job.pair.run(x) + both[0].run(x) + job.shift

    shared, point = Linear(EYE), Point(EYE * 2, EYE[0, :1])
    pairs = [
        Pair(shared, None, point, []),
        Pair(shared, shared, point, [EYE, EYE]),
        Pair(shared, shared, point, [x.mT @ x]),
    ]
    for fn in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        for pair in pairs:
            torch.testing.assert_close(fn(x, Job(pair, 1.0), (shared, None)), pair.run(x) + shared.run(x) + 1.0)
        handle: Any = register_object(pairs[0])
        torch.testing.assert_close(fn(x, Job(handle), (shared, shared)), pairs[0].run(x) + x)
        other: Any = register_object(shared)
        torch.testing.assert_close(fn(x, Job(pairs[0]), (other, shared)), pairs[0].run(x) + x)


def test_none_default_and_keyword(ns: str, x: Tensor) -> None:
    default = Linear(EYE * 3)

    @magi_register_custom_op(f"{ns}::run", infer_output_meta_fn=["x"])
    def run(x: Tensor, maybe: ObjectHandle[Linear] | None = None, *, named: ObjectHandle[Linear] = default) -> Tensor:
        return named.run(x) if maybe is None else named.run(maybe.run(x))

    handle: Any = register_object(Linear(EYE * 2))
    for fn in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        torch.testing.assert_close(fn(x), x * 3)
        torch.testing.assert_close(fn(x, Linear(EYE * 2)), x * 6)
        torch.testing.assert_close(fn(x, handle), x * 6)
        torch.testing.assert_close(fn(x, None, named=handle), x * 2)


def test_a_list_of_objects_holds_their_handles(ns: str, x: Tensor) -> None:
    @magi_register_custom_op(f"{ns}::run", infer_output_meta_fn=["x"])
    def run(x: Tensor, runners: list[ObjectHandle[Linear]]) -> Tensor:
        return runners[1].run(runners[0].run(x))

    first, second = Linear(EYE * 2), Linear(EYE * 3)
    torch.testing.assert_close(run(x, [first, second]), x * 6)
    assert op_def(run).lowering.schema == "run(Tensor x, SymInt[] runners) -> Tensor"
    assert op_def(run).by_handle is None


def test_a_frozen_dataclass_without_tensors_stays_behind_its_handle(ns: str, x: Tensor) -> None:
    @magi_register_custom_op(f"{ns}::run", infer_output_meta_fn=["x"])
    def run(x: Tensor, tile: ObjectHandle[Tile]) -> Tensor:
        assert tile is given
        return x * tile.factor

    given = Tile(factor=2.0)
    torch.testing.assert_close(run(x, given), x * 2)


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda r: setattr(r, "calls", 1), "writes 'runner.calls', and its Linear was rebuilt for this one call, so"),
        (
            lambda r: setattr(r, "mode", "twice"),
            r"lost\. Return what is new, and let the caller keep it; or pass the ha",
        ),
        (lambda r: setattr(r, "weight", EYE), r"writes 'runner.weight'.*=\('runner.weight',\).*register_object\(\)"),
        (lambda r: delattr(r, "bias"), "the body writes 'runner.bias', and its Linear .* so that would be lost. Wr"),
        (lambda r: r.calls, r"reads 'runner.calls', and its .* only from \(weight, bias, tile, mode\)\. Declare"),
    ],
)
def test_a_body_that_writes_or_reads_what_the_object_does_not_have(
    ns: str, x: Tensor, act: Callable[[Any], object], sentence: str
) -> None:
    @magi_register_custom_op(f"{ns}::run", infer_output_meta_fn=["x"])
    def run(x: Tensor, runner: ObjectHandle[Linear]) -> Tensor:
        act(runner)
        return x + 1

    with pytest.raises(errors.ObjectFieldError, match=sentence) as raised:
        run(x, Linear(EYE))
    assert str(raised.value).startswith(f"{ns}::run: ")
    assert "(test_see_through_objects.py:" in str(raised.value)


def test_the_class_may_answer_for_attributes_itself(ns: str, x: Tensor) -> None:
    @see_through_object
    class Named:
        weight: Tensor

        def __init__(self, weight: Tensor) -> None:
            self.weight = weight

        def __getattr__(self, name: str) -> Any:
            if name == "twice":
                return self.weight * 2
            raise AttributeError(name)

        def run(self, x: Tensor) -> Tensor:
            assert not hasattr(self, "thrice")
            twice: Tensor = self.twice
            return x @ twice

    torch.testing.assert_close(make(ns, ObjectHandle[Named])(x, Named(EYE)), x * 2)


class Cache:
    def __init__(self) -> None:
        self.workspace, self.weight = torch.zeros(4), EYE

    def run(self, x: Tensor) -> Tensor:
        self.workspace.add_(x.sum(0))
        return x @ self.weight


see_through_object(Cache, tensor_fields=("workspace", "weight"))


def test_tensors_that_the_body_writes_are_named(ns: str, x: Tensor) -> None:
    with pytest.raises(errors.MutationError, match="wrote into 'runner.workspace', which mutates_args does not name"):
        make(ns, ObjectHandle[Cache])(x, Cache())
    run = make(ns, ObjectHandle[Cache], "named", mutates_args=["runner.workspace"])
    schema = "run(Tensor x, Tensor(a0!) runner__workspace, Tensor runner__weight) -> Tensor"
    assert op_def(run).lowering.schema == schema
    cache = Cache()
    for times, fn in enumerate([run, torch.compile(run, backend="aot_eager", fullgraph=True)], 1):
        fn(x, cache)
        torch.testing.assert_close(cache.workspace, x.sum(0) * times)
    run(x, register_object(cache))
    torch.testing.assert_close(cache.workspace, x.sum(0) * 3)


@pytest.mark.parametrize(
    ("value", "error", "sentence"),
    [
        ("text", errors.ArgumentError, "'runner' is 'text' \\(str\\), expected a Linear, not a subclass"),
        (None, errors.ArgumentError, "'runner' is None .*; or the handle that register_object\\(\\) gave for one"),
        (Derived(EYE), errors.ArgumentError, "'runner' is .*Derived\\), expected a Linear, not a subclass or a look"),
        (Linear(None), errors.ArgumentError, "'runner.weight' is None \\(NoneType\\), expected a Tensor"),  # type: ignore[arg-type]
        (Linear(EYE, tile=Tile("a")), errors.ArgumentError, "'runner.tile.block' is 'a' \\(str\\), expected an int"),  # type: ignore[arg-type]
        (7, errors.HandleError, "'runner' names no Linear: 7 is not a handle of this process"),
        (lambda: register_object(Frozen(EYE)), errors.ArgumentError, "is the handle of a Frozen, expected a Linear"),
    ],
)
def test_wrong_values(ns: str, x: Tensor, value: Any, error: type[Exception], sentence: str) -> None:
    run = make(ns, ObjectHandle[Linear])
    with pytest.raises(error, match=sentence) as raised:
        run(x, value() if callable(value) else value)
    assert str(raised.value).startswith(f"{ns}::run: 'runner")


def _declare(**options: Any) -> None:
    class Plain:
        tile: Tile

        @property
        def twice(self) -> Tensor:
            raise NotImplementedError

        def run(self) -> None: ...

    see_through_object(Plain, **options)


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda: see_through_object(3), r"takes a class, and got 3 \(int\). Decorate the class"),  # type: ignore[call-overload]
        (lambda: see_through_object(nn.Parameter), "its instances are values of type Tensor. Annotate a parameter"),
        (lambda: see_through_object(type("N", (int,), {})), "its instances are values of type int"),
        (lambda: see_through_object(type("N", (), {})), "does not say which of its attributes are Tensors. Annotate"),
        (lambda: _declare(tensor_fields="weight"), r"tensor_fields='weight' is one string. .*: \('weight',\)"),
        (lambda: _declare(tensor_fields=("a b",)), "tensor_fields names 'a b', which is not a name of an attribute"),
        (lambda: _declare(tensor_fields=(3,)), "tensor_fields names 3, which is not a name of an attribute"),
        (lambda: _declare(constant_fields=("block",)), r"'block', whose type .* constant_fields=\{'block': int\}"),
        (lambda: _declare(tensor_fields=("twice",)), "'twice' is a property, which a rebuilt object computes again"),
        (lambda: _declare(tensor_fields=()), "does not say which of its attributes are Tensors"),
    ],
)
def test_refused_at_the_declaration(act: Callable[[], object], sentence: str) -> None:
    with pytest.raises(errors.OptionError, match=sentence) as raised:
        act()
    assert str(raised.value).startswith("see_through_object")


def test_a_class_that_takes_no_subclass(ns: str, x: Tensor) -> None:
    @see_through_object
    class Closed:
        weight: Tensor

        def __init__(self) -> None:
            self.weight = EYE

        def __init_subclass__(cls) -> None:
            raise TypeError("Closed is closed")

    with pytest.raises(errors.OptionError, match="a subclass, which the class refuses: Closed is closed. Use a frozen"):
        make(ns, ObjectHandle[Closed])(x, Closed())


def test_a_handle_in_place_of_the_object(ns: str, x: Tensor) -> None:
    run, runner = make(ns, ObjectHandle[Linear]), Linear(EYE * 2)
    handle = register_object(runner)
    torch.testing.assert_close(run(x, handle), x * 2)
    torch.testing.assert_close(run(x, int(handle)), x * 2)
    by_handle = op_def(run).by_handle
    assert by_handle is not None
    assert by_handle.lowering.schema == "run(Tensor x, SymInt runner) -> Tensor"
    assert by_handle.name == f"{ns}::run_by_handle"
    torch.testing.assert_close(by_handle.torch_op(x, int(handle)), x * 2)


def test_a_fake_that_reads_the_object_needs_the_object(ns: str, x: Tensor) -> None:
    def fake(x: Tensor, runner: Linear) -> Tensor:
        return x.new_empty(x.shape[0], runner.weight.shape[1])

    run = make(ns, ObjectHandle[Linear], infer_output_meta_fn=fake)
    handle = register_object(Linear(EYE))
    torch.testing.assert_close(run(x, handle), x)
    with pytest.raises(Exception, match="see_through_object, and pass the object instead of its handle"):
        torch.compile(run, backend="eager", fullgraph=True)(x, handle)
    looks = make(ns, ObjectHandle[Linear], "looks", infer_output_meta_fn=["runner.weight"])
    with pytest.raises(Exception, match="an output looks like 'runner.weight', and the call passes a handle"):
        torch.compile(looks, backend="eager", fullgraph=True)(EYE, handle)


def test_what_is_registered_later_holds_for_both_forms(ns: str, x: Tensor) -> None:
    run: Any = make(ns, ObjectHandle[Linear], infer_output_meta_fn=None)
    handle = register_object(Linear(EYE))

    @run.register_kernel("cpu")
    def on_cpu(x: Tensor, runner: ObjectHandle[Linear]) -> Tensor:
        return runner.run(x) + 1

    @run.register_vmap
    def rule(info: Any, in_dims: Any, x: Tensor, runner: Any) -> Any:
        return run(x, runner) + 1, in_dims[0]

    by_handle = op_def(run).by_handle
    assert by_handle is not None
    for op, passed in ((run, Linear(EYE)), (by_handle.exposed_op, handle)):
        torch.testing.assert_close(op(x, passed), x + 1)
        torch.testing.assert_close(torch.vmap(op, in_dims=(0, None))(x, passed), x + 2)


def test_a_name_that_is_taken_leaves_nothing_behind(ns: str) -> None:
    make(ns, ObjectHandle[Linear])
    with pytest.raises(errors.DuplicateOpError, match=f"^{ns}::run: the op is registered already"):
        make(ns, ObjectHandle[Linear])
    make(ns, ObjectHandle[Linear], override=True)
    with pytest.raises(errors.OptionError):
        make(ns, ObjectHandle[Linear], "other", infer_output_meta_fn=["nothing"])
    with pytest.raises(errors.UnknownOpError):
        op_def(f"{ns}::other_by_handle")


def test_nothing_is_left_on_the_object(ns: str, x: Tensor) -> None:
    run, runner = make(ns, ObjectHandle[Linear]), Linear(EYE.clone())
    torch.compile(run, backend="eager", fullgraph=True)(x, runner)
    assert set(vars(runner)) == {"weight", "bias", "tile", "mode", "calls"}
    assert not vars(runner.weight)
    for copied in (copy.copy(runner), copy.deepcopy(runner), pickle.loads(pickle.dumps(runner))):
        torch.testing.assert_close(run(x, copied), x)


def test_opcheck(ns: str, x: Tensor) -> None:
    run = make(ns, ObjectHandle[Linear])
    assert set(opcheck(run, (x, Linear(EYE, EYE[0]))).values()) == {"SUCCESS"}


def scaled(scale: float, tile: Tile = Tile(), mode: Any = "plain") -> Linear:
    return Linear(EYE * scale, None, tile, mode)


class Layer(nn.Module):
    def __init__(self, run: Op, scale: float, place: str = "object") -> None:
        super().__init__()
        self.run = run
        self.register_buffer("weight", EYE * scale)
        self.runner: Any = Frozen(EYE * scale) if place == "frozen" else scaled(scale)
        if place == "buffer":
            setattr(self.runner, "weight", self.weight)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.runner) + 1


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


def test_annotations_of_modules_themselves_are_no_fields(ns: str, x: Tensor) -> None:
    @see_through_object
    class Cached(nn.Module):
        cache: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.ones(3))

        def run(self, x: Tensor) -> Tensor:
            return x + self.cache.sum()

    cached = make(ns, ObjectHandle[Cached])
    torch.testing.assert_close(cached(x, Cached()), x + 3)
    assert op_def(cached).lowering.schema == "run(Tensor x, Tensor runner__cache) -> Tensor"
    assert "runner ─ Cached, taken apart" in str(op_def(cached))


@pytest.mark.parametrize("is_argument", [False, True])
@pytest.mark.parametrize("place", ["object", "buffer", "frozen"])
@pytest.mark.parametrize("dynamic", [None, False, True])
def test_32_objects_share_one_graph(ns: str, x: Tensor, place: str, dynamic: bool | None, is_argument: bool) -> None:
    run = make(ns, _HANDLE[Frozen if place == "frozen" else Linear])
    compiled = Compiled(
        (lambda runner, x: run(x, runner) + 1) if is_argument else (lambda layer, x: layer(x)), dynamic=dynamic
    )
    for i in range(32):
        layer = Layer(run, float(i), place)
        torch.testing.assert_close(compiled.call(layer.runner if is_argument else layer, x), x * i + 1)
    assert len(compiled.graphs) == 1
    assert all("weight" in name for name in compiled.static_names())
    assert len(compiled.static_names()) == 1


def python_guards(compiled: Any) -> list[str]:
    """The guards of the first graph of *compiled* that run Python at every call, without those about all graphs."""
    entries = _debug_get_cache_entry_list(compiled._torchdynamo_orig_callable.__code__)
    lines = str(entries[0].guard_manager).splitlines()
    return [line for line in lines if "LAMBDA_GUARD" in line and "init_ambient_guards" not in line]


@pytest.mark.parametrize("annotation", [Linear, Frozen])
def test_no_guard_of_an_object_runs_python(ns: str, x: Tensor, annotation: Any) -> None:
    run = make(ns, _HANDLE[annotation])
    runners = [scaled(float(i), Tile()) if annotation is Linear else Frozen(EYE * i) for i in range(4)]

    def program(x: Tensor, runners: list[Any]) -> Tensor:
        for runner in runners:
            x = run(x, runner)
        return x

    compiled = torch.compile(program, backend="eager", fullgraph=True)
    compiled(x, runners)
    assert python_guards(compiled) == []


def test_the_class_is_guarded(ns: str, x: Tensor) -> None:
    class Other(Linear):
        pass

    compiled = torch.compile(make(ns, _HANDLE[Linear]), backend="eager", fullgraph=True)
    compiled(x, scaled(1.0))
    with pytest.raises(Exception, match="expected a Linear, not a subclass"):
        compiled(x, Other(EYE))
    torch.testing.assert_close(compiled(x, scaled(2.0)), x * 2)


def test_a_tensor_that_was_read_before_stays_in_place_too(ns: str, x: Tensor) -> None:
    run = make(ns, _HANDLE[Linear])
    compiled = Compiled(lambda runner, x: run(x * runner.weight.sum(), runner))
    compiled.call(scaled(1.0), x)
    assert compiled.static_names() == ["l_runner_weight"]


@pytest.mark.parametrize("dynamic", [None, False, True])
@pytest.mark.parametrize(
    "runners",
    [
        [scaled(3.0, Tile(8)), scaled(3.0, Tile(16)), scaled(3.0, Tile(24)), scaled(3.0, Tile(8))],
        [scaled(3.0, Tile(factor=factor)) for factor in (0.5, 0.25, 0.75, 0.5)],
        [scaled(3.0, Tile(sizes=sizes)) for sizes in ((3, 4), (5, 6), (7,), (3, 4))],
        [scaled(3.0), scaled(3.0, mode="twice"), scaled(3.0, Tile(8), "twice"), scaled(3.0)],
    ],
)
def test_constants_are_constants_and_equal_ones_share_a_graph(
    ns: str, x: Tensor, dynamic: bool | None, runners: list[Linear]
) -> None:
    run = make(ns, _HANDLE[Linear])
    compiled = Compiled(lambda runner, x: run(x, runner), dynamic=dynamic)
    for runner in runners * 3:
        torch.testing.assert_close(compiled.call(runner, x), runner.run(x))
    assert len(compiled.graphs) == 3
    nodes = [node for node in compiled.graphs[-1].graph.nodes if node.target is op_def(run).torch_op]
    assert not any(isinstance(argument, torch.fx.Node) for argument in nodes[0].args[3:])


def test_a_replaced_weight_is_seen_without_another_graph(ns: str, x: Tensor) -> None:
    runner = scaled(2.0)
    compiled = torch.compile(make(ns, _HANDLE[Linear]), fullgraph=True)
    torch.testing.assert_close(compiled(x, runner), x * 2)
    with torch.compiler.set_stance("fail_on_recompile"):
        runner.weight = EYE * 3
        torch.testing.assert_close(compiled(x, runner), x * 3)
        runner.weight.mul_(2)
        torch.testing.assert_close(compiled(x, runner), x * 6)


def test_a_tensor_that_appears_or_disappears_needs_another_graph(ns: str, x: Tensor) -> None:
    compiled, runner = Compiled(make(ns, _HANDLE[Linear])), scaled(2.0)
    for bias in (None, EYE[0], None, EYE[1]):
        runner.bias = bias
        torch.testing.assert_close(compiled.call(x, runner), runner.run(x))
    assert len(compiled.graphs) == 2
    assert compiled.static_names(1) == ["l_runner_weight", "l_runner_bias"]


def test_tensors_that_two_objects_or_the_call_share(ns: str, x: Tensor) -> None:
    run = make(ns, _HANDLE[Linear])
    first, second = scaled(2.0), scaled(3.0)
    second.weight = first.weight
    compiled = Compiled(lambda a, b, x: run(run(x, a), b))
    for a, b in ((first, second), (first, first), (first, scaled(3.0)), (second, first)):
        torch.testing.assert_close(compiled.call(a, b, x), run(run(x, a), b))
        torch.testing.assert_close(compiled.call(a, b, a.weight), run(run(a.weight, a), b))


def test_an_object_made_in_compiled_code(ns: str, x: Tensor) -> None:
    run = make(ns, _HANDLE[Frozen])
    compiled = Compiled(lambda x, weight: run(x, Frozen(weight * 2, block=4)))
    torch.testing.assert_close(compiled.call(x, EYE), x * 2)
    assert compiled.static_names() == []


def test_a_handle_stays_opaque_and_one_graph_serves_all(ns: str, x: Tensor) -> None:
    run = make(ns, _HANDLE[Linear])
    compiled = Compiled(lambda runner, x: run(x, runner))
    runners = [scaled(float(i)) for i in range(12)]
    for i, handle in enumerate([register_object(runner, weak=True) for runner in runners]):
        torch.testing.assert_close(compiled.call(handle, x), x * i)
    assert len(compiled.graphs) == 1
    by_handle = op_def(run).by_handle
    assert by_handle is not None
    assert [n.target for n in compiled.graphs[0].graph.nodes if n.op == "call_function"] == [by_handle.torch_op]


@pytest.mark.parametrize("strict", [False, True])
def test_export(ns: str, x: Tensor, strict: bool) -> None:
    run = make(ns, _HANDLE[Linear])
    for place in ("object", "buffer"):
        layer = Layer(run, 2.0, place)
        program = torch.export.export(layer, (x,), strict=strict)
        torch.testing.assert_close(program.module()(x), x * 2 + 1)
        (node,) = [node for node in program.graph.nodes if node.target is op_def(run).torch_op]
        assert node.args[2:] == (None, 16, 1.0, [1, 2], "plain")
        if place == "buffer":
            assert program.graph_signature.buffers == ("weight",)


def test_a_tensor_subclass(ns: str, x: Tensor) -> None:
    class Tagged(Tensor):
        pass

    run, runner = make(ns, _HANDLE[Linear]), scaled(2.0)
    runner.weight = runner.weight.as_subclass(Tagged)
    for fn in (run, torch.compile(run, backend="eager", fullgraph=True)):
        found = fn(x, runner)
        assert type(found) is Tagged
        torch.testing.assert_close(found.as_subclass(Tensor), x * 2)
