# SPDX-License-Identifier: Apache-2.0
"""Signatures that have no schema, and the sentence that each must give: what, where, why and the fix."""

from __future__ import annotations

import inspect
import re
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import InitVar, dataclass, make_dataclass
from types import SimpleNamespace
from typing import Annotated, Any, Generic, Literal, NamedTuple, NotRequired, Optional, Protocol, Self, TypedDict

import numpy as np
import pytest
import torch
from _signatures import Box, Inner, Mode, T, located, returning, shown, with_annotation
from magi_opschema import ObjectHandle, lower_signature, magi_register_custom_op, see_through_object
from magi_opschema.errors import SignatureError
from torch import Tensor


Mutable = make_dataclass("Mutable", [("scale", float)])
Betas = make_dataclass("Betas", [("betas", dict[str, float])], frozen=True)
Opt: Any = make_dataclass("Opt", [("opt", Betas)], frozen=True)
WithInitVar = make_dataclass("WithInitVar", [("x", float), ("factor", InitVar[float])], frozen=True)
Unresolved = make_dataclass("Unresolved", [("value", "NotThere")], frozen=True)


class Partial(TypedDict, total=False):
    height: int


class BadPoint(NamedTuple):
    x: bytes


class Two(NamedTuple):
    x: int
    y: int


class Unchecked(Protocol):
    def run(self) -> None: ...


@see_through_object
class Tabled:
    weight: Tensor
    table: dict[str, int]


class OneMissing(TypedDict):
    height: int
    width: NotRequired[int]


@dataclass(frozen=True)
class Ping:
    pong: Pong | None


@dataclass(frozen=True)
class Pong:
    ping: Ping | None


@dataclass(frozen=True)
class Growing(Generic[T]):
    rest: Growing[list[T]] | None


@dataclass(frozen=True)
class OwnInit:
    x: float

    def __init__(self, text: str) -> None:
        object.__setattr__(self, "x", float(text))


class NarrowNew(Two):
    def __new__(cls, x: int) -> Self:
        return super().__new__(cls, x, x)


Untyped = namedtuple("Untyped", ["a", "b"])  # noqa: PYI024
HANDLE: Any = ObjectHandle
NO_FORM = "which has no flat schema form"
NO_LIST = "and torch has no list of such elements that can be exported"


