# SPDX-License-Identifier: Apache-2.0
"""Bad inputs, and the sentence that each must give: what, where, why and the fix."""

from __future__ import annotations

import builtins
import enum
import inspect
import re
import typing
from collections import namedtuple
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import InitVar, dataclass, make_dataclass
from types import SimpleNamespace
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, Optional, TypedDict, TypeVar
from unittest import mock

import numpy as np
import pytest
import torch
from magi_opschema import (
    annotate,
    errors,
    lower_signature,
    magi_register_custom_op,
    op_def,
    opcheck,
    register_autocast,
    register_kernel,
    register_sharding,
    register_vmap,
)
from magi_opschema.errors import (
    ArgumentError,
    ArgumentValueError,
    DuplicateOpError,
    OpNameError,
    OpSchemaError,
    OptionError,
    ReturnValueError,
    RuleError,
    SignatureError,
    UnknownOpError,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.types import Number


def shown(value: object) -> str:
    """A test id: the same in every process, so without addresses."""
    return re.sub(r" at 0x[0-9a-f]+| id='\d+'", "", str(value))[:60]


T = TypeVar("T")
X = torch.arange(3.0)
Op = Callable[..., Any]


class Mode(enum.Enum):
    RMS = "rms"
    LAYER = "layer"


class Level(enum.Enum):
    LOW = 1
    HIGH = 2.5


@dataclass(frozen=True)
class Inner:
    scale: float = 1.0
    mode: Literal["rms", "layer"] = "rms"


@dataclass(frozen=True)
class Cfg:
    inner: Inner = Inner()
    level: Level = Level.LOW


@dataclass
class Mutable:
    scale: float


@dataclass(frozen=True)
class HoldsMutable:
    inner: Mutable


@dataclass(frozen=True)
class Betas:
    betas: dict[str, float]


@dataclass(frozen=True)
class Opt:
    opt: Betas


@dataclass(frozen=True)
class Tree:
    left: Tree | None
    value: float


@dataclass(frozen=True)
class Chain:
    links: list[Chain]


@dataclass(frozen=True)
class Ping:
    pong: Pong | None


@dataclass(frozen=True)
class Pong:
    ping: Ping | None


@dataclass(frozen=True)
class WithInitVar:
    x: float
    factor: InitVar[float]


@dataclass(frozen=True)
class OwnInit:
    x: float

    def __init__(self, text: str) -> None:
        object.__setattr__(self, "x", float(text))


@dataclass(frozen=True)
class NarrowInit:
    x: float
    y: float = 0.0

    def __init__(self, x: float) -> None:
        object.__setattr__(self, "x", x)


@dataclass(frozen=True)
class Box(Generic[T]):
    value: T


@dataclass(frozen=True)
class Growing(Generic[T]):
    rest: Growing[list[T]] | None


@dataclass(frozen=True)
class Unresolved:
    value: NotThere  # type: ignore[name-defined]  # noqa: F821


class Partial(TypedDict, total=False):
    height: int


class OneMissing(TypedDict):
    height: int
    width: NotRequired[int]


class Sizes(TypedDict):
    height: int
    width: int


class Point(NamedTuple):
    x: float
    y: float


class BadPoint(NamedTuple):
    x: bytes


Untyped = namedtuple("Untyped", ["a", "b"])  # noqa: PYI024

NO_FORM = "which has no flat schema form"
NO_LIST = "and torch has no list of such elements that can be exported"


# annotation of the parameter `value`, the whole sentence behind "parameter 'value…'"
ANNOTATIONS: list[tuple[object, str]] = [
    (Mutable, ("'value' has type Mutable, a mutable dataclass, whose changes an op could not give back. "
              "Declare it @dataclass(frozen=True) class Mutable.")),
    (HoldsMutable, "'value.inner' has type Mutable, a mutable dataclass"),
    (dict, f"'value' has type dict, {NO_FORM}. Use a frozen dataclass, or tuple[T, ...]."),
    (dict[str, float], f"'value' has type dict[str, float], {NO_FORM}. Use a frozen dataclass, or tuple[float, ...]."),
    (Mapping[str, Tensor], f"'value' has type Mapping[str, Tensor], {NO_FORM}. Use a frozen dataclass"),
    (Opt, f"'value.opt.betas' has type dict[str, float], {NO_FORM}. Use a frozen dataclass, or tuple[float, ...]."),
    (list[Inner], ("'value' has type list[Inner], a list of records, which has no flat schema form. "
                  "Use one frozen dataclass with a list for each field.")),
    (tuple[Inner, ...], "'value' has type tuple[Inner, ...], a list of records"),
    (list[Betas], "'value' has type list[Betas], a list of records"),
    (Sequence[Mutable], "'value' has type Sequence[Mutable], a list of records"),
    (tuple[Opt | None, ...], "'value' has type tuple[Opt | None, ...], a list of records"),
    (list[Box[bytes]], "'value' has type list[Box[bytes]], a list of records"),
    (list[Partial], "'value' has type list[Partial], a list of records"),
    (set[int], f"'value' has type set[int], {NO_FORM}. Use a sorted tuple[T, ...]."),
    (frozenset[str], f"'value' has type frozenset[str], {NO_FORM}. Use a sorted tuple[T, ...]."),
    (Any, f"'value' has type Any, {NO_FORM}. Say which type it has."),
    (object, f"'value' has type object, {NO_FORM}. Say which type it has."),
    (Callable[[int], int], (f"'value' has type Callable[[int], int], {NO_FORM}. Register one op for each function, "
                           "or choose between them by a Literal or an Enum.")),
    (typing.Callable, f"'value' has type Callable, {NO_FORM}. Register one op for each function"),
    (list, f"'value' has type list, {NO_FORM}. Say what it holds, for example list[int]."),
    (tuple, f"'value' has type tuple, {NO_FORM}. Say what it holds, for example tuple[int, int] or tuple[int, ...]."),
    (typing.List, f"'value' has type list, {NO_FORM}. Say what it holds, for example list[int]."),  # noqa: UP006
    (typing.Tuple, f"'value' has type tuple, {NO_FORM}. Say what it holds"),  # noqa: UP006
    (Sequence, f"'value' has type Sequence, {NO_FORM}. Say what it holds, for example Sequence[int]."),
    (Iterable[int], f"'value' has type Iterable[int], {NO_FORM}. Use Sequence[T]."),
    (MutableSequence[int], f"'value' has type MutableSequence[int], {NO_FORM}. Use Sequence[T]: the op gets a copy."),
    (Optional, f"'value' has type Optional, {NO_FORM}. See the type table in the documentation of magi-opschema."),
    (bytes, f"'value' has type bytes, {NO_FORM}. Use str, or a uint8 Tensor."),
    (bytearray, f"'value' has type bytearray, {NO_FORM}. Use str, or a uint8 Tensor."),
    (np.ndarray, f"'value' has type ndarray, {NO_FORM}. Pass a Tensor: torch.from_numpy() shares its memory."),
    (np.float32, f"'value' has type float32, {NO_FORM}. Pass a Tensor"),
    (torch.nn.Module, f"'value' has type Module, {NO_FORM}. Pass its tensors, or a frozen dataclass of them."),
    (torch.nn.Linear, f"'value' has type Linear, {NO_FORM}. Pass its tensors, or a frozen dataclass of them."),
    (torch.Size, f"'value' has type Size, {NO_FORM}. Use tuple[int, ...]."),
    (torch.SymInt, f"'value' has type SymInt, {NO_FORM}. Use int: every int of a schema may be symbolic."),
    (None, f"'value' has type None, {NO_FORM}."),
    (SimpleNamespace, (f"'value' has type SimpleNamespace, {NO_FORM}. "
                      "Use a frozen dataclass with the parts of SimpleNamespace that the op needs.")),
    (int | str, ("'value' has type int | str, which is a union of 2 types, and a schema argument has one. "
                "Use a frozen dataclass with one optional field for each.")),
    (Tensor | float | None, "'value' has type Tensor | float | None, which is a union of 2 types"),
    (Inner | Mode, "'value' has type Inner | Mode, which is a union of 2 types"),
    (list[int | None], (f"'value' has type list[int | None], {NO_LIST}. "
                       "Use two lists, the values and one bool for each that says whether it is there.")),
    (list[list[int]], f"'value' has type list[list[int]], {NO_LIST}. Use one list for each part, or a Tensor."),
    (list[Number], f"'value' has type list[int | float | bool], {NO_LIST}."),
    (list[tuple[int, int]], f"'value' has type list[tuple[int, int]], {NO_LIST}."),
    (list[torch.Generator], f"'value' has type list[Generator], {NO_LIST}."),
    (Tree, ("'value.left' has type Tree, a record that contains itself, so it has no fixed number of leaves. "
           "Use a Tensor or lists.")),
    (Chain, "'value.links' has type list[Chain], a list of records"),
    (Ping, "'value.pong.ping' has type Ping, a record that contains itself"),
    (WithInitVar, ("'value' has type WithInitVar, whose InitVar 'factor' cannot be read back from an instance. "
                  "Make it a field.")),
    (OwnInit, ("'value' has type OwnInit, whose __init__ takes (text) where its fields are (x). "
              "Let the dataclass write __init__, or give it the fields as parameters.")),
    (NarrowInit, "'value' has type NarrowInit, whose __init__ takes (x) where its fields are (x, y)."),
    (Partial, "'value' has type Partial, a TypedDict whose key 'height' may be missing."),
    (OneMissing, "'value' has type OneMissing, a TypedDict whose key 'width' may be missing."),
    (Growing[int], "has type Growing[list[list[list["),
    (Untyped, "'value' has type Untyped, a namedtuple whose field 'a' has no annotation. Use typing.NamedTuple."),
    (BadPoint, f"'value.x' has type bytes, {NO_FORM}."),
    (T, f"'value' has type T, {NO_FORM}. Give the type variable a type, as in Cfg[int] for a class Cfg(Generic[T])."),
    (Box, f"'value.value' has type T, {NO_FORM}. Give the type variable a type"),
    (Box[bytes], f"'value.value' has type bytes, {NO_FORM}."),
    (NewType("Table", dict[str, int]), f"'value' has type dict[str, int], {NO_FORM}."),
    (Annotated[bytes, "raw"], f"'value' has type bytes, {NO_FORM}."),
    (tuple[int, bytes], f"'value.1' has type bytes, {NO_FORM}."),
    ([int], "'value' has type [<class 'int'>], which is no type. Write a type, such as list[int] for [int]."),
    ({"a": int}, "'value' has type {'a': <class 'int'>}, which is no type."),
    (5, f"'value' has type 5, {NO_FORM}."),
    (len, f"'value' has type len, {NO_FORM}."),
]  # fmt: skip

UNRESOLVED: list[tuple[object, str]] = [
    ("NotThere", ("the annotation 'NotThere' of parameter 'value' could not be evaluated: name 'NotThere' is not "
                 "defined. Import what it names where the op is defined, also at run time, not only under "
                 "TYPE_CHECKING.")),
    ("list[NotThere]", "the annotation 'list[NotThere]' of parameter 'value' could not be evaluated"),
    ("torch.NotThere", "could not be evaluated: module 'torch' has no attribute 'NotThere'."),
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
    (str, ("the return value has type str, and an op cannot return a str. "
          "Return Tensors, numbers, None, or tuples or frozen dataclasses of these.")),
    (tuple[Tensor, str], "and an op cannot return a str."),
    (torch.dtype, "and an op cannot return a ScalarType."),
    (complex, "and an op cannot return a complex."),
    (list[int], "the return value has type list[int], and an op cannot return a SymInt[]."),
    (Mode, "the return value has type Mode, and an op cannot return a str."),
    (Any, "the return value 'output' has type Any"),
    ("NotThere", "the annotation 'NotThere' of the return value 'output' could not be evaluated"),
    (Clashing,
     "'output.a__b' and 'output.a.b' have the same flat name 'output__a__b'. Rename one."),
]  # fmt: skip


def located(fn: Callable[..., Any]) -> str:
    """The end of every error about *fn*: file and line of its `def`."""
    return f"(test_errors.py:{fn.__code__.co_firstlineno})"


def with_annotation(annotation: object) -> Callable[..., Any]:
    def body(x: Tensor, value: Any) -> Tensor:
        return x * 2

    body.__annotations__["value"] = annotation
    return body


def returning(annotation: object) -> Callable[..., Any]:
    def body(x: Tensor) -> Any:
        return x * 2

    del body.__annotations__["return"]
    if annotation is not inspect.Signature.empty:
        body.__annotations__["return"] = annotation
    return body


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


def plain(x: Tensor) -> Tensor:
    return x * 2


def two_outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x * 3


def scaled(x: Tensor, cfg: Inner) -> Tensor:
    return x * cfg.scale


def writes(x: Tensor, out: Tensor, weights: list[Tensor] | None = None) -> None:
    out.copy_(x)


def star(x: Tensor, *rest: Tensor) -> Tensor:
    return x


def double_star(x: Tensor, **options: int) -> Tensor:
    return x


def positional(x: Tensor, value: int, /, y: int) -> Tensor:
    return x


def unannotated(x: Tensor, value) -> Tensor:  # type: ignore[no-untyped-def]
    return x


async def coroutine(x: Tensor) -> Tensor:
    return x


def generator(x: Tensor) -> Iterator[Tensor]:
    yield x


async def async_generator(x: Tensor) -> AsyncIterator[Tensor]:
    yield x


def clashing(x: Tensor, cfg: Inner, cfg__scale: float) -> Tensor:
    return x


def clashing_some(x: Tensor, cfg: Inner | None, cfg__is_some: bool) -> Tensor:
    return x


@dataclass(frozen=True)
class HasIsSome:
    is_some: bool = True


def is_some_field(x: Tensor, cfg: HasIsSome | None) -> Tensor:
    return x


@dataclass(frozen=True)
class Nothing:
    pass


@dataclass(frozen=True)
class HasIsSomeRecord:
    is_some: Nothing = Nothing()


def is_some_record(x: Tensor, cfg: HasIsSomeRecord | None) -> Tensor:
    return x


def clashing_unicode(x: Tensor, größe: int, gru00f6u00dfe: int) -> Tensor:  # noqa: PLC2401
    return x


def default_of_other_type(x: Tensor, n: int = "three") -> Tensor:  # type: ignore[assignment]
    return x


def default_none(x: Tensor, bias: Tensor = None) -> Tensor:  # type: ignore[assignment]
    return x


def default_list_item(x: Tensor, sizes: Sequence[int] = (1, 2.5)) -> Tensor:  # type: ignore[assignment]
    return x


def default_in_record(x: Tensor, cfg: Inner = Inner(scale="big")) -> Tensor:  # type: ignore[arg-type]
    return x


MANY_LISTS = make_dataclass("MANY_LISTS", [(f"t{i}", list[Tensor]) for i in range(64)], frozen=True)


def many_lists(cfg: MANY_LISTS, generator: torch.Generator) -> Tensor:  # type: ignore[valid-type]
    return torch.ones(1)


# function, sentence of the SignatureError
SIGNATURES: list[tuple[Callable[..., Any], str]] = [
    (star, ("'*rest' takes any number of values, and a schema has a fixed number of arguments. "
           "Use a list or tuple[T, ...] parameter.")),
    (double_star, "'**options' takes any names, and a schema has fixed names. Use a frozen dataclass."),
    (positional, "parameter 'value' is positional-only, and every schema argument has a name. Remove the '/'."),
    (unannotated, ("parameter 'value' has no annotation, and the schema needs its type. "
                  "Annotate it, for example value: Tensor.")),
    (coroutine, "is a coroutine or a generator, and an op returns when it is done. Write a plain function."),
    (generator, "is a coroutine or a generator"),
    (async_generator, "is a coroutine or a generator"),
    (clashing, "'cfg.scale' and 'cfg__scale' have the same flat name 'cfg__scale'. Rename one."),
    (clashing_some, "'cfg.is_some' and 'cfg__is_some' have the same flat name 'cfg__is_some'. Rename one."),
    (is_some_field, "'cfg.is_some' and 'cfg.is_some' have the same flat name 'cfg__is_some'."),
    (is_some_record, "'cfg.is_some' and 'cfg.is_some' have the same flat name 'cfg__is_some'."),
    (clashing_unicode, "'größe' and 'gru00f6u00dfe' have the same flat name 'gru00f6u00dfe'. Rename one."),
    (default_of_other_type, ("the default of 'n' is 'three' (str), which the schema type SymInt does not take. "
                            "Change the default or the annotation.")),
    (default_none, ("the default of 'bias' is None (NoneType), which the schema type Tensor does not take. "
                   "Annotate it T | None.")),
    (default_list_item, "the default of 'sizes' is (1, 2.5) (tuple), which the schema type SymInt[] does not take."),
    (default_in_record, "the default of 'cfg.scale' is 'big' (str), which the schema type float does not take."),
    (many_lists, ("the signature has 64 lists of Tensors and 1 other values that cannot share an argument, and torch "
                 "registers no schema of more than 64 arguments. Pass some as one list.")),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "sentence"), SIGNATURES, ids=lambda value: getattr(value, "__name__", ""))
