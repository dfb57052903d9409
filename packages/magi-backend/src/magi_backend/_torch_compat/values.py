# SPDX-License-Identifier: Apache-2.0
"""Tensors, modules and compiled callables: what torch keeps on them."""

from __future__ import annotations

import contextlib
import copy
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo import trace_rules
from torch._dynamo.external_utils import wrap_inline
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def _dynamic_marks(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that ``mark_dynamic`` and similar functions set on *tensor*: ``_dynamo_dynamic_indices``, …."""
    marks = {name: value for name, value in vars(tensor).items() if "_dynamo_" in name or name == "_specialize_on"}
    return {name: copy.copy(value) for name, value in marks.items()}


def copy_dynamic_marks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give *target* the dynamic-dimension marks of *source*."""
    for name, value in _dynamic_marks(source).items():
        setattr(target, name, value)


def fix_size(tensor: torch.Tensor, dim: int) -> None:
    """Make Dynamo treat the size of *tensor* in *dim* as a constant, also under ``dynamic=True``."""
    torch._dynamo.mark_static(tensor, dim)


@contextlib.contextmanager
def dynamic_marks(tensors: Sequence[tuple[torch.Tensor, Mapping[int, str]]]) -> Iterator[None]:
    """A context in which dimensions of *tensors* have the mark "dynamic", "maybe" or "unbacked"; others do not change.

    If the traced code fixes a dimension, it is compiled for that size under the weak mark, and raises
    ConstraintViolationError under the strong one. A size of 0 or 1 is always fixed, so the mark of it is weak.
    """
    before = [(tensor, _dynamic_marks(tensor)) for tensor, _ in tensors]
    try:
        for tensor, dims in tensors:
            for dim, mark in dims.items():
                if mark == "unbacked":
                    torch._dynamo.decorators.mark_unbacked(tensor, dim)
                elif mark == "dynamic" and tensor.shape[dim] > 1:
                    torch._dynamo.mark_dynamic(tensor, dim)
                else:
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)
        yield
    finally:
        for tensor, marks in before:
            for name in _dynamic_marks(tensor):
                delattr(tensor, name)
            for name, value in marks.items():
                setattr(tensor, name, value)


def specialised(error: ConstraintViolationError) -> tuple[list[tuple[str, int, int]], str]:
    """What the code fixes although it was marked as dynamic (path, dimension, size), and the line that needs it."""
    pattern = r"You marked L\['(\w+)'\](.*?)\.size\(\)\[(\d+)\] as dynamic but .*? constant \((\d+)\)"
    dims = [(name + rest, int(dim), int(size)) for name, rest, dim, size in re.findall(pattern, str(error))]
    _, _, stack = str(error).partition("User stack:")
    lines = re.findall(r'File "(.*?)", line (\d+).*\n *(.*)', stack)
    return dims, "{}:{} (`{}`)".format(*lines[-1]) if lines else ""


def plain_call(module: torch.nn.Module) -> Callable[..., Any]:
    """The call of *module* with its hooks, never the compiled one.

    Dynamo captures no frame of torch's own classes, such as a Sequential, but follows a call of one (2.10 to 2.15).
    """
    call: Callable[..., Any] = module._call_impl
    return wrap_inline(call) if trace_rules.check(module.forward) else call


def set_compiled_call(owner: torch.nn.Module | type[torch.nn.Module], call: object) -> None:
    """Make ``nn.Module.__call__`` run *call*, for one instance or for every instance of a class.

    ``nn.Module.__setattr__`` is bypassed, so that the module does not show the attribute.
    """
    if isinstance(owner, type):
        owner._compiled_call_impl = call  # type: ignore[assignment]
    else:
        vars(owner)["_compiled_call_impl"] = call


def marked_as_compiled(
    call: Callable[..., Any],
    original: Callable[..., Any],
    compiled: Callable[..., Any],
    remake: Callable[[Callable[..., Any], Any], Callable[..., Any]],
) -> Callable[..., Any]:
    """*call*, a wrapper of *original*, marked as it is compiled in the way of functions that ``torch.compile`` returns.

    *compiled* is the result of ``torch.compile``, and *remake* makes a similar *call* from another function and
    backend. Inside another capture, Dynamo traces *original* in place of *call*.
    """
    # If *original* is compiled itself, `functools.wraps` has copied its mark, and torch 2.10 would run what that names.
    vars(call).pop("_torchdynamo_orig_callable", None)
    # Dynamo looks into this function when it runs the rest of a caller after a graph break.
    call = torch.compiler.disable(call)
    call._torchdynamo_orig_callable = original  # type: ignore[attr-defined]
    call._torchdynamo_inline = original  # type: ignore[attr-defined]
    call._magi_compiled = compiled  # type: ignore[attr-defined]
    call._magi_remake = remake  # type: ignore[attr-defined]
    return call


