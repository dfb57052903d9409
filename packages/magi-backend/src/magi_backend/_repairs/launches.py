# SPDX-License-Identifier: Apache-2.0
"""Defects in how compiled code launches its kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler

from ._defect import Defect, report


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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


LAUNCH_STRAIGHT = Defect(
    name="launch_straight",
    effect="a launch of a kernel takes 3 to 10 µs of Python that it does not need, more than a third of its time",
    severity="slower code",
    since=(2, 10, 0),
    fixed=(2, 13, 0),
    repair="a kernel that is tuned launches its code at once",
    replaces={
        "torch._inductor.runtime.triton_heuristics:CompileResult._gen_launcher_code": _straight_launcher,
        "torch._inductor.runtime.triton_heuristics:CachingAutotuner._make_launchers": _settling,
    },
)
