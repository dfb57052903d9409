# SPDX-License-Identifier: Apache-2.0
"""A launch as Triton would carry it out, written in the one form that torch's higher-order op takes without loss.

torch accepts a JITFunction, or an Autotuner directly above one, with every parameter passed. Triton accepts more:
defaults, heuristics in any order, launch options, configs pruned at the launch. `resolve` evaluates all of that as
Triton's `run` methods do (`triton/runtime/autotuner.py`, `jit.py`), for example

    k[lambda m: (cdiv(n, m["B"]),)](x, out, n, num_warps=8)     # B: tl.constexpr = 128

becomes an Autotuner with the single config num_warps=8, and the arguments x, out, n, B=128.

What a node cannot hold, and a write that torch does not find in the kernel's Triton IR, is an error.
"""

from __future__ import annotations

import copy
import difflib
import enum
import functools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
import triton
from triton.language.core import constexpr
from triton.runtime.autotuner import Config, Heuristics
from triton.runtime.jit import JITFunction, TensorWrapper
from triton.tools.tensor_descriptor import TensorDescriptor

from magi_tritonwrap._identity.code import code_names
from magi_tritonwrap._kernel.kernels import CONFIG_FIELDS, Kernel, as_kernel, check_supported
from magi_tritonwrap._torch_compat.kernels import (
    another_kernel,
    described_tensor,
    dtype_of_reinterpreted,
    of_whole_tensor,
    record_launch,
    settings_that_are_lost,
    static_launcher_refuses_descriptors,
    tensor_descriptors_are_taken,
    writes_unknown_to_torch,
)
from magi_tritonwrap._torch_compat.options import (
    options_by_inductor,
    options_for_this_gpu,
    options_of_backends,
    write_options,
)
from magi_tritonwrap._torch_compat.tracing import functional_storage, writes_traced
from magi_tritonwrap.errors import UnsupportedLaunchError

from .fake_runs import FakeAddress
from .hook import launch_site, not_listening
from .self_contained import functions_of, key_of, self_contained


_MAY_WRITE = {"scatter", "atomic_add", "atomic_and", "atomic_max", "atomic_min", "atomic_or", "atomic_xor"}
"""Names of operations that write through a tensor descriptor; most kernels with one have it write through pointers."""
_PASSED = (torch.Tensor, torch.SymInt, torch.SymFloat, TensorDescriptor, TensorWrapper, JITFunction)
WRITES_NOTHING = (
    "writes none of its tensors as far as torch can tell from its Triton IR, and a compiled graph would leave "
    "the launch out; register its op as an opaque custom op"
)


def check_arguments(kernel: Kernel, arguments: Mapping[str, Any], configs: list[Config]) -> None:
    """Raise UnsupportedLaunchError for arguments that are missing, or that a node of a graph cannot hold."""
    given = set(arguments).union(*(config.kwargs for config in configs))
    missing = [name for name in kernel.jit.arg_names if name not in given]
    if missing:
        raise unsupported(kernel, f"was launched without {', '.join(missing)}")
    for name, value in arguments.items():
        if isinstance(value, TensorDescriptor):
            _check_descriptor(kernel, name, value)
        elif isinstance(value, TensorWrapper):
            if dtype_of_reinterpreted(value) is None:
                why = f"was launched with '{name}' reinterpreted as {value.dtype}, as which torch cannot view it"
                raise unsupported(kernel, why)
        elif _holds_tensor(value):
            raise unsupported(kernel, f"was launched with tensors inside the {type(value).__name__} '{name}'")
        elif isinstance(value, FakeAddress) or hasattr(type(value), "data_ptr") > isinstance(value, torch.Tensor):
            why = f"was launched with '{name}', the address of a Tensor that the graph then does not see"
            raise unsupported(kernel, f"{why}; pass the Tensor")
    values = [
        (name, value) for config in configs for name, value in config.kwargs.items() if name in kernel.jit.arg_names
    ]
    for name, value in (*arguments.items(), *values):
        if not _has_literal(value):
            why = f"was launched with {name}={value!r}, which Inductor cannot write into the kernel's source"
            raise unsupported(kernel, f"{why}; pass a number, a string or a tuple of them")


