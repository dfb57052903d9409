# SPDX-License-Identifier: Apache-2.0
"""A function whose bare launches behave as if each were written with `wrap_triton`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

from ._capture import capture_launches


if TYPE_CHECKING:
    from collections.abc import Callable


P = ParamSpec("P")
R = TypeVar("R")
_MARK = "_magi_tritonwrap_wrapped"


def wrap_kernels(fn: Callable[P, R]) -> Callable[P, R]:
    """Return *fn* with every launch made traceable, wherever in the functions it calls the launch stands.

    Under `make_fx`, non-strict export or AOTAutograd each launch becomes a node. Outside a trace, and in code that
    Dynamo traces by itself, *fn* runs as it is: no higher-order op, no copies. Nothing of *fn* is changed, neither its
    globals nor its closure nor the kernels, and wrapping twice is wrapping once.

    Example:
        >>> def double(x): return x * 2
        >>> wrap_kernels(wrap_kernels(double)) is not double
        True
    """
    if hasattr(fn, _MARK):
        return fn

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            return fn(*args, **kwargs)
        with capture_launches():
            return fn(*args, **kwargs)

    setattr(wrapped, _MARK, True)
    return wrapped
