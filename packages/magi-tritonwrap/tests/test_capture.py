# SPDX-License-Identifier: Apache-2.0
"""Launches dropped so that a body can be its own fake, without any driver, and from many threads."""

from __future__ import annotations

import contextlib
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import tritonwrap_patterns as patterns
from magi_tritonwrap import capture_launches, make_see_through, see_through_report
from magi_tritonwrap.testing import aot_graphs, launches_of
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction


@pytest.mark.parametrize("name", patterns.PATTERNS)
def test_body_is_its_own_fake_without_a_driver(name: str) -> None:
    pattern = patterns.PATTERNS[name]
    with FakeTensorMode(), capture_launches(drop=True) as log:
        x = torch.ones(300, device="cuda")
        out = pattern.body(x)
    assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
    assert len(log.launches) == pattern.launches
    assert all(launch.file == patterns.__file__ for launch in log.launches)


def test_dropped_launches_on_real_tensors_change_nothing() -> None:
    x = torch.ones(300)
    with capture_launches(drop=True):
        patterns.double_kernel[(3,)](x, x, 300, BLOCK=128)
        patterns.wrapped_at_import[(3,)](x, x, 300, BLOCK=128)
    assert torch.equal(x, torch.ones(300))


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
    outcome: list[str] = []

    def launch() -> None:
        x = torch.ones(4)
        try:
            patterns.double_kernel[(1,)](x, x, 4, BLOCK=128)
        except (RuntimeError, ValueError) as error:
            outcome.append(str(error))
        else:
            outcome.append("captured")

    with capture_launches(drop=True) as log:
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
    assert log.launches == []
    assert outcome != ["captured"], "Triton itself was asked: no driver, or a CPU tensor on a GPU"
    assert len(outcome) == 1


@pytest.mark.usefixtures("stub")
def test_ops_compiled_from_many_threads_register_safely() -> None:
    names = [name for name in patterns.PATTERNS if name.startswith("autotune")]
    libraries = []

    def register(number: int) -> int:
        name = names[number % len(names)]
        library = torch.library.Library(f"tritonwrap_threads_{number}", "FRAGMENT")
        libraries.append(library)
        library.define("op(Tensor x) -> Tensor")
        body = patterns.PATTERNS[name].body
        library.impl("op", body, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tritonwrap_threads_{number}::op", torch.empty_like, lib=library)
        op = getattr(torch.ops, f"tritonwrap_threads_{number}").op.default
        make_see_through(op, body)
        return len(see_through_report(op).kernels)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(register, range(24))) == [1] * 24
    op = torch.ops.tritonwrap_threads_3.op.default
    (graph,) = aot_graphs(op, torch.ones(300))
    assert len(launches_of(graph)) == 1
    for library in libraries:
        library._destroy()
