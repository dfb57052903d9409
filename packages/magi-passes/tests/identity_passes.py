# SPDX-License-Identifier: Apache-2.0
"""Passes that the tests of uuids make."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from magi_passes import MagiInductorPass


if TYPE_CHECKING:
    from torch.fx import Graph


@dataclass(frozen=True)
class Holds(MagiInductorPass):
    value: object = None

    def __call__(self, graph: Graph) -> None:
        pass


PASS = """
from dataclasses import dataclass
from magi_passes import MagiInductorPass
{before}
@dataclass(frozen=True)
class Mine(MagiInductorPass):
    def __call__(self, graph):
        {body}
"""


def made_pass(before: str = "", body: str = "pass", name: str = "made", filename: str = "<string>") -> Any:
    """The class `Mine` of a namespace that was run from text, as a prompt, a notebook and `python -c` do."""
    namespace: dict[str, Any] = {"__name__": name} if name else {}
    exec(
        compile(PASS.format(before=textwrap.dedent(before), body=body), filename, "exec", dont_inherit=True), namespace
    )
    return namespace["Mine"]


def globals_of(mine: Any) -> dict[str, Any]:
    """Those of the author's function, which is in the part that makes the pass safe by itself."""
    found: dict[str, Any] = inspect.unwrap(mine.__call__).__globals__
    return found
