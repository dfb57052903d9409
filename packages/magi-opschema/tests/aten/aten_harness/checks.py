# SPDX-License-Identifier: Apache-2.0
"""The checks of one call.

Slot 8 is compared with ATen bit for bit, because the surface must choose the same overload and pass on every argument.
Lower slots are compared with ATen in float64, within the tolerance of their dtype, and in shape, dtype, device and
strides.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import reasons as _reasons
from .compare import close, differing_elements, flat, same_bits
from .gradients import Gradients, differing_gradient, expected_gradients
from .library_checks import library_operators, opcheck
from .outs import castable, out_modes, outs_of
from .rows import Row
from .torch_names import compile_whole


if TYPE_CHECKING:
    from collections.abc import Callable

    from .samples import Sample
    from .subject import Subject
    from .workers import Note


_KERNEL_TOLERANCE = 2.0
"""A factor of the tolerance of `torch.testing`, because a kernel may sum in another order than ATen."""

LIBRARY_CHECK = "opcheck"
"""The prefix of the check of rows about a library operator; its name follows."""

_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


@dataclass(frozen=True)
class Call:
    """One input in one layout, and its names in rows."""

    subject: Subject
    sample: Sample
    layout: str
    label: str

    def row(self, check: str, outcome: str, detail: str = "", *, ran: tuple[str, ...] = ()) -> Row:
        """Make a row about this call."""
        dtype = str(self.sample.dtype).removeprefix("torch.")
        return Row(self.subject.label, self.subject.slot, check, dtype, self.layout, self.label, outcome, detail, ran)


class Checker:
    """Runs the checks of calls.

    Checks that crashed an earlier process are left out, because they have their row already.
    """

    def __init__(self, note: Note, left_out: frozenset[str]) -> None:
        self._note = note
        self._left_out = left_out

    def check(self, call: Call, *, edges: bool, fullgraph: bool = False) -> list[Row]:
        """Run every check of one call.

        Args:
            call: The call.
            edges: Add the checks that need only one input for each dtype.
            fullgraph: Add the compilation, which needs only one input for each variant.
        """
        rows: list[Row] = []
        expected = self._guarded(call, "reference", lambda: _outcome(lambda: call.subject.straight(_own(call))))
        if expected is None:
            return rows
        if isinstance(expected, Exception):
            return rows + self._refusal(call, expected)
        if not call.subject.aten and call.subject.kernel_for(call.sample) is None:
            return [*rows, call.row("functional", "skip", _reasons.NOT_SERVED)]
        self._add(rows, call, "functional", lambda: _functional(call, expected))
        if edges:
            self._add(rows, call, "by name", lambda: _functional(call, expected, by_name=True))
        if fullgraph:
            self._add(rows, call, "fullgraph", lambda: _fullgraph(call))
        if call.subject.differentiates(call.sample):
            gradients = self._guarded(call, "reference", lambda: expected_gradients(call.subject, call.sample))
            if gradients is not None:
                self._add(rows, call, "backward", lambda: _backward(call, gradients))
        for mode in out_modes(call.sample, expected, edges=edges):
            self._add(rows, call, mode, lambda mode=mode: _out(call, expected, mode), out=True)  # type: ignore[misc]
        return rows

    def check_library(self, call: Call, forms: frozenset[str], *, plain_numbers: bool) -> list[Row]:
        """Run `opcheck` on every library operator that the call can become.

        There are no rows if the kernel does not serve the call, or with *plain_numbers* if ATen's result has a NaN.
        """
        expected = self._guarded(call, "reference", lambda: _outcome(lambda: call.subject.straight(_own(call))))
        if expected is None or isinstance(expected, Exception) or call.subject.kernel_for(call.sample) is None:
            return []
        if plain_numbers and any(isinstance(e, Tensor) and bool(e.isnan().any()) for e in flat(expected)):
            return []
        rows: list[Row] = []
        for op in library_operators(call.subject, forms):
            name = f"{LIBRARY_CHECK} {op.name().partition('::')[2]}"
            self._add(rows, call, name, lambda op=op: opcheck(call.subject, call.sample, expected, op))  # type: ignore[misc]
        return rows

    def _refusal(self, call: Call, expected: Exception) -> list[Row]:
        rows: list[Row] = []
        if call.subject.aten:
            self._add(rows, call, "refusal", lambda: _same_refusal(call, expected), counts=False)
            return rows
        return [call.row("functional", "skip", _reasons.REFUSED)]

    def _add(
        self,
        rows: list[Row],
        call: Call,
        check: str,
        run: Callable[[], str | None],
        *,
        out: bool = False,
        counts: bool = True,
    ) -> None:
        def row() -> Row:
            reason = _outcome(run)
            if isinstance(reason, Exception):
                reason = f"{type(reason).__name__}: {str(reason).splitlines()[0] if str(reason) else ''}"
            ran = call.subject.ran(out=out) if counts else ()
            return call.row(check, "pass" if reason is None else "fail", reason or "", ran=ran)

        found = self._guarded(call, check, row)
        if found is not None:
            rows.append(found)

    def _guarded(self, call: Call, check: str, run: Callable[[], Any]) -> Any:
        """Run a check that may kill the process, after its name was noted."""
        key = call.row(check, "fail").key
        # After one crash a check is not repeated; if the reference crashes, only that input is left out.
        if key in self._left_out or (check != "reference" and self._crashed(call, check)):
            return None
        self._note.write(key)
        return run()

    def _crashed(self, call: Call, check: str) -> bool:
        prefix = f"{call.subject.label}|{call.subject.slot}|{check}|"
        return any(note.startswith(prefix) for note in self._left_out)


def _functional(call: Call, expected: Any, *, by_name: bool = False) -> str | None:
    sample = _own(call)
    before = _snapshot(sample)
    got = call.subject.surface(sample, by_name=by_name)
    reason = _verdict(call, got, expected)
    if reason is not None:
        return reason
    if not call.subject.aten and _aliases(got, sample):
        return "a result shares memory with an input"
    return None if call.subject.written else _changed(sample, before)


def _backward(call: Call, expected: Gradients) -> str | None:
    return differing_gradient(call.subject, call.sample, expected, scale=_KERNEL_TOLERANCE)


def _fullgraph(call: Call) -> str | None:
    """Whether the call, compiled without a graph break, returns the same.

    It uses the default generator, as Dynamo requires.
    """
    sample = _own(call).without_generators()
    compiled = compile_whole(call.subject.surface_call(sample))
    got = call.subject.seeded(sample, lambda: compiled(*sample.args))
    return _verdict(call, got, call.subject.straight(_own(call).without_generators()))


def _out(call: Call, expected: Any, mode: str) -> str | None:
    """Check the contract of `out=` in one mode: ATen with its own out overload, a kernel with the functional form."""
    subject = call.subject
    sample, twin = _own(call), _own(call)
    fresh = mode == "out alias" or bool(subject.written)
    sample, twin = (sample.fresh(), twin.fresh()) if fresh else (sample, twin)
    out = outs_of(sample, expected, mode, subject)
    before = None if fresh else _snapshot(sample)
    wanted_out = outs_of(twin, expected, mode, subject)
    wanted = _outcome(lambda: subject.straight_out(twin, wanted_out))
    layout_before = [(t.stride(), t.data_ptr()) for t in flat(out)]
    got = _outcome(lambda: subject.surface(sample, out=out))
    if isinstance(wanted, Exception):
        must_refuse = subject.aten or (mode == "out dtype" and not castable(expected, out))
        if not must_refuse:
            return None
        return None if isinstance(got, type(wanted)) else f"{_told(got)} instead of {type(wanted).__name__}"
    if isinstance(got, Exception):
        return _told(got)
    if got is not out:
        return "out= returned something else than out"
    reason = _out_verdict(call, out, wanted_out, expected, mode)
    if reason is None and mode == "out strided" and layout_before != [(t.stride(), t.data_ptr()) for t in flat(out)]:
        return "the strides of out changed"
    return reason or (_changed(sample, before) if before is not None else None)


def _out_verdict(call: Call, out: Any, wanted: Any, expected: Any, mode: str) -> str | None:
    subject = call.subject
    if subject.aten:
        reason = same_bits(out, wanted, contents=subject.defined)
        if reason is not None:
            return f"unlike ATen's own out: {reason}"
    if mode in {"out dtype", "out alias"} and subject.aten:
        return None
    if not subject.defined:
        return None
    target = [e.to(o.dtype) for e, o in zip(flat(expected), flat(out), strict=True)]
    if subject.aten:
        reason = close(out, target, strides=False, gross=True)
        return None if reason is None else f"unlike the functional form: {reason}"
    return _kernel_verdict(call, out, target, strides=False)


def _verdict(call: Call, got: Any, expected: Any) -> str | None:
    if call.subject.aten:
        return same_bits(got, expected, contents=call.subject.defined)
    return _kernel_verdict(call, got, expected, strides=True)


def _kernel_verdict(call: Call, got: Any, expected: Any, *, strides: bool) -> str | None:
    """Compare with ATen in float64, or with ATen in the same dtype if the inputs leave no digits to compare."""
    form = same_bits(got, expected, contents=False) if strides else None
    if form is not None:
        return form
    precise = _outcome(lambda: call.subject.straight(_own(call).map_tensors(_widened)))
    if not isinstance(precise, Exception):
        pairs = zip(flat(precise), flat(expected), strict=True)
        reference = [p.to(e.dtype) if e.dtype.is_floating_point or e.dtype.is_complex else e for p, e in pairs]
        if close(got, reference, strides=strides, scale=_KERNEL_TOLERANCE) is None:
            return None
    return close(got, expected, strides=strides, scale=_KERNEL_TOLERANCE)


def _same_refusal(call: Call, expected: Exception) -> str | None:
    got = _outcome(lambda: call.subject.surface(_own(call)))
    if isinstance(got, type(expected)):
        return None
    return f"{_told(got)} instead of {type(expected).__name__}: {expected}"


def _own(call: Call) -> Sample:
    """The inputs of the call, as copies if the operator writes into them by its schema."""
    return call.sample.fresh() if call.subject.written else call.sample


def _snapshot(sample: Sample) -> list[Tensor]:
    return [t.clone() for t in sample.tensors() if t.layout is torch.strided]


def _changed(sample: Sample, before: list[Tensor]) -> str | None:
    after = [t for t in sample.tensors() if t.layout is torch.strided]
    for position, (a, b) in enumerate(zip(after, before, strict=True)):
        if a.shape != b.shape or differing_elements(a, b):
            return f"input tensor {position} was changed"
    return None


def _aliases(got: Any, sample: Sample) -> bool:
    held = {t.untyped_storage().data_ptr() for t in sample.tensors() if t.layout is torch.strided and t.numel()}
    return any(isinstance(t, Tensor) and t.numel() and t.untyped_storage().data_ptr() in held for t in flat(got))


def _widened(t: Tensor) -> Tensor:
    return t.to(_WIDER.get(t.dtype, t.dtype))


def _told(outcome: Any) -> str:
    if isinstance(outcome, Exception):
        text = str(outcome).splitlines()
        return f"{type(outcome).__name__}: {text[0] if text else ''}"
    return "a result"


def _outcome(run: Callable[[], Any]) -> Any:
    """What *run* returns, or the exception that it raises, because here an exception is a result to compare."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run()
        except Exception as error:  # noqa: BLE001  # whatever a kernel raises is compared or reported, never dropped
            return error
