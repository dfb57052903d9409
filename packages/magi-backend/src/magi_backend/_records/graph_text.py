# SPDX-License-Identifier: Apache-2.0
"""A graph as text, a line for each node, without values of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from magi_backend import _torch_compat

from .hidden import number_text, takes_value


if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import Graph


_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}


def graph_text(graph: Graph) -> str:
    """*graph*, and the graphs that it calls, as text.

    Example:
        >>> def f(x):
        ...     return x.sin() * 12345.678
        >>> print(graph_text(torch.fx.symbolic_trace(f).graph))
        x = input
        sin = .sin(x)
        mul = mul(sin, …)
        return mul
    """
    return "\n".join(_lines(graph, "", set()))


def _lines(graph: Graph, indent: str, seen: set[int]) -> Iterator[str]:
    place = ""
    for node in graph.nodes:
        where = _place(node)
        if where and where != place:
            place = where
            yield f"{indent}# {where}"
        yield f"{indent}{_line(node)}"
    for name, inner in _called(graph):
        if id(inner) not in seen:
            seen.add(id(inner))
            yield f"{indent}graph {name}:"
            yield from _lines(inner.graph, f"{indent}    ", seen)


def _called(graph: Graph) -> Iterator[tuple[str, GraphModule]]:
    for node in graph.nodes:
        if node.op == "get_attr" and graph.owning_module is not None:
            value: Any = graph.owning_module
            for part in str(node.target).split("."):
                value = getattr(value, part, None)
            if isinstance(value, GraphModule):
                yield node.name, value


def _place(node: Node) -> str:
    """``model.py:12 in forward``: the innermost line of the program that *node* comes from; empty if unknown."""
    if node.op not in {"call_function", "call_method", "call_module"}:
        return ""
    _, _, last = str(node.meta.get("stack_trace") or "").rpartition('File "')
    path, _, rest = last.partition('", line ')
    number, _, function = rest.partition("\n")[0].partition(", in ")
    return f"{path.rpartition('/')[2]}:{number} in {function}" if rest else ""


def _line(node: Node) -> str:
    if node.op == "output":
        return f"return {_text(node.args[0], node.target, 0)}"
    kind = _kind(node.meta.get("val", node.meta.get("example_value")))
    named = f"{node.name}: {kind}" if kind else node.name
    if node.op == "placeholder":
        return f"{named} = input"
    if node.op == "get_attr":
        return f"{named} = attribute {node.target}"
    given = [_text(value, node.target, place) for place, value in enumerate(node.args)]
    given += [f"{name}={_text(value, node.target, name)}" for name, value in node.kwargs.items()]
    return f"{named} = {_target(node)}({', '.join(given)})"


def _target(node: Node) -> str:
    if isinstance(node.target, str):
        return f".{node.target}" if node.op == "call_method" else node.target
    if _torch_compat.is_overload(node.target):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def _kind(value: Any) -> str:
    """``f32[3, s0]`` for a tensor, its expression for a symbolic number, empty for what is not known."""
    if isinstance(value, torch.Tensor):
        dtype = _DTYPES.get(value.dtype) or str(value.dtype).removeprefix("torch.")
        device = "" if value.device.type == "cpu" else f" {value.device}"
        return f"{dtype}[{', '.join(map(str, value.shape))}]{device}"
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return str(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_kind, value))})"
    return ""


def _text(value: Any, target: Any, place: int | str) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return number_text(value) if takes_value(target, place) else str(value)
    if isinstance(value, float | complex):
        return number_text(value)
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, tuple | list):
        inner = ", ".join(_text(item, target, place) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(item, target, place)}" for key, item in value.items()) + "}"
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return ":".join("" if part is None else _text(part, target, place) for part in parts)
    if isinstance(
        value, torch.SymInt | torch.SymFloat | torch.dtype | torch.device | torch.layout | torch.memory_format
    ):
        return str(value)
    return f"<{getattr(value, '__name__', type(value).__name__)}>"
