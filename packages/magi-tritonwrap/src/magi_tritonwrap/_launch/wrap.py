# SPDX-License-Identifier: Apache-2.0
"""Functions whose launches all behave as if wrapped by hand, or as if none were."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from magi_tritonwrap._torch_compat.tracing import tracing_is_active, wrap_triton_disabled

from .capture import capture_launches


if TYPE_CHECKING:
    from collections.abc import Callable


P = ParamSpec("P")
R = TypeVar("R")
_MARK = "_magi_tritonwrap_wrapped"


def wrap_kernels(fn: Callable[P, R]) -> Callable[P, R]:
    """Return *fn* with every launch made traceable, also those in the functions that it calls.

    Under `make_fx`, non-strict export or AOTAutograd each launch becomes a node. Outside a trace every launch is bare,
    and code that Dynamo traces by itself is left to it. Nothing of *fn* is changed, neither its
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
        with capture_launches() if tracing_is_active(tree_leaves((args, kwargs))) else wrap_triton_disabled():
            return fn(*args, **kwargs)

    setattr(wrapped, _MARK, True)
    return wrapped


def launch_directly(fn: Callable[P, R]) -> Callable[P, R]:
    """Return *fn* with launches that are wrapped by hand made bare, for eager calls on real tensors.

    A wrapped launch passes through a higher-order op, which takes a millisecond in eager (torch 2.13). An op whose body
    was written for `torch.library.triton_op` should register this as its implementation; `find_kernels(fn).may_wrap`
    tells whether it makes a difference.

    Example:
        >>> def double(x): return x * 2
        >>> launch_directly(double)(3)
        6
    """

    @functools.wraps(fn)
    def direct(*args: P.args, **kwargs: P.kwargs) -> R:
        with wrap_triton_disabled():
            return fn(*args, **kwargs)

    return direct
