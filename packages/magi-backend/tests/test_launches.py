# SPDX-License-Identifier: Apache-2.0
"""Launches of kernels: what the launcher passes to C, what a tuned kernel still asks, and how one is measured."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from magi_backend._repairs import _defect, launches
from magi_backend._repairs.launches import LAUNCH_STRAIGHT, MEASURE_KERNELS_ALONE
from torch import Tensor
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


def test_a_kernel_that_two_graphs_launch_is_copied_for_the_cache_of_the_second(in_full: Launched) -> None:
    for defect in (LAUNCH_STRAIGHT, MEASURE_KERNELS_ALONE):
        defect.patch()
    kernel = kernel_of(Launcher())
    kernel.device_props, kernel.custom_kernel, kernel.triton_meta = SimpleNamespace(type="cuda"), False, {}
    launches._measuring(lambda _: None, kernel)
    kernel.run(0, stream=5)
    kernel.launchers = []  # as in `TritonBundler.put_static_autotuner`
    saved = pickle.loads(pickle.dumps(copy.deepcopy(kernel)))
    assert {"run", "bench"} <= vars(kernel).keys()
    assert not {"run", "bench"} & vars(saved).keys()
    saved.run(1, stream=5)
    assert in_full == [(0, 5), (1, 5)]


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


class Device:
    """A GPU that does what it is given one thing after another, and a host, both with a clock in microseconds."""

    def __init__(self) -> None:
        self.host = self.busy_until = 0.0

    def give(self, work: float, host: float) -> float:
        """Let the host take its time to give *work*; when the GPU ends it."""
        self.host += host
        self.busy_until = max(self.busy_until, self.host) + work
        return self.busy_until

    def wait(self) -> None:
        self.host = max(self.host, self.busy_until)


def measured_kernel(device: Device, works: Sequence[float], *, written: Sequence[str] = ()) -> Any:
    """A kernel of Inductor on *device*, of configurations that take *works* and add one to what they write."""

    def launcher_of(work: float) -> Any:
        def launch(values: Tensor, *, stream: int) -> None:
            assert stream == 7
            kernel.seen.append(values.item())
            values += len(written)
            device.give(work, host=12.0)

        known = {"config": SimpleNamespace(pre_hook=None, work=work), "n_spills": 0, "cache_hash": ""}
        vars(launch).update(known, n_regs=8, shared=0)
        return launch

    kernel: Any = object.__new__(CachingAutotuner)
    known = {"custom_kernel": False, "triton_meta": {}, "device_props": SimpleNamespace(type="cuda"), "seen": []}
    known |= {"inductor_meta": {}, "mutated_arg_names": list(written), "reset_to_zero_arg_names": []}
    known |= {"compile_id": None, "is_backward": False, "save_cache_hook": None, "precompile_time_taken_ns": 0}
    known |= {"fn": SimpleNamespace(arg_names=["in_out_ptr0"], __name__="kernel"), "optimize_mem": False}
    known |= {"coordesc_tuner": SimpleNamespace(cache_benchmark_result=lambda *_: None), "compile_results": []}
    vars(kernel).update(known, launchers=[launcher_of(work) for work in works])
    with _defect.repaired([MEASURE_KERNELS_ALONE], lambda _: None):
        launches._measuring(lambda _: None, kernel)
    return kernel


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device in the place of the GPU, at 2 GHz."""
    device = Device()

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = device.give(0.5, host=2.0)

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) / 1e3

    known = {
        "Event": Event,
        "_sleep": lambda cycles: device.give(cycles / 2e3, host=5.0),
        "synchronize": device.wait,
        "current_stream": lambda: SimpleNamespace(cuda_stream=7),
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,
    }
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return device


@pytest.mark.parametrize(
    ("written", "has_room"),
    [((), True), (("in_out_ptr0",), True), (("in_out_ptr0",), False)],
    ids=["reads", "writes in place", "no room for a copy"],
)
def test_small_kernels_are_measured_without_the_host(device: Device, written: Sequence[str], has_room: bool) -> None:
    kernel = measured_kernel(device, [4.0, 3.0, 900.0, 5.0], written=written)
    x = torch.tensor(5)
    restored: list[int] = []

    def restore(copies: dict[str, tuple[Tensor, Tensor]]) -> None:
        for here, there in copies.values():
            device.give(300.0, host=5.0)
            restored.append(int(here.copy_(there)))

    kernel.copy_args_to_cpu_if_needed = lambda given: {} if has_room else {"in_out_ptr0": (given, given.clone())}
    kernel.restore_args_from_cpu = restore
    times = [kernel.bench(launcher, x) * 1e3 for launcher in kernel.launchers]
    assert times == pytest.approx([4.0, 3.0, 900.0, 5.0], abs=0.6)
    before = device.host
    kernel.autotune_to_one_config(x)
    assert device.host - before < 4 * (2_500 if not written else 9_000) + 5_000
    assert [launcher.config.work for launcher in kernel.launchers] == [3.0]
    assert set(kernel.seen) == {5}, "each launch reads what the model gave"
    assert x == 5
    assert bool(restored) == (not has_room)


def test_what_only_torch_measures_is_left_to_it(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        msg = "too many resources requested for launch"
        raise RuntimeError(msg)

    monkeypatch.setattr(CachingAutotuner, "bench", lambda *_, **__: -1.0)
    kernel, x = measured_kernel(device, [3.0, 3.0, 3.0]), torch.tensor(5)
    spills, hooked, captured = kernel.launchers
    spills.n_spills, hooked.config = 33, SimpleNamespace(pre_hook=print)
    fails.n_spills, fails.config = None, captured.config  # type: ignore[attr-defined]
    assert [kernel.bench(each, x) for each in (spills, hooked, fails)] == [-1.0] * 3
    assert kernel.bench(captured, x, with_profiler=True) == -1.0
    assert kernel.bench(captured, x) > 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert kernel.bench(captured, x) == -1.0


@pytest.mark.parametrize(
    ("launchers", "known", "is_measured", "reports"),
    [
        (2, {}, True, ["measure_kernels_alone"]),
        (1, {}, True, []),
        (2, {"custom_kernel": True}, False, []),
        (2, {"triton_meta": {"launch_cooperative_grid": True}}, False, []),
        (2, {"device_props": SimpleNamespace(type="cpu")}, False, []),
    ],
    ids=["several", "one", "of the user", "cooperative", "cpu"],
)
def test_which_kernels_are_measured_so(
    launchers: int, known: dict[str, Any], is_measured: bool, reports: list[str]
) -> None:
    kernel: Any = object.__new__(CachingAutotuner)
    known = {"custom_kernel": False, "triton_meta": {}, "device_props": SimpleNamespace(type="cuda"), **known}
    vars(kernel).update(known, launchers=[Launcher()] * launchers)
    reported: list[str] = []
    with _defect.repaired([MEASURE_KERNELS_ALONE], reported.append):
        launches._measuring(lambda _: None, kernel)
        launches._measuring(lambda _: None, kernel)  # of rescaled blocks
    assert ("bench" in vars(kernel)) == is_measured
    assert set(reported) == set(reports)
    if is_measured:
        function, first = kernel.bench.func, kernel.bench.args[0]
        assert (function, first.__func__) == (launches._milliseconds, CachingAutotuner.bench)
