# SPDX-License-Identifier: Apache-2.0
"""Compiled graphs when they become callable, from the compiler or from a cache."""

from __future__ import annotations

import contextlib
import functools
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_seen_by: ContextVar[Callable[[Any, bool, dict[str, Any]], None] | None] = ContextVar("magi_loaded", default=None)


@contextlib.contextmanager
def seeing_loaded(see: Callable[[Any, bool, dict[str, Any]], None]) -> Iterator[None]:
    """A context in which *see* is called with each compiled graph that becomes callable.

    It gets the graph, which has its ``source_code`` and a ``current_callable``; whether it is a backward; and the names
    of the generated module, which are empty if that is not Python. ``CompiledFxGraph.post_compile`` runs for every
    graph: after Inductor, and after either cache (2.10 to 2.15).
    """
    _install()
    token = _seen_by.set(see)
    try:
        yield
    finally:
        _seen_by.reset(token)


@functools.cache
def _install() -> None:
    from torch._inductor.output_code import CompiledFxGraph

    post_compile = CompiledFxGraph.post_compile

    @functools.wraps(post_compile)
    def and_tell(self: Any, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        see = _seen_by.get()
        function = getattr(self.current_callable, "__func__", self.current_callable)
        post_compile(self, example_inputs, constants, graph_kwargs)
        if see is not None:
            see(self, bool(graph_kwargs.get("is_backward")), getattr(function, "__globals__", {}))

    CompiledFxGraph.post_compile = and_tell  # type: ignore[method-assign]
