# SPDX-License-Identifier: Apache-2.0
"""Passes of other kinds as passes of this package: a function of a graph, or an object with nothing but `__call__`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph

from magi_passes import _torch_compat
from magi_passes._identity.code import digest
from magi_passes._identity.walk import is_frozen, state_of
from magi_passes.errors import PassArgumentTypeError

from .compilation import PassContext, Reason
from .graph_pass import MagiInductorPass


@dataclass(frozen=True)
class _Adapted(MagiInductorPass):
    body: Any
    state: tuple[tuple[str, Any], ...] = ()

    def _made(self) -> Any:
        """The function, or an object of the class with the attributes that are in the uuid."""
        if not isinstance(self.body, type):
            return self.body
        cls: Any = self.body
        made = cls.__new__(cls)
        for name, value in self.state:
            object.__setattr__(made, name, value)
        return made

    def is_applicable(self, graph: Graph, context: PassContext) -> bool | Reason:
        asked: Callable[[Graph, PassContext], bool | Reason] | None = getattr(self._made(), "is_applicable", None)
        return True if asked is None else asked(graph, context)

    def __call__(self, graph: Graph) -> None:
        self._made()(graph)

    def uuid(self) -> Any:
        """That of the code, the attributes and the release of torch; with the adapted pass's own uuid, if it has one.

        None if its own is None, which keeps what it changes out of all caches.
        """
        ours, has_own = super().uuid(), _has_uuid(self.body)
        theirs = self._made().uuid() if has_own else ""
        return None if theirs is None else ours + (f"-{digest('own', str(theirs))}" if has_own else "")

    def __str__(self) -> str:
        state, named = dict(self.state), self.body
        if isinstance(self.body, functools.partial):
            named, state = self.body.func, {"args": self.body.args, **self.body.keywords}
        name = f"{named.__module__}.{named.__qualname__}"
        parts = [f"the code of {name} and all that it reaches", *(f"{key}={value!r}" for key, value in state.items())]
        parts += ["its own uuid()"] if _has_uuid(self.body) else []
        return f"{name}; its cache key is made of {', '.join(parts)} and torch {_torch_compat.config.torch_version()}"


def _has_uuid(body: Any) -> bool:
    return getattr(body, "uuid", MagiInductorPass.uuid) is not MagiInductorPass.uuid


def adapt(
    body: Callable[[Graph], object], *, hook: str = "post_grad_custom_post_pass", config_keys: Sequence[str] = ()
) -> MagiInductorPass:
    """A function that takes a graph, or an object whose class has `__call__`, as a pass.

    Its cache key is made of its code, of all code that this reaches, and of the attributes that the object has now;
    ``print`` of the result says so. Each call gets a new object with these attributes, so nothing that one call leaves
    on it can change what the next one does.

    A subclass of `MagiInductorPass` that is not a frozen dataclass is taken too, with its hook, its keys and its
    `is_applicable`. One that is a frozen dataclass is returned as it is.

    Args:
        body: What rewrites a `torch.fx.Graph` in place. What it returns is ignored.
        hook: The Inductor option that runs the pass.
        config_keys: The keys of `torch._inductor.config` that it may assign.

    Raises:
        PassArgumentTypeError: *body* is a class, or cannot be called with a graph.
        PassIdentityError: When the uuid is asked for: an attribute can change, or has no stable form.

    Example:
        >>> from magi_passes import PassPipeline, adapt
        >>> class CountNodes:
        ...     def __init__(self, most):
        ...         self.most = most
        ...
        ...     def __call__(self, graph):
        ...         assert len(graph.nodes) < self.most
        >>> pipeline = PassPipeline([adapt(CountNodes(1000))])
        >>> adapt(CountNodes(10)).uuid() == adapt(CountNodes(20)).uuid()
        False
    """
    given: object = body
    if isinstance(given, type) or not callable(given):
        what = "a class; pass an instance" if isinstance(given, type) else "nothing that can be called with a graph"
        raise PassArgumentTypeError(f"adapt: {body!r} is {what}.")
    is_value = isinstance(body, types.FunctionType | functools.partial)
    if not is_value and not isinstance(inspect.getattr_static(type(body), "__call__"), types.FunctionType):
        raise PassArgumentTypeError(
            f"adapt: {body!r} is a {type(body).__qualname__}, whose state no cache key can hold. "
            "Pass a function, or an object whose class defines __call__."
        )
    try:
        with contextlib.suppress(ValueError):  # a function of C without a signature, in a partial
            inspect.signature(body).bind(None)
    except TypeError as error:
        raise PassArgumentTypeError(f"adapt: {body!r} cannot be called with a graph alone: {error}.") from error
    if isinstance(body, MagiInductorPass):
        if is_frozen(type(body)):
            return body
        hook, config_keys = body.hook, body.inductor_config_keys_potentially_mutated_by_this_pass
    code: Any = body if is_value else type(body)
    named = body.func if isinstance(body, functools.partial) else code
    about = {
        "__module__": named.__module__,
        "__qualname__": named.__qualname__,
        "hook": hook,
        "inductor_config_keys_potentially_mutated_by_this_pass": (
            config_keys if isinstance(config_keys, str) else tuple(config_keys)  # the class refuses a string
        ),
    }
    adapted: type[_Adapted] = dataclass(frozen=True)(type(named.__name__, (_Adapted,), about))
    return adapted(code, () if is_value else tuple(sorted(state_of(body).items())))
