# SPDX-License-Identifier: Apache-2.0
"""Writes lines of Python that flatten the values of a tree and rebuild them.

The lines are straight-line code: attribute reads and comparisons, without a tree walk at the call.

    cfg: NormCfg(eps: float, mode: Literal["rms", "layer"])

    flatten     if _m_type(cfg) is not _m_NormCfg:
                    _m_reject_cfg(cfg)
                cfg__mode = cfg.mode
                if cfg__mode not in _m_cfg__mode_values:
                    _m_reject_cfg__mode(cfg__mode)
                ... cfg.eps, cfg__mode ...
    rebuild     cfg = _m_new(_m_NormCfg)
                _m_fields = cfg.__dict__
                _m_fields["eps"] = cfg__eps
                _m_fields["mode"] = cfg__mode

Text holds identifiers that Python itself accepted as parameter or field names, flat names, and names with the
reserved prefix. Every other object, defaults and classes and keys among them, is a bound global.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from magi_opschema._model.tree import (
    SEQUENCE,
    Codec,
    Leaf,
    ListOrTuple,
    MaskedList,
    Node,
    Optional,
    Record,
    Sequence,
    dotted,
    flat_name,
    leaves,
)
from magi_opschema._torch_compat import answer_class, is_dynamo_compiling, run_at_trace_time
from magi_opschema.errors import ObjectFieldError, OptionError

from .source import IDENTIFIER, Writer


ORIGINAL = "_magi_rebuilt_of"
"""Attribute of such a subclass: the class of the objects that are taken apart."""


@functools.cache
def rebuilt_class(
    cls: Any, names: tuple[str, ...], tensors: frozenset[str], path: str, title: str, location: str
) -> type:
    """The class of objects that are rebuilt from the fields *names* of a *cls*, at *path* of the op *title*.

    Those of the fields that hold Tensors are *tensors*.
    """
    listed = ", ".join(names)

    def refuse_write(_: object, name: str, *__: object) -> NoReturn:
        text = f"{title}: the body writes '{path}.{name}', and its {cls.__name__} was rebuilt for this one call, so "
        write = f"Write into a Tensor in place and name it, as in mutates_args=('{path}.{name}',); return what is new"
        others = f"{write if name in tensors else 'Return what is new, and let the caller keep it'}; or pass the handle"
        fix = f"that would be lost. {others} of register_object(), which leaves the object whole."
        raise ObjectFieldError(f"{text}{fix} ({location})")

    inherited = getattr(cls, "__getattr__", None)

    def missing(self: object, name: str) -> Any:
        if inherited is not None:
            try:
                return inherited(self, name)
            except AttributeError:
                pass
        if name.startswith("__"):
            raise AttributeError(name)
        text = f"{title}: the body reads '{path}.{name}', and its {cls.__name__} was rebuilt only from ({listed}). "
        fix = f"Declare '{name}' among the fields of {cls.__name__}, or make it an attribute of the class."
        raise ObjectFieldError(f"{text}{fix} ({location})")

    namespace = {
        ORIGINAL: cls,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__setattr__": refuse_write,
        "__delattr__": refuse_write,
        "__getattr__": missing,
    }
    try:
        return types.new_class(cls.__name__, (cls,), {}, lambda target: target.update(namespace))
    except Exception as error:
        text = f"{title}: '{path}' is a {cls.__name__}, and the body gets an instance of a subclass, which the class "
        fix = f"refuses: {error}. Use a frozen dataclass, or annotate Tensors and constants as parameters of their own."
        raise OptionError(f"{text}{fix} ({location})") from error


@functools.cache
def class_question(cls: type) -> Callable[[object], bool]:
    """A function that says, while Dynamo traces, whether an object is exactly a *cls*, with a guard in C++."""

    def look(context: Any) -> None:
        answer_class(context, cls)

    def is_one(value: object) -> bool:
        answer = isinstance(value, cls)
        run_at_trace_time(look)
        return answer

    return is_one


def original_class(value: object) -> type:
    """The class of *value*, or of the object that *value* was rebuilt from."""
    cls = type(value)
    return getattr(cls, ORIGINAL, cls)


def flatten(node: Node, value: str, to: Writer) -> list[str]:
    """Write the lines that check and take apart *value*; return one expression for each leaf of *node*."""
    if isinstance(node, Leaf):
        return [_encode(node, value, to)]
    value = to.local(flat_name(node.path), value)
    match node:
        case Record():
            _refuse_other_class(node, value, to)
            return [text for part in node.fields for text in flatten(part.node, read(node, value, part.name, to), to)]
        case Sequence():
            length = len(node.items)
            isinstance_, tuple_, len_ = map(to.builtin, ("isinstance", "tuple", "len"))
            _refuse(f"not {isinstance_}({value}, {tuple_}) or {len_}({value}) != {length}", node, value, to)
            return [text for i, item in enumerate(node.items) for text in flatten(item, f"{value}[{i}]", to)]
        case Optional():
            return _flatten_optional(node, value, to)
        case ListOrTuple():
            isinstance_ = to.builtin("isinstance")
            _refuse(f"not {isinstance_}({value}, {to.bind('sequence', SEQUENCE)})", node, value, to)
            to.line(f"{node.is_tuple.name} = {isinstance_}({value}, {to.builtin('tuple')})")
            return [node.is_tuple.name, *flatten(node.inner, value, to)]
        case MaskedList():
            isinstance_, all_ = to.builtin("isinstance"), to.builtin("all")
            tensor, sequence = to.bind("Tensor", Tensor), to.bind("sequence", SEQUENCE)
            are_tensors = f"{all_}([item is None or {isinstance_}(item, {tensor}) for item in {value}])"
            _refuse(f"not {isinstance_}({value}, {sequence}) or not {are_tensors}", node, value, to)
            to.line(f"{node.present.name} = [item is not None for item in {value}]")
            return [f"[item for item in {value} if item is not None]", node.present.name]


def _encode(leaf: Leaf, value: str, to: Writer) -> str:
    codec: Codec = leaf.codec
    if codec.is_identity:
        return value
    if codec.refuse or codec.encode.count("{value}") > 1:
        value = to.local(leaf.name, value)
    if codec.refuse:
        _refuse(to.expression(leaf, codec.refuse, value), leaf, value, to)
    return to.expression(leaf, codec.encode, value)


def _flatten_optional(node: Optional, value: str, to: Writer) -> list[str]:
    below = [leaf.name for leaf in leaves(node.inner)]
    with to.block(f"if {value} is None:"):
        to.line(" = ".join([*below, "None"]) if below else "pass")
        to.line(f"{node.is_some.name} = False")
    with to.block("else:"):
        for name, text in zip(below, flatten(node.inner, value, to), strict=True):
            if name != text:
                to.line(f"{name} = {text}")
        to.line(f"{node.is_some.name} = True")
    return [node.is_some.name, *below]


def _refuse_other_class(node: Record, value: str, to: Writer) -> None:
    if node.kind == "typeddict":
        isinstance_, dict_, len_ = map(to.builtin, ("isinstance", "dict", "len"))
        keys = to.bind(f"keys_of_{node.cls.__name__}", tuple(part.name for part in node.fields))
        all_, key = to.builtin("all"), to.temporary("key")
        condition = (
            f"not {isinstance_}({value}, {dict_}) or {len_}({value}) != {len(node.fields)} "
            f"or not {all_}([{key} in {value} for {key} in {keys}])"
        )
        _refuse(condition, node, value, to)
        return
    # `value.__class__` may be wrong, as that of a mock with a spec is.
    condition, name = f"{to.builtin('type')}({value}) is not {class_name(node, to)}", class_name(node, to)
    if node.kind == "object":
        # The body of one op may pass the object that it got to another op.
        condition += f" and {to.bind('original_class', original_class)}({value}) is not {name}"
    if to.is_traced and any(leaf.is_fixed for leaf in leaves(node)):
        compiling = to.bind("is_dynamo_compiling", is_dynamo_compiling)
        is_one = to.bind(f"is_{node.cls.__name__}" if name.isascii() else "is_record", class_question(node.cls))
        condition = f"not {is_one}({value}) if {compiling}() else {condition}"
    _refuse(condition, node, value, to)


def _refuse(condition: str, node: Node, value: str, to: Writer) -> None:
    reject = to.bind(f"reject_{flat_name(node.path)}", to.reject(node))
    with to.block(f"if {condition}:"):
        to.line(f"{reject}({value})")


def class_name(node: Record, to: Writer, cls: type | None = None) -> str:
    """A reserved name for the class of *node*, or for *cls* in its place."""
    name = node.cls.__name__
    return to.bind(name if IDENTIFIER.match(name) else "record", cls or node.cls)


def _key(node: Record, name: str, to: Writer) -> str:
    return to.bind(f"key_{flat_name((*node.path, name))}", name)


def read(node: Record, value: str, name: str, to: Writer) -> str:
    """An expression for the field *name* of the record *value*."""
    return f"{value}[{_key(node, name, to)}]" if node.kind == "typeddict" else f"{value}.{name}"


def rebuild(node: Node, to: Writer) -> str:
    """Write the lines that rebuild the value of *node* from its leaves' names; return an expression for it."""
    match node:
        case Leaf():
            text = (to.is_description and node.codec.described) or node.codec.decode
            return to.expression(node, text, node.name)
        case Record():
            return _rebuild_record(node, to)
        case Sequence():
            items = [rebuild(item, to) for item in node.items]
            return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        case Optional():
            # A list and its flat argument share a name, and the argument is still read after the list is rebuilt.
            is_list = isinstance(node.inner, (ListOrTuple, MaskedList))
            name = to.temporary(flat_name(node.path)) if is_list else flat_name(node.path)
            with to.block(f"if {node.is_some.name}:"):
                built = rebuild(node.inner, to)
                if built != name:
                    to.line(f"{name} = {built}")
            with to.block("else:"):
                to.line(f"{name} = None")
            return name
        case ListOrTuple():
            built = rebuild(node.inner, to)
            return f"({to.builtin('tuple')}({built}) if {node.is_tuple.name} else {built})"
        case MaskedList():
            name = flat_name(node.path)
            rest = to.bind("iter", iter)
            values = to.temporary(f"{name}_values")
            to.line(f"{values} = {rest}({node.values.name})")
            next_ = to.bind("next", next)
            listed = f"[{next_}({values}) if there else None for there in {node.present.name}]"
            return f"{to.builtin('tuple')}({listed})" if node.is_tuple else listed


