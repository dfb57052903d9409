# SPDX-License-Identifier: Apache-2.0
"""From annotations to trees: the type table of the package, one case for each row.

Every refusal is a `Refused`. A record collects those of its fields and raises them together,
so that one error names all the bad places of a signature.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import inspect
import types
import typing
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from magi_opschema._handles import (
    AnnotatedField,
    ObjectHandle,
    annotated_fields,
    declared_fields,
    handle,
    is_declared,
    unfit,
)
from magi_opschema._lowering import codecs
from magi_opschema._model.schema import SCHEMA_TYPES, schema_type_of
from magi_opschema._model.tree import (
    IDENTITY,
    Codec,
    Field,
    Leaf,
    ListOrTuple,
    MaskedList,
    Node,
    Optional,
    Path,
    Record,
    RecordKind,
    Sequence,
    dotted,
    flat_name,
    leaves,
    nodes,
)
from magi_opschema._text import show_literal, show_type
from magi_opschema._torch_compat import opaque_name, why_not_returned
from magi_opschema.errors import Problem

from .annotations import Scope, evaluate, substitute, type_arguments, unwrap


class Refused(Exception):  # noqa: N818  (it never leaves this package)
    """Annotations have no flat form; *problems* say which ones, why, and what to do."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems


@dataclass(frozen=True)
class Place:
    """Where an annotation is in the signature that is lowered."""

    path: Path
    scope: Scope
    subject: str
    """`parameter` or `return value`."""
    is_optional: bool = False
    """Whether it is below a `Record | None`, where every leaf may be None."""
    bound: typing.Mapping[object, object] = field(default_factory=dict)
    """What type variables stand for at this place."""
    outer: tuple[object, ...] = ()
    """The records around it, which must not occur in it again; a generic class may, with another argument."""
    is_fixed: bool = False
    """Whether it is inside an object that is taken apart."""
    is_opaque: bool = False
    """Whether an object is not taken apart here: among the items of a list, and in the opaque form of an op."""

    def below(self, name: str, owner: type | None = None) -> Place:
        """The place of the part *name*, whose annotation is in the class *owner* if one is given."""
        # This is called for every leaf, and `dataclasses.replace` takes four times as long.
        path, scope = (*self.path, name), self.scope if owner is None else self.scope.of_class(owner)
        inherited = (self.subject, self.is_optional, self.bound, self.outer, self.is_fixed, self.is_opaque)
        return Place(path, scope, *inherited)

    def refuse(self, annotation: object, why: str, fix: str) -> Refused:
        of = f"{self.subject} '{dotted(self.path)}'" if self.path else self.subject
        return Refused(Problem(dotted(self.path), f"{of} has type {show_type(annotation)}, {why}. {fix}"))

    def leaf(self, schema_type: str, codec: Codec = IDENTITY) -> Leaf:
        is_padded = self.is_optional and not schema_type.endswith("?")
        text = f"{schema_type}?" if is_padded else schema_type
        return Leaf(self.path, text, flat_name(self.path), codec, is_padded, self.is_fixed)

    def evaluated(self, annotation: object) -> object:
        """*annotation*, evaluated if it is a string; raises Refused if it cannot be evaluated."""
        try:
            return evaluate(annotation, self.scope)
        except Exception as error:  # noqa: BLE001  (a string annotation is an expression, which may raise anything)
            text = annotation if isinstance(annotation, str) else show_type(annotation)
            why = error.msg if isinstance(error, SyntaxError) else error
            sentence = (
                f"the annotation '{text}' of {self.subject} '{dotted(self.path)}' could not be evaluated: {why}. "
                "Import what it names where the op is defined, also at run time, not only under TYPE_CHECKING."
            )
            raise Refused(Problem(dotted(self.path), sentence)) from None

    def resolved(self, annotation: object) -> tuple[object, bool]:
        """*annotation*, evaluated, without wrappers and type variables; and whether it had a wrapper."""
        return unwrap(substitute(self.evaluated(annotation), self.bound))


_ITEM = type(inspect.getattr_static(inspect.ArgInfo, "args"))
"""The class of what reads a field of a named tuple."""


