# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,empty-body"
"""What no graph can carry: the op stays opaque, with a warning or an error that says which kernel, where, why, the fix.

A function that does not take what the operator passes is refused, because it would often run and compute wrongly.
"""

from __future__ import annotations

import enum
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, NewType
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
import tritonwrap_patterns as patterns
from graph_questions import Ops, launches, op_stays
from magi_tritonwrap import (
    OpaqueFallbackWarning,
    UnsupportedKernelError,
    UnsupportedLaunchError,
    make_see_through,
    see_through_report,
    triton_op,
    unsupported_launches,
)
from magi_tritonwrap._kernel.kernels import as_kernel
from magi_tritonwrap.errors import NotAnOpError
from magi_tritonwrap.testing import aot_graphs, launches_of
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from triton.experimental import gluon
from triton.experimental.gluon import language as gluon_language


pytestmark = pytest.mark.usefixtures("stub")
ANY: dict[str, Any] = {"mutates_args": (), "schema": "(Tensor x) -> Tensor"}


@triton.jit
def kernel(x, out, n, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)))


def tuned(**settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return triton.autotune(configs=[triton.Config({"BLOCK": 128})], key=["n"], **settings)(kernel)


def no_hook(*args: Any, **kwargs: Any) -> None:
    pass


@gluon.jit
def gluon_kernel(x, out, n, BLOCK: tl.constexpr):
    gluon_language.store(out, gluon_language.load(x))


config_with_hook = triton.autotune(configs=[triton.Config({"BLOCK": 128}, pre_hook=no_hook)], key=[])(kernel)

CLASH = (
    r"computes BLOCK in @triton\.heuristics above an @triton\.autotune whose configs set the same\. "
    r"The accepted order is @triton\.autotune, then @triton\.heuristics, then @triton\.jit"
)
# Kernels that a function names, and what is said of them at decoration.
KERNELS = {
    "pre_hook of a config": (config_with_hook, r"has a triton\.Config with pre_hook=, arbitrary Python"),
    "gluon": (gluon_kernel, r"is a Gluon kernel, which Inductor cannot write down again"),
    "two autotuners": (
        triton.autotune(configs=[triton.Config({}, num_warps=8)], key=[])(tuned()),
        r"has 2 @triton\.autotune decorators, and torch supports one\. Merge",
    ),
    "heuristics that clash": (triton.heuristics({"BLOCK": lambda args: 128})(tuned()), CLASH),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_that_no_graph_can_carry_is_known_at_decoration(ops: Ops, name: str) -> None:
    launched, sentence = KERNELS[name]
    body = patterns.through(launched)
    op = ops.define("op", body)
    function = as_kernel(launched).function
    where = rf"Triton kernel '{function.__name__}' .*test_refused\.py:{function.__code__.co_firstlineno}\)"
    strict: dict[str, Any] = {"on_unsupported": "error"}
    for attempt in (
        lambda: make_see_through(op, body, **strict),
        lambda: triton_op(f"{ops.namespace}::other", body, **strict, **ANY),
    ):
        with pytest.raises(UnsupportedKernelError, match=sentence) as caught:
            attempt()
        caught.match(where)
    assert not hasattr(getattr(torch.ops, ops.namespace), "other"), "no op is left behind"

    with pytest.warns(OpaqueFallbackWarning, match=rf"op stays opaque to the compiler: Triton kernel .*{sentence}"):
        report = make_see_through(op, body)
    assert not report.see_through
    assert str(report).startswith(f"{ops.namespace}::op: opaque, Triton kernel ")
    assert op_stays(op)
    with pytest.warns(OpaqueFallbackWarning):
        other = triton_op(f"{ops.namespace}::other", body, **ANY)
    assert not see_through_report(other).see_through


def test_settings_that_inductor_was_told_to_overlook(ops: Ops) -> None:
    body = patterns.through(config_with_hook)
    with torch._inductor.config.patch(unsafe_ignore_unsupported_triton_autotune_args=True):
        assert make_see_through(ops.define("op", body), body).see_through


SETTINGS = [{"pre_hook": no_hook}, {"post_hook": no_hook}, {"warmup": 7}, {"rep": 7}, {"use_cuda_graph": True}]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings)))
def test_settings_of_triton_s_own_benchmark_do_not_matter_to_a_graph(settings: dict[str, Any], ops: Ops) -> None:
    op = ops.seen("op", patterns.through(tuned(**settings)))
    (launch,) = launches(op, torch.ones(300))
    assert [config.kwargs["BLOCK"] for config in launch.kernel.configs] == [128]


