# SPDX-License-Identifier: Apache-2.0
"""What an op may return: each row the same in eager mode, compiled, and exported, saved and loaded.

The same rows for ops that write into an argument: a Tensor, lists with and without one, a Tensor that may be None.

A few rows fail in torch itself. They are strict expectations, so that the release that mends one is noticed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from _signatures import Calls, same, saved_and_loaded
from magi_opschema import magi_register_custom_op
from torch import Tensor


@dataclass(frozen=True)
class Found:
    y: Tensor
    parts: tuple[Tensor, ...]
    missing: Tensor | None
    count: int


class Pair(NamedTuple):
    y: Tensor
    z: Tensor


@dataclass(frozen=True)
class Nested:
    pair: Pair
    both: tuple[Tensor, Tensor | None]


Body = Callable[[Tensor, int], Any]

# annotation, what the body returns for x and its number of rows
ROWS: dict[str, tuple[Any, Body]] = {
    "Tensor": (Tensor, lambda x, n: x * 2),
    "Tensor | None, there": (Tensor | None, lambda x, n: x * 2),
    "tuple of one": (tuple[Tensor], lambda x, n: (x * 2,)),
    "tuple": (tuple[Tensor, Tensor], lambda x, n: (x * 2, x[0] + 1)),
    "list": (list[Tensor], lambda x, n: [x * 2, x + 1]),
    "tuple of any length": (tuple[Tensor, ...], lambda x, n: (x * 2, x + 1)),
    "list beside Tensors": (tuple[Tensor, list[Tensor]], lambda x, n: (x * 2, [x + 1, x + 2])),
    "None beside Tensors": (tuple[Tensor, Tensor | None], lambda x, n: (x * 2, None)),
    "float": (float, lambda x, n: 1.5),
    "int": (int, lambda x, n: n),
    "bool": (bool, lambda x, n: True),
    "int beside Tensors": (tuple[Tensor, int], lambda x, n: (x * 2, 7)),
    "symbolic int beside Tensors": (tuple[Tensor, int], lambda x, n: (x * 2, n)),
    "bool beside Tensors": (tuple[Tensor, bool], lambda x, n: (x * 2, True)),
    "float beside Tensors": (tuple[Tensor, float], lambda x, n: (x * 2, 1.5)),
    "NamedTuple": (Pair, lambda x, n: Pair(x * 2, x + 1)),
    "dataclass": (Found, lambda x, n: Found(x * 2, (x + 1, x + 2), None, 7)),
    "nested": (Nested, lambda x, n: Nested(Pair(x * 2, x + 1), (x + 2, None))),
}
X = torch.arange(6.0).reshape(3, 2)


def make_op(ns: str, row: str) -> Callable[..., Any]:
    annotation, returned = ROWS[row]

    def body(x: Tensor, n: int) -> Any:
        return returned(x, n)

    body.__annotations__["return"] = annotation
    return magi_register_custom_op(f"{ns}::op", infer_output_meta_fn=returned)(body)


def compiled(backend: str, *, dynamic: bool) -> Callable[[Callable[..., Any]], Any]:
    def run(op: Callable[..., Any]) -> Any:
        call = torch.compile(lambda x: op(x, x.shape[0]), fullgraph=True, backend=backend, dynamic=dynamic)
        call(X[:2])
        return call(X)

    return run


def flat(value: Any) -> list[Any]:
    if isinstance(value, (Found, Nested)):
        return flat(tuple(vars(value).values()))
    return [item for part in value for item in flat(part)] if isinstance(value, (list, tuple)) else [value]


def exported(op: Callable[..., Any]) -> Any:
    rows = torch.export.Dim("rows", min=2)
    model = Calls(lambda x: flat(op(x, x.shape[0])))
    return saved_and_loaded(torch.export.export(model, (X[:2],), dynamic_shapes=(({0: rows},),)))(X)


WAYS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "eager": lambda op: op(X, 3),
    "aot_eager": compiled("aot_eager", dynamic=False),
    "aot_eager, dynamic": compiled("aot_eager", dynamic=True),
    "inductor": compiled("inductor", dynamic=False),
    "inductor, dynamic": compiled("inductor", dynamic=True),
    "exported": exported,
}
STATIC, DYNAMIC = {"aot_eager", "inductor"}, {"aot_eager, dynamic", "inductor, dynamic"}
# row, ways, what torch 2.13 says
LIMITS: dict[str, tuple[set[str], str]] = {
    "int": (STATIC, "torch.* op returned non-Tensor"),
    "bool": (STATIC | DYNAMIC, "torch.* op returned non-Tensor"),
    "float beside Tensors": ({"inductor", "inductor, dynamic"}, "FallbackKernel output type <class 'float'>"),
    "symbolic int beside Tensors": ({"exported"}, "Unhandled output type <class 'torch.SymInt'>"),
    "bool beside Tensors": ({"exported"}, "error when deserializing the saved file"),
}


@pytest.mark.parametrize(
    "way",
    # Inductor goes through AOTAutograd as well.
    [pytest.param(way, marks=[pytest.mark.slow] * way.startswith("aot_eager")) for way in WAYS],
)
@pytest.mark.parametrize("row", ROWS)
def test_row(ns: str, row: str, way: str, request: pytest.FixtureRequest) -> None:
    ways, reason = LIMITS.get(row, (set(), ""))
    if way in ways:
        request.applymarker(pytest.mark.xfail(strict=True, reason=f"torch: {reason}"))
    op = make_op(ns, row)
    expected = ROWS[row][1](X, 3)
    assert same(WAYS[way](op), flat(expected) if way == "exported" else expected)


# annotation of what is written, and what a call passes
WRITTEN: dict[str, tuple[Any, Callable[[], Any]]] = {
    "Tensor": (Tensor, lambda: torch.zeros(2)),
    "list": (list[Tensor], lambda: [torch.zeros(2), torch.zeros(4, 4).t()]),
    "empty list": (list[Tensor], list),
    "None": (Tensor | None, lambda: None),
    "Tensor | None": (Tensor | None, lambda: torch.zeros(2)),
}
NOTHING = {"empty list", "None"}
# row, ways, what torch 2.13 says for an op that writes
WRITING_LIMITS = {
    "float": ({"inductor", "inductor, dynamic"}, "FallbackKernel output type <class 'float'>"),
    **{row: limit for row, limit in LIMITS.items() if row != "symbolic int beside Tensors"},
    "int": (STATIC | DYNAMIC, LIMITS["int"][1]),  # the number is a constant here
}


def make_writing_op(ns: str, row: str, written: str) -> Callable[..., Any]:
    annotation, returned = ROWS[row]

    def body(x: Tensor, n: int, *, out: Any = None) -> Any:
        for tensor in flat(out):
            if tensor is not None:
                tensor.add_(1)
        return returned(x, n)

    body.__annotations__ |= {"return": annotation, "out": WRITTEN[written][0]}
    if written != "None":
        body.__kwdefaults__ = {}
    fake = magi_register_custom_op(
        f"{ns}::op",
        mutates_args=["out"],
        infer_output_meta_fn=lambda x, n, *, out=None: returned(x, n),  # noqa: PLW0108
    )
    return fake(body)


def run_writing(op: Callable[..., Any], out: Any, way: str) -> Any:
    if way == "eager":
        return op(X, 3, out=out)
    if way == "decomposed":
        model = Calls(lambda x, out: flat(op(x, 3, out=out)))
        return torch.export.export(model, (X, out)).run_decompositions().module()(X, out)
    backend = way.removesuffix(", dynamic")
    call = torch.compile(lambda x, out: op(x, 3, out=out), fullgraph=True, backend=backend, dynamic=backend != way)
    return call(X, out)


@pytest.mark.parametrize(
    ("row", "written", "way"),
    [
        pytest.param(
            row, written, way, marks=[pytest.mark.slow] * (way != "inductor" or written not in {"Tensor", "empty list"})
        )
        for row in ROWS
        for written in WRITTEN
        for way in ["eager", "aot_eager, dynamic", "inductor", "decomposed"]
    ],
)
def test_row_of_an_op_that_writes(ns: str, row: str, written: str, way: str, request: pytest.FixtureRequest) -> None:
    ways, reason = WRITING_LIMITS.get(row, (set(), ""))
    # Nothing reads a number that an op returns which writes nothing, so such a call is removed.
    if way in ways and not (row == "float" and written in NOTHING):
        request.applymarker(pytest.mark.xfail(strict=True, reason=f"torch: {reason}"))
    op, out = make_writing_op(ns, row, written), WRITTEN[written][1]()
    expected = ROWS[row][1](X, 3)
    assert same(run_writing(op, out, way), flat(expected) if way == "decomposed" else expected)
    assert all(tensor is None or bool((tensor == 1).all()) for tensor in flat(out))


def test_a_view_of_what_another_op_reads_is_written(ns: str) -> None:
    op = make_writing_op(ns, "list", "Tensor")

    def program(x: Tensor, base: Tensor) -> tuple[Tensor, list[Tensor]]:
        returned = op(x, 3, out=base[1])
        return base * 2, returned

    base = torch.zeros(2, 3)
    read, returned = torch.compile(program, fullgraph=True, backend="aot_eager")(X, base)
    assert base.tolist() == [[0.0] * 3, [1.0] * 3]
    assert same((read, returned), (base * 2, [X * 2, X + 1]))


def test_an_op_that_replaces_another_is_the_one_in_a_graph(ns: str) -> None:
    def make(amount: int) -> Callable[..., Any]:
        @magi_register_custom_op(
            f"{ns}::op", mutates_args=["out"], override=True, infer_output_meta_fn=lambda x, out: (x, amount)
        )
        def op(x: Tensor, out: Tensor) -> tuple[Tensor, int]:
            out.add_(amount)
            return x.clone(), amount

        return op

    first = make(1)
    torch.compile(first, fullgraph=True, backend="aot_eager")(X, torch.zeros(2))
    kept: Any = vars(first)["torch_op"]
    del first
    gc.collect()
    out = torch.zeros(2)
    assert torch.compile(make(2), fullgraph=True, backend="aot_eager")(X, out)[1] == 2
    assert out.tolist() == [2.0, 2.0]
    assert str(kept._schema).startswith(f"{ns}::op(")


@pytest.mark.parametrize("annotation", [None, type(None), "None"], ids=repr)
def test_nothing(ns: str, annotation: Any) -> None:
    def body(out: Tensor) -> Any:
        out.add_(1)

    body.__annotations__["return"] = annotation
    op = magi_register_custom_op(f"{ns}::op", mutates_args=["out"])(body)
    out = torch.zeros(2)
    assert op(out) is None
    torch.compile(op, fullgraph=True, backend="aot_eager")(out)
    assert out.tolist() == [2.0, 2.0]
