# SPDX-License-Identifier: Apache-2.0
"""Each launch pattern is caught: in the AOT graph, it is in the place of the op; scopes, the hook, and threads."""

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
from magi_tritonwrap import capture_launches, find_kernels, see_through_report
from magi_tritonwrap._cache_key import fingerprint
from magi_tritonwrap.testing import aot_graphs, launches_of
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", patterns.PATTERNS)
def test_op_becomes_its_launches(ops: Ops, name: str, dynamic: bool) -> None:
    pattern = patterns.PATTERNS[name]
    op = ops.seen(name, pattern.body)

    (graph,) = aot_graphs(lambda x: op(x.relu()) + 1, torch.ones(300), dynamic=dynamic)

    assert op not in {node.target for node in graph.graph.nodes}
    launches = launches_of(graph)
    assert len(launches) == pattern.launches
    assert all(launch.cloned == ["out"] for launch in launches)
    report = see_through_report(op)
    assert report.see_through
    assert not report.fallbacks
    assert report.kernels
    assert all(kernel.file == site[0] == patterns.__file__ for kernel in report.kernels for site in kernel.launches)
    assert {launch.kernel.fn.__name__ for launch in launches if isinstance(launch.kernel, JITFunction)} <= {
        kernel.name.rpartition(".")[2] for kernel in report.kernels if kernel.launches
    }


@pytest.mark.parametrize("name", patterns.PATTERNS)
def test_a_body_is_its_own_fake_and_names_lead_to_its_kernels(name: str) -> None:
    """Without a driver. The kernels it launches are among those found, and the walk of the cache key meets them too."""
    pattern = patterns.PATTERNS[name]
    with FakeTensorMode(), capture_launches(drop=True) as log:
        x = torch.ones(300, device="cuda")
        out = pattern.body(x)
    assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
    assert len(log.launches) == pattern.launches
    assert all(launch.file == patterns.__file__ for launch in log.launches)

    report = find_kernels(pattern.body)
    found = {(kernel.file, kernel.line) for kernel in report.kernels}
    assert {(launch.kernel.file, launch.kernel.line) for launch in log.launches} <= found
    covered = fingerprint([pattern.body], "body").kernels
    assert all(any(kernel.kernel is one for one in covered) for kernel in report.kernels if kernel.kernel is not None)


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
