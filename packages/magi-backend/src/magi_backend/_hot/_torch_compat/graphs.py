# SPDX-License-Identifier: Apache-2.0
"""Captured graphs: where inputs come from, symbols, copies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import Node

from magi_backend._torch_compat import float_memo


def is_parameter(placeholder: Node) -> bool:
    """Whether an input is a parameter or a buffer of a module."""
    return "_dynamo_static_input_type" in placeholder.meta.get("tensor_dict", {})


def is_size_of_input(placeholder: Node) -> bool:
    """Whether an int input is a size, a stride or the offset of a tensor input."""
    return type(getattr(placeholder, "_dynamo_source", None)).__name__ == "TensorPropertySource"


def is_left_open(placeholder: Node) -> bool:
    """Whether an int input is a ``DynamicInt``, which torch never makes a constant; object handles are such ints."""
    return type(getattr(placeholder, "_dynamo_source", None)).__name__ == "DynamicScalarSource"


def free_symbols(value: Any) -> set[Any]:
    """The symbols in a number, or in the sizes, strides and offset of a tensor and of what it holds."""
    from torch.fx.experimental.symbolic_shapes import free_symbols as symbols_of
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return set(value.node.expr.free_symbols)
    if not isinstance(value, torch.Tensor):
        return set()
    tensor: Any = value
    symbols = set(symbols_of(tensor))
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            symbols |= free_symbols(getattr(tensor, name))
    return symbols


def number_symbols(placeholder: Node) -> set[Any]:
    """The symbol of a float argument, which Dynamo passes as a tensor and reads with ``.item()``."""
    memo = float_memo(placeholder.meta.get("example_value"))
    return set() if memo is None else set(memo.node.expr.free_symbols)


def is_ragged(size: Any) -> bool:
    """Whether a size is the ragged one of a nested tensor."""
    return bool(size.node.is_nested_int())


def as_int(number: Any, values: Mapping[Any, int]) -> int | None:
    """The value of a symbolic size if symbols have *values*; None if it has other symbols."""
    if number.node.is_nested_int():
        return None
    expression = number.node.expr
    known = expression.free_symbols <= values.keys()
    return int(expression.xreplace(values)) if known else None


def expression(number: Any) -> Any:
    """The expression of a symbolic number, simplified by what is known of its symbols now."""
    return number.node.expr


def broken_guard(numbers: Sequence[Any], values: Mapping[Any, int]) -> str:
    """The first guard of the capture on the symbols of *numbers* that *values* violate; empty if there is none."""
    shape_env = next((number.node.shape_env for number in numbers), None)
    if shape_env is None:
        return ""
    for symbol, value in values.items():
        allowed = shape_env.var_to_range.get(symbol)
        if allowed is not None and not allowed.lower <= value <= allowed.upper:
            return f"{allowed.lower} <= {symbol} <= {allowed.upper}"
    for guard in shape_env.guards:
        expression = guard.expr
        if expression.free_symbols <= values.keys() and not bool(expression.xreplace(values)):
            return str(expression)
    return ""


def boxed(compiled: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """*compiled*, taking a list of its arguments.

    AOTAutograd's result takes a list itself; a function of single arguments is around it (``forward`` in
    ``aot_module_simplified``), which puts them into one after the parameters of the graph.
    """
    outer: Any = compiled
    while outer is not None and getattr(outer, "__qualname__", "") != "aot_module_simplified.<locals>.forward":
        outer = getattr(outer, "__wrapped__", None)
    inner = getattr(outer, "__wrapped__", None)
    if inner is None:
        return lambda inputs: compiled(*inputs)
    cells = inspect.getclosurevars(outer).nonlocals
    if cells.get("compiled_fn") is inner and cells.get("params_buffers_flat") == []:
        return cast("Callable[[list[Any]], Any]", inner)
    return lambda inputs: compiled(*inputs)
