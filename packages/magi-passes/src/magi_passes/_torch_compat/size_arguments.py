# SPDX-License-Identifier: Apache-2.0
"""The type in which sizes reach a kernel of Inductor. Run on torch 2.11 and 2.13, read in 2.10, 2.12 and 2.15."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping


MAX_INT32 = 2**31 - 1

_install_lock = threading.Lock()


def install_narrow_sizes(memo_of_current: Callable[[], MutableMapping[Any, bool] | None]) -> None:
    """Pass sizes to kernels as 32-bit integers, for compilations for which *memo_of_current* gives a dict.

    `signature_to_meta` (torch/_inductor/codegen/triton_utils.py) declares every size ``i64``, also where all elements
    are counted in 32 bits, because a kernel may compute ``s0 * s1``, as a mean over two dimensions does, and that can
    be larger than any of its tensors. So every index with a symbolic size has 64 bits, and a GPU takes several times as
    long to divide it.

    What a kernel computes from sizes only is known when its body is written, because each expression that it prints
    passes through `rename_indexing`. If all of it fits into 32 bits, which a guard ensures, the sizes are passed in 32
    bits. The dict holds the answers so far.
    """
    import sympy
    from torch._inductor.codegen import triton as codegen
    from torch._inductor.codegen.common import SizeArg
    from torch._inductor.virtualized import V

    with _install_lock:
        if hasattr(codegen.TritonKernel, "_magi_passes_expressions"):
            return
        rename = codegen.TritonKernel.rename_indexing
        declare = vars(codegen)["signature_to_meta"]

        def remembered_rename(self: Any, index: Any) -> Any:
            if memo_of_current() is not None and not isinstance(index, (list, tuple)):
                # Inductor names blocks by strings, such as "R0_BLOCK".
                vars(self).setdefault("_magi_passes_expressions", set()).add(sympy.sympify(index))
            return rename(self, index)

        def declare_narrow(signature: Any, *, size_dtype: Any, argdefs: Any, **rest: Any) -> Any:
            declared = declare(signature, size_dtype=size_dtype, argdefs=argdefs, **rest)
            memo = memo_of_current()
            wide = [
                name.name
                for arg, name in zip(signature, argdefs, strict=False)
                if isinstance(arg, SizeArg) and arg.name.startswith("ks") and declared.get(name.name) == "i64"
            ]
            if memo is not None and size_dtype == "tl.int32" and wide and "indices" not in rest:
                expressions = getattr(V.kernel, "_magi_passes_expressions", None) or set()
                if all(_fits(bound, memo) for index in expressions for bound in bounds_of_sizes(index)):
                    declared |= dict.fromkeys(wide, "i32")
            return declared

        setattr(codegen.TritonKernel, "_magi_passes_expressions", None)  # noqa: B010
        setattr(codegen.TritonKernel, "rename_indexing", remembered_rename)  # noqa: B010
        setattr(codegen, "signature_to_meta", declare_narrow)  # noqa: B010


def bounds_of_sizes(index: Any) -> Iterator[Any]:
    """An upper bound of the absolute value of each part of *index* that is made of sizes only.

    Example: ``x0 + 4*s0*s1*x1 - s2`` has the parts ``4*s0*s1`` and ``-s2``, with the bounds ``4*s0*s1`` and ``s2``.
    """
    import sympy

    if not index.free_symbols:
        return
    parts = list(index.args)
    if all(map(_is_size, index.free_symbols)):
        yield sympy.Add(*(_without_sign(term) for term in sympy.Add.make_args(index.expand())))
        # A quotient of sizes may be small although its numerator is large.
        parts = [arg for function in index.atoms(sympy.Function) for arg in function.args]
    elif isinstance(index, (sympy.Add, sympy.Mul)):
        sizes = [part for part in parts if all(map(_is_size, part.free_symbols))]
        yield from bounds_of_sizes(index.func(*sizes))
        parts = [part for part in parts if part not in sizes]
    for part in parts:
        yield from bounds_of_sizes(part)


def _without_sign(term: Any) -> Any:
    coefficient, rest = term.as_coeff_Mul()
    return abs(coefficient) * rest


def _is_size(symbol: Any) -> bool:
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    kinds = (SymT.SIZE, SymT.PRECOMPUTED_SIZE, SymT.UNBACKED_INT)
    return bool(symbol.is_Symbol and symbol_is_type(symbol, kinds))


def _fits(bound: Any, memo: MutableMapping[Any, bool]) -> bool:
    if bound not in memo:
        memo[bound] = guarded_within(bound, MAX_INT32)
    return memo[bound]


def guarded_within(size: Any, limit: int) -> bool:
    """Whether *size* is at most *limit*, for all inputs that the guards admit; a guard is added if needed.

    If no guard can be added, only known bounds count: for sizes that depend on data, for packages that are compiled
    ahead of time, and for a backward that is compiled late.
    """
    from torch._inductor.virtualized import V
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    sizevars = V.graph.sizevars
    size = sizevars.remove_precomputed_replacements(size)
    if sizevars.statically_known_leq(size, limit):
        return True
    shape_env = sizevars.shape_env
    if shape_env.frozen or V.aot_compilation or free_unbacked_symbols(size):
        return False
    # torch 2.12 has the first name; the second warns there from 2.13 on.
    hint = getattr(shape_env, "guarding_hint_or_throw", None) or shape_env.size_hint
    if hint(size) > limit:
        return False
    sizevars.check_leq(size, limit)
    return True
