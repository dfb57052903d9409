# SPDX-License-Identifier: Apache-2.0
"""``magi_compile`` on classes, instances, functions and bound methods: what is compiled, and what stays as it was.

Then the names in ``dynamic_arg_dims``: parts of records, lists and mappings, and names that mark nothing.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from magi_backend import explain, magi_compile
from magi_backend._records.log import Collector, collecting
from magi_backend._torch_compat.compiling import torch_release
from magi_backend.errors import TargetError
from torch import Tensor, nn


class Plain(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.relu(self.linear(x)) * scale

    def doubled(self, x: Tensor) -> Tensor:
        return self.linear(x) * 2  # type: ignore[no-any-return]


@magi_compile(model_tag="compiled class")
class Compiled(Plain):
    pass


class Child(Compiled):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, scale) + 1


def add_one(x: Tensor) -> Tensor:
    return x + 1


def compilations(fn: Any, *calls: tuple[Any, ...]) -> int:
    """How many graphs the backend compiles when *fn* is called with each of *calls*."""
    with collecting(Collector()) as collector:
        for call in calls:
            fn(*call)
    return len(collector)


def test_instances_of_a_class_are_compiled_and_keep_apart() -> None:
    first, second = Compiled(), Compiled()
    x = torch.randn(3, 4)

    assert isinstance(first, Compiled)
    assert compilations(first, (x,)) == 1
    for instance in (first, second):
        torch.testing.assert_close(instance(x), torch.relu(instance.linear(x)))
    assert not torch.equal(first(x), second(x))


def test_a_subclass_is_compiled_with_its_own_forward() -> None:
    child = Child()
    x = torch.randn(3, 4)

    assert compilations(child, (x,)) == 1
    torch.testing.assert_close(child(x), torch.relu(child.linear(x)) + 1)


def test_state_dict_pickles_and_copies_are_those_of_the_plain_class() -> None:
    compiled = Compiled()
    x = torch.randn(3, 4)
    expected = compiled(x)

    assert list(compiled.state_dict()) == list(Plain().state_dict())
    assert [name for name, _ in compiled.named_modules()] == ["", "linear"]
    for twin in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        assert type(twin) is Compiled
        assert compilations(twin, (x,)) <= 1
        torch.testing.assert_close(twin(x), expected)


def test_an_instance_is_given_back_itself_and_keeps_its_hooks() -> None:
    plain = Plain()
    plain.register_forward_hook(lambda module, args, output: output + 1)
    x = torch.randn(3, 4)
    expected = plain(x)

    compiled = magi_compile(plain)

    assert compiled is plain
    assert compilations(plain, (x,)), "the module, and its hook"
    torch.testing.assert_close(plain(x), expected)
    assert "_compiled_call_impl" not in copy.deepcopy(plain).__dict__


class Chain(nn.Sequential):
    pass


@pytest.mark.parametrize("is_class", [False, True], ids=["instance", "class"])
def test_the_forward_may_be_one_of_torch(is_class: bool) -> None:
    kind: Any = magi_compile(type("Chain", (Chain,), {})) if is_class else Chain
    chain = kind(nn.Linear(4, 4), nn.ReLU())
    compiled = chain if is_class else magi_compile(chain)
    calls: list[int] = []
    compiled.register_forward_hook(lambda *args: calls.append(1))
    x = torch.randn(3, 4)

    assert compilations(compiled, (x,)) == 1
    torch.testing.assert_close(compiled(x), torch.relu(chain[0](x)))
    assert len(calls) == 2


def test_a_function_and_its_name() -> None:
    @magi_compile
    def shifted(x: Tensor) -> Tensor:
        """Add one."""
        return x + 1

    assert (shifted.__name__, shifted.__doc__) == ("shifted", "Add one.")
    assert compilations(shifted, (torch.zeros(2),)) == 1


def test_named_dimensions_are_dynamic_and_negative_ones_count_from_the_last() -> None:
    @magi_compile(dynamic_arg_dims={"x": [0, -1]})
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y

    y = torch.ones(2)
    assert compilations(fn, (torch.ones(3, 4), y), (torch.ones(5, 4), y), (torch.ones(5, 8), y)) == 1
    assert compilations(fn, (torch.ones(3, 4), torch.ones(6))) == 1


class This(nn.Module):
    def forward(this, x: Tensor) -> Tensor:
        return x + 1


class Static(nn.Module):
    @staticmethod
    def forward(x: Tensor, y: float = 1.0) -> Tensor:
        return x + y


class OfTheClass(nn.Module):
    @classmethod
    def forward(cls, x: Tensor) -> Tensor:
        return x + 1


class Renamed(Plain):
    def forward(self, tokens: Tensor, x: float = 1.0) -> Tensor:  # type: ignore[override]
        return tokens + x


@pytest.mark.parametrize("kind", [This, Static, OfTheClass], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("is_instance", [False, True], ids=["class", "instance"])
@pytest.mark.parametrize("dims", [None, {"x": 0}], ids=str)
def test_what_is_bound_is_found_by_binding(kind: Any, is_instance: bool, dims: Any) -> None:
    class Own(kind):  # type: ignore[misc]
        pass

    module = magi_compile(Own(), dynamic_arg_dims=dims) if is_instance else magi_compile(Own, dynamic_arg_dims=dims)()
    calls = [(torch.ones(size, 4),) for size in (3, 5, 7)]

    assert compilations(module, *calls) == 1
    torch.testing.assert_close(module(x=torch.ones(2, 4)), torch.full((2, 4), 2.0))
    with pytest.raises(TargetError, match=r"Own has no parameter '(this|self|cls)'.* Its parameters are x"):
        magi_compile(Own, dynamic_arg_dims={"self" if kind is Static else "this" if kind is This else "cls": 0})


class Methods:
    @magi_compile
    def plain(this, x: Tensor) -> Tensor:
        return x + 1

    @magi_compile(dynamic_arg_dims={"x": 0})
    def named(self, x: Tensor) -> Tensor:
        return x + 1

    @magi_compile
    @staticmethod
    def static_inside(x: Tensor) -> Tensor:
        return x + 1

    @staticmethod
    @magi_compile(dynamic_arg_dims={"x": 0})
    def static_outside(x: Tensor) -> Tensor:
        return x + 1

    @magi_compile(dynamic_arg_dims={"x": 0})
    @classmethod
    def class_inside(cls, x: Tensor) -> Tensor:
        return x + 1

    @classmethod
    @magi_compile
    def class_outside(cls, x: Tensor) -> Tensor:
        return x + 1


@pytest.mark.parametrize("name", [name for name in vars(Methods) if not name.startswith("__")])
def test_a_method_decorated_in_a_class_body(name: str) -> None:
    torch._dynamo.reset()
    method = getattr(Methods(), name)

    assert compilations(method, *[(torch.ones(size, 4),) for size in (3, 5, 7)]) == 1
    assert explain(method)(torch.ones(4, 4)).agrees


def test_the_forward_of_a_module_decorated_in_its_class_body() -> None:
    class Own(Plain):
        @magi_compile(dynamic_arg_dims={"x": 0})
        def forward(this, x: Tensor, scale: float = 1.0) -> Tensor:
            return torch.relu(this.linear(x)) * scale

    module = Own()
    assert compilations(module, *[(torch.ones(size, 4),) for size in (3, 5, 7)]) == 1
    names = [d.name for call in explain(module.forward)(torch.ones(3, 4)).calls for d in call.differences]
    assert "gradient of linear.weight" in names


def test_a_function_whose_first_parameter_is_called_self() -> None:
    @magi_compile(dynamic_arg_dims={"self": 0})
    def fn(self: Tensor, scale: float = 2.0) -> Tensor:
        return self * scale

    assert compilations(fn, *[(torch.ones(size),) for size in (3, 5, 7)]) == 1
    torch.testing.assert_close(fn(self=torch.ones(2)), torch.full((2,), 2.0))
    assert compilations(magi_compile(lambda self: self + 1, dynamic_arg_dims={"self": 0}), (torch.ones(3),)) == 1


def test_a_subclass_is_asked_for_its_own_parameters() -> None:
    @magi_compile
    class Base(Plain):
        pass

    class Own(Base, Renamed):
        forward = Renamed.forward

    assert compilations(Own(), *[(torch.ones(size, 4),) for size in (3, 5, 7)]) == 1
    named: Any = type("Named", (magi_compile(type("B", (Plain,), {}), dynamic_arg_dims={"scale": 0}), Renamed), {})
    named.forward = Renamed.forward
    with pytest.raises(TargetError, match=r"Named has no parameter 'scale'.* Its parameters are tokens, x"):
        named()(torch.ones(3, 4))


def test_no_mark_stays_when_the_call_raises() -> None:
    @magi_compile(dynamic_arg_dims={"x": 0})
    def fn(x: Tensor) -> Tensor:
        msg = "no"
        raise ValueError(msg)

    x = torch.ones(3)
    with pytest.raises(ValueError, match="no"):
        fn(x)

    assert not vars(x)


def test_enable_if_is_called_at_once() -> None:
    asked = []

    def no() -> bool:
        asked.append(True)
        return False

    def fn(x: Tensor) -> Tensor:
        return x

    assert magi_compile(fn, enable_if=no) is fn
    assert magi_compile(Plain, enable_if=no) is Plain
    assert len(asked) == 2
    assert Plain._compiled_call_impl is None


def test_a_config_patch_reaches_the_compilation() -> None:
    fn = magi_compile(add_one, config_patch={"progress": False}, model_tag="tagged")

    with collecting(Collector()) as collector:
        fn(torch.ones(2))

    (compilation,) = collector.compilations()
    assert compilation.label == "tagged"
    assert ("progress", "False", "config_patch") in compilation.settings


@magi_compile(dynamic_arg_dims={"x": 0}, config_patch={"check": True})
def patched(x: Tensor) -> Tensor:
    return x.sin() * 2


@magi_compile
def broken(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x.sin() * 2


class Holder(nn.Module):
    """What is compiled inside is called by another compiled function."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.of_class, self.instance, self.plain = Compiled(), magi_compile(Plain()), Plain()
        calls: dict[str, Any] = {
            "class": self.of_class,
            "instance": self.instance,
            "bound method": magi_compile(self.plain.doubled),
            "method": self.method,
            "function": patched,
            "twice": magi_compile(patched),
        }
        self.call = calls[which]

    @magi_compile
    def method(self, x: Tensor) -> Tensor:
        return self.plain(x) + 2  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x + 1) + 1  # type: ignore[no-any-return]


