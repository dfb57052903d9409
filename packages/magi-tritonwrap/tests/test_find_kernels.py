# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined,index,redundant-expr,operator"
"""What `find_kernels` reads out of source, and that nothing in the code it reads can upset it."""

from __future__ import annotations

import functools
import linecache
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import tritonwrap_patterns as patterns
from magi_tritonwrap import find_kernels
from magi_tritonwrap._reader.evaluate import Resolver
from magi_tritonwrap._reader.source import function_node
from torch import Tensor


def found(body: Any) -> list[tuple[str, str]]:
    return [(kernel.name, kernel.how) for kernel in find_kernels(body).kernels]


def table_lookup(x: Tensor) -> None:
    patterns.TABLE["double"][(1,)](x, x, 4, BLOCK=4)


def table_scan(x: Tensor, name: str = "") -> None:
    patterns.TABLE[name][(1,)](x, x, 4, BLOCK=4)


def table_get(x: Tensor, name: str) -> None:
    patterns.TABLE.get(name)[(1,)](x, x, 4, BLOCK=4)


def display(x: Tensor, fast: bool) -> None:
    {True: patterns.double_kernel, False: patterns.increment_kernel}[fast][(1,)](x, x, 4, BLOCK=4)


def by_name(x: Tensor) -> None:
    getattr(patterns, "double_kernel")[(1,)](x, x, 4, BLOCK=4)  # noqa: B009


def rebound(x: Tensor) -> None:
    first, second = patterns.double_kernel, patterns.increment_kernel
    kernel = first
    if x.numel():
        kernel = second
    kernel[(1,)](x, x, 4, BLOCK=4)


def walrus(x: Tensor) -> None:
    (kernel := patterns.double_kernel)[(1,)](x, x, 4, BLOCK=4)
    del kernel


def either(x: Tensor) -> None:
    (None or patterns.double_kernel)[(1,)](x, x, 4, BLOCK=4)


def nested(x: Tensor) -> None:
    def launch(kernel: Any = patterns.double_kernel) -> None:
        kernel[(1,)](x, x, 4, BLOCK=4)

    launch()


def lambdas(x: Tensor) -> None:
    launch = lambda kernel: kernel[(1,)](x, x, 4, BLOCK=4)  # noqa: E731
    launch(patterns.increment_kernel)


def callback(x: Tensor) -> None:
    torch.cond(x.sum() > 0, table_lookup, table_scan, (x,))


def made_object(x: Tensor) -> None:
    patterns.ThinWrapper(patterns.double_kernel)[(1,)](x, x, 4, BLOCK=4)


def made_and_read(x: Tensor) -> None:
    wrapper = patterns.ThinWrapper(fn=patterns.double_kernel)
    wrapper.fn[(1,)](x, x, 4, BLOCK=4)


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
    table_lookup: ["double_kernel"],
    table_scan: BOTH,
    table_get: BOTH,
    display: BOTH,
    by_name: ["double_kernel"],
    rebound: BOTH,
    walrus: ["double_kernel"],
    either: ["double_kernel"],
    nested: ["double_kernel"],
    lambdas: ["increment_kernel"],
    callback: BOTH,
    made_object: ["double_kernel"],
    made_and_read: ["double_kernel"],
    bound: ["increment_kernel"],
    through_decorator: ["double_kernel"],
    through_no_grad: ["double_kernel"],
}


@pytest.mark.parametrize("body", CASES, ids=lambda body: body.__name__)
def test_expression(body: Any) -> None:
    assert sorted(name for name, _ in found(body)) == CASES[body]
    assert all(launch.in_key for launch in find_kernels(body).unresolved)


def test_how_is_the_way_to_the_kernel() -> None:
    assert found(table_lookup) == [("double_kernel", "global 'patterns'.TABLE['double']")]
    assert found(patterns.closure_body) == [("double_kernel", "closure variable 'kernel'")]
    (kernel,) = find_kernels(patterns.class_method).kernels
    assert kernel.how == "global 'Doubler'.kernel_of_class"
    assert str(kernel).startswith(f"double_kernel ({patterns.__file__}:{kernel.line}), global 'Doubler'")