def uncompiled(fn: Any) -> Callable[..., Any] | None:
    """The function from which ``torch.compile`` or ``magi_compile`` made *fn*; None if *fn* is not compiled."""
    original = getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", None)
    if original is not None:
        # A method that was compiled in the body of its class is found, unbound, through the bound one.
        is_bound = isinstance(fn, types.MethodType)
        return types.MethodType(original, fn.__self__) if is_bound else original
    if isinstance(fn, torch.nn.Module) and fn._compiled_call_impl is not None:
        return fn._call_impl
    return None


@dataclass(frozen=True)
class CompiledBy:
    """How ``torch.compile`` made a function: its backend, and the other arguments."""

    backend: Any
    dynamic: bool | None
    fullgraph: bool
    remake: Callable[[Callable[..., Any], Any], Callable[..., Any]] | None = None
    """How ``magi_compile`` makes it of a function and a backend."""

    def make(self, fn: Callable[..., Any], backend: Any) -> Callable[..., Any]:
        """*fn* compiled by *backend* in the same way."""
        if self.remake is not None:
            return self.remake(fn, backend)
        return torch.compile(fn, backend=backend, dynamic=self.dynamic, fullgraph=self.fullgraph)

    @property
    def backend_name(self) -> str:
        """The name of the backend in ``torch.compile(backend=...)``."""
        names = (getattr(self.backend, name, None) for name in ("compiler_name", "__name__"))
        # Inductor's own wrapper has no name up to torch 2.12 (`_TorchCompileInductorWrapper`).
        return next((str(name) for name in names if name), "inductor")


def compiled_by(fn: Any) -> CompiledBy | None:
    """How *fn* was compiled, read from the closure of what ``torch.compile`` returned (2.10 to 2.15)."""
    if isinstance(fn, torch.nn.Module) and not hasattr(fn, "dynamo_ctx"):
        fn = fn._compiled_call_impl
    remake = getattr(fn, "_magi_remake", None)
    fn = getattr(fn, "_magi_compiled", fn)
    cells = (cell.cell_contents for cell in getattr(fn, "__closure__", None) or ())
    for context in (getattr(fn, "dynamo_ctx", None), *cells):
        if isinstance(context, torch._dynamo.eval_frame._TorchDynamoContext):
            callback: Any = context.callback
            backend = torch._dynamo.eval_frame.innermost_backend(callback)
            return CompiledBy(backend, context._dynamic, bool(context.fullgraph), remake)
    return None


def many_recompilations() -> contextlib.AbstractContextManager[Any]:
    """A context in which Dynamo compiles a function again, no matter how often it has done so before."""
    patch: Any = torch._dynamo.config.patch
    return patch(recompile_limit=2**20, accumulated_recompile_limit=2**20)  # type: ignore[no-any-return]


def synchronize() -> None:
    """Wait for the accelerator, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def version(tensor: torch.Tensor) -> int:
    """The number of writes to *tensor* so far."""
    return tensor._version


def float_memo(value: Any) -> Any:
    """The symbol of a float that is an input of a graph as a tensor, by that fake tensor; None for any other value."""
    memo = getattr(value, "item_memo", None) if isinstance(value, torch.Tensor) else None
    return memo if isinstance(memo, torch.SymFloat) else None


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether *tensor* is of a subclass that holds other tensors, such as a DTensor."""
    return bool(is_traceable_wrapper_subclass(tensor))


def is_plain_fake(tensor: torch.Tensor) -> bool:
    """Whether *tensor* is a fake tensor that holds no others, of which sizes, strides and dtype say everything."""
    return type(tensor) is FakeTensor


def storage_id(tensor: torch.Tensor) -> int:
    """A number that two tensors share exactly if they share memory; fake tensors have no address to compare."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # under vmap or grad (2.10 to 2.15)
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return int(tensor.untyped_storage()._cdata)
