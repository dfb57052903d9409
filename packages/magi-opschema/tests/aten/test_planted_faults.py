# SPDX-License-Identifier: Apache-2.0
"""Ten wrong kernels, each planted on twenty operators: the harness must catch every one."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from aten_harness import op_db
from aten_harness.check import check
from magi_opschema import aten
from magi_opschema.aten._dispatch.cells import cell_of
from torch import Tensor


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


UNARY = ["abs", "exp", "sin", "tanh", "sigmoid", "erf", "log1p", "relu", "neg", "square"]
BINARY = ["sub", "div", "atan2", "pow", "fmod", "copysign", "hypot", "maximum", "xlogy", "mul"]
ORDERED = ["sub", "div", "atan2", "pow", "fmod", "copysign", "xlogy", "remainder", "floor_divide", "float_power"]
ORDERED += ["ldexp", "heaviside", "lt", "le", "gt", "ge", "special_xlog1py", "special_zeta", "nextafter", "true_divide"]
WITH_OPTION = ["add", "sub", "addcmul", "addcdiv", "addmm", "addmv", "addr", "baddbmm", "addbmm", "elu"]
WITH_OPTION += [
    "leaky_relu",
    "softplus",
    "hardtanh",
    "celu",
    "softshrink",
    "hardshrink",
    "logit",
    "tril",
    "triu",
    "cumsum",
]
OPTIONS = {"elu": "alpha", "leaky_relu": "negative_slope", "softplus": "beta", "hardtanh": "min_val", "celu": "alpha"}
OPTIONS |= {"softshrink": "lambd", "hardshrink": "lambd", "logit": "eps", "tril": "diagonal", "triu": "diagonal"}
OPTIONS |= {"addcmul": "value", "addcdiv": "value", "cumsum": "dtype"}
TWENTY = UNARY + BINARY


def _variant(base: str) -> str:
    """The tensor form of *base*."""
    names = [pair.leading for pair in cell_of(base).pairs]
    return next((name for name in ("Tensor", "Tensor_Tensor", "default") if name in names), names[0])


def _off(reference: Any, args: Any, kwargs: Any) -> Any:
    result = reference(*args, **kwargs)
    return result + 1e-2 if result.dtype.is_floating_point or result.dtype.is_complex else ~result


def _dtype(reference: Any, args: Any, kwargs: Any) -> Any:
    result = reference(*args, **kwargs)
    return result.to(torch.float32 if result.dtype is torch.float64 else torch.float64)


def _swapped(reference: Any, args: Any, kwargs: Any) -> Any:
    return reference(args[1], args[0], *args[2:], **kwargs)


def _strided_only(reference: Any, args: Any, kwargs: Any) -> Any:
    # What a kernel does that reads memory in order.
    dense = [a.as_strided(a.shape, torch.empty(a.shape).stride()) if _is_strided(a) else a for a in args]
    return reference(*dense, **kwargs)


def _is_strided(a: Any) -> bool:
    return isinstance(a, Tensor) and not a.is_contiguous() and all(a.stride())


def _empty_only(reference: Any, args: Any, kwargs: Any) -> Any:
    result = reference(*args, **kwargs)
    return result if result.numel() else result.new_zeros(1)


def _large_only(reference: Any, args: Any, kwargs: Any) -> Any:
    result = reference(*args, **kwargs)
    large = any(isinstance(a, Tensor) and a.numel() and bool((a.abs() > 1e3).any()) for a in args)
    return result * float("nan") if large and result.dtype.is_floating_point else result


def _mutates(reference: Any, args: Any, kwargs: Any) -> Any:
    result = reference(*args, **kwargs)
    if args[0].numel() and 0 not in args[0].stride():
        args[0].zero_() if bool((args[0] != 0).any()) else args[0].fill_(1)
    return result


def _crashes(reference: Any, args: Any, kwargs: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSEGV)


def _ignores_out(reference: Any, args: Any, kwargs: Any) -> Any:
    kwargs = {name: value for name, value in kwargs.items() if name != "out"}
    return reference(*args, **kwargs)


def _ignores(name: str) -> Callable[..., Any]:
    def wrong(reference: Any, args: Any, kwargs: Any) -> Any:
        names = [a.name for a in reference._schema.arguments]
        position = names.index(name)
        kwargs = {key: value for key, value in kwargs.items() if key != name}
        if position < len(args):
            default = reference._schema.arguments[position].default_value
            args = (*args[:position], default, *args[position + 1 :])
        return reference(*args, **kwargs)

    return wrong


FAULTS: dict[str, tuple[list[str], Callable[[str], Callable[..., Any]], bool]] = {
    "off by 1e-2": (TWENTY, lambda _: _off, False),
    "wrong dtype": (TWENTY, lambda _: _dtype, False),
    "ignores an option": (WITH_OPTION, lambda base: _ignores(OPTIONS.get(base, "alpha")), False),
    "ignores out": (TWENTY, lambda _: _ignores_out, True),
    "swapped arguments": (ORDERED, lambda _: _swapped, False),
    "wrong only when non-contiguous": (TWENTY, lambda _: _strided_only, False),
    "wrong only on 0-size": (TWENTY, lambda _: _empty_only, False),
    "NaN on large input": (TWENTY, lambda _: _large_only, False),
    "mutates its input": (TWENTY, lambda _: _mutates, False),
    "crashes": (TWENTY, lambda _: _crashes, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_caught(fault: str, delegate: Callable[..., Any]) -> None:
    bases, wrong, takes_out = FAULTS[fault]
    assert len(set(bases)) == 20
    for base in bases:
        aten.slots(base)  # the surface is loaded
        variant = _variant(base)
        aten.register_slot(f"{base}.{variant}", 3, delegate(base, variant, wrong(base), takes_out=takes_out))
    try:
        reports = check([(base, 3) for base in bases])
    finally:
        for base in bases:
            aten.unregister_slot(base, 3)

    assert [base for base in bases if not reports[base, 3].failures] == []
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
def test_a_wrong_backward_is_caught() -> None:
    def square(input: Tensor) -> Tensor:  # noqa: A002  # ATen's name
        return input * input

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    def backward(factor: float) -> Callable[..., Any]:
        return lambda ctx, grad: factor * ctx.saved_tensors[0] * grad

    failures = {}
    for factor in (2, 3):
        only = (torch.float32,)
        aten.register_slot("square", 3, square, dtypes=only, backward=backward(factor), setup_context=setup_context)
        try:
            report = check([("square", 3)])["square", 3]
        finally:
            aten.unregister_slot("square", 3)
        assert any(row.check == "backward" for row in report.rows)
        failures[factor] = {row.check for row in report.failures}

    assert failures == {2: set(), 3: {"backward"}}


@pytest.mark.slow
def test_right_kernels_pass(delegate: Callable[..., Any]) -> None:
    for base in TWENTY:
        aten.slots(base)
        aten.register_slot(f"{base}.{_variant(base)}", 3, delegate(base, _variant(base)))
    try:
        reports = check([(base, 3) for base in TWENTY])
    finally:
        for base in TWENTY:
            aten.unregister_slot(base, 3)

    assert [str(row) for report in reports.values() for row in report.failures] == []
    assert all(len(report.rows) > 50 for report in reports.values())


@pytest.mark.slow
def test_a_hanging_kernel_is_a_failed_row(monkeypatch: pytest.MonkeyPatch, delegate: Callable[..., Any]) -> None:
    from aten_harness import run as _run

    monkeypatch.setattr(_run, "SECONDS_PER_CHECK", 2.0)

    def hangs(reference: Any, args: Any, kwargs: Any) -> Any:
        while True:
            pass

    aten.slots("neg")
    aten.register_slot("neg", 3, delegate("neg", "default", hangs))
    try:
        report = check([("neg", 3)])["neg", 3]
    finally:
        aten.unregister_slot("neg", 3)

    assert {row.detail for row in report.failures} == {"hung for 2 s"}
