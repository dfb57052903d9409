# SPDX-License-Identifier: Apache-2.0
"""Kernels of code that is made beside the calls are tuned in the calls, on a clock in the place of a GPU's events."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from magi_backend._torch_compat import state, tuning
from magi_backend._torch_compat.compiling import assigned
from magi_backend._torch_compat.tuning import APART, ROUNDS, InTurn


MANY = 12 * APART


class Gpu:
    """A clock, the launches on it, and whether it has finished them."""

    def __init__(self) -> None:
        self.now, self.launched, self.is_done, self.is_capturing = 0.0, list[str](), True, False

    def launcher(self, name: str, takes: float, *, spills: int = 0, fails: bool = False) -> Any:
        def launch(*args: Any, stream: int) -> tuple[Any, ...]:
            assert stream == 7
            if fails:
                msg = "invalid argument"
                raise RuntimeError(msg)
            self.now += takes
            self.launched.append(name)
            return args

        attributes = {"config": name, "n_spills": spills, "n_regs": 8, "shared": 0, "cache_hash": name, "_is_static": 1}
        vars(launch).update(attributes)
        return launch

    def event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        assert not self.is_capturing, "an event of a captured stream has no time"
        event = types.SimpleNamespace(at=0.0, query=lambda: self.is_done)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: end.at - event.at
        return event


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.is_capturing)
    with assigned(state.is_beside_others, True):
        yield made


def kernel_of(*launchers: Any, **known: Any) -> Any:
    """A kernel of Inductor that was compiled for each of the *launchers*."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    kernel: Any = CachingAutotuner.__new__(CachingAutotuner)
    kernel.launchers, kernel.saved = list(launchers), []
    kernel.fn, kernel.compile_results = types.SimpleNamespace(__name__="kernel"), []
    kernel.save_cache_hook = lambda config, *_, **__: kernel.saved.append(config)
    kernel.device_props = types.SimpleNamespace(type="cuda")
    kernel.inductor_meta, kernel.custom_kernel, kernel.precompile_time_taken_ns = {}, False, 0
    kernel.benchmark_failure_reasons = {}
    vars(kernel).update(known)
    tuning.precompile(lambda _: None, kernel)
    return kernel


def run(kernel: Any, times: int = 1) -> None:
    for i in range(times):
        (launcher,) = kernel.launchers
        assert launcher(i, stream=7) == (i,)


def test_a_launch_now_and_then_tries_a_configuration_and_the_fastest_stays(gpu: Gpu) -> None:
    kernel = kernel_of(gpu.launcher("middle", 2.0), gpu.launcher("awful", 9.0), gpu.launcher("fast", 1.5))
    before, launches = InTurn.launches, 0
    while not kernel.saved:
        run(kernel)
        launches += 1
    run(kernel, 9)

    assert kernel.saved == ["fast"]
    assert gpu.launched[launches - 1 :] == ["fast"] * 10
    assert gpu.launched.count("awful") == 1, "not again, after it was seen to be much slower"
    assert APART * 3 < launches <= APART * ROUNDS * 3
    assert InTurn.launches - before == launches
    assert not isinstance(kernel.launchers[0], InTurn)


def test_kernels_do_not_try_theirs_in_the_same_call(gpu: Gpu) -> None:
    kernels = [kernel_of(gpu.launcher("usual", 1.0), gpu.launcher("slow", 3.0)) for _ in range(4 * APART)]
    calls = []
    for _ in range(APART * (ROUNDS * 2 + 1)):
        gpu.launched.clear()
        for kernel in kernels:
            run(kernel)
        calls.append(gpu.launched.count("slow"))
    assert max(calls) == len(kernels) / APART
    assert calls[-1] == 0


def test_nothing_waits_for_the_device(gpu: Gpu) -> None:
    kernel = kernel_of(gpu.launcher("slow", 3.0), gpu.launcher("fast", 1.0))
    gpu.is_done = False
    run(kernel, MANY)
    assert gpu.launched == ["slow"] * MANY
    gpu.is_done = True
    run(kernel, MANY)
    assert gpu.launched[-1] == "fast"
    assert kernel.saved == ["fast"]


def test_a_configuration_that_spills_or_cannot_be_launched_is_left_out(gpu: Gpu) -> None:
    launchers = [gpu.launcher("spills", 0.5, spills=99), gpu.launcher("fails", 0.1, fails=True)]
    kernel = kernel_of(*launchers, gpu.launcher("slow", 3.0), gpu.launcher("fast", 1.0))
    run(kernel, MANY)
    assert {*gpu.launched} == {"slow", "fast"}
    assert kernel.saved == ["fast"]

    with pytest.raises(RuntimeError, match="invalid argument"):
        run(kernel_of(*[gpu.launcher("fails", 0.1, fails=True) for _ in range(2)]))
    custom = kernel_of(*launchers[:1], gpu.launcher("slow", 3.0), custom_kernel=True)
    run(custom, MANY)
    assert custom.saved == ["spills"]


def test_in_a_capture_of_the_users_nothing_is_tried(gpu: Gpu) -> None:
    kernel = kernel_of(gpu.launcher("slow", 3.0), gpu.launcher("fast", 1.0))
    gpu.is_capturing = True
    run(kernel, 20)
    assert gpu.launched == ["slow"] * 20


def test_a_launcher_that_torch_keeps_runs_the_fastest_later(gpu: Gpu) -> None:
    """torch 2.13 keeps the launcher of the last call."""
    kernel = kernel_of(gpu.launcher("slow", 3.0), gpu.launcher("fast", 1.0), _cached_launcher=None)
    kept = kernel._cached_launcher = kernel.launchers[0]
    assert not kept._is_static
    for _ in range(MANY):
        kept(stream=7)
    assert gpu.launched[-2:] == ["fast", "fast"]
    assert kernel._cached_launcher is None


@pytest.mark.parametrize(
    "known",
    [
        {"inductor_meta": {"coordinate_descent_tuning": True}},
        {"device_props": types.SimpleNamespace(type="xpu")},
    ],
    ids=["Inductor searches on", "a device without such events"],
)
def test_what_is_tuned_as_torch_does(gpu: Gpu, known: dict[str, Any]) -> None:
    assert len(kernel_of(gpu.launcher("a", 1.0), gpu.launcher("b", 2.0), **known).launchers) == 2


def test_code_of_a_call_and_of_a_recorded_graph_is_tuned_as_torch_does(gpu: Gpu) -> None:
    launchers = [gpu.launcher("a", 1.0), gpu.launcher("b", 2.0)]
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert kernel_of(*launchers).launchers == launchers
    with assigned(state.is_beside_others, False):
        assert kernel_of(*launchers).launchers == launchers
