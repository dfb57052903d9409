# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined,index,redundant-expr,operator"
"""What `find_kernels` follows, and that nothing in the code it reads can upset it."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import pytest
import torch
import triton
import tritonwrap_patterns as patterns
from magi_tritonwrap import find_kernels
from torch import Tensor


def found(body: Any) -> list[tuple[str, str]]:
    return [(kernel.name, kernel.how) for kernel in find_kernels(body).kernels]


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


class Derived(Base):
    kernel = patterns.increment_kernel

    def launch(self, x: Tensor) -> None:
        super_launch = Base.launch
        super_launch(self, x)


derived = Derived()
bound = derived.launch
decorated = functools.wraps(table_lookup)(lambda *args: table_lookup(*args))  # noqa: PLW0108


def through_decorator(x: Tensor) -> None:
    decorated(x)


@torch.no_grad()
def without_gradients(x: Tensor) -> None:
    patterns.double_kernel[(1,)](x, x, 4, BLOCK=4)


def through_no_grad(x: Tensor) -> None:
    without_gradients(x)


BOTH = ["double_kernel", "increment_kernel"]
CASES = {
    table_lookup: BOTH,
    table_scan: BOTH,
    table_get: BOTH,
    by_name: ["double_kernel"],
    callback: BOTH,
    bound: BOTH,
    through_decorator: BOTH,
    through_no_grad: ["double_kernel"],
}


@pytest.mark.parametrize("body", CASES, ids=lambda body: body.__name__)
def test_expression(body: Any) -> None:
    assert sorted(name for name, _ in found(body)) == CASES[body]
    assert find_kernels(body).unresolved == ()


HOW = {
    table_lookup: ("patterns.TABLE (global 'patterns' read by {here}.table_lookup)['double']", False),
    by_name: ("patterns.double_kernel (global 'patterns' read by {here}.by_name)", True),
    patterns.closure_body: ("closure variable 'kernel' of tritonwrap_patterns._closure.<locals>.closure", True),
    patterns.helper_of_helper: ("global 'double_kernel' read by tritonwrap_patterns.launch_double", True),
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


def test_extra_kernels() -> None:
    (kernel,) = find_kernels(patterns.twice, extra=[patterns.double_kernel]).kernels
    assert (kernel.kernel, kernel.how, kernel.launches) == (patterns.double_kernel, "listed in extra=", ())


class Hostile:
    """Runs code on every access, and none of it may run here."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __hash__(self) -> int:
        raise RuntimeError

    def __bool__(self) -> bool:
        raise RuntimeError

    @property
    def kernel(self) -> Any:
        raise RuntimeError

    @functools.cached_property
    def cached(self) -> Any:
        raise RuntimeError


class Watchful:
    """Runs code on every access, the names that Python asks for included."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class HostileModule(torch.nn.Module):
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


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
watchful, hostile_module, hostile_child = Watchful(), HostileModule(), HostileChild()


def from_lazy_module(x: Any) -> Any:
    from lazy_module_of_find_kernels import kernel  # type: ignore[import-not-found]

    return kernel[(1,)](x)


def asks_lazy_module(x: Any) -> Any:
    return lazy_module.kernel[(1,)](x)


def asks_watchful(x: Any) -> Any:
    return watchful.kernel[(1,)](x)


def asks_hostile_module(x: Any) -> Any:
    return hostile_module.kernel[(1,)](x)


OF_THE_USER: list[Any] = [
    asks_lazy_module,
    from_lazy_module,
    asks_watchful,
    asks_hostile_module,
    hostile_child.forward,
]


@pytest.mark.parametrize("body", OF_THE_USER, ids=[str(at) for at in range(len(OF_THE_USER))])
def test_code_that_computes_an_attribute_does_not_run(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, lazy_module.__name__, lazy_module)
    (launch,) = find_kernels(body).unresolved
    assert launch.text.endswith("kernel[...]")
    assert (launch.file, launch.is_launch) == (__file__, True)
    assert str(find_kernels(body)) == f"unresolved  {launch.text} ({__file__}:{launch.line}): {launch.reason}"


class HostileDict(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError

    def __getitem__(self, key: str) -> Any:
        raise RuntimeError


class HostileDescriptor:
    def __get__(self, instance: object, owner: type) -> Any:
        raise RuntimeError


class WithDescriptor:
    kernel = HostileDescriptor()


hostile, hostile_dict, with_descriptor = Hostile(), HostileDict(kernel=patterns.double_kernel), WithDescriptor()


def reads_hostile_things(x: Tensor) -> None:
    hostile.kernel[(1,)](x)
    hostile.cached[(1,)](x)
    hostile.anything[(1,)](x)
    hostile[(1,)](x)
    hostile(x)
    with_descriptor.kernel[(1,)](x)
    hostile_dict["kernel"][(1,)](x, x, 4, BLOCK=4)
    {hostile: 1}[hostile][(1,)](x)


def test_no_code_of_the_user_runs() -> None:
    assert [name for name, _ in found(reads_hostile_things)] == ["double_kernel"]


def test_two_lambdas_of_one_line() -> None:
    pair = (lambda x: patterns.double_kernel[(x,)](x), lambda x: patterns.increment_kernel[(x,)](x))
    assert [name for name, _ in found(pair[0])] == ["double_kernel"]
    assert [name for name, _ in found(pair[1])] == ["increment_kernel"]


@pytest.mark.parametrize("value", [None, 3, "text", print, len, object(), torch.relu, types.SimpleNamespace()])
def test_things_that_are_no_body(value: Any) -> None:
    assert not find_kernels(value).may_launch


def writes_into_an_optional(x: Tensor, out: Tensor | None = None, scale: float = 1.0) -> Tensor:
    if out is not None:
        out.copy_(x)
        out.stride(0)
        out.T.mul_(scale.real)
    return torch.not_there_yet.is_available() if scale else x


def test_a_default_of_none_launches_nothing() -> None:
    assert not find_kernels(writes_into_an_optional).may_launch


def checked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    assert x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr(), "the two share memory"
    assert x.shape
    assert all(size > 0 for size in x.shape)
    return x * 2


def test_an_assert_as_pytest_writes_it_calls_nothing_unknown() -> None:
    """pytest replaces it by calls of its own, and keeps each part of it in a variable."""
    assert any(name.startswith("@pytest") for name in checked.__code__.co_names)
    found = find_kernels(checked)
    assert (found.unresolved, found.doubtful) == ((), ())
