# SPDX-License-Identifier: Apache-2.0
"""What is tested: the inputs of a call, and one variant of a base in one slot, called through the surface and directly.

Inputs are made on the CPU, where ATen decides which of them it accepts, and moved to the device of a kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from magi_opschema.aten._dispatch.cells import Cell, Pair, cell_of
from magi_opschema.aten._dispatch.kernels import Kernel, out_names, python_names, select
from magi_opschema.aten._dispatch.load import default_surface
from magi_opschema.aten._dispatch.out import write_out
from magi_opschema.aten._dispatch.slots import use_slot
from magi_opschema.aten._generate.schema import ATEN_SLOT, split_base
from magi_opschema.aten._torch_compat import OpOverload, arguments
from torch import Tensor


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
        """The same call with every tensor changed, including those in lists."""

        def mapped(value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(value)
            if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
                return type(value)(map(mapped, value))
            return value

        return self.map_values(mapped)

    def map_values(self, change: Callable[[Any], Any]) -> Sample:
        """The same call with every argument changed."""
        kwargs = {name: change(value) for name, value in self.kwargs.items()}
        return replace(self, args=tuple(map(change, self.args)), kwargs=kwargs)

    def tensors(self) -> list[Tensor]:
        """Every tensor of the call."""
        found: list[Tensor] = []
        self.map_tensors(lambda t: (found.append(t), t)[1])  # type: ignore[func-returns-value]
        return found

    def without_generators(self) -> Sample:
        """The same call, with the default generator."""
        return self.map_values(lambda value: None if isinstance(value, torch.Generator) else value)

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
        """`add.Tensor`."""
        return dotted(self.base, self.pair.leading)

    @property
    def aten(self) -> bool:
        """Whether the slot is that of ATen, which is compared bit for bit."""
        return self.slot == ATEN_SLOT

    @cached_property
    def cell(self) -> Cell:
        """The base's cell."""
        return cell_of(self.base)

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The generated function."""
        submodule, name = split_base(self.base)
        module = default_surface() if submodule is None else getattr(default_surface(), submodule)
        function: Callable[..., Any] = getattr(module, name)
        return function

    @cached_property
    def outs(self) -> tuple[str, ...]:
        """The out arguments of ATen's out overload."""
        return out_names(self.cell, self.pair)

    @cached_property
    def leading(self) -> OpOverload:
        """The overload that names the variant."""
        return self.cell.overloads[self.pair.leading]

    @cached_property
    def written(self) -> frozenset[str]:
        """Inputs that the operator writes."""
        writes = (a for a in arguments(self.leading) if a.alias_info is not None and a.alias_info.is_write)
        declared = frozenset(a.name for a in writes if a.name not in self.outs)
        return declared | _UNDECLARED_WRITES.get(self.base, frozenset())

    @property
    def defined(self) -> bool:
        """Whether the results have values that can be compared."""
        return self.base not in UNDEFINED_CONTENTS

    @property
    def lists_out(self) -> bool:
        """Whether `out=` takes a list of any length."""
        return any(
            a.is_out and str(a.type) != "Tensor"
            for a in arguments(self.cell.overloads[self.pair.out or self.pair.leading])
        )

    def ran(self, *, out: bool) -> str:
        """The overload that a form executes."""
        name = (self.pair.out or self.pair.functional) if out else (self.pair.functional or self.pair.out)
        return dotted(self.base, str(name))

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
        return frozenset(a.name for a in arguments(self.cell.overloads[self.pair.out or self.pair.leading]))


def dotted(base: str, overload: str) -> str:
    """`add.Tensor`; the unnamed overload is the base alone."""
    return base if overload == "default" else f"{base}.{overload}"


CPU = torch.device("cpu")


def device_of(kernels: Iterable[Kernel]) -> torch.device:
    """The default device on which kernels of one slot are tested: the CPU if one of them serves it."""
    devices = [kernel.devices for kernel in kernels]
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
    moved = sample.map_tensors(lambda t: t.to(device)).map_values(
        lambda value: torch.Generator(device) if isinstance(value, torch.Generator) else value
    )
    if not sample.tensors() and any(a.name == "device" for a in arguments(subject.leading)):
        moved.kwargs["device"] = device
    return moved
