# SPDX-License-Identifier: Apache-2.0
"""Ten wrong kernels, each planted on twenty operators: the harness must catch every one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _slot_kernels import save_input, square
from aten_harness import providers as op_db
from aten_harness import run as _run
from aten_harness.run import Report, check
from magi_opschema import aten
from magi_opschema.aten._dispatch.kernels import cells
from torch import Tensor


UNARY = ["abs", "exp", "sin", "tanh", "sigmoid", "erf", "log1p", "relu", "neg", "square"]
BINARY = ["sub", "div", "atan2", "pow", "fmod", "copysign", "hypot", "maximum", "xlogy", "mul"]
ORDERED = ["sub", "div", "atan2", "pow", "fmod", "copysign", "xlogy", "remainder", "floor_divide", "float_power"]
ORDERED += ["ldexp", "heaviside", "lt", "le", "gt", "ge", "special_xlog1py", "special_zeta", "nextafter", "true_divide"]
WITH_OPTION = ["add", "sub", "addcmul", "addcdiv", "addmm", "addmv", "addr", "baddbmm", "addbmm", "elu", "leaky_relu"]
WITH_OPTION += ["softplus", "hardtanh", "celu", "softshrink", "hardshrink", "logit", "tril", "triu", "cumsum"]
OPTIONS = {"elu": "alpha", "leaky_relu": "negative_slope", "softplus": "beta", "hardtanh": "min_val", "celu": "alpha"}
OPTIONS |= {"softshrink": "lambd", "hardshrink": "lambd", "logit": "eps", "tril": "diagonal", "triu": "diagonal"}
OPTIONS |= {"addcmul": "value", "addcdiv": "value", "cumsum": "dtype"}
TWENTY = UNARY + BINARY


def _variant(base: str) -> str:
    """The tensor form of *base*."""
    names = [pair.leading for pair in cells[base].pairs]
    return next((name for name in ("Tensor", "Tensor_Tensor", "default") if name in names), names[0])


def _result(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A kernel that gives *change* of the right result."""
    return lambda reference, args, kwargs: change(reference(*args, **kwargs))


def _strided_only(reference: Any, args: Any, kwargs: Any) -> Any:
    # What a kernel does that reads memory in order.
    dense = [a.as_strided(a.shape, torch.empty(a.shape).stride()) if _is_strided(a) else a for a in args]
    return reference(*dense, **kwargs)


def _is_strided(a: Any) -> bool:
    return isinstance(a, Tensor) and not a.is_contiguous() and all(a.stride())


def _large_only(reference: Any, args: Any, kwargs: Any) -> Any:
    result = reference(*args, **kwargs)
    large = any(isinstance(a, Tensor) and a.numel() and bool((a.abs() > 1e3).any()) for a in args)
    return result * float("nan") if large and result.dtype.is_floating_point else result


def _mutates(reference: Any, args: Any, kwargs: Any) -> Any:
    result = reference(*args, **kwargs)
    if args[0].numel() and 0 not in args[0].stride():
        args[0].zero_() if bool((args[0] != 0).any()) else args[0].fill_(1)
    return result


def _ignores_out(reference: Any, args: Any, kwargs: Any) -> Any:
    kwargs = {name: value for name, value in kwargs.items() if name != "out"}
    return reference(*args, **kwargs)


def _ignores_option(reference: Any, args: Any, kwargs: Any) -> Any:
    name = OPTIONS.get(reference._schema.name.removeprefix("aten::"), "alpha")
    position = [a.name for a in reference._schema.arguments].index(name)
    if position < len(args):
        args = (*args[:position], reference._schema.arguments[position].default_value, *args[position + 1 :])
    return reference(*args, **{key: value for key, value in kwargs.items() if key != name})


FAULTS: dict[str, tuple[list[str], Callable[..., Any]]] = {
    "off by 1e-2": (TWENTY, _result(lambda y: y + 1e-2 if y.is_floating_point() or y.is_complex() else ~y)),
    "wrong dtype": (TWENTY, _result(lambda y: y.to(torch.float32 if y.dtype is torch.float64 else torch.float64))),
    "ignores an option": (WITH_OPTION, _ignores_option),
    "ignores out": (TWENTY, _ignores_out),
    "swapped arguments": (ORDERED, lambda reference, args, kwargs: reference(args[1], args[0], *args[2:], **kwargs)),
    "wrong only when non-contiguous": (TWENTY, _strided_only),
    "wrong only on 0-size": (TWENTY, _result(lambda y: y if y.numel() else y.new_zeros(1))),
    "NaN on large input": (TWENTY, _large_only),
    "mutates its input": (TWENTY, _mutates),
    "crashes": (TWENTY, lambda *_: os.kill(os.getpid(), signal.SIGSEGV)),
}


@pytest.fixture
def planted(slot: Callable[..., None], delegate: Callable[..., Any]) -> Callable[..., dict[str, Report]]:
    """The reports of operators by name, whose calls in slot 3 go through `change`."""

    def reports(bases: list[str], change: Callable[..., Any] | None, *, takes_out: bool = False) -> dict[str, Report]:
        for base in bases:
            aten.slots(base)  # the surface is loaded
            variant = _variant(base)
            slot(f"{base}.{variant}", 3, delegate(base, variant, change, takes_out=takes_out))
        return {base: report for (base, _), report in check([(base, 3) for base in bases]).items()}

    return reports


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_caught(fault: str, planted: Callable[..., dict[str, Report]]) -> None:
    bases, wrong = FAULTS[fault]
    assert len(set(bases)) == 20
    reports = planted(bases, wrong, takes_out=fault == "ignores out")

    assert [base for base in bases if not reports[base].failures] == []
    if fault == "crashes":
        assert all(any("SIGSEGV" in row.detail for row in report.failures) for report in reports.values())


@pytest.fixture
def database_of_square(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's test database, as if it had entries for `square` alone: all of them run for half a minute."""
    entries = {"square": op_db.op_infos()["square"]}
    monkeypatch.setattr(op_db, "op_infos", lambda: entries)
    op_db.captured_samples.cache_clear()
    yield
    op_db.captured_samples.cache_clear()


@pytest.mark.usefixtures("database_of_square")
@pytest.mark.parametrize("factor", [2, 3])
def test_a_wrong_backward_is_caught(factor: int, slot: Callable[..., None]) -> None:
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        result: Tensor = factor * ctx.saved_tensors[0] * grad
        return result

    options = {"dtypes": (torch.float32,), "backward": backward, "setup_context": save_input}
    slot("square", 3, square, **options)
    report = check([("square", 3)])["square", 3]

    forms = ("default", "default__use3", "default__slot3", "out", "out__use3")
    assert {"backward", *(f"opcheck square__{form}" for form in forms)} <= {row.check for row in report.rows}
    assert {row.check for row in report.failures} == ({"backward"} if factor == 3 else set())


@pytest.mark.slow
def test_right_kernels_pass(planted: Callable[..., dict[str, Report]]) -> None:
    reports = planted(TWENTY, None)

    assert [str(row) for report in reports.values() for row in report.failures] == []
    assert all(len(report.rows) > 50 for report in reports.values())


@pytest.mark.slow
def test_a_hanging_kernel_is_a_failed_row(
    monkeypatch: pytest.MonkeyPatch, planted: Callable[..., dict[str, Report]]
) -> None:
    monkeypatch.setattr(_run, "SECONDS_PER_CHECK", 2.0)

    def hangs(reference: Any, args: Any, kwargs: Any) -> Any:
        while True:
            pass

    assert {row.detail for row in planted(["neg"], hangs)["neg"].failures} == {"hung for 2 s"}
