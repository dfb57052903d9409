# SPDX-License-Identifier: Apache-2.0
"""Run Inductor's Triton kernels in Triton's interpreter, in the process that compiled them.

The interpreter runs one program of the grid after the other, with NumPy. Four things are ours: CUDA's libdevice in
terms of torch, reductions and scans over whole blocks instead of one element at a time, arguments of the types in the
signature, and a check that each address belongs to an argument of the launch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton.runtime import JITFunction, interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle


MAX_GRID_YZ = 65535
"""How many blocks CUDA allows along y, and along z."""


class WrongLaunch(AssertionError):
    """A launch breaks what its kernel was compiled for, or reaches memory that is not among its arguments."""


def launcher_of(kernel: CachingAutotuner, config: Any, run: Callable[..., None]) -> Callable[..., None]:
    """What Inductor would call to launch *kernel*, with its grid, and *run* in place of the binary.

    *run* gets the grid, then the arguments by name.
    """
    meta = kernel._create_compile_meta(config)
    result = triton_heuristics.TritonCompileResult(SimpleNamespace(), config, meta, kernel.inductor_meta)
    constants = triton_heuristics.get_constexprs(kernel.fn)  # type: ignore[attr-defined]
    _, names, _ = result._get_arg_lists(kernel.fn.arg_names, constants)
    passed = [name for name in names if name not in meta["constants"] and name in meta["signature"]]
    code = ["(grid_0, grid_1, grid_2)", *(f"{name}={name}" for name in passed)]
    return functools.partial(result._gen_launcher_code({"runner": run}, names, code), stream=0)


def steps_of(grid: tuple[int, ...], meta: Mapping[str, Any], arguments: Mapping[str, Any]) -> int:
    """How many blocks the programs of a launch go through one after the other."""
    loops = 1
    for name, block in meta["constants"].items():
        if name.startswith("R") and name.endswith("_BLOCK"):
            number = arguments.get(f"{name.removesuffix('_BLOCK').lower()}_numel", block)
            loops *= max(1, math.ceil(number / block))
    return math.prod(grid) * loops


def interpret(kernel: CachingAutotuner, config: Any, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
    """Run every program of a launch; within `interpreting`.

    Raises:
        WrongLaunch: The grid is too large, an argument does not fit its type, an alignment that the kernel relies on is
            not there, or a program reads or writes outside of the tensors among the arguments.
    """
    meta = kernel._create_compile_meta(config)
    name = kernel.fn.__name__
    if max(grid[1:]) > MAX_GRID_YZ:
        raise WrongLaunch(f"{name}: a card cannot be given a grid of {grid}")
    _check_alignment(name, kernel.fn.arg_names, meta, arguments)
    given = {key: _typed(name, key, meta["signature"][key], value) for key, value in arguments.items()}
    given |= {key: value for key, value in meta["constants"].items() if key in kernel.fn.arg_names}
    program = _interpreted(kernel.fn.fn)
    interpreter.interpreter_builder.set_grid_dim(*grid)
    with _memory_of(name, arguments.values()):
        for x in range(grid[0]):
            for y in range(grid[1]):
                for z in range(grid[2]):
                    interpreter.interpreter_builder.set_grid_idx(x, y, z)
                    program(**given)


@functools.lru_cache(maxsize=4096)
def _interpreted(function: Callable[..., Any]) -> Callable[..., Any]:
    return InterpretedFunction(function).rewrite()  # type: ignore[no-any-return]


def _check_alignment(kernel: str, names: list[str], meta: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    for (place, *_), claims in meta["configs"][0].items():
        value = arguments.get(names[place])
        number = value.data_ptr() if isinstance(value, Tensor) else value
        for claim, divisor in claims:
            if claim == "tt.divisibility" and isinstance(number, int) and number % divisor:
                raise WrongLaunch(f"{kernel}: {names[place]} is said to be divisible by {divisor}, and is {number}")


def _typed(kernel: str, name: str, kind: str, value: Any) -> Any:
    """*value* as the kernel takes it, whose signature names the type *kind*."""
    if isinstance(value, Tensor):
        declared = tl.str_to_ty(kind, None)
        actual = interpreter._implicit_cvt(value).dtype
        if declared.element_ty.primitive_bitwidth != value.element_size() * 8 and value.dtype != torch.bool:
            raise WrongLaunch(f"{kernel}: {name} is declared {declared}, and is {actual}")
        return tl.tensor(TensorHandle(np.array([value.data_ptr()], np.uint64), declared), declared)
    if not isinstance(value, (int, float)):
        return interpreter._implicit_cvt(value)
    declared = tl.str_to_ty(kind, None)
    dtype = interpreter._get_np_dtype(declared)
    if np.issubdtype(dtype, np.integer) and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        raise WrongLaunch(f"{kernel}: {name} = {value} does not fit in {declared}")
    return tl.tensor(TensorHandle(np.array([value], dtype), declared), declared)


@contextlib.contextmanager
def _memory_of(kernel: str, values: Any) -> Iterator[None]:
    """Every access within is checked to be to the memory of one of the tensors among *values*."""
    tensors = [getattr(value, "base", value) for value in values]
    storages = {each.untyped_storage() for each in tensors if isinstance(each, Tensor)}
    parts = sorted({(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages if each.nbytes()})
    starts, ends = (np.array([part[at] for part in parts], np.uint64) for at in (0, 1))

    def check(pointers: TensorHandle, mask: TensorHandle, what: str) -> None:
        used = np.broadcast_to(pointers.data, mask.data.shape)[mask.data.astype(bool)]
        if not used.size:
            return
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        part = np.searchsorted(starts, used, side="right").astype(np.int64) - 1
        outside = (part < 0) | (used + np.uint64(width) > ends[np.maximum(part, 0)])
        if outside.any():
            raise WrongLaunch(f"{kernel} {what} {int(outside.sum())} elements that belong to none of its arguments")

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "reads")
        return originals["create_masked_load"](self, pointers, mask, *rest)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "writes")
        return originals["create_masked_store"](self, pointers, value, mask, *rest)

    def change(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "changes")
        return originals["create_atomic_rmw"](self, operation, pointers, value, mask, *rest)

    checked: dict[str, Any] = {"create_masked_load": load, "create_masked_store": store, "create_atomic_rmw": change}
    originals = {name: getattr(InterpreterBuilder, name) for name in checked}
    with mock.patch.multiple(InterpreterBuilder, **checked):
        yield


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Within, Triton's language is the interpreter's, and nothing can be compiled."""
    # Modules that the patched language is looked up in.
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    try:
        for library in {triton_helpers.libdevice, tl.extra.libdevice}:  # type: ignore[attr-defined]
            for name, _ in inspect.getmembers(library, callable):
                scope.set_attr(library, name, functools.partial(_libdevice, name))
        with (
            mock.patch.object(JITFunction, "__call__", lambda self, *args, **how: _interpreted(self.fn)(*args, **how)),
            mock.patch.object(interpreter.ReduceOps, "generic_reduce", _reduce),
            mock.patch.object(interpreter.ScanOps, "generic_scan", _scan),
            np.errstate(all="ignore"),
        ):
            yield
    finally:
        scope.restore()


