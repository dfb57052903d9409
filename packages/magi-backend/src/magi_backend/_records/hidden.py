# SPDX-License-Identifier: Apache-2.0
"""Numbers that a report leaves out, because they may be values of tensors.

A graph and its code hold sizes, and other numbers: constants of the program, such as an epsilon, and values that were
in a tensor when the graph was captured. ``x.item()`` becomes a number then, Inductor writes a small constant tensor
into the code, and the two kinds of numbers look the same. So a number is shown only if it must be a size, or if many
programs have it.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from typing import TYPE_CHECKING, Any

from magi_backend import _torch_compat


if TYPE_CHECKING:
    from collections.abc import Callable


HIDDEN = "…"
"""What replaces a hidden number."""

_COMMON = {0.0, 0.5, 1.0, 2.0, *(10.0**-power for power in range(1, 13))}
_FLOAT = re.compile(r"(?<![\w.])\d+(?:\.\d+(?:[eE][-+]?\d+)?|[eE][-+]?\d+)(?![\w.]*\.\d)(?![a-eg-zA-EG-Z_])")
# Inductor writes an index with a suffix, static_cast<int64_t>(64L), and a value without one.
_VALUES_IN_CODE = re.compile(r"(static_cast<\w+>\(|tl\.full\(\[[^\]]*\], )(-?\d+)(?=[,)])")
_FRAGMENT = re.compile(r"^#   %.*\n", re.MULTILINE)
_COMPARED = re.compile(r"([=!<>]=?\s*)-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?!\w)")
_SIZES = ("size(", "stride(", "storage_offset(", "len(", "ndimension(", "dim(")


def number_text(value: float | complex) -> str:  # noqa: PYI041 - mypy takes the one for the other
    """*value*, which may have been in a tensor, as text; hidden unless a report may show it.

    Example:
        >>> number_text(1e-05), number_text(12345.678), number_text(float("-inf")), number_text(True)
        ('1e-05', '…', '-inf', 'True')
    """
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, complex):
        return HIDDEN
    common = not math.isfinite(value) or abs(value) in _COMMON
    return str(value) if common else HIDDEN


def without_fractions(text: str) -> str:
    """*text* without its numbers that are not whole.

    Example:
        >>> without_fractions("scale 0.125 and eps 1e-05 in norm.py:12 of torch 2.13.0")
        'scale … and eps 1e-05 in norm.py:12 of torch 2.13.0'
    """
    return _FLOAT.sub(lambda found: number_text(float(found[0])), text)


def hidden_in_code(code: str) -> str:
    """Inductor's generated *code* without the values that it computes with.

    Example:
        >>> hidden_in_code("auto tmp0 = static_cast<int64_t>(98765) + in_ptr0[static_cast<int64_t>(64L)] * 0.25;")
        'auto tmp0 = static_cast<int64_t>(…) + in_ptr0[static_cast<int64_t>(64L)] * …;'
    """
    code = _FRAGMENT.sub("", code)
    code = _VALUES_IN_CODE.sub(lambda found: found[1] + number_text(int(found[2])), code)
    return without_fractions(code)


def hidden_in_guard(guard: str) -> str:
    """A *guard* without the values that it compares; sizes stay.

    Example:
        >>> hidden_in_guard("k == 25"), hidden_in_guard("x.size()[0] == 3"), hidden_in_guard("expected 3, actual 5")
        ('k == …', 'x.size()[0] == 3', 'expected 3, actual 5')
    """
    if not any(size in guard for size in _SIZES):
        guard = _COMPARED.sub(lambda found: found[1] + HIDDEN, guard)
    return without_fractions(guard)


@functools.lru_cache(maxsize=4096)
def takes_value(target: Any, place: int | str) -> bool:
    """Whether a whole number at *place* of a call of *target*, a position or a name, may be a value of a tensor.

    An operator declares a size, a dimension or an index as an int, and an operand of its arithmetic as a "number" or a
    tensor. Dynamo's graphs call Python functions, which are looked up by name among torch's operators.

    Example:
        >>> import torch
        >>> takes_value(torch.ops.aten.view.default, 1), takes_value(torch.ops.aten.mul, 1)
        (False, True)
    """
    overloads = _torch_compat.overloads_of(target)
    if overloads:
        return any(_declared_as_value(overload, place) for overload in overloads)
    name = target if isinstance(target, str) else str(getattr(target, "__name__", ""))
    name = _OPERATORS.get(target, name) if callable(target) else name
    if "tensor" in name.lower():
        return True  # torch.tensor(data) and similar functions
    return any(_declared_as_value(overload, place) for overload in _torch_compat.tensor_overloads(name.strip("_")))


_OPERATORS: dict[Callable[..., Any], str] = {
    operator.truediv: "div",
    operator.itruediv: "div",
    operator.floordiv: "floor_divide",
    operator.ifloordiv: "floor_divide",
    operator.mod: "remainder",
    operator.imod: "remainder",
    operator.iadd: "add",
    operator.isub: "sub",
    operator.imul: "mul",
    operator.ipow: "pow",
    operator.and_: "bitwise_and",
    operator.or_: "bitwise_or",
    operator.xor: "bitwise_xor",
    operator.lshift: "bitwise_left_shift",
    operator.rshift: "bitwise_right_shift",
}
"""Python's operators whose names differ from torch's."""


def _declared_as_value(overload: Any, place: int | str) -> bool:
    return any("int" not in kind and "bool" not in kind for kind in _torch_compat.declared_kinds(overload, place))
