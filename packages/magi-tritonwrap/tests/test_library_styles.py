# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc,arg-type,attr-defined,no-any-return"
"""Kernels reached the ways that libraries reach them: decorators of their own, launchers, inner ops, lazy tables."""

from __future__ import annotations

import contextlib
import functools
import re
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton
import tritonwrap_patterns as patterns
from magi_tritonwrap import (
    OpaqueFallbackWarning,
    UnsupportedKernelError,
    capture_launches,
    find_kernels,
    make_see_through,
    register_launcher,
    see_through_report,
)
from magi_tritonwrap._cache_key import CacheKeyEntry
from magi_tritonwrap.testing import aot_graphs, launches_of
from torch import Tensor
from triton.runtime.autotuner import Autotuner


if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ops


pytestmark = pytest.mark.usefixtures("stub")


def names(body: Callable[..., Any]) -> list[str]:
    return [kernel.name for kernel in find_kernels(body).kernels]


def launch_count(op: Any) -> int:
    (graph,) = aot_graphs(op, torch.ones(300))
    assert op not in {node.target for node in graph.graph.nodes}
    return len(launches_of(graph))


def double(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    patterns.double_kernel[patterns.blocks(x.numel())](x, out, x.numel(), BLOCK=128)
    return out


def calls(fn: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor) -> Tensor:
        result: Tensor = fn(x)
        return result

    return body


# Decorators that libraries write: over a static method, without functools.wraps, as a class.


def guard(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    return wrapper


def unmarked(fn):
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    return wrapper


def of_class(method):
    def wrapper(cls, *args):
        return method.__func__(cls, *args)

    return wrapper


def bound(method):
    def wrapper(cls, *args):
        return method.__get__(None, cls)(*args)

    return wrapper


class Decorated:
    @guard
    @staticmethod
    def over_static(x: Tensor) -> Tensor:
        return double(x)

    @unmarked
    @staticmethod
    def unmarked_over_static(x: Tensor) -> Tensor:
        return double(x)

    @of_class
    @classmethod
    def over_class(cls, x: Tensor) -> Tensor:
        return cls.over_static(x)

    @bound
    @classmethod
    def bound_to_class(cls, x: Tensor) -> Tensor:
        return cls.over_static(x)


def static_in_a_closure() -> Callable[..., Any]:
    method = Decorated.__dict__["over_static"].__wrapped__
    assert isinstance(method, staticmethod)
    return calls(method)


class CallCounter:
    def __init__(self, fn):
        self.fn = fn

    def __call__(self, *args):
        return self.fn(*args)


counted = CallCounter(double)
twice_unmarked = unmarked(unmarked(double))


@functools.singledispatch
def dispatched(x: Any) -> Tensor:
    raise TypeError(type(x))


dispatched.register(torch.Tensor, double)


def without_mark() -> Callable[..., Any]:
    wrapper = torch.no_grad()(double)
    del wrapper.__wrapped__
    return wrapper


of_torch = without_mark()


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(calls(Decorated.over_static), id="wraps over a static method"),
        pytest.param(calls(Decorated.unmarked_over_static), id="no wraps over a static method"),
        pytest.param(lambda x: Decorated.over_class(Decorated, x), id="class method, by its function"),
        pytest.param(lambda x: Decorated.bound_to_class(Decorated, x), id="class method, bound"),
        pytest.param(static_in_a_closure(), id="static method in a closure"),
        pytest.param(calls(counted), id="decorator that is a class"),
        pytest.param(calls(twice_unmarked), id="two decorators without wraps"),
        pytest.param(calls(of_torch), id="torch's decorator without wraps"),
        pytest.param(calls(dispatched), id="singledispatch"),
    ],
)
def test_decorated_function(body: Callable[..., Any], ops: Ops) -> None:
    assert names(body) == ["double_kernel"]
    op = ops.define("decorated", body)
    make_see_through(op, body)
    assert launch_count(op) == 1


# Launchers around kernels.


