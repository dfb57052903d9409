# SPDX-License-Identifier: Apache-2.0
"""Sizes and places in 32 bits, in kernels that count their elements in 32 bits.

Run on torch 2.11 and 2.13, read in 2.10, 2.12 and 2.15.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from .kernels import install_lock, replace


MAX_INT32 = 2**31 - 1


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
    loop variables, ``torch.arange(n) * s0**3`` for example, may be larger than each of its parts: `index_expr` writes
    those, and all of such a number has to fit. With `value_expr`, as in torch 2.13, it is widened before more is
    computed from it; without, nothing but a size of 64 bits widens that, so sizes stay so.

    Places that a kernel computes with floats, as those that an interpolation reads from, are 64-bit integers as well
    unless they are known to be small, and of symbolic sizes nothing is known (`indexing_dtype_strength_reduction` in
    torch/_inductor/optimize_indexing.py). Here what follows from the largest value of every loop variable is compared,
    with guards: the logits of a segmentation, enlarged four times to 150 * 4 * 512 * 640, take 0.55 ms in place of 1.10
    (0.78 with constant sizes; one H200, torch 2.11).
    """
    from torch._inductor.codegen import simd, triton

    with install_lock:
        if not hasattr(triton.TritonKernel.rename_indexing, "__wrapped__"):
            replace(simd, "indexing_dtype_strength_reduction", _hold_places_narrow, memo_of_current)
            replace(triton.TritonKernel, "rename_indexing", _note_expression, memo_of_current)
            replace(triton.TritonKernelOverrides, "index_expr", _note_number, memo_of_current)
            replace(triton, "signature_to_meta", _declare_narrow, memo_of_current)


def _note_expression(rename: Any, _memo: Any, kernel: Any, index: Any) -> Any:
    import sympy

    if not isinstance(index, (list, tuple)):
        # Inductor names blocks by strings, such as "R0_BLOCK".
        # In order, since a guard that one of them adds may answer for the next.
        vars(kernel).setdefault("_magi_passes_expressions", {})[sympy.sympify(index)] = None
    return rename(kernel, index)


def _note_number(write: Any, _memo: Any, cls: Any, expr: Any, dtype: Any) -> Any:
    import sympy
    from torch._inductor.virtualized import V

    lengths = {counter: entry.length for counter, entry in V.kernel.range_tree_nodes.items()}
    symbols, numbers = sympy.sympify(expr).free_symbols, vars(V.kernel).setdefault("_magi_passes_numbers", {})
    if any(map(_is_size, symbols)):  # without a size, torch computes it in 32 bits as well
        if not all(map(_is_size, symbols)):
            bound = largest_of_index(expr, lengths)
            numbers[bound if all(map(_is_size, bound.free_symbols)) else None] = None
        if dtype == torch.int64 and not hasattr(cls, "value_expr") and _is_computed_with():
            numbers[None] = None
    return write(cls, expr, dtype)


def _is_computed_with() -> bool:
    """Whether numbers are computed from what is written now, rather than that it is compared, chosen or a place."""
    from torch._inductor.virtualized import V

    passed_on: list[Any] = [getattr(V.interpreter, "current_node", None)]  # templates have no loop body
    for each in passed_on if None not in passed_on else ():
        passed_on += [user for user in each.users if user.target in ("maximum", "minimum", "where")]
    computing = ("add", "mul", "pow", "reduction", "sub")
    return any(each is None or any(user.target in computing for user in each.users) for each in passed_on)


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
        numbers: dict[Any, None] = getattr(V.kernel, "_magi_passes_numbers", {})
        parts = (bound for index in expressions for bound in bounds_of_sizes(index))
        if all(bound is not None and _fits(bound, memo) for bound in itertools.chain(parts, numbers)):
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
            yield _without_signs(index.expand(), abs)
        # A quotient of sizes may be small although its numerator is large.
        parts = [arg for function in sorted(index.atoms(sympy.Function), key=str) for arg in function.args]
    elif isinstance(index, (sympy.Add, sympy.Mul)):
        sizes = [part for part in parts if all(map(_is_size, part.free_symbols))]
        yield from bounds_of_sizes(index.func(*sizes))
        parts = [part for part in parts if part not in sizes]
    for part in parts:
        yield from bounds_of_sizes(part)