# annotation of the parameter `value`, the whole sentence behind "parameter 'value…'"
ANNOTATIONS: list[tuple[object, str]] = [
    (Mutable, ("'value' has type Mutable, a mutable dataclass, whose changes an op could not give back. "
              "Declare it @dataclass(frozen=True) class Mutable.")),
    (dict, f"'value' has type dict, {NO_FORM}. Use a frozen dataclass, or tuple[T, ...]."),
    (Mapping[str, Tensor], f"'value' has type Mapping[str, Tensor], {NO_FORM}. Use a frozen dataclass"),
    (Opt, f"'value.opt.betas' has type dict[str, float], {NO_FORM}. Use a frozen dataclass, or tuple[float, ...]."),
    (list[Inner], ("'value' has type list[Inner], a list of records, which has no flat schema form. "
                  "Use one frozen dataclass with a list for each field.")),
    (tuple[Opt | None, ...], "'value' has type tuple[Opt | None, ...], a list of records"),
    (set[int], f"'value' has type set[int], {NO_FORM}. Use a sorted tuple[T, ...]."),
    (Any, f"'value' has type Any, {NO_FORM}. Say which type it has."),
    (object, f"'value' has type object, {NO_FORM}. Say which type it has."),
    (Callable[[int], int], (f"'value' has type Callable[[int], int], {NO_FORM}. Register one op for each function, "
                           "or choose between them by a Literal or an Enum.")),
    (list, f"'value' has type list, {NO_FORM}. Say what it holds, for example list[int]."),
    (tuple, f"'value' has type tuple, {NO_FORM}. Say what it holds, for example tuple[int, int] or tuple[int, ...]."),
    (Sequence, f"'value' has type Sequence, {NO_FORM}. Say what it holds, for example Sequence[int]."),
    (Iterable[int], f"'value' has type Iterable[int], {NO_FORM}. Use Sequence[T]."),
    (MutableSequence[int], f"'value' has type MutableSequence[int], {NO_FORM}. Use Sequence[T]: the op gets a copy."),
    (Optional, f"'value' has type Optional, {NO_FORM}. See the type table in the documentation of magi-opschema."),
    (bytes, f"'value' has type bytes, {NO_FORM}. Use str, or a uint8 Tensor."),
    (np.ndarray, f"'value' has type ndarray, {NO_FORM}. Pass a Tensor: torch.from_numpy() shares its memory."),
    (torch.nn.Linear, f"'value' has type Linear, {NO_FORM}. Pass its tensors, or a frozen dataclass of them."),
    (None, f"'value' has type None, {NO_FORM}."),
    (SimpleNamespace, (f"'value' has type SimpleNamespace, {NO_FORM}. "
                      "Use a frozen dataclass with the parts of SimpleNamespace that the op needs, "
                      "or ObjectHandle[SimpleNamespace] for the object itself.")),
    (int | str, ("'value' has type int | str, which is a union of 2 types, and a schema argument has one. "
                "Use a frozen dataclass with one optional field for each.")),
    (int | Literal["auto"],
     ("'value' has type int | Literal['auto'], which is a union of 2 types, and a schema argument has one. "
      "Use int | None, with None for 'auto', or a frozen dataclass with one optional field for each.")),
    (int | Literal["auto"] | None, "which is a union of 2 types, and a schema argument has one. Use a frozen datac"),
    (int | Literal["auto", "off"], "which is a union of 2 types, and a schema argument has one. Use a frozen datac"),
    (Tensor | float | None, "'value' has type Tensor | float | None, which is a union of 2 types"),
    (list[int | None], (f"'value' has type list[int | None], {NO_LIST}. "
                       "Use two lists, the values and one bool for each that says whether it is there.")),
    (list[list[int]], f"'value' has type list[list[int]], {NO_LIST}. Use one list for each part, or a Tensor."),
    (list[tuple[int, int]], f"'value' has type list[tuple[int, int]], {NO_LIST}."),
    (Ping, ("'value.pong.ping' has type Ping, a record that contains itself, so it has no fixed number of leaves. "
           "Use a Tensor or lists.")),
    (WithInitVar, ("'value' has type WithInitVar, whose InitVar 'factor' cannot be read back from an instance. "
                  "Make it a field.")),
    (OwnInit, ("'value' has type OwnInit, whose __init__ takes (text) where its fields are (x). "
              "Let the dataclass write __init__, or give it the fields as parameters.")),
    (NarrowNew, ("'value' has type NarrowNew, whose __new__ takes (x) where its fields are (x, y). "
                "Let the NamedTuple write __new__, or give it the fields as parameters.")),
    (Partial, "'value' has type Partial, a TypedDict whose key 'height' may be missing."),
    (OneMissing, "'value' has type OneMissing, a TypedDict whose key 'width' may be missing."),
    (Growing[int], "has type Growing[list[list[list["),
    (Untyped, "'value' has type Untyped, a namedtuple whose field 'a' has no annotation. Use typing.NamedTuple."),
    (BadPoint, f"'value.x' has type bytes, {NO_FORM}."),
    (HANDLE, "'value' has type ObjectHandle, which does not say of what. Write ObjectHandle[T], T the object's class."),
    (HANDLE[int], "a handle of something that a schema takes as it is. Annotate it int."),
    (HANDLE[Tensor], "a handle of something that a schema takes as it is. Annotate it Tensor."),
    (HANDLE[Inner | None], "a handle of something that may be None. Write ObjectHandle[T] | None."),
    (HANDLE[Unchecked], "of a protocol that no object can be checked against. Decorate it @runtime_checkable."),
    (HANDLE[T], "a handle of something that is not a class. Name the class of the object."),
    (HANDLE[Tabled], f"'value.table' has type dict[str, int], {NO_FORM}."),
    (list[Tabled], "'value' has type list[Tabled], a list of records"),
    (T, (f"'value' has type T, {NO_FORM}. Give the type variable a type, as in Cfg[int] for a class Cfg(Generic[T]), "
        "or a bound, as in TypeVar('T', bound=Tensor).")),
    (Box, f"'value.value' has type T, {NO_FORM}. Give the type variable a type"),
    (Box[bytes], f"'value.value' has type bytes, {NO_FORM}."),
    (Annotated[bytes, "raw"], f"'value' has type bytes, {NO_FORM}."),
    (tuple[int, bytes], f"'value.1' has type bytes, {NO_FORM}."),
    ([int], "'value' has type [<class 'int'>], which is not a type. Write a type, such as list[int] for [int]."),
    (5, f"'value' has type 5, {NO_FORM}."),
    (len, f"'value' has type len, {NO_FORM}."),
]  # fmt: skip