def is_record(cls: type) -> bool:
    """Whether *cls* is a dataclass, a named tuple or a TypedDict, or declares the fields of its objects.

    A class that is registered with torch as opaque stays whole.
    """
    if is_declared(cls):
        return True
    is_namedtuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
    return (is_namedtuple or dataclasses.is_dataclass(cls) or typing.is_typeddict(cls)) and not opaque_name(cls)


def fields_of(annotation: object, cls: Any, inside: Place) -> tuple[RecordKind, list[AnnotatedField]]:
    """The kind of a record class and the fields that are part of its value.

    *cls* is the class of *annotation*, which may be `Config[int]`; *inside* has its type variables bound. It raises
    Refused if instances cannot be taken apart and rebuilt.
    """
    if is_declared(cls):
        if inside.subject != "parameter":
            raise inside.refuse(annotation, *_NO_OBJECT)
        evaluated = [(part, inside.below(part[0], part[2]).evaluated(part[1])) for part in declared_fields(cls)]
        return "object", [part for part, hint in evaluated if typing.ClassVar not in {hint, typing.get_origin(hint)}]
    if dataclasses.is_dataclass(cls):
        return "dataclass", _dataclass_fields(annotation, cls, inside)
    if typing.is_typeddict(cls):
        hints = cls.__annotations__
        if missing := sorted(name for name, hint in hints.items() if _may_be_missing(cls, name, hint, inside)):
            why = f"a TypedDict whose key {missing[0]!r} may be missing"
            raise inside.refuse(annotation, why, "Make it total, with T | None where there may be no value.")
        return "typeddict", [(name, hint, cls) for name, hint in hints.items()]
    hints = {name: hint for name, hint, _ in annotated_fields(cls)}
    if unknown := [name for name in cls._fields if name not in hints]:
        why = f"a namedtuple whose field {unknown[0]!r} has no annotation"
        raise inside.refuse(annotation, why, "Use typing.NamedTuple.")
    _check_own_methods(annotation, cls, inside, cls._fields, {})
    return "namedtuple", [(name, hints[name], cls) for name in cls._fields]


def _may_be_missing(cls: Any, name: str, hint: object, inside: Place) -> bool:
    """True for a key that is not required; in a string, TypedDict itself does not see what marks it."""
    evaluated = inside.below(name, cls).evaluated(hint)
    mark = getattr(typing.get_origin(evaluated), "_name", "")
    return mark == "NotRequired" or (name in cls.__optional_keys__ and mark != "Required")


def _dataclass_fields(annotation: object, cls: Any, place: Place) -> list[AnnotatedField]:
    if not cls.__dataclass_params__.frozen:
        why = "a mutable dataclass, whose changes an op could not give back"
        raise place.refuse(annotation, why, f"Declare it @dataclass(frozen=True) class {cls.__name__}.")
    for name, pseudo_field in cls.__dataclass_fields__.items():
        if pseudo_field._field_type.name == "_FIELD_INITVAR":  # noqa: SLF001
            why = f"whose InitVar {name!r} cannot be read back from an instance"
            raise place.refuse(annotation, why, "Make it a field.")
    fields = [part for part in dataclasses.fields(cls) if part.init]
    _check_own_methods(annotation, cls, place, (), {part.name: None for part in fields})
    owners = {name: owner for name, _, owner in annotated_fields(cls)}
    return [(part.name, part.type, owners[part.name]) for part in fields]


def _check_own_methods(
    annotation: object, cls: type, place: Place, args: tuple[str, ...], kwargs: dict[str, None]
) -> None:
    """Raise for a hand-written `__new__` or `__init__` that cannot be called with the fields."""
    for method in ("__init__", "__new__"):
        if not _defines(cls, method) or (method == "__init__" and _has_generated_init(cls)):
            continue
        signature = inspect.signature(getattr(cls, method))
        try:
            signature.bind(cls, *args, **kwargs)
        except TypeError:
            taken, fields = ", ".join([*signature.parameters][1:]), ", ".join([*args, *kwargs])
            why = f"whose {method} takes ({taken}) where its fields are ({fields})"
            kind = "dataclass" if dataclasses.is_dataclass(cls) else "NamedTuple"
            fix = f"Let the {kind} write {method}, or give it the fields as parameters."
            raise place.refuse(annotation, why, fix) from None


