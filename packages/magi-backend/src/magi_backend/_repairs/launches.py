# SPDX-License-Identifier: Apache-2.0
"""Defects in how compiled code launches its kernels, and measures them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import profiler

from magi_backend._torch_compat.tuning import spills

from ._defect import Defect, report


_STATIC_KERNEL = "StaticallyLaunchedCudaKernel"  # 2.10 has it in another module than later releases


def _straight_launcher(
    original: Callable[..., Any], result: Any, scope: dict[str, Any], parameters: Any, arguments: Sequence[str]
) -> Any:
    """A launcher that calls torch's C function itself, with the addresses of tensors.

    The one of ``StaticTritonCompileResult`` calls a method, with the grid, the stream and the arguments of the kernel.
    This adds what never changes and calls C, which gets the address of each tensor by its name and asks the driver
    about it. 2.13 binds what never changes, and does not ask.
    """
    kernel: Any = getattr(scope["runner"], "__self__", None)
    if type(kernel).__name__ != _STATIC_KERNEL or torch.version.hip:
        return original(result, scope, parameters, arguments)
    report("launch_straight")
    grid, (stream, *values) = arguments[:3], arguments[3:]
    # A kernel with scratch memory has another launcher; this one has none, and still a parameter for it.
    scratch = kernel.has_global_scratch + kernel.has_profile_scratch
    passed = [f"{name}.data_ptr()" if kind == "O" else name for name, kind in zip(values, kernel.arg_tys, strict=True)]
    constants = [repr(each) for each in (kernel.num_warps, kernel.shared, kernel.arg_tys + "O" * scratch)]
    in_c = [repr(kernel.function), *grid, *constants, f"({', '.join(passed + ['None'] * scratch)},)", stream]
    return original(result, {**scope, "runner": launch_in_c()}, parameters, in_c)


def launch_in_c() -> Callable[..., None]:
    """What launches a kernel, from its handle, grid, warps, shared memory, types of arguments, arguments and stream."""
    return vars(torch._C)["_StaticCudaLauncher"]._launch_kernel  # type: ignore[no-any-return]  # not of a CPU's build


def _settling(original: Callable[[Any], None], kernel: Any) -> None:
    """Make *kernel*, a ``CachingAutotuner``, launch what its first call has chosen, as 2.13 does.

    ``CachingAutotuner.run`` asks again at each launch whether anything is to be compiled, tuned, saved or dumped, and
    sets Triton's allocator. What may change later is still asked: whether a profiler or a ``DebugMode`` is active.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch.utils._debug_mode import get_active_debug_mode

    original(kernel)
    if type(kernel).run is not CachingAutotuner.run or "run" in vars(kernel):
        return
    in_full = kernel.run

    def first(*args: Any, stream: int, **kwargs: Any) -> Any:
        outcome = in_full(*args, stream=stream, **kwargs)
        if _is_settled(kernel):
            kernel.run = settled(kernel.launchers[0])
        return outcome

    def settled(launcher: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, stream: int, **kwargs: Any) -> Any:
            if kwargs or profiler._is_profiler_enabled or get_active_debug_mode():
                return in_full(*args, stream=stream, **kwargs)
            return launcher(*args, stream=stream)

        return run

    kernel.run = first


def _is_settled(kernel: Any) -> bool:
    """Whether each later call of *kernel* does nothing but launch the same code."""
    # Launchers of the user's kernels are not static: they may need Triton's allocator. Neither are those of `InTurn`,
    # which still try configurations.
    if len(kernel.launchers) != 1 or not getattr(kernel.launchers[0], "_is_static", False):
        return False
    searches = kernel.inductor_meta.get("coordinate_descent_tuning", False)
    if searches and not getattr(kernel.launchers[0].config, "found_by_coordesc", False):
        return False
    return not (kernel.dump_launch_params or getattr(kernel, "dump_launch_tensors", False))  # 2.10 has the first


