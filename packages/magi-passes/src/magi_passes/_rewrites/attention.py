# SPDX-License-Identifier: Apache-2.0
"""Attention that is written out, as the operator that has kernels for it.

    scores = query @ key.transpose(-1, -2) * scale + bias
    out = torch.softmax(scores.masked_fill(hidden, -inf), -1) @ value

writes and reads a number for each query and key, several times. Inductor replaces 28 such programs, node by node
(torch/_inductor/fx_passes/fuse_attention.py), but most of them not if there are several sequences whose heads were
split off by a transposition, and none with `torch.einsum` or with a softmax of ``scores.float() * scale``. Here, what
is done to the scores is followed from the product to the softmax, so the order and the spelling do not matter.

The scores are then in float32, and not rounded to half precision in between.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from magi_passes import _torch_compat
from magi_passes._framework.compilation import PassContext, Reason
from magi_passes._framework.graph_pass import CheckedPass
from magi_passes._graph.nodes import Writer, captured_value, hinted, is_half_on_cuda, is_same_shape, replace_by

from .wide_heads import WIDEST_OF_FAST_KERNELS


F = torch.nn.functional
FEWEST_ON_CPU = 128
"""How many queries and keys there must be on a CPU. Its kernel takes a fifth longer for 49 in float32."""
LOW = -1e4
"""A score that is replaced by this or less has a power of zero beside any that is not."""
HIDDEN = -1e30
"""What is added instead. It is not minus infinity, so that a row that is hidden in whole has equal powers."""

_CONVERSIONS = ("float", "half", "bfloat16", "to", "type", "type_as", "contiguous", "clone")
_PARAMETERS = {
    "einsum": ("equation", "left", "right"),
    "matmul": ("left", "right"),
    "baddbmm": ("input", "left", "right"),
    **dict.fromkeys(("mul", "div", "add", "sub"), ("input", "other")),
    "masked_fill": ("input", "mask", "value"),
    "where": ("condition", "input", "other"),
    "softmax": ("input", "dim"),
    "dropout": ("input", "p", "training"),
    **dict.fromkeys(_CONVERSIONS, ("input",)),
}
_OTHER_NAMES = {"bmm": "matmul", "imul": "mul", "truediv": "div", "itruediv": "div", "iadd": "add", "isub": "sub"}
_ON_CPU = (torch.float32, torch.bfloat16, torch.float16)
_MOVES = ("transpose", "permute", "swapaxes")
_COPIES = ("reshape", "contiguous", "flatten")
"""What copies a tensor if its strides do not fit, while ``view`` would fail."""


@dataclass(frozen=True)
class WrittenAttentionPass(CheckedPass):
    """Call `scaled_dot_product_attention` where attention is written as two products and a softmax.

    On CUDA in half precision, and on CPUs. The product of queries and keys may be multiplied, divided, added to and
    masked, its softmax converted and dropped out. Nothing else may read what is in between.

    Example:
        >>> import torch
        >>> from magi_passes import PassPipeline, WrittenAttentionPass, collect_records
        >>> def attend(q, k, v):
        ...     return torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k).float() / 8, -1) @ v
        >>> options = PassPipeline([WrittenAttentionPass()]).inductor_options()
        >>> q, k, v = torch.randn(2, 130, 3, 64), torch.randn(2, 130, 3, 64), torch.randn(2, 3, 130, 64)
        >>> with collect_records() as records:
        ...     out = torch.compile(attend, dynamic=True, options=options)(q, k, v)
        >>> records[0].reason
        '1 attentions are written out'
        >>> torch.testing.assert_close(out, attend(q, k, v))
    """

    hook: ClassVar[str] = "pre_grad_custom_pass"

    def is_applicable(self, graph: Graph, context: PassContext) -> Reason:  # noqa: ARG002
        """It applies if some attention is written out that a kernel computes."""
        count = sum(1 for _ in _written(graph))
        return Reason(count > 0, f"{count} attentions are written out")

    def __call__(self, graph: Graph) -> None:
        """Rewrite these, with guards on what the kernels take."""
        for attention in _written(graph):
            all(map(bool, _limits(attention)))  # reading the truth of a symbolic comparison adds the guard
            out = attention.out.node
            replace_by(out, _by_the_operator(Writer(out), attention))


@dataclass(frozen=True)
class _Product:
    """``node = (left.permute(left_order) @ right.permute(right_order)).permute(out_order)``."""

    node: Node
    left: Node
    right: Node
    left_order: tuple[int, ...]
    right_order: tuple[int, ...]
    out_order: tuple[int, ...]


@dataclass(frozen=True)
class _Scores:
    """``softmax(query @ key.mT * scale * factors + bias)``, as far as it has been read.

    Attributes:
        product: The product of queries and keys.
        scale: The number that it is multiplied by.
        factors: Tensors of one number for all keys, by which it is multiplied (`torch.mul`) or divided (`torch.div`).
        bias: What is added to it, each multiplied by a number.
        hidden: Conditions, what each is where scores are replaced, and by what.
        is_softmax: Whether the softmax has been read.
        dropout: The probability with which a number of the softmax is dropped.
    """

    product: _Product
    scale: float = 1.0
    factors: tuple[tuple[Callable[..., Tensor], Node], ...] = ()
    bias: tuple[tuple[Node, float], ...] = ()
    hidden: tuple[tuple[Node, bool, float], ...] = ()
    is_softmax: bool = False
    dropout: float = 0.0


@dataclass(frozen=True)
class _Attention:
    """*scores*, after the softmax, times the values."""

    scores: _Scores
    out: _Product


def _written(graph: Graph) -> Iterator[_Attention]:
    """The attentions of *graph* that are rewritten."""
    for node in list(graph.nodes):
        attention = _attention_from(node)
        if attention is not None and _has_a_kernel(attention) and not _is_changed_before_use(attention):
            yield attention


def _attention_from(node: Node) -> _Attention | None:
    """The attention whose scores are the product *node*; None if anything else reads what it computes."""
    product = _product_of(node)
    if product is None or product.out_order != _unmoved(product.out_order):
        return None
    name, given = _call_of(node)
    read: _Scores | None = _Scores(product)
    if name == "baddbmm":
        read = _multiplied(_Scores(product), given.get("alpha", 1), "mul")
        if read is not None and given.get("beta", 1) != 0:
            read = _added(read, given["input"], "add") if given.get("beta", 1) == 1 else None
    while read is not None and node.users:
        before, (*statements, node) = node, node.users
        for statement in statements:  # such as ``scores.masked_fill_(mask, value)``
            is_in_place = statement.op == "call_method" and str(statement.target).endswith("_") and not statement.users
            read = _read_on(read, before, statement) if is_in_place and read is not None else None
        if read is None:
            return None
        out = _product_of(node) if read.is_softmax else None
        if out is not None:
            is_left = out.left is before and out.right is not before and out.left_order == _unmoved(out.left_order)
            return _Attention(read, out) if is_left else None
        read = _read_on(read, before, node)
    return None


def _unmoved(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(range(len(order)))


def _call_of(node: Node) -> tuple[str, dict[str, Any]]:
    """What *node* calls, and its arguments by name: of ``x.mul_(2)`` and ``x *= 2``, ``mul`` too. Empty if unknown."""
    target: Any = node.target
    name = target if node.op == "call_method" else getattr(target, "__name__", "")
    if node.op == "call_function" and all(getattr(owner, name, None) is not target for owner in (torch, F, operator)):
        return "", {}
    name = str(name).strip("_")
    name = _OTHER_NAMES.get(name, name)
    return name, {**dict(zip(_PARAMETERS.get(name, ()), node.args, strict=False)), **node.kwargs}


def _product_of(node: Node) -> _Product | None:
    """*node* as a product of matrices, which are the last two of three or four dimensions; None for anything else."""
    name, given = _call_of(node)
    if name not in ("einsum", "matmul", "baddbmm") or not {"left", "right"} <= given.keys():
        return None
    left, right = given["left"], given["right"]
    values: list[Any] = [captured_value(x) if isinstance(x, Node) else None for x in (left, right, node)]
    # A tensor inside `torch.vmap` or `torch.func.grad` is a wrapper, without a mode.
    dims = {value.dim() if hasattr(value, "fake_mode") else 0 for value in values}
    if dims not in ({3}, {4}):
        return None
    same = tuple(range(dims.pop()))
    orders = _orders_of(str(given["equation"])) if name == "einsum" else (same, same, same)
    return None if orders is None else _Product(node, left, right, *orders)


def _orders_of(equation: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """How the operands of an `torch.einsum`, which is a batched product, and its result are permuted.

    ``bqhd,bkhd->bhqk`` permutes the first operand to ``bhqd``, and the second to ``bhdk``.
    """
    operands, _, out = equation.replace(" ", "").partition("->")
    left, _, right = operands.partition(",")
    batch = [letter for letter in out if letter in left and letter in right]
    rows, columns = ([x for x in letters if x not in other] for letters, other in ((left, right), (right, left)))
    summed = [letter for letter in left if letter in right and letter not in out]
    wanted = [*batch, *rows, *summed], [*batch, *summed, *columns], [*batch, *rows, *columns]
    is_product = len(rows) == len(columns) == len(summed) == 1 and "." not in equation
    if not is_product or any(
        sorted(x) != sorted(letters) for x, letters in zip(wanted, (left, right, out), strict=True)
    ):
        return None
    orders = [tuple(map(letters.index, x)) for letters, x in ((left, wanted[0]), (right, wanted[1]))]
    return orders[0], orders[1], tuple(map(wanted[2].index, out))


def _read_on(read: _Scores, before: Node, node: Node) -> _Scores | None:
    """*read*, with what *node* does to the scores or the softmax in *before*; None if it is not understood."""
    name, given = _call_of(node)
    scores, result, query = map(captured_value, (before, node, read.product.left))
    if (
        not (isinstance(result, Tensor) and result.is_floating_point() and result.device == scores.device)
        or not (is_same_shape(result.shape, scores.shape) and result.itemsize >= query.itemsize)
        or sum(operand is before for operand in node.all_input_nodes) != 1
    ):
        return None
    is_first = given.get("input") is before
    if name in _CONVERSIONS:
        return read if is_first else None
    if name == "dropout":
        dropout = given.get("p", 0.5) if given.get("training", True) else 0.0
        return replace(read, dropout=dropout) if read.is_softmax and not read.dropout else None
    if read.is_softmax:
        return None
    if name == "softmax":
        return replace(read, is_softmax=True) if given.get("dim") in (-1, scores.dim() - 1) else None
    if name == "masked_fill":
        return _hidden(read, given["mask"], True, given["value"]) if is_first else None
    if name == "where":
        return _hidden(read, given["condition"], not is_first, given["other" if is_first else "input"])
    if name not in ("mul", "div", "add", "sub") or not given.keys() <= {"input", "other"}:
        return None
    other = given["other"] if is_first else given["input"]
    if not is_first and name in ("div", "sub"):
        return None
    return _added(read, other, name) if name in ("add", "sub") else _multiplied(read, other, name)


def _hidden(read: _Scores, condition: Any, truth: bool, fill: Any) -> _Scores | None:
    """*read*, with *fill* for scores where *condition* is *truth*.

    A number is added where eager mode replaces. A row that is hidden in whole tells these apart: by its gradient, and
    in float16, which has no number that is low enough.
    """
    if isinstance(fill, Node) and _call_of(fill)[0] == "tensor":
        fill = fill.args[0]
    if not isinstance(condition, Node) or type(fill) not in (int, float) or not fill <= LOW:
        return None
    product = captured_value(read.product.node)
    is_told = product.requires_grad or captured_value(read.product.left).dtype is torch.float16
    return None if is_told and fill != -math.inf else replace(read, hidden=(*read.hidden, (condition, truth, fill)))


def _added(read: _Scores, other: Any, name: str) -> _Scores | None:
    if not isinstance(other, Node):
        return read  # the softmax is the same
    value, product = captured_value(other), read.product
    if not isinstance(value, Tensor) or value.dim() < 2 or value.dtype != captured_value(product.left).dtype:
        return None
    if not statically_known_true(value.shape[-1] == captured_value(product.node).shape[-1]):
        return None
    return replace(read, bias=(*read.bias, (other, 1.0 if name == "add" else -1.0)))


def _multiplied(read: _Scores, other: Any, name: str) -> _Scores | None:
    if isinstance(other, Node):
        value, dtype = captured_value(other), captured_value(read.product.left).dtype
        if not isinstance(value, Tensor) or not (value.dim() == 0 or (value.shape[-1] == 1 and value.dtype == dtype)):
            return None
        is_first = not read.bias and not read.hidden and value.is_floating_point()
        return replace(read, factors=(*read.factors, (getattr(torch, name), other))) if is_first else None
    if type(other) not in (int, float) or not 0 < other < math.inf:
        return None
    number = other if name == "mul" else 1 / other
    bias = tuple((term, own * number) for term, own in read.bias)
    hidden = tuple((condition, truth, fill * number) for condition, truth, fill in read.hidden)
    is_low = all(fill <= LOW for *_, fill in hidden)
    return replace(read, scale=read.scale * number, bias=bias, hidden=hidden) if is_low else None


def _operands(attention: _Attention) -> list[tuple[Node, tuple[int, ...]]]:
    """Queries, keys and values, and how each is permuted to (batch, heads, sequence, numbers)."""
    product, out = attention.scores.product, attention.out
    *batch, numbers, keys = product.right_order
    return [(product.left, product.left_order), (product.right, (*batch, keys, numbers)), (out.right, out.right_order)]


def _has_a_kernel(attention: _Attention) -> bool:
    """Whether a kernel computes *attention*, faster than two products and a softmax."""
    query, key, value = (captured_value(node).permute(order) for node, order in _operands(attention))
    fewest = min(hinted(query.shape[-2]), hinted(key.shape[-2]))
    is_for_cpu = query.device.type == "cpu" and query.dtype in _ON_CPU and fewest >= FEWEST_ON_CPU
    return (
        ((is_for_cpu and not attention.scores.dropout) or is_half_on_cuda(query))
        and all(x.dtype == query.dtype for x in (key, value, captured_value(attention.out.node)))
        and all(is_same_shape(x.shape[:-2], query.shape[:-2]) for x in (key, value))
        and all(statically_known_true(x.stride(-1) == 1) for x in (query, key, value))
        and statically_known_true(value.shape[-1] == query.shape[-1])
        and all(limit if isinstance(limit, bool) else limit.node.hint is True for limit in _limits(attention))
        and not torch.are_deterministic_algorithms_enabled()
    )


def _limits(attention: _Attention) -> list[Any]:
    """What the sizes of *attention* must be for a kernel, as truth values, some of them symbolic."""
    product = attention.scores.product
    *batch, _, numbers = captured_value(product.left).permute(product.left_order).shape
    return [
        *(extent <= _torch_compat.attention.MOST_SEQUENCES for extent in batch),
        numbers <= WIDEST_OF_FAST_KERNELS,
        numbers % 8 == 0,
    ]


def _is_changed_before_use(attention: _Attention) -> bool:
    """Whether something writes to what *attention* reads, or switches a mode, between its products."""
    scores, first, last = attention.scores, attention.scores.product.node, attention.out.node
    read = [node for node, _ in _operands(attention)]
    read += [factor for _, factor in scores.factors] + [term for term, _ in scores.bias]
    read += [condition for condition, *_ in scores.hidden]
    between, node = [], first
    while node is not last:
        node = node.next
        between.append(node)
    if any(captured_value(node) is None for node in between):
        return True  # gradients are switched on or off, or autocast, by a call without a result
    memory = _torch_compat.compiling.storage_of
    written = {memory(captured_value(node)) for node in _torch_compat.compiling.written_operands(between)}
    return not written.isdisjoint(memory(captured_value(node)) for node in read)


def _by_the_operator(write: Writer, attention: _Attention) -> Node:
    """The node of *attention* as one call of the operator."""
    scores, order = attention.scores, attention.out.out_order
    query, key, value = (_permuted(write, node, order) for node, order in _operands(attention))
    for apply, factor in scores.factors:
        query = write(apply, query, factor)
    if len(order) == 3:
        query, key, value = (write(torch.unsqueeze, x, 0) for x in (query, key, value))
    mask = _mask_of(write, scores)
    out = write(F.scaled_dot_product_attention, query, key, value, mask, scores.dropout, False, scale=scores.scale)
    if len(order) == 3:
        out = write(torch.squeeze, out, 0)
    if not _is_copied_next(attention.out.node):
        out = write(torch.clone, out, memory_format=torch.contiguous_format)
    return _permuted(write, out, order)


def _permuted(write: Writer, x: Node, order: tuple[int, ...]) -> Node:
    return x if order == _unmoved(order) else write(torch.permute, x, order)


def _is_copied_next(node: Node) -> bool:
    """Whether all that reads *node* takes any strides: a kernel has the heads next to their numbers in its result."""
    names = {user: _call_of(user)[0] for user in node.users}
    return all(name in _COPIES or (name in _MOVES and _is_copied_next(user)) for user, name in names.items())


def _mask_of(write: Writer, scores: _Scores) -> Node | None:
    """What the operator adds to the scores, or a mask of those that it shows; None if there is neither."""
    value = captured_value(scores.product.left)
    if not scores.bias and all(fill == -math.inf for *_, fill in scores.hidden):
        shown = [write(torch.logical_not, mask) if truth else mask for mask, truth, _ in scores.hidden]
        return functools.reduce(functools.partial(write, torch.logical_and), shown) if shown else None
    terms = [term if number == 1 else write(torch.mul, term, number) for term, number in scores.bias]
    added = terms or [write(torch.zeros, [], dtype=value.dtype, device=value.device)]
    mask = functools.reduce(functools.partial(write, torch.add), added)
    hidden = max(HIDDEN, torch.finfo(value.dtype).min)
    for condition, truth, _ in scores.hidden:
        mask = write(torch.where, condition, *((hidden, mask) if truth else (mask, hidden)))
    mask = write(torch.clamp, mask, hidden)
    return write(torch.unsqueeze, mask, 0) if captured_value(mask).dim() == 3 else mask  # as the CPU's kernel wants