def _rebuild_record(node: Record, to: Writer) -> str:
    parts = [(part.name, rebuild(part.node, to)) for part in node.fields]
    name = flat_name(node.path)
    if node.kind == "object":
        return _rebuild_object(node, parts, name, to)
    named = ", ".join(f"{field_name}={text}" for field_name, text in parts)
    if node.kind == "dataclass" and node.is_plain and not to.is_traced:
        # A frozen dataclass's own __init__ goes through object.__setattr__ for each field, which takes twice as long.
        to.line(f"{name} = {to.bind('new', object.__new__)}({class_name(node, to)})")
        if parts:
            fields = to.temporary("fields")
            to.line(f"{fields} = {name}.__dict__")
            for field_name, text in parts:
                to.line(f"{fields}[{field_name!r}] = {text}")
        return name
    match node.kind:
        case "dataclass":
            built = f"{class_name(node, to)}({named})"
        case "namedtuple":
            built = f"{class_name(node, to)}({', '.join(text for _, text in parts)})"
        case "typeddict":
            built = f"{{{', '.join(f'{_key(node, key, to)}: {text}' for key, text in parts)}}}"
    to.line(f"{name} = {built}")
    return name


def _rebuild_object(node: Record, parts: list[tuple[str, str]], name: str, to: Writer) -> str:
    """Write the lines that rebuild an object without `__init__`.

    A field may be a slot, or the class may have a `__setattr__`.
    """
    names = tuple(field_name for field_name, _ in parts)
    tensors = frozenset(part.name for part in node.fields if any(leaf.is_tensor for leaf in leaves(part.node)))
    cls = rebuilt_class(node.cls, names, tensors, dotted(node.path), to.trees.title, to.trees.location)
    to.line(f"{name} = {to.bind('new', object.__new__)}({class_name(node, to, cls)})")
    for field_name, text in parts:
        to.line(f"{to.bind('set', object.__setattr__)}({name}, {field_name!r}, {text})")
    return name