def _has_literal(value: Any) -> bool:
    """Whether Inductor passes *value* at a call, or its `repr` in the source of a kernel means the same."""
    if isinstance(value, tuple | list):
        return type(value) in (tuple, list) and all(map(_has_literal, value))
    plain = (NoneType, bool, int, float, str, range, triton.language.dtype)
    return type(value) in plain or isinstance(value, _PASSED)


def _check_descriptor(kernel: Kernel, name: str, descriptor: Any) -> None:
    launched = f"was launched with the TensorDescriptor '{name}'"
    if not tensor_descriptors_are_taken():
        raise unsupported(kernel, f"{launched}; torch takes it in a graph for GPUs of compute capability 9.0 or more")
    lost = settings_that_are_lost(descriptor)
    if lost:
        made = ", ".join(f"{setting}={value!r}" for setting, value in lost.items())
        raise unsupported(kernel, f"{launched}, made with {made}; Inductor makes it again without that")
    if static_launcher_refuses_descriptors():
        why = "Inductor's own launcher does not know them; leave out static_launch_user_defined_triton_kernels"
        raise unsupported(kernel, f"{launched}; {why}")


def check_writes(kernel: Kernel, jit: JITFunction[Any], launched: Any, arguments: dict[str, Any]) -> None:
    """Raise UnsupportedLaunchError for operations of which torch does not know that they write."""
    unknown = writes_unknown_to_torch(launched, arguments) if _may_write_unknown_to_torch(jit) else []
    if unknown:
        operations = {"tt.descriptor_reduce": "an atomic operation", "tt.descriptor_scatter": "scatter"}
        how = " and ".join(operations[operation] for operation in unknown)
        why = "torch does not know that the Tensor changes then; register its op as an opaque custom op"
        raise unsupported(kernel, f"writes through a tensor descriptor by {how}; {why}")


@functools.lru_cache(maxsize=512)
def _may_write_unknown_to_torch(jit: JITFunction[Any]) -> bool:
    """Whether the kernel asks any object for one of these operations. To read its Triton IR takes longer."""
    return any(not _MAY_WRITE.isdisjoint(code_names(each.fn.__code__).mentioned) for each in functions_of(jit))


def _holds_tensor(value: object) -> bool:
    """Whether *value* is a container with a tensor in it, which torch's mutation analysis would not see."""
    if isinstance(value, Mapping):
        return any(isinstance(item, torch.Tensor) or _holds_tensor(item) for item in value.values())
    if isinstance(value, tuple | list):
        return any(isinstance(item, torch.Tensor) or _holds_tensor(item) for item in value)
    return isinstance(value, TensorDescriptor | TensorWrapper)


def unsupported(kernel: Kernel, why: str, site: tuple[str, int] | None = None) -> UnsupportedLaunchError:
    """The error for a launch of *kernel*, which it says *why* a graph cannot carry; *site* is its line, if not this."""
    file, line = site or launch_site()
    launch = f"launched at {file}:{line}, defined at {kernel.file}:{kernel.line}"
    return UnsupportedLaunchError(f"Triton kernel '{kernel.name}' {why}. ({launch})")


@dataclass(frozen=True)
class ResolvedLaunch:
    """What goes to torch: a JITFunction or an Autotuner over one, the grid, and every argument by name."""

    kernel: Any
    grid: Any
    arguments: dict[str, Any]