def _without_signs(total: Any, size_of: Callable[[Any], Any]) -> Any:
    """*total* with *size_of* each number that a term is multiplied by in its place."""
    import sympy

    terms = (term.as_coeff_Mul() for term in sympy.Add.make_args(total))
    return sympy.Add(*(size_of(coefficient) * rest for coefficient, rest in terms))


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
    # torch 2.12 has the first name; the second warns there from 2.13 on.
    hint = getattr(shape_env, "guarding_hint_or_throw", None) or shape_env.size_hint
    if hint(size) > MAX_INT32:
        return False
    sizevars.check_leq(size, MAX_INT32)
    return True


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


def _largest(node: Any, body: Any, known: dict[Any, Any]) -> Any:
    """An upper bound of the absolute value of *node* of a loop body, made of sizes; None for what depends on data.

    Rounding is left out: half of what 32 bits hold has to suffice.
    """
    import sympy

    if node in known:
        return known[node]
    of = [_largest(each, body, known) for each in _operands(node)]
    bound, target = None, node.target
    if target == "index_expr":
        bound = largest_of_index(body.indexing_exprs[node.args[1].args[0]], body.var_ranges)
    elif target == "constant":
        bound = math.ceil(abs(node.args[1])) if math.isfinite(node.args[1]) else None
    elif None not in of and target in ("add", "sub", "maximum", "minimum"):
        bound = sympy.Add(*of)
    elif None not in of and target == "mul":
        bound = sympy.Mul(*of)
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
    return all(_is_no_fraction(each, body, is_whole=is_whole) for each in _operands(node))


def _operands(node: Any) -> list[Any]:
    """What a call of a loop body is made of, behind the handler of operations."""
    return [each for each in node.args[1:] if isinstance(each, torch.fx.Node)]


def largest_of_index(index: Any, ranges: Mapping[Any, Any]) -> Any:
    """An upper bound of the absolute value of *index*, whose loop variables count up to their *ranges*.

    Example: ``0.5*y - 3*h/n``, y below h, is at most ``h + 3*h``: no size that is divided by is less than 1.
    What is left of ``y % n`` is less than ``n``, and a maximum or minimum is at most the sum of its parts.
    """
    import sympy
    from torch.utils._sympy import functions

    quotients = (functions.FloatTrueDiv, functions.IntTrueDiv)
    rounded = (functions.CeilToInt, functions.FloorToInt, functions.RoundToInt, functions.ToFloat, functions.TruncToInt)
    remainders = (functions.Mod, functions.ModularIndexing, functions.PythonMod)
    index = index.replace(lambda part: isinstance(part, remainders), lambda remainder: remainder.args[-1])
    index = index.xreplace(dict(ranges))
    index = index.replace(lambda part: isinstance(part, functions.FloorDiv), _largest_whole_quotient)
    extremes = (functions.Max, functions.Min)
    index = index.replace(lambda part: isinstance(part, extremes), lambda extreme: sympy.Add(*extreme.args))
    index = index.replace(lambda part: isinstance(part, quotients), lambda quotient: quotient.args[0])
    index = index.replace(lambda part: isinstance(part, rounded), lambda number: number.args[0] + 1)
    return _without_signs(index.expand(identity=True), lambda coefficient: sympy.ceiling(abs(coefficient)))


def _largest_whole_quotient(quotient: Any) -> Any:
    from torch.utils._sympy.functions import FloorDiv

    whole, part = quotient.args
    return FloorDiv(_without_signs(whole.expand(identity=True), abs), part) + 1  # it is rounded down, also below 0