# What torch names otherwise than CUDA.
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "fabs": torch.abs,
    "rint": torch.round,
    "nearbyint": torch.round,
    "llrint": lambda x: torch.round(x).long(),
    "llround": lambda x: (torch.sign(x) * torch.floor(torch.abs(x) + 0.5)).long(),
    "round": lambda x: torch.sign(x) * torch.floor(torch.abs(x) + 0.5),
    "isinf": lambda x: torch.isinf(x).int(),
    "isinfd": lambda x: torch.isinf(x).int(),
    "isnan": lambda x: torch.isnan(x).int(),
    "isnand": lambda x: torch.isnan(x).int(),
    "finitef": lambda x: torch.isfinite(x).int(),
    "isfinited": lambda x: torch.isfinite(x).int(),
    "signbit": lambda x: torch.signbit(x).int(),
    "cyl_bessel_i0": torch.special.i0,
    "cyl_bessel_i1": torch.special.i1,
}


def _libdevice(name: str, *args: Any, **_how: Any) -> tl.tensor:
    """The function *name* of CUDA's library of *args*, as torch computes it."""
    function = _FUNCTIONS.get(name) or getattr(torch, name, None) or getattr(torch.special, name, None)
    if function is None:
        raise NotImplementedError(f"the interpreter has no libdevice.{name}: give it a function of torch in _FUNCTIONS")
    tensors = [interpreter.interpreter_semantic.to_tensor(arg) for arg in args]
    result = function(*(torch.from_numpy(np.ascontiguousarray(each.handle.data)) for each in tensors)).numpy()
    kinds = {np.dtype(np.int32): tl.int32, np.dtype(np.int64): tl.int64}
    dtype = kinds.get(result.dtype, tensors[0].dtype)
    is_block = any(each.type.is_block() for each in tensors)
    return tl.tensor(TensorHandle(result, dtype), tl.block_type(dtype, list(result.shape)) if is_block else dtype)


def _combined(operation: Any, left: list[Any], right: list[Any], dtypes: list[Any]) -> list[Any]:
    """What the function of a reduction or scan makes of two tuples of blocks."""
    blocks = [
        operation.to_tensor(data, dtype) for side in (left, right) for data, dtype in zip(side, dtypes, strict=True)
    ]
    results = operation.combine_fn.fn(*blocks)
    return [each.handle.data for each in (results if isinstance(results, tuple) else (results,))]


def _reduce(operation: Any, given: tuple[Any, ...]) -> list[Any]:
    """A reduction by halves; Triton's own goes through it element by element."""
    whole = operation.axis is None
    rank = len(given[0].handle.data.shape)
    blocks, axis = operation.unravel(given, operation.axis)
    dtypes = [each.dtype for each in blocks]
    parts = [np.moveaxis(each.handle.data, axis, 0) for each in blocks]
    while (size := len(parts[0])) > 1:
        half = size // 2
        rest = [part[2 * half :] for part in parts]
        joined = _combined(
            operation, [part[:half] for part in parts], [part[half : 2 * half] for part in parts], dtypes
        )
        parts = [np.concatenate(pair) for pair in zip(joined, rest, strict=True)]
    results = [part[0] for part in parts]
    if operation.keep_dims:
        results = [each.reshape((1,) * rank) if whole else np.expand_dims(each, axis) for each in results]
    return [operation.to_tensor(each, dtype) for each, dtype in zip(results, dtypes, strict=True)]


def _scan(operation: Any, given: tuple[Any, ...]) -> list[Any]:
    """A scan, one place after the other along its axis, each a block."""
    dtypes = [each.dtype for each in given]
    parts = [np.moveaxis(each.handle.data, operation.axis, 0) for each in given]
    found = [[part[:1] for part in parts]]
    for at in range(1, len(parts[0])):
        found.append(_combined(operation, found[-1], [part[at : at + 1] for part in parts], dtypes))
    scanned = [np.moveaxis(np.concatenate(column), 0, operation.axis) for column in zip(*found, strict=True)]
    return [operation.to_tensor(each, dtype) for each, dtype in zip(scanned, dtypes, strict=True)]
