# SPDX-License-Identifier: Apache-2.0
"""Every row of the type table: the body gets what the caller passed, in eager, compiled and exported form."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    Optional,
    Required,
    TypedDict,
    TypeVar,
)

import pytest
import torch
from _signatures import (
    Access,
    Alike,
    Calls,
    Constant,
    Level,
    Mode,
    Sizes,
    Stateful,
    T,
    count_graphs,
    register_opaque_type,
    returning,
    same,
    saved_and_loaded,
)
from magi_opschema import ObjectHandle, errors, magi_register_custom_op, op_def, opcheck, register_object
from magi_opschema._text import show_type
from magi_opschema._torch_compat import opaque_name
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.types import Number


HANDLE: Any = ObjectHandle
Meters = NewType("Meters", float)
Pair = tuple[int, float]


class Color(str, enum.Enum):
    RED = "red"
    BLUE = "blue"


class Renamed(enum.Enum):
    """`value` of a member is that of the other; `_missing_` finds any value."""

    LEFT = 1
    RIGHT = 2

    @property
    def value(self) -> int:
        return 3 - self._value_

    @classmethod
    def _missing_(cls, value: object) -> Any:
        return cls.LEFT


class Texts(str, enum.Enum):
    RED = "red"
    BLUE = "blue"
    ALIAS = "red"  # noqa: PIE796

    @property
    def value(self) -> str:
        return "blue"


class Unhashable(enum.Enum):
    ONE = [1]  # noqa: RUF012
    TWO = [2]  # noqa: RUF012

    __hash__ = None  # type: ignore[assignment]


class Bits(enum.Flag, boundary=enum.KEEP):
    READ = 1
    WRITE = 2

    @property
    def value(self) -> int:
        return 1


@dataclass(frozen=True)
class Inner:
    scale: float = 1.0
    count: int = 2


@dataclass(frozen=True)
class Outer:
    weight: Tensor
    inner: Inner = Inner()
    name: str = "outer"
    skipped: ClassVar[int] = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Slotted:
    a: int
    b: float = 2.0


@dataclass(frozen=True)
class Derived(Inner):
    extra: bool = True


@dataclass(frozen=True)
class Box(Generic[T]):
    value: T
    more: list[T] = field(default_factory=list)


@dataclass(frozen=True)
class Twice(Generic[T]):
    value: T


@dataclass(frozen=True)
class Computed:
    x: float
    doubled: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", self.x * 2)


class Point(NamedTuple):
    x: float
    y: float = 0.0


class AllRequired(TypedDict, total=False):
    height: Required[int]


@dataclass(frozen=True)
class Sequences:
    sizes: Sequence[int]
    modes: Sequence[Mode] | None = None
    weights: Sequence[Tensor] = ()
    masked: tuple[Sequence[Tensor | None], int] = ((), 0)


class Held(NamedTuple):
    tensors: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class HeldInSlots:
    tensors: Sequence[Tensor]


@dataclass(frozen=True)
class WithOptional:
    inner: Inner | None = None
    bias: Tensor | None = None


W = torch.arange(3.0)

OF_SEQUENCES = [
    *("bool", "SymInt[]"),
    *("bool", "bool?", "str[]?"),
    *("bool", "Tensor[]"),
    *("bool", "Tensor[]", "bool[]", "SymInt"),
]

# annotation, value, schema types of its leaves, path of an op with a Tensor and this parameter
ROWS: list[tuple[Any, Any, list[str], str]] = [
    (int, 3, ["SymInt"], "direct"),
    (float, 0.5, ["float"], "direct"),
    (bool, True, ["bool"], "direct"),
    (str, 'a "quoted" text', ["str"], "direct"),
    (complex, 1 + 2j, ["complex"], "direct"),
    (Number, 2.5, ["Scalar"], "direct"),
    (int | float, 7, ["Scalar"], "direct"),
    (torch.dtype, torch.float16, ["ScalarType"], "direct"),
    (torch.device, torch.device("cpu"), ["Device"], "direct"),
    (torch.layout, torch.strided, ["Layout"], "direct"),
    (torch.memory_format, torch.channels_last, ["MemoryFormat"], "direct"),
    (Optional[int], None, ["SymInt?"], "direct"),
    (int | None, 3, ["SymInt?"], "direct"),
    (float | None, None, ["float?"], "direct"),
    (str | None, "x", ["str?"], "direct"),
    (torch.dtype | None, torch.int8, ["ScalarType?"], "direct"),
    (Tensor | None, None, ["Tensor?"], "direct"),
    (list[int], [1, 2], ["SymInt[]"], "direct"),
    (Sequence[float], [1.0, math.inf], ["float[]"], "direct"),
    (list[bool], [True, False], ["bool[]"], "direct"),
    (list[str], ["a", "b"], ["str[]"], "direct"),
    (list[Tensor], [W, W + 1], ["Tensor[]"], "direct"),
    (list[Tensor] | None, None, ["Tensor[]?"], "direct"),
    (list[int] | None, [4], ["SymInt[]?"], "direct"),
    (torch.Size, torch.Size([2, 3]), ["SymInt[]"], "lowered"),
    (list[Tensor | None], [W, None, W], ["Tensor[]", "bool[]"], "flattened"),
    (list[complex], [1j, 2.0 + 1j], ["float[]"], "flattened"),
    (list[torch.dtype], [torch.float32, torch.int8], ["str[]"], "flattened"),
    (list[torch.device], [torch.device("cpu")], ["str[]"], "flattened"),
    (tuple[torch.device, ...] | None, None, ["str[]?"], "flattened"),
    (Literal["rms", "layer"], "layer", ["str"], "lowered"),
    (Literal["rms", "layer"] | None, None, ["str?"], "lowered"),
    (Literal["rms", None], None, ["str?"], "lowered"),
    (Literal[1, 2], 2, ["SymInt"], "lowered"),
    (Literal[True], True, ["bool"], "lowered"),
    (Literal["a", 1, True], True, ["SymInt"], "flattened"),
    (Literal[1, True], 1, ["SymInt"], "flattened"),
    (Literal[Mode.RMS, "x"], Mode.RMS, ["SymInt"], "flattened"),
    (list[Literal["a", "b"]], ["b", "a"], ["str[]"], "lowered"),
    (Mode, Mode.LAYER, ["str"], "flattened"),
    (Level, Level.HIGH, ["str"], "flattened"),
    (Color, Color.BLUE, ["str"], "flattened"),
    (Access, Access.READ | Access.WRITE, ["SymInt"], "flattened"),
    (Mode | None, None, ["str?"], "flattened"),
    (list[Mode], [Mode.RMS, Mode.LAYER], ["str[]"], "flattened"),
    (Meters, 2.0, ["float"], "lowered"),
    (Annotated[int, "units"], 5, ["SymInt"], "lowered"),
    (Final[int], 5, ["SymInt"], "lowered"),
    (tuple[int, ...], (1, 2, 3), ["SymInt[]"], "lowered"),
    (tuple[Tensor, ...], (W, W), ["Tensor[]"], "lowered"),
    (tuple[Mode, ...], (Mode.RMS,), ["str[]"], "flattened"),
    (tuple[int, float], (1, 2.0), ["SymInt", "float"], "flattened"),
    (Pair, (3, 0.5), ["SymInt", "float"], "flattened"),
    (tuple[Tensor], (W,), ["Tensor"], "flattened"),
    (tuple[tuple[int, int], str], ((1, 2), "x"), ["SymInt", "SymInt", "str"], "flattened"),
    (Inner, Inner(2.0, 5), ["float", "SymInt"], "flattened"),
    (Outer, Outer(W, Inner(3.0)), ["Tensor", "float", "SymInt", "str"], "flattened"),
    (Slotted, Slotted(a=1), ["SymInt", "float"], "flattened"),
    (Derived, Derived(extra=False), ["float", "SymInt", "bool"], "flattened"),
    (Box[int], Box(3, [1]), ["SymInt", "SymInt[]"], "flattened"),
    (Computed, Computed(1.5), ["float"], "flattened"),
    (Point, Point(1.0, 2.0), ["float", "float"], "flattened"),
    (Sizes, {"height": 2, "width": 3}, ["SymInt", "SymInt"], "flattened"),
    (AllRequired, {"height": 2}, ["SymInt"], "flattened"),
    (Inner | None, None, ["bool", "float?", "SymInt?"], "flattened"),
    (Inner | None, Inner(), ["bool", "float?", "SymInt?"], "flattened"),
    (WithOptional, WithOptional(Inner(4.0), W), ["bool", "float?", "SymInt?", "Tensor?"], "flattened"),
    (WithOptional | None, WithOptional(), ["bool", "bool?", "float?", "SymInt?", "Tensor?"], "flattened"),
    (tuple[int, int] | None, (1, 2), ["bool", "SymInt?", "SymInt?"], "flattened"),
    (tuple[Tensor | None, ...], (W, None, W), ["Tensor[]", "bool[]"], "flattened"),
    (tuple[Tensor | None, ...] | None, (None,), ["bool", "Tensor[]?", "bool[]?"], "flattened"),
    (Twice[Twice[Inner]], Twice(Twice(Inner())), ["float", "SymInt"], "flattened"),
    (list[Tensor | None] | None, [None, W], ["bool", "Tensor[]?", "bool[]?"], "flattened"),
]
# The same, of classes that override what Python wrote, and of sequences in records.
MORE_ROWS: list[tuple[Any, Any, list[str], str]] = [
    *((type(member), member, ["str"], "flattened") for member in (*Renamed, *Texts, *Alike, *Unhashable)),
    *((Bits, value, ["SymInt"], "flattened") for value in (Bits.READ, Bits.WRITE, Bits.READ | Bits.WRITE, Bits(8))),
    *((Sequences, value, OF_SEQUENCES, "flattened") for value in (
        Sequences([1, 2], [Mode.RMS], [W], ([W, None], 1)),
        Sequences((1, 2), (Mode.RMS,), (W,), ((None, W), 1)),
        Sequences((), None, [], ([], 1)),
    )),
    *((cls, cls(value), ["bool", "Tensor[]"], "flattened") for cls in (Held, HeldInSlots) for value in ([W], (W, W))),
    (Held | None, Held((W,)), ["bool", "bool?", "Tensor[]?"], "flattened"),
    (torch.SymInt, 3, ["SymInt"], "lowered"),
    (int | torch.SymInt | None, None, ["SymInt?"], "lowered"),
    (float | torch.SymFloat, 0.5, ["float"], "lowered"),
    (bool | torch.SymBool, True, ["bool"], "lowered"),
    (Number | torch.SymInt, 2.5, ["Scalar"], "lowered"),
    (list[int | torch.SymInt], [1, 2], ["SymInt[]"], "direct"),
    (Optional[torch.Size], None, ["SymInt[]?"], "lowered"),
    (Twice[torch.Size | None], Twice(torch.Size([2])), ["SymInt[]?"], "flattened"),
    (Twice[Twice[int | torch.SymInt]], Twice(Twice(2)), ["SymInt"], "flattened"),
]  # fmt: skip
IDS = [f"{index}-{annotation}" for index, (annotation, *_) in enumerate(ROWS + MORE_ROWS)]


def make_op(ns: str, annotation: Any, seen: list[Any], **options: Any) -> Callable[..., Any]:
    def body(x: Tensor, value: Any) -> Tensor:
        seen.append(value)
        return x * 2

    body.__annotations__["value"] = annotation
    return magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=["x"], **options)(body)


@pytest.mark.parametrize(("annotation", "value", "schema_types", "path"), ROWS + MORE_ROWS, ids=IDS)
def test_row(ns: str, annotation: Any, value: Any, schema_types: list[str], path: str) -> None:
    seen: list[Any] = []
    op = make_op(ns, annotation, seen)
    definition = op_def(op)
    assert [leaf.schema_type for leaf in definition.lowering.leaves[1:]] == schema_types
    assert definition.path == path
    assert torch.equal(op(W, value), W * 2)
    assert torch.equal(op(W, value=value), W * 2)
    assert set(opcheck(op, (torch.arange(3.0), value)).values()) == {"SUCCESS"}

    compiled, graphs = count_graphs(lambda x, value: op(x, value) + 1)
    assert torch.equal(compiled(W, value), W * 2 + 1)
    targets = [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert targets.count(definition.torch_op) == 1

    loaded = saved_and_loaded(torch.export.export(Calls(lambda x: op(x, value)), (W,)))
    assert torch.equal(loaded(W), W * 2)
    assert len(seen) >= 4
    assert all(same(passed, value) for passed in seen), (seen, value)


def test_golden_of_each_row(ns: str, request: pytest.FixtureRequest) -> None:
    """Schema and generated code of every row in one file; `pytest --accept` writes it, and the diff is the review."""
    sections = []
    for index, (annotation, *_) in enumerate(ROWS):
        definition = op_def(make_op(f"{ns}_{index}", annotation, []))
        texts = [getattr(fn, "__source__", "") for fn in (definition.exposed_op, definition.lowered_fn)]
        sections.append(
            "\n".join([f"=== {show_type(annotation)}", f"{definition.lowering.schema}\n", *filter(None, texts)])
        )
    text = re.sub(rf"{ns}_\d+", "mylib", "\n".join(sections))
    path = Path(__file__).parent / "golden" / "rows.txt"
    if request.config.getoption("--accept"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


@dataclass(frozen=True)
class Noise:
    generator: torch.Generator | None = None


def forms(cls: Any, value: Any) -> list[tuple[Any, Any, str]]:
    """Annotations with a class in them, a value of each, and its schema if torch takes the class as it is."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    return [
        (cls, value, f"{name} value"),
        (Optional[cls], value, f"{name}? value"),
        (Optional[cls], None, f"{name}? value"),
        (list[cls], [value, value], f"{name}[] value"),
        (tuple[cls, ...], (value,), f"{name}[] value"),
        (Twice[Twice[cls]], Twice(Twice(value)), f"{name} value__value__value"),
        (Twice[cls] | None, Twice(value), f"bool value__is_some, {name}? value__value"),
    ]


