# SPDX-License-Identifier: Apache-2.0
"""The folder of a run holds no value of a tensor: not of inputs, of constants in graphs and code, or of guards."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from magi_backend._records.folder import entries
from magi_backend._records.hidden import graph_text, hidden_in_code, hidden_in_guard, recompilation, without_fractions
from magi_backend._report.run import read_report
from torch import Tensor, nn


class Scaled(nn.Module):
    """Buffers and attributes of several kinds."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.tensor([4711.5, 4712.5]))
        self.plain = torch.tensor(4713.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table.sum() + self.plain


def item(x: Tensor) -> Tensor:
    value = x.sum().item()
    return x * value + int(x.max())


def in_place(x: Tensor) -> Tensor:
    x = x.clone()
    x ^= 47110
    x |= 47120
    x <<= 4
    return x


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[str, ...]]] = {
    "an input": (lambda x: x.sin(), (torch.full((3,), 98765.25),), ("98765",)),
    "a small constant": (lambda x: x + torch.tensor([4711.5, 4712.5, 4713.5])[0], (torch.ones(3),), ("4711", "4713")),
    "a constant of integers": (lambda x: x + torch.tensor([47110, 47120])[0], (torch.arange(3),), ("47110", "47120")),
    "a constant of one number": (lambda x: x + torch.tensor(47130), (torch.arange(3),), ("47130",)),
    "a tensor that is full of it": (lambda x: x + torch.full((3,), 4711.5), (torch.ones(3),), ("4711",)),
    "integers that fill a tensor": (lambda x: x + x.new_full((3,), 47110), (torch.arange(3),), ("47110",)),
    "a number in arithmetic": (lambda x, n: x * n, (torch.arange(3), 47110), ("47110",)),
    "numbers in arithmetic in place": (in_place, (torch.arange(3),), ("47110", "47120")),
    "a number from a tensor": (item, (torch.full((2,), 4711.25),), ("9422.5", "4711")),
    "buffers of a module": (Scaled(), (torch.ones(2),), ("4711", "4713", "9424")),
    "a mask": (lambda x: x.masked_fill(x > 0.5, 4711.5), (torch.ones(3),), ("4711",)),
}


@pytest.mark.kernels
@pytest.mark.parametrize("case", CASES)
def test_no_value_of_a_tensor_is_written(case: str, tmp_path: Path) -> None:
    fn, arguments, values = CASES[case]
    torch.compile(fn, backend="magi", options={"magi.report": str(tmp_path)}, dynamic=False)(*arguments)

    texts = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    compilations = [entry.compilation for entry in read_report(tmp_path).entries]
    assert any("kernel" in graph.code for one in compilations for graph in one.graphs)
    # As a number of its own: the digits may come in a time in seconds.
    written = [
        (value, name)
        for value in values
        for name, text in texts.items()
        if re.search(rf"(?<![\d.]){re.escape(value)}(?!\d)", text)
    ]
    assert written == []


@pytest.mark.parametrize("values", [(471104711, 4711047), (4711047.5, 4711048.5), (-4711047.5, 4711048.5)])
def test_the_guard_that_failed_does_not_say_what_it_compares(values: tuple[float, float], tmp_path: Path) -> None:
    compiled = torch.compile(
        lambda x, by: x * by, backend="magi", options={"magi.report": str(tmp_path)}, dynamic=False
    )
    for value in values:
        compiled(torch.ones(3), value)

    first, second = entries(tmp_path)
    assert first.compilation.recompiled is None
    assert second.compilation.recompiled is not None
    assert second.compilation.recompiled.guard.startswith("by == ")
    assert not any("471104" in path.read_text() for path in tmp_path.rglob("*.json"))


def test_sizes_and_what_many_programs_have_stay() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    reshaped = graph.call_function(torch.ops.aten.view.default, (x, [4711, 3]))
    graph.call_function(torch.ops.aten.native_layer_norm.default, (reshaped, [3], None, None, 1e-05))
    graph.call_method("view", (x, 4711, 3))
    graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    graph.output((x,))

    assert graph_text(graph).splitlines() == [
        "x = input",
        "view_default = aten.view.default(x, [4711, 3])",
        "native_layer_norm_default = aten.native_layer_norm.default(view_default, [3], None, None, 1e-05)",
        "view = .view(x, 4711, 3)",
        "mul_tensor = aten.mul.Tensor(x, 2)",
        "return (x,)",
    ]


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("x0<static_cast<int64_t>(98765L)", "x0<static_cast<int64_t>(98765L)"),
        ("tmp1 = tl.full([1], 98765, tl.int64)", "tmp1 = tl.full([1], …, tl.int64)"),
        ("tmp1 = tl.full([XBLOCK, RBLOCK], 0.0884, tl.float32)", "tmp1 = tl.full([XBLOCK, RBLOCK], …, tl.float32)"),
        ("tmp2 = tmp0 * 1e-05", "tmp2 = tmp0 * 1e-05"),
        ("tmp2 = tmp0 * 3.5e+20", "tmp2 = tmp0 * …"),
        ("xnumel = 98765", "xnumel = 98765"),
        ("#   %mul : call_function[target=mul](args = (%x, 98765))\nx", "x"),
    ],
)
def test_values_in_generated_code(code: str, shown: str) -> None:
    assert hidden_in_code(code) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("scale 0.125 at norm.py:12", "scale … at norm.py:12"),
        ("torch 2.13.0, index 0. expected 3", "torch 2.13.0, index 0. expected 3"),
        ("-12345.678 and 6e23 but 1e-06", "-… and … but 1e-06"),
    ],
)
def test_fractions_in_sentences(text: str, shown: str) -> None:
    assert without_fractions(text) == shown


@pytest.mark.parametrize(
    ("guard", "shown"),
    [
        ("k == 25", "k == …"),
        ("self.eps == 2.5", "self.eps == …"),
        ("x.size()[0] == 3", "x.size()[0] == 3"),
        ("len(xs) == 3", "len(xs) == 3"),
        ("tensor 'x' size mismatch at index 0. expected 3, actual 5",) * 2,
    ],
)
def test_values_in_guards(guard: str, shown: str) -> None:
    assert hidden_in_guard(guard) == shown
    found = recompilation(
        [f'0/1: {guard}      # y = x * k  # model.py:16 in f\nUser stack trace:\n  File "m.py", line 16']
    )
    assert found is not None
    assert (found.of, found.guard, found.place) == ("0/1", shown, "m.py:16")