def test_places() -> None:
    (kernel,) = find_kernels(patterns.helper_of_helper).kernels
    source = patterns.__file__
    assert (kernel.file, kernel.line) == (source, patterns.double_kernel.starting_line_number)
    assert kernel.launches == ((source, patterns.launch_double.__code__.co_firstlineno + 1),)


def test_wrapped_counts_only_if_every_launch_is() -> None:
    assert [kernel.wrapped for kernel in find_kernels(patterns.bare_and_wrapped).kernels] == [False]
    assert [kernel.wrapped for kernel in find_kernels(patterns.wrapped_in_all_spellings).kernels] == [True]
    assert [kernel.wrapped for kernel in find_kernels(patterns.wrapped_outside).kernels] == [True]


def test_factory_inside_the_body_has_no_kernel_yet() -> None:
    (kernel,) = find_kernels(patterns.factory_inside).kernels
    assert kernel.kernel is None
    assert kernel.name == "made_kernel"
    assert kernel.line == patterns.made_outside.starting_line_number


def test_extra_kernels() -> None:
    (kernel,) = find_kernels(patterns.twice, extra=[patterns.double_kernel]).kernels
    assert (kernel.kernel, kernel.how, kernel.launches) == (patterns.double_kernel, "listed in extra=", ())


def unresolved_parameter(x: Tensor, kernel: Any) -> None:
    kernel[(1,)](x, x, 4)


def unresolved_run(x: Tensor, kernel: Any) -> None:
    kernel.run(x, x, 4, grid=(1,), warmup=False)


def undefined(x: Tensor) -> None:
    not_defined_anywhere[(1,)](x, x, 4)  # type: ignore[name-defined]  # noqa: F821


UNRESOLVED = {
    unresolved_parameter: "the parameter 'kernel' is known at run time",
    unresolved_run: "the parameter 'kernel' is known at run time, so its attribute 'run' is known at run time",
    undefined: "'not_defined_anywhere' is not defined yet",
}


@pytest.mark.parametrize("body", UNRESOLVED, ids=lambda body: body.__name__)
def test_unresolved_launches_say_why(body: Any) -> None:
    report = find_kernels(body)
    (launch,) = report.unresolved
    assert launch.reason == UNRESOLVED[body]
    assert (launch.file, launch.line) == (__file__, body.__code__.co_firstlineno + 1)
    assert launch.in_key == (body is undefined)
    assert report.may_launch
    assert str(report).startswith("unresolved  ")


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
    (asks_lazy_module, "global 'lazy_module'.kernel is computed by its __getattr__"),
    (from_lazy_module, "lazy_module_of_find_kernels.kernel is computed by its __getattr__"),
    (asks_watchful, "global 'watchful'.kernel is computed by its __getattribute__"),
    (asks_hostile_module, "global 'hostile_module'.kernel is computed by its __getattr__"),
    (hostile_child.forward, "super of HostileChild.kernel is computed by a property"),
]


@pytest.mark.parametrize(("body", "reason"), OF_THE_USER, ids=[str(at) for at in range(len(OF_THE_USER))])
def test_code_that_computes_an_attribute_does_not_run(body: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, lazy_module.__name__, lazy_module)
    (launch,) = find_kernels(body).unresolved
    assert launch.reason.startswith(reason)


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


def recursive(x: Tensor, depth: int = 3) -> None:
    if depth:
        recursive(x, depth - 1)
        functools.partial(recursive, x)(depth)
    patterns.double_kernel[(1,)](x, x, 4, BLOCK=4)


def growing(x: Tensor, launch: Any = None) -> None:
    growing(x, functools.partial(growing, x, launch))
    patterns.double_kernel[(1,)](x, x, 4, BLOCK=4)


