# SPDX-License-Identifier: Apache-2.0
"""Programs and kernels of the user: how they are run, and which operators no kernel of a lower slot covers."""

from __future__ import annotations

import runpy
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

from magi_opschema.aten.errors import SurfaceError

from .cells import loaded_cells
from .load import default_surface
from .slots import slots


if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def run_script(path: Path, *, name: str | None = None, arguments: Sequence[str] | None = None) -> None:
    """Run the file *path*, which can import modules from its folder, also later from inside its kernels.

    Args:
        path: The file.
        name: Its `__name__`, `__main__` for a program; by default, a unique one.
        arguments: Its arguments after `sys.argv[0]` while it runs; by default, `sys.argv` of this process is unchanged.
    """
    before = sys.argv
    sys.path.insert(0, str(path.resolve().parent))
    if arguments is not None:
        sys.argv = [str(path), *arguments]
    try:
        runpy.run_path(str(path), run_name=name)
    finally:
        sys.argv = before


def run_kernels(path: Path | None) -> None:
    """Run the file that registers the user's kernels, if there is one, with its own name and not as `__main__`.

    Raises:
        SurfaceError: There is no such file.
    """
    if path is None:
        return
    if not path.is_file():
        msg = f"--kernels {path}: no such file"
        raise SurfaceError(msg)
    run_script(path)


@dataclass(frozen=True)
class Gap:
    """What a program called, by base name and number of calls.

    Attributes:
        covered: Bases with a kernel in a lower slot.
        only_aten: Bases of the surface that only slot 8 covers.
        outside: Operators that are not on the surface: views, in-place and vendor operators.
    """

    covered: dict[str, int]
    only_aten: dict[str, int]
    outside: dict[str, int]


def find_gap(script: Path, arguments: Sequence[str]) -> Gap:
    """Run *script* as `__main__`, and sort the operators that it dispatched, including those of gradients."""
    default_surface()
    counts: Counter[str] = Counter()
    try:
        with _Count(counts):
            run_script(script, name="__main__", arguments=arguments)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    return _sorted(counts)


class _Count(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own is untyped
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        base = name.partition(".")[0]
        self._counts[base.partition("__")[0] if namespace == "magi_aten" else base] += 1
        return func(*args, **(kwargs or {}))


def _sorted(counts: Counter[str]) -> Gap:
    cells = loaded_cells()
    ordered = dict(counts.most_common())
    covered = {base: n for base, n in ordered.items() if base in cells and len(slots(base)) > 1}
    return Gap(
        covered=covered,
        only_aten={base: n for base, n in ordered.items() if base in cells and base not in covered},
        outside={base: n for base, n in ordered.items() if base not in cells},
    )