def is_plain(cls: Any) -> bool:
    """True if making an instance of a dataclass or a named tuple only stores its fields, and reading one returns it.

    A dataclass stores them in its `__dict__`.
    """
    if _defines(type(cls), "__call__") or _defines(cls, "__getattribute__"):
        return False
    if issubclass(cls, tuple):
        are_items = all(isinstance(inspect.getattr_static(cls, name), _ITEM) for name in cls._fields)
        made_by = getattr(cls.__new__, "__globals__", {}).get("__name__", "")
        return are_items and made_by.startswith("namedtuple_") and not _defines(cls, "__init__")
    return (
        _has_generated_init(cls)
        and not hasattr(cls, "__post_init__")
        and not _defines(cls, "__new__")
        and cls.__dictoffset__ != 0
        # A field that is a descriptor, such as a slot, is not kept in the `__dict__` of instances.
        and all(
            part.init and not any(hasattr(vars(base).get(part.name), "__set__") for base in cls.__mro__)
            for part in dataclasses.fields(cls)
        )
    )


def _has_generated_init(cls: type) -> bool:
    """True if the dataclass decorator wrote the `__init__`, whose file name is then `<string>`."""
    code = getattr(vars(cls).get("__init__"), "__code__", None)
    # A class of a `python -c` program has the file name <string> too, but not a qualified name in dataclasses.
    return code is not None and code.co_filename == "<string>" and code.co_qualname.startswith("__create_fn__.")


def _defines(cls: type, name: str) -> bool:
    """True if *cls* or a base that is not a builtin class defines *name*."""
    return any(name in vars(base) for base in cls.__mro__ if base.__module__ != "builtins")


# A Scalar is annotated as a union, whose first class is that of SymInt.
_BY_CLASS: dict[object, str] = {cls: name for name, (_, (cls, *_)) in SCHEMA_TYPES.items() if name != "Scalar"}
_BY_CLASS[torch.nn.Parameter] = "Tensor"
_NUMBERS = {int, float, bool, complex}
_MAX_OF_ONE_CLASS = 8
"""The limit of depth: `class Chain(Generic[T])` with a field `rest: Chain[list[T]]` contains itself without end."""
_LISTS = {list, collections.abc.Sequence}
_LIST_ELEMENTS = {"Tensor", "SymInt", "float", "bool", "str", "Scalar"}
_WRITTEN_AS_TEXT = {torch.dtype, torch.device, torch.layout, torch.memory_format}

_ADVICE: dict[object, str] = {
    set: "Use a sorted tuple[T, ...].",
    frozenset: "Use a sorted tuple[T, ...].",
    bytes: "Use str, or a uint8 Tensor.",
    bytearray: "Use str, or a uint8 Tensor.",
    types.NoneType: "Leave the parameter out.",
    object: "Say which type it has.",
    typing.Any: "Say which type it has.",
    list: "Say what it holds, for example list[int].",
    tuple: "Say what it holds, for example tuple[int, int] or tuple[int, ...].",
    collections.abc.Sequence: "Say what it holds, for example Sequence[int].",
    collections.abc.MutableSequence: "Use Sequence[T]: the op gets a copy.",
    collections.abc.Iterable: "Use Sequence[T].",
    collections.deque: "Use Sequence[T].",
    torch.nn.Module: "Pass its tensors, or a frozen dataclass of them.",
    collections.abc.Callable: "Register one op for each function, or choose between them by a Literal or an Enum.",
}


def lower(annotation: object, place: Place) -> Node:
    """The tree of *annotation*; raises Refused if it, or a part of it, has no flat form."""
    return lower_resolved(place.resolved(annotation)[0], place)


