# SPDX-License-Identifier: Apache-2.0
"""The compilation under way: what passes and hooks may know of it."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.fx import GraphModule


@dataclass(frozen=True)
class Compilation:
    """One graph on its way through Inductor, and the configuration that it started from."""

    gm: GraphModule
    graph: str
    is_backward: bool
    is_inference: bool
    example_inputs: Sequence[Any]
    overrides: Mapping[str, Any]
    config: Mapping[str, Any]
    compile_id: str | None
    asked: list[str] = field(default_factory=list)
    """Names of the hooks that Inductor called so far; none when it found the graph in a cache."""
    matches: dict[Any, Any] = field(default_factory=dict)
    """Answers of Inductor's block matcher, see `_torch_compat.install_tilings`."""


_current: ContextVar[Compilation | None] = ContextVar("magi_passes_compilation", default=None)


def current_compilation() -> Compilation | None:
    """The compilation under way in this context."""
    return _current.get()


@contextlib.contextmanager
def under_way(compilation: Compilation | None) -> Iterator[None]:
    """Make *compilation* the one under way in this context; None stands for no compilation of ours."""
    token = _current.set(compilation)
    try:
        yield
    finally:
        _current.reset(token)