def test_signature_is_refused_at_decoration(ns: str, fn: Callable[..., Any], sentence: str) -> None:
    with pytest.raises(SignatureError, match=re.escape(sentence)) as caught:
        magi_register_custom_op(f"{ns}::op")(fn)
    assert str(caught.value).startswith(f"{ns}::op: ")
    assert located(fn) in str(caught.value)
    with pytest.raises(SignatureError, match=re.escape(sentence)) as caught:
        lower_signature(fn)
    assert str(caught.value).startswith(f"{fn.__name__}(): ")


def nothing() -> Tensor:
    return X


# function, options, error class, sentence
OPTIONS: list[tuple[Callable[..., Any], dict[str, Any], type[OpSchemaError], str]] = [
    (writes, {"mutates_args": "out"}, OptionError,
     "mutates_args='out' is one string. Write a tuple of names: ('out',)."),
    (writes, {"mutates_args": None}, OptionError, "mutates_args=None is no tuple of names."),
    (writes, {"mutates_args": ("outt",)}, OptionError,
     "mutates_args names 'outt', which is no parameter, leaf path or flat name. Did you mean 'out'?"),
    (writes, {"mutates_args": (0,)}, OptionError,
     "mutates_args names 0, which is no parameter, leaf path or flat name."),
    (writes, {"mutates_args": ("weights",)}, OptionError,
     ("mutates_args names 'weights', a list of Tensors that may be None, which torch cannot functionalize "
     "(pytorch #144072). Use list[Tensor], empty for None.")),
    (scaled, {"mutates_args": ("cfg",)}, OptionError,
     "mutates_args names 'cfg', which holds no Tensor, and an op can write into Tensors only."),
    (scaled, {"mutates_args": ("cfg.scal",)}, OptionError, "Did you mean 'cfg.scale'?"),
    (writes, {"mutates_args": ("out",), "backward_fn": lambda ctx: None}, OptionError,
     ("backward_fn together with mutates_args ('out'): the gradient of an op that writes into its arguments is not "
     "defined. Return new Tensors instead.")),
    (plain, {"setup_context_fn": lambda ctx, inputs, output: None}, OptionError,
     "setup_context_fn saves for a backward_fn, and there is none. Give one."),
    (plain, {"backward_fn": "formula"}, OptionError, "backward_fn is 'formula' (str), expected a function."),
    (plain, {"backward_fn": lambda ctx: None}, OptionError,
     "backward_fn is called as backward_fn(ctx, grad), which test_errors.py:"),
    (two_outputs, {"backward_fn": lambda ctx, grad: None}, OptionError,
     "backward_fn is called as backward_fn(ctx, grad_0, grad_1), which test_errors.py:"),
    (plain, {"backward_fn": lambda ctx, grad: None, "setup_context_fn": lambda ctx: None}, OptionError,
     "setup_context_fn is called as setup_context_fn(ctx, inputs, output), which test_errors.py:"),
    (plain, {"infer_output_meta_fn": 3}, OptionError,
     "infer_output_meta_fn: 3 is no function, list of names or None. Write one of these."),
    (plain, {"infer_output_meta_fn": {"x"}}, OptionError, "infer_output_meta_fn: {'x'} is no function"),
    (plain, {"infer_output_meta_fn": "x"}, OptionError,
     "infer_output_meta_fn: 'x' is one string. Write a list of names: ['x']."),
    (plain, {"infer_output_meta_fn": []}, OptionError,
     "infer_output_meta_fn: 0 names are given for 1 outputs. Give one for each."),
    (plain, {"infer_output_meta_fn": ["y"]}, OptionError,
     "infer_output_meta_fn: 'y' is no Tensor parameter or leaf path. Name one."),
    (scaled, {"infer_output_meta_fn": ["cfg.scale"]}, OptionError,
     "infer_output_meta_fn: 'cfg.scale' is no Tensor parameter or leaf path."),
    (plain, {"infer_output_meta_fn": [0]}, OptionError,
     "infer_output_meta_fn: 0 is no Tensor parameter or leaf path."),
    (plain, {"infer_output_meta_fn": lambda: X}, OptionError,
     "infer_output_meta_fn is called as infer_output_meta_fn(x), which test_errors.py:"),
    (two_outputs, {}, OptionError,
     ("infer_output_meta_fn: there are 2 outputs and 1 Tensor inputs, so output i cannot look like input i. "
     "Pass a function, or names.")),
    (nothing, {}, OptionError, "infer_output_meta_fn: there are 1 outputs and 0 Tensor inputs"),
    (returning(float), {}, OptionError,
     "infer_output_meta_fn: 'output' is a float, which looks like no Tensor input. Pass a function."),
    (returning(list[Tensor]), {"infer_output_meta_fn": ["x"]}, OptionError,
     "infer_output_meta_fn: 'output' and 'x' are not both lists. Pass a function."),
    (plain, {"tags": ("core",)}, OptionError, "tags=('core',) is no tuple of torch.Tag values."),
    (plain, {"tags": torch.Tag.core}, OptionError, "is no tuple of torch.Tag values."),
    (with_annotation(Inner | None), {"mutates_args": ("value",)}, OptionError, "which holds no Tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "options", "error", "sentence"), OPTIONS, ids=shown)
def test_options_are_refused_at_decoration(
    ns: str, fn: Callable[..., Any], options: dict[str, Any], error: type[OpSchemaError], sentence: str
) -> None:
    with pytest.raises(error, match=re.escape(sentence)) as caught:
        magi_register_custom_op(f"{ns}::op", **options)(fn)
    assert str(caught.value).startswith(f"{ns}::op: ")
    assert str(caught.value).endswith(located(fn))
    assert not torch._C._jit_get_schemas_for_operator(f"{ns}::op")


NOT_A_NAME = "is not 'namespace::op'"
KEPT = "for itself. Choose another."
NAMES = [
    ("norm", f"the op name 'norm' {NOT_A_NAME}. Write 'namespace::norm'."),
    ("", f"the op name '' {NOT_A_NAME}. Write 'namespace::op', two identifiers."),
    ("a:b", f"the op name 'a:b' {NOT_A_NAME}. Write 'namespace::op', two identifiers."),
    ("a::b::c", f"the op name 'a::b::c' {NOT_A_NAME}."),
    ("a::b.overload", f"the op name 'a::b.overload' {NOT_A_NAME}."),
    ("a::", f"the op name 'a::' {NOT_A_NAME}."),
    ("::b", f"the op name '::b' {NOT_A_NAME}."),
    ("a b::c", f"the op name 'a b::c' {NOT_A_NAME}."),
    ("a::b\n", NOT_A_NAME),
    ("a::größe", f"the op name 'a::größe' {NOT_A_NAME}."),
    ("a::1b", f"the op name 'a::1b' {NOT_A_NAME}."),
    ("opschema_names::class", f"the op name 'opschema_names::class' cannot be used: torch keeps 'class' {KEPT}"),
    ("opschema_names::NoneType", f"torch keeps 'NoneType' {KEPT}"),
    ("opschema_names::name", f"torch keeps 'name' {KEPT}"),
    ("opschema_names::_dir", f"torch keeps '_dir' {KEPT}"),
    ("opschema_names::__file__", f"torch keeps '__file__' {KEPT}"),
    ("opschema_names::__init__", f"torch keeps '__init__' {KEPT}"),
    ("opschema_names::__origin__", f"torch keeps '__origin__' {KEPT}"),
    ("prim::op", f"torch keeps 'prim' {KEPT}"),
    ("_::op", f"torch keeps '_' {KEPT}"),
    ("load_library::op", f"torch keeps 'load_library' {KEPT}"),
    ("higher_order::op", f"torch keeps 'higher_order' {KEPT}"),
]


@pytest.mark.parametrize(("name", "sentence"), NAMES)
def test_name_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(OpNameError, match=re.escape(sentence)) as caught:
        magi_register_custom_op(name)(plain)
    assert str(caught.value).startswith("plain(): ")
    assert str(caught.value).endswith(located(plain))


def test_names_that_only_look_kept_are_taken(ns: str) -> None:
    for op in ("load_library", "default", "self", "op_names", "match"):
        assert torch.equal(magi_register_custom_op(f"{ns}::{op}")(plain)(X), X * 2)


def test_lambda_has_no_name_of_its_own() -> None:
    anonymous: Any = lambda x: x  # noqa: E731
    anonymous.__annotations__ = {"x": Tensor, "return": Tensor}
    with pytest.raises(OpNameError, match=re.escape("<lambda>' is not 'namespace::op'")):
        magi_register_custom_op()(anonymous)


def test_decorator_without_brackets() -> None:
    fix = "Write @magi_register_custom_op() with brackets, or @magi_register_custom_op('namespace::op')."
    sentence = f"takes a name, and got a function {located(plain)}. {fix}"
    with pytest.raises(OpNameError, match=re.escape(sentence)):
        magi_register_custom_op(plain)  # type: ignore[arg-type]
    with pytest.raises(OpNameError, match=re.escape("the op name 5 (int) is no string.")):
        magi_register_custom_op(5)  # type: ignore[arg-type]


def test_duplicate_name_of_ours(ns: str) -> None:
    magi_register_custom_op(f"{ns}::op")(plain)
    sentence = (
        f"{ns}::op: the op is registered already, by plain {located(plain)}. Choose another name, "
        "or pass override=True to replace it, as after a reload."
    )
    with pytest.raises(DuplicateOpError, match=re.escape(sentence)):
        magi_register_custom_op(f"{ns}::op")(scaled)


def test_duplicate_name_of_another_library(ns: str) -> None:
    library = torch.library.Library(ns, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    sentence = f"{ns}::op: the op is registered already, by another library. Choose another name."
    for override in (False, True):
        with pytest.raises(DuplicateOpError, match=re.escape(sentence)):
            magi_register_custom_op(f"{ns}::op", override=override)(plain)


def test_decorating_an_op_again(ns: str) -> None:
    direct = magi_register_custom_op(f"{ns}::direct")(plain)
    exposed = magi_register_custom_op(f"{ns}::exposed")(scaled)
    packet = getattr(torch.ops, ns).direct
    sentence = "is an op already. Decorate a function once; op_def(op).fn is the plain function."
    for op in (direct, exposed, packet, op_def(exposed).torch_op):
        with pytest.raises(DuplicateOpError, match=re.escape(sentence)):
            magi_register_custom_op(f"{ns}::again")(op)
    custom = torch.library.custom_op(f"{ns}::custom", plain, mutates_args=())
    with pytest.raises(DuplicateOpError, match=r"registered by torch.library.custom_op\. Take that decorator off\."):
        magi_register_custom_op(f"{ns}::again")(custom)


@pytest.mark.parametrize("thing", [builtins.len, Inner, 3, "plain"])
def test_what_is_no_function(ns: str, thing: Any) -> None:
    with pytest.raises(OptionError, match="is no Python function. Wrap it in one whose parameters have annotations."):
        magi_register_custom_op(f"{ns}::op")(thing)


def test_a_static_or_class_method(ns: str) -> None:
    sentence = f"plain is a staticmethod already. Put it above this decorator. {located(plain)}"
    with pytest.raises(OptionError, match=re.escape(sentence)):
        magi_register_custom_op(f"{ns}::op")(staticmethod(plain))
    with pytest.raises(OptionError, match="plain is a classmethod already. Use a static method: an op has no class."):
        magi_register_custom_op(f"{ns}::op")(classmethod(plain))  # type: ignore[arg-type]


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


def test_each_error_is_a_builtin_one_too() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(classes) > 10
    for cls in classes:
        assert issubclass(cls, OpSchemaError)
        if cls is not OpSchemaError:
            base = cls.__bases__[1]
            assert cls.__bases__[0] is OpSchemaError
            assert base.__module__ == "builtins"
            assert base is not Exception
            assert issubclass(base, Exception)


class SubInner(Inner):
    pass


class LooksLike:
    scale = 1.0
    mode = "rms"
    __class__ = Inner  # type: ignore[assignment]


class LooksLikeMode:
    name = value = "rms"
    __class__ = Mode  # type: ignore[assignment]


Twin = make_dataclass("Inner", [("scale", float), ("mode", str)], frozen=True)
NOT_INNER = "expected a Inner, not a subclass or a look-alike, because the op rebuilds it from its fields."
NOT_MODE = "expected one of Mode.RMS, Mode.LAYER, or the value of one."
NOT_SIZES = "expected a dict with exactly the keys 'height', 'width'."

# annotation, bad value, error class, sentence
CALLS: list[tuple[object, Any, type[OpSchemaError], str]] = [
    (Inner, {"scale": 1.0}, ArgumentError, f"'value' is {{'scale': 1.0}} (dict), {NOT_INNER}"),
    (Inner, None, ArgumentError, f"'value' is None (NoneType), {NOT_INNER}"),
    (Inner, SubInner(), ArgumentError, f"(SubInner), {NOT_INNER}"),
    (Inner, Twin(1.0, "rms"), ArgumentError, f"'value' is Inner(scale=1.0, mode='rms') (Inner), {NOT_INNER}"),
    (Inner, LooksLike(), ArgumentError, f"(LooksLike), {NOT_INNER}"),
    (Inner, mock.Mock(spec=Inner), ArgumentError, f"(Mock), {NOT_INNER}"),
    (Inner, Inner, ArgumentError, f"(type), {NOT_INNER}"),
    (Inner, Inner(mode="batch"), ArgumentValueError, "'value.mode' is 'batch' (str), expected one of 'rms', 'layer'."),  # type: ignore[arg-type]
    (Cfg, Cfg(inner=3), ArgumentError, f"'value.inner' is 3 (int), {NOT_INNER}"),  # type: ignore[arg-type]
    (Cfg, Cfg(Inner(mode="x")), ArgumentValueError, "'value.inner.mode' is 'x' (str)"),  # type: ignore[arg-type]
    (Cfg, Cfg(level=3), ArgumentValueError, "'value.level' is 3 (int), expected one of Level.LOW, Level.HIGH"),  # type: ignore[arg-type]
    (Inner | None, "x", ArgumentError, f"'value' is 'x' (str), {NOT_INNER[:-1]}"),
    (Box[Mode], Box(3), ArgumentValueError, f"'value.value' is 3 (int), {NOT_MODE}"),
    (Mode, "batch", ArgumentValueError, f"'value' is 'batch' (str), {NOT_MODE}"),
    (Mode, Level.LOW, ArgumentValueError, f"(Level), {NOT_MODE}"),
    (Mode, LooksLikeMode(), ArgumentValueError, f"(LooksLikeMode), {NOT_MODE}"),
    (Mode, None, ArgumentValueError, f"'value' is None (NoneType), {NOT_MODE}"),
    (Mode, torch.ones(2), ArgumentValueError, f"(Tensor), {NOT_MODE}"),
    (Mode | None, 3, ArgumentValueError, f"'value' is 3 (int), {NOT_MODE[:-1]}, or None."),
    (Level, torch.ones(2), ArgumentValueError, "(Tensor), expected one of Level.LOW, Level.HIGH, or the value of one."),
    (Level, True, ArgumentValueError, "'value' is True (bool), expected one of Level.LOW, Level.HIGH"),
    (Literal["a", 1], "b", ArgumentValueError, "'value' is 'b' (str), expected one of 'a', 1."),
    (Literal["a", 1], True, ArgumentValueError, "'value' is True (bool), expected one of 'a', 1."),
    (Literal[1, 2], 3, ArgumentValueError, "'value' is 3 (int), expected one of 1, 2."),
    (Literal["rms", "layer"], "batch", ArgumentValueError, "'value' is 'batch' (str), expected one of 'rms', 'layer'."),
    (list[Literal["a", "b"]], ["a", "c"], ArgumentValueError,
     "'value' is ['a', 'c'] (list), expected a list with each item one of 'a', 'b'."),
    (list[Mode], ["rms", "x"], ArgumentValueError, f"expected a list with each item {NOT_MODE[9:]}"),
    (list[Mode], 3, ArgumentValueError, f"'value' is 3 (int), expected a list with each item {NOT_MODE[9:]}"),
    (tuple[Mode, ...], "rms", ArgumentValueError,
     f"'value' is 'rms' (str), expected a tuple with each item {NOT_MODE[9:]}"),
    (list[torch.dtype], ["torch.int8"], ArgumentValueError, "expected a list with each item a torch.dtype."),
    (list[torch.device], [3], ArgumentValueError, "expected a list with each item a torch.device."),
    (list[complex], ["1j"], ArgumentValueError, "'value' is ['1j'] (list), expected a list of numbers."),
    (list[complex], 1j, ArgumentValueError, "'value' is 1j (complex), expected a list of numbers."),
    (tuple[int, float], (1,), ArgumentError, "'value' is (1,) (tuple), expected a tuple of 2, tuple[int, float]."),
    (tuple[int, float], (1, 2.0, 3), ArgumentError, "'value' is (1, 2.0, 3) (tuple), expected a tuple of 2"),
    (tuple[int, float], [1, 2.0], ArgumentError, "'value' is [1, 2.0] (list), expected a tuple of 2"),
    (tuple[tuple[int, int], int], ((1, 2, 3), 4), ArgumentError,
     "'value.0' is (1, 2, 3) (tuple), expected a tuple of 2"),
    (tuple[int, int] | None, 3, ArgumentError, "'value' is 3 (int), expected a tuple of 2, tuple[int, int]."),
    (Point, (1.0, 2.0), ArgumentError,
     "'value' is (1.0, 2.0) (tuple), expected a Point, not a subclass or a look-alike"),
    (Sizes, {"height": 1}, ArgumentError, f"'value' is {{'height': 1}} (dict), {NOT_SIZES}"),
    (Sizes, {"height": 1, "width": 2, "depth": 3}, ArgumentError, NOT_SIZES),
    (Sizes, {"height": 1, "depth": 2}, ArgumentError, NOT_SIZES),
    (Sizes, [("height", 1), ("width", 2)], ArgumentError, f"(list), {NOT_SIZES}"),
    (list[Tensor | None], torch.ones(2, 2), ArgumentError, "(Tensor), expected list[Tensor | None]."),
    (list[Tensor | None], [None, 3], ArgumentError, "'value' is [None, 3] (list), expected list[Tensor | None]."),
]  # fmt: skip


@pytest.mark.parametrize(("annotation", "value", "error", "sentence"), CALLS, ids=shown)
def test_value_is_refused_at_the_call(
    ns: str, annotation: object, value: Any, error: type[OpSchemaError], sentence: str
) -> None:
    called = []

    def body(x: Tensor, value: Any) -> Tensor:
        called.append(value)
        return x * 2

    body.__annotations__["value"] = annotation
    op = magi_register_custom_op(f"{ns}::op")(body)
    calls: list[Op] = [lambda: op(X, value), lambda: op(x=X, value=value)]
    for call in calls:
        with pytest.raises(error, match=re.escape(sentence)) as caught:
            call()
        assert str(caught.value).startswith(f"{ns}::op: '")
        assert str(caught.value).endswith(located(body))
    assert not called


@dataclass(frozen=True)
class TwoTensors:
    y: Tensor
    z: Tensor


# return annotation, what the body returns, sentence
OUTPUTS: list[tuple[object, Any, str]] = [
    (None, X, "'output' is tensor([0., 1., 2.]) (Tensor), expected None."),
    (Tensor, None, "'output' is None (NoneType), expected a Tensor."),
    (Tensor, (X + 1, X + 2), "expected a Tensor."),
    (int, "three", "'output' is 'three' (str), expected an int of 64 bits."),
    (list[Tensor], [X + 1, 3], "(list), expected a list with each item a Tensor."),
    (tuple[Tensor, float], (X + 1, "x"), "'output.1' is 'x' (str), expected a float."),
    (TwoTensors, (X + 1, X + 2), "expected a TwoTensors, not a subclass or a look-alike"),
    (tuple[Tensor, tuple[Tensor, Tensor]], (X + 1, (X + 2,)),
     "'output.1' is (tensor([2., 3., 4.]),) (tuple), expected a tuple of 2"),
]  # fmt: skip


@pytest.mark.parametrize(("annotation", "value", "sentence"), OUTPUTS, ids=shown)
def test_output_is_refused(ns: str, annotation: object, value: Any, sentence: str) -> None:
    def body(x: Tensor) -> Any:
        return value

    body.__annotations__["return"] = annotation
    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=lambda x: value)(body)
    with pytest.raises(ReturnValueError, match=re.escape(sentence)) as caught:
        op(X)
    assert str(caught.value).endswith(located(body))


# annotation, bad value, what the sentence says of it; the dispatcher alone looks at these
PLAIN: list[tuple[object, Any, str]] = [
    (Tensor, 3, "'value' is 3 (int), expected a Tensor."),
    (Tensor | None, "x", "'value' is 'x' (str), expected a Tensor, or None."),
    (list[Tensor], X, "'value' is tensor([0., 1., 2.]) (Tensor), expected a list with each item a Tensor."),
    (list[Tensor], [X, None], "'value' is [tensor([0., 1., 2.]), None] (list), expected a list with each item"),
    (int, "q", "'value' is 'q' (str), expected an int of 64 bits."),
    (int, 1.5, "'value' is 1.5 (float), expected an int of 64 bits."),
    (int, 2**70, "'value' is 1180591620717411303424 (int), expected an int of 64 bits."),
    (int, None, "'value' is None (NoneType), expected an int of 64 bits."),
    (int | None, "q", "'value' is 'q' (str), expected an int of 64 bits, or None."),
    (float, "big", "'value' is 'big' (str), expected a float."),
    (float, 1j, "'value' is 1j (complex), expected a float."),
    (bool, "yes", "'value' is 'yes' (str), expected a bool."),
    (str, 3, "'value' is 3 (int), expected a str."),
    (str, Mode.RMS, "'value' is <Mode.RMS: 'rms'> (Mode), expected a str."),
    (complex, "i", "'value' is 'i' (str), expected a complex."),
    (Number, "1", "'value' is '1' (str), expected a number."),
    (torch.dtype, "float32", "'value' is 'float32' (str), expected a torch.dtype."),
    (torch.device, 1.5, "'value' is 1.5 (float), expected a torch.device."),
    (torch.layout, "strided", "'value' is 'strided' (str), expected a torch.layout."),
    (list[int], 3, "'value' is 3 (int), expected a list with each item an int of 64 bits."),
    (list[int], [1.5], "'value' is [1.5] (list), expected a list with each item an int of 64 bits."),
    (list[float] | None, ["x"], "'value' is ['x'] (list), expected a list with each item a float, or None."),
    (list[str], 3, "'value' is 3 (int), expected a list with each item a str."),
    (NewType("Meters", float), "x", "'value' is 'x' (str), expected a float."),
    (tuple[int, ...], ["x"], "'value' is ['x'] (list), expected a list with each item an int of 64 bits."),
    (Literal[1, 2], "x", "'value' is 'x' (str), expected one of 1, 2."),
]


@pytest.mark.parametrize("form", ["alone", "in a record", "packed"])
@pytest.mark.parametrize(("annotation", "value", "sentence"), PLAIN, ids=shown)
def test_a_leaf_of_another_class(ns: str, annotation: object, value: Any, sentence: str, form: str) -> None:
    def body(x: Tensor, value: Any) -> Tensor:
        raise AssertionError("the body runs")

    if form == "packed" and annotation == list[Tensor]:
        pytest.skip("lists of Tensors share no argument")
    many = [(f"f{i}", annotation) for i in range(65 if form == "packed" else 1)]
    record = make_dataclass("Holds", [*many, ("value", annotation)], frozen=True)
    body.__annotations__["value"] = annotation if form == "alone" else record
    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=["x"])(body)
    good = {Tensor: X, int: 1, float: 1.0, bool: True, str: "", complex: 1j, Number: 1, torch.dtype: torch.int8,
            torch.device: torch.device("cpu"), torch.layout: torch.strided, Literal[1, 2]: 1}  # fmt: skip
    others = good.get(annotation, () if typing.get_origin(annotation) in {list, tuple} else None)
    if isinstance(annotation, NewType):
        others = 1.0
    passed = value if form == "alone" else record(*[others for _ in many], value)
    path = sentence if form == "alone" else sentence.replace("'value'", "'value.value'", 1)
    for x in (X, X.clone().requires_grad_()):
        for args, kwargs in (((x, passed), {}), ((), {"value": passed, "x": x})):
            with pytest.raises((ArgumentError, ArgumentValueError), match=re.escape(path)) as caught:
                op(*args, **kwargs)
            assert str(caught.value).startswith(f"{ns}::op: ")
            assert str(caught.value).endswith(located(body))


@pytest.mark.parametrize("form", ["direct", "lowered", "flattened"])
def test_a_leaf_of_another_class_in_compiled_code(ns: str, form: str) -> None:
    annotation = {"direct": float, "lowered": Annotated[float, "m"], "flattened": Box[float]}[form]
    op = magi_register_custom_op(f"{ns}::op")(with_annotation(annotation))
    assert op_def(op).path == form
    value, path = (Box("big"), "value.value") if form == "flattened" else ("big", "value")
    with pytest.raises(Exception, match=rf"{ns}::op: '{path}' is 'big' \(str\), expected a float\. \(test_errors"):
        torch.compile(op, fullgraph=True, backend="eager")(X, value)


LOOK_ALIKES: list[Any] = [
    make_dataclass("Box", ["value"], frozen=True)(1),
    [1],
    {"value": 1},
    (1,),
    X,
    object(),
    None,
    3,
    "text",
    Box,
]


@pytest.mark.parametrize("is_argument", [False, True])
@pytest.mark.parametrize("value", LOOK_ALIKES, ids=lambda value: type(value).__name__)
def test_a_look_alike_in_compiled_code(ns: str, value: Any, is_argument: bool) -> None:
    """Dynamo traces the refusal too, and has no repr of most objects."""
    op: Any = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=["x"])(with_annotation(Box[int]))
    plain = value is None or isinstance(value, (int, str))
    shown = f"{value!r} ({type(value).__name__})" if plain else f"of class {type(value).__name__}"
    sentence = rf"{ns}::op: 'value' is {re.escape(shown)}, expected a Box, .*\(test_errors.py:\d+\)"
    compiled: Any = torch.compile(op if is_argument else lambda x, _: op(x, value), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=sentence):
        compiled(X, value)


