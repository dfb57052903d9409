# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002, A006  # kernels name their parameters as ATen does
"""What the slots refuse, from the environment, from a signature, from a call."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from _slot_kernels import Counted
from aten_harness.check import check
from magi_opschema import aten
from magi_opschema.aten import errors
from magi_opschema.aten._dispatch import cells as _registry
from magi_opschema.aten._dispatch import load as _load
from magi_opschema.aten.errors import KernelSignatureError, SlotError, UnknownOpError
from torch import Tensor


if TYPE_CHECKING:
    from collections.abc import Callable

    Slot = Callable[..., None]


ENVIRONMENT = [
    ("8", "", "[8]\n8\n"),
    ("1", "", "[1, 8]\n1\n"),
    ("3", "slot 3 of aten::softmax has no kernel; active are 1, 8", ""),
    ("9", "MAGI_SLOT_softmax=9: slots are numbered 0 to 8", ""),
    ("fast", "MAGI_SLOT_softmax='fast' is not a slot; give a number from 0 to 8", ""),
    ("-1", "MAGI_SLOT_softmax='-1' is not a slot", ""),
]


@pytest.mark.slow
@pytest.mark.parametrize(("value", "error", "output"), ENVIRONMENT, ids=[value for value, _, _ in ENVIRONMENT])
def test_the_environment_is_read_at_the_first_call(value: str, error: str, output: str) -> None:
    code = """
import os, torch
from magi_opschema import aten
used = []
def kernel(input, dim, dtype=None):
    used.append(1)
    return torch.softmax(input, dim, dtype=dtype)
aten.register_slot("softmax", 1, kernel)
os.environ["MAGI_SLOT_softmax"] = VALUE
aten.softmax(torch.ones(2), 0)
if VALUE == "8":
    print([8]); print(8 if not used else 1)
else:
    print(list(aten.slots("softmax"))); print(1 if used else 8)
os.environ["MAGI_SLOT_softmax"] = "nonsense"
aten.softmax(torch.ones(2), 0)
""".replace("VALUE", repr(value))
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ}, capture_output=True, text=True, check=False)

    assert error in done.stderr
    assert done.stdout == output, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("value", "error", "used"), [("8", "", "0"), ("2", "", "2"), ("7", "slot 7 of aten", "")])
def test_the_environment_is_read_by_a_first_call_that_is_compiled(value: str, error: str, used: str) -> None:
    code = f"""
import os, torch
from magi_opschema import aten
used = [0]
def kernel(number):
    def softmax(input, dim, dtype=None):
        used.append(number)
        return torch.softmax(input, dim, dtype=dtype)
    return softmax
aten.register_slot("softmax", 1, kernel(1))
aten.register_slot("softmax", 2, kernel(2))
os.environ["MAGI_SLOT_softmax"] = {value!r}
call = torch.compile(lambda x: aten.softmax(x, 0), fullgraph=True, backend="aot_eager")
call(torch.ones(2))
print(used[-1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert error in done.stderr
    assert done.stdout.strip() == used, done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        (
            "MAGI_SLOT_sofmax",
            "1",
            "MAGI_SLOT_sofmax names no operator of the ATen surface; did you mean 'MAGI_SLOT_so",
        ),
        ("MAGI_SLOT_", "1", "MAGI_SLOT_ names no operator of the ATen surface"),
        ("MAGI_SLOT_linalg.norm", "8", "did you mean 'MAGI_SLOT_linalg_norm'?"),
        ("MAGI_SLOT_relu_", "8", "MAGI_SLOT_relu_ names no operator of the ATen surface"),
        ("MAGI_SLOT_softmax", "9", "MAGI_SLOT_softmax=9: slots are numbered 0 to 8"),
        ("MAGI_SLOT_softmax", "fast", "MAGI_SLOT_softmax='fast' is not a slot; give a number from 0 to 8"),
        ("MAGI_SLOT_softmax", "²", "is not a slot; give a number from 0 to 8"),
    ],
)
def test_a_variable_that_means_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, sentence: str
) -> None:
    assert "softmax" in dir(aten)  # loaded before
    monkeypatch.setenv(variable, value)
    with pytest.raises(SlotError, match=re.escape(sentence)):
        _registry.check_environment(is_complete=True)
    _load.default_surface.cache_clear()
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
    "check": lambda value: check([value]),
    "check, device": lambda value: check([("softmax", 8)], device=value),
}


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


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
    ("relu", max, "has no signature that Python can read|is that of no overload"),
]


@pytest.mark.parametrize(("base", "kernel", "sentence"), BAD_KERNELS, ids=range(len(BAD_KERNELS)))
def test_a_wrong_signature_is_refused(base: str, kernel: Any, sentence: str) -> None:
    with pytest.raises(KernelSignatureError, match=sentence):
        aten.register_slot(base, 1, kernel)
    assert list(aten.slots(base.partition(".")[0])) == [8]


def test_a_wrong_annotation_is_refused() -> None:
    def kernel(input: int, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.ones(1)

    with pytest.raises(KernelSignatureError, match="its input is a Tensor"):
        aten.register_slot("softmax", 1, kernel)


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
