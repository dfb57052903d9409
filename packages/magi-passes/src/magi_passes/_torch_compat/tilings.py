# SPDX-License-Identifier: Apache-2.0
"""How Inductor tiles kernels, with repairs of what is slow or cannot be launched. Tried on torch 2.10 to 2.15."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

from .size_arguments import guarded_within


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


# The limit of CUDA for the y and z dimensions of a grid; that of x is 2**31 - 1.
MAX_GRID_YZ = 65535


_install_lock = threading.Lock()


def install_tilings(memo_of_current: Callable[[], dict[Any, Any] | None]) -> None:
    """Repair six things in how Inductor tiles kernels, for compilations for which *memo_of_current* returns a dict.

    `match_mod_div_block_expr` (torch/_inductor/codegen/block_analysis.py) is called with the same arguments for every
    pair of nodes that might fuse, and searches in a time that grows exponentially with the rank. With ND tiling, that
    is most of the compile time. Its answers are kept in the dict; an index without division or modulus matches nothing.

    A grid of three dimensions cannot be launched if y or z exceeds what CUDA allows, and with a reduction it has
    produced kernels that address a dimension that the grid does not have (torch 2.11 to 2.13). `launchable_tiling` uses
    two dimensions there, because a grid of two has an overflow path.

    `complete_partial_tiling` finds the size of the side that is not tiled as a quotient, with sympy's ``/``, which
    cancels nothing that is written in two ways: the mean of ``relu`` over images of symbolic height and width divides
    ``s0*h*w + s0*h + s0*w + s0`` by ``h*w + h + w + 1``. Such a quotient cannot be printed (torch 2.11: "exponent must
    be non-negative, got -1"). Here it is cancelled.

    A pointwise kernel with three tile dimensions is not tuned: it gets blocks of 16 by 16 by 16, each row of which is
    a quarter of what neighbouring threads could read together. Here it gets the choice that `max_autotune_pointwise`
    gives to all kernels. A padded downsampling of Stable Diffusion's encoder takes 0.38 ms in place of 0.58 (one H200,
    torch 2.11).

    torch 2.11 ends with a TypeError where a kernel does not divide into three tile dimensions, because `CantSplit` is
    raised there without its arguments (`_split_iteration_ranges`). Here they may be missing.

    Kernels that are written together, such as those of a foreach op, may have two tile dimensions each; one with three
    is launched on its own (`ComboKernel`, torch/_inductor/codegen/triton_combo_kernel.py). Here they get two.
    """
    from torch._inductor.codegen.block_analysis import BlockPatternMatcher
    from torch._inductor.codegen.simd import CantSplit, SIMDScheduling
    from torch._inductor.codegen.triton import TritonKernel

    def replace(owner: Any, name: str, repaired: Callable[..., Any]) -> None:
        found = vars(owner)[name]
        original = found.__func__ if isinstance(found, classmethod) else found

        @functools.wraps(original)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            memo = memo_of_current()
            return original(*args, **kwargs) if memo is None else repaired(original, memo, *args, **kwargs)

        setattr(owner, name, classmethod(chosen) if isinstance(found, classmethod) else chosen)

    with _install_lock:
        if not hasattr(BlockPatternMatcher.match_mod_div_block_expr, "__wrapped__"):
            replace(BlockPatternMatcher, "match_mod_div_block_expr", _remembered_match)
            replace(SIMDScheduling, "complete_partial_tiling", _complete_exactly)
            replace(SIMDScheduling, "get_first_compatible_tiling", _choose_launchable)
            replace(SIMDScheduling, "generate_combo_kernel_code", _write_two_dimensions_together)
            replace(TritonKernel, "codegen_kernel", _write_tuned_kernel)
            if "__init__" in vars(CantSplit):
                CantSplit.__init__.__defaults__ = (None, None)


# Each takes torch's own function, the memo of the compilation, and the arguments of that function.


def _remembered_match(match: Any, memo: Any, cls: Any, index: Any, index_var: Any, numel: Any, num_dims: int) -> Any:
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    if index.has(index_var) and not index.has(FloorDiv, ModularIndexing):
        return None
    key = (index, index_var, numel, num_dims)
    if key not in memo:
        memo[key] = match(cls, index, index_var, numel, num_dims)
    found = memo[key]
    return found if found is None else tuple(list(part) for part in found)


def _complete_exactly(complete: Any, _memo: Any, cls: Any, tiling: Any, numel: Any, reduction_numel: Any) -> Any:
    untiled = reduction_numel if "x" in tiling else numel
    return exact_tiling(complete(cls, tiling, numel, reduction_numel), untiled=untiled)


def _choose_launchable(
    choose: Any, _memo: Any, cls: Any, node_schedule: Any, numel: Any, reduction_numel: Any, ranked: Any
) -> Any:
    from torch._inductor.utils import sympy_product
    from torch._inductor.virtualized import V

    # torch 2.11 takes a tiling of fewer elements for one that fits.
    whole, known_equal = numel * reduction_numel, V.graph.sizevars.statically_known_equals
    ranked = [tiling for tiling in ranked if known_equal(sympy_product(tiling.values()), whole)]
    ranked = [launchable_tiling(tiling, is_reduction=reduction_numel != 1) for tiling in ranked]
    return choose(cls, node_schedule, numel, reduction_numel, ranked)


def _write_tuned_kernel(write: Any, _memo: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._inductor import config

    has_three_dimensions = sum(not tree.is_reduction for tree in kernel.range_trees) == 3
    is_tuned = has_three_dimensions and not kernel.features.is_reduction() and config.triton.autotune_pointwise
    with config.patch(max_autotune_pointwise=True) if is_tuned else contextlib.nullcontext():
        return write(kernel, *args, **kwargs)


def _write_two_dimensions_together(write: Any, _memo: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._inductor import config

    has_three_dimensions = (config.triton.max_tiles or 2) > 2
    with config.patch({"triton.max_tiles": 2}) if has_three_dimensions else contextlib.nullcontext():
        return write(*args, **kwargs)


def exact_tiling(tiling: Mapping[str, Any], *, untiled: Any) -> Mapping[str, Any]:
    """*tiling*, with the quotients in its sizes cancelled; *untiled* in place of one that cannot be cancelled.

    Example: ``{"x": (s0*h + s0)/(h + 1), "r0_": h + 1}`` is ``{"x": s0, "r0_": h + 1}``.
    """
    import sympy

    def exact(size: Any) -> Any:
        if not has_reciprocal(size):
            return size
        cancelled = sympy.cancel(size)
        # `_choose_launchable` drops the tiling if it does not have all elements of the kernel.
        return untiled if has_reciprocal(cancelled) else cancelled

    def has_reciprocal(size: Any) -> bool:
        return any(not power.exp.is_nonnegative for power in sympy.sympify(size).atoms(sympy.Pow))

    kind: Any = type(tiling)
    return kind({key: exact(size) for key, size in tiling.items()})  # type: ignore[no-any-return]


def launchable_tiling(tiling: Mapping[str, Any], *, is_reduction: bool) -> Mapping[str, Any]:
    """*tiling*, with z merged into y unless both are within the limits of a grid and nothing is reduced.

    A guard is added for a size that is small enough now; a larger one compiles again, with two dimensions.
    """
    if "z" not in tiling:
        return tiling
    if not is_reduction and _within_grid(tiling["z"]) and _within_grid(tiling["y"]):
        return tiling
    folded = {"y": tiling["z"] * tiling["y"], **{key: size for key, size in tiling.items() if key not in "zy"}}
    kind: Any = type(tiling)
    return kind(folded)  # type: ignore[no-any-return]


def _within_grid(size: Any) -> bool:
    return guarded_within(size, MAX_GRID_YZ)
