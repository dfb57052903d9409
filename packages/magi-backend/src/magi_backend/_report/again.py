# SPDX-License-Identifier: Apache-2.0
"""A function compiled again, no matter what Dynamo has compiled of it before, or how often."""

from __future__ import annotations

import contextlib
import types
from typing import TYPE_CHECKING, Any

from torch import nn

from magi_backend import _torch_compat


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class OwnBackend:
    """*backend* with a separate identity, so that Dynamo does not use code that another backend compiled.

    Code that was compiled with another backend stays in Dynamo's cache, and calls with that backend still use it.
    """

    __name__ = "magi"

    def __init__(self, backend: Callable[..., Any]) -> None:
        self.compiler_fn = backend

    def __call__(self, gm: Any, example_inputs: Any) -> Any:
        """Compile *gm*, as the backend does."""
        return self.compiler_fn(gm, example_inputs)


class CompiledAgain:
    """*original*, compiled as *how* says, from a code object that is new to Dynamo.

    Dynamo keeps compiled code with the code object of the function, and stops compiling one for which it keeps too
    much. So this compiles a copy of the function, or of the ``forward`` of a module.
    """

    def __init__(self, original: Callable[..., Any], how: _torch_compat.CompiledBy) -> None:
        self._forward = _own_forward(original)
        with self._with_own_forward():
            self._compiled = how.make(_own(original), OwnBackend(how.backend))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled function."""
        with self._with_own_forward(), _torch_compat.many_recompilations():
            return self._compiled(*args, **kwargs)

    @contextlib.contextmanager
    def _with_own_forward(self) -> Iterator[None]:
        if self._forward is None:
            yield
            return
        attributes = vars(self._forward.__self__)
        attributes["forward"] = self._forward
        try:
            yield
        finally:
            del attributes["forward"]


def module_of(fn: object) -> nn.Module | None:
    """The module that *fn* is, or whose method it is."""
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _own_forward(original: object) -> types.MethodType | None:
    module = module_of(original)
    if module is None or "forward" in vars(module) or not isinstance(module.forward, types.MethodType):
        return None
    return types.MethodType(_copied(module.forward.__func__), module)


def _own(original: Any) -> Any:
    if isinstance(original, types.FunctionType):
        return _copied(original)
    if isinstance(original, types.MethodType) and not isinstance(original.__self__, nn.Module):
        return types.MethodType(_copied(original.__func__), original.__self__)
    return original


def _copied(fn: Any) -> Any:
    """*fn* with a copied code object if it is a function; anything else as it is."""
    if not isinstance(fn, types.FunctionType):
        return fn
    twin = types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    twin.__kwdefaults__ = fn.__kwdefaults__
    twin.__qualname__, twin.__module__, twin.__doc__ = fn.__qualname__, fn.__module__, fn.__doc__
    twin.__annotations__ = fn.__annotations__
    vars(twin).update(vars(fn))
    return twin