LOSES_SELF = "Dynamo before torch 2.12 loses the instance of a bound method that is an attribute"
NESTED = ["class", "instance", "bound method", "method", "function", "twice"]


@pytest.mark.parametrize("which", NESTED)
@pytest.mark.parametrize("backend", ["eager", "inductor", "magi"])
def test_inside_another_compiled_function_it_is_part_of_its_graph(backend: str, which: str) -> None:
    if which == "method" and torch_release() < (2, 12):
        pytest.skip(LOSES_SELF)
    holder, x = Holder(which), torch.randn(3, 4)
    expected = holder(x)
    torch.compiler.reset()
    with collecting(Collector()) as collector:
        torch.testing.assert_close(torch.compile(holder, backend=backend, fullgraph=True)(x), expected)
    assert len(collector) == (backend == "magi")


@pytest.mark.filterwarnings("ignore:torch.compile is ignored when called inside torch.export region")  # stock's too
@pytest.mark.parametrize("which", NESTED)
@pytest.mark.parametrize("strict", [True, False])
def test_it_is_exported(which: str, strict: bool) -> None:
    if strict and which == "method" and torch_release() < (2, 12):
        pytest.skip(LOSES_SELF)
    if not strict and torch_release() < (2, 11):
        pytest.skip("torch 2.10 compiles what it meets while it exports without Dynamo, and fails")
    holder, x = Holder(which), torch.randn(3, 4)
    program = torch.export.export(holder, (x,), strict=strict)
    torch.testing.assert_close(program.module()(x), holder(x))


