# SPDX-License-Identifier: Apache-2.0
"""Whether the rows of a graph stay apart, so that its inputs can get more of them, which are cut off its outputs.

A size of the graph counts rows. The graph is in core ATen, so that one table has a rule for each operator, which says
in which dimensions of its results these rows lie. An operator for which that cannot be shown is refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from magi_backend._torch_compat.nodes import called_name, overloads_of

from .row_walk import (
    Found,
    MixesRowsError,
    Rows,
    Rule,
    Walk,
    constant,
    dims_named,
    expression_of,
    is_tensor,
    quotient,
    shape_of,
    value_of,
)


def rows_apart(gm: GraphModule, rows: Any, names: Sequence[str]) -> Found:
    """Follow the symbol *rows* through *gm*, a graph of core ATen operators whose inputs have these *names*.

    Raises:
        MixesRowsError: Added rows might change what real rows hold.
    """
    return Walk(gm, rows, names, _rule_of).run()


def _rule_of(overload: Any) -> Rule | None:
    """The rule of an operator; None if nothing is known of what it does with rows."""
    rule = _RULES.get(overload.overloadpacket.__name__) if overload.namespace in ("aten", "prims") else None
    return _pointwise if rule is None and torch.Tag.pointwise in overload.tags else rule


def _tensors(given: Mapping[str, Any]) -> list[Node]:
    return [each for value in given.values() for each in tree_leaves(value) if is_tensor(each)]


def _evaluated(node: Node, numbers: Mapping[Node, Any]) -> Any:
    """The number that a pointwise operator gives for *numbers*, each that of a tensor; None if it cannot be known."""
    is_known = torch.Tag.pointwise in overloads_of(node.target)[0].tags or called_name(node) in _SAME
    if not is_known or any(number is None for number in numbers.values()):
        return None
    if any(isinstance(each, Node) and not is_tensor(each) for each in tree_leaves((node.args, node.kwargs))):
        return None

    def tensor(value: Any) -> Any:
        return torch.tensor(numbers[value], dtype=value_of(value).dtype) if isinstance(value, Node) else value

    kwargs = {name: value for name, value in node.kwargs.items() if name not in ("device", "layout", "pin_memory")}
    target: Any = node.target
    return target(*map_aggregate(node.args, tensor), **map_aggregate(kwargs, tensor)).item()


_ABSORBING = {
    "bitwise_and": False,
    "logical_and": False,
    "bitwise_or": True,
    "logical_or": True,
    "mul": 0,
    "add": -math.inf,
}
"""A number of one operand that decides the result, whatever the other one holds; `True` and `False` for bools."""

_DIVISIONS = ("div", "floor_divide", "remainder", "fmod")

_SAME = ("_to_copy", "clone", "alias", "detach", "lift_fresh_copy")
"""Operators that give what they get."""

_COUNTING = (torch.int64, torch.int32, torch.float64)
"""The dtypes that hold each index of a dimension."""


def _pointwise(walk: Walk, node: Node, given: Mapping[str, Any]) -> Rows:
    """Each entry follows from the entries at the same place."""
    rank, name, dtype = len(shape_of(node)), called_name(node), value_of(node).dtype
    operands = {each: walk.of(each).shifted(rank - len(shape_of(each))) for each in _tensors(given)}
    inner = walk.union(*operands.values())
    absorbing: Any = _ABSORBING.get(name)
    if given.get("alpha", 1) != 1 or (isinstance(absorbing, bool) and dtype != torch.bool):
        absorbing = None
    added: dict[int, Any] = {}
    for dim in inner:
        numbers = {each: one.added.get(dim, one.number) for each, one in operands.items()}
        if name == "where" and len(numbers) == 3:
            condition, *choices = (numbers[given[each]] for each in ("condition", "self", "other"))
            number = choices[0] if condition or choices[0] == choices[1] else None if condition is None else choices[1]
        elif absorbing is not None and absorbing in numbers.values():
            number = absorbing
        else:
            number = _evaluated(node, numbers)
        if number is not None:
            added[dim] = number
    divisor = given.get("other")
    if name in _DIVISIONS and not dtype.is_floating_point and isinstance(divisor, Node) and walk.of(divisor).fresh:
        raise MixesRowsError(f"nobody knows whether {walk.name(divisor)} is zero in added rows, by which it divides")
    index, offset = _line(operands, given, name)
    if index is not None and index.keys() <= inner.keys() and name in ("le", "lt", "ge", "gt"):
        added |= _compared(name, index, offset)
    return Rows(
        inner,
        index=index if dtype in _COUNTING else None,
        offset=offset,
        number=_evaluated(node, {each: one.number for each, one in operands.items()}),
        added=added,
        fresh=dtype != torch.bool and any(one.fresh for one in operands.values()),
    )


def _line(operands: Mapping[Node, Rows], given: Mapping[str, Any], name: str) -> tuple[Mapping[int, int] | None, int]:
    """`Rows.index` and `Rows.offset` of a result, for a comparison those of the difference."""
    given_by = [given.get("self"), given.get("other", 0)]
    is_same = name in _SAME
    if not is_same and (name not in ("add", "sub", "le", "lt", "ge", "gt") or given.get("alpha", 1) != 1):
        return None, 0
    lines = []
    for one in given_by:
        rows = operands.get(one, Rows()) if isinstance(one, Node) else Rows(number=one)
        number = rows.number if isinstance(rows.number, int) else None
        lines.append((rows.index, rows.offset) if number is None else ({}, number))
    (left, a), (right, b) = lines
    if left is None or right is None:
        return None, 0
    sign = 1 if name == "add" or is_same else -1
    factors = {dim: left.get(dim, 0) + sign * right.get(dim, 0) for dim in {*left, *right}}
    return {dim: factor for dim, factor in factors.items() if factor}, a + sign * b


def _compared(name: str, index: Mapping[int, int], offset: int) -> dict[int, bool]:
    """What a comparison with zero gives in added rows, where one of the two indices is larger than the other."""
    if sorted(index.values()) != [-1, 1]:
        return {}
    found = {}
    for dim, sign in index.items():
        holds = getattr(operator, name)(offset + sign, 0)  # at least, or at most, so much
        if holds == ((name in ("ge", "gt")) == (sign == 1)):
            found[dim] = holds
    return found


_NEUTRAL = {
    "sum": 0,
    "any": False,
    "amax": -math.inf,
    "_softmax": -math.inf,
    "_log_softmax": -math.inf,
}
"""Numbers that added rows may hold where an operator acts along them: they change nothing."""

_CHOOSES = ("argmax", "argmin", "topk", "sort", "max", "min")
"""Operators whose results are places in a dimension, so any that they give is a valid one."""


def _along(acts_on: str | int, *aligned: str) -> Rule:
    """A rule for an operator that mixes entries along some dimensions of the arguments *aligned*, and along no others.

    *acts_on* is the argument that names these dimensions, or says how many of the last ones they are; -1 is for all but
    the first. Other tensors must have no rows.
    """

    def rule(walk: Walk, node: Node, given: Mapping[str, Any]) -> Any:
        operands = [each for argument in aligned for each in tree_leaves(given[argument]) if is_tensor(each)]
        operands = [each for each in operands if shape_of(each) != (0,)]  # `cat` takes such tensors for none
        ranks = {len(shape_of(each)) for each in operands}
        if len(ranks) != 1:
            raise MixesRowsError("its operands have different numbers of dimensions")
        (rank,), name = ranks, called_name(node)
        walk.clean(*(each for each in _tensors(given) if each not in operands))
        if isinstance(acts_on, int):
            last = acts_on if acts_on >= 0 else rank - 1
            dims = tuple(range(rank - last, rank))
        else:
            dims = dims_named(given.get(acts_on), rank)
        if name == "constant_pad_nd":
            dims = tuple(range(rank - len(given["pad"]) // 2, rank))
        if name == "slice_scatter" and _is_all(operands[0], dims[0], given):
            dims = ()
        known = [walk.of(each) for each in operands]
        for dim in dims:
            for one in known:
                if dim in one.inner and (name not in _NEUTRAL or one.added.get(dim) != _NEUTRAL[name]):
                    raise MixesRowsError(
                        f"it mixes rows, which lie in dimension {dim} of {walk.name(operands[known.index(one)])}"
                    )
        if "index" in given:
            walk.looks_up(given["index"], shape_of(operands[0])[dims[0]])
        inner = walk.union(*known)
        kept = [dim for dim in range(rank) if dim not in dims]

        def result(value: Any) -> Rows:
            fresh = any(one.fresh for one in known) and not (name in _CHOOSES and value.dtype == torch.int64)
            rows = Rows({dim: entries for dim, entries in inner.items() if dim in kept}, fresh=fresh)
            if name in ("_softmax", "_log_softmax"):
                added = {dim: 0 if name == "_softmax" else -math.inf for dim in dims if dim in inner}
                return Rows(inner, added=added, fresh=fresh)
            return rows.moved({dim: place for place, dim in enumerate(kept)}) if value.dim() == len(kept) else rows

        values = value_of(node)
        return result(values) if isinstance(values, torch.Tensor) else tuple(map(result, values))

    return rule


def _is_all(node: Node, dim: int, given: Mapping[str, Any]) -> bool:
    """Whether a slice along a dimension is all of it."""
    start, end, size = given.get("start") or 0, given.get("end"), shape_of(node)[dim]
    is_end = expression_of(value_of(end)) == size if isinstance(end, Node) else end in (None, 2**63 - 1)
    return start == 0 and given.get("step", 1) == 1 and is_end


def _reshape(walk: Walk, node: Node, given: Mapping[str, Any]) -> Rows:
    """The entries stay in their order, and get other dimensions: a row stays where as many entries follow it."""
    source = given["self"]
    rows, before, after = walk.of(source), shape_of(source), shape_of(node)
    inner: dict[int, Any] = {}
    to: dict[int, int] = {}
    for dim, entries in rows.inner.items():
        follow = entries * sympy.prod(before[dim + 1 :])
        for place, size in enumerate(after):
            within = quotient(follow, sympy.prod(after[place + 1 :]))
            if walk.is_counted(size) and within is not None and walk.outer(node, place, within) is not None:
                inner[place] = within
                if size == before[dim]:
                    to[dim] = place
    if len(inner) != len(rows.inner):
        raise MixesRowsError(f"rows cannot be told apart any more where {before} becomes {after}")
    return replace(rows.moved(to), inner=inner)


def _permute(walk: Walk, node: Node, given: Mapping[str, Any]) -> Rows:
    rank = len(shape_of(node))
    return walk.of(given["self"]).moved({dim % rank: place for place, dim in enumerate(given["dims"])})


def _expand(walk: Walk, node: Node, given: Mapping[str, Any]) -> Rows:
    """Where a dimension is new, or had one entry, each row is the same."""
    source, after = given["self"], shape_of(node)
    shift = len(after) - len(shape_of(source))
    rows = walk.of(source).shifted(shift)
    new = {dim for dim, size in enumerate(after) if walk.is_counted(size) and dim not in rows.inner}
    if any(after[dim] != walk.rows for dim in new):
        raise MixesRowsError(f"it gives a dimension the size {after}, in which rows cannot be told apart")
    return replace(rows, inner={**rows.inner, **dict.fromkeys(new, sympy.S.One)})


def _slice(walk: Walk, node: Node, given: Mapping[str, Any]) -> Rows:
    source, before, after = given["self"], shape_of(given["self"]), shape_of(node)
    rows, (dim,) = walk.of(source), dims_named(given.get("dim", 0), len(before))
    start, step = given.get("start") or 0, given.get("step", 1)
    starts_late = isinstance(start, Node) or start < 0
    if dim not in rows.inner:
        if not walk.is_counted(after[dim]):
            if any(isinstance(end, Node) and walk.reads(end) for end in (start, given.get("end"))):
                raise MixesRowsError("where it ends follows from the size")
            return rows if _is_all(source, dim, given) else replace(rows, index=None)
        if after[dim] != walk.rows or step != 1 or (isinstance(start, Node) and walk.reads(start)):
            raise MixesRowsError(f"it takes {after[dim]} entries of a dimension without rows")
        return replace(rows, inner={**rows.inner, dim: sympy.S.One}, index=None, fresh=True)
    if _is_all(source, dim, given) or after[dim] == before[dim]:
        return rows
    if starts_late or not after[dim].is_number or not walk.is_whole(source, dim):
        raise MixesRowsError(f"it takes rows that are counted from the end, or {after[dim]} of {before[dim]}")
    return replace(rows.moved({each: each for each in range(len(before)) if each != dim}), fresh=rows.fresh)


def _select(walk: Walk, node: Node, given: Mapping[str, Any]) -> Rows:  # noqa: ARG001 - as all rules
    source = given["self"]
    rank = len(shape_of(source))
    rows, (dim,), index = walk.of(source), dims_named(given["dim"], rank), given["index"]
    if dim in rows.inner and (isinstance(index, Node) or index < 0 or not walk.is_whole(source, dim)):
        raise MixesRowsError("it takes a row that is counted from the end, which would be an added one")
    return rows.moved({each: each - (each > dim) for each in range(rank) if each != dim})


_PRODUCTS = {
    "mm": ("ik", "kj", "ij"),
    "addmm": ("ik", "kj", "ij"),
    "bmm": ("bik", "bkj", "bij"),
    "baddbmm": ("bik", "bkj", "bij"),
    "mv": ("ik", "k", "i"),
    "addmv": ("ik", "k", "i"),
    "dot": ("k", "k", ""),
    "vdot": ("k", "k", ""),
    "_int_mm": ("ik", "kj", "ij"),
}
"""The dimensions of the last two operands, and of the result; those that are not in the result are summed over."""


def _product(walk: Walk, node: Node, given: Mapping[str, Any]) -> Rows:
    left, right, result = _PRODUCTS[called_name(node)]
    *bias, a, b = _tensors(given)
    inner: dict[int, Any] = {}
    for operand, letters in ((a, left), (b, right)):
        for dim, entries in walk.of(operand).inner.items():
            letter = letters[dim]
            if letter in result:
                inner = walk.union(Rows(inner), Rows({result.index(letter): entries}))
            elif 0 not in (walk.of(a).added.get(left.index(letter)), walk.of(b).added.get(right.index(letter))):
                raise MixesRowsError(f"it sums over the rows, which lie in dimension {dim} of {walk.name(operand)}")
            else:
                walk.union(
                    Rows({0: walk.of(a).inner.get(left.index(letter))}),
                    Rows({0: walk.of(b).inner.get(right.index(letter))}),
                )
    for each in bias:
        inner = walk.union(Rows(inner), walk.of(each).shifted(len(result) - len(shape_of(each))))
    return Rows(inner, fresh=any(walk.of(each).fresh for each in (*bias, a, b)))


def _attention(walk: Walk, node: Node, given: Mapping[str, Any]) -> tuple[Rows, ...]:
    """Batch and heads stay apart. A row that is a query must see no key of an added row."""
    query, key, value = (given[name] for name in ("query", "key", "value"))
    mask = given.get("attn_mask", given.get("attn_bias"))
    known = [walk.of(each) for each in (query, key, value)]
    if any(3 in one.inner for one in known):
        raise MixesRowsError("rows lie in the last dimension of a query, key or value, over which it sums")
    masked = walk.of(mask).shifted(4 - len(shape_of(mask))) if is_tensor(mask) else Rows()
    if 2 in known[1].inner or 2 in known[2].inner:
        hides = masked.added.get(3) in (
            (False,) if mask is not None and value_of(mask).dtype == torch.bool else (-math.inf,)
        )
        is_causal = given["is_causal"] and all(walk.is_whole(each, 2) for each in (query, key, value))
        if not (is_causal or hides) or known[1].inner.get(2) != known[2].inner.get(2):
            raise MixesRowsError(
                "each query may attend to the keys of added rows. It is right with is_causal=True, or with a mask that "
                "is causal by its indices, such as torch.ones(n, n).tril() == 1; what an input masks is not known"
            )
    inner = walk.union(
        *(Rows({dim: n for dim, n in one.inner.items() if dim < 2 or (dim == 2 and one is known[0])}) for one in known),
        Rows({dim: n for dim, n in masked.inner.items() if dim < 3}),
    )
    if given.get("dropout_p"):
        walk.draws = True
    rows = Rows(inner, fresh=any(one.fresh for one in known) or 2 in inner)
    return tuple(
        rows if isinstance(one, torch.Tensor) and one.dim() > 2 else Rows() for one in tree_leaves(value_of(node))
    )


def _as_strided(walk: Walk, node: Node, given: Mapping[str, Any]) -> Rows:
    """Only where the entries stay in their order, as `reshape` uses it."""
    source = given["self"]
    if not (_is_row_major(source) and _is_row_major(node)):
        raise MixesRowsError("it may give the entries another order")
    return _reshape(walk, node, given)


def _is_row_major(node: Node) -> bool:
    """Whether a tensor starts where its memory does, and has its entries in the order of their indices."""
    shape, strides, follow = shape_of(node), value_of(node).stride(), sympy.S.One
    for size, stride in reversed(list(zip(shape, strides, strict=True))):
        if size != 1 and expression_of(stride) != follow:
            return False
        follow *= size
    return bool(expression_of(value_of(node).storage_offset()) == 0)


def _create(walk: Walk, node: Node, given: Mapping[str, Any]) -> Rows:
    """Each row is made alike, or from its index."""
    inner = {dim: sympy.S.One for dim, size in enumerate(shape_of(node)) if walk.is_counted(size)}
    if any(shape_of(node)[dim] != walk.rows for dim in inner):
        raise MixesRowsError(f"it makes a tensor of the size {shape_of(node)}, in which rows cannot be told apart")
    if called_name(node) not in ("arange", "iota"):
        return Rows(inner, number=constant(node, given))
    start, step = given.get("start", 0), given.get("step", 1)
    if any(isinstance(each, Node) and walk.reads(each) for each in (start, step)):
        raise MixesRowsError("it counts from a number that follows from the size")
    index = None
    if (start, step) == (0, 1) and value_of(node).dtype in _COUNTING:
        index = {} if shape_of(node) == (1,) else {0: 1}  # one entry may be expanded to many
    return Rows(inner, index=index, fresh=bool(inner))


def _look_up(walk: Walk, node: Node, given: Mapping[str, Any]) -> Rows:  # noqa: ARG001 - as all rules
    """`index`, with a list of indices for the first dimensions of a tensor, and `embedding` and `index_select`."""
    table = given["weight"] if "weight" in given else given["self"]
    rank = len(shape_of(table))
    if "index" in given:
        (dim,) = dims_named(given["dim"], rank)
        indices = [None] * dim + [given["index"]]
    else:
        indices = [given["indices"]] if "weight" in given else list(given["indices"])
    to, placed = _placed(indices, rank)
    rows, index_rows = walk.of(table), []
    for dim, index in enumerate(indices):
        if index is None:
            continue
        one = walk.of(index).shifted(placed.stop - placed.start - len(shape_of(index)))
        if dim in rows.inner and not (
            walk.is_whole(table, dim) and one.index is not None and [*one.index.values(), one.offset] == [1, 0]
        ):
            raise MixesRowsError(
                f"it looks up rows, which lie in dimension {dim} of {walk.name(table)}, by numbers that it is given"
            )
        if dim not in rows.inner:
            walk.looks_up(index, shape_of(table)[dim])
        index_rows.append(one.shifted(placed.start))
    kept = replace(rows, index=None, added={}).moved(to)
    return Rows(walk.union(kept, *index_rows), fresh=rows.fresh)


def _placed(indices: Sequence[Any], rank: int) -> tuple[dict[int, int], range]:
    """Where ``x[indices]`` has the other dimensions of *x*, and where those of the indices, which are broadcast."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    wide = max(len(shape_of(index)) for index in indices if index is not None)
    is_together = dims == list(range(dims[0], dims[-1] + 1))
    start = dims[0] if is_together else 0
    others = [dim for dim in range(rank) if dim not in dims]
    places = [place for place in range(len(others) + wide) if not start <= place < start + wide]
    return dict(zip(others, places, strict=True)), range(start, start + wide)


