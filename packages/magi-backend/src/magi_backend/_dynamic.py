# SPDX-License-Identifier: Apache-2.0
"""Dimensions that vary: how a path names an argument, and how its dimensions are marked for one call."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import torch
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.utils._pytree import GetAttrKey, MappingKey, keystr

from ._torch_compat import values
from ._verify.compare import tensors_of
from .errors import TargetError, TargetTypeError, did_you_mean


@dataclass(frozen=True)
class ArgumentPath:
    """A parameter, and the steps from its argument to a value in it.

    A `GetAttrKey` is a field of a record, or a key of a mapping; a `MappingKey` is an index or a key.
    """

    parameter: str
    steps: tuple[GetAttrKey | MappingKey[Any, Any], ...] = ()

    def __str__(self) -> str:
        return self.parameter + keystr(self.steps)

    @staticmethod
    def parse(text: str) -> ArgumentPath | None:
        """The path that *text* spells in Python's syntax; None if it spells none."""
        steps: list[GetAttrKey | MappingKey[Any, Any]] = []
        try:
            expression = ast.parse(text, mode="eval").body
            while not isinstance(expression, ast.Name):
                match expression:
                    case ast.Attribute(value=inner, attr=name):
                        steps.append(GetAttrKey(name))
                    case ast.Subscript(value=inner, slice=index):
                        steps.append(MappingKey(ast.literal_eval(index)))
                    case _:
                        return None
                expression = inner
        except (SyntaxError, ValueError):
            return None
        return ArgumentPath(expression.id, tuple(reversed(steps)))

    def find(self, argument: object) -> object:
        """The value at this path in *argument*, the value of the parameter; None if an optional part is None.

        Raises:
            LookupError: There is no such field, index or key.
        """
        value: Any = argument
        for step in self.steps:
            if value is None:
                return None
            if isinstance(step, GetAttrKey) and not isinstance(value, Mapping):
                if step.name not in _field_names(type(value)) or not hasattr(value, step.name):
                    raise LookupError(step)
                value = getattr(value, step.name)
                continue
            items: Any = value if isinstance(value, list | tuple | Mapping) else ()
            try:
                value = items[step.name if isinstance(step, GetAttrKey) else step.key]
            except TypeError as unfit:  # a list indexed by a key
                raise LookupError(step) from unfit
        return value


def _field_names(cls: Any) -> list[str]:
    """The fields of *cls* if it is a dataclass, a named tuple or a typed dict."""
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    return list(getattr(cls, "_fields", inspect.get_annotations(cls) if typing.is_typeddict(cls) else ()))


def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function or class; as written if a name is not there, as under TYPE_CHECKING."""
    try:
        return typing.get_type_hints(fn)
    except (NameError, TypeError, AttributeError):
        return inspect.get_annotations(inspect.unwrap(fn))


Mark = Literal["dynamic", "maybe", "unbacked"]
"""How a dimension varies; see `magi_compile`."""

Dims = int | Sequence[int] | Mapping[int, Mark]
MarkedTensor = tuple[torch.Tensor, Mapping[int, Mark]]
MARKS = typing.get_args(Mark)


@dataclass(frozen=True)
class DynamicDims:
    """The dynamic dimensions of a function's arguments.

    Attributes:
        target: Name of the function, for errors.
        signature: Its signature as it is called, without a parameter that is bound already.
        dims: The mark of each dimension by the path of a tensor, or of a container of tensors; negative dimensions
            count from the last.
        named: Whether the user named them, so that a name that marks nothing is an error.
    """

    target: str
    signature: inspect.Signature
    dims: Mapping[ArgumentPath, Mapping[int, Mark]]
    named: bool

    def of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[MarkedTensor]:
        """The tensors of one call with the marks of their dynamic dimensions, which are not negative.

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

    def _named(self, path: ArgumentPath, dims: Mapping[int, Mark], given: Mapping[str, Any]) -> Iterator[MarkedTensor]:
        try:
            value = path.find(given[path.parameter])
        except LookupError:
            raise TargetError(self._marks_nothing(path, "is not there in this call", given)) from None
        found = list(tensors_of(value, str(path)))
        is_empty = value is None or (isinstance(value, list | tuple | Mapping) and not value)
        if not found and not is_empty:
            was = f"was called with {value!r} (a {type(value).__name__})"
            raise TargetTypeError(self._marks_nothing(path, was, given))
        for name, tensor in found:
            for dim in dims:
                if not -tensor.ndim <= dim < tensor.ndim:
                    raise TargetError(
                        f"{self.target}: dynamic_arg_dims asks for dimension {dim} of '{name}', which was called with "
                        f"shape {tuple(tensor.shape)}: its dimensions are {-tensor.ndim} to {tensor.ndim - 1}."
                    )
            yield tensor, {dim % tensor.ndim: mark for dim, mark in dims.items()}

    def one_size(self, error: ConstraintViolationError) -> TargetError:
        """The error for traced code that needs one size of a dimension that varies."""
        dims, line = values.specialised(error)
        needs = " and ".join(f"dimension {dim} of '{name}' to be {size}" for name, dim, size in dims)
        msg = (
            f"{self.target}: dynamic_arg_dims names a dimension that varies, and the code needs "
            f"{needs or f'one size of it ({error})'}{f', at {line}' if line else ''}. Change the code, do not name the "
            "dimension, or write {dimension: 'maybe'}, which allows code for one size."
        )
        return TargetError(msg)

    def _marks_nothing(self, path: ArgumentPath, why: str, given: Mapping[str, Any]) -> str:
        there = [name for parameter, value in given.items() for name, _ in tensors_of(value, parameter)]
        listed = f"The tensors of this call are {', '.join(there)}." if there else "This call has no tensors."
        return (
            f"{self.target}: dynamic_arg_dims names '{path}', which {why}. Only a Tensor has dimensions; torch makes "
            f"numbers dynamic by itself. {listed}"
        )


