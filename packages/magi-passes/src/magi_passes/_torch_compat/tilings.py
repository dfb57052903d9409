# SPDX-License-Identifier: Apache-2.0
"""How Inductor tiles kernels, with repairs of what is slow or cannot be launched. Tried on torch 2.10 to 2.15."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from .size_arguments import guarded_within


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


# The limit of CUDA for the y and z dimensions of a grid; that of x is 2**31 - 1.
MAX_GRID_YZ = 65535


_install_lock = threading.Lock()


def install_tilings(memo_of_current: Callable[[], dict[Any, Any] | None]) -> None:
    """Repair four things in how Inductor tiles kernels, for compilations for which *memo_of_current* returns a dict.

    `match_mod_div_block_expr` (torch/_inductor/codegen/block_analysis.py) is called with the same arguments for every
    pair of nodes that might fuse, and searches in a time that grows exponentially with the rank. With ND tiling, that
    is most of the compile time. Its answers are kept in the dict; an index without division or modulus matches nothing.

    A grid of three dimensions cannot be launched if y or z exceeds what CUDA allows, and with a reduction it has
    produced kernels that address a dimension that the grid does not have (torch 2.11 to 2.13). `launchable_tiling` uses
    two dimensions there, because a grid of two has an overflow path.

    A pointwise kernel with three tile dimensions is not tuned: it gets blocks of 16 by 16 by 16, each row of which is
    a quarter of what neighbouring threads could read together. Here it gets the choice that `max_autotune_pointwise`
    gives to all kernels. A padded downsampling of Stable Diffusion's encoder takes 0.38 ms in place of 0.58 (one H200,
    torch 2.11).

    Kernels that are written together, such as those of a foreach op, may have two tile dimensions each; one with three
    is launched on its own (`ComboKernel`, torch/_inductor/codegen/triton_combo_kernel.py). Here they get two.
    """
    from torch._inductor import config
    from torch._inductor.codegen.block_analysis import BlockPatternMatcher
    from torch._inductor.codegen.simd import SIMDScheduling
    from torch._inductor.codegen.triton import TritonKernel
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    with _install_lock:
        if hasattr(BlockPatternMatcher, "_magi_passes_original"):
            return
        match = BlockPatternMatcher.__dict__["match_mod_div_block_expr"].__func__
        choose = SIMDScheduling.__dict__["get_first_compatible_tiling"].__func__
        write_kernel = TritonKernel.codegen_kernel
        write_together = SIMDScheduling.generate_combo_kernel_code

        def remembered_match(cls: Any, index: Any, index_var: Any, numel: Any, num_dims: int) -> Any:
            memo = memo_of_current()
            if memo is None:
                return match(cls, index, index_var, numel, num_dims)
            if index.has(index_var) and not index.has(FloorDiv, ModularIndexing):
                return None
            key = (index, index_var, numel, num_dims)
            if key not in memo:
                memo[key] = match(cls, index, index_var, numel, num_dims)
            found = memo[key]
            return found if found is None else tuple(list(part) for part in found)

        def choose_launchable(cls: Any, node_schedule: Any, numel: Any, reduction_numel: Any, ranked: Any) -> Any:
            if memo_of_current() is not None:
                ranked = [launchable_tiling(tiling, is_reduction=reduction_numel != 1) for tiling in ranked]
            return choose(cls, node_schedule, numel, reduction_numel, ranked)

        def write_tuned_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
            has_three_dimensions = sum(not tree.is_reduction for tree in self.range_trees) == 3
            is_tuned = has_three_dimensions and not self.features.is_reduction() and config.triton.autotune_pointwise
            if memo_of_current() is None or not is_tuned:
                return write_kernel(self, *args, **kwargs)
            with config.patch(max_autotune_pointwise=True):
                return write_kernel(self, *args, **kwargs)

        def write_two_dimensions_together(self: Any, *args: Any, **kwargs: Any) -> Any:
            if memo_of_current() is None or (config.triton.max_tiles or 2) < 3:
                return write_together(self, *args, **kwargs)
            with config.patch({"triton.max_tiles": 2}):
                return write_together(self, *args, **kwargs)

        setattr(BlockPatternMatcher, "match_mod_div_block_expr", classmethod(remembered_match))  # noqa: B010
        setattr(SIMDScheduling, "get_first_compatible_tiling", classmethod(choose_launchable))  # noqa: B010
        setattr(TritonKernel, "codegen_kernel", write_tuned_kernel)  # noqa: B010
        setattr(SIMDScheduling, "generate_combo_kernel_code", write_two_dimensions_together)  # noqa: B010
        setattr(BlockPatternMatcher, "_magi_passes_original", match)  # noqa: B010


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
