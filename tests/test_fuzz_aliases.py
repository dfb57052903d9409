# SPDX-License-Identifier: Apache-2.0
"""Programs of views, copies and mutations do under ``backend="magi"`` what they do under ``aot_eager``.

Compared are results, arguments after the call, and which of these tensors share memory. Eight programs are one compiled
function, because g++ starts once for each. Half of the functions have symbolic sizes. ``MAGI_FUZZ_PROGRAMS`` sets the
number of programs of the slow tests; with ``MAGI_FUZZ_SECONDS`` each of them begins no others after that time.

It does not show what happens on a GPU. Not compared is whether two results in the same memory are one Python object:
Inductor returns one for ``y`` and ``y[0:]``, ``aot_eager`` returns two. Left out are programs that eager refuses, and
calls of an operator that mutates a tensor with another that overlaps it: for these eager and ``aot_eager`` differ.
"""

from __future__ import annotations

import itertools
import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from _fuzz import SHARES, count_of_a_share, drawn, in_time
from hypothesis import strategies as st
from magi_backend import magi_register_custom_op
from torch import Tensor


pytestmark = pytest.mark.kernels

# Forms of steps by the kind of {a}, and by that of what is new: a matrix, half of one, a vector.
_VIEWS = {
    "M": {
        "M": "{a}.t() | {a}[0:, :] | {a}[:, 0:] | {a}.view_as({a}) | {a}.detach()",
        "H": "{a}[:2] | {a}[1:3] | {a}[-2:] | {a}.t()[1:3] | {a}[::2][:2] | {a}.split(2)[0]",
        "V": "{a}[1] | {a}[:, 2] | {a}.diagonal()",
    },
    "H": {"H": "{a}[0:] | {a}.flatten().view(2, -1)", "V": "{a}[0] | {a}[1] | {a}.unbind(0)[1]"},
    "V": {"V": "{a}[0:] | {a}.unsqueeze(0).squeeze(0)"},
}
_FRESH = {
    "M": {
        "M": """
            torch.slice_scatter({a}, {H}, 0, 1, 3) | torch.slice_scatter({a}, {H}, 0, 0, 2)
            | torch.slice_scatter({a}, {M}) | torch.select_scatter({a}, {V}, 0, 1)
            | torch.select_scatter({a}, {V}, 1, 2) | torch.diagonal_scatter({a}, {V})
            | torch.index_put({a}, ({i},), {H}) | torch.index_put({a}, ({i},), {H}, accumulate=True)
            | {a}.index_copy(0, {i}, {H}) | {a}.index_add(0, {i}, {H}) | {a}.index_fill(0, {i}, 7.0) | {a} + {M}
            | torch.where({M} > 0, {a}, {M}) | {a}.flip(0) | torch.cat([{H}, {a}[2:]])
        """,
        "H": "torch.stack([{V}, {V}]) | {a}[{i}]",
    },
    "H": {"H": "{a} * 2 | {a} + {H}", "V": "{a}.sum(0)"},
    "V": {"V": "{a} * 2 | {a} + {V}", "M": "{a}.expand({n}, {n}).contiguous()"},
}
_COPIES = """
    {a}.clone() | {a}.clone() | {a}.contiguous() | {a} + 0 | {a} * 1 | {a} + torch.zeros_like({a}) | torch.cat([{a}])
    | torch.zeros_like({a}) + {a} | {a} - torch.zeros({a}.shape)
    | torch.ones({a}.shape) * {a} | {a} / torch.ones_like({a})
    | {a}.to(torch.float64).to(torch.float32) | {a}.to(torch.float32, copy=True)
    | torch.nn.functional.pad({a}, (0, 0)) | torch.empty_like({a}).copy_({a})
"""
_MUTATIONS = {
    "M": """
        {a}.index_fill_(0, {i}, 9.0) | {a}.index_copy_(0, {i}, {H}) | {a}.index_add_(0, {i}, {H})
        | {a}.index_put_(({i},), {H}) | {a}[{i}] = {H} | {a}[0:, :] = {M}[0:, :] | {a}[1:3] = {H}
        | {a}[1:] = {a}[:-1].clone() | {a}[:-1] = {a}[1:].clone() | {a}[:2] = {a}[2:4] | {a}[:, :2] = {a}[:, 2:4]
        | {a}[:, 1] = {V} | {a}.copy_({a}.t().clone()) | {a}.diagonal().copy_({V}) | {a}.diagonal().mul_(2)
        | {a}.masked_fill_({M} > 1, 3.0) | {a}.t_()
    """,
    "H": "{a}[0] = {V} | {a}[0].add_({V})",
    "V": "{a}[0] = 5.0 | {a}[1:].add_(1) | {a}.cumsum_(0)",
}
_ANY_MUTATIONS = """
    {a}.zero_() | {a}.fill_(2) | {a}.add_(1) | {a}.clamp_(0, 3) | {a}.mul_({b}) | {a}.copy_({b}) | {a}.copy_({b})
    | {a}.copy_({a}.clone()) | {a}[:] = {b} | ops.rotate({b}, {a}) | ops.rotate({a}, {b})
    | ops.rotate({a}.clone(), {a}) | ops.both({a}, {b}) | ours_rotate({b}, {a}) | ours_both({a}, {b})
"""
_ANY_RESULTS = "ops.push({a}, {b}) | ours_push({a}, {b}) | ops.push({a}.clone(), {a})"


