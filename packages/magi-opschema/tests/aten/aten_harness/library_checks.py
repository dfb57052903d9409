# SPDX-License-Identifier: Apache-2.0
"""`torch.library.opcheck` on the library operators of a kernel's variant.

A kernel in slot 2 that serves `add.Tensor` defines `add__Tensor` and `add__out` (the lowest active slot), both also
with `__use2` (a preferred slot); with a backward, it defines `add__Tensor__slot2`, which is differentiated too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from magi_opschema.aten._dispatch.route import kernel_op, library_op
from magi_opschema.aten._torch_compat import arguments
from torch import Tensor

from .compare import flat
from .samples import Sample


if TYPE_CHECKING:
    from magi_opschema.aten._torch_compat import OpOverload

    from .subject import Subject


_PLAIN = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
_REGISTRATION = ("test_autograd_registration",)
_ALL = (*_PLAIN, *_REGISTRATION)


FORMS = frozenset({"lowest", "preferred", "differentiated"})
"""The forms of operators of a kernel: of the lowest active slot, with its slot preferred, and with its backward."""


def library_operators(subject: Subject, forms: frozenset[str] = FORMS) -> list[OpOverload]:
    """Every library operator that a call of *subject* can become."""
    pair, cell = subject.pair, subject.cell
    overloads = [name for name in (pair.functional, pair.out) if name is not None]
    choices = [chosen for form, chosen in (("lowest", None), ("preferred", subject.slot)) if form in forms]
    operators = [library_op(cell, pair, name, chosen) for chosen in choices for name in overloads]
    mine = [k for k in cell.kernels if k.slot == subject.slot and pair.leading in k.serves and k.backward]
    return operators + [kernel_op(cell, pair, kernel) for kernel in mine if "differentiated" in forms]


def opcheck(subject: Subject, sample: Sample, expected: Any, op: OpOverload) -> str | None:
    """The failure that `torch.library.opcheck` finds for *op*; None if there is none.

    Args:
        subject: The variant and the slot.
        sample: Inputs that the kernel serves.
        expected: The result of ATen, whose shapes the outs get.
        op: One of `library_operators(subject)`.
    """
    # opcheck runs the operator several times, each from one state of the default generator.
    plain = sample.without_generators().fresh()
    if not subject.defined:
        return _of_undefined_contents(op, plain, _keywords(subject, plain, expected, op))
    with torch.no_grad():
        found = _first_finding(op, plain.args, _keywords(subject, plain, expected, op), _PLAIN)
    if found is not None or any(a.is_out for a in arguments(op)):
        return found
    graded = plain.map_tensors(_requiring_grad)
    return _first_finding(op, graded.args, graded.kwargs, _ALL if "__slot" in op.name() else _REGISTRATION)


def _of_undefined_contents(op: OpOverload, sample: Sample, kwargs: dict[str, Any]) -> str | None:
    """Whether the results have undefined contents that are not integers: deterministic mode fills floats with NaN."""
    whole = Sample(sample.args, kwargs, sample.origin, torch.int64).map_tensors(lambda t: t.to(torch.int64))
    keywords = {name: torch.int64 if name == "dtype" else value for name, value in whole.kwargs.items()}
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return _first_finding(op, whole.args, keywords, _PLAIN)
    finally:
        torch.use_deterministic_algorithms(before)


def _first_finding(op: OpOverload, args: Any, kwargs: dict[str, Any], tests: tuple[str, ...]) -> str | None:
    outcomes = torch.library.opcheck(op, args, kwargs, test_utils=tests, raise_exception=False)
    for test, outcome in outcomes.items():
        if outcome != "SUCCESS":
            return f"{test}: {type(outcome).__name__}: {next(iter(str(outcome).strip().splitlines()), '')}"
    return None


def _keywords(subject: Subject, sample: Sample, expected: Any, op: OpOverload) -> dict[str, Any]:
    """The keywords of *sample* that *op* has, and outs for its other arguments."""
    names = {a.name for a in arguments(op)}
    kwargs = {name: value for name, value in sample.kwargs.items() if name in names}
    missing = [name for name in subject.outs if name in names]
    if not missing:
        return kwargs
    outs = [torch.zeros_like(e) for e in flat(expected)]
    return kwargs | ({missing[0]: outs} if subject.lists_out else dict(zip(missing, outs, strict=True)))


def _requiring_grad(t: Tensor) -> Tensor:
    return t.requires_grad_() if t.dtype.is_floating_point or t.dtype.is_complex else t