def check_everywhere(op: Any, value: Any, *backends: str, is_exported: bool = True) -> None:
    """An op of `make_op` has the gradient 2, eager and compiled, and is right exported and in vmap."""
    for call in (op, *(torch.compile(op, fullgraph=True, backend=name) for name in backends)):
        x = W.clone().requires_grad_()
        (grad,) = torch.autograd.grad(call(x, value).sum(), x)
        assert grad.tolist() == [2.0] * 3
    if is_exported:
        exported = torch.export.export(Calls(lambda x: op(x, value)), (W,))
        assert torch.equal(exported.module()(W), W * 2)
    assert torch.equal(torch.vmap(op, in_dims=(0, None))(torch.ones(2, 3), value), torch.full((2, 3), 2.0))


@pytest.mark.parametrize("is_optional", [False, True])
@pytest.mark.parametrize("cls", [torch.Generator, Noise])
def test_a_generator(ns: str, cls: Any, is_optional: bool) -> None:
    """Dynamo cannot trace one, so a graph has its handle, and other generators have other graphs."""

    def body(x: Tensor, value: Any) -> Tensor:
        generator = value.generator if isinstance(value, Noise) else value
        return x + torch.randn(x.shape, generator=generator)

    body.__annotations__["value"] = Optional[cls] if is_optional else cls
    op: Any = magi_register_custom_op(f"{ns}::op")(body)

    def make() -> Any:
        generator = torch.Generator().manual_seed(1)
        return Noise(generator) if cls is Noise else generator

    assert op_def(op).lowering.leaves[-1].schema_type.startswith("Generator")
    assert op_def(op).by_handle is not None
    x = torch.zeros(3)
    draws = torch.Generator().manual_seed(1)
    expected = [torch.randn(3, generator=draws) for _ in range(2)]
    twice: Any = lambda x, value: (op(x, value), op(x, value))  # noqa: E731
    whole: Any = torch.compile(twice, fullgraph=True, backend="aot_eager")
    value = make()
    for drawn in (twice(x, value), whole(x, make()), whole(x, make())):
        assert all(map(torch.equal, drawn, expected))
    if is_optional:
        assert len(whole(x, None)) == 2