def resolve(kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ResolvedLaunch:
    """The launch that `kernel.run(*args, **kwargs)` would make, evaluated up to the point where a device is needed.

    Args:
        kernel: a JITFunction or an Autotuner; `Heuristics.run` has already become one of the two.
        args: positional arguments of the kernel.
        kwargs: its keyword arguments, `grid`, `warmup` and launch options.

    Raises:
        UnsupportedKernelError: for decorations that torch cannot reproduce.
        UnsupportedLaunchError: for arguments or options that a graph cannot carry.
    """
    described = as_kernel(kernel)
    check_supported(described)
    given = kwargs.get("grid")
    grid = (lambda meta: _as_grid(described, given(meta))) if callable(given) else _as_grid(described, given)
    arguments, options = _bind(described, args, kwargs)
    autotuner = described.autotuners[0] if described.autotuners else None
    is_plain = autotuner is None and not options
    configs = [] if is_plain else _configs(described, autotuner, args, kwargs, options)
    _apply_heuristics(described, configs, arguments, kwargs, positional=len(args))
    _fill_defaults(described, arguments, configs)
    check_arguments(described, arguments, configs)
    _check_options(described, configs)
    baked = {name: value for name, value in arguments.items() if isinstance(value, JITFunction)}
    jit = self_contained(described.jit, baked)
    passed = {name: of_whole_tensor(value) for name, value in arguments.items() if name not in baked}
    launched = _autotuned(jit, autotuner, configs) if configs else jit
    check_writes(described, jit, launched, passed)
    return ResolvedLaunch(launched, grid, passed)


def emit(launch: ResolvedLaunch) -> None:
    """Record the launch in the graph being traced, through `torch.library.wrap_triton`.

    Raises:
        UnsupportedLaunchError: torch finds no write in the kernel's Triton IR, and would drop the launch as dead code.
            An example is a kernel that writes through pointers that it loads from a table.
    """
    with refuse_no_write(as_kernel(launch.kernel), launch.arguments.values()), not_listening():
        record_launch(launch.kernel, launch.grid, launch.arguments)


@contextmanager
def refuse_no_write(kernel: Kernel, values: Iterable[Any], site: tuple[str, int] | None = None) -> Iterator[None]:
    """Raise UnsupportedLaunchError if the launch of *kernel* in this scope writes none of its functional tensors.

    One that has no Tensors at all, but for example addresses, writes nothing that a graph knows of.
    """
    given = [one for one in map(described_tensor, values) if isinstance(one, torch.Tensor)]
    tensors = [one for one in given if functional_storage(one) is not None]
    before = [writes_traced(tensor) for tensor in tensors]
    yield
    if (tensors or not given) and before == [writes_traced(tensor) for tensor in tensors]:
        raise unsupported(kernel, WRITES_NOTHING, site)


def _bind(kernel: Kernel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a launch by parameter name, and its launch options by name."""
    names = kernel.jit.arg_names
    if len(args) > len(names):
        raise unsupported(kernel, f"was launched with {len(args)} positional arguments and takes {len(names)}")
    arguments = dict(zip(names, args, strict=False))
    options: dict[str, Any] = {}
    known = {*CONFIG_FIELDS, *(options_for_this_gpu({}) or frozenset().union(*options_of_backends().values()))}
    for name, value in kwargs.items():
        if name in known:
            options[name] = _constant(_plain(value))
        elif name in names:
            if name in arguments:
                raise unsupported(kernel, f"got the argument '{name}' twice")
            arguments[name] = value
        elif name not in ("grid", "warmup"):
            raise unsupported(kernel, f"is launched with {name}=, {_why_unknown(name, [*names, *known])}")
    return {name: _plain(value) for name, value in arguments.items()}, options


def _why_unknown(option: str, known: list[str]) -> str:
    others = [backend for backend, names in options_of_backends().items() if option in names]
    if others:
        return f"an option of Triton for other GPUs ({' and '.join(others)}) than the one here; leave it out"
    near = difflib.get_close_matches(option, known, 1)
    fix = f"did you mean {near[0]}=?" if near else "leave it out"
    return f"which is neither a parameter of it nor a launch option of Triton; {fix}"


def _configs(
    kernel: Kernel,
    autotuner: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: dict[str, Any],
) -> list[Config]:
    """The configs that this launch would choose from, as copies that may be changed.

    A kernel parameter called num_warps gets the value of the config, as in `Autotuner.run`.
    """
    names = kernel.jit.arg_names
    if autotuner is None:
        plain = options_for_this_gpu({})
        usual = {name: plain[name] for name in ("num_warps", "num_stages") if name in plain}
        return [_with_options(Config({}, **usual), options, names)]
    pruned = [copy.copy(config) for config in _pruned(autotuner, args, kwargs)]
    for config in pruned:
        given = {name: _plain(value) for name, value in config.all_kwargs().items()}
        clashes = sorted(given.keys() & {*kwargs, *names[: len(args)]})
        if clashes:
            raise unsupported(kernel, f"was launched with {', '.join(clashes)}, set by its @triton.autotune configs")
        config.kwargs = {name: value for name, value in given.items() if name in names or name in config.kwargs}
        for name in given.keys() & {*CONFIG_FIELDS}:
            setattr(config, name, given[name])
        _with_options(config, options, names)
    return pruned


def _with_options(config: Config, options: Mapping[str, Any], names: Sequence[str]) -> Config:
    """*config* with the options of a launch of a kernel whose parameters have these *names*."""
    for name, value in options.items():
        if name in CONFIG_FIELDS:
            setattr(config, name, value)
        if name in names or name not in CONFIG_FIELDS:
            config.kwargs[name] = value
    return config


def _check_options(kernel: Kernel, configs: list[Config]) -> None:
    """Leave those options in *configs* that change what Triton compiles.

    Raises:
        UnsupportedLaunchError: Inductor compiles the kernel without one of them.
    """
    plain = options_for_this_gpu({})
    given = [{name: value for name, value in config.all_kwargs().items() if name in plain} for config in configs]
    wanted = [options_for_this_gpu(options) for options in given]
    for config, wish in zip(configs, wanted, strict=True):
        needless = {name for name in plain if wish[name] == plain[name]} - {*kernel.jit.arg_names}
        config.kwargs = {name: value for name, value in config.kwargs.items() if name not in needless}
    named = dict.fromkeys(name for options in given for name in options if name not in ("num_warps", "num_stages"))
    if all(wish[name] == plain[name] for wish in wanted for name in named):
        return
    bare = [Config({})]
    usual = options_by_inductor(kernel.jit, bare, bare[0])
    for config, wish in zip(configs, wanted, strict=True):
        made = options_by_inductor(kernel.jit, configs, config)
        for name in named:
            is_plain = wish[name] == plain[name] and made[name] == usual[name]
            if wish[name] != made[name] and not is_plain:
                given_is = f"is launched with {name}={wish[name]!r}, and Inductor compiles it"
                raise unsupported(
                    kernel, f"{given_is} with {name}={made[name]!r}; leave it out to have it in the graph"
                )
    write_options()


def _pruned(autotuner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Config]:
    if len(autotuner.configs) < 2:
        return list(autotuner.configs)
    # prune_configs reads the arguments from the autotuner itself; a copy keeps the user's object as it is.
    scratch = copy.copy(autotuner)
    scratch.nargs = dict(zip(autotuner.arg_names, args, strict=False))
    return list(scratch.prune_configs(dict(kwargs)))


def _apply_heuristics(
    kernel: Kernel, configs: list[Config], arguments: dict[str, Any], kwargs: Mapping[str, Any], *, positional: int
) -> None:
    """Compute `@triton.heuristics` values below the autotuner, for each config, in the order that Triton does."""
    layers = [layer for layer in kernel.layers if isinstance(layer, Heuristics)]
    clashes = sorted({name for layer in layers for name in layer.values} & set(kernel.jit.arg_names[:positional]))
    if clashes:
        raise unsupported(kernel, f"was launched with {', '.join(clashes)}, computed by its @triton.heuristics")
    if not layers:
        return
    for config in configs:
        seen = {**arguments, **kwargs, **config.all_kwargs()}
        for layer in layers:
            for name, heuristic in layer.values.items():
                seen[name] = _plain(heuristic(dict(seen)))
                config.kwargs[name] = _constant(seen[name])
                if name in CONFIG_FIELDS:
                    setattr(config, name, config.kwargs[name])
    for layer in layers:
        for name in layer.values:
            arguments.pop(name, None)


def _fill_defaults(kernel: Kernel, arguments: dict[str, Any], configs: list[Config]) -> None:
    """Pass default values explicitly: torch's grid callback and its mutation analysis need every parameter."""
    for parameter in kernel.jit.params:
        name = parameter.name
        if not parameter.has_default or name in arguments:
            continue
        default = _plain(parameter.default)
        if any(name in config.kwargs for config in configs):
            for config in configs:
                config.kwargs.setdefault(name, default)
        else:
            arguments[name] = default


_TUNED: dict[Hashable, tuple[Any, object]] = {}
"""Autotuners by what they are made of, each with the objects whose ids are in the key. Equal ones have one
number in torch's table of kernels, and so in graphs."""


def _autotuned(jit: Any, autotuner: Any, configs: list[Config]) -> Any:
    """An Autotuner over another kernel like *jit*, with *configs*.

    Inductor writes one kernel for launches of one function with equal arguments, whatever their configs are.
    """
    settings: dict[str, Any] = {"key": []}
    if autotuner is not None:
        settings = {"key": list(autotuner.keys)}
        settings |= {name: list(getattr(autotuner, name)) for name in ("reset_to_zero", "restore_value")}
    held = [(name, value) for each in configs for name, value in {**vars(each), **each.kwargs, "kwargs": None}.items()]
    key = (id(jit), len(configs), str(settings), *((name, key_of(value)) for name, value in held))
    if key not in _TUNED:
        if len(_TUNED) > 512:
            _TUNED.clear()
        _TUNED[key] = triton.autotune(configs=configs, **settings)(another_kernel(jit)), (jit, held)
    return _TUNED[key][0]


def _as_grid(kernel: Kernel, grid: Any) -> tuple[Any, ...]:
    if not isinstance(grid, Sequence) or isinstance(grid, str):
        raise unsupported(kernel, f"was launched on the grid {grid!r}; a grid is a tuple of 1 to 3 sizes")
    if not 1 <= len(grid) <= 3:
        raise unsupported(kernel, f"was launched on a grid of {len(grid)} sizes; a grid is a tuple of 1 to 3 sizes")
    sizes = tuple(_plain(size) for size in grid)
    if any(isinstance(size, torch.Tensor) for size in sizes):
        raise unsupported(kernel, "was launched on a grid with a Tensor in it; give sizes, of a Tensor its .shape")
    return tuple(int(size) if isinstance(size, bool) else size for size in sizes)


def _plain(value: Any) -> Any:
    """*value* as a node can hold it, which has no symbolic size inside a tuple, and no symbolic truth value.

    A number of NumPy, and a member of an enumeration that is a number or a string, become that number or string.
    """
    plain = value.value if isinstance(value, constexpr) else value
    if isinstance(plain, enum.Enum) and isinstance(plain, int | float | str):
        return plain.value
    if type(plain).__module__ == "numpy" and getattr(plain, "shape", None) == ():
        return plain.item()
    return _constant(plain) if isinstance(plain, tuple | list | torch.SymBool) else plain


def _constant(value: Any) -> Any:
    """*value* as a config can hold it: a symbolic size becomes a number, as Triton specializes a constexpr."""
    if isinstance(value, tuple | list):
        parts = [_constant(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    number: Any = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}.get(type(value))
    return _plain(value) if number is None else number(value)
