# SPDX-License-Identifier: Apache-2.0
"""The checks of one call.

Slot 8 is compared with ATen bit for bit, because the surface must choose the same overload and pass on every argument.
Lower slots are compared with ATen in float64, within the tolerance of their dtype, and in shape, dtype, device and
strides; so are the gradients of a kernel with a backward. `torch.library.opcheck` runs on the library operators of a
kernel's variant: a kernel in slot 2 that serves `add.Tensor` defines `add__Tensor` and `add__out` (the lowest active
slot), both also with `__use2` (a preferred slot); with a backward, it defines `add__Tensor__slot2`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from magi_opschema.aten._dispatch.route import kernel_op, library_op
from magi_opschema.aten._dispatch.slots import use_slot
from magi_opschema.aten._torch_compat import OpOverload, arguments
from torch import Tensor

from . import known as _known
from .subject import Sample, Subject, flat, out_modes, outs_of, seed
from .workers import Note


KERNEL_TOLERANCE = 2.0
"""A factor of the tolerance of `torch.testing`, because a kernel may sum in another order than ATen."""

LIBRARY_CHECK = "opcheck"
"""The prefix of the check of rows about a library operator; its name follows."""

FORMS = frozenset({"lowest", "preferred", "differentiated"})
"""The forms of operators of a kernel: of the lowest active slot, with its slot preferred, and with its backward."""

_PLAIN = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
_REGISTRATION = ("test_autograd_registration",)

_WIDER = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)
_WIDER |= {torch.complex64: torch.complex128}


@dataclass(frozen=True)
class Row:
    """One check of an overload in a slot, by the form of its inputs and their origin, and its outcome.

    It is `pass`, `fail`, `xfail` (a known divergence of torch) or `skip`; `detail` is the reason for anything but a
    pass, and `ran` the overload that executed.
    """

    overload: str
    slot: int
    check: str
    dtype: str
    layout: str
    sample: str
    outcome: str
    detail: str = ""
    ran: str = ""

    @property
    def key(self) -> str:
        """A key that identifies the row among all rows."""
        return f"{self.overload}|{self.slot}|{self.check}|{self.dtype}|{self.layout}|{self.sample}"

    def __str__(self) -> str:
        where = f"{self.overload} slot {self.slot} {self.check} [{self.dtype} {self.layout} {self.sample}]"
        return f"{where}: {self.outcome}{': ' + self.detail if self.detail else ''}"


@dataclass(frozen=True)
class Call:
    """One input in one layout, and its names in rows."""

    subject: Subject
    sample: Sample
    layout: str
    label: str

    def row(self, check: str, outcome: str, detail: str = "", *, ran: str = "") -> Row:
        """Make a row about this call."""
        dtype = str(self.sample.dtype).removeprefix("torch.")
        return Row(self.subject.label, self.subject.slot, check, dtype, self.layout, self.label, outcome, detail, ran)

    @property
    def own(self) -> Sample:
        """The inputs, as copies if the operator writes into them by its schema."""
        return self.sample.fresh() if self.subject.written else self.sample


class Checker:
    """Runs the checks of calls, without those that crashed an earlier process, because they have their row already."""

    def __init__(self, note: Note, left_out: frozenset[str]) -> None:
        self._note = note
        self._left_out = left_out

    def check(self, call: Call, *, edges: bool, fullgraph: bool = False) -> list[Row]:
        """Run every check of one call, with *edges* those for one input of a dtype, with *fullgraph* compiled."""
        subject, sample = call.subject, call.sample
        rows: list[Row] = []

        def add(check: str, run: Callable[..., str | None], *given: Any, out: bool = False, **options: Any) -> None:
            rows.extend(self._rows(call, check, lambda: run(call, *given, **options), out=out))

        expected = self._guarded(call, "reference", lambda: _outcome(lambda: subject.straight(call.own)))
        if expected is None:
            return rows
        if isinstance(expected, Exception):
            if not subject.aten:
                return [call.row("functional", "skip", _known.REFUSED)]
            refusals = self._rows(call, "refusal", lambda: _same_refusal(call, expected))
            return [call.row(row.check, row.outcome, row.detail) for row in refusals]
        if not subject.aten and subject.kernel_for(sample) is None:
            return [call.row("functional", "skip", _known.NOT_SERVED)]
        add("functional", _functional, expected)
        if edges:
            add("by name", _functional, expected, by_name=True)
        if fullgraph:
            add("fullgraph", _fullgraph)
        if subject.kernel_for(sample, differentiable=True) is not None:
            gradients = self._guarded(call, "reference", lambda: _expected_gradients(subject, sample))
            if gradients is not None:
                add("backward", _backward, gradients)
        for mode in out_modes(sample, expected, edges=edges):
            add(mode, _out, expected, mode, out=True)
        return rows

    def check_library(self, call: Call, forms: frozenset[str], *, plain_numbers: bool) -> list[Row]:
        """Run `opcheck` on every library operator that the call can become.

        There are no rows if the kernel does not serve the call, or with *plain_numbers* if ATen's result has a NaN.
        """
        expected = self._guarded(call, "reference", lambda: _outcome(lambda: call.subject.straight(call.own)))
        if expected is None or isinstance(expected, Exception) or call.subject.kernel_for(call.sample) is None:
            return []
        if plain_numbers and any(isinstance(e, Tensor) and bool(e.isnan().any()) for e in flat(expected)):
            return []
        rows: list[Row] = []
        for op in _library_operators(call.subject, forms):
            name = f"{LIBRARY_CHECK} {op.name().partition('::')[2]}"
            rows += self._rows(call, name, lambda op=op: _opcheck(call.subject, call.sample, expected, op))  # type: ignore[misc]
        return rows

    def _rows(self, call: Call, check: str, run: Callable[[], str | None], *, out: bool = False) -> list[Row]:
        """The row of one check, whose *run* returns what is wrong; none where the check is left out."""

        def row() -> Row:
            reason = _outcome(run)
            if isinstance(reason, Exception):
                reason = _told(reason)
            return call.row(check, "pass" if reason is None else "fail", reason or "", ran=call.subject.ran(out=out))

        found = self._guarded(call, check, row)
        return [] if found is None else [found]

    def _guarded(self, call: Call, check: str, run: Callable[[], Any]) -> Any:
        """Run a check that may kill the process, after its name was noted."""
        key = call.row(check, "fail").key
        same_check = f"{call.subject.label}|{call.subject.slot}|{check}|"
        # After one crash a check is not repeated; if the reference crashes, only that input is left out.
        crashed = check != "reference" and any(note.startswith(same_check) for note in self._left_out)
        if crashed or key in self._left_out:
            return None
        self._note.write(key)
        return run()


def difference(
    got: Any, expected: Any, *, strides: bool = True, contents: bool = True, scale: float = 0.0, gross: bool = False
) -> str | None:
    """The difference between two results in words, None if there is none; NaN equals NaN.

    *scale* is a factor of the tolerance of `torch.testing.assert_close`; 0 compares bit for bit. With *gross*,
    differences within the last digits of the largest element are accepted, because two kernels of one operator may sum
    in another order.
    """
    left, right = flat(got), flat(expected)
    if len(left) != len(right):
        return f"{len(left)} results instead of {len(right)}"
    for position, (a, b) in enumerate(zip(left, right, strict=True)):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            same = type(a) is type(b) and (a == b or (a != a and b != b))  # noqa: PLR0124  # NaN differs from itself
            reason = None if same else f"{a!r} instead of {b!r}"
        else:
            form = [name for name in ("dtype", "shape", "device") if getattr(a, name) != getattr(b, name)]
            form += ["stride"] if not form and strides and not _same_strides(a, b) else []
            reason = ", ".join(f"{name} {getattr(a, name)} instead of {getattr(b, name)}" for name in form) or None
            if not form and contents and b.layout is torch.strided and not torch.equal(a, b):
                reason = _differing_values(a, b, scale=scale, gross=gross)
        if reason is not None:
            return f"result {position}: {reason}"
    return None


def _differing_values(a: Tensor, b: Tensor, *, scale: float, gross: bool) -> str | None:
    rtol, atol = torch.testing._comparison.default_tolerances(b.dtype) if scale else (0.0, 0.0)
    if gross and rtol and (finite := b[b.isfinite()]).numel():
        atol = max(atol, 100 * rtol * float(finite.abs().max()))
    try:
        torch.testing.assert_close(a, b, rtol=rtol * scale, atol=atol * scale, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return None


def _same_strides(a: Tensor, b: Tensor) -> bool:
    """Whether the strides agree, without those of dimensions of one element, and for tensors with elements."""
    triples = zip(b.shape, a.stride(), b.stride(), strict=True)
    return a.numel() == 0 or all(size < 2 or left == right for size, left, right in triples)


def _functional(call: Call, expected: Any, *, by_name: bool = False) -> str | None:
    sample = call.own
    before = _snapshot(sample)
    got = call.subject.surface(sample, by_name=by_name)
    reason = _verdict(call, got, expected)
    if reason is not None:
        return reason
    held = {t.untyped_storage().data_ptr() for t in sample.tensors() if t.layout is torch.strided and t.numel()}
    results = [t for t in flat(got) if isinstance(t, Tensor) and t.numel()]
    if not call.subject.aten and any(t.untyped_storage().data_ptr() in held for t in results):
        return "a result shares memory with an input"
    return None if call.subject.written else _changed(sample, before)


def _fullgraph(call: Call) -> str | None:
    """Whether the call, compiled without a graph break, returns the same.

    It uses the default generator, as Dynamo requires.
    """
    sample = call.own.without_generators()
    compiled = compile_whole(call.subject.surface_call(sample))
    got = call.subject.seeded(sample, lambda: compiled(*sample.args))
    return _verdict(call, got, call.subject.straight(call.own.without_generators()))


def compile_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """*function*, compiled from scratch without graph breaks, even if a size depends on data."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="eager")

    def call(*args: Any) -> Any:
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
            return compiled(*args)

    return call