MISFITS: dict[str, tuple[Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]], str]] = {
    "nothing": (lambda x: ((), {}), "the call lacks 'x', '{value}'."),
    "one missing": (lambda x: ((x,), {}), "the call lacks '{value}'."),
    "one missing, by name": (lambda x: ((), {"k": 2, "VALUE": 1.0}), "the call lacks 'x'."),
    "too many": (lambda x: ((x, 1.0, 2, 3, 4), {}), "the call gives 5 arguments by position, expected at most 3."),
    "an unknown name": (lambda x: ((x, 1.0), {"zz": 3}), "the call names 'zz', which is not a parameter. The"),
    "a wrong letter": (
        lambda x: ((x,), {"valeu": 1.0}),
        "the call names 'valeu', which is not a parameter. Did you mean '{value}'? The",
    ),
    "twice": (lambda x: ((x, 1.0), {"x": x}), "the call gives 'x' twice, by position and by name."),
    "twice, the default": (lambda x: ((x, 1.0, 1), {"k": 2}), "the call gives 'k' twice, by position and by name."),
}


def misfit_op(ns: str, form: str) -> Any:
    annotation = {"direct": float, "lowered": Annotated[float, "m"], "flattened": Box[float]}[form]

    def body(x: Tensor, value: Any, k: int = 1) -> Tensor:
        raise AssertionError("the body runs")

    body.__annotations__["value"] = annotation
    return magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=["x"])(body)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", MISFITS)