def dynamic_dims(fn: Callable[..., Any], given: Mapping[str, Dims] | None, *, target: str) -> DynamicDims:
    """The dynamic dimensions of *fn*: those *given*, or dimension 0 of each parameter annotated as a Tensor.

    Raises:
        TargetError: A parameter that *fn* does not have, a name that is not a path, or dimensions that
            are not integers.
    """
    signature, hints = inspect.signature(fn), _hints(fn)
    if given is None:
        annotated = [name for name in signature.parameters if _is_tensor(hints.get(name))]
        return DynamicDims(target, signature, {ArgumentPath(name): {0: "maybe"} for name in annotated}, named=False)
    asked: object = given
    if not isinstance(asked, Mapping):
        raise TargetTypeError(
            f"{target}: dynamic_arg_dims={given!r} is a {type(given).__name__}; it takes a dict of names and "
            "dimensions, such as {'x': 0, 'cfg.weight': 1}."
        )
    dims = {_path(target, name, signature, hints): _as_dims(target, name, value) for name, value in given.items()}
    return DynamicDims(target, signature, dims, named=True)


def _path(target: str, name: object, signature: inspect.Signature, hints: Mapping[str, Any]) -> ArgumentPath:
    path = ArgumentPath.parse(name) if isinstance(name, str) else None
    if path is None:
        raise TargetError(
            f"{target}: dynamic_arg_dims names {name!r}, which is not the name of a parameter, or of a part of one "
            "such as 'cfg.weight', 'xs[0]' or \"opts['mask']\"."
        )
    if path.parameter not in signature.parameters:
        known = list(signature.parameters)
        hint = did_you_mean(get_close_matches(path.parameter, known, n=1))
        listed = f"Its parameters are {', '.join(known)}." if known else "It has no parameters."
        raise TargetError(f"{target} has no parameter '{path.parameter}' for dynamic_arg_dims.{hint} {listed}")
    annotation = hints.get(path.parameter)
    for step in path.steps:
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        if typing.get_origin(annotation) in {typing.Union, types.UnionType} and len(kinds) == 1:
            annotation = kinds[0]
        cls: Any = typing.get_origin(annotation) or annotation
        fields = _field_names(cls)
        if not fields or not isinstance(step, GetAttrKey):
            break
        if step.name not in fields:
            raise TargetError(
                f"{target}: dynamic_arg_dims names '{path}', and {cls.__name__} has no field '{step.name}'."
                f"{did_you_mean(get_close_matches(step.name, fields, n=1))} Its fields are {', '.join(fields)}."
            )
        annotation = _hints(cls).get(step.name)
    return path


def _as_dims(target: str, name: str, value: object) -> Mapping[int, Mark]:
    if isinstance(value, Mapping):
        marks = value
    else:
        is_several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        dims: tuple[Any, ...] = tuple(value) if is_several else (value,)  # type: ignore[arg-type]
        marks = dict.fromkeys(dims, "dynamic")
    if not marks or not all(isinstance(dim, int) and not isinstance(dim, bool) for dim in marks):
        raise TargetError(
            f"{target}: dynamic_arg_dims[{name!r}] is {value!r}; it takes a dimension such as 0, several such as "
            "[2, 3], or how each varies, such as {0: 'unbacked'}."
        )
    for dim, mark in marks.items():
        if mark not in MARKS:
            hint = did_you_mean(get_close_matches(str(mark), MARKS, n=1))
            msg = f"{target}: dynamic_arg_dims[{name!r}][{dim}] is {mark!r}.{hint} It takes one of {', '.join(MARKS)}."
            raise TargetError(msg)
    return marks


def _is_tensor(annotation: object) -> bool:
    if isinstance(annotation, str):
        return annotation.replace(" ", "").split("|")[0].rsplit(".", 1)[-1] == "Tensor"
    kinds = typing.get_args(annotation) or (annotation,)
    return any(isinstance(kind, type) and issubclass(kind, torch.Tensor) for kind in kinds)
