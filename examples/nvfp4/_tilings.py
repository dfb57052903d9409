# SPDX-License-Identifier: Apache-2.0
"""Which launch settings for so many rows: the one place to change after a measurement.

Rows are those of x, or for experts those of one tile. Measured on an H200 with a weight of 8192 x 8192; docs/nvfp4.md
has the predictions and the table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton


@dataclass(frozen=True)
class Tile:
    """`block_m` rows by `block_n` columns; `patches` patches of 64 features a step for each part.

    With `parts` of the features, each warp has one or several; without, that is with one part, the warps lie beside
    each other along the columns. `tiled` is for the tensor memory accelerator of a Hopper GPU, which loads x.

    Raises:
        ValueError: neither one part for one or two warp groups nor parts for each warp, columns that do not share out
            among the warps, or x by the accelerator in parts.
    """

    block_m: int
    block_n: int
    parts: int
    warps: int
    patches: int
    stages: int
    tiled: bool = False

    def __post_init__(self) -> None:
        """Refuse a tile whose warps would not decode patches of their own, each in the registers of the operand."""
        if self.parts % self.warps and (self.parts, self.warps) not in ((1, 4), (1, 8)):
            raise ValueError(
                f"{self}: {self.parts} parts of the features for {self.warps} warps. "
                "Use one for each warp, or several, or one part for 4 or 8 warps."
            )
        strips = 16 if self.parts > 1 else 16 * self.warps
        if self.block_n % strips:
            raise ValueError(f"{self}: {self.block_n} columns. Use a multiple of {strips}, 16 for each warp.")
        if self.tiled and self.parts > 1:
            raise ValueError(f"{self}: the accelerator loads x for one part. Use parts=1, or tiled=False.")


MEDIUM = (
    (32, Tile(32, 64, parts=1, warps=4, patches=8, stages=3)),
    (64, Tile(64, 64, parts=1, warps=4, patches=4, stages=4)),
    (128, Tile(64, 64, parts=1, warps=4, patches=2, stages=4)),
    (256, Tile(64, 128, parts=1, warps=4, patches=2, stages=3)),
)
"""Up to so many rows, these settings; for few rows they depend on the number of columns."""

VERY_WIDE = (
    (1, Tile(1, 16, parts=2, warps=2, patches=4, stages=3)),
    (8, Tile(8, 32, parts=2, warps=2, patches=2, stages=4)),
    (16, Tile(16, 32, parts=4, warps=2, patches=2, stages=3)),
    *MEDIUM,
)
WIDE = (
    (1, Tile(1, 16, parts=2, warps=2, patches=4, stages=4)),
    (8, Tile(8, 32, parts=8, warps=4, patches=1, stages=4)),
    (16, Tile(16, 32, parts=4, warps=4, patches=2, stages=4)),
    *MEDIUM,
)
NARROW = (
    (1, Tile(1, 16, parts=4, warps=4, patches=4, stages=4)),
    (8, Tile(8, 16, parts=4, warps=4, patches=4, stages=4)),
    (16, Tile(16, 32, parts=4, warps=4, patches=2, stages=4)),
    (32, Tile(32, 32, parts=4, warps=4, patches=2, stages=3)),
    (64, Tile(64, 32, parts=4, warps=4, patches=1, stages=3)),
    (256, Tile(64, 64, parts=1, warps=4, patches=2, stages=4)),
)
WIDE_FROM = 7168
BY_COLUMNS = ((12288, VERY_WIDE), (WIDE_FROM, WIDE), (0, NARROW))
"""From so many columns on, this table."""

MANY = Tile(128, 128, parts=1, warps=4, patches=1, stages=4)
"""For more rows."""

FEWEST_PROGRAMS = 128
"""About one for each multiprocessor."""

COPIED_FROM = 513
"""From so many rows on the weight is decoded to a copy for cuBLAS, where the accelerator does not load x."""

ALONE = (
    (32, Tile(32, 64, parts=1, warps=4, patches=8, stages=3, tiled=True)),
    (64, Tile(64, 64, parts=1, warps=4, patches=4, stages=4, tiled=True)),
    (128, Tile(128, 64, parts=1, warps=4, patches=4, stages=3, tiled=True)),
)
"""Where it does, for products of at most one program a multiprocessor, whose shared memory it has alone."""

SHARING = (
    (16, Tile(16, 64, parts=1, warps=4, patches=4, stages=4, tiled=True)),
    (32, Tile(32, 64, parts=1, warps=4, patches=4, stages=4, tiled=True)),
    (64, Tile(64, 64, parts=1, warps=4, patches=2, stages=4, tiled=True)),
    (128, Tile(128, 64, parts=1, warps=4, patches=2, stages=3, tiled=True)),
)
"""For products of more programs."""

LARGE = Tile(256, 128, parts=1, warps=8, patches=2, stages=3, tiled=True)
"""For more rows, from FEWEST_LARGE programs on; with fewer, the settings for 128 rows are faster."""
FEWEST_LARGE = 96

MULTIPROCESSORS = 132
"""Of the GPU that was measured."""

BY_THREADS = ((MULTIPROCESSORS * 64 + 1, 8), (WIDE_FROM, 16), (0, 32))
"""From so many columns on, threads load so many rows faster than the accelerator."""

GROUPED_FROM = 33
"""From so many rows for all experts together they are sorted; fewer are computed each on its own."""


def tile_for(rows: int, columns: int, dtype: torch.dtype) -> Tile:
    """The settings for tiles of up to *rows* rows of x; of 16 columns where wider ones would be too few."""
    table = next(table for least, table in BY_COLUMNS if columns >= least)
    tile = next((tile for most, tile in table if rows <= most), MANY)
    if tile.parts > 1 and columns < FEWEST_PROGRAMS * tile.block_n:
        tile = replace(tile, block_n=16)
    if dtype == torch.float32:
        # x takes twice the shared memory.
        tile = replace(tile, patches=max(1, tile.patches // 2))
    return tile


def tile_of_accelerator(rows: int, columns: int) -> Tile | None:
    """The settings for *rows* rows of x in 16 bits that the accelerator may load, or None where threads are faster."""
    if rows <= next(most for least, most in BY_THREADS if columns >= least):
        return None
    largest, tile = SHARING[-1]
    if rows > largest and triton.cdiv(rows, LARGE.block_m) * triton.cdiv(columns, LARGE.block_n) >= FEWEST_LARGE:
        return LARGE
    tile = next((tile for most, tile in SHARING if rows <= most), tile)
    if triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.block_n) > MULTIPROCESSORS:
        return tile
    return next((tile for most, tile in ALONE if rows <= most), ALONE[-1][1])
