# SPDX-License-Identifier: Apache-2.0
"""Launches of kernels: what the launcher passes to C, and what a kernel still asks when it is tuned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from magi_backend._repairs import _defect, launches
from magi_backend._repairs.launches import LAUNCH_STRAIGHT
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.triton_heuristics import CachingAutotuner


triton = pytest.importorskip("triton")

Launched = list[tuple[Any, ...]]


class StaticallyLaunchedCudaKernel:
    """What torch's class of this name knows of a kernel of a tensor, a size and a number of elements."""

    function, num_warps, shared, arg_tys = 1234, 4, 512, "Oil"
    has_global_scratch, has_profile_scratch = True, False

    def run(self, *given: Any) -> None:
        raise AssertionError("torch's own method")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """What C is asked to launch."""
    calls: Launched = []
    monkeypatch.setattr(launches, "launch_in_c", lambda: lambda *given: calls.append(given))
    return calls


def launcher_of(runner: Any) -> Any:
    """The launcher that torch writes for *runner*, in the scope of the repair."""
    config = triton.Config({"XBLOCK": 128})
    result = SimpleNamespace(inductor_meta={"grid_type": "Grid1D"}, config=config, compile_meta={})
    write = triton_heuristics.CompileResult._gen_launcher_code
    arguments = ["grid_0", "grid_1", "grid_2", "stream", "in_ptr0", "ks0", "xnumel"]
    with _defect.repaired([LAUNCH_STRAIGHT], lambda _: None):
        return launches._straight_launcher(write, result, {"runner": runner}, ["in_ptr0", "ks0", "xnumel"], arguments)


def test_a_launcher_passes_addresses_and_what_is_known_of_the_kernel(launched: Launched) -> None:
    x = torch.ones(3)
    launcher_of(StaticallyLaunchedCudaKernel().run)(x, 7, 300, stream=5)
    assert launched == [(1234, 3, 1, 1, 4, 512, "OilO", (x.data_ptr(), 7, 300, None), 5)]


def test_the_launcher_of_another_kernel_is_torchs(launched: Launched) -> None:
    called: Launched = []
    launcher_of(lambda *given: called.append(given))("x", 7, 300, stream=5)
    assert (called, launched) == ([(3, 1, 1, 5, "x", 7, 300)], [])


class Launcher:
    """A launcher of compiled code."""

    def __init__(self, *, is_static: bool = True) -> None:
        self._is_static, self.calls, self.config = is_static, Launched(), SimpleNamespace()

    def __call__(self, *args: Any, stream: int) -> None:
        self.calls.append((*args, stream))


@pytest.fixture
def in_full(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """The calls of torch's own ``CachingAutotuner.run``, which chooses the last launcher."""
    calls: Launched = []

    def run(kernel: Any, *args: Any, stream: int, **kwargs: Any) -> None:
        calls.append((*args, stream))
        kernel.launchers = kernel.launchers[-1:]

    monkeypatch.setattr(CachingAutotuner, "run", run)
    return calls


def kernel_of(*launchers: Launcher, **meta: Any) -> Any:
    kernel: Any = object.__new__(CachingAutotuner)
    kernel.launchers, kernel.inductor_meta, kernel.dump_launch_params = list(launchers), meta, False
    launches._settling(lambda _: None, kernel)
    launches._settling(lambda _: None, kernel)  # torch makes launchers a second time when it has rescaled blocks
    return kernel


def test_a_kernel_that_has_chosen_launches_at_once(in_full: Launched) -> None:
    slow, fast = Launcher(), Launcher()
    kernel = kernel_of(slow, fast)
    for number in range(3):
        kernel.run(number, stream=5)
    assert (in_full, slow.calls, fast.calls) == ([(0, 5)], [], [(1, 5), (2, 5)])
    with torch.autograd.profiler.profile():
        kernel.run(3, stream=5)
    kernel.run(4, stream=5, benchmark_run=True)
    assert in_full == [(0, 5), (3, 5), (4, 5)]


def test_a_kernel_under_a_debug_mode_is_recorded(in_full: Launched) -> None:
    from torch.utils._debug_mode import DebugMode

    kernel = kernel_of(Launcher())
    kernel.run(0, stream=5)
    with DebugMode():
        kernel.run(1, stream=5)
    assert in_full == [(0, 5), (1, 5)]


@pytest.mark.parametrize(
    ("launcher", "setting"),
    [(Launcher(is_static=False), {}), (Launcher(), {"coordinate_descent_tuning": True})],
    ids=["of the user or still trying", "a search to come"],
)
def test_a_kernel_that_is_not_settled_asks_each_time(
    launcher: Launcher, setting: dict[str, Any], in_full: Launched
) -> None:
    kernel = kernel_of(launcher, **setting)
    for number in range(3):
        kernel.run(number, stream=5)
    assert in_full == [(0, 5), (1, 5), (2, 5)]


def test_a_kernel_that_is_searched_settles_after_that(in_full: Launched) -> None:
    launcher = Launcher()
    launcher.config.found_by_coordesc = True
    kernel = kernel_of(launcher, coordinate_descent_tuning=True)
    for number in range(2):
        kernel.run(number, stream=5)
    assert (in_full, launcher.calls) == ([(0, 5)], [(1, 5)])
