# SPDX-License-Identifier: Apache-2.0
"""``magi_compile``: compile a class, an instance, a function or a bound method in place."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast, overload

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from . import _torch_compat
from ._backend import PatchedBackend
from ._dynamic import Dims, DynamicDims, dynamic_dims
from ._repairs._defect import repair_capture
from ._settings import CompileConfig, ConfigPatch
from .errors import TargetTypeError


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