@functools.cache  # two repairs need it
def _copy_as_torch_made_it() -> None:
    """Copy kernels for torch's caches without what is set on them here, which is of one process, and not to be pickled.

    A kernel that two graphs have in common is launched before the second graph is saved.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    state_of = CachingAutotuner.__getstate__

    def state(kernel: Any) -> dict[str, Any]:
        return {name: value for name, value in state_of(kernel).items() if name not in ("run", "bench")}

    CachingAutotuner.__getstate__ = state  # type: ignore[assignment, method-assign]


LAUNCH_STRAIGHT = Defect(
    name="launch_straight",
    effect="a launch of a kernel takes 3 to 10 µs of Python that it does not need, more than a third of its time",
    severity="slower code",
    fixed=(2, 13, 0),
    repair="a kernel that is tuned launches its code at once",
    replaces={
        "torch._inductor.runtime.triton_heuristics:CompileResult._gen_launcher_code": _straight_launcher,
        "torch._inductor.runtime.triton_heuristics:CachingAutotuner._make_launchers": _settling,
    },
    when_replaced=_copy_as_torch_made_it,
)


LAUNCHES, ROUNDS = 10, 3
"""How many launches of a configuration are measured at once, and how often; the fastest time counts."""

LONG = 0.5
"""Milliseconds of a kernel beside which the time of the host does not count, so that one launch is enough."""

HOST_CYCLES = 800_000
"""Cycles for which the GPU is kept busy, 0.4 to 0.6 ms, while the host gives it launches."""


def _measuring(original: Callable[[Any], None], kernel: Any) -> None:
    """Have *kernel*, a ``CachingAutotuner``, measure its configurations by `_milliseconds`.

    Not a kernel of the user, which may count on fresh arguments of every kind, nor one whose blocks wait for others.
    """
    original(kernel)
    is_measured = kernel.device_props.type in ("cuda", "hip") and not kernel.custom_kernel
    if is_measured and not kernel.triton_meta.get("launch_cooperative_grid") and "bench" not in vars(kernel):
        if len(kernel.launchers) > 1:
            report("measure_kernels_alone")
        kernel.bench = functools.partial(_milliseconds, kernel.bench, kernel)


def _milliseconds(
    in_full: Callable[..., float], kernel: Any, launcher: Any, *args: Any, with_profiler: bool = False, **kwargs: Any
) -> float:
    """What a launch of *launcher* takes; infinity where it spills registers.

    ``CachingAutotuner.bench`` puts an event before and one after each launch, and copies of the arguments that the
    kernel writes between them. The host takes 10 to 100 us for that, so the time of a smaller kernel is that of the
    host. Where copies have no room they come from the CPU, 300 us for a kernel of 17 (one H200), until a measurement
    itself has made room, so the first configuration loses. Here the GPU is busy until it has all launches, and copies
    are made outside of the events. Whatever else ``bench`` knows of is left to it; so is a launch that fails, since it
    says why.
    """
    is_torchs = with_profiler or launcher.config.pre_hook or torch.cuda.is_current_stream_capturing()
    if is_torchs or spills(kernel, launcher):
        return in_full(launcher, *args, with_profiler=with_profiler, **kwargs)
    stream = torch.cuda.current_stream().cuda_stream
    on_cpu = kernel.copy_args_to_cpu_if_needed(*args, **kwargs)

    def measured(in_a_row: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HOST_CYCLES)
        given, named = kernel.maybe_clone_args(on_cpu, *args, **kwargs)
        start.record()
        for _ in range(in_a_row):
            launcher(*given, **named, stream=stream)
        end.record()
        kernel.restore_args_from_cpu(on_cpu)
        torch.cuda.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / in_a_row

    _wake(torch.cuda.current_device())
    try:
        measured(1)  # loads the kernel
    except Exception:  # noqa: BLE001 (raised again, or found to be a configuration that does not fit)
        return in_full(launcher, *args, **kwargs)
    if measured(1) > LONG:
        in_a_row, rounds = 1, ROUNDS
    elif kernel.mutated_arg_names:  # what it writes may be what it reads next, for example indices
        in_a_row, rounds = 1, LAUNCHES
    else:
        in_a_row, rounds = LAUNCHES, ROUNDS
    return min(measured(in_a_row) for _ in range(rounds))


@functools.cache
def _wake(_device: int) -> None:
    """Keep the GPU busy for 20 ms, once, so that its clock is that of a running model."""
    torch.cuda._sleep(50 * HOST_CYCLES)


MEASURE_KERNELS_ALONE = Defect(
    name="measure_kernels_alone",
    effect="the configuration of a kernel below 20 us is chosen by the time that the host takes, in 20 ms for each",
    severity="slower code",
    repair="the GPU has all launches that are measured before it begins with the first",
    replaces={"torch._inductor.runtime.triton_heuristics:CachingAutotuner._make_launchers": _measuring},
    when_replaced=_copy_as_torch_made_it,
)
