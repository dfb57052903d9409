# SPDX-License-Identifier: Apache-2.0
"""``tensor == "text"`` does not break a captured graph (torch < 2.13).

`Tensor.__eq__` returns NotImplemented for anything that is not a number or a tensor, and Python then returns False.
Dynamo puts the call of `__eq__` into the graph, sees that it does not return a tensor, and breaks the graph. The
decoder of WAN compares the entries of its cache with a string, which makes 28 graphs instead of 3.

Dynamo does this before the backend is called, so this repair checks that the captured frame is for a backend of ours.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from magi_backend._torch_compat.compiling import is_our_backend

from ._defect import Defect
from ._scope import note_in_capture, replace


if TYPE_CHECKING:
    from collections.abc import Callable


NAME = "compare_with_constants"


def patch() -> None:
    """Return False for the comparison of a tensor with a string, None, a list or a similar constant.

    Dynamo looks up the handler of an operator once for the kinds of its operands, and keeps the result.
    """
    from torch._dynamo.variables import (
        BuiltinVariable,
        ConstantVariable,
        ConstDictVariable,
        ListVariable,
        TensorVariable,
        TupleVariable,
    )

    never_equal = (ConstantVariable, TupleVariable, ListVariable, ConstDictVariable)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def make_handler(fn: Any, arg_types: list[type], has_kwargs: bool) -> Any:
            handler = original(fn, arg_types, has_kwargs)
            if fn is not operator.eq or arg_types[:1] != [TensorVariable] or arg_types[1] not in never_equal:
                return handler

            def compare(tx: Any, args: Any, kwargs: Any) -> Any:
                tensor, other = args
                is_number = isinstance(other, ConstantVariable) and isinstance(other.value, (bool, int, float, complex))
                is_plain = tensor.class_type in (torch.Tensor, torch.nn.Parameter)
                if is_number or not is_plain or not is_our_backend(tx.output.compiler_fn):
                    return handler(tx, args, kwargs)
                note_in_capture(tx.output, NAME)
                return ConstantVariable.create(value=False)

            return compare

        known = BuiltinVariable.call_function_handler_cache
        for key in [key for key in known if key[0] is operator.eq]:
            del known[key]
        return make_handler

    replace(BuiltinVariable, "_make_handler", make)


DEFECT = Defect(
    name=NAME,
    effect="the comparison of a tensor with a string or another constant breaks the graph",
    severity="more graphs",
    since=(2, 10, 0),
    fixed=(2, 13, 0),
    repair="a tensor never equals such a constant",
    patch=patch,
    is_in_capture=True,
)
