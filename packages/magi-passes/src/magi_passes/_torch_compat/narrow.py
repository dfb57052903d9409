# SPDX-License-Identifier: Apache-2.0
"""Sizes and places in 32 bits, in kernels that count their elements and hold their numbers in 32 bits.

Run on torch 2.11 and 2.13, read in 2.10, 2.12 and 2.15.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from .kernels import install_lock, replace


MAX_INT32 = 2**31 - 1
TOO_LARGE = 2**63
"""Stands for the bound of what is seldom computed, a power for example."""


def install_narrow_sizes(memo_of_current: Callable[[], MutableMapping[Any, bool] | None]) -> None:
    """Pass sizes to kernels as 32-bit integers, for compilations for which *memo_of_current* gives a dict.

    `signature_to_meta` (torch/_inductor/codegen/triton_utils.py) declares every size ``i64``, also where all elements
    are counted in 32 bits, because a kernel may compute ``s0 * s1``, as a mean over two dimensions does, and that can
    be larger than any of its tensors. So every index with a symbolic size has 64 bits, and a GPU takes several times as
    long to divide it.

    What a kernel computes from sizes only is known when its body is written, because each expression that it prints
    passes through `rename_indexing`. If all of it fits into 32 bits, which a guard ensures, the sizes are passed in 32
    bits. The dict holds the answers so far.

    An address is a place in a tensor, so it fits whatever it is added up from. A number that is computed from sizes and
    loop variables, ``torch.arange(n) * 40000`` for example, may be larger than what it is computed from, and torch
    computes it in 32 bits if the elements can be counted in 32 bits; up to 2.12 also the sum of such numbers. Where a
    number need not fit, the kernel has 64 bits, also with constant sizes.

    Places that a kernel computes with floats, as those that an interpolation reads from, are 64-bit integers as well
    unless they are known to be small, and of symbolic sizes nothing is known (`indexing_dtype_strength_reduction` in
    torch/_inductor/optimize_indexing.py). Here what follows from the largest value of every loop variable is compared,
    with guards: the logits of a segmentation, enlarged four times to 150 * 4 * 512 * 640, take 0.55 ms in place of 1.10
    (0.78 with constant sizes; one H200, torch 2.11).
    """
    from torch._inductor.codegen import simd, triton
    from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures

    with install_lock:
        if not hasattr(triton.TritonKernel.rename_indexing, "__wrapped__"):
            replace(simd, "indexing_dtype_strength_reduction", _hold_places_narrow, memo_of_current)
            replace(triton.TritonKernel, "rename_indexing", _note_expression, memo_of_current)
            replace(SIMDKernelFeatures, "select_index_dtype", _select_for_numbers, memo_of_current)
            replace(triton, "signature_to_meta", _declare_narrow, memo_of_current)


def _note_expression(rename: Any, _memo: Any, kernel: Any, index: Any) -> Any:
    import sympy

    if not isinstance(index, (list, tuple)):
        # Inductor names blocks by strings, such as "R0_BLOCK".
        # In order, since a guard that one of them adds may answer for the next.
        vars(kernel).setdefault("_magi_passes_expressions", {})[sympy.sympify(index)] = None
    return rename(kernel, index)


def _select_for_numbers(select: Any, memo: Any, features: Any) -> torch.dtype:
    if "_magi_passes_index_dtype" not in vars(features):
        selected = select(features)
        if selected == torch.int32 and not _all_fit(set(numbers_of(features)), memo):
            selected = torch.int64
        features._magi_passes_index_dtype = selected
    return features._magi_passes_index_dtype  # type: ignore[no-any-return]


def _all_fit(bounds: set[Any], memo: MutableMapping[Any, bool]) -> bool:
    """Whether 32 bits hold each of *bounds*, if possible by one guard. Without guards, hints decide, as in torch."""
    import sympy
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    def is_hinted(bound: Any) -> bool:
        return not free_unbacked_symbols(bound) and _hint(bound) <= MAX_INT32

    in_order = sorted(bounds, key=str)
    return _fits(sympy.Add(*in_order), memo) or all(_fits(each, memo) or is_hinted(each) for each in in_order)


def numbers_of(features: Any) -> Iterator[Any]:
    """An upper bound, made of sizes, of each number that a kernel computes from sizes and places in integers.

    Of an expression such as ``40000*x0 % 7``, what the remainder is of is one of them.
    """
    import sympy

    for node in features.scheduler_nodes():
        body = node._body
        known: dict[Any, Any] = {}
        integers: dict[Any, bool] = {}
        indices = map(sympy.sympify, body.indexing_exprs.values())
        functions = (part for index in indices for part in index.atoms(sympy.Function, sympy.Rel))
        parts = {arg for each in functions for arg in each.args if isinstance(arg, sympy.Expr) and not arg.is_Atom}
        bounds = [largest_of_index(part, body.var_ranges) for part in parts]
        # An expression is computed in integers whatever it is converted to.
        bounds += [
            _largest(each, body, known)
            for each in body.get_nodes()
            if each.target in _EXPRESSIONS or (each.target != "constant" and _is_integer(each, body, integers))
        ]
        # A loop variable is a place among the elements, which torch counts.
        lengths = {largest_of_index(length, {}) for length in body.var_ranges.values()}
        yield from (bound for bound in bounds if _is_of_sizes(bound) and bound not in lengths)


def _is_of_sizes(bound: Any) -> bool:
    return bound is not None and all(map(_is_size, bound.free_symbols))


def _declare_narrow(declare: Any, memo: Any, signature: Any, *, size_dtype: Any, argdefs: Any, **rest: Any) -> Any:
    from torch._inductor.codegen.common import SizeArg
    from torch._inductor.virtualized import V

    declared = declare(signature, size_dtype=size_dtype, argdefs=argdefs, **rest)
    wide = [
        name.name
        for arg, name in zip(signature, argdefs, strict=False)
        if isinstance(arg, SizeArg) and arg.name.startswith("ks") and declared.get(name.name) == "i64"
    ]
    if size_dtype == "tl.int32" and wide and "indices" not in rest:
        expressions: dict[Any, None] = getattr(V.kernel, "_magi_passes_expressions", {})
        if all(_fits(bound, memo) for index in expressions for bound in bounds_of_sizes(index)):
            declared |= dict.fromkeys(wide, "i32")
    return declared


def bounds_of_sizes(index: Any) -> Iterator[Any]:
    """An upper bound of the absolute value of each part of *index* that is made of sizes only.

    Example: ``x0 + 4*s0*s1*x1 - s2`` has the parts ``4*s0*s1`` and ``-s2``, with the bounds ``4*s0*s1`` and ``s2``.
    """
    import sympy

    if not index.free_symbols:
        return
    parts = list(index.args)
    if all(map(_is_size, index.free_symbols)):
        if not isinstance(index, sympy.Function) or index.is_integer:  # others are computed as floats
            terms = (term.as_coeff_Mul() for term in sympy.Add.make_args(index.expand()))
            yield sympy.Add(*(abs(coefficient) * rest for coefficient, rest in terms))
        # A quotient of sizes may be small although its numerator is large.
        parts = [arg for function in sorted(index.atoms(sympy.Function), key=str) for arg in function.args]
    elif isinstance(index, (sympy.Add, sympy.Mul)):
        sizes = [part for part in parts if all(map(_is_size, part.free_symbols))]
        yield from bounds_of_sizes(index.func(*sizes))
        parts = [part for part in parts if part not in sizes]
    for part in parts:
        yield from bounds_of_sizes(part)


def _is_size(symbol: Any) -> bool:
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    kinds = (SymT.SIZE, SymT.PRECOMPUTED_SIZE, SymT.UNBACKED_INT)
    return bool(symbol.is_Symbol and symbol_is_type(symbol, kinds))


def _fits(bound: Any, memo: MutableMapping[Any, bool]) -> bool:
    if bound not in memo:
        memo[bound] = guarded_to_fit(bound)
    return memo[bound]


def guarded_to_fit(size: Any) -> bool:
    """Whether *size* fits in 32 bits, for all inputs that the guards admit; a guard is added if needed.

    If no guard can be added, only known bounds count: for sizes that depend on data, for packages that are compiled
    ahead of time, for a backward that is compiled late, and for what is computed with floats, such as the size of an
    image that is scaled by 1.5.
    """
    import sympy
    from torch._inductor.virtualized import V
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    sizevars = V.graph.sizevars
    # A number within `Identity` has no hint.
    size = sizevars.remove_precomputed_replacements(sympy.sympify(size)).expand(identity=True)
    if sizevars.statically_known_leq(size, MAX_INT32):
        return True
    shape_env = sizevars.shape_env
    has_floats = size.has(sympy.Float) or not all(part.is_integer for part in size.atoms(sympy.Function))
    if shape_env.frozen or V.aot_compilation or free_unbacked_symbols(size) or has_floats:
        return False
    if _hint(size) > MAX_INT32:
        return False
    sizevars.check_leq(size, MAX_INT32)
    return True


def _hint(size: Any) -> Any:
    from torch._inductor.virtualized import V

    sizevars = V.graph.sizevars
    # torch 2.12 has the first name; the second warns there from 2.13 on.
    hint = getattr(sizevars.shape_env, "guarding_hint_or_throw", None) or sizevars.shape_env.size_hint
    return hint(sizevars.remove_precomputed_replacements(size).expand(identity=True))


def _hold_places_narrow(reduce: Any, memo: Any, body: Any) -> None:
    from torch._inductor.virtualized import V

    reduce(body)
    known: dict[Any, Any] = {}
    for node in body.get_nodes() if V.kernel.index_dtype == "tl.int32" else ():
        if node.target == "to_dtype" and node.args[2] == torch.int64:
            places = _computed_from(node)
            bounds = [_largest(place, body, known) for place in places]
            if bounds and all(bound is not None and _fits(2 * bound, memo) for bound in bounds):
                operands = dict.fromkeys(each for place in places for each in place.all_input_nodes)
                constants = [each for each in operands if each.target == "constant"]
                for each in [node, *(each for each in constants if each.users.keys() <= places.keys())]:
                    each.args = (*each.args[:2], torch.int32, *each.args[3:])


def _computed_from(node: Any) -> dict[Any, None]:
    """*node* and the integers that are computed from it, as far as they are known to say where memory is read."""
    found, to_visit = {node: None}, [node]
    while to_visit:
        for user in to_visit.pop().users:
            target, is_float = str(user.target), user.target == "to_dtype" and user.args[2].is_floating_point
            if target in ("add", "sub", "maximum", "minimum") and user not in found:
                found[user] = None
                to_visit.append(user)
            elif user not in found and not is_float and not target.startswith("set_indirect"):
                return {}
    return found


_EXPRESSIONS = ("index_expr", "value_expr")
_BITS, _QUOTIENTS = ("bitwise_and", "bitwise_or", "bitwise_xor"), ("floordiv", "mod", "remainder", "truncdiv")
_NO_LARGER_THAN_SUM = {"add", "maximum", "minimum", "sub", "where", *_BITS, *_QUOTIENTS}
_IN_INTEGERS = {"abs", "bitwise_left_shift", "mul", "neg", "pow", "reduction", "to_dtype", *_NO_LARGER_THAN_SUM}


def _is_integer(node: Any, body: Any, known: dict[Any, bool]) -> bool:
    """Whether *node* of a loop body is an integer that is computed from sizes and places, or a constant one."""
    if node not in known:
        dtypes = [each for each in node.args if isinstance(each, torch.dtype)]
        is_one = all(dtype != torch.bool and not dtype.is_floating_point for dtype in dtypes)
        if is_one and node.target not in (*_EXPRESSIONS, "constant"):
            operands = _operands(node, body)
            is_computed = node.target in _IN_INTEGERS or node.target in body.subblocks
            is_one = is_computed and bool(operands) and all(_is_integer(each, body, known) for each in operands)
        known[node] = is_one
    return known[node]


def _largest(node: Any, body: Any, known: dict[Any, Any]) -> Any:
    """An upper bound of the absolute value of *node* of a loop body, made of sizes; None for what depends on data.

    Rounding is left out: half of what 32 bits hold has to suffice.
    """
    import sympy

    if node in known:
        return known[node]
    target, bound = node.target, None
    of = [_largest(each, body, known) for each in _operands(node, body)]
    if target in _EXPRESSIONS:
        index = body.indexing_exprs[node.args[1].args[0]]
        bound = largest_of_index(index, body.var_ranges) if isinstance(index, sympy.Expr) else None
    elif target == "constant":
        bound = math.ceil(abs(node.args[1])) if math.isfinite(node.args[1]) else None
    elif None not in of and (target in _NO_LARGER_THAN_SUM or target in body.subblocks):
        bound = sympy.Add(*of)
    elif None not in of and target == "mul":
        bound = sympy.Mul(*of)
    elif None not in of and target == "reduction" and node.args[3] != "prod":
        bound = sympy.Mul(*of, *(body.var_ranges[each] for each in body.reduce_vars))
    elif None not in of and target in ("bitwise_left_shift", "pow", "reduction"):
        bound = sympy.Integer(TOO_LARGE)
    elif target == "truediv" and _is_no_fraction(node.args[2], body):
        bound = of[0]
    elif None not in of and target in ("abs", "ceil", "floor", "neg", "round", "to_dtype", "trunc"):
        bound = of[0] + 1
    known[node] = bound
    return bound


def _is_no_fraction(node: Any, body: Any, *, is_whole: bool = False) -> bool:
    """Whether *node* is known to be 0 or at least 1, or less than -1; if *is_whole*, whether to be an integer."""
    target, value = node.target, node.args[1]
    if target == "constant":
        return float(value).is_integer() or (not is_whole and abs(value) > 1)
    if target == "index_expr":
        return bool(body.indexing_exprs[value.args[0]].is_integer)
    is_whole |= target in ("add", "sub")
    if target not in ("add", "mul", "sub", "to_dtype"):
        return False
    return all(_is_no_fraction(each, body, is_whole=is_whole) for each in _operands(node, body))


def _operands(node: Any, body: Any) -> list[Any]:
    """What a call of a loop body is made of, behind the handler of operations and the condition of a choice."""
    chosen = node.args[2:] if node.target == "where" else node.args[1:]
    if node.target in body.subblocks:  # the value where its condition holds is what a graph of its own returns
        chosen = (*chosen, *next(iter(reversed(body.subblocks[node.target].graph.nodes))).args)
    return [each for each in chosen if isinstance(each, torch.fx.Node)]


def largest_of_index(index: Any, ranges: Mapping[Any, Any]) -> Any:
    """An upper bound of the absolute value of *index*, whose loop variables count up to their *ranges*.

    Example: ``0.5*y - 3*h/n``, y below h, is at most ``h + 3*h``: no size that is divided by is less than 1. What is
    left of ``y % n`` is less than ``n``, and a sum, choice, maximum or minimum is at most the sum of its parts.
    """
    import sympy
    from torch.utils._sympy import functions

    of = [largest_of_index(part, ranges) for part in index.args if isinstance(part, sympy.Expr)]
    if index.is_number:
        return sympy.ceiling(abs(index))
    match index:
        case sympy.Symbol():
            return largest_of_index(ranges[index], {}) if index in ranges else index
        case functions.Mod() | functions.ModularIndexing() | functions.PythonMod():
            return of[-1]
        case functions.FloorDiv() if not index.args[1].free_symbols & ranges.keys():
            return functions.FloorDiv(of[0], index.args[1]) + 1  # it is rounded down, also below 0
        case functions.FloorDiv() | functions.FloatTrueDiv() | functions.IntTrueDiv():
            divisor = index.args[1]
            return of[0] * (sympy.ceiling(1 / abs(divisor)) if divisor.is_number else 1) + 1
        case sympy.Mul():
            return sympy.Mul(*of)
        case sympy.Pow() | functions.PowByNatural() if index.args[1].is_number:
            return of[0] ** index.args[1] if index.args[1] > 0 else sympy.S.One
        case sympy.Add() | sympy.Abs() | functions.Max() | functions.Min() | functions.Where() | functions.Identity():
            return sympy.Add(*of)
        case functions.CeilToInt() | functions.FloorToInt() | functions.RoundToInt():
            return of[0] + 1
        case functions.ToFloat() | functions.TruncToInt():
            return of[0]
    return sympy.Integer(TOO_LARGE)
