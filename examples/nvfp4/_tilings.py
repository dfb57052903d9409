# SPDX-License-Identifier: Apache-2.0
"""Which kernel and which launch settings for so many rows: the one place to change after a measurement.

Rows are those of x, or for experts those of one tile. Measured on an H200 with a weight of 8192 x 8192; docs/nvfp4.md
has the predictions and the table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


FEWEST_ELEMENTS = 128
"""Of a step of a tile with several parts."""


@dataclass(frozen=True)
class GemvTile:
    """One row by `block_n` columns, `blocks` scales of each column at a time."""

    block_n: int
    blocks: int
    warps: int
    stages: int

    def for_columns(self, columns: int) -> GemvTile:
        """The same with fewer columns a program where there would be too few programs."""
        return replace(self, block_n=_narrowed(self.block_n, columns, least=4))


@dataclass(frozen=True)
class GemmTile:
    """`block_m` rows by `block_n` columns; `parts` parts of k, each with warps of its own, `block_k` elements a step.

    Raises:
        ValueError: parts of fewer than 128 elements a step. On an H200, Triton 3.6 gives wrong sums for them.
    """

    block_m: int
    block_n: int
    block_k: int
    parts: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        """Refuse what is known to be miscompiled."""
        if self.parts > 1 and self.block_k < FEWEST_ELEMENTS:
            raise ValueError(
                f"A tile of {self.parts} parts has a block_k of {self.block_k}. Triton 3.6 multiplies batches of "
                f"fewer than {FEWEST_ELEMENTS // 4} elements wrongly, four a step. Use {FEWEST_ELEMENTS} or more."
            )

    def for_columns(self, columns: int) -> GemmTile:
        """The same with fewer columns a program where there would be too few programs."""
        return replace(self, block_n=_narrowed(self.block_n, columns, least=16)) if self.parts > 1 else self


FEWEST_PROGRAMS = 256
"""About two for each multiprocessor."""


def _narrowed(block_n: int, columns: int, least: int) -> int:
    while block_n > least and columns < FEWEST_PROGRAMS * block_n:
        block_n //= 2
    return block_n


VECTOR = GemvTile(block_n=8, blocks=256, warps=4, stages=1)
"""Of the vector kernel, for rows in bfloat16."""

VECTOR_ROWS = 1
"""Up to so many rows take the vector kernel, which reads the weight for each of them."""

BY_ROWS = (
    (8, GemmTile(8, 32, 256, parts=4, warps=4, stages=4)),
    (16, GemmTile(16, 32, 256, parts=4, warps=4, stages=3)),
    (32, GemmTile(32, 32, 128, parts=2, warps=2, stages=4)),
)
"""Up to so many rows, these settings."""

MANY = GemmTile(64, 64, 128, parts=1, warps=4, stages=4)
"""For more rows."""

COPIED_FROM = 65
"""From so many rows on the weight is decoded to a copy for cuBLAS."""

GROUPED_FROM = 33
"""From so many rows for all experts together they are sorted; fewer are computed each on its own."""


def gemm_tile(rows: int, columns: int) -> GemmTile:
    """The settings for tiles of up to *rows* rows."""
    tile = next((tile for most, tile in BY_ROWS if rows <= most), MANY)
    return tile.for_columns(columns)
