# SPDX-License-Identifier: Apache-2.0
"""Objects that an op takes apart: what is declared, what the body and the fake get, and every error of that."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from magi_opschema import (
    ObjectHandle,
    errors,
    get_object,
    lower_signature,
    magi_register_custom_op,
    op_def,
    opcheck,
    register_kernel,
    register_object,
    register_vmap,
    see_through_object,
)
from torch import Tensor, nn


class Point(NamedTuple):
    packed: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Tile:
    block: int = 16
    factor: float = 1.0


@see_through_object
class Linear:
    kind: ClassVar[str] = "linear"
    weight: Tensor
    bias: Tensor | None
    tile: Tile

    def __init__(self, weight: Tensor, bias: Tensor | None = None, tile: Tile = Tile()) -> None:
        self.weight, self.bias, self.tile, self.calls = weight, bias, tile, 0

    def run(self, x: Tensor) -> Tensor:
        out = x @ self.weight * self.tile.factor
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

    def run(self, x: Tensor) -> Tensor:
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


@pytest.mark.parametrize(
    ("annotation", "runner", "schema"),
    [
        (
            Linear,
            Linear(EYE * 2, EYE[0]),
            "Tensor runner__weight, Tensor? runner__bias, SymInt runner__tile__block, float runner__tile__factor",
        ),
        (Slotted, Slotted(EYE, 3.0), "Tensor runner__weight, float runner__factor"),
        (Frozen, Frozen(EYE, 3.0), "Tensor runner__weight, float runner__factor"),
        (
            Derived,
            Derived(EYE),
            "Tensor runner__weight, Tensor? runner__bias, SymInt runner__tile__block, float runner__tile__factor",
        ),
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
    seen: list[Any] = []
    weight = EYE * 2

    @magi_register_custom_op(f"{ns}::run", infer_output_meta_fn=["x"])
    def run(x: Tensor, runner: ObjectHandle[Linear]) -> Tensor:
        seen.append(runner)
        assert (runner.weight.data_ptr(), runner.kind) == (weight.data_ptr(), "linear")
        return runner.run(x)

    given = Linear(weight)
    run(x, given)
    assert isinstance(seen[0], Linear)
    assert seen[0] is not given
    assert type(seen[0]).__name__ == "Linear"


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


def test_a_gradient_may_be_an_object(ns: str, x: Tensor) -> None:
    def save(ctx: Any, inputs: Any, _: Any) -> None:
        ctx.x = inputs[0]

    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, Linear(ctx.x.mT @ grad)

    run = make(ns, ObjectHandle[Linear], setup_context_fn=save, backward_fn=backward)
    weight = EYE.clone().requires_grad_()
    run(x, Linear(weight)).sum().backward()
    torch.testing.assert_close(weight.grad, x.mT @ torch.ones(2, 4))


def test_a_weight_that_requires_a_gradient_needs_a_backward(ns: str, x: Tensor) -> None:
    run = make(ns, ObjectHandle[Linear])
    with pytest.raises(errors.MissingBackwardError, match="has no backward_fn"):
        run(x, Linear(EYE.clone().requires_grad_())).sum().backward()


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
    ("name", "sentence"),
    [
        (
            "writes",
            r"the body writes 'runner.calls', and its Linear was rebuilt for this one call, so that would be lost",
        ),
        ("replaces", r"the body writes 'runner.weight'.*as in mutates_args=\('runner.weight',\).*register_object\(\)"),
        ("deletes", r"the body writes 'runner.bias'"),
        (
            "counts",
            r"the body reads 'runner.calls', and its Linear was rebuilt only from \(weight, bias, tile\). Declare",
        ),
    ],
)
def test_a_body_that_writes_or_reads_what_the_object_does_not_have(
    ns: str, x: Tensor, name: str, sentence: str
) -> None:
    def writes(runner: Any) -> None:
        runner.calls = 1

    def replaces(runner: Any) -> None:
        runner.weight = EYE

    def deletes(runner: Any) -> None:
        del runner.bias

    def counts(runner: Any) -> None:
        runner.calls += 1

    act = {"writes": writes, "replaces": replaces, "deletes": deletes, "counts": counts}[name]

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
        (Linear(EYE, tile=3), errors.ArgumentError, "'runner.tile' is 3 \\(int\\), expected a Tile"),  # type: ignore[arg-type]
        (Linear(EYE, tile=Tile("a")), errors.ArgumentError, "'runner.tile.block' is 'a' \\(str\\), expected an int"),  # type: ignore[arg-type]
        (7, errors.HandleError, "'runner' names no Linear: 7 is not a handle of this process"),
        (True, errors.HandleError, "1 is not a handle of this process"),
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
        (
            lambda: _declare(constant_fields=("block",)),
            r"names 'block', whose type .* constant_fields=\{'block': int\}",
        ),
        (lambda: _declare(tensor_fields=("twice",)), "'twice' is a property, which a rebuilt object computes again"),
        (lambda: _declare(tensor_fields=()), "does not say which of its attributes are Tensors"),
    ],
)
def test_refused_at_the_declaration(act: Callable[[], object], sentence: str) -> None:
    with pytest.raises(errors.OptionError, match=sentence) as raised:
        act()
    assert str(raised.value).startswith("see_through_object")


def test_refused_at_the_decoration() -> None:
    @see_through_object
    class Tabled:
        weight: Tensor
        table: dict[str, int]

    def run(x: Tensor, runner: ObjectHandle[Tabled]) -> Tensor:
        raise NotImplementedError

    with pytest.raises(errors.SignatureError, match="'runner.table' has type dict\\[str, int\\], which has no flat"):
        lower_signature(run)

    def give(x: Tensor) -> Linear:
        raise NotImplementedError

    with pytest.raises(errors.SignatureError, match="has type Linear, and an op returns no objects"):
        lower_signature(give)

    def many(x: Tensor, runners: list[Linear]) -> Tensor:
        raise NotImplementedError

    with pytest.raises(errors.SignatureError, match="a list of records"):
        lower_signature(many)


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
    assert get_object(handle) is runner


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
    run = make(ns, ObjectHandle[Linear], infer_output_meta_fn=None)
    handle = register_object(Linear(EYE))

    @register_kernel(run, "cpu")
    def on_cpu(x: Tensor, runner: ObjectHandle[Linear]) -> Tensor:
        return runner.run(x) + 1

    @register_vmap(run)
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
    assert set(vars(runner)) == {"weight", "bias", "tile", "calls"}
    assert not vars(runner.weight)
    for copied in (copy.copy(runner), copy.deepcopy(runner), pickle.loads(pickle.dumps(runner))):
        torch.testing.assert_close(run(x, copied), x)


def test_opcheck(ns: str, x: Tensor) -> None:
    run = make(ns, ObjectHandle[Linear])
    assert set(opcheck(run, (x, Linear(EYE, EYE[0]))).values()) == {"SUCCESS"}