@pytest.mark.parametrize("which", NESTED)
def test_where_the_outer_function_is_not_traced_it_is_compiled_by_itself(which: str) -> None:
    holder, x = Holder(which), torch.randn(3, 4)

    @torch.compiler.disable
    def disabled(y: Tensor) -> Tensor:
        return holder(y)  # type: ignore[no-any-return]

    with collecting(Collector()) as collector:
        result = torch.compile(lambda y: disabled(y + 1) + 1, backend="eager")(x)
    assert len(collector) == 1
    torch.testing.assert_close(result, holder(x + 1) + 1)


@pytest.mark.parametrize("backend", ["eager", "magi"])
def test_a_graph_break_inside_is_one_of_the_outer_function(backend: str) -> None:
    x = torch.randn(3, 4)
    result = torch.compile(lambda y: broken(y + 1) + 1, backend=backend)(x)
    torch.testing.assert_close(result, (x + 1).sin() * 2 + 1)


@dataclass(frozen=True)
class Inner:
    scale: Tensor
    eps: float = 1e-6


@dataclass(frozen=True)
class Cfg:
    x: Tensor
    inner: Inner | None = None
    rest: tuple[Tensor, ...] = ()


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


X, Y, Z = torch.ones(3, 4), torch.ones(5, 4), torch.ones(7, 4)


ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("path", "make", "read"),
    [
        ("v.x", Cfg, lambda v: v.x),
        ("v", Cfg, lambda v: v.x),
        ("v.inner.scale", lambda x: Cfg(ONE, Inner(x)), lambda v: v.inner.scale + v.x.sum()),
        ("v.inner", lambda x: Cfg(ONE, Inner(x)), lambda v: v.inner.scale),
        ("v.rest", lambda x: Cfg(ONE, rest=(x, x + 1)), lambda v: v.rest[0] + v.rest[1]),
        ("v.rest[1]", lambda x: Cfg(ONE, rest=(ONE, x)), lambda v: v.rest[1]),
        ("v", lambda x: [x, x + 1], lambda v: v[0] + v[1]),
        ("v[-1]", lambda x: (ONE, x), lambda v: v[1]),
        ("v['k']", lambda x: {"k": x, "other": ONE}, lambda v: v["k"]),
        ("v.k", lambda x: {"k": x}, lambda v: v["k"]),
        ("v", lambda x: {"k": [x]}, lambda v: v["k"][0]),
        ("v.right", lambda x: Pair(ONE, x), lambda v: v.right),
        ("v[0].x", lambda x: [Cfg(x)], lambda v: v[0].x),
    ],
    ids=map(str, range(13)),
)
def test_names_reach_into_records_lists_and_mappings(path: str, make: Any, read: Any) -> None:
    torch._dynamo.reset()
    fn: Any = magi_compile(lambda v: read(v) + 1, dynamic_arg_dims={path: 0})

    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        assert compilations(fn, *[(make(x),) for x in (X, Y, Z)]) == 1
    assert not vars(X)


