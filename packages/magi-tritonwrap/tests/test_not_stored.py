# SPDX-License-Identifier: Apache-2.0
"""AOTAutograd stores no graph with a launch whose kernel the cache key does not cover: an edit would not be noticed."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import tritonwrap_patterns as patterns
from graph_questions import Ops
from magi_tritonwrap import _see_through, see_through_report, triton_op
from magi_tritonwrap._kernel.kernels import as_kernel
from magi_tritonwrap._launch.capture import CapturedLaunch
from magi_tritonwrap._launch.recording import recording_of
from torch import Tensor
from torch._dynamo.utils import counters


def make_kernel(factor: int) -> Any:
    @triton.jit
    def made(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(out + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)) * factor)

    return made


hidden = types.ModuleType("magi_hidden_kernels")
hidden.__dict__["kernel"] = make_kernel(3)
tuned = triton.autotune(configs=[triton.Config({"BLOCK": 128})], key=["n"])
hidden.__dict__["tuned"] = tuned(patterns.double_kernel)


def by_name() -> Any:
    return patterns.double_kernel


def by_layers() -> Any:
    return patterns.two_configs_kernel.fn


def by_factory() -> Any:
    return make_kernel(2)


def by_module_name() -> Any:
    return importlib.import_module("_".join(("magi", "hidden", "kernels"))).kernel


def by_module_name_around_a_known_one() -> Any:
    patterns.helper  # noqa: B018 - it launches the kernel inside
    return importlib.import_module("_".join(("magi", "hidden", "kernels"))).tuned


COVERED: list[Callable[[], Any]] = [by_name, by_layers, by_factory]
HIDDEN: list[Callable[[], Any]] = [by_module_name, by_module_name_around_a_known_one]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, hidden.__name__, hidden)


def compiled_with(ops: Ops, choose: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, *, trains: bool) -> Any:
    """Compile an op whose body says that it launches what *choose* returns; without a GPU nothing can be launched."""

    def record(*body: Any) -> Any:
        recording = recording_of(*body)
        assert not isinstance(recording, str)
        return replace(recording, launches=[CapturedLaunch(as_kernel(choose()), __file__, 1)])

    monkeypatch.setattr(_see_through, "recording_of", record)
    monkeypatch.setattr(_see_through, "check_driver", lambda *_: None)

    def body(x: Tensor) -> Tensor:
        return choose() and x if x.numel() == 1 else x * 2

    op = triton_op(f"{ops.namespace}::{choose.__name__}_{trains}", body, mutates_args=())
    counters.clear()
    weight = torch.ones(8, requires_grad=trains)
    result = torch.compile(lambda x: op(x) * weight, fullgraph=True)(torch.ones(8))
    if trains:
        result.sum().backward()
    return op


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("choose", COVERED)
def test_a_kernel_that_the_key_covers(
    choose: Callable[[], Any], trains: bool, ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = compiled_with(ops, choose, monkeypatch, trains=trains)
    assert see_through_report(op).cache == "keyed"
    assert counters["aot_autograd"]["autograd_cache_saved"] == 1


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("choose", HIDDEN)
def test_a_kernel_that_the_key_does_not_cover(
    choose: Callable[[], Any], trains: bool, ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = compiled_with(ops, choose, monkeypatch, trains=trains)
    said = see_through_report(op).cache
    assert said.startswith("not stored: no name in the code of the op leads to ")
    assert said.endswith("), which it launches")
    assert counters["aot_autograd"]["autograd_cache_miss"] == 1
    assert counters["aot_autograd"]["autograd_cache_saved"] == 0
