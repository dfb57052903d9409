# SPDX-License-Identifier: Apache-2.0
"""The parts of the time that a compilation took."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from magi_backend._records.records import Compilation, GraphRecord


def compilation_phases(compilation: Compilation) -> tuple[tuple[str, float], ...]:
    """The parts of the time from the start of the capture to a callable function, without later backwards."""
    before = compilation.capture_seconds + compilation.seconds
    return (
        ("capture", compilation.capture_seconds),
        ("AOTAutograd", max(compilation.seconds - compilation.inductor_seconds, 0.0)),
        ("Inductor", compilation.inductor_seconds),
        ("guards", max(compilation.frame_seconds - before, 0.0) if compilation.frame_seconds else 0.0),
    )


def graph_phases(graph: GraphRecord) -> tuple[tuple[str, float], ...]:
    """The parts of Inductor's work on one graph."""
    known = sum(seconds for _, seconds in graph.phases)
    return (*graph.phases, ("other", max(graph.seconds - known, 0.0))) if known else ()


def total_seconds(compilation: Compilation) -> float:
    """The total time of the compilation in seconds, including a backward that was compiled later."""
    later = max(sum(graph.seconds for graph in compilation.graphs) - compilation.inductor_seconds, 0.0)
    finished = compilation.inductor_seconds or compilation.seconds
    return sum(seconds for _, seconds in compilation_phases(compilation)) + (later if finished else 0.0)