def _forms(text: str) -> list[str]:
    return [form.strip() for form in text.split(" | ")]


def _kinds_and_forms(texts: dict[str, str]) -> list[tuple[str, str]]:
    return [(kind, form) for kind, text in texts.items() for form in _forms(text)]


@dataclass(frozen=True)
class Program:
    """The *lines* of a function of *inputs* matrices, and the names that it returns."""

    inputs: int
    lines: tuple[str, ...]
    returned: tuple[str, ...]

    def text(self, name: str = "program") -> str:
        arguments = ", ".join(f"x{index}" for index in range(self.inputs))
        body = "\n".join(f"    {line}" for line in ("n = x0.shape[0]", *self.lines))
        return f"def {name}({arguments}, i):\n{body}\n    return ({''.join(f'{each}, ' for each in self.returned)})\n"


@st.composite
def programs(draw: st.DrawFn, most: int = 8) -> Program:
    """Programs of up to *most* steps."""
    inputs = draw(st.integers(1, 3))
    kinds = {f"x{index}": "M" for index in range(inputs)}
    lines = []

    def of_kind(kind: str) -> str:
        """A tensor of *kind*, made of a matrix if there is none yet."""
        names = [name for name, its in kinds.items() if its == kind]
        made = {"H": ["x0[:2]", f"x{inputs - 1}[1:3]"], "V": ["x0[0]", f"x{inputs - 1}.diagonal()"], "M": []}[kind]
        return draw(st.sampled_from([*names, *made]))

    def filled(form: str, name: str) -> str:
        for slot in "MHV":
            while f"{{{slot}}}" in form:
                form = form.replace(f"{{{slot}}}", of_kind(slot), 1)
        return form.replace("{a}", name).replace("{b}", of_kind(kinds[name])).replace("{n}", "n").replace("{i}", "i")

    for step in range(draw(st.integers(2, most))):
        # The newest is drawn more often, so that there are views of copies of views.
        name = draw(st.sampled_from([*kinds, *list(kinds)[-1:] * 3]))
        kind, own = kinds[name], f"v{step}"
        choice = draw(st.sampled_from(["view", "copy", "fresh", "mutation", "mutation", "any", "any", "result"]))
        if choice == "view":
            kinds[own], form = draw(st.sampled_from(_kinds_and_forms(_VIEWS[kind])))
        elif choice == "copy":
            kinds[own], form = kind, draw(st.sampled_from(_forms(_COPIES)))
        elif choice == "fresh":
            kinds[own], form = draw(st.sampled_from(_kinds_and_forms(_FRESH[kind])))
        elif choice == "result":
            kinds[own], form = kind, draw(st.sampled_from(_forms(_ANY_RESULTS)))
        else:
            mutations = _MUTATIONS[kind] if choice == "mutation" else _ANY_MUTATIONS
            lines.append(filled(draw(st.sampled_from(_forms(mutations))), name))
            continue
        new = kinds.pop(own)
        lines.append(f"{own} = {filled(form, name)}")
        kinds[own] = new
    returned = draw(st.lists(st.sampled_from(list(kinds)), min_size=1, max_size=3))
    return Program(inputs, tuple(lines), tuple(returned))


def _apart(one: Tensor, other: Tensor) -> None:
    """Refuse tensors that may overlap, for which an operator that mutates one has no meaning that compilers keep."""
    starts = [tensor.data_ptr() for tensor in (one, other)]
    ends = [
        start + 4 + 4 * sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        for start, tensor in zip(starts, (one, other), strict=True)
    ]
    if max(starts) < min(ends):
        raise AssertionError("the arguments overlap")


