# SPDX-License-Identifier: Apache-2.0
"""What each pass did to a graph, as text before and after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .graph_text import graph_text
from .records import GraphChange


if TYPE_CHECKING:
    from torch.fx import Graph

    from .log import CompilationLog


class GraphChanges:
    """Reads the graph before and after each pass, and keeps both texts if the pass changed it."""

    def __init__(self, log: CompilationLog) -> None:
        self._log = log
        self._before = ""
        self._found: list[GraphChange] = []

    def observe(self, name: str, graph: Graph) -> None:
        """Read *graph* before a pass if *name* is empty, otherwise after the pass *name*."""
        with self._log.spending():
            text = graph_text(graph)
            if name and text != self._before:
                keep = self._log.keep_text
                self._found.append(GraphChange(name, keep(self._before), keep(text)))
            self._before = text

    def new(self) -> tuple[GraphChange, ...]:
        """The changes since the last call. Those of the joint graph count for the forward, which is compiled first."""
        found, self._found = tuple(self._found), []
        return found
