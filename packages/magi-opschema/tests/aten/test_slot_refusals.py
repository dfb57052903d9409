# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002, A006  # kernels name their parameters as ATen does
"""What the slots refuse, from the environment, from a signature, from a call."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _signatures import Unshowable
from _slot_kernels import Counted
from magi_opschema import aten
from magi_opschema.aten import errors
from magi_opschema.aten._dispatch import kernels as _kernels
from magi_opschema.aten._dispatch import slots as _slots
from magi_opschema.aten._dispatch.slots import _FirstCall
from magi_opschema.aten.errors import KernelSignatureError, SlotError, UnknownOpError
from torch import Tensor


Slot = Callable[..., None]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("value", "outcome"),
    [("8", (0, 0)), ("2", (0, 2)), ("3", "slot 3 of aten::softmax has no kernel; active are 1, 2, 8")],
)
def test_the_environment_is_read_once_at_the_first_call(
    slot: Slot, value: str, outcome: tuple[int, int] | str, compiled: bool
) -> None:
    first, second = Counted(), Counted()
    slot("softmax", 1, first)
    slot("softmax", 2, second)
    cell = _kernels.cell_of("softmax")
    call: Any = torch.compile(aten.softmax, fullgraph=True, backend="aot_eager") if compiled else aten.softmax
    with pytest.MonkeyPatch.context() as patch:
        for name, unread in (("environment_read", False), ("from_environment", None), ("eager", _FirstCall(cell))):
            patch.setattr(cell, name, unread)
        patch.setenv("MAGI_SLOT_softmax", value)
        if isinstance(outcome, str):
            with pytest.raises(SlotError, match=outcome):
                call(torch.ones(2), 0)
            return
        call(torch.ones(2), 0)
        patch.setenv("MAGI_SLOT_softmax", "nonsense")
        call(torch.ones(2), 0)
    assert (first.calls, second.calls) == outcome


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("MAGI_SLOT_sofmax", "1", "names no operator of the ATen surface; did you mean 'MAGI_SLOT_softmax'"),
        ("MAGI_SLOT_", "1", "MAGI_SLOT_ names no operator of the ATen surface"),
        ("MAGI_SLOT_linalg.norm", "8", "did you mean 'MAGI_SLOT_linalg_norm'?"),
        ("MAGI_SLOT_relu_", "8", "MAGI_SLOT_relu_ names no operator of the ATen surface"),
        ("MAGI_SLOT_softmax", "9", "MAGI_SLOT_softmax=9: slots are numbered 0 to 8"),
        ("MAGI_SLOT_softmax", "fast", "MAGI_SLOT_softmax='fast' is not a slot; give a number from 0 to 8"),
        ("MAGI_SLOT_softmax", "-1", "MAGI_SLOT_softmax='-1' is not a slot"),
        ("MAGI_SLOT_softmax", "²", "is not a slot; give a number from 0 to 8"),
    ],
)
def test_a_variable_that_means_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, sentence: str
) -> None:
    assert "softmax" in dir(aten)  # loaded before
    monkeypatch.setenv(variable, value)
    with pytest.raises(SlotError, match=re.escape(sentence)):
        _kernels.check_environment(is_complete=True)
    _slots.default_surface.cache_clear()
    with pytest.raises(SlotError, match=re.escape(sentence)):
        getattr(aten, "not_an_operator")  # noqa: B009
    monkeypatch.delenv(variable)
    assert "softmax" in dir(aten)


WRONG: dict[str, Callable[[Any], object]] = {
    "slots": aten.slots,
    "load": aten.load,
    "pin": lambda value: aten.pin(value, 8),
    "pin, slot": lambda value: aten.pin("softmax", [value]),  # type: ignore[arg-type]
    "use_slot": lambda value: aten.use_slot(value, 8).__enter__(),
    "unregister_slot": lambda value: aten.unregister_slot(value, 1),
    "register_slot": lambda value: aten.register_slot(value, 1, _softmax),
    "register_slot, slot": lambda value: aten.register_slot("softmax", value, _softmax),
    "register_slot, fn": lambda value: aten.register_slot("softmax", 1, value),
    **{
        f"register_slot, {option}": lambda value, option=option: aten.register_slot(  # type: ignore[misc]
            "softmax", 1, _softmax, **{option: value}
        )
        for option in ("devices", "dtypes", "supports", "backward", "setup_context")
    },
}


@pytest.mark.parametrize("entry", WRONG)
@pytest.mark.parametrize("value", [3.5, b"q", [1], {"a": 1}, Unshowable(), object()], ids=lambda v: type(v).__name__)
def test_a_wrong_value_is_an_error_of_the_surface(entry: str, value: object) -> None:
    if (entry, type(value)) == ("register_slot, devices", dict):
        pytest.skip("a collection of names")
    with pytest.raises(errors.AtenError):
        WRONG[entry](value)
    assert list(aten.slots("softmax")) == [8]


def _softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return input


def _of_a_number(input: int, dim: int, dtype: torch.dtype | None = None) -> Any:
    return input


BAD_KERNELS: list[tuple[str, Any, str]] = [
    ("softmax", lambda input, dim: input, r"its positional parameters are \(input, dim, dtype\)"),
    ("softmax", lambda x, dim, dtype=None: x, r"its positional parameters are \(input, dim, dtype\)"),
    ("softmax", lambda dim, input, dtype=None: input, r"its positional parameters are"),
    ("softmax", lambda input, dim=-1, dtype=None: input, "its dim has no default"),
    ("softmax", lambda input, dim, dtype=3: input, "its dtype has the default None"),
    ("softmax", lambda *args, **kwargs: None, r"\*args hides parameters; spell them out"),
    ("softmax", lambda input, dim, dtype=None, *, out: input, "takes out as a keyword with default None"),
    ("softmax", lambda input, dim, dtype=None, out=None: input, "takes out as a keyword with default None"),
    ("add", lambda input, other, alpha=2: input, "its alpha has the default 1"),
    ("add", lambda input, other, *, beta=1: input, r"its keyword parameters are \(alpha\)"),
    ("add.Tensor", lambda input, other, alpha=1: input, r"its positional parameters are \(input, other\)"),
    ("softmax", _of_a_number, "its input is a Tensor"),
    ("relu", max, "has no signature that Python can read|is that of no overload"),
]


@pytest.mark.parametrize(("base", "kernel", "sentence"), BAD_KERNELS, ids=range(len(BAD_KERNELS)))
def test_a_wrong_signature_is_refused(base: str, kernel: Any, sentence: str) -> None:
    with pytest.raises(KernelSignatureError, match=sentence):
        aten.register_slot(base, 1, kernel)
    assert list(aten.slots(base.partition(".")[0])) == [8]


BAD_CALLS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: aten.register_slot("softmax", 8, _softmax), SlotError, "numbered 0 to 7; 8 is ATen itself"),
    (lambda: aten.register_slot("softmax", -1, _softmax), SlotError, "numbered 0 to 7"),
    (lambda: aten.register_slot("softmax", True, _softmax), SlotError, "numbered 0 to 7"),
    (lambda: aten.register_slot("sofmax", 1, _softmax), UnknownOpError, "did you mean 'softmax'"),
    (lambda: aten.register_slot("softmax.outt", 1, _softmax), KernelSignatureError, "softmax"),
    (lambda: aten.register_slot("softmax", 1, _softmax, devices="cuda"), SlotError, r"devices=\('cuda',\)"),
    (
        lambda: aten.register_slot("softmax", 1, _softmax, dtypes=[3]),  # type: ignore[list-item]
        SlotError,
        "must be a collection of dtype",
    ),
    (lambda: aten.register_slot("softmax", 1, _softmax, devices=()), SlotError, "must be a collection of str"),
    (lambda: aten.pin("softmax", 3), SlotError, "slot 3 of aten::softmax has no kernel; active are 8"),
    (lambda: aten.pin("softmax", 9), SlotError, "numbered 0 to 8"),
    (lambda: aten.use_slot("softmax", 3).__enter__(), SlotError, "has no kernel"),
    (lambda: aten.use_slot("nothing_like_it", 8).__enter__(), UnknownOpError, "no operator 'nothing_like_it'"),
    (lambda: aten.slots("linalg.nrm"), UnknownOpError, "no operator"),
    (lambda: aten.unregister_slot("softmax", 3), SlotError, "has no kernel"),
]


@pytest.mark.parametrize(("call", "kind", "sentence"), BAD_CALLS, ids=range(len(BAD_CALLS)))
def test_bad_calls_are_told(call: Callable[[], Any], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        call()
    assert list(aten.slots("softmax")) == [8]


def test_a_taken_slot_is_refused(slot: Slot) -> None:
    slot("softmax", 1, _softmax)
    with pytest.raises(SlotError, match=r"slot 1 of aten::softmax already serves int; call unregister_slot"):
        aten.register_slot("softmax", 1, Counted())