def circular_names(x: Tensor) -> None:
    a = b = x
    a = b
    b = a
    a[(1,)](b)
    patterns.double_kernel[(1,)](x, x, 4, BLOCK=4)


@pytest.mark.parametrize("body", [recursive, growing, circular_names], ids=lambda body: body.__name__)
def test_recursion_ends(body: Any) -> None:
    assert [name for name, _ in found(body)] == ["double_kernel"]


def test_source_that_is_gone_or_broken(tmp_path: Any) -> None:
    namespace: dict[str, Any] = {}
    path = tmp_path / "gone.py"
    path.write_text("def body(x):\n    return x\n")
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    path.write_text("def body(x:\n")
    assert function_node(namespace["body"]) is None
    report = find_kernels(namespace["body"])
    assert [launch.reason for launch in report.unresolved] == ["the source of body is not available"]


def test_two_lambdas_of_one_line() -> None:
    pair = (lambda x: patterns.double_kernel[(x,)](x), lambda x: patterns.increment_kernel[(x,)](x))
    assert [name for name, _ in found(pair[0])] == ["double_kernel"]
    assert [name for name, _ in found(pair[1])] == ["increment_kernel"]


@pytest.mark.parametrize("value", [None, 3, "text", print, len, object(), torch.relu, types.SimpleNamespace()])
def test_things_that_are_no_body(value: Any) -> None:
    assert not find_kernels(value).may_launch


def launch_partially(kernel: Any, x: Tensor) -> None:
    kernel[(1,)](x, x, 4, BLOCK=4)


def partial_called(x: Tensor) -> None:
    run = functools.partial(launch_partially, patterns.double_kernel)
    run(x)


def partial_handed_on(x: Tensor) -> None:
    yes = functools.partial(launch_partially, patterns.double_kernel)
    torch.cond(x.sum() > 0, yes, functools.partial(launch_partially, patterns.increment_kernel), (x,))


def partial_returned(x: Tensor) -> Any:
    return [functools.partial(launch_partially, kernel) for kernel in (patterns.double_kernel,)]


def partials_in_a_table(x: Tensor) -> Any:
    return {
        "double": functools.partial(launch_partially, patterns.double_kernel),
        "increment": functools.partial(launch_partially, patterns.increment_kernel),
    }


def partial_with_the_kernel_later(x: Tensor) -> None:
    run = functools.partial(launch_partially, x=x)
    run(patterns.double_kernel)


def partial_of_a_partial(x: Tensor) -> None:
    functools.partial(functools.partial(launch_partially, kernel=patterns.double_kernel), x=x)()


PARTIALS = {
    partial_called: ["double_kernel"],
    partial_handed_on: BOTH,
    partial_returned: ["double_kernel"],
    partials_in_a_table: BOTH,
    partial_with_the_kernel_later: ["double_kernel"],
    partial_of_a_partial: ["double_kernel"],
}


@pytest.mark.parametrize("body", PARTIALS, ids=lambda body: body.__name__)
def test_a_launch_through_a_partial_is_found_and_nothing_else(body: Any) -> None:
    assert sorted(name for name, _ in found(body)) == PARTIALS[body]
    assert find_kernels(body).unresolved == ()


def written(text: str, folder: Path, name: str = "body", **names: Any) -> Any:
    """The function `body` of a module with this text."""
    file = folder / "written.py"
    file.write_text(textwrap.dedent(text))
    namespace = {"__name__": "written", "patterns": patterns, **names}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    linecache.checkcache(str(file))
    return namespace[name]


