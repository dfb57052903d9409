# SPDX-License-Identifier: Apache-2.0
"""A graph as text, and the numbers that a report leaves out, because they may be values of tensors.

A graph and its code hold sizes, and other numbers: constants of the program, such as an epsilon, and values that were
in a tensor when the graph was captured. ``x.item()`` becomes a number then, Inductor writes a small constant tensor
into the code, and the two kinds of numbers look the same. So a number is shown only if it must be a size, or if many
programs have it. Graph breaks and failed guards are read from what Dynamo reports.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from magi_backend import _torch_compat
from magi_backend.records import GraphBreak, Recompilation


HIDDEN = "…"
"""What replaces a hidden number."""

_COMMON = {0.0, 0.5, 1.0, 2.0, *(10.0**-power for power in range(1, 13))}
_FLOAT = re.compile(r"(?<![\w.])\d+(?:\.\d+(?:[eE][-+]?\d+)?|[eE][-+]?\d+)(?![\w.]*\.\d)(?![a-eg-zA-EG-Z_])")
# Inductor writes an index with a suffix, static_cast<int64_t>(64L), and a value without one.
_VALUES_IN_CODE = re.compile(r"(static_cast<\w+>\(|tl\.full\(\[[^\]]*\], )(-?\d+)(?=[,)])")
_FRAGMENT = re.compile(r"^#   %.*\n", re.MULTILINE)
_COMPARED = re.compile(r"([=!<>]=?\s*)-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?!\w)")
_SIZES = ("size(", "stride(", "storage_offset(", "len(", "ndimension(", "dim(", "requires_grad=")


def number_text(value: float | complex) -> str:  # noqa: PYI041 - mypy takes the one for the other
    """*value*, which may have been in a tensor, as text; hidden unless a report may show it.

    Example:
        >>> number_text(1e-05), number_text(12345.678), number_text(float("-inf"))
        ('1e-05', '…', '-inf')
    """
    common = not isinstance(value, complex) and (not math.isfinite(value) or abs(value) in _COMMON)
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
    overloads = _torch_compat.nodes.overloads_of(target)
    if not overloads:
        name = target if isinstance(target, str) else str(getattr(target, "__name__", ""))
        name = _OPERATORS.get(target, name) if callable(target) else name
        if "tensor" in name.lower():
            return True  # torch.tensor(data) and similar functions
        overloads = _torch_compat.nodes.tensor_overloads(name.strip("_"))
    kinds = (kind for overload in overloads for kind in _torch_compat.nodes.declared_kinds(overload, place))
    return any("int" not in kind and "bool" not in kind for kind in kinds)


_TORCH_NAMES = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "pow": "pow",
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}
_OPERATORS: dict[Callable[..., Any], str] = {
    getattr(operator, python): name for each, name in _TORCH_NAMES.items() for python in (f"__{each}__", f"__i{each}__")
}
"""Python's operators, also those that write in place, by torch's name of the same."""


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
    for node in graph.find_nodes(op="get_attr"):
        inner: Any = graph.owning_module
        for part in str(node.target).split("."):
            inner = getattr(inner, part, None)
        if isinstance(inner, GraphModule) and id(inner) not in seen:
            seen.add(id(inner))
            yield f"{indent}graph {node.name}:"
            yield from _lines(inner.graph, f"{indent}    ", seen)


def _place(node: Node) -> str:
    """``model.py:12 in forward``: the innermost line of the program that *node* comes from; empty if unknown."""
    if not node.op.startswith("call_"):
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
    if isinstance(node.target, str):
        called = f".{node.target}" if node.op == "call_method" else node.target
    else:
        has_name = not isinstance(node.target, OpOverload)
        called = str(getattr(node.target, "__name__", node.target) if has_name else node.target)
    return f"{named} = {called}({', '.join(given)})"


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


_SHOWN = (bool, torch.SymInt, torch.SymFloat, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""The classes of arguments that hold no value of a tensor."""


def _text(value: Any, target: Any, place: int | str) -> str:
    if isinstance(value, Node):
        return value.name
    if value is None or isinstance(value, _SHOWN):
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
    return f"<{getattr(value, '__name__', type(value).__name__)}>"


def graph_break(found: Any) -> GraphBreak:
    """The record of a graph break *found* by Dynamo, an object with a ``reason`` and a ``user_stack``."""
    lines = [line.strip() for line in without_fractions(str(found.reason)).splitlines() if line.strip()]
    hints = tuple(line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: "))
    reason = lines[0] if lines else "unknown"
    if reason.startswith("generic_jump "):
        reason = "the program branches on the value of a tensor"
        hints = ("torch.where and torch.cond stay in a graph.",)
    if not found.user_stack:
        return GraphBreak("an unknown line", "", reason, hints)
    frame = found.user_stack[-1]
    return GraphBreak(f"{frame.filename}:{frame.lineno}", frame.name, reason, hints)


_FAILED = re.compile(r"^(\d+/\d+(?:_\d+)?): (.*)", re.DOTALL)
_STACK = re.compile(r'File "([^"]+)", line (\d+)')
_COMMENT = re.compile(r"\s{2,}# ")
_COMMENTED = re.compile(r"# (?!_|nn/|fx/|utils/|torch/)(\S+\.py:\d+) in ")
# Dynamo's names for what a program has, and for what one graph hands to the next.
_SPOKEN = {
    r"\bG\['(\w+)'\]": r"the global \1",
    r"\b___stack\d+\b": "a value from before the graph break",
    r"\._(?:parameters|buffers|modules)\['(\w+)'\]": r".\1",
    r" Guard failed on a parameter, .*": "",
}


def recompilation(reasons: Sequence[str], static: tuple[str, ...] = ()) -> Recompilation | None:
    """The record of a recompilation for which Dynamo gives *reasons*, one for each graph; None if there is none.

    *static* is how guards on sizes under ``mark_static`` begin.

    Example:
        >>> recompilation(["0/0: tensor 'x' size mismatch at index 0. expected 3, actual 5"]).guard
        "tensor 'x' size mismatch at index 0. expected 3, actual 5"
    """
    kinds: dict[str, Recompilation] = {}
    for each in (_failed(reason, static) for reason in reasons):
        kinds.setdefault(re.sub(r"\d+", "", each.guard), each)  # two that differ by a number are one reason
    if not kinds:
        return None
    first, *others = kinds.values()
    return replace(first, others=tuple(others))


def _failed(reason: str, static: tuple[str, ...]) -> Recompilation:
    found = _FAILED.match(reason)
    of, text = (found[1], found[2]) if found else ("", reason)
    guard, _, stack = text.partition("\nUser stack trace:")
    places = [":".join(place) for place in _STACK.findall(stack)]
    guard, *comment = _COMMENT.split(guard.strip(), maxsplit=1)
    if not places and ("size()" in guard or "stride()" in guard):
        places = _COMMENTED.findall(f"# {''.join(comment)}")
    for pattern, word in _SPOKEN.items():
        guard = re.sub(pattern, word, guard)
    marked = ", marked by mark_static" * guard.startswith(static)
    return Recompilation(of, hidden_in_guard(guard.rstrip(".")) + marked, places[-1] if places else "")
