# SPDX-License-Identifier: Apache-2.0
"""What a call through magi_opschema.aten costs beside the same OpOverload: `add` on float32[16], both forms.

Arms: `overload`, torch.ops.aten.add.Tensor and .out themselves; `slot8`, the surface with no kernel registered;
`active`, the surface with a kernel in slot 0; `kernel`, that kernel called directly. The kernel calls aten.add.
"""

from __future__ import annotations

import argparse
import functools as ft
from collections.abc import Callable

import torch
from _results import Row, measure_paired, rows_of, write
from magi_opschema import aten
from torch import Tensor


_FUNCTIONAL = torch.ops.aten.add.Tensor
_OUT = torch.ops.aten.add.out


def add_kernel(
    input: Tensor,  # noqa: A002  # ATen's name
    other: Tensor,
    *,
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """What a hand-written kernel's launcher does, with ATen in place of a launch."""
    if out is None:
        result: Tensor = _FUNCTIONAL(input, other, alpha=alpha)
        return result
    written: Tensor = _OUT(input, other, alpha=alpha, out=out)
    return written


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Measure, write results/aten_surface.json and .md, and return the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=1000, help="calls in one timing")
    parser.add_argument("--repeats", type=int, default=41, help="timings of each arm")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    x, y, out = torch.randn(16), torch.randn(16), torch.empty(16)
    add = aten.add
    rows: list[Row] = []
    forms: list[tuple[str, Callable[..., Tensor], dict[str, Tensor]]]
    forms = [("functional", _FUNCTIONAL, {}), ("out", _OUT, {"out": out})]

    def measure(case: str, arms: dict[str, Callable[[], Tensor]]) -> list[Row]:
        return rows_of(case, measure_paired(arms, number=options.number, repeats=options.repeats))

    with torch.no_grad():
        for form, overload, kwargs in forms:
            rows += measure(
                form,
                {"overload": ft.partial(overload, x, y, **kwargs), "slot8": ft.partial(add, x, y, **kwargs)},
            )
        aten.register_slot("add", 0, add_kernel)
        for form, overload, kwargs in forms:
            arms: dict[str, Callable[..., Tensor]] = {"overload": overload, "active": add, "kernel": add_kernel}
            rows += measure(f"{form} active", {arm: ft.partial(call, x, y, **kwargs) for arm, call in arms.items()})
    aten.unregister_slot("add", 0)
    return write("aten_surface", rows, note=" ".join((__doc__ or "").split()))


if __name__ == "__main__":
    main()
