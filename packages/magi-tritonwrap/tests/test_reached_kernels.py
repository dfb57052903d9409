# SPDX-License-Identifier: Apache-2.0
"""However a body reaches its kernel, the launch is seen: generated functions, packages, lazy modules, methods."""

from __future__ import annotations

import linecache
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
import tritonwrap_patterns as patterns
from magi_tritonwrap import make_see_through, see_through_report
from torch import Tensor


if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Ops
from graph_questions import launch_count


pytestmark = pytest.mark.usefixtures("stub")


def test_generated_function_that_calls_the_users_body(ops: Ops) -> None:
    text = "def lowered(x):\n    return _m_fn(x)\n"
    name = "<generated lowered>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"_m_fn": patterns.helper}
    exec(compile(text, name, "exec"), namespace)
    lowered = namespace["lowered"]
    op = ops.define("lowered", lowered)

    report = make_see_through(op, lowered)

    assert [kernel.name for kernel in report.kernels] == ["double_kernel"]
    assert launch_count(op) == 1


def test_kernel_known_at_run_time_only(ops: Ops) -> None:
    kernels: dict[str, Any] = {}

    def body(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernels["late"][patterns.blocks(x.numel())](x, out, x.numel(), BLOCK=128)
        return out

    op = ops.define("late", body)
    before = make_see_through(op, body)
    assert before.see_through
    assert before.kernels == ()
    kernels["late"] = patterns.double_kernel

    assert launch_count(op) == 1
    after = see_through_report(op)
    assert [(kernel.name, kernel.how) for kernel in after.kernels] == [("double_kernel", "captured at compilation")]
    assert after.unresolved == ()


def make_package(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder / "site-packages" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "kernels.py").write_text(
        "import triton, triton.language as tl\n"
        "@triton.jit\n"
        "def third_kernel(x, out, n, BLOCK: tl.constexpr):\n"
        "    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
        "    tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)\n"
    )
    (package / "ops.py").write_text(
        "import torch, triton\n"
        "from .kernels import third_kernel\n"
        "def double(x):\n"
        "    out = torch.empty_like(x)\n"
        "    third_kernel[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), BLOCK=128)\n"
        "    return out\n"
        "def lazily(x):\n"
        "    from . import kernels\n"
        "    out = torch.empty_like(x)\n"
        "    kernels.third_kernel[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), BLOCK=128)\n"
        "    return out\n"
    )
    monkeypatch.syspath_prepend(str(folder / "site-packages"))


def test_helper_in_an_installed_package(ops: Ops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_package(tmp_path, "third_party_kernels", monkeypatch)
    import third_party_kernels.ops as third_party  # type: ignore[import-not-found]

    def body(x: Tensor) -> Tensor:
        result: Tensor = third_party.double(x)
        return result

    op = ops.define("third", body)
    report = make_see_through(op, body)

    (kernel,) = report.kernels
    assert kernel.name == "third_kernel"
    assert kernel.file.endswith("third_party_kernels/kernels.py")
    assert kernel.line == 2
    assert kernel.launches == ()
    assert launch_count(op) == 1
    (kernel,) = see_through_report(op).kernels
    assert kernel.launches == ((kernel.file.replace("kernels.py", "ops.py"), 5),)


def test_module_imported_by_the_body_and_not_loaded_before(
    ops: Ops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_package(tmp_path, "lazy_kernels", monkeypatch)

    def body(x: Tensor) -> Tensor:
        from lazy_kernels.ops import lazily  # type: ignore[import-not-found]

        result: Tensor = lazily(x)
        return result

    op = ops.define("lazy", body)
    report = make_see_through(op, body)

    assert "lazy_kernels" not in sys.modules
    assert [launch.reason for launch in report.unresolved] == [
        "the module 'lazy_kernels.ops' is imported by the body and not loaded yet"
    ]
    assert launch_count(op) == 1
    assert [kernel.name for kernel in see_through_report(op).kernels] == ["third_kernel"]


def test_bound_method_and_callable_object_as_bodies(ops: Ops) -> None:
    for name, body in (("method", patterns.doubler.forward), ("object", patterns.doubler)):
        op = ops.define(name, body)
        assert [kernel.name for kernel in make_see_through(op, body).kernels] == ["double_kernel"]
        assert launch_count(op) == 1


def test_module_with_lazy_attributes(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = types.ModuleType("lazy_module_for_test")
    lazy.__getattr__ = lambda name: patterns.double_kernel  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_module_for_test", lazy)

    def body(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        lazy.kernel[patterns.blocks(x.numel())](x, out, x.numel(), BLOCK=128)
        return out

    op = ops.define("lazy_attribute", body)
    make_see_through(op, body)
    assert launch_count(op) == 1
