# SPDX-License-Identifier: Apache-2.0
"""The compilation in progress: what passes and hooks may know of it, and the configuration that it started from."""

from __future__ import annotations

import contextlib
import functools
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from magi_passes import _torch_compat

from .records import Collector, active_collectors


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.fx import GraphModule


@dataclass(frozen=True)
class Start:
    """Inductor's configuration at one moment: what is needed to restore it, and the value of each key."""

    overrides: Mapping[str, Any]
    config: Mapping[str, Any]


def configuration_now() -> Start:
    """Inductor's configuration in the current context."""
    return Start(_torch_compat.config.read_overrides(), MappingProxyType(_torch_compat.config.config_values()))


@dataclass(frozen=True)
class Call:
    """One call of `compile_fx`, for the graphs that it compiles and for backward graphs that are compiled later."""

    hooks: tuple[object, ...] = ()
    """The pipelines' hooks that this call put into its options."""
    collectors: tuple[Collector, ...] = ()
    """The collectors that get the records: those that were active when the call began."""
    graphs: list[str] = field(default_factory=list)
    """Names of the graphs that Inductor compiled; none if AOTAutograd's cache had all of them."""


@dataclass(frozen=True)
class GraphCompilation:
    """The compilation of one graph by Inductor."""

    gm: GraphModule
    graph: str
    is_backward: bool
    is_inference: bool
    example_inputs: Sequence[Any]
    compile_id: str | None
    asked: list[str] = field(default_factory=list)
    """Names of the hooks that Inductor called so far; none when it found the graph in a cache."""
    changed: set[str] = field(default_factory=set)
    """The keys that passes have changed so far."""
    matches: dict[Any, Any] = field(default_factory=dict)
    """Answers of Inductor's block matcher, see `_torch_compat.kernels.install_tilings`."""
    requests: set[str] = field(default_factory=set)
    """What passes ask of code generation besides the configuration, by their names."""
    fitting: dict[Any, bool] = field(default_factory=dict)
    """Which sizes fit into 32 bits, see `_torch_compat.kernels.install_narrow_sizes`."""

    @functools.cached_property
    def start(self) -> Start:
        """The configuration just before the first pass of this package was asked.

        It is read when it is first needed, so a compilation without such a pass costs nothing.
        """
        _torch_compat.kernels.install_tilings(_matches_of_current)
        return configuration_now()

    @property
    def has_passes(self) -> bool:
        """Whether a pass of this package takes part in this compilation."""
        return "start" in vars(self)


_current: ContextVar[GraphCompilation | None] = ContextVar("magi_passes_compilation", default=None)
_call: ContextVar[Call | None] = ContextVar("magi_passes_call", default=None)
_scope: ContextVar[Start | None] = ContextVar("magi_passes_scope", default=None)


def _matches_of_current() -> dict[Any, Any] | None:
    compilation = _current.get()
    return compilation.matches if compilation is not None and compilation.has_passes else None


def current_compilation() -> GraphCompilation | None:
    """The compilation in progress in this context; None if there is none."""
    return _current.get()


def current_call() -> Call | None:
    """The call of `compile_fx` that the compilation in progress belongs to; None if it is not known."""
    return _call.get()


def start_of_current() -> Start | None:
    """The configuration that will be restored: that of the compilation in progress, or of the open scope.

    None if there is neither, so that a change of the configuration would never be undone.
    """
    compilation = _current.get()
    return _scope.get() if compilation is None else compilation.start


def collectors_of_current() -> tuple[Collector, ...]:
    """The collectors that get the records of the passes that run now."""
    call = _call.get()
    return active_collectors() if call is None else call.collectors


@contextlib.contextmanager
def under_way(compilation: GraphCompilation | None) -> Iterator[None]:
    """A context in which *compilation* is in progress; None stands for no compilation with our passes."""
    token = _current.set(compilation)
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.contextmanager
def in_call(call: Call | None) -> Iterator[None]:
    """A context in which *call* is the current call of `compile_fx`."""
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)


@contextlib.contextmanager
def put_back_afterwards() -> Iterator[None]:
    """A context at whose end Inductor's configuration is restored, whatever passes change in it."""
    start = configuration_now()
    token = _scope.set(start)
    try:
        yield
    finally:
        _scope.reset(token)
        _torch_compat.config.restore_overrides(start.overrides)
