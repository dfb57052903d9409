# SPDX-License-Identifier: Apache-2.0
"""``magi_compile``: compile a class, an instance, a function or a bound method in place, and mark what varies."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, cast, overload

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.utils._pytree import GetAttrKey, MappingKey, keystr

from . import _torch_compat
from ._backend import PatchedBackend
from ._repairs._defect import repair_capture
from ._settings import CompileConfig, ConfigPatch
from ._verify.compare import tensors_of
from .errors import TargetError, TargetTypeError, did_you_mean


Mark = Literal["dynamic", "maybe", "unbacked"]
"""How a dimension varies; see `magi_compile`."""

Dims = int | Sequence[int] | Mapping[int, Mark]

T = TypeVar("T", bound="Callable[..., Any] | staticmethod[Any, Any] | classmethod[Any, Any, Any]")


@overload
def magi_compile(
    obj: T,
    *,
    dynamic_arg_dims: Mapping[str, Dims] | None = None,
    model_tag: str | None = None,
    enable_if: Callable[[], bool] | None = None,
    config_patch: ConfigPatch | None = None,
) -> T: ...


@overload
def magi_compile(
    obj: None = None,
    *,
    dynamic_arg_dims: Mapping[str, Dims] | None = None,
    model_tag: str | None = None,
    enable_if: Callable[[], bool] | None = None,
    config_patch: ConfigPatch | None = None,
) -> Callable[[T], T]: ...


def magi_compile(
    obj: Any = None,
    *,
    dynamic_arg_dims: Mapping[str, Dims] | None = None,
    model_tag: str | None = None,
    enable_if: Callable[[], bool] | None = None,
    config_patch: ConfigPatch | None = None,
) -> Any:
    """Compile *obj* with the backend ``magi``; without *obj*, a decorator.

    For a class or an instance of ``nn.Module``, *obj* itself is returned: its parameters, ``state_dict``, pickles and
    copies do not change. Every instance of a class, and of its subclasses, is compiled at its first call.

    Where another compiled function, or ``torch.export``, calls *obj*, it becomes a part of that graph, as what
    ``torch.compile`` returns does; then the settings of that compilation hold, not those given here.

    Args:
        obj: A subclass or an instance of ``nn.Module``, a function, also in a class body and under ``staticmethod`` or
            ``classmethod``, or a bound method.
        dynamic_arg_dims: Name to the dimension, or dimensions, whose size varies between calls. A name is that of a
            parameter, or the path of a part of one: ``"cfg.weight"``, ``"xs[0]"``, ``"opts['mask']"``. Of a list, a
            mapping or a record it means every tensor inside. `{0: mark}` says how a dimension varies. ``"dynamic"``:
            one graph for all sizes from 2 on, or an error that names the line that needs one size; so do dimensions
            without a mark. ``"maybe"``: code for one size where the function needs one. ``"unbacked"``: one graph for
            all sizes, 0 and 1 as well; a branch on the size breaks the graph. Without *dynamic_arg_dims*, dimension 0
            of each parameter that is annotated as a Tensor is ``"maybe"``.
        model_tag: A name for reports and the progress line; by default that of *obj*.
        enable_if: Called once, now; if it returns false, *obj* is returned unchanged.
        config_patch: Settings by dotted name, or a function of the settings that returns such a dict or other settings.

    Returns:
        *obj*, compiled. For a function or a bound method it is a new function, for a ``staticmethod`` or
        ``classmethod`` a new one of its kind.

    Raises:
        TargetTypeError: *obj* is none of the above, or an option has a wrong type.
        TargetError: A parameter or field in *dynamic_arg_dims* that *obj* does not have; at the call, a name that
            marks nothing, or a dimension that its tensor does not have.
        ConfigError: An unknown name or a bad value in *config_patch*.

    Example:
        >>> @magi_compile(dynamic_arg_dims={"x": 0})
        ... def double(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 2
        >>> double(torch.ones(3))
        tensor([2., 2., 2.])
    """
    if obj is None:
        return functools.partial(
            magi_compile,
            dynamic_arg_dims=dynamic_arg_dims,
            model_tag=model_tag,
            enable_if=enable_if,
            config_patch=config_patch,
        )
    called = _called_function(obj)
    tag, condition = cast("object", model_tag), cast("object", enable_if)
    if tag is not None and not isinstance(tag, str):
        raise TargetTypeError(f"magi_compile: model_tag={tag!r} is a {type(tag).__name__}; it takes a name, a str.")
    if condition is not None and not callable(condition):
        raise TargetTypeError(
            f"magi_compile: enable_if={condition!r} is a {type(condition).__name__}; it takes a function without "
            f"arguments, for example enable_if=lambda: {condition!r}."
        )
    # A bad name or value is an error here, not at the first call, and also if enable_if returns false.
    CompileConfig.resolve(config_patch=config_patch)
    dims = dynamic_dims(called, dynamic_arg_dims, target=_name(obj))
    if enable_if is not None and not enable_if():
        return obj
    repair_capture()
    backend = PatchedBackend(config_patch, model_tag or _name(obj))
    if isinstance(obj, type):
        _torch_compat.values.set_compiled_call(obj, CompiledCall(backend, dynamic_arg_dims))
        return obj
    if isinstance(obj, nn.Module):
        _torch_compat.values.set_compiled_call(obj, _compiled(_torch_compat.values.plain_call(obj), backend, dims))
        return obj
    if isinstance(obj, staticmethod | classmethod):
        return type(obj)(_compiled(called, backend, dims))
    return _compiled(called, backend, dims)


@dataclass(frozen=True)
class CompiledCall:
    """The compiled call of each instance of a class, made at the first access.

    ``nn.Module.__call__`` runs ``self._compiled_call_impl`` unless that is None. As a descriptor without ``__set__``
    it is called once for an instance. The compiled call that it sets on the instance is found first from then on, and
    is left out of pickles and copies by ``nn.Module.__getstate__``.
    """

    backend: PatchedBackend
    dynamic_arg_dims: Mapping[str, Dims] | None

    def __get__(self, instance: nn.Module | None, owner: type) -> Any:
        if instance is None:
            return self
        # A subclass may have a forward of its own, with other parameters.
        dims = dynamic_dims(_called_function(instance), self.dynamic_arg_dims, target=_name(instance))
        compiled = _compiled(_torch_compat.values.plain_call(instance), self.backend, dims)
        _torch_compat.values.set_compiled_call(instance, compiled)
        return compiled


def _compiled(fn: Callable[..., Any], backend: Callable[..., Any], dims: DynamicDims) -> Callable[..., Any]:
    """*fn*, compiled. Its tensors have marks for their dynamic dimensions during the call only."""
    compiled = torch.compile(fn, backend=backend)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with _torch_compat.values.dynamic_marks(dims.of_call(args, kwargs)):
                return compiled(*args, **kwargs)
        except ConstraintViolationError as error:
            raise dims.one_size(error) from error

    remake = functools.partial(_compiled, dims=dims)
    return _torch_compat.values.marked_as_compiled(call, fn, compiled, remake)


def _called_function(obj: object) -> Callable[..., Any]:
    """The function behind *obj*, and its signature without parameters that are bound already."""
    if isinstance(obj, type) and issubclass(obj, nn.Module):
        forward = inspect.getattr_static(obj, "forward")
        return forward.__get__(object(), obj) if hasattr(forward, "__get__") else forward  # type: ignore[no-any-return]
    if isinstance(obj, nn.Module):
        return obj.forward
    if isinstance(obj, staticmethod | classmethod):
        return _called_function(obj.__func__)
    if isinstance(obj, types.FunctionType | types.MethodType):
        return obj
    kind = f"the class {obj.__qualname__}" if isinstance(obj, type) else f"an object of type {type(obj).__qualname__}"
    raise TargetTypeError(
        f"magi_compile cannot compile {kind}. It takes a subclass or an instance of torch.nn.Module, a function, or a "
        "bound method: give it the method that does the work, for example magi_compile(obj.run)."
    )


def _name(obj: object) -> str:
    return str(getattr(obj, "__qualname__", type(obj).__qualname__))


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
        dims, line = _torch_compat.values.specialised(error)
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