def steps(body: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many expressions a search evaluates."""
    count = 0
    evaluate = Resolver._evaluate

    def counting(self: Any, *args: Any) -> Any:
        nonlocal count
        count += 1
        return evaluate(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Resolver, "_evaluate", counting)
        # Without the budget, which a loaded machine may use up.
        report = find_kernels(body, seconds=600)
        assert [described.name for described in report.kernels] == ["double_kernel"]
    return count


LONG = {
    "one name": ("x = x.reshape(2, -1).contiguous()", "patterns.double_kernel[(1,)](x, x, 4, BLOCK=4)"),
    "two names": ("x, y = y.reshape(x.size(0)), x.view(y.size(1))", "patterns.double_kernel[(1,)](x, y, 4, BLOCK=4)"),
    "choices": ("k = k if x.ndim == 2 else (j or k)\n    j = k", "k[(1,)](x, y, 4, BLOCK=4)"),
    "calls": ("y = helper(helper(x)) + helper(y)", "patterns.double_kernel[(1,)](x, y, 4, BLOCK=4)"),
    "methods": ("x = x.view(x.shape).T.to(x.dtype).view(y.shape)", "patterns.double_kernel[(1,)](x, y, 4, BLOCK=4)"),
}


@pytest.mark.parametrize("name", LONG)
def test_the_search_is_linear_in_the_code(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line, launch = LONG[name]
    counts = []
    for length in (8, 32):
        text = "def helper(z):\n    return z.view(-1)\ndef body(x, y):\n    k = j = patterns.double_kernel\n"
        body = written(text + f"    {line}\n" * length + f"    {launch}\n", tmp_path)
        counts.append(steps(body, monkeypatch))
    assert counts[1] < 6 * counts[0]


def test_helpers_that_call_the_next_one_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for depth in (5, 20):
        lines = [f"def f{at}(k, x):\n    y = f{at + 1}(k, x)\n    return f{at + 1}(k, y)\n" for at in range(depth)]
        last = f"def f{depth}(k, x):\n    k[(1,)](x, x, 4, BLOCK=4)\n    return x\n"
        text = "".join(lines) + last + "def body(x):\n    return f0(patterns.double_kernel, x)\n"
        counts.append(steps(written(text, tmp_path), monkeypatch))
    assert counts[1] < 8 * counts[0]


def swapped(x: Tensor) -> None:
    one, other = patterns.double_kernel, None
    for _ in range(3):
        one, other = other, one
    other[(1,)](x, x, 4, BLOCK=4)


def through_a_ring(x: Tensor) -> None:
    a = b = c = None
    for _ in range(9):
        a = b
        b = c
        c = a if x.ndim else patterns.increment_kernel
    b = a or patterns.double_kernel
    c[(1,)](x, x, 4, BLOCK=4)


def wrapped_again(x: Tensor) -> None:
    launch = functools.partial(launch_partially, patterns.double_kernel)
    for _ in range(3):
        launch = functools.partial(launch, x=x)
    launch()  # type: ignore[call-arg]


RINGS = {swapped: ["double_kernel"], through_a_ring: BOTH, wrapped_again: ["double_kernel"]}


@pytest.mark.parametrize("body", RINGS, ids=lambda body: body.__name__)
def test_names_that_refer_to_one_another(body: Any) -> None:
    assert sorted(name for name, _ in found(body)) == RINGS[body]


def test_a_search_that_takes_too_long_says_what_it_left() -> None:
    report = find_kernels(patterns.helper_of_helper, seconds=0.0)
    assert report.kernels == ()
    (left,) = report.unresolved
    assert left.text == "helper_of_helper(...)"
    assert left.reason == "the search took more than 0 s and left it unread"
    assert left.in_key
    assert report.may_launch
    assert find_kernels(patterns.helper_of_helper, seconds=60.0).unresolved == ()


def writes_into_an_optional(x: Tensor, out: Tensor | None = None, scale: float = 1.0) -> Tensor:
    if out is not None:
        out.copy_(x)
        out.stride(0)
        out.T.mul_(scale.real)
    return torch.not_there_yet.is_available() if scale else x


def test_a_default_of_none_launches_nothing() -> None:
    assert not find_kernels(writes_into_an_optional).may_launch