def _out(call: Call, expected: Any, mode: str) -> str | None:
    """Check the contract of `out=` in one mode: ATen with its own out overload, a kernel with the functional form."""
    subject = call.subject
    fresh = mode == "out alias" or bool(subject.written)
    sample, twin = (call.sample.fresh(), call.sample.fresh()) if fresh else (call.sample, call.sample)
    out = outs_of(sample, expected, mode, subject)
    before = None if fresh else _snapshot(sample)
    wanted_out = outs_of(twin, expected, mode, subject)
    wanted = _outcome(lambda: subject.straight_out(twin, wanted_out))
    layout_before = [(t.stride(), t.data_ptr()) for t in flat(out)]
    got = _outcome(lambda: subject.surface(sample, out=out))
    if isinstance(wanted, Exception):
        castable = all(torch.can_cast(e.dtype, o.dtype) for e, o in zip(flat(expected), flat(out), strict=True))
        if isinstance(got, type(wanted)) or not (subject.aten or (mode == "out dtype" and not castable)):
            return None
        return f"{_told(got)} instead of {type(wanted).__name__}"
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
    reason = difference(out, wanted, contents=subject.defined) if subject.aten else None
    if reason is not None:
        return f"unlike ATen's own out: {reason}"
    if (mode in {"out dtype", "out alias"} and subject.aten) or not subject.defined:
        return None
    target = [e.to(o.dtype) for e, o in zip(flat(expected), flat(out), strict=True)]
    if not subject.aten:
        return _kernel_verdict(call, out, target, strides=False)
    reason = difference(out, target, strides=False, scale=1, gross=True)
    return None if reason is None else f"unlike the functional form: {reason}"


