# SPDX-License-Identifier: Apache-2.0
"""How Inductor writes kernels with three tile dimensions, z, y and x: which there are, their blocks and their grid.

Run on torch 2.11 and 2.13, read in 2.10, 2.12 and 2.15.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from .kernels import install_lock, replace


def install_grids(memo_of_current: Callable[[], dict[Any, Any] | None]) -> None:
    """Repair how kernels with three tile dimensions are written, where *memo_of_current* returns a dict.

    A grid of three dimensions with a reduction has produced kernels that address a dimension that the grid does not
    have (torch 2.11 to 2.13). `launchable_tiling` uses two dimensions there.

    Where a flat kernel finds the place of an element by dividing by a symbolic size, it takes one dimension for each
    such size, in graphs without convolutions as well (`_tile_to_save_divisions`): a batch norm and ReLU of regnety_032
    take 11 us in place of 22, rotary embeddings of a Llama 4.5 in place of 10, and the biases of T5's attention 70 in
    place of 148 (89 with constant sizes; one H200, torch 2.11). A middle dimension that is a small number is merged
    into the outer one, because it is fast to divide by, and a block of 16 rows of three channels is mostly empty.

    A pointwise node is not fused with a reduction if alone it is tiled in another way (`can_fuse` in codegen/simd.py).
    With more tilings to choose from, that left norms over channels, and of weights, in two kernels that stock fuses.
    Here its tilings decide.

    A grid of three dimensions cannot be launched if y or z exceeds what CUDA allows; one of two has an overflow path.
    Here y and z are folded where they are too long, and the programs of x are as many times more: `_pass_folded` gives
    the grid these sizes, by the arguments that it is computed from, and the kernel gets the true ones as arguments of
    its own and finds its place in `_write_sizes`. So one kernel and `Grid3D` hold for all sizes, without a guard, in
    C++ and in a process that has not loaded this package. Steps in a loop in place of folds took twice the registers.

    A pointwise kernel with three tile dimensions is not tuned: it gets blocks of 16 by 16 by 16, each row of which is
    a quarter of what neighbouring threads could read together. Here it gets those of the seven blocks of
    `max_autotune_pointwise` that can suit it (`suitable_blocks`). A padded downsampling of Stable Diffusion's encoder
    takes 0.38 ms in place of 0.58 (one H200, torch 2.11). One with two is tuned among six blocks, of which two or
    three suit it if it reads and writes along one. For each such kernel above 0.3 ms in 16 models one of three was
    the fastest, and the slowest of six took up to 16 times as long (one H100). On a GPU that others use, what is
    measured of a small kernel is mostly their time, and any block may be chosen.

    Kernels that are written together, such as those of a foreach op, may have two tile dimensions each; one with three
    is launched on its own (`ComboKernel`, torch/_inductor/codegen/triton_combo_kernel.py). Here they get two.
    """
    from torch._inductor.codegen.simd import SIMDScheduling
    from torch._inductor.codegen.triton import TritonKernel

    with install_lock:
        if not hasattr(TritonKernel.add_numel_to_call_args, "__wrapped__"):
            replace(SIMDScheduling, "get_first_compatible_tiling", _choose_launchable, memo_of_current)
            replace(SIMDScheduling, "get_tiling_and_scores", _tile_to_save_divisions, memo_of_current)
            for name in ("can_fuse", "can_fuse_vertical", "can_fuse_horizontal"):
                replace(SIMDScheduling, name, _fuse_with_reductions, memo_of_current)
            replace(SIMDScheduling, "generate_combo_kernel_code", _write_two_dimensions_together, memo_of_current)
            replace(TritonKernel, "load", _note_access, memo_of_current)
            replace(TritonKernel, "store", _note_access, memo_of_current)
            replace(TritonKernel, "iteration_ranges_codegen_header", _write_sizes, memo_of_current)
            replace(TritonKernel, "_has_constant_mask", _masked_where_folded, memo_of_current)
            replace(TritonKernel, "add_numel_to_call_args", _pass_folded, memo_of_current)
            replace(TritonKernel, "codegen_kernel", _write_tuned_kernel, memo_of_current)


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


def _tile_to_save_divisions(
    get: Any, _memo: Any, cls: Any, schedule: Any, numel: Any, reduction_numel: Any = 1, analysis: Any = None
) -> Any:
    from torch._inductor import config

    found = get(cls, schedule, numel, reduction_numel, analysis)
    # Without an analysis, it is only asked whether two nodes may become one kernel.
    if analysis is None or reduction_numel != 1 or config.triton.prefer_nd_tiling:
        return found
    nodes = [node for node in schedule if hasattr(node, "read_writes")]
    divisions = [_divisions_by_size(node, found[0]) for node in nodes]
    if not any(divisions):
        return found
    with config.patch({"triton.prefer_nd_tiling": True, "triton.max_tiles": config.triton.max_tiles or 3}):
        tiled = get(cls, schedule, numel, reduction_numel, analysis)
    saves = any(_divisions_by_size(node, tiled[0]) < before for node, before in zip(nodes, divisions, strict=True))
    return tiled if saves else found


def _divisions_by_size(node: Any, tiling: Any) -> float:
    """How often a kernel with *tiling* divides by a symbolic size to find the place of an element in *node*'s loops.

    Example: of the loops over ``n``, ``h`` and 36, a flat kernel finds the second as ``x // 36 % h``. Infinity where
    the loops are no parts of the tile dimensions. A loop that is split may save each quotient in an index.
    """
    from torch._inductor.codegen.simd import CantSplit, SIMDKernel
    from torch._inductor.dependencies import MemoryDep
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    ranges = node.get_ranges()
    try:
        loops, _ = SIMDKernel._split_iteration_ranges(tiling.values(), ranges)
    except CantSplit:
        return math.inf
    inner = [size for sizes in loops for size in sizes[1:]]
    indices = [dep.index for dep in node.read_writes.reads_and_writes() if isinstance(dep, MemoryDep)]
    quotients = {part for index in indices for part in index.atoms(FloorDiv, ModularIndexing)}
    is_split = sum(map(len, loops)) > sum(size != 1 for sizes in ranges for size in sizes)
    divisors = inner if is_split else inner + [size for part in quotients for size in part.args[1:]]
    return sum(bool(size.free_symbols) for size in divisors)


def _fuse_with_reductions(can_fuse: Any, _memo: Any, scheduling: Any, node1: Any, node2: Any) -> bool:
    from torch._inductor import config

    if node1.is_reduction() == node2.is_reduction():
        return bool(can_fuse(scheduling, node1, node2))
    with config.patch({"triton.max_tiles": 2, "triton.prefer_nd_tiling": False}):
        return bool(can_fuse(scheduling, node1, node2))


def _has_three_dimensions(kernel: Any) -> bool:
    return "z" in kernel.numels and not kernel.features.is_reduction()


CUBE, ROW = 16, 64
"""The side of a cubic block, and the longest side of a block that is long along one dimension."""


def _note_access(access: Any, _memo: Any, kernel: Any, name: str, index: Any, *args: Any, **how: Any) -> Any:
    if "y" in kernel.numels and not kernel.features.is_reduction():
        vars(kernel).setdefault("_magi_passes_rows", []).append((name, _rows_of(kernel, index)))
    return access(kernel, name, index, *args, **how)


def _rows_of(kernel: Any, index: Any) -> set[str] | None:
    """The tile dimensions along which *index* walks through memory one by one; None if it is the same along one.

    What is the same along a dimension is read once, and stays in a cache.
    """
    from torch._inductor.utils import sympy_index_symbol, sympy_subs
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    index = kernel.prepare_indexing(index)  # which adds counters
    counters = {symbol: entry.expr for symbol, entry in kernel.range_tree_nodes.items()}
    place = sympy_subs(index, counters).expand(identity=True)
    loaded = [kernel.cse.varname_map[it.name] for it in place.free_symbols if symbol_is_type(it, SymT.TMP)]
    by_data = {mask for variable in loaded for mask in variable.mask_vars}
    rows = set[str]()
    for tree in kernel.range_trees:
        it = sympy_index_symbol(tree.name)
        # A variable does not say that it depends on a dimension that needs no mask.
        jumps = loaded and (f"{tree.prefix}mask" in by_data or kernel._has_constant_mask(tree))
        if tree.numel != 1 and not tree.is_reduction and not jumps and not place.has(it):
            return None
        if not jumps and place.xreplace({it: ROW}) - place.xreplace({it: 0}) == ROW:
            rows.add(tree.prefix)
    return rows


_POINTWISE = re.compile(
    r"pointwise\((\s*size_hints=)(\{.*?\})(?:, tile_hint=TileHint\.DEFAULT)?(,\s*filename.*?)(\s*)"
    r"(min_elem_per_thread=\d+)",
    re.DOTALL,
)
"""The first lines of a pointwise kernel behind ``@triton_heuristics.``. All releases; two dimensions have a hint."""


def _write_tuned_kernel(write: Any, _memo: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._inductor import config
    from torch._inductor.virtualized import V

    is_tuned = config.triton.autotune_pointwise
    # Hints ask for more blocks, and AMD's cards have other numbers of warps.
    is_stocks_choice = (
        config.max_autotune or config.max_autotune_pointwise or kernel.autotune_hints or torch.version.hip
    )
    tunes_three = is_tuned and _has_three_dimensions(kernel)
    with config.patch(max_autotune_pointwise=True) if tunes_three else contextlib.nullcontext():
        code: str = write(kernel, *args, **kwargs)
    if not is_stocks_choice and kernel.persistent_reduction and not config.deterministic:
        return _PERSISTENT.sub(_choose_blocks_of_rows, code)
    if is_tuned and not is_stocks_choice and "_magi_passes_rows" in vars(kernel):
        removed = V.graph.removed_buffers | kernel.removed_buffers
        noted = kernel._magi_passes_rows
        rows = [dims for name, dims in noted if dims is not None and name not in removed]
        return _POINTWISE.sub(functools.partial(_choose_blocks, rows), code)
    return code


def _choose_blocks(rows: Sequence[set[str]], first_lines: re.Match[str]) -> str:
    """The lines that have a kernel tuned among the blocks that suit *rows*, each block as `pointwise` makes it."""
    before, hints, rest, line, least = first_lines.groups()
    blocks = suitable_blocks(ast.literal_eval(hints), rows)
    if not blocks:
        return first_lines.group()
    made = ", ".join(
        f"triton_heuristics.triton_config({hints}, {', '.join(map(str, block))}, {least})" for block in blocks
    )
    kind = "triton_heuristics.HeuristicType.POINTWISE"
    # Inductor looks for the name with its @ where it names the kernel.
    source = "# of the blocks of @triton_heuristics.pointwise"
    return f"cached_autotune({before}{hints}{rest}{line}configs=[{made}],  {source}{line}heuristic_type={kind}"


_PERSISTENT = re.compile(
    r"persistent_reduction\((\s*size_hints=\{'x': (\d+), 'r0_': (\d+)\}),\s*reduction_hint=ReductionHint\.INNER"
    r"(,\s*filename(?:(?!RSPLIT_SIZE|tma_min_block).)*?)(\s*)\)(\s*@triton\.jit)",
    re.DOTALL,
)
"""The first lines of a kernel that reduces rows in memory as a whole, behind ``@triton_heuristics.``. All releases."""


def _choose_blocks_of_rows(first_lines: re.Match[str]) -> str:
    hints, rows, length, rest, line, end = first_lines.groups()
    blocks = suitable_blocks_of_rows(int(rows), int(length))
    if not blocks:
        return first_lines.group()
    made = ", ".join(f"triton_heuristics.Config({{'XBLOCK': {x}}}, num_warps={warps})" for x, warps in blocks)
    kind = "triton_heuristics.HeuristicType.PERSISTENT_REDUCTION"
    source = "# of the blocks of @triton_heuristics.persistent_reduction"
    kernel = f"{hints}{rest},  {source}\n    configs=[{made}],\n    heuristic_type={kind}{line}"
    return f"cached_autotune({kernel}){end}"


def suitable_blocks_of_rows(rows: int, length: int) -> list[tuple[int, int]]:
    """How many rows, and by how many warps, a kernel may reduce at a time; torch's blocks if the list is empty.

    Triton reads several numbers of a row in each thread, and one of a parameter as long as the row, such as the weight
    of a norm, if there are as many threads as numbers. Then it changes between the two layouts through shared memory,
    for each row. With twice as many threads it reads both alike: a norm with SiLU takes 34 instructions for a number
    instead of 64 for rows of 64, and instead of 46 for rows of 128 (SASS for an H100, bfloat16). So many threads need
    many rows, for which torch's block of a single row is the slowest, at a third of the speed (WAN 2.1, one H200).
    """
    return [(8, 2), (32, 2), (64, length // 16)] if length in (64, 128) and rows >= 2**15 else []


def suitable_blocks(sizes: Mapping[str, int], rows: Sequence[set[str]]) -> list[tuple[int, ...]]:
    """The blocks of x, y and z among which a pointwise kernel of the tile dimensions *sizes* is tuned.

    *rows* has the dimensions along which each load and each store walks through memory one by one. Neighbouring threads
    are to read along these, so a block that is longest along another dimension is not the fastest. With one such
    dimension a cube is not either, because its rows are short. With several, something is transposed, and a block of
    one row would read or write single numbers. A dimension as short as the cube needs no block that is long along it.
    If something is read in another way, the fastest depends on what a cache holds: of three dimensions the cube is
    tried too where the rest has one row, which is the fastest of seven but for 0.06% of the time of 31 kernels (one
    H200), and else all blocks. Those of torch, for which the list is empty, stay for two dimensions then, and where
    something is transposed.

    Each block costs a compilation. Of two dimensions and one row, the block of 256 by 16 is left out where rows are
    short or long. In 14 models it was up to 12 times as fast for rows of 65 to 512 numbers, those of 152 kernels; the
    66 others took 0.02% less time with it (one H200, torch 2.11).
    """
    line = max(256, min(math.prod(sizes.values()) // 128, 1024))
    dims = sorted(set().union(*rows))
    if "z" not in sizes:
        if len(dims) != 1 or not all(rows):
            return []
        blocks = [(64, 64), (256, 16), (line, 1)] if 128 <= sizes[dims[0]] < 1024 else [(64, 64), (line, 1)]
        return [block if dims == ["x"] else block[::-1] for block in blocks]
    cube, long = (CUBE, CUBE, CUBE), {"x": (ROW, 8, 8), "y": (8, ROW, 8), "z": (8, 8, ROW)}
    lines = {"x": (line, 1, 1), "y": (1, line, 1), "z": (1, 1, line)}
    match dims:
        case [dim]:
            return [*([] if all(rows) else [cube]), long[dim], lines[dim]]
        case [_, *_] if all(rows):
            return [cube, *(long[dim] for dim in dims if sizes[dim] > CUBE)]
        case _:
            return [cube, *long.values(), *lines.values()]


def _write_two_dimensions_together(write: Any, _memo: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._inductor import config

    has_three_dimensions = (config.triton.max_tiles or 2) > 2
    with config.patch({"triton.max_tiles": 2}) if has_three_dimensions else contextlib.nullcontext():
        return write(*args, **kwargs)


def launchable_tiling(tiling: Any, *, is_reduction: bool) -> Any:
    """*tiling*, with z merged into y if something is reduced, if both are numbers, or if y is below ``2 * CUBE``.

    A division by a number costs little, while blocks of three dimensions stay partly empty. Sana's decoder splits 3,072
    channels into 32 heads of 96; its kernels with three tile dimensions take 1.5 to 2.9 times as long (one H200).
    """
    numbers = [key for key in "zy" if key in tiling and tiling[key].is_number]
    is_merged = is_reduction or len(numbers) == 2 or ("y" in numbers and tiling["y"] < 2 * CUBE)
    if "z" not in tiling or not is_merged:
        return tiling
    rest = {key: size for key, size in tiling.items() if key not in "zy"}
    return type(tiling)({"y": tiling["z"] * tiling["y"], **rest})


# CUDA allows 65535 blocks along y and along z, and 2**31 - 1 along x; kernels rely on sizes that are multiples of 16.
MAX_GRID_YZ = 65520


def _folds(kernel: Any) -> dict[str, Any]:
    """How often the grid of a pointwise kernel is folded along z and y, so that each is at most MAX_GRID_YZ.

    What is known to be shorter is left out; that this may become known later changes nothing, as it is folded once.
    """
    from torch._inductor.virtualized import V
    from torch.utils._sympy.functions import FloorDiv

    if not _has_three_dimensions(kernel):
        return {}
    sizes, is_less = {key: kernel.numels[key] for key in "zy"}, V.graph.sizevars.statically_known_lt
    return {key: 1 + FloorDiv(size, MAX_GRID_YZ) for key, size in sizes.items() if not is_less(size, MAX_GRID_YZ)}


def _longest_block_of_x(kernel: Any) -> Any:
    """What no configuration exceeds (`triton_config` in torch/_inductor/runtime/triton_heuristics.py)."""
    from torch._inductor.runtime.runtime_utils import next_power_of_2
    from torch._inductor.virtualized import V
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    longest, size = kernel.max_block("x"), kernel.numels["x"]
    sizevars: Any = V.graph.sizevars
    hint = getattr(sizevars, "optimization_hint", None) or sizevars.size_hint  # from torch 2.11 on, and in 2.10
    return longest if free_unbacked_symbols(size) else min(longest, next_power_of_2(int(hint(size))))


WHOLE_ALIGNMENT = 16
"""Inductor tells Triton which arguments of a kernel are multiples of this, and of nothing less."""


def known_multiple(size: sympy.Expr) -> int:
    """The largest power of two, at most `WHOLE_ALIGNMENT`, of which each term of *size* is a multiple.

    Threads read several numbers at once if a row ends at a multiple of these. The first kernels of EfficientNet, with
    40 channels, take 46 us in place of 31 where Triton does not know that (one H200).
    """
    terms = [term.as_coeff_Mul() for term in sympy.Add.make_args(sympy.expand(size))]
    if not all(number.is_Integer and rest.is_integer for number, rest in terms):
        return 1
    return math.gcd(WHOLE_ALIGNMENT, *(int(number) for number, _ in terms))


def _write_sizes(write: Any, _memo: Any, kernel: Any, tree: Any, code: Any) -> None:
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.virtualized import V

    folds = _folds(kernel) if tree is kernel.range_trees[0] else {}
    if folds:
        code.writeline(f"tl.static_assert(XBLOCK <= {_longest_block_of_x(kernel)})")
    for each in kernel.range_trees if folds else ():
        prefix, program = each.prefix, f"tl.program_id({each.grid_dim})"
        if prefix in folds or prefix == "x":
            each.pid_cache[program] = f"{prefix}program"
            code.writeline(f"{prefix}program = {program}.to({kernel.index_dtype})")
            if not each.numel.is_number:
                # It is at most the number of all elements, which an index can hold: there is nothing to guard.
                size = kernel.args.size(V.graph.sizevars.lookup_precomputed_size(each.numel))
                code.writeline(f"{prefix}numel = {size}.to({kernel.index_dtype})")
    # The sub-kernels of one kernel have their sizes in other variables, and templates too.
    is_plain = type(kernel) is TritonKernel and not getattr(kernel, "is_combo_kernel", False)
    if is_plain and not tree.is_reduction and not tree.numel.is_number:
        multiple, size = known_multiple(tree.numel), f"{tree.prefix}numel"
        if 1 < multiple < WHOLE_ALIGNMENT or (folds and multiple > 1):
            code.writeline(f"{size} = {size} // {multiple} * {multiple}")
    for prefix in folds:
        code.splice(f"""
            if {prefix}numel >= {MAX_GRID_YZ}:
                {prefix}folds = 1 + {prefix}numel // {MAX_GRID_YZ}
                {prefix}program += xprogram % {prefix}folds * tl.num_programs({"xyz".index(prefix)})
                xprogram //= {prefix}folds
        """)
    write(kernel, tree, code)


def _masked_where_folded(is_whole: Any, _memo: Any, kernel: Any, tree: Any) -> Any:
    return tree.prefix not in _folds(kernel) and is_whole(kernel, tree)


def _pass_folded(add: Any, _memo: Any, kernel: Any, *args: Any) -> None:
    from torch._inductor.utils import sympy_product
    from torch.utils._sympy.functions import CeilDiv, Min

    folds, sizes = _folds(kernel), [tree.numel for tree in kernel.range_trees]
    for tree in kernel.range_trees if folds else ():
        if tree.prefix in folds:
            tree.numel = Min(tree.numel, 16 * CeilDiv(tree.numel, 16 * folds[tree.prefix]))
        elif tree.prefix == "x":
            longest = _longest_block_of_x(kernel)
            tree.numel += (sympy_product(folds.values()) - 1) * longest * CeilDiv(tree.numel, longest)
    add(kernel, *args)
    for tree, size in zip(kernel.range_trees, sizes, strict=True):
        tree.numel = size
