# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc,arg-type,attr-defined,no-any-return"
# ruff: noqa: PLW0108 - a body is a function, whose code is read
"""Kernels reached the ways that libraries reach them: launchers of their own, inner ops, lazy tables and modules."""

from __future__ import annotations

import importlib
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import tritonwrap_patterns as patterns
from graph_questions import Ops, launch_count, launch_of
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


pytestmark = pytest.mark.usefixtures("stub")


# Launchers around kernels.


double = patterns.module_level


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
config = triton.Config({"BLOCK": 128})
tuner = Tuner(patterns.double_kernel, patterns.double_kernel.arg_names, [config], [], None, None)


LAUNCHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "launcher": patterns.through(entry, BLOCK=128),
    "launcher in a launcher": patterns.through(Entry(SecondEntry(patterns.double_kernel)), BLOCK=128),
    "autotuner of a library": patterns.through(tuner),
    "autotuner of a library in a launcher": patterns.through(Entry(tuner)),
    "heuristics in a launcher": patterns.through(Entry(patterns.heuristics_kernel)),
    "registered": patterns.through(Foreign(patterns.double_kernel), BLOCK=128),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher(name: str, ops: Ops) -> None:
    body = LAUNCHERS[name]
    (kernel,) = find_kernels(body).kernels
    assert kernel.name == "double_kernel"
    assert not isinstance(kernel.kernel, Entry | SecondEntry | Foreign)
    launch = launch_of(ops.seen("launcher", body))
    assert launch.cloned == ["out"]
    key = CacheKeyEntry("launcher", body, find_kernels(body))
    assert key.src
    assert key.state == "keyed"


def test_launchers_are_as_before_outside_a_scope() -> None:
    before = [vars(cls)["run"] for cls in (Entry, SecondEntry, Tuner, Foreign)]
    with capture_launches(drop=True):
        assert Entry.run is not before[0]
        assert LAUNCHERS["launcher"](torch.ones(4)).shape == (4,)
    assert [vars(cls)["run"] for cls in (Entry, SecondEntry, Tuner, Foreign)] == before
    assert entry.cache == {}


@pytest.mark.parametrize("value", [entry, types.SimpleNamespace(), type("NoRun", (), {})])
def test_only_classes_with_run_are_registered(value: Any) -> None:
    sentences = r"is not a class with a method run\. Give a class with a method run"
    with pytest.raises(UnsupportedKernelError, match=sentences):
        register_launcher(value, "kernel")


# Operators of other libraries inside a body.


def by_torch_ops(inner: Any) -> Callable[[Tensor], Tensor]:
    namespace, name = inner._qualname.split("::")
    return patterns.calls(getattr(getattr(torch.ops, namespace), name))


@pytest.mark.parametrize("call", [patterns.calls, by_torch_ops])
def test_inner_custom_op_is_seen_through(call: Callable[..., Any], ops: Ops) -> None:
    inner = ops.custom_op("inner", double)
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

    inner = ops.custom_op("reads", reads)
    body = patterns.calls(inner)
    op = ops.seen("outer", body)
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
    at_run_time = ops.custom_op("at_run_time", launches_an_argument)
    ruled = ops.custom_op("ruled", double)
    rule = lambda mode, op, types, args, kwargs: mode.__torch_dispatch__(op, types, args, kwargs)  # noqa: E731
    ruled.register_torch_dispatch(torch._subclasses.functional_tensor.FunctionalTensorMode, rule)

    def body(x: Tensor) -> Tensor:
        return ruled(at_run_time(without_body(double(x))))

    reasons = {one.op.partition("::")[2]: one.opaque_because for one in find_kernels(body).inner_ops}
    assert reasons["without_body"] == "torch keeps no Python body of it"
    assert reasons["at_run_time"].startswith("which kernels it launches is known only at run time: x.kernel[...] (")
    assert reasons["ruled"] == "its library has a rule of its own for it in compiled graphs"
    assert "opaque, torch keeps no Python body" in str(find_kernels(body))
    op = ops.seen("around", body)
    (graph,) = aot_graphs(op, torch.ones(300))
    assert len(launches_of(graph)) == 1
    assert without_body in {node.target for node in graph.graph.nodes}


def test_inner_ops_that_launch_nothing_are_not_named(ops: Ops) -> None:
    plain = ops.custom_op("plain", patterns.twice)

    def body(x: Tensor) -> Tensor:
        return plain(torch.ops.aten.sin(x))

    report = find_kernels(body)
    assert report.inner_ops == ()
    assert not report.may_launch


def test_an_inner_op_is_looked_for_in_the_namespace_that_the_body_names(ops: Ops) -> None:
    other = torch.library.Library(f"{ops.namespace}_other", "FRAGMENT")
    for library in (ops.library, other):
        for name in ("rows", "cols"):
            library.define(f"{name}(Tensor x) -> Tensor")

    def named(body: str) -> list[str]:
        made: dict[str, Any] = {"torch": torch}
        exec(f"def body(x):\n    return {body}", made)
        return sorted(one.op.removeprefix(ops.namespace) for one in find_kernels(made["body"]).inner_ops)

    one = f"torch.ops.{ops.namespace}"
    assert named(f"{one}.rows(torch.ops.{ops.namespace}_other.cols.default(x))") == ["::rows", "_other::cols"]
    assert named(f"getattr({one}, 'rows')(x)") == ["::rows"]
    assert named(f"(lambda held: held.rows(x))({one})") == ["::rows"]
    other._destroy()


