# SPDX-License-Identifier: Apache-2.0
"""Random signatures: whatever is nested in whatever, the body gets what the caller passed.

A case is a list of parameters. Each has a random tree of records and leaves for its annotation, a value of it,
and perhaps a default. Records are made anew for each case, as a user's classes are. Names of parameters, fields and
classes, and texts, try to be something else in generated code.
"""

from __future__ import annotations

import ast
import enum
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, make_dataclass
from typing import Annotated, Any, Literal, NamedTuple, NewType, TypeAlias, TypedDict

import pytest
import torch
from _signatures import Access, Calls, X, same, saved_and_loaded
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st
from magi_opschema import SignatureLowering, errors, lower_signature, magi_register_custom_op, opcheck
from magi_opschema._call.bridge import Bridge
from magi_opschema._model.tree import leaves
from torch import Tensor
from torch.types import Number


class Mode(enum.Enum):
    RMS = "_m_output = None\n"
    LAYER = 'la"yer\n'


class Level(enum.Enum):
    LOW = 1
    HIGH = 2.5
    NONE = None


Meters = NewType("Meters", float)

TORCH_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_numbers = itertools.count()


def examples(count: int) -> settings:
    """The same *count* cases in every run, however long each takes."""
    slow_checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=slow_checks
    )