def _rotate(source: Tensor, target: Tensor) -> None:
    _apart(source, target)
    for index in range(target.shape[0]):
        target[index] = source[index - 1] + target[0]


def _both(one: Tensor, other: Tensor) -> None:
    _apart(one, other)
    one.add_(other)
    other.mul_(3)


def _push(source: Tensor, target: Tensor) -> Tensor:
    _apart(source, target)
    target.add_(1)
    return source * 2 + target


def registered(namespace: str) -> dict[str, Any]:
    """Operators that mutate, by ``torch.library`` and by this package, as the names in a program."""
    ops = type("ops", (), {})
    for name, body, written in (
        ("rotate", _rotate, ("target",)),
        ("both", _both, ("one", "other")),
        ("push", _push, ("target",)),
    ):
        theirs = torch.library.custom_op(f"{namespace}::{name}", body, mutates_args=written)
        if name == "push":
            theirs.register_fake(lambda source, target: torch.empty_like(source))
        setattr(ops, name, staticmethod(theirs))
    ours = {
        f"ours_{body.__name__[1:]}": magi_register_custom_op(f"{namespace}::ours{body.__name__}", **how)(body)
        for body, how in (
            (_rotate, {"mutates_args": ("target",)}),
            (_both, {"mutates_args": ("one", "other")}),
            (_push, {"mutates_args": ("target",), "infer_output_meta_fn": ["source"]}),
        )
    }
    return {"torch": torch, "ops": ops, **ours}


def function_of(text: str, names: dict[str, Any], name: str = "program") -> Callable[..., Any]:
    """The function *name* in *text*."""
    file = f"<alias program {hash(text)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope = dict(names)
    exec(compile(text, file, "exec"), scope)
    function: Callable[..., Any] = scope[name]
    return function


def arguments(inputs: int, size: int) -> list[Tensor]:
    """Matrices of small numbers, and the two row numbers that programs index with."""
    matrices = [(torch.arange(float(size * size)).reshape(size, size) * (index + 2)) % 7 - 2 for index in range(inputs)]
    return [*matrices, torch.tensor([0, 2])]


@dataclass(frozen=True)
class Outcome:
    """What a call returned, what became of its arguments, and which of all these tensors share memory."""

    tensors: tuple[Tensor, ...]
    sharing: tuple[int, ...]

    def differs_from(self, other: Outcome) -> str:
        """What is not the same; empty if nothing."""
        for index, (mine, its) in enumerate(zip(self.tensors, other.tensors, strict=True)):
            if mine.shape != its.shape or mine.stride() != its.stride():
                return f"tensor {index}: strides {mine.stride()} instead of {its.stride()}"
            if not torch.allclose(mine, its, equal_nan=True):
                return f"tensor {index}: {mine} instead of {its}"
        if self.sharing != other.sharing:
            return f"shared memory: {self.sharing} instead of {other.sharing}"
        return ""


def outcome(function: Callable[..., Any], given: Sequence[Tensor]) -> Outcome:
    """What *function* does with *given*: first the arguments, then the results."""
    results = function(*given)
    tensors = [*given, *results]
    bases = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return Outcome(
        tuple(tensor.detach().clone() for tensor in tensors),
        tuple(map(bases.index, bases)),
    )


TOGETHER = 8

# Beside those of magi-backend's test_aliases.py.
FOUND = (
    # Wrong under stock, each by another of the two repairs.
    Program(1, ("v0 = x0.clone()", "ops.both(v0, x0)"), ("v0",)),
    Program(2, ("v0 = torch.slice_scatter(x0, x1[:2], 0, 1, 3)", "x0.zero_()"), ("v0",)),
    Program(1, ("v0 = x0 + torch.zeros_like(x0)",), ("x0", "v0")),
    Program(1, ("v0 = torch.zeros(n, n) + x0.t()", "x0.add_(1)"), ("v0",)),
    Program(1, ("v0 = x0 * 2", "v1 = v0.clone()", "v2 = v1[1:3]", "v3 = v2.clone()"), ("v0", "v3")),
    # With symbolic sizes torch counts other nodes for what `ours_both` gets than for what eager passes.
    Program(
        2,
        (
            *("v0 = torch.zeros_like(x0) + x0", "x0.copy_(x0)", "v2 = torch.empty_like(x0).copy_(x0)"),
            *("ours_both(v0, v2)", "v4 = torch.empty_like(x0).copy_(x0)", "v5 = ops.push(v2.clone(), v2)"),
            "v6 = torch.nn.functional.pad(x1, (0, 0))",
        ),
        ("x0", "x1", "v0"),
    ),
)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return registered("magi_alias_programs")