# Tables, globals and attributes that something fills later.


LAZY_TABLE: dict[str, Any] = {}
LAZY_GLOBAL: Any = None
lazy_holder = types.SimpleNamespace(kernel=None)
LAZY = [
    (lambda x: LAZY_TABLE["double"](x), "LAZY_TABLE[...]: what it calls is known at run time"),
    (lambda x: LAZY_TABLE.get("double")(x), "LAZY_TABLE.get(...): what it calls is known at run time"),
    (lambda x: LAZY_GLOBAL(x), "LAZY_GLOBAL: it is None until something sets it"),
    (lambda x: lazy_holder.kernel(x), "lazy_holder.kernel: it is None until something sets it"),
]


@pytest.mark.parametrize(("body", "reason"), LAZY, ids=[str(at) for at in range(len(LAZY))])
def test_what_is_filled_later(body: Callable[..., Any], reason: str, ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    report = find_kernels(body)
    assert report.kernels == ()
    (left,) = (*report.unresolved, *report.doubtful)
    text, _, why = reason.partition(": ")
    assert str(left) == f"{text} ({__file__}:{body.__code__.co_firstlineno}): {why}"
    assert report.only_a_run_tells
    op = ops.seen("lazy", body)
    monkeypatch.setitem(LAZY_TABLE, "double", double)
    monkeypatch.setitem(globals(), "LAZY_GLOBAL", double)
    monkeypatch.setattr(lazy_holder, "kernel", double)
    assert launch_count(op) == 1
    assert [kernel.name for kernel in find_kernels(body).kernels] == ["double_kernel"]
    after = see_through_report(op)
    assert [(kernel.name, kernel.how) for kernel in after.kernels] == [("double_kernel", "captured at compilation")]
    assert after.unresolved == ()


# Packages that are loaded late, and bodies that are not functions.


PACKAGE = {
    "__init__.py": "",
    "kernels.py": """import triton, triton.language as tl
@triton.jit
def third_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)
""",
    "ops.py": """import torch, triton
from .kernels import third_kernel
def double(x):
    out = torch.empty_like(x)
    third_kernel[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), BLOCK=128)
    return out
""",
    "launcher.py": """import torch
from .kernels import third_kernel
class Launcher:
    kernel = third_kernel
    def __init__(self):
        self.compiled = {}
    def __call__(self, x, out):
        self.kernel[(1,)](x, out, x.numel(), BLOCK=512)
LAUNCH = Launcher()
def double(x):
    out = torch.empty_like(x)
    LAUNCH(x, out)
    return out
""",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `third_party_kernels`, which is installed and not loaded."""
    folder = tmp_path / "site-packages" / "third_party_kernels"
    folder.mkdir(parents=True)
    for name, text in PACKAGE.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder.parent)
    for name in ("", ".kernels", ".ops", ".launcher"):
        monkeypatch.delitem(sys.modules, f"third_party_kernels{name}", raising=False)
    return folder


@pytest.mark.parametrize("is_loaded", [True, False])
def test_an_installed_package(is_loaded: bool, ops: Ops, package: Path) -> None:
    if is_loaded:
        import third_party_kernels.ops  # type: ignore[import-not-found]  # noqa: F401

    def body(x: Tensor) -> Tensor:
        from third_party_kernels.ops import double

        result: Tensor = double(x)
        return result

    op = ops.define("third", body)
    before = make_see_through(op, body)
    found = [(kernel.name, kernel.file, kernel.line, kernel.launches) for kernel in before.kernels]
    assert found == ([("third_kernel", f"{package}/kernels.py", 2, ())] if is_loaded else [])
    assert [launch.reason for launch in before.unresolved] == (
        [] if is_loaded else ["the module 'third_party_kernels.ops' is imported by the body and not loaded yet"]
    )
    assert is_loaded == ("third_party_kernels" in sys.modules)
    assert launch_count(op) == 1
    (kernel,) = see_through_report(op).kernels
    assert (kernel.name, kernel.launches) == ("third_kernel", ((f"{package}/ops.py", 5),))


@pytest.mark.usefixtures("package")
def test_an_object_of_an_installed_package(ops: Ops) -> None:
    """The methods of what its functions call are read, as its functions are."""
    body = patterns.calls(importlib.import_module("third_party_kernels.launcher").double)

    assert [kernel.name for kernel in find_kernels(body).kernels] == ["third_kernel"]
    assert launch_count(ops.seen("launcher", body)) == 1


def test_bound_method_and_callable_object_as_bodies(ops: Ops) -> None:
    for name, body in (("method", patterns.doubler.forward), ("object", patterns.doubler)):
        op = ops.define(name, body)
        assert [kernel.name for kernel in make_see_through(op, body).kernels] == ["double_kernel"]
        assert launch_count(op) == 1
