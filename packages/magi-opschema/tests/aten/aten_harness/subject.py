# SPDX-License-Identifier: Apache-2.0
"""What is tested: one variant of a base in one slot, called through the surface and directly."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from magi_opschema.aten._dispatch.cells import Cell, Pair, cell_of
from magi_opschema.aten._dispatch.kernels import out_names, python_names, select
from magi_opschema.aten._dispatch.load import default_surface
from magi_opschema.aten._dispatch.out import write_out
from magi_opschema.aten._dispatch.slots import use_slot
from magi_opschema.aten._generate.schema import ATEN_SLOT, split_base
from magi_opschema.aten._torch_compat import OpOverload, arguments
from torch import Tensor

from .samples import Sample, seed


if TYPE_CHECKING:
    from collections.abc import Callable

    from magi_opschema.aten._dispatch.kernels import Kernel


UNDEFINED_CONTENTS = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
"""Bases whose results have undefined contents; everything except the values is compared."""


_UNDECLARED_WRITES = {"native_batch_norm": frozenset({"running_mean", "running_var"})}
"""Inputs that ATen writes although the schema does not declare it; such calls get copies."""


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

    def ran(self, *, out: bool) -> tuple[str, ...]:
        """The overload that a form executes."""
        name = (self.pair.out or self.pair.functional) if out else (self.pair.functional or self.pair.out)
        return (dotted(self.base, str(name)),)

    def kernel_for(self, sample: Sample) -> Kernel | None:
        """The kernel of this slot that serves a call; None where ATen would."""
        serving = tuple(k for k in self.cell.kernels if self.pair.leading in k.serves)
        return select(serving, self.slot, sample.args, python_names(sample.kwargs))

    def differentiates(self, sample: Sample) -> bool:
        """Whether a kernel of this slot with a backward serves a call."""
        serving = tuple(k for k in self.cell.kernels if self.pair.leading in k.serves and k.backward is not None)
        return select(serving, self.slot, sample.args, python_names(sample.kwargs)) is not None

    def surface(self, sample: Sample, *, out: Any = None, by_name: bool = False) -> Any:
        """Call the generated function in this slot."""
        kwargs = python_names(self._out_options(sample.kwargs) if out is not None else sample.kwargs)
        names = [a.name for a in arguments(self.leading) if not a.kwarg_only]
        position = 0 if by_name else self._positions
        named = dict(zip(names[position:], sample.args[position:], strict=False))
        kwargs = python_names(named) | kwargs
        if out is not None:
            kwargs["out"] = out
        return self.seeded(sample, lambda: self.function(*sample.args[:position], **kwargs))

    def surface_call(self, sample: Sample) -> Callable[..., Any]:
        """The generated function with the keywords of *sample* bound, as a function to compile."""
        names = [a.name for a in arguments(self.leading) if not a.kwarg_only]
        late = python_names(dict(zip(names[self._positions :], sample.args[self._positions :], strict=False)))
        kwargs = late | python_names(sample.kwargs)
        return lambda *args: self.function(*args[: self._positions], **kwargs)

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
            overload = self.cell.overloads[self.pair.out]
            known = {a.name for a in arguments(overload)}
            kwargs = {name: value for name, value in sample.kwargs.items() if name in known}
            overload(*sample.args, **kwargs, **dict(zip(self.outs, given, strict=True)))
            return out

    def _out_options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """*kwargs* with a factory's dtype and device taken from `out`."""
        if self.pair.out is None:
            return kwargs
        known = {a.name for a in arguments(self.cell.overloads[self.pair.out])}
        return {name: value for name, value in kwargs.items() if name in known}


def dotted(base: str, overload: str) -> str:
    """`add.Tensor`; the unnamed overload is the base alone."""
    return base if overload == "default" else f"{base}.{overload}"