def _put(walk: Walk, node: Node, given: Mapping[str, Any]) -> Rows:  # noqa: ARG001 - as all rules
    """`index_put`: each row of a tensor gets values at places that are the same for all rows."""
    table, indices, values = given["self"], given["indices"], given["values"]
    walk.clean(*(index for index in indices if index is not None))
    to, placed = _placed(indices, len(shape_of(table)))
    rows = walk.of(table)
    if any(dim in rows.inner and index is not None for dim, index in enumerate(indices)):
        raise MixesRowsError(f"it writes to some rows of {walk.name(table)} by number")
    wide = len(to) + len(placed)
    back = {place: dim for dim, place in to.items()}
    given_rows = walk.of(values).shifted(wide - len(shape_of(values)))
    if any(dim in placed for dim in given_rows.inner):
        raise MixesRowsError(f"it writes rows of {walk.name(values)} to places of {walk.name(table)} that are not rows")
    inner = walk.union(Rows(rows.inner), Rows(given_rows.moved(back).inner))
    return Rows(inner, fresh=rows.fresh or given_rows.fresh)


_RULES: dict[str, Rule] = {
    name: rule
    for rule, names in (
        (_pointwise, "_to_copy clone alias detach lift_fresh_copy copy where _conj"),
        (_pointwise, "full_like empty_like zeros_like ones_like rand_like randn_like bernoulli"),
        (_along("dim", "self"), "sum mean amax amin any all prod var var_mean std max min argmax argmin median"),
        (_along("dim", "self"), "kthvalue _softmax _log_softmax logsumexp linalg_vector_norm sort topk"),
        (_along("dim", "self"), "cumsum cumprod logcumsumexp cummax cummin _fft_r2c _fft_c2r _fft_c2c"),
        (_along("dim", "self"), "split split_with_sizes unbind"),
        (_along("dims", "self"), "flip roll"),
        (_along("dim", "self", "src"), "slice_scatter"),
        (_along("dim", "tensors"), "cat"),
        (_along("dim", "self", "index"), "gather"),
        (_along("dim", "self", "index", "src"), "scatter_add scatter_reduce"),
        (_along(-1, "input"), "convolution"),
        (_along(3, "self"), "max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d reflection_pad3d"),
        (_along(2, "self"), "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d reflection_pad2d"),
        (_along(2, "self"), "replication_pad2d upsample_nearest2d upsample_bilinear2d"),
        (_along(1, "self"), "avg_pool1d adaptive_avg_pool1d reflection_pad1d constant_pad_nd multinomial"),
        (lambda walk, _, given: Rows(walk.of(given["input"]).inner), "native_dropout"),
        (_reshape, "view _unsafe_view unsqueeze squeeze"),
        (_permute, "permute"),
        (_expand, "expand"),
        (_slice, "slice"),
        (_select, "select"),
        (_as_strided, "as_strided"),
        (_product, " ".join(_PRODUCTS)),
        (_attention, "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"),
        (_attention, "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"),
        (_attention, "_scaled_dot_product_fused_attention_overrideable"),
        (_create, "full empty scalar_tensor rand randn randint arange iota"),
        (_look_up, "embedding index index_select _unsafe_index"),
        (_put, "index_put _unsafe_index_put"),
    )
    for name in names.split()
}
"""What an operator does with rows. Pointwise ones are known by their tag, and any other one is refused."""