ints = st.integers(-(2**63), 2**63 - 1)
floats = st.floats() | st.sampled_from([math.inf, -math.inf, math.nan, -0.0, 5e-324, 1.7976931348623157e308])
TEXTS = [
    *("", '"', "'", '"""', "\\", "\\n", "\n", "\r\n", "\0", "{x}", "{value}", "%s", "${x}", "#", "\u2028", "a\tb"),
    *("); import os; (", "None", "größe", "x" * 10_000, "\\" * 999 + '"', '"\n' * 5_000),
]
texts = st.text() | st.sampled_from(TEXTS)
complexes = st.complex_numbers()
tensors = st.builds(torch.full, st.sampled_from([(), (2,), (2, 0), (1, 3)]), st.floats(-2, 2))
dtypes = st.sampled_from([torch.float32, torch.int8, torch.bool, torch.bfloat16, torch.complex64])
devices = st.sampled_from([torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")])
layouts = st.sampled_from([torch.strided, torch.sparse_coo])
memory_formats = st.sampled_from([torch.contiguous_format, torch.channels_last, torch.preserve_format])


def lists(items: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(items, max_size=3)


Typed: TypeAlias = tuple[Any, st.SearchStrategy[Any]]  # an annotation and the strategy of its values
LEAVES: list[Typed] = [
    (Tensor, tensors),
    (Tensor | None, tensors | st.none()),
    (list[Tensor], lists(tensors)),
    (list[Tensor] | None, lists(tensors) | st.none()),
    (tuple[Tensor, ...], lists(tensors).map(tuple)),
    (list[Tensor | None], lists(tensors | st.none())),
    (list[Tensor | None] | None, lists(tensors | st.none()) | st.none()),
    (tuple[Tensor | None, ...], lists(tensors | st.none()).map(tuple)),
    (int, ints),
    (int | None, ints | st.none()),
    (float, floats),
    (float | None, floats | st.none()),
    (bool, st.booleans()),
    (str, texts),
    (str | None, texts | st.none()),
    (complex, complexes),
    (Number, ints | floats | st.booleans()),
    (int | float | None, ints | floats | st.none()),
    (torch.dtype, dtypes),
    (torch.dtype | None, dtypes | st.none()),
    (torch.device, devices),
    (torch.layout, layouts),
    (torch.memory_format, memory_formats),
    (list[int], lists(ints)),
    (Sequence[float], lists(floats)),
    (list[bool], lists(st.booleans())),
    (list[str], lists(texts)),
    (list[int] | None, lists(ints) | st.none()),
    (int | torch.SymInt, ints),
    (torch.Size, lists(st.integers(0, 2**31)).map(torch.Size)),
    (tuple[int, ...], lists(ints).map(tuple)),
    (tuple[str, ...] | None, lists(texts).map(tuple) | st.none()),
    (list[complex], lists(complexes)),
    (list[torch.dtype], lists(dtypes)),
    (tuple[torch.device, ...], lists(devices).map(tuple)),
    (Literal["rms", "layer"], st.sampled_from(["rms", "layer"])),
    (Literal["rms", None], st.sampled_from(["rms", None])),
    (Literal[1, 2], st.sampled_from([1, 2])),
    (Literal["a", 1, True, b"b"], st.sampled_from(["a", 1, True, b"b"])),
    (Literal['"', "'", "); import os; ("], st.sampled_from(['"', "'", "); import os; ("])),
    (list[Literal["a", "b"]], lists(st.sampled_from(["a", "b"]))),
    (Mode, st.sampled_from(Mode)),
    (Mode | None, st.sampled_from(Mode) | st.none()),
    (Level, st.sampled_from(Level)),
    (Access, st.sampled_from([Access.READ, Access.READ | Access.WRITE, Access(0)])),
    (list[Mode], lists(st.sampled_from(Mode))),
    (tuple[Level, ...], lists(st.sampled_from(Level)).map(tuple)),
    (Meters, floats),
    (Annotated[int, "tokens"], ints),
]
# Builtins, words of generated code, keywords to others, dunder and Unicode names, and the separator of flat names.
NAMES = [
    *("_m_", "_m_torch_op", "_m_output", "_m_dispatch", "_m_fn", "_m_check", "_m_error", "_m_new", "__m_x", "torch_op"),
    *("dispatch", "fn", "check", "output", "item", "there", "key", "part", "pair", "values", "self", "cls", "args"),
    *("kwargs", "ctx", "is_some", "present", "Ellipsis", "NoneType", "Tensor", "inf", "len", "type", "isinstance"),
    *("tuple", "object", "print", "RuntimeError", "__import__", "__build_class__", "__eq__x", "__slots__x", "match"),
    *("case", "_", "größe", "fi", "名前", "μ", "ñ_ñ", "a", "b", "a__b", "__", "a_", "packed_float", "value_"),
]


@dataclass(frozen=True)
class Given:
    name: str
    annotation: Any
    value: Any
    default: Any = inspect.Parameter.empty
    is_keyword_only: bool = False


@st.composite
def typed(draw: st.DrawFn, depth: int) -> Typed:
    if depth == 0 or draw(st.integers(0, 2)) == 0:
        return draw(st.sampled_from(LEAVES))
    kind = draw(st.sampled_from(["dataclass", "slots", "namedtuple", "typeddict", "tuple", "optional"]))
    if kind == "optional":
        annotation, values = draw(record(depth))
        return annotation | None, values | st.none()
    return draw(record(depth, kind))


@st.composite
def record(draw: st.DrawFn, depth: int, kind: str = "dataclass") -> Typed:
    parts = draw(st.lists(typed(depth - 1), min_size=1 if kind == "tuple" else 0, max_size=4))
    names = draw(st.lists(st.sampled_from(NAMES), min_size=len(parts), max_size=len(parts), unique=True))
    if kind == "tuple":
        return tuple[tuple(annotation for annotation, _ in parts)], st.tuples(*[values for _, values in parts])  # type: ignore[misc]
    hints = {name: annotation for name, (annotation, _) in zip(names, parts, strict=True)}
    fields = {name: values for name, (_, values) in zip(names, parts, strict=True)}
    if kind == "typeddict":
        keys = {"class": "class ", **{name: name for name in names}}
        keyed: Any = TypedDict("Keyed", {keys[name]: hint for name, hint in hints.items()})  # type: ignore[misc]
        return keyed, st.fixed_dictionaries({keys[name]: values for name, values in fields.items()})
    if kind == "namedtuple":
        renamed = {name: f"n{name}" if name.startswith("_") else name for name in names}
        named: Any = NamedTuple("Named", [(renamed[name], hint) for name, hint in hints.items()])  # type: ignore[misc]
        return named, st.tuples(*fields.values()).map(named._make)
    # Python mangles __name in the __slots__ of a class.
    has_slots = kind == "slots" and not any(name.startswith("__") for name in names)
    cls: Any = make_dataclass(draw(st.sampled_from(NAMES)), list(hints.items()), frozen=True, slots=has_slots)
    return cls, st.tuples(*fields.values()).map(lambda values: cls(*values))


@st.composite
def cases(draw: st.DrawFn, depth: int = 2, parameters: int = 3) -> list[Given]:
    found = []
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=parameters, unique=True)):
        annotation, values = draw(typed(depth))
        default = draw(st.just(inspect.Parameter.empty) | values)
        found.append(Given(name, annotation, draw(values), default, draw(st.booleans())))
    return sorted(found, key=lambda given: (given.is_keyword_only, given.default is not inspect.Parameter.empty))


@st.composite
def wide_cases(draw: st.DrawFn) -> list[Given]:
    """More leaves than torch has arguments; few of them Tensors."""
    kinds = [(annotation, values) for annotation, values in LEAVES if "Tensor" not in str(annotation)]
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=65, max_size=90))
    cls = make_dataclass("Wide", [(f"f{i}", annotation) for i, (annotation, _) in enumerate(chosen)], frozen=True)
    return [Given("cfg", cls, cls(*[draw(values) for _, values in chosen]))]


