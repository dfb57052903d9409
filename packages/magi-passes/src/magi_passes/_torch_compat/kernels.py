# SPDX-License-Identifier: Apache-2.0
"""How Inductor writes kernels: what becomes one, and tilings, with repairs of what is slow or cannot be launched.

Run on torch 2.11 and 2.13, read in 2.10, 2.12 and 2.15.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch


install_lock = threading.Lock()

MOST_REMEMBERED = 10_000
"""How many results are kept of a function of expressions, which is asked again for each node that may be fused."""


def replace(owner: Any, name: str, repaired: Callable[..., Any], memo_of_current: Callable[[], Any]) -> None:
    """Replace *name* of a class or module by *repaired*, for compilations for which *memo_of_current* gives a dict.

    *repaired* takes torch's own function, the dict, and the arguments of that function.
    """
    found = inspect.getattr_static(owner, name)
    original = found.__func__ if isinstance(found, classmethod) else found

    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        memo = memo_of_current()
        return original(*args, **kwargs) if memo is None else repaired(original, memo, *args, **kwargs)

    setattr(owner, name, classmethod(chosen) if isinstance(found, classmethod) else chosen)


def install_tilings(memo_of_current: Callable[[], dict[Any, Any] | None]) -> None:
    """Repair how Inductor tiles kernels and addresses memory, where *memo_of_current* returns a dict.

    `match_mod_div_block_expr` (torch/_inductor/codegen/block_analysis.py) matches a pattern with sympy, in a time that
    grows exponentially with the rank: a net of three convolutions took minutes. `matched_blocks` reads the terms of the
    index. What it found is kept in the dict, since every pair of nodes that might fuse asks again.

    `find_coalesced_var` (torch/_inductor/tiling_utils.py, 2.10 to 2.15) takes a loop variable that is a term of an
    index by itself for the one along which memory is contiguous. The length of what a padded convolution with a stride
    of 2 made is ``1 + f``, f a quotient, and the stride ``1 + f`` of y is written ``y + f*y``, so rows were taken for
    columns. A softmax over such rows took 0.34 ms (wav2vec2 on one H100, torch 2.11; the call 22.1 ms, and 18.6 where
    nothing is tiled). Given ``(1 + f)*y``, it decides by the strides at the sizes that were seen.

    `join_dimensions` (torch/_inductor/sizevars.py, 2.10 to 2.15) sees that ``i%n + n*(i//n)`` is ``i`` only where the
    second is one term. For a sum n, such as the ``101 + h*w`` tokens of an image, a stride of ``768*n`` is written as
    two, so a view that only merges dimensions is not known to be contiguous, and a matrix product copies it first: two
    copies a layer, 0.2 of the 2.7 ms of a YOLOS with six layers (one H100, torch 2.11).

    Numbers of elements are compared as they are written (`can_fuse` and `select_tiling` in codegen/simd.py, 2.10 to
    2.15), and ``b*n`` of a sum n is written as one term or as several, of which none is a multiple of n. So a norm of
    rows, or a softmax of rows of such a length, stays two kernels. Here equal numbers are written in one way.

    A stride of a contiguous tensor is a product of maxima, ``Max(1, s//4)``, since a size may be 0. Where guards say
    that it is not, `ShapeEnv.simplify` knows, but Inductor does not ask it (`SizeVarAllocator.simplify`), so it writes
    comparisons and products for each number, and does not reuse memory of the same size. Here it asks.

    Torch does not add up how large remainders are together (`_simplify_with_ranges`): the channels that an upsampling
    of WAN 2.2 repeats are read at ``c + (2*(h%2) + 4*(t%2) + w%2)//8``, where the quotient is 0. With it, a thread
    reads 32 numbers one by one, with constant sizes too; without it in four loads (torch 2.11, sm_90).

    Parts of a `cat` that are all computed become one kernel in which each element computes every part, and masks all
    but one (`cat` in torch/_inductor/lowering.py). What such a part reads twice is stored for it: for four images that
    are enlarged side by side, eight sums are written and read in float32. Here an image that is computed from several
    elements of another is written to its place by a kernel of its own: four of 768 channels, 4 * 128 * 160 large, take
    0.34 ms in place of 1.65 (1.24 with constant sizes; Segformer on one H200, torch 2.11).

    Whether a load is contiguous is asked of the index before it is simplified (`get_strides_of_load` in
    codegen/simd.py), where ``i//n`` of a symbolic n says nothing, so tensors that are read once are to stay in the
    cache. If one is read under two views, the two loads are different lines, and all that is computed from them is
    computed twice: GELU in the GRN of ConvNeXt V2, whose kernels take 0.82 ms where static ones take 0.44 (one H100,
    torch 2.11). Here the simplified index is asked.

    `complete_partial_tiling` finds the size of the side that is not tiled as a quotient, with sympy's ``/``, which
    cancels nothing that is written in two ways: the mean of ``relu`` over images of symbolic height and width divides
    ``s0*h*w + s0*h + s0*w + s0`` by ``h*w + h + w + 1``. Such a quotient cannot be printed (torch 2.11: "exponent must
    be non-negative, got -1"). Here it is cancelled.

    A kernel that holds a whole row gets one warp where rows lie one after another, which is meant for rows that are
    read four numbers at a time; rows of symbolic length are read one by one. Here it gets the blocks of other rows, of
    which the faster is measured: a softmax of 48,000 rows of 500 takes 70 µs in place of 227 (154 with sizes of 64
    bits; one H100, torch 2.11).

    A long reduction is cut into chunks, and the row of element i of an image is ``i // w % h`` although the last chunk
    is masked where i reaches ``h * w`` (`Reduction._multilayer_wrap_loader` in torch/_inductor/ir.py). With symbolic
    sizes that is a division for each number: ``var_mean`` of 256 channels of 1000 x 1000 takes 447 µs, and 355 without
    (one H200, torch 2.11). Here the row is ``i // w``, and the address of the element is that of i.

    Comments of kernels say the shapes of what they compute. `SymNode.str` sorts the terms of a size for each of them,
    which is 6 % of the time to compile the UNet of Stable Diffusion 1.5. Here each size is written once.

    torch 2.11 ends with a TypeError where a kernel does not divide into three tile dimensions, because `CantSplit` is
    raised there without its arguments (`_split_iteration_ranges`). Here they may be missing.
    """
    from torch._inductor import ir, lowering, tiling_utils
    from torch._inductor import sizevars as sizes_of_graphs
    from torch._inductor.codegen.block_analysis import BlockPatternMatcher
    from torch._inductor.codegen.simd import CantSplit, SIMDKernel, SIMDScheduling
    from torch._inductor.codegen.triton import TritonKernel
    from torch.fx.experimental.sym_node import SymNode

    with install_lock:
        if not hasattr(BlockPatternMatcher.match_mod_div_block_expr, "__wrapped__"):
            replace(BlockPatternMatcher, "match_mod_div_block_expr", _match_blocks, memo_of_current)
            replace(SIMDScheduling, "complete_partial_tiling", _complete_exactly, memo_of_current)
            replace(sizes_of_graphs.SizeVarAllocator, "simplify", _simplify_maxima, memo_of_current)
            replace(sizes_of_graphs.SizeVarAllocator, "_simplify_with_ranges", _drop_remainders, memo_of_current)
            replace(SIMDKernel, "get_strides_of_load", _strides_of_simple_index, memo_of_current)
            replace(SIMDScheduling, "group_fn", _group_by_factors, memo_of_current)
            replace(SIMDScheduling, "select_tiling", _tile_by_factors, memo_of_current)
            replace(sizes_of_graphs.SizeVarAllocator, "statically_known_multiple_of", _known_multiple, memo_of_current)
            replace(TritonKernel, "codegen_kernel", _write_rows, memo_of_current)
            replace(tiling_utils, "find_coalesced_var", _find_coalesced, memo_of_current)
            replace(lowering, "pointwise_cat", _cat_part_by_part, memo_of_current)
            replace(ir.Reduction, "_multilayer_wrap_loader", _chunks_in_range, memo_of_current)
            replace(sizes_of_graphs, "join_dimensions", _join_sums, memo_of_current)
            replace(SymNode, "str", _write_once, memo_of_current)
            if "__init__" in vars(CantSplit):
                CantSplit.__init__.__defaults__ = (None, None)


def _match_blocks(_match: Any, memo: Any, cls: Any, index: Any, index_var: Any, numel: Any, num_dims: int) -> Any:
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    if index.has(index_var) and not index.has(FloorDiv, ModularIndexing):
        return None
    key = (index, index_var, numel, num_dims)
    if key not in memo:
        memo[key] = matched_blocks(cls._preprocess(index), index_var, numel, num_dims)
    found = memo[key]
    return found if found is None else tuple(list(part) for part in found)


def matched_blocks(
    index: Any, index_var: Any, numel: Any, num_dims: int
) -> tuple[list[Any], list[Any], list[Any]] | None:
    """The block that *index* walks through while *index_var* counts to *numel*: sizes, strides, positions.

    Example: ``8*FloorDiv(i, 4) + 2*ModularIndexing(i, 1, 4)`` over 12 elements walks through 3 rows of 4. Its sizes are
    ``[3, 4]``, its strides ``[8, 2]``, and the positions are the two terms without their strides. The stride is 0 where
    it does not move. There are *num_dims* dimensions, with sizes of 1 behind the first if it has fewer. For any other
    kind of index, returns None.
    """
    import sympy
    from torch._inductor.codegen.block_analysis import BlockPatternMatcher
    from torch._inductor.virtualized import V
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    strides: dict[Any, Any] = {}
    for term in sympy.Add.make_args(index):
        stride, position = term.as_independent(index_var, as_Add=False)
        if isinstance(position, FloorDiv | ModularIndexing):
            of, *sizes = position.args
            if position in strides or of != index_var or any(size.has(index_var) for size in sizes):
                return None
            strides[position] = stride
        elif term != 0:
            return None

    dims: list[tuple[Any, Any]] = []  # of sizes and strides, from the second to the innermost
    inner, leading_stride = sympy.S.One, sympy.S.Zero  # inner: the product of the sizes in dims
    left = list(strides)
    while left:
        innermost = (one for one in left if None not in [_quotient(other.args[1], one.args[1]) for other in left])
        position = next(innermost, None)
        skipped = position and _quotient(position.args[1], inner)
        if skipped is None:
            return None
        left.remove(position)
        if skipped != 1:
            dims.insert(0, (skipped, sympy.S.Zero))
        inner *= skipped
        if isinstance(position, ModularIndexing):
            dims.insert(0, (position.args[2], strides[position]))
            inner *= position.args[2]
        elif left:
            return None
        else:
            leading_stride = strides[position]
    leading_size = _cancelled(numel / inner)
    if len(dims) >= num_dims or leading_size is None:
        return None
    if not (leading_size.is_integer or V.graph.sizevars.statically_known_multiple_of(numel, inner)):
        return None

    unused = [(sympy.S.One, sympy.S.Zero)] * (num_dims - 1 - len(dims))
    sizes, steps = map(list, zip((leading_size, leading_stride), *unused, *dims, strict=True))
    leading, *others = BlockPatternMatcher.get_slice_numels(sizes)
    positions = [ModularIndexing(index_var, within, size) for within, size in zip(others, sizes[1:], strict=True)]
    return sizes, steps, [FloorDiv(index_var, leading), *positions]


def _find_coalesced(find: Any, _memo: Any, index: Any, var_ranges: Any) -> Any:
    import sympy

    terms = sympy.Add.make_args(index)
    parts = [v for v in var_ranges if v in terms and any(term.has(v) for term in terms if term != v)]
    return find(sympy.collect(index, parts) if parts else index, var_ranges)


def _cat_part_by_part(cat: Any, _memo: Any, inputs: Any, dim: int = 0) -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    if any(map(_gathers_more_than_once, V.current_node.all_input_nodes)):
        return ir.TensorBox(ir.ConcatKernel.create(inputs, dim))
    return cat(inputs, dim)


def _gathers_more_than_once(node: Any) -> bool:
    """Whether each element of *node* is computed from several elements of an image, as an interpolated one is."""
    gathers, to_visit, seen = 0, [node], set()
    while to_visit and gathers < 2:
        node = to_visit.pop()
        if node not in seen:
            seen.add(node)
            gathers += node.target is torch.ops.aten._unsafe_index.Tensor
            if torch.Tag.pointwise in getattr(node.target, "tags", ()):
                to_visit += node.all_input_nodes
    return gathers > 1


def _chunks_in_range(
    wrap: Any, _memo: Any, cls: Any, loader: Any, ranges: Any, numel: Any, *args: Any, **kwargs: Any
) -> Any:
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    def quotient(place: Any) -> Any:
        if isinstance(place, ModularIndexing) and place.args[1] * place.args[2] == numel:
            return FloorDiv(*place.args[:2])
        return place

    def load(index: Any, reduction_index: Any) -> Any:
        return loader(index, [quotient(place) for place in reduction_index])

    return wrap(cls, load, ranges, numel, *args, **kwargs)


def _join_sums(_join: Any, _memo: Any, index: Any) -> Any:
    return joined_sums(index)


@functools.lru_cache(MOST_REMEMBERED)
def joined_sums(index: Any) -> Any:
    """*index* with each remainder and the quotient that belongs to it as one term, also where sizes are sums.

    Example: ``3*(i%(h + 1)) + 3*h*(i//(h + 1)) + 3*(i//(h + 1))`` is ``3*i``.

    Inductor's own `join_dimensions` matches patterns of sympy with each two terms, for a tenth of the time to compile a
    Segformer.
    """
    import sympy
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    if not isinstance(index, sympy.Add) or not index.has(ModularIndexing):
        return index
    quotients = index.atoms(FloorDiv, ModularIndexing)
    pairs = [
        (inner, outer)
        for inner in index.atoms(ModularIndexing)
        for outer in quotients
        if inner.args[0] == outer.args[0] and (outer.args[1] - inner.args[1] * inner.args[2]).expand() == 0
    ]
    for inner, outer in sorted(pairs, key=str):
        of, within, size = inner.args
        # One term, as ``h*(i%n)`` of ``h*(i%n) + 5*(i%n) + h*n*(i//n)``, or all of them.
        for scale in (*(term.coeff(inner) for term in index.args), index.coeff(inner)):
            terms = [*_terms(scale, inner), *_terms(scale * size, outer)]
            if scale != 0 and set(index.args).issuperset(terms):
                lengths = [size * length for length in outer.args[2:]]
                both = ModularIndexing(of, within, *lengths) if lengths else FloorDiv(of, within)
                return joined_sums(sympy.Add(index, *(-term for term in terms), *_terms(scale, both)))
    return index


def _terms(scale: Any, of: Any) -> list[Any]:
    """The terms of *scale* times *of*, which stays as it is.

    Example: ``n*(i//m)`` and ``i//m`` if *scale* is ``n + 1``.
    """
    import sympy

    return [term * of for term in sympy.Add.make_args(scale.expand())]


def _quotient(whole: Any, part: Any) -> Any:
    """*whole* divided by *part*; None if that is not known to be an integer."""
    import sympy

    quotient = sympy.cancel(whole / part)
    return quotient if quotient.is_integer else None


def _strides_of_simple_index(strides_of: Any, _memo: Any, kernel: Any, index: Any) -> Any:
    strides = strides_of(kernel, index)
    return strides if 1 in strides.values() else strides_of(kernel, kernel.prepare_indexing(index))


def _write_once(_write: Any, _memo: Any, size: Any) -> str:
    return _text_of(size.expr)


@functools.lru_cache(MOST_REMEMBERED, typed=True)  # 1 and 1.0 are equal
def _text_of(expr: Any) -> str:
    return f"{expr}"


def _simplify_maxima(simplify: Any, _memo: Any, sizevars: Any, expr: Any) -> Any:
    from torch.utils._sympy.functions import Max

    simple, shape_env = simplify(sizevars, expr), sizevars.shape_env
    if not simple.has(Max):
        return simple
    # A maximum of a loop variable clamps an index, of which the guards say nothing.
    of_sizes = (each for each in simple.atoms(Max) if each.free_symbols <= shape_env.var_to_range.keys())
    known = {each: shape_env.simplify(each) for each in of_sizes}
    # What stays a maximum stays as it is: quotients in it are written in another way there, and back here, without end.
    return simple.xreplace({each: value for each, value in known.items() if not isinstance(value, Max)})


def _drop_remainders(simplify: Any, memo: Any, sizevars: Any, expr: Any, var_ranges: Any) -> Any:
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    simple, found = simplify(sizevars, expr, var_ranges), {}
    for part in simple.atoms(FloorDiv, ModularIndexing):
        base, divisor, *modulus = part.args
        if divisor.is_Integer and divisor != 1 and (without := without_remainders(base, divisor)) != base:
            found[part] = part.func(without, divisor, *modulus)
    return _drop_remainders(simplify, memo, sizevars, simple.xreplace(found), var_ranges) if found else simple


def without_remainders(base: Any, divisor: Any) -> Any:
    """*base*, a sum of integers, without the remainders that do not matter when it is divided by the number *divisor*.

    Example: ``8*c + 2*(h%2) + w%2`` divided by 8 is ``8*c`` divided by 8, because the others add up to 3 at most.
    """
    import sympy
    from torch.utils._sympy.functions import ModularIndexing

    most, others = sympy.Integer(0), []
    for term in sympy.Add.make_args(base):
        factor, rest = term.as_coeff_Mul()
        modulus = rest.args[2] if isinstance(rest, ModularIndexing) else rest + 1  # 1 for a number by itself
        if factor > 0 and factor % divisor != 0 and modulus.is_Integer and modulus > 0:
            most += factor * (modulus - 1)
        else:
            others.append(term)
    step = math.gcd(int(divisor), *(int(term.as_coeff_Mul()[0]) for term in others))
    return sympy.Add(*others) if most < step else base


MOST_TERMS = 40
"""The most terms of a number of elements that is factored: for so many it takes a few milliseconds."""


def _group_by_factors(group: Any, _memo: Any, scheduling: Any, sizes: Any) -> Any:
    return tuple(as_products(group(scheduling, sizes)))


def _tile_by_factors(select: Any, _memo: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    tiling = select(cls, *args, **kwargs)
    return type(tiling)(zip(tiling, as_products(tiling.values()), strict=True))


def as_products(counts: Iterable[Any]) -> list[Any]:
    """*counts*, sums among them as products, such that equal numbers are written alike when all are multiplied.

    Example: ``4*n + 4`` and ``n + 1`` become ``4*(n + 1)`` and ``n + 1``, which sympy multiplies to ``4*(n + 1)**2``.
    The product of 8 and ``n + m`` is an exception: sympy writes it as ``8*n + 8*m``, so that sum stays a sum.
    """
    import sympy

    products = [_factors(count) for count in counts]
    if not sympy.Mul(*products).as_coeff_Mul()[1].is_Add:
        return products
    return [sympy.Mul(*each.args) if isinstance(each, sympy.Mul) else each for each in products]


@functools.lru_cache(MOST_REMEMBERED)
def _factors(count: Any) -> Any:
    """*count* as a product, if it is a sum that is one."""
    import sympy

    if not isinstance(count, sympy.Add) or len(count.args) > MOST_TERMS:
        return count
    return sympy.factor(count)


def _known_multiple(known: Any, _memo: Any, sizevars: Any, whole: Any, part: Any) -> bool:
    import sympy

    is_known = known(sizevars, whole, part)
    is_sum = not is_known and isinstance(whole, sympy.Add)
    return is_known or (is_sum and known(sizevars, _factors(whole), _factors(part)))


def _complete_exactly(complete: Any, _memo: Any, cls: Any, tiling: Any, numel: Any, reduction_numel: Any) -> Any:
    untiled = reduction_numel if "x" in tiling else numel
    return exact_tiling(complete(cls, tiling, numel, reduction_numel), untiled=untiled)


def _write_rows(write: Any, _memo: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
    code: str = write(kernel, *args, **kwargs)
    lengths = [tree.numel for tree in kernel.range_trees if tree.is_reduction]
    if kernel.persistent_reduction and any(length.free_symbols for length in lengths):
        return code.replace("reduction_hint=ReductionHint.INNER", "reduction_hint=ReductionHint.DEFAULT")
    return code


def exact_tiling(tiling: Any, *, untiled: Any) -> Any:
    """*tiling*, with the quotients in its sizes cancelled; *untiled* in place of one that cannot be cancelled.

    Example: ``{"x": (s0*h + s0)/(h + 1), "r0_": h + 1}`` is ``{"x": s0, "r0_": h + 1}``.
    """
    exact = {key: _cancelled(size) for key, size in tiling.items()}
    # `_choose_launchable` drops the tiling if it does not have all elements of the kernel.
    return type(tiling)({key: untiled if size is None else size for key, size in exact.items()})


@functools.lru_cache(MOST_REMEMBERED)
def _cancelled(size: Any) -> Any:
    """*size*, with the quotients in it cancelled; None if one remains, which torch cannot print."""
    import sympy

    def has_reciprocal(size: Any) -> bool:
        return any(not power.exp.is_nonnegative for power in sympy.sympify(size).atoms(sympy.Pow))

    if not has_reciprocal(size):
        return size
    cancelled = sympy.cancel(size)
    return None if has_reciprocal(cancelled) else cancelled
