# SPDX-License-Identifier: Apache-2.0
"""Scopes that capture launches: what they do to each, where the hook is, and threads."""

from __future__ import annotations

import contextlib
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import tritonwrap_patterns as patterns
from graph_questions import Ops, launch_count
from magi_tritonwrap import capture_launches, see_through_report
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction


def test_launches_outside_a_trace_go_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: ran.append(self))
    with capture_launches() as log:
        patterns.PATTERNS["autotune_one_config"].body(torch.ones(300))
    assert ran == [patterns.one_config_kernel.fn]
    assert [launch.name for launch in log.launches] == ["double_kernel"]


def test_the_hook_is_installed_only_while_a_scope_is_open() -> None:
    original = JITFunction.run
    with capture_launches(drop=True):
        hooked = JITFunction.run
        assert hooked is not original
        with capture_launches(drop=True):
            assert JITFunction.run is hooked
        assert JITFunction.run is hooked
    assert JITFunction.run is original


def test_a_wrapper_put_around_the_hook_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    original, seen = JITFunction.run, []
    with capture_launches(drop=True):
        hooked = JITFunction.run

        @functools.wraps(hooked)
        def profiled(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(self)
            return hooked(self, *args, **kwargs)

        monkeypatch.setattr(JITFunction, "run", profiled)
    assert JITFunction.run is profiled
    with contextlib.suppress(RuntimeError), capture_launches(drop=True) as log:
        patterns.module_level(torch.ones(4))
        raise RuntimeError
    with capture_launches(drop=True):
        patterns.module_level(torch.ones(4))
    assert seen == [patterns.double_kernel] * 2
    assert len(log.launches) == 1, "a scope ends when the body raises"
    monkeypatch.setattr(JITFunction, "run", original)


def test_threads_capture_their_own_launches() -> None:
    barrier = threading.Barrier(8)

    def work(number: int) -> list[str]:
        with FakeTensorMode(), capture_launches(drop=True) as log:
            barrier.wait()
            for _ in range(20):
                (patterns.module_level if number % 2 else patterns.several_kernels)(torch.ones(300, device="cuda"))
        return [launch.name for launch in log.launches]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(8)))
    for number, names in enumerate(found):
        assert names == (["double_kernel"] * 20 if number % 2 else ["double_kernel", "increment_kernel"] * 20)


def test_a_scope_does_not_reach_other_threads() -> None:
    x = torch.ones(4)
    with capture_launches(drop=True) as log, ThreadPoolExecutor(1) as pool:
        launched = pool.submit(patterns.launch_double, x, x)
        # Triton itself was asked: it has no driver, or refuses a CPU tensor.
        assert isinstance(launched.exception(), (RuntimeError, ValueError))
    assert log.launches == []


@pytest.mark.usefixtures("stub")
def test_ops_are_registered_from_many_threads(ops: Ops) -> None:
    body = patterns.PATTERNS["autotune_two_configs"].body

    def register(number: int) -> int:
        return len(see_through_report(ops.seen(f"op_{number}", body)).kernels)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(register, range(24))) == [1] * 24
    assert launch_count(getattr(torch.ops, ops.namespace).op_3.default) == 1


def test_a_scope_within_a_scope() -> None:
    with capture_launches(drop=True) as outer:
        patterns.module_level(torch.ones(4))
        with capture_launches(drop=True) as inner:
            patterns.several_kernels(torch.ones(4))
        patterns.module_level(torch.ones(4))
    assert [launch.name for launch in inner.launches] == ["double_kernel", "increment_kernel"]
    assert [launch.name for launch in outer.launches] == ["double_kernel", "double_kernel"]