@pytest.mark.parametrize("form", ["direct", "lowered", "flattened"])
def test_a_call_that_does_not_fit_the_signature(ns: str, form: str, case: str, grad: bool) -> None:
    op = misfit_op(ns, form)
    make, sentence = MISFITS[case]
    args, kwargs = make(X.clone().requires_grad_(grad))
    rich = {name.replace("VALUE", "value"): value for name, value in kwargs.items()}
    shown = {"direct": "float", "lowered": "float", "flattened": "Box[float]"}[form]
    line = f"The signature is body(x: Tensor, value: {shown}, k: int = 1) -> Tensor. (test_errors.py:"
    with pytest.raises(ArgumentError, match=re.escape(f"{ns}::op: {sentence.format(value='value')}")) as caught:
        op(*args, **rich)
    assert line in str(caught.value)
    value = "value__value" if form == "flattened" else "value"
    flat = {name.replace("VALUE", value): given for name, given in kwargs.items()}
    if case == "a wrong letter" and form == "flattened":
        flat, sentence = {"value_value": 1.0}, sentence.replace("valeu", "value_value")
    for call in (op.torch_op, getattr(torch.ops, ns).op):
        with pytest.raises(ArgumentError, match=re.escape(f"{ns}::op: {sentence.format(value=value)}")):
            call(*args, **flat)


