# SPDX-License-Identifier: Apache-2.0
"""What a pass is told about the graph and its compilation, and how it says whether it applies."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from magi_passes import _torch_compat

from .arguments import check_types
from .compilation import current_compilation, start_of_current


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch.fx import Graph


@dataclass(frozen=True)
class Reason:
    """The answer of `MagiInductorPass.is_applicable`.

    Truthy exactly when the pass applies, so ``if reason:`` reads as it should.

    Example:
        >>> reason = Reason(False, "no placeholder carries a free symbol")
        >>> bool(reason)
        False
        >>> print(reason)
        no placeholder carries a free symbol

    Attributes:
        applies: Whether the pass is to run.
        text: One short sentence for the record, without a full stop.
    """

    applies: bool
    text: str

    def __post_init__(self) -> None:
        """Raise for an *applies* that is not a bool, whose truth the record would not show.

        Raises:
            PassArgumentTypeError: *applies* is not a bool, or *text* is not a str.
        """
        check_types(self)

    def __bool__(self) -> bool:
        return self.applies

    def __str__(self) -> str:
        return self.text


_current: ContextVar[PassContext | None] = ContextVar("magi_passes_context", default=None)


@dataclass(frozen=True)
class PassContext:
    """One compilation of one graph, as seen by `MagiInductorPass.is_applicable`.

    Every field has a default, so that a pass can be asked about a graph outside of any compilation:

    >>> PassContext().graph
    'graph'
    >>> PassContext(torch_version="2.10.0").torch_release
    (2, 10)

    Attributes:
        graph: Name of the graph in records and logs, such as ``3_forward`` or ``3_inference``.
        compile_id: Dynamo's id of the compilation, such as ``0/1``; None when Dynamo did not start it.
        is_backward: Whether this is the backward graph of a training step.
        is_inference: Whether no gradient will be asked for.
        is_subgraph: Whether the graph is the body of a higher-order operator inside the graph that is compiled.
        hook: The Inductor option that runs the pass, such as ``post_grad_custom_post_pass``; empty when a caller
            other than a pipeline runs it.
        example_inputs: The inputs the graph is compiled for: real tensors, fake tensors, ints or SymInts.
        user_keys: The Inductor keys that the user set and that no pass may change.
        config: Every Inductor key with its value when the compilation started. Read-only.
        torch_version: The running torch release.
    """

    graph: str = "graph"
    compile_id: str | None = None
    is_backward: bool = False
    is_inference: bool = True
    is_subgraph: bool = False
    hook: str = "post_grad_custom_post_pass"
    example_inputs: Sequence[Any] = ()
    user_keys: frozenset[str] = frozenset()
    config: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType(_torch_compat.config.config_values()))
    torch_version: str = field(default_factory=_torch_compat.machine.torch_version)

    @property
    def torch_release(self) -> tuple[int, int]:
        """Major and minor number of `torch_version`, for comparisons."""
        return _torch_compat.machine.release(self.torch_version)


def current_context() -> PassContext | None:
    """The context of the pass that is being run, for passes that need it inside `__call__`; None outside of one."""
    return _current.get()


@contextlib.contextmanager
def in_context(context: PassContext | None) -> Iterator[None]:
    """A context manager that makes *context* the current one; None if what runs in it is not a pass."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def context_of(
    graph: Graph, hook: str, declared: Iterable[str], user_keys: frozenset[str] = frozenset()
) -> PassContext:
    """The context of *graph* now, for passes that may change the *declared* keys.

    Args:
        graph: The graph that the passes are asked about.
        hook: The Inductor option through which they are reached; empty if that is not known.
        declared: The Inductor keys that they declare.
        user_keys: The keys that the user set in the options; those that differ from Inductor's default are added.
    """
    start = start_of_current()
    if start is None:
        return PassContext(hook=hook, user_keys=user_keys, compile_id=_torch_compat.compiling.current_compile_id())
    user_keys |= {key for key in declared if start.config[key] != _torch_compat.config.default_of(key)}
    known = PassContext(
        hook=hook, user_keys=user_keys, compile_id=_torch_compat.compiling.current_compile_id(), config=start.config
    )
    compilation = current_compilation()
    if compilation is None:
        return known
    return replace(
        known,
        graph=compilation.graph,
        compile_id=compilation.compile_id,
        is_backward=compilation.is_backward,
        is_inference=compilation.is_inference,
        is_subgraph=graph is not compilation.gm.graph,
        example_inputs=compilation.example_inputs,
    )
