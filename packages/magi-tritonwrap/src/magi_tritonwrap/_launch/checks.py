# SPDX-License-Identifier: Apache-2.0
"""What an op of Triton kernels must not be given or do: CPU tensors, and writes that its schema does not declare."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from magi_tritonwrap._torch_compat.kernels import refuses_cpu_tensors, target_here
from magi_tritonwrap._torch_compat.tracing import functional_storage, writes_traced
from magi_tritonwrap.errors import CpuTensorError, UndeclaredWriteError


P = ParamSpec("P")
R = TypeVar("R")


def translate_cpu_errors(fn: Callable[P, R], op: str) -> Callable[P, R]:
    """Return the body *fn* of an op with an error that names the op and both fixes if it gets CPU tensors.

    Example:
        >>> def double(x): return x * 2
        >>> translate_cpu_errors(double, "mylib::double")(3)
        6
    """

    @functools.wraps(fn)
    def body(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fn(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            if refuses_cpu_tensors(error) and are_on_cpu(args, kwargs):
                raise CpuTensorError(_sentence(op)) from error
            raise

    return body


def check_driver(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for a call with CPU tensors if Triton has no device to launch on.

    Raises:
        CpuTensorError: the error names *op* and both fixes.
    """
    if are_on_cpu(args, kwargs) and target_here() is None:
        raise CpuTensorError(_sentence(op))


def are_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call has tensors, and all of them are on the CPU."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return bool(tensors) and all(tensor.device.type == "cpu" for tensor in tensors)


def _sentence(op: str) -> str:
    return (
        f"{op} launches Triton kernels, which need a GPU, and got CPU tensors. Give it a body for them with "
        f'register_kernel(op, "cpu"), or set TRITON_INTERPRET=1 before the kernels are defined.'
    )


@contextmanager
def refuse_undeclared_writes(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """A context in which the body of *op* is traced, which may write into the Tensors that the schema declares.

    If every other Tensor seems written, nothing is raised, because torch reports that for a kernel that it cannot
    analyse. A Tensor that shares memory with a declared write may be written too.

    Raises:
        UndeclaredWriteError: the body wrote into some of the other Tensors, but not all.
    """
    found = list(_named(op, args, kwargs))
    declared = {functional_storage(tensor) for _, tensor, is_written in found if is_written}
    others = [(name, tensor) for name, tensor, _ in found if functional_storage(tensor) not in declared]
    before = [writes_traced(tensor) for _, tensor in others]
    yield
    written = [name for (name, tensor), count in zip(others, before, strict=True) if writes_traced(tensor) != count]
    if written and len(written) < len(others):
        listed = " and ".join(f"'{name}'" for name in written)
        text = f"{op.name()}: the body launches a kernel that writes into {listed}, which the schema of "
        why = "the operator does not declare: outside of a compiled graph, nothing would know that the Tensor changed. "
        raise UndeclaredWriteError(f"{text}{why}Name it: mutates_args=({', '.join(map(repr, written))},).")


def _named(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """The name of each Tensor, the Tensor, and whether the schema says that it is written."""
    arguments = op._schema.arguments  # noqa: SLF001
    given = kwargs | {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    for argument in arguments:
        value = given.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if functional_storage(tensor) is not None:
                yield argument.name, tensor, is_written
