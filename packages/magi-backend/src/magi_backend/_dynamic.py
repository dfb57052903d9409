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
from typing import Any

import torch

from ._verify.compare import leaves_of
from .errors import TargetError, TargetTypeError


@dataclass(frozen=True)
class Field:
    """A step into a record by the name of a field, or into a mapping by a key."""

    name: str

    def __str__(self) -> str:
        return f".{self.name}"


@dataclass(frozen=True)
class Item:
    """A step into a list, tuple or mapping by an index or key."""

    key: Any

    def __str__(self) -> str:
        return f"[{self.key!r}]"


Step = Field | Item


@dataclass(frozen=True)
class UnknownField:
    """A name that no field of *cls* has, and the fields that it has."""

    name: str
    cls: type
    fields: tuple[str, ...]


@dataclass(frozen=True)
class ArgumentPath:
    """A parameter, and the steps from its argument to a value in it."""

    parameter: str
    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return self.parameter + "".join(map(str, self.steps))

    @staticmethod
    def parse(text: str) -> ArgumentPath | None:
        """The path that *text* spells in Python's syntax; None if it spells none."""
        try:
            expression = ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError):
            return None
        steps: list[Step] = []
        while not isinstance(expression, ast.Name):
            match expression:
                case ast.Attribute(value=inner, attr=name):
                    steps.append(Field(name))
                case ast.Subscript(value=inner, slice=index):
                    try:
                        steps.append(Item(ast.literal_eval(index)))
                    except ValueError:
                        return None
                case _:
                    return None
            expression = inner
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
            value = _enter(value, step)
        return value

    def unknown_field(self, annotation: object) -> UnknownField | None:
        """The first step for which the classes in *annotation*, the parameter's, have no field.

        None if all have one.
        """
        for step in self.steps:
            cls = _record_class(annotation)
            if cls is None or not isinstance(step, Field):
                return None
            hints = _class_hints(cls)
            if step.name not in hints:
                return UnknownField(step.name, cls, tuple(hints))
            annotation = hints[step.name]
        return None


def _record_class(annotation: object) -> type | None:
    """The dataclass, named tuple or typed dict in *annotation*, which may be optional.

    None for any other annotation.
    """
    kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    if typing.get_origin(annotation) in {typing.Union, types.UnionType} and len(kinds) == 1:
        annotation = kinds[0]
    cls = typing.get_origin(annotation) or annotation
    if not isinstance(cls, type):
        return None
    is_record = dataclasses.is_dataclass(cls) or hasattr(cls, "_fields") or typing.is_typeddict(cls)
    return cls if is_record else None


def _class_hints(cls: type) -> dict[str, object]:
    """The fields of a record class with their annotations; those that cannot be resolved stay strings."""
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
    else:
        names = list(getattr(cls, "_fields", cls.__annotations__))
    try:
        resolved = typing.get_type_hints(cls)
    except (NameError, TypeError, AttributeError):
        resolved = {}
    return {name: resolved.get(name) for name in names}


def _enter(value: Any, step: Step) -> object:
    if isinstance(step, Item):
        items = value if isinstance(value, list | tuple | Mapping) else ()
        try:
            return items[step.key]
        except TypeError as unfit:  # a list indexed by a key
            raise LookupError(step) from unfit
    if isinstance(value, Mapping):
        return value[step.name]
    if step.name not in dict(_parts(value)):
        raise LookupError(step)
    return getattr(value, step.name)


def tensors_in(value: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that *value*, found at *path*, is or holds, each with its own path."""
    return ((name, leaf) for name, leaf in leaves_of(value, path) if isinstance(leaf, torch.Tensor))


def holds_anything(value: object) -> bool:
    """Whether *value* is neither None nor an empty list, tuple or mapping."""
    return value is not None and not (isinstance(value, list | tuple | Mapping) and not value)


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """The names and values of the fields of a dataclass or a named tuple; empty for any other value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
    elif isinstance(value, tuple):
        names = list(getattr(value, "_fields", ()))
    else:
        names = []
    return ((name, getattr(value, name)) for name in names if hasattr(value, name))


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
