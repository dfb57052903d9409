# SPDX-License-Identifier: Apache-2.0
"""What the report says about the sizes of a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magi_backend._records.records import SizesOutcome, SizeUse


if TYPE_CHECKING:
    from .inputs import Key
    from .table import SizeTable


COMES_BACK = 3
"""With at least so many calls with the same sizes, the report gives advice."""


def sizes_outcome(table: SizeTable) -> SizesOutcome:
    """What is known of the sizes of a graph now."""
    names = table.captured.inputs.symbols
    codes, seen = table.contents()

    def named(key: Key) -> tuple[tuple[str, int], ...]:
        return tuple((symbol, number) for (symbol, _), number in zip(names, key, strict=True))

    own = [
        SizeUse(
            sizes=named(key),
            calls=code.seen.calls + code.seen.hits + code.hits,
            hits=code.seen.hits + code.hits,
            has_code=True,
            seconds=code.seconds,
            note="asked for" if code.explicit else _made(code.seen.made),
        )
        for key, code in codes
    ]
    others = [
        SizeUse(
            sizes=named(key),
            calls=size.calls + size.hits,
            hits=size.hits,
            has_code=False,
            seconds=0.0,
            note=size.failed or (f"dropped, {_made(size.made)}" if size.made else ""),
        )
        for key, size in seen
    ]
    uses = tuple(sorted((*own, *others), key=lambda use: (-use.calls, use.sizes)))
    return SizesOutcome(
        symbols=names,
        uses=uses,
        calls=table.seen.calls + sum(use.hits for use in uses),
        hits=sum(use.hits for use in uses),
        forgotten=table.seen.dropped,
        symbolic=table.seen.blocked,
        advice=_advice(table, uses),
    )


def _made(times: int) -> str:
    return f"made {times} times" if times > 1 else ""


def _advice(table: SizeTable, uses: tuple[SizeUse, ...]) -> str:
    back = [use for use in uses if not use.has_code and use.calls - use.hits >= COMES_BACK]
    if not back:
        return ""
    most = ", ".join(f"{symbol}={number}" for symbol, number in back[0].sizes)
    text = f"The sizes {most} came back and ran the code for any size in {back[0].calls - back[0].hits} calls"
    if back[0].note.startswith("dropped"):
        return f"{text}: more sizes come back than magi.hot_sizes={table.hot_sizes} keeps. Raise it."
    if back[0].note:
        return f"{text}: no code could be made for them."
    if table.waiting:
        return f"{text}: {table.waiting}."
    if table.hot_sizes:
        return f"{text}: {table.seen.blocked}." if table.seen.blocked else ""
    asked = f'options={{"magi.hot_sizes": {min(len(back), 8)}}}'
    return f"{text}. With {asked} they get code of their own."
