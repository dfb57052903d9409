# SPDX-License-Identifier: Apache-2.0
"""Which dimensions of which arguments vary between calls."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from ._argument_path import ArgumentPath, holds_anything, tensors_in
from .errors import TargetError, TargetTypeError


MarkedTensor = tuple[torch.Tensor, tuple[int, ...]]


@dataclass(frozen=True)
class DynamicDims:
    """The dynamic dimensions of a function's arguments.

    Attributes:
        target: Name of the function, for errors.
        signature: Its signature as it is called, without a parameter that is bound already.
        dims: Dimensions by the path of a tensor, or of a container of tensors; negative ones count from the last.
        named: Whether the user named them, so that a name that marks nothing is an error.
    """

    target: str
    signature: inspect.Signature
    dims: Mapping[ArgumentPath, tuple[int, ...]]
    named: bool

    def of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[MarkedTensor]:
        """The tensors of one call with their dynamic dimensions, as non-negative numbers.

        Raises:
            TargetError: A named argument that holds no tensor, or a dimension that its tensor does not have.
        """
        if not self.dims:
            return []
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError:
            return []  # the call of the function itself raises the best error about missing arguments
        bound.apply_defaults()
        given = bound.arguments
        if self.named:
            return [marked for path, dims in self.dims.items() for marked in self._named(path, dims, given)]
        return [
            (value, dims)
            for path, dims in self.dims.items()
            if isinstance(value := given[path.parameter], torch.Tensor) and value.ndim
        ]

    def _named(self, path: ArgumentPath, dims: tuple[int, ...], given: Mapping[str, Any]) -> Iterator[MarkedTensor]:
        try:
            value = path.find(given[path.parameter])
        except LookupError:
            raise TargetError(self._marks_nothing(path, "is not there in this call", given)) from None
        found = list(tensors_in(value, str(path)))
        if not found and holds_anything(value):
            was = f"was called with {value!r} (a {type(value).__name__})"
            raise TargetTypeError(self._marks_nothing(path, was, given))
        for name, tensor in found:
            yield tensor, tuple(self._checked(name, tensor, dim) for dim in dims)

    def _marks_nothing(self, path: ArgumentPath, why: str, given: Mapping[str, Any]) -> str:
        there = [name for parameter, value in given.items() for name, _ in tensors_in(value, parameter)]
        listed = f"The tensors of this call are {', '.join(there)}." if there else "This call has no tensors."
        return (
            f"{self.target}: dynamic_arg_dims names '{path}', which {why}. Only a Tensor has dimensions; torch makes "
            f"numbers dynamic by itself. {listed}"
        )

    def _checked(self, name: str, tensor: torch.Tensor, dim: int) -> int:
        if not -tensor.ndim <= dim < tensor.ndim:
            msg = (
                f"{self.target}: dynamic_arg_dims asks for dimension {dim} of '{name}', which was called with shape "
                f"{tuple(tensor.shape)}: its dimensions are {-tensor.ndim} to {tensor.ndim - 1}."
            )
            raise TargetError(msg)
        return dim % tensor.ndim


def dynamic_dims(
    fn: Callable[..., Any], given: Mapping[str, int | Sequence[int]] | None, *, target: str
) -> DynamicDims:
    """The dynamic dimensions of *fn*: those *given*, or dimension 0 of each parameter annotated as a Tensor.

    Raises:
        TargetError: A parameter that *fn* does not have, a name that is not a path, or dimensions that
            are not integers.
    """
    signature = inspect.signature(fn)
    if given is None:
        hints = _hints(fn)
        annotated = [name for name in signature.parameters if _is_tensor(hints.get(name))]
        return DynamicDims(target, signature, {ArgumentPath(name): (0,) for name in annotated}, named=False)
    asked: object = given
    if not isinstance(asked, Mapping):
        msg = (
            f"{target}: dynamic_arg_dims={given!r} is a {type(given).__name__}; it takes a dict of names and "
            "dimensions, such as {'x': 0, 'cfg.weight': 1}."
        )
        raise TargetTypeError(msg)
    hints = _hints(fn)
    dims = {_path(target, name, signature, hints): _as_dims(target, name, value) for name, value in given.items()}
    return DynamicDims(target, signature, dims, named=True)


def _path(target: str, name: object, signature: inspect.Signature, hints: Mapping[str, object]) -> ArgumentPath:
    path = ArgumentPath.parse(name) if isinstance(name, str) else None
    if path is None:
        msg = (
            f"{target}: dynamic_arg_dims names {name!r}, which is not the name of a parameter, or of a part of one "
            "such as 'cfg.weight', 'xs[0]' or \"opts['mask']\"."
        )
        raise TargetError(msg)
    if path.parameter not in signature.parameters:
        known = list(signature.parameters)
        hint = _did_you_mean(path.parameter, known)
        listed = f"Its parameters are {', '.join(known)}." if known else "It has no parameters."
        msg = f"{target} has no parameter '{path.parameter}' for dynamic_arg_dims.{hint} {listed}"
        raise TargetError(msg)
    if (unknown := path.unknown_field(hints.get(path.parameter))) is not None:
        msg = (
            f"{target}: dynamic_arg_dims names '{path}', and {unknown.cls.__name__} has no field '{unknown.name}'."
            f"{_did_you_mean(unknown.name, unknown.fields)} Its fields are {', '.join(unknown.fields)}."
        )
        raise TargetError(msg)
    return path


def _did_you_mean(name: str, names: Sequence[str]) -> str:
    close = get_close_matches(name, names, n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


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