def _verdict(call: Call, got: Any, expected: Any) -> str | None:
    if call.subject.aten:
        return difference(got, expected, contents=call.subject.defined)
    return _kernel_verdict(call, got, expected, strides=True)


def _kernel_verdict(call: Call, got: Any, expected: Any, *, strides: bool) -> str | None:
    """Compare with ATen in float64, or with ATen in the same dtype if the inputs leave no digits to compare."""
    form = difference(got, expected, contents=False) if strides else None
    if form is not None:
        return form
    widened = call.own.map_tensors(lambda t: t.to(_WIDER.get(t.dtype, t.dtype)))
    precise = _outcome(lambda: call.subject.straight(widened))
    if not isinstance(precise, Exception):
        pairs = zip(flat(precise), flat(expected), strict=True)
        reference = [p.to(e.dtype) if e.dtype.is_floating_point or e.dtype.is_complex else e for p, e in pairs]
        if difference(got, reference, strides=strides, scale=KERNEL_TOLERANCE) is None:
            return None
    return difference(got, expected, strides=strides, scale=KERNEL_TOLERANCE)


def _same_refusal(call: Call, expected: Exception) -> str | None:
    got = _outcome(lambda: call.subject.surface(call.own))
    if isinstance(got, type(expected)):
        return None
    return f"{_told(got)} instead of {type(expected).__name__}: {expected}"


def _snapshot(sample: Sample) -> list[Tensor]:
    return [t.clone() for t in sample.tensors() if t.layout is torch.strided]


def _changed(sample: Sample, before: list[Tensor]) -> str | None:
    reason = difference([t for t in sample.tensors() if t.layout is torch.strided], before, strides=False)
    return None if reason is None else f"an input was changed: {reason}"


