# SPDX-License-Identifier: Apache-2.0
"""Which dimensions of which parameters vary between calls."""

from __future__ import annotations

import inspect
import typing
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from .errors import TargetError


if typing.TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True)
class DynamicDims:
    """The dynamic dimensions of a function's parameters.

    Attributes:
        target: Name of the function, for errors.
        signature: Its signature, without ``self``.
        dims: Parameter name to dimensions; negative ones count from the last.
        named: Whether the user named them, so that a dimension that a tensor lacks is an error.
    """

    target: str
    signature: inspect.Signature
    dims: Mapping[str, tuple[int, ...]]
    named: bool

    def of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
        """The tensors of one call with their dynamic dimensions, from 0 up.

        Raises:
            TargetError: A dimension that the tensor does not have.
        """
        if not self.dims:
            return []
        given = self.signature.bind(*args, **kwargs).arguments
        return [
            (given[name], tuple(self._checked(name, given[name], dim) for dim in dims))
            for name, dims in self.dims.items()
            if isinstance(given.get(name), torch.Tensor) and (self.named or given[name].ndim)
        ]

    def _checked(self, name: str, tensor: torch.Tensor, dim: int) -> int:
        if not -tensor.ndim <= dim < tensor.ndim:
            msg = (
                f"{self.target}: dynamic_arg_dims asks for dimension {dim} of {name!r}, which was called with shape "
                f"{tuple(tensor.shape)}: its dimensions are {-tensor.ndim} to {tensor.ndim - 1}."
            )
            raise TargetError(msg)
        return dim % tensor.ndim


def dynamic_dims(
    fn: Callable[..., Any], given: Mapping[str, int | Sequence[int]] | None, *, target: str
) -> DynamicDims:
    """The dynamic dimensions of *fn*: those *given*, or dimension 0 of each parameter annotated as a Tensor.

    Raises:
        TargetError: A parameter that *fn* does not have, or dimensions that are no integers.
    """
    signature = _without_self(fn)
    if given is None:
        hints = _hints(fn)
        dims = {name: (0,) for name in signature.parameters if _is_tensor(hints.get(name))}
        return DynamicDims(target, signature, dims, named=False)
    positional = [n for n, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for name in given:
        if name not in positional:
            close = get_close_matches(name, positional, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            known = ", ".join(positional)
            msg = f"{target} has no parameter {name!r} for dynamic_arg_dims.{hint} Its parameters are {known}."
            raise TargetError(msg)
    return DynamicDims(
        target, signature, {name: _as_dims(target, name, value) for name, value in given.items()}, named=True
    )


def _as_dims(target: str, name: str, value: object) -> tuple[int, ...]:
    dims = (value,) if isinstance(value, int) else tuple(value) if isinstance(value, list | tuple) else ()
    if not dims or not all(isinstance(dim, int) and not isinstance(dim, bool) for dim in dims):
        msg = (
            f"{target}: dynamic_arg_dims[{name!r}] is {value!r}; "
            "it takes a dimension such as 0, or several such as [2, 3]."
        )
        raise TargetError(msg)
    return dims


def _without_self(fn: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(fn)
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    return signature.replace(parameters=parameters)


def _hints(fn: Callable[..., Any]) -> dict[str, object]:
    """The annotations of *fn*; those that cannot be resolved, such as names under TYPE_CHECKING, stay strings."""
    try:
        return typing.get_type_hints(fn)
    except (NameError, TypeError, AttributeError):
        return dict(
            inspect.get_annotations(inspect.unwrap(fn)) if not hasattr(fn, "__func__") else fn.__func__.__annotations__
        )


def _is_tensor(annotation: object) -> bool:
    if isinstance(annotation, str):
        return annotation.replace(" ", "").split("|")[0].rsplit(".", 1)[-1] == "Tensor"
    kinds = typing.get_args(annotation) or (annotation,)
    return any(isinstance(kind, type) and issubclass(kind, torch.Tensor) for kind in kinds)