def make_body(case: list[Given], seen: list[tuple[Any, ...]]) -> Callable[..., Tensor]:
    kinds = [inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY]
    parameters = [inspect.Parameter("x", kinds[0], annotation=Tensor)]
    parameters += [
        inspect.Parameter(given.name, kinds[given.is_keyword_only], annotation=given.annotation, default=given.default)
        for given in case
    ]

    def body(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        bound = signature.bind(x, *args, **kwargs)
        seen.append(tuple(bound.arguments.values())[1:])
        return x * 2

    signature = inspect.Signature(parameters, return_annotation=Tensor)
    body.__signature__ = signature  # type: ignore[attr-defined]
    return body


def lower_case(case: list[Given]) -> SignatureLowering:
    """Its lowering; a case of which two names make one flat name is refused, and not one of ours."""
    try:
        return lower_signature(make_body(case, []))
    except errors.SignatureError as error:
        if all("have the same flat name" in problem.sentence for problem in error.problems):
            reject()
        raise


def make_op(case: list[Given], seen: list[tuple[Any, ...]]) -> Callable[..., Any]:
    lowering = lower_case(case)
    # torch leaves out the last values that equal their defaults, as -0.0 equals 0.0.
    for value, argument in zip(flat_arguments(case, Bridge(lowering)), lowering.arguments, strict=True):
        assume(not (argument.has_default and value == argument.default) or same(value, argument.default))
    name = f"opschema_properties::op{next(_numbers)}"
    return magi_register_custom_op(name, infer_output_meta_fn=["x"])(make_body(case, seen))


def passed(case: list[Given]) -> dict[str, Any]:
    return {given.name: given.value for given in case}


def values_of(case: list[Given]) -> tuple[Any, ...]:
    return tuple(given.value for given in case)


def flat_arguments(case: list[Given], bridge: Bridge) -> tuple[Any, ...]:
    return bridge.flatten(X, *[given.value for given in case if not given.is_keyword_only],
                          **{given.name: given.value for given in case if given.is_keyword_only})  # fmt: skip


def check_lowering(case: list[Given]) -> None:
    lowering = lower_case(case)
    bridge = Bridge(lowering)
    flat = flat_arguments(case, bridge)
    assert len(flat) == len(lowering.arguments) <= 64
    assert sum(len(list(leaves(node))) for node in lowering.tree.values()) == len(lowering.leaves)
    assert same(bridge.rebuild(*flat), (X, *values_of(case)))
    schema = torch._C.parse_schema(f"ns::{lowering.schema}")
    assert [argument.name for argument in schema.arguments] == [argument.name for argument in lowering.arguments]
    for parsed, argument in zip(schema.arguments, lowering.arguments, strict=True):
        assert parsed.has_default_value() == argument.has_default
        # torch shows the default of a dtype or a device as its own number or text for it.
        if argument.has_default and not isinstance(argument.default, TORCH_CONSTANTS):
            default = list(argument.default) if isinstance(argument.default, tuple) else argument.default
            assert parsed.default_value == default, (argument, parsed)
    assert lower_case(case).schema == lowering.schema


def check_eager(case: list[Given]) -> None:
    seen: list[tuple[Any, ...]] = []
    op = make_op(case, seen)
    assert torch.equal(op(X, **passed(case)), X * 2)
    assert same(seen.pop(), values_of(case))
    without = {given.name: given.value for given in case if given.default is inspect.Parameter.empty}
    op(X, **without)
    expected = tuple(without.get(given.name, given.default) for given in case)
    assert same(seen.pop(), expected)
    assert len(getattr(op, "__source__", "")) < 100_000
    positional = list(itertools.takewhile(lambda given: not given.is_keyword_only, case))
    op(X, *[given.value for given in positional], **passed(case[len(positional) :]))
    assert same(seen.pop(), values_of(case))


def survives_in_a_graph(value: Any) -> bool:
    """False for the complex constants that FX writes wrongly by their repr up to torch 2.13: `infj`, `1-0j`."""
    if not isinstance(value, complex):
        return True
    are_finite = math.isfinite(value.real) and math.isfinite(value.imag)
    return are_finite and repr(ast.literal_eval(repr(value))) == repr(value)


def check_compiled(case: list[Given]) -> None:
    assume(all(map(survives_in_a_graph, flat_arguments(case, Bridge(lower_case(case))))))
    torch.compiler.reset()
    seen: list[tuple[Any, ...]] = []
    op = make_op(case, seen)
    compiled = torch.compile(lambda x, values: op(x, **values) + 1, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(X, passed(case)), X * 2 + 1)
        assert same(seen.pop(), values_of(case))
    assert not seen


def check_exported(case: list[Given]) -> None:
    seen: list[tuple[Any, ...]] = []
    op = make_op(case, seen)
    values = passed(case)
    assume(all(map(survives_in_a_graph, flat_arguments(case, Bridge(lower_case(case))))))

    loaded = saved_and_loaded(torch.export.export(Calls(lambda x: op(x, **values)), (X,)))
    assert torch.equal(loaded(X), X * 2)
    assert same(seen[-1], values_of(case))


def check_opcheck(case: list[Given]) -> None:
    op = make_op(case, [])
    assert set(opcheck(op, (X,), passed(case)).values()) == {"SUCCESS"}


# what is checked of which cases, how many of them in every run, and how many in a whole one
CHECKS: dict[str, tuple[Callable[[list[Given]], None], st.SearchStrategy[list[Given]], int, int]] = {
    "flatten and rebuild are inverse": (check_lowering, cases(depth=3), 60, 2000),
    "the body gets the value": (check_eager, cases(depth=3), 60, 2000),
    "compiled": (check_compiled, cases(), 12, 150),
    "exported and loaded": (check_exported, cases(parameters=2), 6, 60),
    "opcheck": (check_opcheck, cases(), 4, 40),
    "wide, lowered": (check_lowering, wide_cases(), 8, 60),
    "wide, in eager": (check_eager, wide_cases(), 8, 60),
    "wide, compiled": (check_compiled, wide_cases(), 1, 60),
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_random_signatures(check: str, is_whole: bool) -> None:
    function, strategy, few, many = CHECKS[check]
    examples(many if is_whole else few)(given(strategy)(function))()
