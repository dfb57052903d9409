# SPDX-License-Identifier: Apache-2.0
"""Which dimensions of which parameters vary between calls."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from .errors import TargetError, TargetTypeError


if typing.TYPE_CHECKING:
    from collections.abc import Callable


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
            TargetError: A dimension that the tensor does not have, or a named argument that is not a tensor.
        """
        if not self.dims:
            return []
        try:
            given = self.signature.bind(*args, **kwargs).arguments
        except TypeError:
            return []  # the function itself says best which of its arguments are missing
        return [
            (given[name], tuple(self._checked(name, given[name], dim) for dim in dims))
            for name, dims in self.dims.items()
            if self._is_tensor(name, given.get(name)) and (self.named or given[name].ndim)
        ]

    def _is_tensor(self, name: str, value: object) -> bool:
        if self.named and value is not None and not isinstance(value, torch.Tensor):
            msg = (
                f"{self.target}: dynamic_arg_dims names {name!r}, which was called with {value!r} (a "
                f"{type(value).__name__}). Only a Tensor has dimensions; torch makes numbers dynamic by itself."
            )
            raise TargetTypeError(msg)
        return isinstance(value, torch.Tensor)

    def _checked(self, name: str, tensor: torch.Tensor, dim: int) -> int:
        if not -tensor.ndim <= dim < tensor.ndim:
            msg = (
                f"{self.target}: dynamic_arg_dims asks for dimension {dim} of {name!r}, which was called with shape "
                f"{tuple(tensor.shape)}: its dimensions are {-tensor.ndim} to {tensor.ndim - 1}."
            )
            raise TargetError(msg)
        return dim % tensor.ndim


def dynamic_dims(
    fn: Callable[..., Any], given: Mapping[str, int | Sequence[int]] | None, *, target: str, is_method: bool
) -> DynamicDims:
    """The dynamic dimensions of *fn*: those *given*, or dimension 0 of each parameter annotated as a Tensor.

    *is_method* says that *fn* is a function of a class, which its instances call.

    Raises:
        TargetError: A parameter that *fn* does not have, or dimensions that are no integers.
    """
    signature = inspect.signature(fn)
    if is_method:
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    if given is None:
        hints = _hints(fn)
        dims = {name: (0,) for name in signature.parameters if _is_tensor(hints.get(name))}
        return DynamicDims(target, signature, dims, named=False)
    asked: object = given
    if not isinstance(asked, Mapping):
        msg = (
            f"{target}: dynamic_arg_dims={given!r} is a {type(given).__name__}; it takes a dict of parameter names and "
            "dimensions, such as {'x': 0}."
        )
        raise TargetTypeError(msg)
    positional = [n for n, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for name in given:
        if name not in positional:
            close = get_close_matches(str(name), positional, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            known = ", ".join(positional)
            msg = f"{target} has no parameter {name!r} for dynamic_arg_dims.{hint} Its parameters are {known}."
            raise TargetError(msg)
    return DynamicDims(
        target, signature, {name: _as_dims(target, name, value) for name, value in given.items()}, named=True
    )


def _as_dims(target: str, name: str, value: object) -> tuple[int, ...]:
    is_several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    dims: tuple[Any, ...] = tuple(value) if is_several else (value,)  # type: ignore[arg-type]
    if not dims or not all(isinstance(dim, int) and not isinstance(dim, bool) for dim in dims):
        msg = (
            f"{target}: dynamic_arg_dims[{name!r}] is {value!r}; "
            "it takes a dimension such as 0, or several such as [2, 3]."
        )
        raise TargetError(msg)
    return dims


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