def test_collected_arguments_are_named_as_well() -> None:
    @magi_compile(dynamic_arg_dims={"xs[0]": 0, "named.y": 1})
    def fn(*xs: Tensor, **named: Tensor) -> Tensor:
        return xs[0].sum() + named["y"].sum()

    with torch._dynamo.config.patch(automatic_dynamic_shapes=False), collecting(Collector()) as collector:
        for size in (3, 5, 7):
            fn(torch.ones(size, 2), y=torch.ones(2, size))
    assert len(collector) == 1


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        (
            "c.inner.scal",
            r"fn: dynamic_arg_dims names 'c.inner.scal', and Inner has no field 'scal'\. Did you mean 'scale'",
        ),
        ("p.up", r"Pair has no field 'up'\. Its fields are left, right\."),
        ("c[", r"fn: dynamic_arg_dims names 'c\[', which is not the name of a parameter"),
        ("c + 1", r"which is not the name of a parameter, or of a part of one such as 'cfg.weight', 'xs\[0\]'"),
        (3, r"fn: dynamic_arg_dims names 3, which is not the name of a parameter"),
    ],
)
def test_a_part_that_is_not_there_is_named_at_decoration(path: Any, sentence: str) -> None:
    def fn(c: Cfg, p: Pair) -> Tensor:
        return c.x + p.left

    with pytest.raises(TargetError, match=sentence):
        magi_compile(fn, dynamic_arg_dims={path: 0})


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (
            "v[2]",
            [X, Y],
            r"names 'v\[2\]', which is not there in this call\..* The tensors of this call are v\[0\], v\[1\]\.",
        ),
        (
            "v.inner.eps",
            Cfg(X, Inner(Y)),
            r"names 'v.inner.eps', which was called with 1e-06 \(a float\)\. Only a Tensor has dimensions.* v.x, v.inn",
        ),
        ("v", 3, r"names 'v', which was called with 3 \(a int\)\..* This call has no tensors\."),
        ("v.x", X, r"names 'v.x', which is not there in this call"),
    ],
)
def test_a_name_that_marks_nothing_is_an_error_at_the_call(path: str, value: Any, sentence: str) -> None:
    fn: Any = magi_compile(lambda v: 0, dynamic_arg_dims={path: 0})

    with pytest.raises(TargetError, match=sentence):
        fn(value)


