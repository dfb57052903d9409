# SPDX-License-Identifier: Apache-2.0
"""What is tested: the inputs of a call, and one variant of a base in one slot, called through the surface and directly.

Inputs are made on the CPU, where ATen decides which of them it accepts, and moved to the device of a kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from magi_opschema._model.schema import tensors_in
from magi_opschema.aten._dispatch.kernels import Cell, Kernel, Pair, cells, out_names, python_names, select, write_out
from magi_opschema.aten._dispatch.slots import default_surface, use_slot
from magi_opschema.aten._generate.schema import ATEN_SLOT, split_base
from magi_opschema.aten._torch_compat import OpOverload, arguments, written_arguments
from torch import Tensor
from torch.utils._pytree import tree_map_only


UNDEFINED_CONTENTS = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
"""Bases whose results have undefined contents; everything except the values is compared."""


_UNDECLARED_WRITES = {"native_batch_norm": frozenset({"running_mean", "running_var"})}
"""Inputs that ATen writes although the schema does not declare it; such calls get copies."""


@dataclass(frozen=True)
class Sample:
    """Arguments in the schema's own names; `origin` says which provider made them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    origin: str
    dtype: torch.dtype

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Sample:
        return self._mapped(Tensor, change)

    def map_generators(self, change: Callable[[torch.Generator], torch.Generator | None]) -> Sample:
        return self._mapped(torch.Generator, change)

    def _mapped(self, kind: type, change: Callable[[Any], Any]) -> Sample:
        args, kwargs = tree_map_only(kind, change, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def tensors(self) -> list[Tensor]:
        return list(tensors_in((self.args, self.kwargs)))

    def without_generators(self) -> Sample:
        return self.map_generators(lambda _: None)

    def fresh(self) -> Sample:
        """Copies that a call may write to; generators start from the same state."""
        return self.map_tensors(lambda t: t.detach().clone())


def seed(sample: Sample) -> None:
    """Set the default generator, and one that the call passes, to the state from which both sides start."""
    torch.manual_seed(0)
    for value in (*sample.args, *sample.kwargs.values()):
        if isinstance(value, torch.Generator):
            value.manual_seed(0)


@dataclass(frozen=True)
class Subject:
    """One variant of a base, in one slot."""

    base: str
    pair: Pair
    slot: int

    @property
    def label(self) -> str:
        return dotted(self.base, self.pair.leading)

    @property
    def aten(self) -> bool:
        """Whether the slot is that of ATen, which is compared bit for bit."""
        return self.slot == ATEN_SLOT

    @cached_property
    def cell(self) -> Cell:
        return cells[self.base]

    @cached_property
    def function(self) -> Callable[..., Any]:
        submodule, name = split_base(self.base)
        module = default_surface() if submodule is None else getattr(default_surface(), submodule)
        function: Callable[..., Any] = getattr(module, name)
        return function

    @cached_property
    def outs(self) -> tuple[str, ...]:
        return out_names(self.cell, self.pair)

    @cached_property
    def leading(self) -> OpOverload:
        return self.cell.overloads[self.pair.leading]

    @cached_property
    def written(self) -> frozenset[str]:
        """Inputs that the operator writes."""
        declared = frozenset(a.name for a in written_arguments(self.leading) if a.name not in self.outs)
        return declared | _UNDECLARED_WRITES.get(self.base, frozenset())

    @property
    def defined(self) -> bool:
        """Whether the results have values that can be compared."""
        return self.base not in UNDEFINED_CONTENTS

    @property
    def lists_out(self) -> bool:
        """Whether `out=` takes a list of any length."""
        return any(a.is_out and str(a.type) != "Tensor" for a in arguments(self.cell.overloads[self.pair.names[-1]]))

    def ran(self, *, out: bool) -> str:
        """The overload that a form executes."""
        return dotted(self.base, self.pair.names[-1 if out else 0])

    def kernel_for(self, sample: Sample, *, differentiable: bool = False) -> Kernel | None:
        """The kernel of this slot, with a backward if *differentiable*, that serves a call; None where ATen would."""
        serving = self.cell.serving(self.pair, differentiable=differentiable)
        return select(serving, self.slot, sample.args, python_names(sample.kwargs))

    def surface(self, sample: Sample, *, out: Any = None, by_name: bool = False) -> Any:
        """Call the generated function in this slot."""
        if out is not None:
            # A factory's dtype and device are those of out.
            sample = replace(sample, kwargs={n: v for n, v in sample.kwargs.items() if n in self._out_keywords})
        call = self.surface_call(sample, by_name=by_name, **({} if out is None else {"out": out}))
        return self.seeded(sample, lambda: call(*sample.args))

    def surface_call(self, sample: Sample, *, by_name: bool = False, **options: Any) -> Callable[..., Any]:
        """The generated function with the keywords of *sample* bound, as a function to compile."""
        position = 0 if by_name else self._positions
        names = [a.name for a in arguments(self.leading) if not a.kwarg_only]
        late = python_names(dict(zip(names[position:], sample.args[position:], strict=False)))
        kwargs = late | python_names(sample.kwargs) | options
        return lambda *args: self.function(*args[:position], **kwargs)

    def seeded(self, sample: Sample, run: Callable[[], Any]) -> Any:
        """Call *run* in this slot, without gradients, from the same random state each time."""
        seed(sample)
        with use_slot(self.base, self.slot), torch.no_grad():
            return run()

    @cached_property
    def _positions(self) -> int:
        """How many arguments the generated function takes by position.

        `add.Scalar(self, other, alpha)` has three in ATen, but `add.Tensor`, the leading overload, has alpha after the
        star.
        """
        parameters = inspect.signature(self.function).parameters.values()
        if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
            return len(arguments(self.leading))
        return sum(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)

    def straight(self, sample: Sample) -> Any:
        """Call ATen's functional overload, or its out overload with new outs if there is no other."""
        seed(sample)
        with torch.no_grad():
            if self.pair.functional is not None:
                return self.leading(*sample.args, **sample.kwargs)
            like = next(t for t in sample.tensors())
            fresh = tuple(like.new_empty(0) for _ in self.outs)
            return self.straight_out(sample, fresh[0] if len(fresh) == 1 else fresh)

    def straight_out(self, sample: Sample, out: Any) -> Any:
        """Call ATen's out overload, or copy the functional result if there is none."""
        seed(sample)
        with torch.no_grad():
            if self.pair.out is None:
                return write_out(self.leading(*sample.args, **sample.kwargs), out)
            given = (list(out),) if self.lists_out else ((out,) if isinstance(out, Tensor) else tuple(out))
            kwargs = {name: value for name, value in sample.kwargs.items() if name in self._out_keywords}
            outs = dict(zip(self.outs, given, strict=True))
            self.cell.overloads[self.pair.out](*sample.args, **kwargs, **outs)
            return out

    @cached_property
    def _out_keywords(self) -> frozenset[str]:
        """The arguments of the out form, without a factory's options."""
        return frozenset(a.name for a in arguments(self.cell.overloads[self.pair.names[-1]]))


def dotted(base: str, overload: str) -> str:
    """`add.Tensor`; the unnamed overload is the base alone."""
    return base if overload == "default" else f"{base}.{overload}"


CPU = torch.device("cpu")


def device_of(kernels: Iterable[Kernel]) -> torch.device:
    """The default device on which kernels of one slot are tested: the CPU if one of them serves it."""
    devices = [kernel.condition.devices for kernel in kernels]
    if not devices or any(types is None or "cpu" in types for types in devices):
        return CPU
    return torch.device(min(type_ for types in devices for type_ in types or ()))


def missing(device: torch.device) -> str | None:
    """Why *device* cannot be used here; None if it can."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch asserts that it was built with CUDA
        return f"{device} cannot be used here: {str(error).splitlines()[0]}"
    return None


def on_device(subject: Subject, sample: Sample, device: torch.device) -> Sample:
    """The same call on *device*: its tensors, its generators, and the device argument of a factory."""
    if device == CPU:
        return sample
    moved = sample.map_tensors(lambda t: t.to(device)).map_generators(lambda _: torch.Generator(device))
    if not sample.tensors() and any(a.name == "device" for a in arguments(subject.leading)):
        moved.kwargs["device"] = device
    return moved


def flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def layouts(sample: Sample, *, elementwise: bool) -> Iterator[tuple[str, Sample]]:
    """The sample as it is, and in every other layout that its tensors can have; without dimensions if *elementwise*."""
    yield "dense", sample

    def dense(change: Any, dims: int = 1) -> Sample:
        return sample.map_tensors(lambda t: change(t) if t.layout is torch.strided and t.dim() >= dims else t)

    tensors = [t for t in sample.tensors() if t.layout is torch.strided]
    dims = {t.dim() for t in tensors}
    if not dims or dims == {0}:
        return
    # Every second element of a buffer twice as large; the last two dimensions swapped in memory; the first slice with
    # stride 0, as broadcasting passes it.
    yield "strided", dense(lambda t: t.new_zeros((*t.shape, 2))[..., 0].copy_(t))
    if max(dims) >= 2:
        yield "transposed", dense(lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2), dims=2)
    if dims & {4, 5}:
        yield "channels_last", sample.map_tensors(_channels_last)
    yield "broadcast", dense(lambda t: t[:1].clone().expand(t.shape) if t.shape[0] > 1 else t)
    yield "empty", dense(lambda t: t[:0].clone())
    if elementwise and all(t.numel() for t in tensors):
        yield "0-d", sample.map_tensors(lambda t: t.reshape(-1)[0].clone() if t.dim() else t)


def _channels_last(t: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.contiguous(memory_format=formats[t.dim()]) if t.dim() in formats else t


def out_modes(sample: Sample, expected: Any, *, edges: bool) -> Iterator[str]:
    """The modes in which a call can have an `out`; none if a result is not a strided Tensor."""
    if not all(isinstance(e, Tensor) and e.layout is torch.strided for e in flat(expected)):
        return
    yield "out"
    if not edges:
        return
    yield from ("out empty", "out strided", "out dtype")
    if _alias_of(sample, expected) is not None:
        yield "out alias"


def outs_of(sample: Sample, expected: Any, mode: str, subject: Subject) -> Any:
    """The `out` in *mode*: like *expected*, with other contents, and with shape, strides or dtype set by the mode."""
    if mode == "out alias":
        return _alias_of(sample, expected)
    outs = [_one_out(e, mode) for e in flat(expected)]
    if isinstance(expected, Tensor):
        return outs[0]
    return outs if subject.lists_out else tuple(outs)


def _one_out(expected: Tensor, mode: str) -> Tensor:
    if mode == "out empty":
        return expected.new_empty(0)
    if mode == "out strided":
        buffer = expected.new_empty((*expected.shape, 2))
        return _sentinel(buffer)[..., 0]
    if mode == "out dtype":
        return _sentinel(expected.new_empty(expected.shape, dtype=_other_dtype(expected.dtype)))
    return _sentinel(torch.empty_like(expected))


def _sentinel(t: Tensor) -> Tensor:
    """Values that no result has, to detect an `out` that was not written."""
    if t.dtype.is_floating_point or t.dtype.is_complex:
        return t.fill_(float("nan"))
    return t.fill_(True) if t.dtype is torch.bool else t.fill_(101)


def _other_dtype(dtype: torch.dtype) -> torch.dtype:
    """A dtype that a result of *dtype* cannot be cast to; for booleans, which can be cast to all, a wider one."""
    if dtype.is_complex:
        return torch.float32
    if dtype.is_floating_point:
        return torch.int64
    return torch.float32 if dtype is torch.bool else torch.bool


def _alias_of(sample: Sample, expected: Any) -> Tensor | None:
    if not isinstance(expected, Tensor):
        return None
    fitting = (t for t in sample.tensors() if t.shape == expected.shape and t.dtype == expected.dtype)
    return next((t for t in fitting if t.layout is torch.strided and t.is_contiguous()), None)