UNRESOLVED: list[tuple[object, str]] = [
    ("NotThere", ("the annotation 'NotThere' of parameter 'value' could not be evaluated: name 'NotThere' is not "
                 "defined. Import what it names where the op is defined, also at run time, not only under "
                 "TYPE_CHECKING.")),
    ("list[", "the annotation 'list[' of parameter 'value' could not be evaluated: "),
    ("1 / 0", "the annotation '1 / 0' of parameter 'value' could not be evaluated: division by zero."),
    (Unresolved, "the annotation 'NotThere' of parameter 'value.value' could not be evaluated"),
]  # fmt: skip
BelowA = make_dataclass("BelowA", [("b", Tensor)], frozen=True)
Clashing = make_dataclass("Clashing", [("a__b", Tensor), ("a", BelowA)], frozen=True)


# return annotation, sentence
RETURNS: list[tuple[object, str]] = [
    (inspect.Signature.empty, ("the return value has no annotation, and the schema needs its type. "
                              "Annotate it, for example -> Tensor, or -> None")),
    (dict[str, Tensor], f"the return value 'output' has type dict[str, Tensor], {NO_FORM}."),
    (Inner | None, ("the return value has type Inner | None, a record that may be None, and an op returns the same "
                   "number of outputs at every call. Return a record of T | None.")),
    (tuple[Tensor, Inner | None],
     ("the return value has type tuple[Tensor, Inner | None], where 'output.1' may be None as a whole, and an op "
      "returns the same number of outputs at every call. Return a record of T | None.")),
    (str, ("the return value has type str, and an op cannot return a str. "
          "Return Tensors, numbers, None, or tuples or frozen dataclasses of these.")),
    (torch.dtype, "and an op cannot return a ScalarType."),
    (complex, "and an op cannot return a complex."),
    (list[int], "the return value has type list[int], and an op cannot return a SymInt[]."),
    (Mode, "the return value has type Mode, and an op cannot return a str."),
    (Any, "the return value 'output' has type Any"),
    (HANDLE[Inner], "has type ObjectHandle[Inner], and an op returns no objects but those of classes that torch has"),
    (Tabled, "has type Tabled, and an op returns no objects but those of classes that torch has reg"),
    ("NotThere", "the annotation 'NotThere' of the return value 'output' could not be evaluated"),
    (Clashing,
     "'output.a__b' and 'output.a.b' have the same flat name 'output__a__b'. Rename one."),
]  # fmt: skip


@pytest.mark.parametrize(("annotation", "sentence"), [*ANNOTATIONS, *UNRESOLVED], ids=shown)
def test_annotation_is_refused_at_decoration(ns: str, annotation: object, sentence: str) -> None:
    body = with_annotation(annotation)
    with pytest.raises(SignatureError, match=re.escape(sentence)) as caught:
        magi_register_custom_op(f"{ns}::op")(body)
    message = str(caught.value)
    assert message.startswith(f"{ns}::op: ")
    assert message.endswith(located(body))
    assert "0x" not in message
    assert caught.value.function == f"{ns}::op"
    assert all(problem.path.startswith("value") for problem in caught.value.problems)
    assert not torch._C._jit_get_schemas_for_operator(f"{ns}::op")


@pytest.mark.parametrize(("annotation", "sentence"), RETURNS, ids=shown)
def test_return_annotation_is_refused_at_decoration(ns: str, annotation: object, sentence: str) -> None:
    body = returning(annotation)
    with pytest.raises(SignatureError, match=re.escape(sentence)) as caught:
        magi_register_custom_op(f"{ns}::op")(body)
    assert str(caught.value).endswith(located(body))


Nothing = make_dataclass("Nothing", [], frozen=True)
HasIsSomeRecord = make_dataclass("HasIsSomeRecord", [("is_some", Nothing)], frozen=True)
MANY_LISTS = make_dataclass("MANY_LISTS", [(f"t{i}", list[Tensor]) for i in range(64)], frozen=True)