def test_a_schema_is_shown_where_a_flat_call_does_not_fit(ns: str) -> None:
    schema = "The schema is body(Tensor x, float value__value, SymInt k=1) -> Tensor. (test_errors.py:"
    with pytest.raises(ArgumentError, match=re.escape(schema)):
        misfit_op(ns, "flattened").torch_op(X)


@pytest.mark.parametrize("case", MISFITS)
def test_a_call_in_compiled_code_that_does_not_fit(ns: str, case: str) -> None:
    op = misfit_op(ns, "flattened")
    make, sentence = MISFITS[case]
    sentence = sentence.format(value="value").partition(" Did you mean")[0]

    def run(x: Tensor) -> Any:
        args, kwargs = make(x)
        return op(*args, **{name.replace("VALUE", "value"): value for name, value in kwargs.items()})

    with pytest.raises(Exception, match=re.escape(f"{ns}::op: {sentence}")):
        torch.compile(run, fullgraph=True, backend="eager")(X)


def test_a_call_of_a_method_that_does_not_fit(ns: str) -> None:
    class Layer(NamedTuple):
        weight: Tensor

    def scale(self: Layer, x: Tensor, *, eps: float, mode: str = "rms") -> Tensor:
        return x * self.weight

    Layer.scale = magi_register_custom_op(f"{ns}::scale")(scale)  # type: ignore[attr-defined]
    layer: Any = Layer(X)
    assert torch.equal(layer.scale(X, eps=1.0), X * X)
    assert torch.equal(layer.scale(x=X, mode="layer", eps=1.0), X * X)
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((X,), {}, "the call lacks 'eps'."),
        ((X, 1.0), {}, "the call gives 3 arguments by position, expected at most 2."),
        ((X,), {"eps": 1.0, "mod": "rms"}, "the call names 'mod', which is not a parameter. Did you mean 'mode'?"),
        ((X,), {"eps": 1.0, "self": layer}, "the call gives 'self' twice, by position and by name."),
    ]
    for args, kwargs, sentence in cases:
        with pytest.raises(ArgumentError, match=re.escape(f"{ns}::scale: {sentence}")):
            layer.scale(*args, **kwargs)