def _told(outcome: Any) -> str:
    if not isinstance(outcome, Exception):
        return "a result"
    return f"{type(outcome).__name__}: {next(iter(str(outcome).splitlines()), '')}"


def _outcome(run: Callable[[], Any]) -> Any:
    """What *run* returns, or the exception that it raises, because here an exception is a result to compare."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run()
        except Exception as error:  # noqa: BLE001  # whatever a kernel raises is compared or reported, never dropped
            return error


def _expected_gradients(subject: Subject, sample: Sample) -> list[Tensor | None] | None:
    """ATen's gradients of the inputs; None if ATen has none, or refuses the inputs."""
    try:
        return _gradients(sample, lambda graded: subject.leading(*graded.args, **graded.kwargs))
    except (RuntimeError, NotImplementedError):
        return None


def _backward(call: Call, expected: list[Tensor | None]) -> str | None:
    def run(graded: Sample) -> Any:
        with use_slot(call.subject.base, call.subject.slot):
            return call.subject.surface_call(graded)(*graded.args)

    reason = difference(_gradients(call.sample, run), expected, strides=False, scale=KERNEL_TOLERANCE)
    return None if reason is None else f"gradients: {reason}"


def _gradients(sample: Sample, function: Callable[[Sample], Any]) -> list[Tensor | None]:
    graded = sample.fresh().map_tensors(_requiring_grad)
    seed(graded)
    with torch.enable_grad():
        results = [result for result in flat(function(graded)) if isinstance(result, Tensor) and result.requires_grad]
    if not results:
        msg = "nothing to differentiate"
        raise RuntimeError(msg)
    # Not ones, because then a backward that transposes or permutes them wrongly would pass.
    torch.manual_seed(1)
    leaves = [t for t in graded.tensors() if t.requires_grad]
    return list(torch.autograd.grad(results, leaves, [torch.randn_like(r) for r in results], allow_unused=True))


def _requiring_grad(t: Tensor) -> Tensor:
    return t.requires_grad_() if t.dtype.is_floating_point or t.dtype.is_complex else t


def _library_operators(subject: Subject, forms: frozenset[str]) -> list[OpOverload]:
    """Every library operator that a call of *subject* can become."""
    pair, cell = subject.pair, subject.cell
    choices = [chosen for form, chosen in (("lowest", None), ("preferred", subject.slot)) if form in forms]
    operators = [library_op(cell, pair, name, chosen) for chosen in choices for name in pair.names]
    mine = [k for k in cell.serving(pair, differentiable=True) if k.slot == subject.slot]
    return operators + [kernel_op(cell, pair, kernel) for kernel in mine if "differentiated" in forms]


def _opcheck(subject: Subject, sample: Sample, expected: Any, op: OpOverload) -> str | None:
    """The failure that `torch.library.opcheck` finds for *op*; None if there is none."""
    # opcheck runs the operator several times, each from one state of the default generator.
    plain = sample.without_generators().fresh()
    names = {a.name for a in arguments(op)}
    kwargs = {name: value for name, value in plain.kwargs.items() if name in names}
    outs = [name for name in subject.outs if name in names]
    if outs:
        results = [torch.zeros_like(e) for e in flat(expected)]
        kwargs |= {outs[0]: results} if subject.lists_out else dict(zip(outs, results, strict=True))
    if not subject.defined:
        # Deterministic mode fills floats with NaN, so undefined contents are made integers, which it fills with one.
        whole = Sample(plain.args, kwargs, plain.origin, torch.int64).map_tensors(lambda t: t.to(torch.int64))
        whole.kwargs.update({"dtype": torch.int64} if "dtype" in kwargs else {})
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            return _first_finding(op, whole, _PLAIN)
        finally:
            torch.use_deterministic_algorithms(before)
    with torch.no_grad():
        found = _first_finding(op, Sample(plain.args, kwargs, plain.origin, plain.dtype), _PLAIN)
    if found is not None or outs or any(a.is_out for a in arguments(op)):
        return found
    differentiated = "__slot" in op.name()
    tests = (*_PLAIN, *_REGISTRATION) if differentiated else _REGISTRATION
    return _first_finding(op, plain.map_tensors(_requiring_grad), tests)


def _first_finding(op: OpOverload, sample: Sample, tests: tuple[str, ...]) -> str | None:
    outcomes = torch.library.opcheck(op, sample.args, sample.kwargs, test_utils=tests, raise_exception=False)
    for test, outcome in outcomes.items():
        if outcome != "SUCCESS":
            return f"{test}: {type(outcome).__name__}: {next(iter(str(outcome).strip().splitlines()), '')}"
    return None