def lower_resolved(annotation: object, place: Place) -> Node:
    """The tree of *annotation*, which `Place.resolved` returned."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in {typing.Union, types.UnionType}:
        return _lower_union(annotation, arguments, place)
    if isinstance(annotation, typing.TypeVar) and annotation.__bound__ is not None:
        return lower(annotation.__bound__, place)
    if not _is_hashable(annotation):
        raise place.refuse(annotation, "which is not a type", "Write a type, such as list[int] for [int].")
    if origin is typing.Literal:
        kept = tuple(value for value in arguments if value is not None)
        schema_type, codec = codecs.literal(kept)
        is_optional = len(kept) < len(arguments)
        return place.leaf(f"{schema_type}?", codecs.optional(codec)) if is_optional else place.leaf(schema_type, codec)
    if ObjectHandle in {origin, annotation}:
        return _lower_handle(annotation, arguments, place)
    if origin in _LISTS and arguments:
        node = _lower_list(annotation, arguments[0], place, as_tuple=False)
        return node if origin is list or not place.outer else _lower_sequence(annotation, node, place)
    if origin is tuple and (arguments or isinstance(annotation, types.GenericAlias)):
        if len(arguments) == 2 and arguments[1] is ...:
            return _lower_list(annotation, arguments[0], place, as_tuple=True)
        items = lower_each([(item, place.below(str(i))) for i, item in enumerate(arguments)])
        return Sequence(place.path, items, show_type(annotation))
    cls = origin or annotation
    if annotation is torch.Generator and place.is_opaque:
        return _lower_handle(annotation, (annotation,), place)
    if annotation in _BY_CLASS:
        return place.leaf(_BY_CLASS[annotation])
    if isinstance(cls, type):
        return _lower_class(annotation, cls, place)
    raise place.refuse(annotation, "which has no flat schema form", _advice(annotation))


def _lower_class(annotation: object, cls: type, place: Place) -> Node:
    if cls is torch.Size:
        return place.leaf("SymInt[]", codecs.SIZE)
    if issubclass(cls, enum.Enum):
        return place.leaf(*codecs.enumeration(cls))
    if is_record(cls):
        return _lower_record(annotation, cls, place)
    if name := opaque_name(cls):
        if not all(part.isidentifier() and part.isascii() for part in name.split(".")):
            why = f"which torch registered as '{name}', a name that no schema can hold"
            raise place.refuse(annotation, why, "Define the class at the top of a module.")
        if place.subject != "parameter" and (why := why_not_returned(cls)):
            raise place.refuse(annotation, why, "Return Tensors or numbers.")
        return place.leaf(schema_type_of(cls, name), codecs.opaque(cls))
    is_distributed = cls.__module__.startswith("torch.distributed.") and cls.__name__ in {"ProcessGroup", "DeviceMesh"}
    if is_distributed or issubclass(cls, (torch.Stream, torch.Event)):
        return _lower_handle(annotation, (annotation,), replace(place, is_opaque=True))
    raise place.refuse(annotation, "which has no flat schema form", _advice(annotation))


def _is_hashable(annotation: object) -> bool:
    try:
        hash(annotation)
    except TypeError:
        return False
    return True


def _lower_union(annotation: object, members: tuple[object, ...], place: Place) -> Node:
    others = tuple(member for member in members if member is not type(None))
    literals = tuple(member for member in others if typing.get_origin(member) is typing.Literal)
    if literals == others:
        values = tuple(value for member in members for value in typing.get_args(member) or (None,))
        return lower(typing.Literal[values], place)
    if set(others) <= _NUMBERS and len(others) > 1:
        return place.leaf("Scalar" if len(others) == len(members) else "Scalar?")
    if len(others) > 1:
        why = f"which is a union of {len(others)} types, and a schema argument has one"
        fix = "a frozen dataclass with one optional field for each."
        if len(members) == 2 and len(literals) == 1 and len(typing.get_args(literals[0])) == 1:
            (other,), (value,) = set(others) - set(literals), typing.get_args(literals[0])
            fix = f"{show_type(other)} | None, with None for {show_literal(value)}, or {fix}"
        raise place.refuse(annotation, why, f"Use {fix}")
    inner = lower(others[0], place)
    if isinstance(inner, Optional):
        return inner
    if isinstance(inner, Leaf):
        # Below a record that may be None, the schema type already allows None, but the codec does not.
        schema_type = inner.schema_type if inner.is_optional else f"{inner.schema_type}?"
        return replace(inner, schema_type=schema_type, codec=codecs.optional(inner.codec), is_padded=False)
    is_some = place.below("is_some").leaf("bool")
    inner = lower(others[0], replace(place, is_optional=True))
    assert not isinstance(inner, (Leaf, Optional))
    return Optional(place.path, is_some, inner)


def _lower_handle(annotation: object, arguments: tuple[object, ...], place: Place) -> Node:
    if not arguments:
        raise place.refuse(annotation, "which does not say of what", "Write ObjectHandle[T], T the object's class.")
    if place.subject != "parameter":
        raise place.refuse(annotation, *_NO_OBJECT)
    if problem := unfit(arguments[0]):
        raise place.refuse(annotation, *problem)
    leaf = place.leaf("SymInt", handle(arguments[0]))
    record = None if place.is_opaque else _lower_object(arguments[0], place)
    if record is None:
        return leaf
    # An object is either a handle or taken apart, so a part of one is not a handle.
    return record if place.is_fixed else replace(record, handle=leaf)


def _lower_object(annotation: object, place: Place) -> Record | None:
    """The tree of an object that is taken apart; None for an object that has only a handle."""
    resolved, _ = place.resolved(annotation)
    cls = typing.get_origin(resolved) or resolved
    if not isinstance(cls, type) or not is_record(cls) or typing.is_typeddict(cls):
        return None
    try:
        record = _lower_record(resolved, cls, replace(place, is_fixed=True))
    except Refused:
        if is_declared(cls):
            raise
        return None
    holds_tensors = is_declared(cls) or any(leaf.is_tensor for leaf in leaves(record))
    return record if holds_tensors else None


def _lower_list(annotation: object, element: object, place: Place, *, as_tuple: bool) -> Node:
    resolved, _ = place.resolved(element)
    if resolved in (torch.Tensor | None, typing.Optional[torch.Tensor]):  # noqa: UP045
        values = place.leaf("Tensor[]")
        return MaskedList(place.path, values, place.below("present").leaf("bool[]"), show_type(annotation), as_tuple)
    if resolved is complex:
        return place.leaf("float[]", codecs.PAIRS_AS_TUPLE if as_tuple else codecs.COMPLEX_PAIRS)
    if _is_record(resolved):
        fix = "Use one frozen dataclass with a list for each field."
        raise place.refuse(annotation, "a list of records, which has no flat schema form", fix)
    # A list of objects has no flat form, but a list of their handles has one.
    inner = lower(element, replace(place, is_optional=False, is_opaque=True))
    if isinstance(inner, Leaf):
        if resolved in _WRITTEN_AS_TEXT:
            codec = codecs.torch_constant_text(resolved)
            return place.leaf("str[]", codecs.listed(codec, as_tuple=as_tuple))
        if inner.schema_type in _LIST_ELEMENTS or inner.is_opaque:
            return place.leaf(f"{inner.schema_type}[]", codecs.listed(inner.codec, as_tuple=as_tuple))
    why = "and torch has no list of such elements that can be exported"
    fix = "Use one list for each part, or a Tensor."
    if typing.get_origin(resolved) in {typing.Union, types.UnionType}:
        fix = "Use two lists, the values and one bool for each that says whether it is there."
    raise place.refuse(annotation, why, fix)


def _lower_sequence(annotation: object, node: Node, place: Place) -> Node:
    """`Sequence[T]` in a record, whose instance would differ if a tuple arrived as a list."""
    assert isinstance(node, (Leaf, MaskedList))
    if place.subject == "parameter":
        return ListOrTuple(place.path, place.below("is_tuple").leaf("bool"), node, show_type(annotation))
    return replace(node, codec=codecs.AS_LIST) if isinstance(node, Leaf) and node.codec == IDENTITY else node


def _is_record(element: object) -> bool:
    """True for a record class, generic or not, and for an optional one."""
    members = [member for member in typing.get_args(element) if member is not types.NoneType]
    if typing.get_origin(element) in {typing.Union, types.UnionType} and len(members) == 1:
        return _is_record(unwrap(members[0])[0])
    cls = typing.get_origin(element) or element
    return isinstance(cls, type) and is_record(cls)


def _lower_record(annotation: object, cls: type, place: Place) -> Record:
    around = [outer for outer in place.outer if (typing.get_origin(outer) or outer) is cls]
    if annotation in around or len(around) > _MAX_OF_ONE_CLASS:
        raise place.refuse(
            annotation, "a record that contains itself, so it has no fixed number of leaves", "Use a Tensor or lists."
        )
    inside = replace(place, outer=(*place.outer, annotation), bound=type_arguments(annotation))
    kind, annotated = fields_of(annotation, cls, inside)
    if kind == "object":
        inside = replace(inside, is_fixed=True)
    parts = lower_each([(hint, inside.below(name, owner)) for name, hint, owner in annotated])
    fields = tuple(Field(name, node) for (name, _, _), node in zip(annotated, parts, strict=True))
    return Record(place.path, cls, kind, fields, show_type(annotation), kind != "typeddict" and is_plain(cls))


def lower_each(annotations: list[tuple[object, Place]]) -> tuple[Node, ...]:
    """The trees of several annotations; raises Refused with the problems of all that have no flat form."""
    parts: list[Node] = []
    problems: list[Problem] = []
    for annotation, place in annotations:
        try:
            parts.append(lower(annotation, place))
        except Refused as refused:
            problems += refused.problems
    if problems:
        raise Refused(*problems)
    return tuple(parts)


def _advice(annotation: object) -> str:
    cls, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if isinstance(annotation, typing.TypeVar):
        name = annotation.__name__
        fix = f"Give the type variable a type, as in Cfg[int] for a class Cfg(Generic[{name}])"
        return f"{fix}, or a bound, as in TypeVar('{name}', bound=Tensor)."
    if cls in {
        dict,
        collections.abc.Mapping,
        collections.abc.MutableMapping,
        collections.defaultdict,
        collections.OrderedDict,
    }:
        return f"Use a frozen dataclass, or tuple[{show_type(arguments[1]) if len(arguments) == 2 else 'T'}, ...]."
    if isinstance(cls, type) and cls is not object:
        for base in cls.__mro__:
            if base in _ADVICE and base is not object:
                return _ADVICE[base]
        if cls.__module__ == "numpy":
            return "Pass a Tensor: torch.from_numpy() shares its memory."
        if issubclass(cls, torch.Tensor):
            return "Annotate it Tensor; a subclass may be passed."
        parts = f"Use a frozen dataclass with the parts of {cls.__name__} that the op needs"
        return f"{parts}, or ObjectHandle[{cls.__name__}] for the object itself."
    return _ADVICE.get(cls) or "See the type table in the documentation of magi-opschema."


_NO_OBJECT = (
    "and an op returns no objects but those of classes that torch has registered as opaque",
    "Return Tensors or numbers.",
)
RETURNABLE = {"Tensor", "Tensor?", "Tensor[]", "SymInt", "float", "bool", "Scalar"}


def lower_returns(annotation: object, scope: Scope) -> Node | None:
    """The tree of a return annotation; None for `-> None`. It raises Refused for what an op cannot return."""
    if annotation is inspect.Signature.empty:
        fix = "Annotate it, for example -> Tensor, or -> None for an op that only writes into its arguments."
        raise Refused(Problem("", f"the return value has no annotation, and the schema needs its type. {fix}"))
    if annotation is None or annotation is types.NoneType or annotation == "None":
        return None
    place = Place((), scope, "the return value")
    tree = lower(annotation, place.below("output"))
    for part in nodes(tree):
        if isinstance(part, Optional):
            below = f"where '{dotted(part.path)}' may be None as a whole"
            what = "a record that may be None" if part is tree else below
            why = f"{what}, and an op returns the same number of outputs at every call"
            raise place.refuse(annotation, why, "Return a record of T | None.")
    for leaf in leaves(tree):
        if not leaf.is_opaque and (leaf.schema_type not in RETURNABLE or not leaf.codec.keeps_value):
            why = f"and an op cannot return a {leaf.schema_type.rstrip('?')}"
            raise place.refuse(
                annotation, why, "Return Tensors, numbers, None, or tuples or frozen dataclasses of these."
            )
    return tree