def test_a_generator_is_not_run_again_for_a_backward(ns: str) -> None:
    @magi_register_custom_op(
        f"{ns}::noise",
        setup_context_fn=lambda ctx, inputs, output: ctx.save_for_backward(output),
        backward_fn=lambda ctx, grad: (grad * ctx.saved_tensors[0], None),
    )
    def noise(x: Tensor, generator: torch.Generator) -> Tensor:
        return x + torch.rand(x.shape, generator=generator)

    x = torch.ones(64, requires_grad=True)
    output = torch.compile(lambda x, g: noise(x.sin(), g).cos(), fullgraph=True)(x, torch.Generator().manual_seed(1))
    (grad,) = torch.autograd.grad(output.sum(), x)
    drawn = x.sin() + torch.rand(64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(grad, -drawn.sin() * drawn * x.cos())


@pytest.mark.parametrize("make", [torch.Generator, lambda: torch.Stream("cpu"), torch.Event], ids=["g", "s", "e"])
def test_what_no_graph_holds_has_a_handle(ns: str, make: Callable[[], Any]) -> None:
    value = make()
    if isinstance(value, torch.Event) and TorchVersion(torch.__version__) < "2.12":
        pytest.skip("Dynamo knows no class of an Event")
    # Up to torch 2.12 an exported program holds no Generator.
    is_exported = not isinstance(value, torch.Generator) or TorchVersion(torch.__version__) >= "2.13"
    for i, (annotation, passed, _) in enumerate(forms(type(value), value)):
        seen: list[Any] = []
        op: Any = make_op(f"{ns}_{i}", annotation, seen, backward_fn=lambda ctx, grad: (grad * 2, None))
        check_everywhere(op, passed, "aot_eager", is_exported=is_exported)
        assert len(seen) == 4 + is_exported
        # The dispatcher makes another Python object of a Generator.
        assert all(same(found, passed) for found in seen[1:2])
    handle = register_object(value)
    compiled = torch.compile(make_op(ns, HANDLE[type(value)], []), fullgraph=True, backend="aot_eager")
    for passed in (value, handle):
        assert torch.equal(compiled(W, passed), W * 2)


@pytest.mark.parametrize("make", [list, tuple, Twice])
def test_numbers_of_several_classes(ns: str, make: Any) -> None:
    """No exported program with a list of these can be saved, as with torch.library."""
    annotation = {list: list[Number], tuple: tuple[int | float, ...], Twice: Twice[list[Number] | None]}[make]
    numbers = [1, 2.5, -0.0, 2**60 + 1, math.inf]
    value, seen = Twice(numbers) if make is Twice else make(numbers), []  # type: ignore[var-annotated]
    op: Any = make_op(ns, annotation, seen, backward_fn=lambda ctx, grad: (grad * 2, None))
    assert "Scalar[]" in op_def(op).lowering.schema
    check_everywhere(op, value, "aot_eager", "inductor")
    assert len(seen) == 6
    assert all(same(found, value) and repr(found) == repr(value) for found in seen)
    refused = ["1"] if make is list else ("1",) if make is tuple else Twice(["1"])
    with pytest.raises(errors.ArgumentError, match=r"'value(\.value)?' is .*, expected a list with each item a number"):
        op(W, refused)


def test_a_default_generator(ns: str) -> None:
    @magi_register_custom_op(f"{ns}::noise")
    def noise(x: Tensor, generator: torch.Generator | None = torch.Generator().manual_seed(1)) -> Tensor:  # noqa: B008
        return x + torch.randn(x.shape, generator=generator)

    assert torch.equal(noise(torch.zeros(3)), torch.randn(3, generator=torch.Generator().manual_seed(1)))


def test_a_size_with_a_symbol(ns: str) -> None:
    seen: list[Any] = []

    def fake(x: Tensor, shape: torch.Size) -> Tensor:
        assert type(shape) is torch.Size
        return x.new_empty(shape)

    @magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=fake)
    def op(x: Tensor, shape: torch.Size) -> Tensor:
        seen.append(shape)
        return x.new_zeros(shape)

    compiled, graphs = count_graphs(lambda x: op(x, x.shape) + op(x, torch.Size((x.shape[0], 3))), dynamic=True)
    for rows in (4, 5):
        assert compiled(torch.ones(rows, 3)).shape == (rows, 3)
        assert seen[-2:] == [torch.Size((rows, 3))] * 2
    assert len(graphs) == 1
    with pytest.raises(errors.ArgumentError, match="'shape' is 3 .*expected a list with each item an int of 64 bits"):
        op(torch.ones(1), 3)  # type: ignore[arg-type]