# a function of `x: Tensor` and these parameters, sentence of the SignatureError
SIGNATURES: list[tuple[str, str]] = [
    ("*rest: Tensor", ("'*rest' takes any number of values, and a schema has a fixed number of arguments. "
                       "Use a list or tuple[T, ...] parameter.")),
    ("**options: int", "'**options' takes any names, and a schema has fixed names. Use a frozen dataclass."),
    ("value: int, /, y: int",
     "parameter 'value' is positional-only, and every schema argument has a name. Remove the '/'."),
    ("value", ("parameter 'value' has no annotation, and the schema needs its type. "
               "Annotate it, for example value: Tensor.")),
    ("async def fn(x: Tensor) -> Tensor: return x",
     "is a coroutine or a generator, and an op returns when it is done. Write a plain function."),
    ("def fn(x: Tensor) -> Iterable[Tensor]: yield x", "is a coroutine or a generator"),
    ("async def fn(x: Tensor) -> Iterable[Tensor]: yield x", "is a coroutine or a generator"),
    ("cfg: Inner, cfg__scale: float", "'cfg.scale' and 'cfg__scale' have the same flat name 'cfg__scale'. Rename one."),
    ("cfg: Inner | None, cfg__is_some: bool",
     "'cfg.is_some' and 'cfg__is_some' have the same flat name 'cfg__is_some'. Rename one."),
    ("cfg: HasIsSomeRecord | None", ("the field 'cfg.is_some' has the flat name 'cfg__is_some', that of the "
     "bool that says whether 'cfg' is None. Rename the field.")),
    ("größe: int, gru00f6u00dfe: int",
     "'größe' and 'gru00f6u00dfe' have the same flat name 'gru00f6u00dfe'. Rename one."),
    ("n: int = 'three'", ("the default of 'n' is 'three' (str), which the schema type SymInt does not take. "
                          "Change the default or the annotation.")),
    ("bias: Tensor = None", ("the default of 'bias' is None (NoneType), which the schema type Tensor does not take. "
                             "Annotate it T | None.")),
    ("cfg: Inner = Inner(scale='big')",
     "the default of 'cfg.scale' is 'big' (str), which the schema type float does not take."),
    ("def fn(cfg: MANY_LISTS, generator: torch.Generator) -> Tensor: ...",
     ("the signature has 64 lists of Tensors and 1 other values that cannot share an argument, and torch registers no "
      "schema of more than 64 arguments. Pass some as one list.")),
]  # fmt: skip


def defined(text: str) -> Callable[..., Any]:
    """The function whose definition, or whose parameters after `x`, are *text*."""
    namespace = dict(globals())
    whole = text if "def " in text else f"def fn(x: Tensor, {text}) -> Tensor: return x"
    exec(compile(whole, "signatures.py", "exec", dont_inherit=True), namespace)
    fn: Callable[..., Any] = namespace["fn"]
    return fn


@pytest.mark.parametrize(("text", "sentence"), SIGNATURES, ids=[text for text, _ in SIGNATURES])
def test_signature_is_refused_at_decoration(ns: str, text: str, sentence: str) -> None:
    fn = defined(text)
    with pytest.raises(SignatureError, match=re.escape(sentence)) as caught:
        magi_register_custom_op(f"{ns}::op")(fn)
    assert str(caught.value).startswith(f"{ns}::op: ")
    assert located(fn) in str(caught.value)
    with pytest.raises(SignatureError, match=re.escape(sentence)) as caught:
        lower_signature(fn)
    assert str(caught.value).startswith("fn(): ")


def test_all_bad_places_are_in_one_error(ns: str) -> None:
    @dataclass(frozen=True)
    class Bad:
        table: dict[str, int]
        fine: int
        raw: bytes

    def body(x: Tensor, cfg: Bad, *rest: int, pick: set[int]) -> str:
        return ""

    with pytest.raises(SignatureError) as caught:
        magi_register_custom_op(f"{ns}::op")(body)
    assert [problem.path for problem in caught.value.problems] == ["cfg.table", "cfg.raw", "rest", "pick", ""]
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{ns}::op: 5 places of the signature have no flat schema form {located(body)}:"
    assert lines[1] == (
        "  - parameter 'cfg.table' has type dict[str, int], which has no flat schema form. "
        "Use a frozen dataclass, or tuple[int, ...]."
    )
    assert [line.split("'")[1] for line in lines[1:5]] == ["cfg.table", "cfg.raw", "*rest", "pick"]
    assert lines[5].startswith("  - the return value has type str")