def runs_in_eager(program: Program, names: dict[str, Any]) -> bool:
    """Whether eager runs *program*, and no operator gets tensors that overlap."""
    try:
        outcome(function_of(program.text(), names), arguments(program.inputs, 4))
    except (RuntimeError, AssertionError):
        return False
    return True


def outcomes(
    together: Sequence[Program], names: dict[str, Any], size: int, backend: str, dynamic: bool
) -> list[Outcome]:
    """What each program does in one function of all of them."""
    texts = [program.text(f"program{index}") for index, program in enumerate(together)]
    calls = ", ".join(f"program{index}(*given[{index}])" for index in range(len(together)))
    function = function_of("\n".join([*texts, f"def program(given):\n    return [{calls}]\n"]), names)
    torch.compiler.reset()
    given = [arguments(program.inputs, size) for program in together]
    results = torch.compile(function, backend=backend, dynamic=dynamic)(given)
    return [outcome(lambda *_, its=its: its, mine) for mine, its in zip(given, results, strict=True)]


def differences(drawn: Sequence[Program], names: dict[str, Any], dynamic: bool) -> list[str]:
    """For each program that differs, its text and how."""
    size = 5 if dynamic else 4
    expected = outcomes(drawn, names, size, "aot_eager", dynamic)
    try:
        actual = outcomes(drawn, names, size, "magi", dynamic)
    except Exception as error:  # noqa: BLE001 (whatever the compiler raises is a difference, unless stock raises too)
        if len(drawn) > 1:
            return [line for program in drawn for line in differences([program], names, dynamic)]
        try:
            outcomes(drawn, names, size, "inductor", dynamic)
        except Exception:  # noqa: BLE001
            return []
        return [f"{drawn[0].text()}\n{type(error).__name__}: {error}"]
    found = []
    for program, mine, its in zip(drawn, actual, expected, strict=True):
        how = mine.differs_from(its)
        if "strides" in how:
            # Inductor's decompositions may choose others: of `torch.cat([x.t()])` eager makes rows, they make columns.
            how = mine.differs_from(outcomes([program], names, size, "aot_eager_decomp_partition", dynamic)[0])
        if how:
            found.append(f"{program.text()}\nsymbolic sizes: {dynamic}\n{how}")
    return found


def drawn_programs(count: int, names: dict[str, Any], start: int) -> Iterator[list[Program]]:
    """*count* programs that eager runs, *TOGETHER* at a time."""
    # Some are refused by eager, or drawn twice.
    different = dict.fromkeys(drawn(programs(), start, 2 * count + 50))
    kept = list(itertools.islice((program for program in different if runs_in_eager(program, names)), count))
    assert len(kept) == count
    yield from (kept[at : at + TOGETHER] for at in range(0, count, TOGETHER))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_programs_that_stock_gets_wrong(dynamic: bool, names: dict[str, Any]) -> None:
    assert differences(FOUND, names, dynamic) == []


def test_a_few_programs(names: dict[str, Any]) -> None:
    found = [
        line
        for index, together in enumerate(drawn_programs(24, names, start=1))
        for line in differences(together, names, dynamic=index % 2 == 1)
    ]

    assert found == [], "\n".join(found)


def test_a_lost_value_is_a_difference(names: dict[str, Any]) -> None:
    (expected,) = outcomes([FOUND[1]], names, 4, "aot_eager", dynamic=False)
    (stock,) = outcomes([FOUND[1]], names, 4, "inductor", dynamic=False)

    assert stock.differs_from(expected).startswith("tensor 3:")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(SHARES))
def test_many_programs(
    part: int,
    names: dict[str, Any],
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    found: list[str] = []
    compared = 0
    for index, together in enumerate(in_time(drawn_programs(count_of_a_share(2000), names, start=2 + part))):
        found += differences(together, names, dynamic=index % 2 == 1)
        compared += len(together)
    with capsys.disabled():
        sys.stderr.write("\n".join([f"\n{compared} programs compared, {len(found)} differ", *found, ""]))

    record_property("alias programs compared with aot_eager", compared)
    assert found == [], "\n".join(found)