@pytest.mark.parametrize(
    ("path", "value"), [("v", None), ("v.inner.scale", Cfg(X)), ("v", []), ("v.rest", Cfg(X)), ("v", {})], ids=str
)
def test_an_optional_part_may_be_absent(path: str, value: Any) -> None:
    fn: Any = magi_compile(lambda v: 5, dynamic_arg_dims={path: 0})
    assert fn(value) == 5


def test_a_missing_dimension_of_a_part_is_named() -> None:
    fn: Any = magi_compile(lambda v: 0, dynamic_arg_dims={"v": 2})
    with pytest.raises(TargetError, match=r"dimension 2 of 'v\[1\].x', which was called with shape \(3, 4\)"):
        fn([torch.ones(1, 1, 1), Cfg(X)])


def only_sixteen(x: Tensor) -> Tensor:
    return x + 1 if x.shape[0] == 16 else x - 1


def graphs(fn: Any, sizes: tuple[int, ...]) -> int:
    """How many are compiled in calls with tensors of these *sizes*, which return what the function returns."""
    torch._dynamo.reset()
    with collecting(Collector()) as collector:
        for size in sizes:
            x = torch.randn(size, 4)
            torch.testing.assert_close(fn(x), fn.__wrapped__(x))
            assert not vars(x)
    return len(collector)


def test_a_line_that_needs_one_size_of_a_named_dimension_is_named() -> None:
    torch._dynamo.reset()
    line = only_sixteen.__code__.co_firstlineno + 1
    needs = rf"needs dimension 0 of 'x' to be 16, at .*test_magi_compile.py:{line} \(`return x \+ 1 if x.shape"
    with pytest.raises(TargetError, match=needs) as caught:
        magi_compile(only_sixteen, dynamic_arg_dims={"x": 0})(torch.ones(16, 4))
    assert "write {dimension: 'maybe'}" in str(caught.value)


def test_a_path_of_a_part_is_in_the_error() -> None:
    torch._dynamo.reset()
    fn: Any = magi_compile(lambda v: v["k"][0].view(4, -1), dynamic_arg_dims={"v": {1: "dynamic"}})
    with pytest.raises(TargetError, match=r"needs dimension 1 of 'v\['k'\]\[0\]' to be 4"):
        fn({"k": [torch.ones(4, 4).as_strided((1, 4), (4, 1))]})


def test_code_for_one_size_is_allowed_by_maybe_and_where_nothing_is_named() -> None:
    assert graphs(magi_compile(only_sixteen, dynamic_arg_dims={"x": {0: "maybe"}}), (16, 5, 7)) == 2
    assert graphs(magi_compile(only_sixteen), (16, 5, 7)) == 2


def test_one_graph_serves_all_sizes_of_an_unbacked_dimension() -> None:
    def attend(x: Tensor) -> Tensor:
        return (x @ x.t()).softmax(-1) @ x

    sizes = (16, 1, 2, 7, 300) if torch.__version__.startswith("2.10.") else (16, 0, 1, 2, 7, 300)
    assert graphs(magi_compile(attend, dynamic_arg_dims={"x": {0: "unbacked"}}), sizes) == 1
    assert graphs(magi_compile(attend, dynamic_arg_dims={"x": 0}), (16, 0, 1, 2, 7, 300)) == 3
    hot = {"hot_sizes": 1, "hot_after": 2}
    compiled = magi_compile(attend, dynamic_arg_dims={"x": {0: "unbacked"}}, config_patch=hot)
    assert graphs(compiled, (4, 4, 4, 1, 1, 4, min(sizes))) == 1


def test_marks_of_the_user_come_back_after_the_call() -> None:
    x = torch.ones(4, 4)
    torch._dynamo.decorators.mark_unbacked(x, 1, specialize_on=[lambda size: size == 8])
    before = {name: repr(value) for name, value in vars(x).items()}
    magi_compile(lambda x: x + 1, dynamic_arg_dims={"x": {0: "unbacked"}})(x)
    assert {name: repr(value) for name, value in vars(x).items()} == before
