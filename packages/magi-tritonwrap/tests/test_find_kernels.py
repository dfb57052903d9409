# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined,index,redundant-expr,operator"
# mypy: disable-error-code="misc,arg-type,no-any-return"
# ruff: noqa: PLW0108 - a body is a function, whose code is read
"""What `find_kernels` follows, and that nothing in the code it reads can upset it."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import tritonwrap_patterns as patterns
from magi_tritonwrap import find_kernels
from torch import Tensor


def names(body: Any) -> list[str]:
    return sorted(kernel.name for kernel in find_kernels(body).kernels)


double = patterns.module_level


def table_lookup(x: Tensor) -> None:
    patterns.TABLE["double"][(1,)](x, x, 4, BLOCK=4)


def table_scan(x: Tensor, name: str = "") -> None:
    patterns.TABLE[name][(1,)](x, x, 4, BLOCK=4)


def table_get(x: Tensor, name: str) -> None:
    patterns.TABLE.get(name)[(1,)](x, x, 4, BLOCK=4)


def by_name(x: Tensor) -> None:
    getattr(patterns, "double_kernel")[(1,)](x, x, 4, BLOCK=4)  # noqa: B009


def callback(x: Tensor) -> None:
    torch.cond(x.sum() > 0, table_lookup, table_scan, (x,))


def jit_called(x: Tensor) -> None:
    triton.jit(plain_function)[(1,)](x, x, 4)


def plain_function(x, out, n):
    pass


class Base:
    kernel = patterns.double_kernel

    def launch(self, x: Tensor) -> None:
        self.kernel[(1,)](x, x, 4, BLOCK=4)

    def inherited(self, x: Tensor) -> Tensor:
        return double(x)


def logged(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return wrapper


class Derived(Base, torch.nn.Module):
    kernel = patterns.increment_kernel

    def launch(self, x: Tensor) -> None:
        super_launch = Base.launch
        super_launch(self, x)

    @logged
    @staticmethod
    def over_static(x: Tensor) -> Tensor:
        return double(x)


class Layer(Base, torch.nn.Module):
    def step(self, x: Tensor) -> Tensor:
        return double(x)

    @logged
    def logged_step(self, x: Tensor) -> Tensor:
        return self.step(x)

    def of_own(self, x: Tensor) -> Tensor:
        return self.step(x)

    def of_base(self, x: Tensor) -> Tensor:
        return self.inherited(x)

    def of_super(self, x: Tensor) -> Tensor:
        return super().inherited(x)


class Launching(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return double(x)


layer = Layer()
layers = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sequential(Launching()))
BOTH, DOUBLE = ["double_kernel", "increment_kernel"], ["double_kernel"]
CASES: dict[str, tuple[Any, list[str]]] = {
    "item of a table": (table_lookup, BOTH),
    "item by a parameter": (table_scan, BOTH),
    "get of a table": (table_get, BOTH),
    "getattr of a module": (by_name, DOUBLE),
    "callback": (callback, BOTH),
    "bound method": (Derived().launch, BOTH),
    "class of this time": (lambda x: Layer().of_own(x), DOUBLE),
    "method that calls its parent's": (layer.of_super, DOUBLE),
    "decorator with wraps": (logged(table_lookup), BOTH),
    "decorator of torch": (torch.no_grad()(double), DOUBLE),
    "decorator over a static method": (patterns.calls(Derived.over_static), DOUBLE),
    "static method in a closure": (patterns.calls(Derived.__dict__["over_static"].__wrapped__), DOUBLE),
    "modules of torch": (lambda x: layers(x), DOUBLE),
    "method of self, not bound": (Layer.of_own, DOUBLE),
    "method of a base, not bound": (Layer.of_base, DOUBLE),
    "decorated method, not bound": (Layer.logged_step, DOUBLE),
    "one lambda of a line": ((lambda x: patterns.increment_kernel[(x,)](x), lambda x: double(x))[1], DOUBLE),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_found(name: str) -> None:
    body, found = CASES[name]
    assert names(body) == found
    assert find_kernels(body).unresolved == ()


def test_a_method_whose_class_has_another_one_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    body = Layer.of_own
    monkeypatch.setattr(Layer, "of_own", Layer.of_base)
    assert names(body) == []


HOW = {
    table_lookup: ("patterns.TABLE (global 'patterns' read by {here}.table_lookup)['double']", False),
    by_name: ("patterns.double_kernel (global 'patterns' read by {here}.by_name)", True),
    patterns.closure_body: ("closure variable 'launcher' of tritonwrap_patterns.through.<locals>.body", True),
    patterns.helper: ("global 'double_kernel' read by tritonwrap_patterns.launch_double", True),
    patterns.class_method: ("Doubler.kernel_of_class", False),
}


@pytest.mark.parametrize("body", HOW, ids=lambda body: body.__name__)
def test_how_is_the_way_to_the_kernel(body: Any) -> None:
    how, is_named = HOW[body]
    kernel = find_kernels(body).kernels[0]
    assert (kernel.how.removeprefix("tritonwrap_"), kernel.is_named) == (
        how.format(here=__name__).removeprefix("tritonwrap_"),
        is_named,
    )
    assert (kernel.file, kernel.line) == (patterns.__file__, patterns.double_kernel.starting_line_number)
    assert str(kernel) == f"double_kernel ({kernel.file}:{kernel.line}), {kernel.how}"


def test_a_function_that_names_triton_jit_may_make_a_kernel() -> None:
    (kernel,) = find_kernels(jit_called).kernels
    assert (kernel.kernel, kernel.name, kernel.line) == (None, "jit_called", jit_called.__code__.co_firstlineno)
    for name in ("factory_inside", "kernel_with_a_closure"):
        (kernel,) = (one for one in find_kernels(patterns.PATTERNS[name].body).kernels if one.kernel is None)
        assert re.search(r"made at run time by .*make_\w+_kernel, which names triton\.jit$", str(kernel))


def test_extra_kernels() -> None:
    (kernel,) = find_kernels(patterns.twice, extra=[patterns.double_kernel]).kernels
    assert (kernel.kernel, kernel.how, kernel.launches) == (patterns.double_kernel, "listed in extra=", ())


class HostileParent:
    @property
    def kernel(self) -> Any:
        raise RuntimeError


class HostileChild(HostileParent):
    def forward(self, x: Any) -> Any:
        return super().kernel[(1,)](x)


def lazily(name: str) -> Any:
    raise ImportError(name)


lazy_module = types.ModuleType("lazy_module_of_find_kernels")
lazy_module.__dict__["__getattr__"] = lazily
hostile_child = HostileChild()


def from_lazy_module(x: Any) -> Any:
    from lazy_module_of_find_kernels import kernel  # type: ignore[import-not-found]

    return kernel[(1,)](x)


OF_THE_USER: list[Any] = [
    lambda x: lazy_module.kernel[(1,)](x),
    from_lazy_module,
    hostile_child.forward,
]


@pytest.mark.parametrize("body", OF_THE_USER, ids=[str(at) for at in range(len(OF_THE_USER))])
def test_code_that_computes_an_attribute_does_not_run(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, lazy_module.__name__, lazy_module)
    (launch,) = find_kernels(body).unresolved
    assert launch.text.endswith("kernel[...]")
    assert (launch.file, launch.is_launch) == (__file__, True)
    assert str(find_kernels(body)) == f"unresolved  {launch.text} ({__file__}:{launch.line}): {launch.reason}"


def of_another_release(x: Tensor) -> Any:
    return torch.not_there_yet.is_available()


@pytest.mark.parametrize(
    "value", [None, 3, "text", print, len, object(), torch.relu, types.SimpleNamespace(), of_another_release]
)
def test_things_that_are_no_body(value: Any) -> None:
    assert not find_kernels(value).may_launch


# What looks like a launch and is none.

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


def none_defaults(x: Tensor, out: Any = None, bias: Any = None, scale: float = 1.0) -> Tensor:
    if out is not None:
        out.copy_(x)
        out.T.mul_(scale.real)
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
    """pytest replaces an assert by calls of its own, and keeps each part of it in a variable."""
    assert body is not asserts or any(name.startswith("@pytest") for name in body.__code__.co_names)
    report = find_kernels(body)
    assert (str(report), report.doubtful) == ("no Triton launch", ())
    assert not report.only_a_run_tells


@pytest.mark.parametrize(
    "body", [lambda x, o: o.work(x), lambda x, o: o(x + 1), lambda x, o: [o][0].work(x)], ids=["method", "call", "item"]
)
def test_calls_that_only_a_run_can_tell(body: Callable[..., Any]) -> None:
    report = find_kernels(body)
    assert report.only_a_run_tells
    assert len(report.doubtful) == 1
    assert not find_kernels(lambda x: x.work()).kernels
    assert not find_kernels(patterns.module_level).only_a_run_tells
    assert not find_kernels(patterns.twice).only_a_run_tells


EFFECTS: dict[str, tuple[Callable[..., Any], str]] = {
    "print": (lambda x: print(x.shape), "writes to the terminal"),  # noqa: T201 - what is tested
    "save": (lambda x: torch.save(x, "file"), "reads or writes a file"),
    "all_reduce": (lambda x: torch.distributed.all_reduce(x), "communicates with other ranks"),
    # torch makes the attribute when it is asked for
    "collective": (lambda x: torch.ops._c10d_functional.wait_tensor(x), "communicates with other ranks"),
    "path": (lambda x, folder: (folder / "log").write_text(str(x.shape)), "may read or write a stream"),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_effects_are_noted(name: str) -> None:
    body, what = EFFECTS[name]
    (effect,) = find_kernels(body).effects
    assert effect.endswith(f"(...) {what} ({__file__}:{body.__code__.co_firstlineno})")
