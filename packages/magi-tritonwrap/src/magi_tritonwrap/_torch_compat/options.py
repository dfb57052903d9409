# SPDX-License-Identifier: Apache-2.0
"""Launch options: those that Triton knows, and those with which Inductor compiles a kernel of the user.

Of a config Inductor writes `num_warps`, `num_stages` and `kwargs`. For an AMD GPU it takes what is in `kwargs` and no
parameter for options (all of it from torch 2.13 on, `waves_per_eu` and `matrix_instr_nonkdim` in 2.11). For an NVIDIA
GPU it reads four options from the `triton_meta` of a kernel, which it writes for its own kernels only.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import triton
from triton.compiler.compiler import make_backend
from triton.runtime.autotuner import Config

from magi_tritonwrap.errors import UnsupportedLaunchError

from .kernels import target_here


_LOCK = threading.Lock()
_writers: list[Any] = []
"""The class that writes options by now; empty before the first launch with one."""
_IN_META = ("enable_fp_fusion", "enable_reflect_ftz", "launch_cooperative_grid", "launch_pdl")
"""The options that Inductor reads from `triton_meta`, the second as `disable_ftz` (torch 2.11 to 2.15)."""


def options_for_this_gpu(options: dict[str, Any]) -> dict[str, Any]:
    """Every option that Triton compiles with for the GPU here, given *options*; none if there is no GPU."""
    target = target_here()
    return {} if target is None else dict(vars(make_backend(target).parse_options(dict(options))))


@functools.cache
def options_of_backends() -> dict[str, frozenset[str]]:
    """The names of the options of each backend of Triton: "nvidia", "amd"."""
    found: dict[str, frozenset[str]] = {}
    for name, backend in triton.backends.backends.items():
        values = vars(sys.modules[backend.compiler.__module__]).values()
        classes = [{field.name for field in dataclasses.fields(cls)} for cls in values if dataclasses.is_dataclass(cls)]
        found[name] = frozenset[str]().union(*(names for names in classes if "num_warps" in names))
    return found


def options_by_inductor(kernel: Any, configs: Sequence[Config], config: Config) -> dict[str, Any]:
    """The options with which Inductor compiles *kernel* for *config*, one of *configs*, for the GPU here.

    2.10 has no function that says so; there only warps and stages count.
    """
    from torch._inductor.runtime import triton_heuristics

    inductor: Any = triton_heuristics.CachingAutotuner
    found = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if hasattr(inductor, "_create_compile_options"):
        target: Any = target_here()
        meta = {"signature": dict.fromkeys(kernel.arg_names), "constants": {}}
        tuner: Any = SimpleNamespace(
            fn=kernel,
            inductor_meta={"is_hip": target.backend == "hip"},
            triton_meta=meta | _meta(configs[0]),
            device_props=SimpleNamespace(type=target.backend, cc=target.arch),
        )
        written = _without_meta(config, kernel)
        compiled = inductor._create_compile_meta(tuner, written)
        found = inductor._create_compile_options(tuner, written, compiled)
    return options_for_this_gpu(found)


def _in_meta(config: Config) -> list[str]:
    """The options in *config* that `triton_meta` holds for the GPU here."""
    target: Any = target_here()
    is_nvidia = target.backend == "cuda"
    return [name for name in _IN_META if is_nvidia and name in config.kwargs]


def _meta(config: Config) -> dict[str, Any]:
    """What `triton_meta` says of the options in *config*."""
    found = {name: config.kwargs[name] for name in _in_meta(config)}
    if "enable_reflect_ftz" in found:
        found["disable_ftz"] = not found.pop("enable_reflect_ftz")
    return found


def _without_meta(config: Config, kernel: Any) -> Config:
    """*config* without the options that `triton_meta` holds; a parameter of *kernel* of that name keeps its value."""
    found = copy.copy(config)
    dropped = set(_in_meta(config)) - set(kernel.arg_names)
    found.kwargs = {name: value for name, value in config.kwargs.items() if name not in dropped}
    return found


def write_options() -> None:
    """From now on, Inductor writes the options of a user's kernel for an NVIDIA GPU where it reads those of its own.

    It writes the same code as before for a kernel without such options.
    """
    from torch._inductor.codegen import wrapper

    writer: Any = wrapper.PythonWrapperCodegen
    with _LOCK:
        if not _writers:
            writer.define_user_defined_triton_kernel = _writing(writer.define_user_defined_triton_kernel)
            _writers.append(writer)


def _writing(define: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(define)
    def with_options(program: Any, kernel: Any, configs: Sequence[Config], *args: Any, **kwargs: Any) -> Any:
        from torch._inductor.virtualized import V

        is_for_gpu = V.graph.get_current_device_or_throw().type == "cuda"
        meta = _meta(configs[0]) if configs and is_for_gpu else {}
        if not meta:
            return define(program, kernel, configs, *args, **kwargs)
        if meta.get("launch_cooperative_grid") and V.graph.cpp_wrapper:
            why = "is launched with launch_cooperative_grid=, and code for C++ launches no kernel in that way"
            raise UnsupportedLaunchError(
                f"Triton kernel '{kernel.__name__}' {why}; register its op as an opaque custom op"
            )
        define_kernel = program.define_kernel

        def define_with_options(name: str, body: str, *rest: Any, **more: Any) -> Any:
            before, opening, after = body.partition("triton_meta={")
            assert opening, f"Inductor defines a kernel in another way: {body[:80]}"
            return define_kernel(name, f"{before}{opening}{str(meta)[1:-1]}, {after}", *rest, **more)

        with mock.patch.object(program, "define_kernel", define_with_options):
            found = define(program, kernel, [_without_meta(each, kernel) for each in configs], *args, **kwargs)
        found[1].update(meta)
        return found

    return with_options
