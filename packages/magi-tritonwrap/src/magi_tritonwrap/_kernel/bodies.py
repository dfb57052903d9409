# SPDX-License-Identifier: Apache-2.0
"""Which Python body an operator has, whether a function can be one, and which calls run it."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_leaves

from magi_tritonwrap._identity.code import CodeNames
from magi_tritonwrap._identity.members import is_a
from magi_tritonwrap._torch_compat.operators import (
    NAMESPACES_OF_TORCH,
    body_of_torch_triton_op,
    fakes_of,
    has_composite_kernel,
    has_kernel_for_device,
    names_of_ops,
    overload_of,
    registration_of,
    torch_triton_ops,
)


class Bodies:
    """Remembers what was registered for one operator: the device types of the see-through body, and the fakes.

    Where the see-through body is registered for every device type (a composite key), a body for a single type is
    another body. Without a composite key, the registrations that existed first belong to the see-through body, and
    those that were added or changed later belong to other bodies.
    """

    def __init__(self, op: OpOverload) -> None:
        self._op = op
        self._fakes = fakes_of(op)
        self._own = {} if has_composite_kernel(op) else registration_of(op)

    def are_of(self, op: OpOverload) -> bool:
        """Whether *op* is the operator that had these bodies, and not one that was registered by its name later.

        Its OpOverload does not tell. Torch makes another one after the finalizer of an earlier library, whenever that
        is collected, has cleared `torch.ops` (torch/library.py, `_clear_torch_ops_cache`), and it passes the first one
        as long as the dispatcher keeps the entry (aten/src/ATen/core/dispatch/OperatorEntry.h, `getPythonOp`). A fake
        is there for as long as its library is.
        """
        if not self._fakes:
            return op is self._op
        registered = fakes_of(op)
        return any(fake is other for fake in self._fakes for other in registered)

    def has_other_body(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments runs another body than the one with the launches."""
        device_type = _device_type(args, kwargs)
        if device_type is None or not has_kernel_for_device(self._op, device_type):
            return False
        now = registration_of(self._op).get(device_type)
        return device_type not in self._own or self._own[device_type] != now


def _device_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The device type that the dispatcher chooses for these arguments: that of an accelerator before "cpu"."""
    leaves = tree_leaves((args, kwargs))
    types = [leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)]
    types = types or [leaf.type for leaf in leaves if isinstance(leaf, torch.device)]
    accelerators = [device_type for device_type in types if device_type != "cpu"]
    return next(iter(accelerators or types), None)


SEEN_THROUGH: dict[str, Any] = {}
"""What is known of the ops given to `make_see_through`, by qualified name; the attribute `fn` is the body."""
SEEN_THROUGH_INSIDE: dict[str, Any] = {}
"""The same of `custom_op`s that are seen through where the body of another op calls them, and opaque elsewhere."""


def as_overload(value: Any) -> OpOverload | None:
    """The operator that *value* stands for: itself, what `custom_op` returned, or the default of a packet."""
    if is_a(value, CustomOpDef):
        return overload_of(value)
    if is_a(value, OpOverloadPacket):
        value = getattr(value, "default", None)
    return value if is_a(value, OpOverload) else None


def body_of_op(name: str) -> Callable[..., Any] | None:
    """The body that a compiled graph sees in place of an operator, wherever it is called; None if it is opaque."""
    return SEEN_THROUGH[name].fn if name in SEEN_THROUGH else body_of_torch_triton_op(name)


def body_of_inner_op(name: str) -> Callable[..., Any] | None:
    """The body that a compiled graph sees in place of an operator inside another op's body."""
    return body_of_op(name) or getattr(SEEN_THROUGH_INSIDE.get(name), "fn", None)