HOOKS: dict[str, Any] = {"hooked": config_with_hook}


@triton.jit
def table_kernel(pointers, n, BLOCK: tl.constexpr):
    out = tl.load(pointers).to(tl.pointer_type(tl.float32))
    tl.store(out + tl.arange(0, BLOCK), n)


@triton.jit
def moded_kernel(out, n, MODE: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), n)


def launched_with(mode: object) -> Callable[[Tensor], object]:
    return lambda x: moded_kernel[(1,)](x, 4, mode, BLOCK=4)


class Act(enum.Enum):
    SILU = 1


class Tile(NamedTuple):
    rows: int
    columns: int


class Address:
    def __init__(self, x: Tensor) -> None:
        self.x, self.dtype = x, x.dtype

    def data_ptr(self) -> int:
        return self.x.data_ptr()


BUFFER = torch.ones(4).data_ptr()


# Launches, of which only the trace tells.
LAUNCHES: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "a misspelt parameter": (
        lambda x: kernel[(1,)](x, x, n=4, BLOK=4),
        "is launched with BLOK=, which is neither a parameter of it nor .*; did you mean BLOCK=",
    ),
    "warmed up": (
        lambda x: kernel.warmup(x, x, 4, BLOCK=4, grid=(1,))[(1, 1, 1)](x, x, 4),
        r"is compiled by \.warmup\(\) in the op's body, .*Launch the kernel itself",
    ),
    "in a table": (lambda x: HOOKS["hooked"][(1,)](x, x, 4), r"has a triton\.Config with pre_hook="),
    "addresses": (
        lambda x: kernel[(1,)](x.data_ptr(), torch.empty_like(x).data_ptr(), 4, BLOCK=4),
        "was launched with 'x', the address of a Tensor that the graph then does not see; pass the Tenso",
    ),
    "an object with an address": (
        lambda x: kernel[(1,)](x, Address(x), 4, BLOCK=4),
        "was launched with 'out', the address of a Tensor",
    ),
    "addresses of before": (
        lambda x: kernel[(1,)](BUFFER, BUFFER, 4, BLOCK=4),
        "kernel' writes none of its tensors as far as torch can tell",
    ),
    "reinterpreted as wider": (
        lambda x: kernel[(1,)](x, triton.reinterpret(x, tl.float64), 4, BLOCK=4),
        "was launched with 'out' reinterpreted as fp64, as which torch cannot view it",
    ),
    "tensors in a tuple": (
        lambda x: kernel[(1,)]((x, x), x, 4, BLOCK=4),
        "was launched with tensors inside the tuple 'x'",
    ),
    "a table of pointers": (
        lambda x: table_kernel[(1,)](torch.zeros(1, dtype=torch.int64, device=x.device), x.numel(), BLOCK=128),
        "table_kernel' writes none of its tensors as far as torch can tell",
    ),
}
WITHOUT_LITERAL: dict[str, object] = {
    "enumeration": tl.constexpr(Act.SILU),
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "named tuple": Tile(1, 2),
    "inside of a tuple": (1, torch.float32),
}
for name, value in WITHOUT_LITERAL.items():
    LAUNCHES[name] = (
        launched_with(value),
        r"was launched with MODE=.*, which Inductor cannot write into the kernel's source; pass a number, a string or",
    )