def test_every_way_to_give_an_argument(ns: str) -> None:
    @magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=lambda x, a, b, *, c, d: x.new_empty(4))
    def op(x: Tensor, a: int, b: int = 2, *, c: int, d: int = 4) -> Tensor:
        return x.new_tensor([a, b, c, d])

    given = {"b": 2, "a": 1}
    for call in (
        lambda: op(X, 1, c=3),
        lambda: op(X, 1, 2, c=3, d=4),
        lambda: op(X, b=2, a=1, c=3),
        lambda: op(d=4, c=3, b=2, a=1, x=X),
        lambda: op(X, **given, c=3),
    ):
        assert call().tolist() == [1, 2, 3, 4]
        assert torch.compile(call, fullgraph=True, backend="eager")().tolist() == [1, 2, 3, 4]


def test_an_argument_error_of_the_body_stays_the_bodys(ns: str) -> None:
    def helper(a: int) -> None:
        del a

    @magi_register_custom_op(f"{ns}::op")
    def op(x: Tensor) -> Tensor:
        helper()  # type: ignore[call-arg]
        return x.clone()

    for call in (op, op.torch_op, getattr(torch.ops, ns).op):
        with pytest.raises(TypeError, match="helper\\(\\) missing 1 required positional argument") as caught:
            call(X)
        assert not isinstance(caught.value, OpSchemaError)


