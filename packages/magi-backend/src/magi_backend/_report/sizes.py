# SPDX-License-Identifier: Apache-2.0
"""The sizes of a graph's calls in a report: the cells of a table and the lines under it."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterator

    from magi_backend._records.records import SizesOutcome, SizeUse


SIZE_COLUMNS = ("calls", "with code of its own", "has it now", "note")


def size_cells(use: SizeUse) -> tuple[str, ...]:
    """The numbers of one size, and a cell for each of ``SIZE_COLUMNS``."""
    now = f"yes, compiled in {use.seconds:.1f} s" if use.has_code else "no"
    return (*(str(number) for _, number in use.sizes), str(use.calls), str(use.hits), now, use.note)


def size_lines(sizes: SizesOutcome) -> Iterator[str]:
    """The lines under the table."""
    if sizes.forgotten:
        yield f"{sizes.forgotten} more sizes are not remembered."
    if sizes.symbolic:
        yield f"Only the code for any size: {sizes.symbolic}."
    if sizes.advice:
        yield sizes.advice