LAUNCHES["a value of a config"] = (
    lambda x: triton.autotune([triton.Config({"MODE": torch.float32})], key=[])(moded_kernel)[(1,)](x, 4, BLOCK=4),
    "was launched with MODE=torch.float32, which Inductor cannot write",
)
LAUNCHES["a Tensor as a size"] = (
    lambda x: kernel[(torch.tensor(2),)](x, x, 4, BLOCK=4),
    r"was launched on a grid with a Tensor in it; give sizes, of a Tensor its \.shape",
)
PLACED = {"a misspelt parameter", "warmed up", "a table of pointers", "tensors in a tuple"}


@pytest.mark.parametrize("how", ["op", "setting", "neither"])
@pytest.mark.parametrize("name", LAUNCHES)
def test_what_only_the_trace_tells(name: str, how: str, ops: Ops) -> None:
    launch, reason = LAUNCHES[name]

    def body(x: Tensor) -> Tensor:
        launch(x)
        return x.clone()

    op = ops.define("late", body)
    make_see_through(op, body, on_unsupported="error" if how == "op" else None)
    if how != "neither":
        with (
            unsupported_launches("error" if how == "setting" else "opaque"),
            pytest.raises(BackendCompilerFailed, match=reason) as caught,
        ):
            aot_graphs(op, torch.ones(300))
        error = UnsupportedKernelError if name == "in a table" else UnsupportedLaunchError
        assert isinstance(caught.value.inner_exception, error)
        caught.match(r"defined at .*test_refused\.py" if name != "in a table" else rf"{__file__}:")
        if name in PLACED:
            caught.match(rf"launched at .*test_refused\.py:{launch.__code__.co_firstlineno}")
        return
    with pytest.warns(OpaqueFallbackWarning, match=f"late stays opaque.*{reason}"):
        assert op_stays(op, torch.ones(300))
    assert len(see_through_report(op).fallbacks) == 1


def test_a_body_that_cannot_be_traced_stays_opaque_and_says_so(ops: Ops) -> None:
    def body(x: Tensor) -> None:
        patterns.launch_double(x, x)
        assert x.data_ptr() > 0

    op = ops.seen("untraceable", body, "(Tensor(a!) x) -> ()", fake=lambda x: None)

    def program(x: Tensor) -> Tensor:
        y = x.relu()
        op(y)
        return y

    with pytest.warns(OpaqueFallbackWarning, match=r"untraceable stays opaque .* cannot be traced.*data"):
        (graph,) = aot_graphs(program, torch.ones(300))
    assert launches_of(graph) == [], "the attempt leaves no trace of its launches"
    (fallback,) = see_through_report(op).fallbacks
    assert f"{__file__}:{body.__code__.co_firstlineno + 2}" in fallback
    assert "fall-back" in str(see_through_report(op))