needs_opaque = pytest.mark.skipif(Stateful is None, reason="torch registers no opaque classes like these")


@pytest.fixture
def mesh() -> Iterator[Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def opaque_forms(cls: Any, value: Any) -> list[tuple[Any, Any, str]]:
    """The forms of an opaque class, which may also be missing in a list."""
    return [*forms(cls, value), (list[cls | None], [None, value], f"{cls.__module__}.{cls.__qualname__}?[] value")]


@needs_opaque
@pytest.mark.parametrize("kind", ["reference", "value", "ProcessGroup", "DeviceMesh"])
def test_a_class_that_is_registered_with_torch(ns: str, kind: str, request: pytest.FixtureRequest) -> None:
    """It stays whole, alone and in records, lists and tuples; the dispatcher does not look at it, so we do."""
    made: dict[str, Callable[[], Any]] = {
        "reference": lambda: Stateful(3),
        "value": lambda: Constant(3),
        "ProcessGroup": lambda: request.getfixturevalue("mesh").get_group(),
        "DeviceMesh": lambda: request.getfixturevalue("mesh"),
    }
    value = made[kind]()
    is_behind_handle = not opaque_name(type(value))
    assert not is_behind_handle or TorchVersion(torch.__version__) < "2.13"
    known = forms if is_behind_handle else opaque_forms
    for i, (annotation, passed, schema) in enumerate(known(type(value), value)):
        seen: list[Any] = []
        op: Any = make_op(f"{ns}_{i}", annotation, seen, backward_fn=lambda ctx, grad: (grad * 2, None))
        expected = re.sub(r"torch\.[\w.]+", "SymInt", schema) if is_behind_handle else schema
        assert op_def(op).lowering.schema == f"body(Tensor x, {expected}) -> Tensor"
        is_exported = kind == "value" or TorchVersion(torch.__version__) >= "2.13"  # 2.11 lifts no such constant
        check_everywhere(op, passed, "aot_eager", "inductor", is_exported=is_exported)
        assert len(seen) >= 5
        assert all(same(found, passed) for found in seen)


@needs_opaque
@pytest.mark.parametrize(
    ("annotation", "value", "sentence"),
    [
        (0, 3, "'value' is 3 (int), expected a Stateful."),
        (0, None, "'value' is None (NoneType), expected a Stateful."),
        (1, "x", "'value' is 'x' (str), expected a Stateful, or None."),
        (3, [3], "'value' is [3] (list), expected a list with each item a Stateful."),
        (5, Twice(Twice(3)), "'value.value.value' is 3 (int), expected a Stateful."),
        (6, Twice(None), "'value.value' is None (NoneType), expected a Stateful."),
        (7, [3], "'value' is [3] (list), expected a list with each item a Stateful, or None."),
    ],
)
def test_another_class_for_one_that_is_registered_with_torch(
    ns: str, annotation: int, value: Any, sentence: str
) -> None:
    op: Any = make_op(ns, opaque_forms(Stateful, None)[annotation][0], [])
    compiled: Any = torch.compile(op, fullgraph=True, backend="aot_eager")
    for x in (W, W.clone().requires_grad_()):
        with pytest.raises(errors.ArgumentError, match=re.escape(f"{ns}::op: {sentence}")):
            op(x, value)
    with pytest.raises(Exception, match=re.escape(f"{ns}::op: {sentence[:20]}")):
        compiled(W, value)


@needs_opaque
def test_what_else_holds_of_a_class_that_is_registered_with_torch(ns: str) -> None:
    default = Stateful(5)
    many = make_dataclass(
        "Many", [*((f"f{i}", float) for i in range(70)), ("some", list[Stateful]), ("one", Stateful)], frozen=True
    )
    seen: list[Any] = []

    @magi_register_custom_op(f"{ns}::op")
    def op(x: Tensor, cfg: many, value: Stateful = default) -> Tensor:  # type: ignore[valid-type]
        seen.append((cfg.some, cfg.one, value))  # type: ignore[attr-defined]
        return x * 2

    op(W, many(*[0.0] * 70, [default], default))
    assert seen == [([default], default, default)]

    class Local(type(default)):  # type: ignore[misc]
        pass

    Special = type("Special", (type(default),), {"__module__": "_signatures"})
    register_opaque_type(Special, typ="reference")
    with pytest.raises(errors.ArgumentError, match=r"'value' is .*\(Stateful\), expected a Special\."):
        make_op(f"{ns}_base", Special, [])(W, default)
    compiled = torch.compile(make_op(f"{ns}_handle", HANDLE[Stateful], []), fullgraph=True, backend="eager")
    sentence = "torch passes to ops as it is, and .* Annotate it Stateful, or pass the h"
    with pytest.raises(Exception, match="AttributeError" if TorchVersion(torch.__version__) >= "2.15" else sentence):
        compiled(W, default)
    compiled(W, register_object(default, weak=True))

    register_opaque_type(Local, typ="reference")
    with pytest.raises(
        errors.SignatureError, match=r"registered as '.*<locals>\.Local', a name that no schema can hold"
    ):
        make_op(f"{ns}_local", Local, [])
    with pytest.raises(errors.SignatureError, match="which torch takes for a constant of a graph, so that compiled"):
        magi_register_custom_op(f"{ns}::back")(returning(Constant))


@dataclass(frozen=True)
class Doubled:
    value: Tensor
    made: Stateful


@needs_opaque
@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.12", reason="Inductor takes no objects from an op")
def test_an_op_returns_an_object_that_torch_has_registered_as_opaque(ns: str) -> None:
    @magi_register_custom_op(f"{ns}::made", infer_output_meta_fn=lambda x: Doubled(torch.empty_like(x), Stateful(0)))
    def made(x: Tensor) -> Doubled:
        return Doubled(x * 2, Stateful(int(x.sum())))

    @magi_register_custom_op(f"{ns}::used", infer_output_meta_fn=["x"])
    def used(x: Tensor, by: list[Stateful]) -> Tensor:
        return x * by[0].number

    def model(x: Tensor) -> tuple[Tensor, Stateful]:
        both = made(x)
        return used(both.value, [both.made]), both.made

    for backend in ("eager", "aot_eager", "inductor"):
        compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
        for x in (torch.ones(3), torch.full((3,), 2.0)):
            for run in (model, compiled):
                out, by = run(x)
                assert (out.tolist(), by.number) == ((2 * x * x.sum()).tolist(), x.sum())

    @magi_register_custom_op(f"{ns}::wrong", infer_output_meta_fn=lambda x: Stateful(0))
    def wrong(x: Tensor) -> Stateful:
        return 3  # type: ignore[return-value]

    with pytest.raises(errors.ReturnValueError, match=r"'output' is 3 \(int\), expected a Stateful"):
        wrong(W)


class Named(enum.Enum):
    """`name` of every member is LEFT, which Dynamo cannot trace."""

    LEFT = 1
    RIGHT = 2.5

    @property
    def name(self) -> str:
        return "LEFT"


@pytest.mark.parametrize("cls", [Mode, Named])
def test_enum_by_value_and_by_member(ns: str, cls: Any) -> None:
    seen: list[Any] = []
    op = make_op(ns, cls, seen)
    for member in cls:
        for value in (member, member.value):
            op(W, value)
            assert seen.pop() is member


class Modes(enum.IntFlag):
    NORM = 1
    BIAS = 2


class Switch(enum.Flag):
    ON = 1


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("cls", [Bits, Modes])
def test_a_flag_by_its_bits_and_by_member(ns: str, cls: Any, backend: str | None) -> None:
    seen: list[Any] = []
    op = make_op(ns, cls, seen)
    call = op if backend is None else torch.compile(op, fullgraph=True, backend=backend)
    for value in (1, cls(2), 3, 0):
        call(W, value)
        assert (type(seen[-1]), seen.pop()) == (cls, cls(value))


@pytest.mark.parametrize("value", [2, True, Modes.NORM])
def test_bits_that_a_flag_does_not_have(ns: str, value: object) -> None:
    with pytest.raises(errors.ArgumentValueError, match=r"'value' is .*, expected a Switch, or the bits of one\. \("):
        make_op(ns, Switch, [])(W, value)


@pytest.mark.parametrize(
    ("annotation", "same"),
    [
        ("Literal['a'] | Literal['b']", Literal["a", "b"]),
        ("Literal['a'] | Literal[1] | None", Literal["a", 1] | None),
        ("Literal['a'] | Literal['b', None]", Literal["a", "b", None]),
        (TypeVar("Bound", bound=Tensor), Tensor),
        (list[TypeVar("BoundByText", bound="Tensor")], list[Tensor]),  # type: ignore[misc]
    ],
    ids=str,
)
def test_an_annotation_that_says_the_same(ns: str, annotation: object, same: object) -> None:
    first, second = (op_def(make_op(f"{ns}_{i}", one, [])).lowering for i, one in enumerate((annotation, same)))
    assert [p.node for p in first.parameters] == [p.node for p in second.parameters]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_the_text_of_a_device_will_do(ns: str, backend: str | None) -> None:
    """The dispatcher takes it for one device, so a list does."""
    for annotation, value in ((torch.device, "cpu"), (list[torch.device], ["cpu", torch.device("cpu")])):
        seen: list[Any] = []
        op = make_op(f"{ns}_{len(str(annotation))}", annotation, seen)
        call = op if backend is None else torch.compile(op, fullgraph=True, backend=backend)
        call(W, value)
        assert seen[0] == (torch.device("cpu") if annotation is torch.device else [torch.device("cpu")] * 2)


def test_a_sequence_of_a_record_is_a_list_or_a_tuple(ns: str) -> None:
    op = make_op(ns, Sequences, [])
    with pytest.raises(errors.ArgumentError, match=r"'value.sizes' is .*, expected a list or a tuple, Sequence\[int\]"):
        op(W, Sequences(range(3)))


def test_a_sequence_of_a_returned_record_is_a_list(ns: str) -> None:
    @magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=lambda x, as_tuple: HeldInSlots([x]))
    def op(x: Tensor, as_tuple: bool) -> HeldInSlots:
        return HeldInSlots((x * 2,) if as_tuple else [x * 2])

    assert same(op(W, False), HeldInSlots([W * 2]))
    with pytest.raises(
        errors.ReturnValueError, match=r"'output.tensors' is .* \(tuple\), expected a list, because a Seq"
    ):
        op(W, True)