def bodies_mentioned(names: frozenset[str]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Bodies of the operators that code can reach as `torch.ops.namespace.name`, given the names it mentions."""
    if "ops" not in names:
        return
    for name in sorted({*SEEN_THROUGH, *SEEN_THROUGH_INSIDE, *torch_triton_ops()}):
        namespace, _, op = name.partition("::")
        if namespace in names and op.partition(".")[0] in names:
            body = body_of_inner_op(name)
            if body is not None:
                yield name, body


def ops_mentioned(names: CodeNames) -> Iterator[OpOverload]:
    """The operators, other than torch's, that code can reach as `torch.ops.namespace.name`, given *names* in it."""
    namespaces = {used for variable, used in names.asked if variable == "ops"}
    for name in names_of_ops() if "ops" in names.mentioned else ():
        namespace, _, op = name.partition("::")
        base, _, overload = op.partition(".")
        if {namespace, base} <= names.mentioned and namespace not in NAMESPACES_OF_TORCH:
            # A name that is asked only of other namespaces is not in this one; what is asked of a variable may be.
            askers = {variable for variable, used in names.asked if used == base} or {namespace}
            if namespace in askers or askers - namespaces:
                yield getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


_PASSED: dict[str, tuple[type, ...]] = {
    "Tensor": (torch.Tensor,),
    "int": (int, torch.SymInt),
    "float": (float, torch.SymFloat),
    "bool": (bool, torch.SymBool),
    "number": (int, float, complex, bool),
    "complex": (complex,),
    "str": (str,),
    "ScalarType": (torch.dtype,),
    "Device": (torch.device,),
    "Layout": (torch.layout,),
    "MemoryFormat": (torch.memory_format,),
    "Generator": (torch.Generator,),
}
"""The classes of the values that an operator passes to its body, by the type in its schema."""


def why_not_a_body(op: OpOverload, fn: Callable[..., Any], names: Mapping[str, Any]) -> str:
    """Why *fn* cannot take what *op* passes, as far as its signature shows; empty if it can.

    An operator passes the flat values of its schema: a str for an Enum, the fields of a record. A function that wants
    the Enum itself would often run, and take the wrong branch.

    String annotations are looked up among *names* too, the local names of the caller.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return ""
    arguments = op._schema.arguments  # noqa: SLF001
    positional = [argument for argument in arguments if not argument.kwarg_only]
    named = {argument.name: argument for argument in arguments if argument.kwarg_only}
    try:
        bound = signature.bind(*positional, **named)
    except TypeError as error:
        return f"the operator passes {', '.join(map(_written, arguments))}, and {error}"
    for name, argument in bound.arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        annotation = _evaluated(parameter.annotation, fn, names)
        if not _takes(annotation, argument.real_type):
            wanted = inspect.formatannotation(annotation)
            return f"the operator passes {_written(argument)}, and its parameter '{name}' is annotated {wanted}"
        if _differs(parameter.default, argument):
            default = f"{argument.default_value!r} in the schema, and {parameter.default!r} in the body"
            return f"the default of '{name}' is {default}, which a call that leaves it out would get"
    return ""


def _written(argument: Any) -> str:
    return f"`{argument.real_type} {argument.name}`"


def _differs(default: Any, argument: Any) -> bool:
    """Whether a parameter has another default than *argument* of a schema, where both are written in the same way."""
    if default is inspect.Parameter.empty or not argument.has_default_value():
        return False
    if any(kind in str(argument.real_type) for kind in ("ScalarType", "Device", "Layout", "MemoryFormat")):
        return False
    stated = argument.default_value
    flat = list(default) if isinstance(default, tuple) else default
    is_plain = type(flat) in (bool, int, float, complex, list)
    return repr(flat) != repr(stated) and not (is_plain and flat == stated)


def _evaluated(annotation: Any, fn: Callable[..., Any], names: Mapping[str, Any]) -> Any:
    """*annotation* as an object; Any for a string whose names are not known here."""
    if not isinstance(annotation, str):
        return annotation
    function: Any = inspect.unwrap(fn)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    function = getattr(function, "__func__", function)
    function = function if isinstance(function, types.FunctionType) else vars(type(function)).get("__call__")
    if not isinstance(function, types.FunctionType):
        return Any
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    # A function that calls itself has an empty cell while it is decorated.
    closure = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    try:
        return eval(annotation, function.__globals__, ChainMap(closure, dict(names)))  # noqa: S307
    except Exception:  # noqa: BLE001 - a name that only a type checker imports, for example
        return Any


def _takes(annotation: Any, given: Any) -> bool:
    """Whether a parameter with this annotation is meant for a value of the schema type *given*."""
    if annotation in (inspect.Parameter.empty, Any):
        return True
    if isinstance(given, torch.OptionalType):
        return annotation is None or _takes(annotation, given.getElementType())
    named = None if isinstance(annotation, type) else getattr(annotation, "__supertype__", None)  # a NewType
    named = named or (getattr(annotation, "__value__", None) if type(annotation).__name__ == "TypeAliasType" else None)
    if named is not None:
        return _takes(named, given)
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _takes(parts[0], given)
    if origin in (typing.Union, types.UnionType):
        return any(_takes(part, given) for part in parts)
    cls = origin or annotation
    if isinstance(given, torch.ListType):
        return _is_class_of(list, cls) and (not parts or _takes(parts[0], given.getElementType()))
    passed = _PASSED.get(str(given))
    if passed is None:
        return True
    if origin is typing.Literal:
        return all(value is None or type(value) in passed for value in parts)
    if isinstance(cls, type) and torch.Tensor in passed and issubclass(cls, torch.Tensor):
        return True  # a subclass, such as a Parameter
    return (int in passed and cls in (float, complex)) or any(_is_class_of(one, cls) for one in passed)


def _is_class_of(cls: type, annotation: Any) -> bool:
    """Whether an instance of *cls* is one of *annotation*; True for what is not a class, such as Any."""
    try:
        return not isinstance(annotation, type) or issubclass(cls, annotation)
    except TypeError:  # a Protocol that cannot be asked
        return True