class Entry(triton.KernelInterface):
    """As `@libentry()`: compiled kernels in a table, launched without Triton's own `run` from the second call on."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.cache: dict[object, Any] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self.fn.run(*args, **kwargs)
        self.cache[compiled.hash] = compiled
        return compiled


class SecondEntry(triton.KernelInterface):
    def __init__(self, kernel: Any) -> None:
        self.jit_function = kernel

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        return self.jit_function.run(*args, grid=grid, warmup=warmup, **kwargs).result()


class Tuner(Autotuner):
    def run(self, *args: Any, **kwargs: Any) -> Any:
        assert self.best_config.num_warps, "there is one after the first benchmark only"
        return super().run(*args, **kwargs)


class Foreign:
    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def run(self, *args: Any, grid: Any, **kwargs: Any) -> Any:
        return self.kernel.run(*args, grid=grid, warmup=False, **kwargs).hash

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.run(*args, grid=grid, **kwargs)


register_launcher(Foreign, "kernel")

entry = Entry(patterns.double_kernel)
second_entry = SecondEntry(patterns.double_kernel)
nested_entry = Entry(SecondEntry(patterns.double_kernel))
tuner = Tuner(
    patterns.double_kernel,
    patterns.double_kernel.arg_names,
    [triton.Config({"BLOCK": 128})],
    [],
    None,
    None,
)
tuned_entry = Entry(tuner)
heuristic_entry = Entry(triton.heuristics({"BLOCK": lambda args: 128})(patterns.double_kernel))
foreign = Foreign(patterns.double_kernel)


def through(launcher: Any, **options: Any) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        launcher[patterns.blocks(x.numel())](x, out, x.numel(), **options)
        return out

    return body


def by_run(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    entry.run(x, out, x.numel(), BLOCK=128, grid=patterns.blocks(x.numel()), warmup=False)
    return out


def by_launcher_kept(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    launch = entry[patterns.blocks(x.numel())]
    launch(x, out, x.numel(), BLOCK=128)
    return out


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(through(entry, BLOCK=128), id="fn"),
        pytest.param(through(second_entry, BLOCK=128), id="jit_function"),
        pytest.param(through(nested_entry, BLOCK=128), id="launcher in a launcher"),
        pytest.param(through(tuner), id="autotuner of a library"),
        pytest.param(through(tuned_entry), id="autotuner of a library in a launcher"),
        pytest.param(through(heuristic_entry), id="heuristics in a launcher"),
        pytest.param(through(foreign, BLOCK=128), id="registered"),
        pytest.param(by_run, id="run"),
        pytest.param(by_launcher_kept, id="launcher kept"),
    ],
)
def test_launcher(body: Callable[..., Any], ops: Ops) -> None:
    (kernel,) = find_kernels(body).kernels
    assert kernel.name == "double_kernel"
    assert not isinstance(kernel.kernel, Entry | SecondEntry | Foreign)
    op = ops.define("launcher", body)
    make_see_through(op, body)
    (graph,) = aot_graphs(op, torch.ones(300))
    (launch,) = launches_of(graph)
    assert launch.cloned == ["out"]
    key = CacheKeyEntry("launcher", body, find_kernels(body))
    assert key.src
    assert key.state == "keyed"


def test_launchers_are_as_before_outside_a_scope() -> None:
    before = [vars(cls)["run"] for cls in (Entry, SecondEntry, Tuner, Foreign)]
    with capture_launches(drop=True):
        assert Entry.run is not before[0]
        assert through(entry, BLOCK=128)(torch.ones(4)).shape == (4,)
    assert [vars(cls)["run"] for cls in (Entry, SecondEntry, Tuner, Foreign)] == before
    assert entry.cache == {}


@pytest.mark.parametrize("value", [entry, types.SimpleNamespace(), type("NoRun", (), {})])
def test_only_classes_with_run_are_registered(value: Any) -> None:
    sentences = r"is not a class with a method run\. Give a class with a method run"
    with pytest.raises(UnsupportedKernelError, match=sentences):
        register_launcher(value, "kernel")


# Operators of other libraries inside a body.


def custom_op(ops: Ops, name: str, body: Callable[..., Any]) -> Any:
    op = torch.library.custom_op(f"{ops.namespace}::{name}", body, mutates_args=())
    op.register_fake(torch.empty_like)
    return op


def by_torch_ops(inner: Any) -> Callable[[Tensor], Tensor]:
    namespace, name = inner._qualname.split("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    return calls(packet)


def in_a_helper(inner: Any) -> Callable[[Tensor], Tensor]:
    def helper(x: Tensor) -> Tensor:
        result: Tensor = inner(x)
        return result

    return calls(helper)


@pytest.mark.parametrize("call", [calls, by_torch_ops, in_a_helper])
def test_inner_custom_op_is_seen_through(call: Callable[..., Any], ops: Ops) -> None:
    inner = custom_op(ops, "inner", double)
    body = call(inner)
    op = ops.define("outer", body)
    report = make_see_through(op, body)

    assert [kernel.name for kernel in report.kernels] == ["double_kernel"]
    assert [(one.op, one.opaque_because) for one in report.inner_ops] == [(f"{ops.namespace}::inner", "")]
    assert re.search(rf"inner op    {ops.namespace}::inner, .* (read by|of) .*: seen through here", str(report))
    assert str(report).count("seen through here") == 1
    assert launch_count(op) == 1
    (alone,) = aot_graphs(inner, torch.ones(300))
    assert launches_of(alone) == [], "called by itself it stays as its library made it"


def test_an_inner_op_that_cannot_be_traced_is_kept_and_named(ops: Ops) -> None:
    def reads(x: Tensor) -> Tensor:
        assert x.sum().item() < 1e9
        return double(x)

    inner = custom_op(ops, "reads", reads)
    body = calls(inner)
    op = ops.define("outer", body)
    make_see_through(op, body)
    with pytest.warns(OpaqueFallbackWarning, match="reads stays opaque to the compiler"):
        (graph,) = aot_graphs(op, torch.ones(300))
    assert inner._opoverload in {node.target for node in graph.graph.nodes}
    (named,) = see_through_report(op).inner_ops
    assert named.opaque_because.startswith(
        "its body cannot be traced. GuardOnDataDependentSymNode: it branches on data of a tensor ("
    )


def test_ops_inside_that_are_named_as_opaque(ops: Ops) -> None:
    def launches_an_argument(x: Tensor) -> Tensor:
        x.kernel[(1,)](x)
        return x.clone()

    without_body = ops.define("without_body", double)
    at_run_time = custom_op(ops, "at_run_time", launches_an_argument)
    ruled = custom_op(ops, "ruled", double)
    rule = lambda mode, op, types, args, kwargs: mode.__torch_dispatch__(op, types, args, kwargs)  # noqa: E731
    ruled.register_torch_dispatch(torch._subclasses.functional_tensor.FunctionalTensorMode, rule)

    def body(x: Tensor) -> Tensor:
        return ruled(at_run_time(without_body(double(x))))

    reasons = {one.op.partition("::")[2]: one.opaque_because for one in find_kernels(body).inner_ops}
    assert reasons["without_body"] == "it has no Python body that can be read"
    assert reasons["at_run_time"].startswith("which kernels it launches is known only at run time: x.kernel[...] (")
    assert reasons["ruled"] == "its library has a rule of its own for it in compiled graphs"
    assert "opaque, it has no Python body" in str(find_kernels(body))


def test_inner_ops_that_launch_nothing_are_not_named(ops: Ops) -> None:
    plain = custom_op(ops, "plain", patterns.twice)

    def body(x: Tensor) -> Tensor:
        return plain(torch.ops.aten.sin(x))

    report = find_kernels(body)
    assert report.inner_ops == ()
    assert not report.may_launch


# Tables, globals and attributes that something fills later.


LAZY_TABLE: dict[str, Any] = {}
OTHER_ENTRIES: dict[str, Any] = {"other": len}
LAZY_LIST: list[Any] = []
LAZY_GLOBAL: Any = None
lazy_holder = types.SimpleNamespace(kernel=None)


def from_table(x: Tensor) -> Tensor:
    return LAZY_TABLE["double"](x)


def from_get(x: Tensor) -> Tensor:
    return LAZY_TABLE.get("double")(x)


def from_table_with_others(x: Tensor) -> Tensor:
    return OTHER_ENTRIES["double"](x)


def from_list(x: Tensor) -> Tensor:
    return LAZY_LIST[0](x)


def from_global(x: Tensor) -> Tensor:
    return LAZY_GLOBAL(x)


def from_attribute(x: Tensor) -> Tensor:
    return lazy_holder.kernel(x)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (from_table, "LAZY_TABLE[...]: what it calls is known at run time"),
        (from_get, "LAZY_TABLE.get(...): what it calls is known at run time"),
        (from_table_with_others, "OTHER_ENTRIES[...]: what it calls is known at run time"),
        (from_list, "LAZY_LIST[...]: what it calls is known at run time"),
        (from_global, "LAZY_GLOBAL: it is None until something sets it"),
        (from_attribute, "lazy_holder.kernel: it is None until something sets it"),
    ],
)
def test_what_is_filled_later(body: Callable[..., Any], reason: str, ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    report = find_kernels(body)
    assert report.kernels == ()
    left = [*report.unresolved, *report.doubtful]
    assert [f"{launch.text}: {launch.reason}" for launch in left] == [reason]
    assert left[0].line == body.__code__.co_firstlineno + 1
    assert report.only_a_run_tells
    op = ops.define("lazy", body)
    make_see_through(op, body)
    monkeypatch.setitem(LAZY_TABLE, "double", double)
    monkeypatch.setitem(OTHER_ENTRIES, "double", double)
    monkeypatch.setitem(globals(), "LAZY_LIST", [double])
    monkeypatch.setitem(globals(), "LAZY_GLOBAL", double)
    monkeypatch.setattr(lazy_holder, "kernel", double)
    assert launch_count(op) == 1
    assert names(body) == ["double_kernel"]


# What looks like a hole and is none.

SETTINGS: dict[str, Any] = {}
CACHE: dict[object, Tensor] = {}


def unpacks(x: Tensor, pairs: Any = (), scope: Any = None) -> Tensor:
    for left, (middle, right) in pairs:
        left.add_(middle).view(right)
    kept = {name: value.contiguous() for name, value in pairs}
    with scope as (third, _), contextlib.nullcontext(x) as fourth:
        fourth.to(third)
    match pairs:
        case [first, *rest]:
            first.select(rest)
        case {"x": value, **others}:
            value.sum(others)
    return x + len(kept)


def cached(x: Tensor) -> Tensor:
    if x.shape in CACHE:
        return CACHE[x.shape].clone()
    return x.to(SETTINGS.get("dtype", x.dtype))


def none_defaults(x: Tensor, out: Any = None, bias: Any = None) -> Tensor:
    out.copy_(x)
    bias.stride(0)
    return bias.T.contiguous()


def closes_over(x: Tensor) -> Tensor:
    total: Any = None

    def add(y: Tensor) -> None:
        nonlocal total
        total = y if total is None else total.add(y)

    add(x)
    return total.clone()


def asserts(x: Tensor, other: Tensor) -> Tensor:
    assert x.untyped_storage().data_ptr() != other.untyped_storage().data_ptr(), f"{x.shape} is lost"
    assert all(size > 0 for size in x.shape)
    assert {size: size + 1 for size in x.shape}
    with torch.no_grad():
        return x.add(other)


@pytest.mark.parametrize("body", [unpacks, cached, none_defaults, closes_over, asserts])
def test_tensors_behind_unknown_names_are_no_launches(body: Callable[..., Any]) -> None:
    report = find_kernels(body)
    assert str(report) == "no Triton launch"
    assert not report.only_a_run_tells, report.doubtful


def test_reason_is_one_line_a_launch() -> None:
    text = str(find_kernels(from_global))
    assert re.fullmatch(r"unresolved  LAZY_GLOBAL \(.*:\d+\): it is None until something sets it", text)


def logged(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return wrapper


class Base:
    def inherited(self, x: Tensor) -> Tensor:
        return double(x)


class Layer(Base, torch.nn.Module):
    def step(self, x: Tensor) -> Tensor:
        return double(x)

    @staticmethod
    def static_step(x: Tensor) -> Tensor:
        return double(x)

    @logged
    def logged_step(self, x: Tensor) -> Tensor:
        return self.step(x)

    @property
    def chosen(self) -> Callable[[Tensor], Tensor]:
        return self.static_step

    def of_own(self, x: Tensor) -> Tensor:
        return self.step(x)

    def of_base(self, x: Tensor) -> Tensor:
        return self.inherited(x)

    def of_static(self, x: Tensor) -> Tensor:
        return self.static_step(x)

    def of_property(self, x: Tensor) -> Tensor:
        return self.chosen(x)


@pytest.mark.parametrize("name", ["of_own", "of_base", "of_static", "of_property", "logged_step"])
def test_methods_of_self_in_a_method_that_is_not_bound(name: str) -> None:
    body = getattr(Layer, name)
    assert names(body) == ["double_kernel"]
    assert find_kernels(body).may_launch


def test_a_method_whose_class_has_another_one_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    body = Layer.of_own
    monkeypatch.setattr(Layer, "of_own", Layer.of_base)
    assert names(body) == []