@pytest.mark.parametrize("grad", [False, True])
def test_a_wrong_class_where_the_op_writes(ns: str, grad: bool) -> None:
    cls = make_dataclass("Written", [("out", Tensor), ("outs", list[Tensor])], frozen=True)

    def body(x: Tensor, value: Any) -> None:
        raise AssertionError("the body runs")

    body.__annotations__["value"] = cls
    op = magi_register_custom_op(f"{ns}::op", mutates_args=["value"])(body)
    cases: list[tuple[Any, Any, str]] = [
        ("x", [], "'value.out' is 'x' (str), expected a Tensor."),
        (X, 3, "'value.outs' is 3 (int), expected a list with each item a Tensor."),
        (X, [X, None], "'value.outs' is [tensor([0., 1., 2.]), None] (list), expected a list with each item a Tensor."),
        (X, X, "'value.outs' is tensor([0., 1., 2.]) (Tensor), expected a list with each item a Tensor."),
    ]
    for out, outs, sentence in cases:
        with torch.set_grad_enabled(grad), pytest.raises(ArgumentError, match=re.escape(sentence)):
            op(X, cls(out, outs))


def test_an_error_of_the_body_is_left_alone(ns: str) -> None:
    texts = ["planted", f"{ns}::op() Expected", "Unknown keyword argument 'a' for operator 'b'."]

    def body(x: Tensor, value: Box[int]) -> Tensor:
        raise RuntimeError(texts[value.value])

    op = magi_register_custom_op(f"{ns}::op")(body)
    for i, text in enumerate(texts):
        for x in (X, X.clone().requires_grad_()):
            with pytest.raises(RuntimeError, match=re.escape(text)):
                op(x, Box(i))
            with pytest.raises(RuntimeError, match=re.escape(text)):
                op_def(op).torch_op(x, i)


