# SPDX-License-Identifier: Apache-2.0
"""The base class of every pass, and what makes a pass safe without a pipeline."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

from magi_passes.errors import PassDefinitionError

from .context import current_context
from .declared import DeclaredPass, note_pass
from .run import run_directly
from .scope import install


if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from torch.fx import Graph


class MagiInductorPass(DeclaredPass):
    """A graph pass that declares which configuration it may change. Subclasses are frozen dataclasses.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch
        >>> from magi_passes import MagiInductorPass, PassContext, Reason
        >>> @dataclass(frozen=True)
        ... class Unroll(MagiInductorPass):
        ...     inductor_config_keys_potentially_mutated_by_this_pass = ("triton.max_tiles",)
        ...     tiles: int = 2
        ...
        ...     def is_applicable(self, graph, context):
        ...         return Reason(len(graph.nodes) > 10, f"{len(graph.nodes)} nodes")
        ...
        ...     def __call__(self, graph):
        ...         torch._inductor.config.triton.max_tiles = self.tiles
        >>> Unroll(tiles=2).uuid() == Unroll(tiles=3).uuid()
        False

    Assigning a declared key inside `__call__` is all there is to it: the old value comes back when the compilation
    ends, no other compilation sees the change, and the user's own setting wins.

    That also holds where another library's pass manager calls the pass, and where the pass stands in one of
    Inductor's hooks by itself. A call asks `is_applicable` first, and writes a record. Where nothing would put the
    configuration back, a pass that declares keys raises `UnscopedConfigError`; `PassPipeline.scope` is the way out.

    Attributes:
        inductor_config_keys_potentially_mutated_by_this_pass: The keys of `torch._inductor.config` that `__call__`
            may assign, nested ones with a dot. Any other change raises `UndeclaredConfigMutationError`.
        hook: The Inductor option that runs the pass. Configuration can be changed from the two post-grad hooks only:
            the others run before the code generation that reads it.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: ARG004
        """Make the pass. The first one wraps Inductor's functions, to know when a compilation begins and ends."""
        install()
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        note_pass(cls)
        body = vars(cls).get("__call__")
        if body is not None and not isinstance(body, types.FunctionType):
            msg = f"{cls.__qualname__}.__call__ is a {type(body).__name__}; define it with def."
            raise PassDefinitionError(msg)
        if body is not None:
            setattr(cls, "__call__", _safe_by_itself(body))  # noqa: B010 - mypy does not let a method be assigned


def _safe_by_itself(body: Callable[..., None]) -> Callable[..., None]:
    """A function that runs *body* with the checks and the record of a pipeline if the caller is not the framework."""

    @functools.wraps(body)
    def __call__(self: MagiInductorPass, graph: Graph, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if current_context() is None:
            run_directly(self, graph)
        else:
            body(self, graph, *args, **kwargs)

    return __call__