def test_a_launch_in_another_thread_is_not_lost(ops: Ops) -> None:
    def body(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        thread = threading.Thread(target=patterns.launch_double, args=(x, out))
        thread.start()
        thread.join()
        return out

    op = ops.seen("threaded", body)
    with (
        mock.patch.object(threading, "excepthook"),
        pytest.warns(OpaqueFallbackWarning, match=r"it launches a kernel in another thread \(.*tritonwrap_patterns"),
    ):
        assert op_stays(op)


def test_errors_of_make_see_through(ops: Ops) -> None:
    with pytest.raises(NotAnOpError, match=r"is not a registered operator.*Pass an OpOverload"):
        make_see_through("mylib::norm", patterns.helper)  # type: ignore[arg-type]
    with pytest.raises(NotAnOpError, match="It is a Triton kernel; pass the operator whose body launches it"):
        make_see_through(patterns.double_kernel, patterns.helper)
    op = ops.define("op", patterns.helper)
    with pytest.raises(NotAnOpError, match=r"is a set of overloads; pass one"):
        make_see_through(getattr(torch.ops, ops.namespace).op, patterns.helper)
    with pytest.raises(NotAnOpError, match=r"fn is None; pass the op's Python body"):
        make_see_through(op, None)  # type: ignore[arg-type]


@triton.jit
def move_kernel(x, work, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n)
    tl.store(work + at, value, at < n)
    tl.store(out + at, value, at < n)


def _moved(x: Tensor, work: Tensor) -> Tensor:
    out = torch.empty_like(x)
    move_kernel[(3,)](x, work, out, x.numel(), BLOCK=128)
    return out


def _moved_into_the_second(x: Tensor, works: list[Tensor]) -> Tensor:
    return _moved(x, works[1])


def test_a_launch_that_writes_what_the_schema_does_not_say(ops: Ops) -> None:
    schema, fake = "(Tensor x, Tensor work) -> Tensor", lambda x, *_: torch.empty_like(x)
    op = ops.seen("moved", _moved, schema, fake=fake)
    text = r"moved: the body launches a kernel that writes into 'work', which the schema .* mutates_args=\('work',\)"
    x, work = torch.ones(300), torch.ones(300)
    for program in (op, lambda x, work: op(x, work.add_(1)), lambda x, work: op(x, work.view(300))):
        with pytest.raises(Exception, match=text):
            aot_graphs(program, x, work)

    named = ops.seen("named", _moved, schema.replace("Tensor work", "Tensor(a!) work"), fake=fake)
    for program in (named, lambda x, work: named(x, work.add_(1)), lambda x, work: named(work.view(300), work)):
        assert len(launches(program, x, work)) == 1

    listed = ops.seen("listed", _moved_into_the_second, "(Tensor x, Tensor[] works) -> Tensor", fake=fake)
    with pytest.raises(Exception, match="writes into 'works', which the schema"):
        aot_graphs(lambda x, a, b: listed(x, [a, b]), *(torch.ones(300) for _ in range(3)))


class Mode(enum.Enum):
    FAST = "fast"
    EXACT = "exact"


class Text(enum.StrEnum):
    FAST = "fast"


class Number(enum.IntEnum):
    ONE = 1


@dataclass(frozen=True)
class Scale:
    factor: float = 2.0


class Pair(NamedTuple):
    x: Tensor


class Object:
    def __call__(self, x: Tensor, m: Mode) -> Tensor: ...


Count = NewType("Count", int)


def mode(x: Tensor, m: Mode) -> Tensor: ...
def mode_or_none(x: Tensor, m: Mode | None) -> Tensor: ...
def text(x: Tensor, m: Text) -> Tensor: ...
def number(x: Tensor, m: Number) -> Tensor: ...
def by_index(x: Tensor, m: Literal["a", 1]) -> Tensor: ...
def one_or_true(x: Tensor, m: Literal[1, True]) -> Tensor: ...
def record(x: Tensor, m: Scale) -> Tensor: ...
def pair(x: Pair, m: int) -> Tensor: ...
def many(x: Tensor, m: tuple[int, ...]) -> Tensor: ...
def modes(x: Tensor, m: list[Mode]) -> Tensor: ...
def complexes(x: Tensor, m: Sequence[complex]) -> Tensor: ...
def whole(x: Tensor, m: int) -> Tensor: ...
def annotated(x: Tensor, m: Annotated[Mode, "how"]) -> Tensor: ...
def one_more(x: Tensor, m: int, n: int) -> Tensor: ...
def one_less(x: Tensor) -> Tensor: ...
def another_default(x: Tensor, m: int = 3) -> Tensor: ...
def default_of_unknown(x: Tensor, m: Unknown = Mode.FAST) -> Tensor: ...  # type: ignore[name-defined]  # noqa: F821


WRONG: list[tuple[Callable[..., Any], str, str]] = [
    (mode, "str m", r"passes `str m`, and its parameter 'm' is annotated .*Mode\. Pass a body that takes what the sch"),
    (mode_or_none, "str? m", r"passes `Optional\[str\] m`, and its parameter 'm' is annotated"),
    (text, "str m", r"'m' is annotated .*Text"),
    (number, "SymInt m", r"passes `int m`, and its parameter 'm' is annotated .*Number"),
    (by_index, "SymInt m", r"'m' is annotated Literal\['a', 1\]"),
    (one_or_true, "SymInt m", r"'m' is annotated Literal\[1, True\]"),
    (record, "float m__factor", r"passes `float m__factor`, and its parameter 'm' is annotated .*Scale"),
    (pair, "SymInt m", r"passes `Tensor x`, and its parameter 'x' is annotated .*Pair"),
    (many, "SymInt[] m", r"passes `List\[int\] m`, and its parameter 'm' is annotated tuple\[int, \.\.\.\]"),
    (modes, "str[] m", r"'m' is annotated list\[.*Mode\]"),
    (complexes, "float[] m", r"'m' is annotated collections\.abc\.Sequence\[complex\]"),
    (whole, "float m", r"passes `float m`, and its parameter 'm' is annotated int"),
    (annotated, "str m", r"'m' is annotated .*Annotated\[.*Mode, 'how'\]"),
    (one_more, "SymInt m", r"passes `Tensor x`, `int m`, and missing a required argument: 'n'"),
    (one_less, "SymInt m", r"passes `Tensor x`, `int m`, and too many positional arguments"),
    (another_default, "SymInt m=2", r"the default of 'm' is 2 in the schema, and 3 in the body"),
    (
        default_of_unknown,
        'str m="fast"',
        r"the default of 'm' is 'fast' in the schema, and <Mode\.FAST: 'fast'> in",
    ),
    (Object(), "str m", r"'m' is annotated .*Mode"),
    (functools.partial(one_more, n=1), "str m", r"passes `str m`, and its parameter 'm' is annotated int"),
]


@pytest.mark.parametrize(("fn", "parameter", "why"), WRONG, ids=[str(at) for at in range(len(WRONG))])
def test_a_function_that_takes_something_else(fn: Callable[..., Any], parameter: str, why: str, ops: Ops) -> None:
    op = ops.define("op", one_less, f"(Tensor x, {parameter}) -> Tensor")
    with pytest.raises(NotAnOpError, match=rf"^make_see_through\({ops.namespace}::op\): '.*' cannot be .*{why}"):
        make_see_through(op, fn)


def test_an_enum_of_the_function_around(ops: Ops) -> None:
    class Local(enum.Enum):
        A = "a"

    def body(x: Tensor, m: Local) -> Tensor: ...

    op = ops.define("op", body, "(Tensor x, str m) -> Tensor")
    with pytest.raises(NotAnOpError, match=r"'m' is annotated .*Local\. Pass .*; op_def\(op\)\.lowered_fn is that of"):
        make_see_through(op, body)


def plain(x: Tensor, m: Literal["fast", "exact"] | None = None, *, n: int = 1) -> Tensor: ...
def numbers(x: Tensor, a: float, b: float = 2, c: complex = 1j, d: Count = Count(3)) -> Tensor: ...
def lists(x: list[Tensor], a: Sequence[int] = (1, 2), b: list[float | None] | None = None) -> Tensor: ...
def values(x: torch.nn.Parameter, a: torch.dtype = torch.half, b: torch.device | str = "cpu") -> Tensor: ...
def anything(*args, **kwargs): ...
def unread(x: NotImported, m: Any = 3, *rest: object) -> Tensor: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("fn", "parameters"),
    [
        (plain, "Tensor x, str? m=None, *, SymInt n=1"),
        (numbers, "Tensor x, SymInt a, float b=2.0, complex c=1j, int d=3"),
        (lists, "Tensor[] x, SymInt[] a=[1, 2], float[]? b=None"),
        (values, 'Tensor x, ScalarType a=half, Device b="cpu"'),
        (anything, "Tensor x, str[] m, *, Generator? g=None"),
        (lambda x, xs, m=3: x, "Tensor x, Tensor[] xs, SymInt m=3"),
        (unread, "Tensor x, SymInt m=3, SymInt n=4"),
    ],
)
def test_a_function_that_takes_it(fn: Callable[..., Any], parameters: str, ops: Ops) -> None:
    op = ops.define("op", fn, f"({parameters}) -> Tensor")
    assert make_see_through(op, fn).see_through