LITERALS: list[tuple[object, Any, str]] = [
    (Literal[1, 2], 3, "'value' is 3 (int), expected one of 1, 2."),
    (Literal[1, 2] | None, 3, "'value' is 3 (int), expected one of 1, 2, or None."),
    (Literal[True], False, "'value' is False (bool), expected one of True."),
    (list[Literal[3, 4]], [3, 5], "'value' is [3, 5] (list), expected a list with each item one of 3, 4."),
    (Literal["a", "b"], "c", "'value' is 'c' (str), expected one of 'a', 'b'."),
]


@pytest.mark.parametrize("fake", ["by name", "a function"])
@pytest.mark.parametrize(("annotation", "value", "sentence"), LITERALS, ids=shown)
def test_a_wrong_literal_is_found_while_tracing(
    ns: str, annotation: object, value: Any, sentence: str, fake: str
) -> None:
    infer: Any = ["x"] if fake == "by name" else lambda x, value: torch.empty_like(x)
    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=infer)(with_annotation(annotation))
    assert op_def(op).path == "lowered"
    with FakeTensorMode(), pytest.raises(ArgumentValueError, match=re.escape(sentence)):
        op(torch.empty(2), value)
    with pytest.raises(Exception, match=re.escape(sentence)):
        torch.compile(lambda x: op(x, value), fullgraph=True, backend="aot_eager")(X)


def test_a_symbolic_literal_is_checked_when_it_has_a_value(ns: str) -> None:
    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=["x"])(with_annotation(Literal[2, 3]))
    compiled = torch.compile(lambda x: op(x, x.shape[0]), fullgraph=True, backend="aot_eager", dynamic=True)
    assert compiled(torch.ones(2)).shape == (2,)
    with pytest.raises(ArgumentValueError, match=re.escape("'value' is 4 (int), expected one of 2, 3.")):
        compiled(torch.ones(4))


def test_unknown_op() -> None:
    magi_register_custom_op("opschema_unknown::normalize")(plain)
    with pytest.raises(UnknownOpError, match="Did you mean 'opschema_unknown::normalize'?"):
        op_def("opschema_unknown::normalise")
    with pytest.raises(UnknownOpError, match="'aten::add' is no op that magi-opschema registered."):
        op_def(torch.ops.aten.add.Tensor)
    with pytest.raises(UnknownOpError, match="is no op that magi-opschema registered."):
        annotate(plain, "key", "text")
    with pytest.raises(LookupError, match="is no op that magi-opschema registered."):
        register_vmap(len, lambda *args: args)


NO_FUNCTION: Any = 3
AFTERWARDS: dict[str, tuple[Callable[[Any], Any], type[OpSchemaError], str]] = {
    "vmap, no function": (
        lambda op: register_vmap(op, NO_FUNCTION),
        RuleError,
        "rule is 3 (int), expected a function.",
    ),
    "vmap, other arguments": (
        lambda op: register_vmap(op, lambda x: x),
        RuleError,
        "rule is called as rule(info, in_dims, x), which test_errors.py",
    ),
    "sharding, no function": (
        lambda op: register_sharding(op, NO_FUNCTION),
        RuleError,
        "rule is 3 (int), expected a function.",
    ),
    "kernel, no function": (
        lambda op: register_kernel(op, "cpu", NO_FUNCTION),
        RuleError,
        "the body is 3 (int), expected a function.",
    ),
    "kernel, no device": (
        lambda op: register_kernel(op, "zpu", plain),
        RuleError,
        "'zpu' is no device type of torch. Use 'cpu', 'cuda' or another.",
    ),
    "autocast, no device": (
        lambda op: register_autocast(op, "zpu", torch.float16),
        RuleError,
        "'zpu' is no device type of torch. Use 'cpu', 'cuda' or another.",
    ),
    "autocast, a text": (
        lambda op: register_autocast(op, "cpu", "float16"),  # type: ignore[arg-type]
        RuleError,
        "autocast casts to 'float16', expected a dtype of floating-point numbers, such as torch.bfloat16.",
    ),
    "autocast, ints": (
        lambda op: register_autocast(op, "cpu", torch.int8),
        RuleError,
        "autocast casts to torch.int8, expected a dtype of floating-point numbers",
    ),
    "opcheck, a Tensor": (
        lambda op: opcheck(op, X),  # type: ignore[arg-type]
        ArgumentError,
        "opcheck takes the arguments as a tuple, and got a Tensor. Write opcheck(op, (x,)).",
    ),
    "opcheck, too many": (
        lambda op: opcheck(op, (X, X, X)),
        ArgumentError,
        "the call gives 3 arguments by position, expected at most 1.",
    ),
    "lower_signature of an op": (lower_signature, errors.DuplicateOpError, "is an op already."),
    "lower_signature of a class": (lambda op: lower_signature(Inner), errors.OptionError, "is no Python function."),
}


@pytest.mark.parametrize("case", AFTERWARDS)
def test_what_is_asked_of_an_op_afterwards(ns: str, case: str) -> None:
    op = magi_register_custom_op(f"{ns}::plain")(plain)
    ask, error, sentence = AFTERWARDS[case]
    with pytest.raises(error, match=re.escape(sentence)):
        ask(op)


def test_rule_for_a_batch_is_told_what_is_wrong(ns: str) -> None:
    op = magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=lambda x: (x * 2, x * 3))(two_outputs)
    register_vmap(op, lambda info, in_dims, x: (two_outputs(x), (0, 0, 0)))
    with pytest.raises(RuleError, match="out_dims for 'output' has 3 entries, expected 2"):
        torch.vmap(op)(torch.ones(2, 3))


def test_the_tables_are_as_long_as_they_should_be() -> None:
    at_decoration = len(ANNOTATIONS) + len(UNRESOLVED) + len(RETURNS) + len(SIGNATURES) + len(OPTIONS) + len(NAMES)
    assert at_decoration >= 60
