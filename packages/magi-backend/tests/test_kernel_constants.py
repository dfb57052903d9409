# SPDX-License-Identifier: Apache-2.0
"""The user's Triton kernels and their constants arrive in the generated module as they were. No GPU is needed."""

from __future__ import annotations

import ast
import itertools
import math
from contextlib import suppress
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from _pretended_gpu import generated
from magi_backend import magi_register_custom_op
from magi_backend._records.log import Collector, collecting
from magi_backend._repairs import _defect, kernels
from magi_backend._repairs._defect import active_defects, repaired
from torch import Tensor


pytestmark = pytest.mark.kernels


SOURCES, CONSTANTS, INFINITE = "escape_kernel_sources", "escape_kernel_constants", "define_infinite_constants"
ACTIVE = {defect.name for defect in active_defects()}

PTX = tl.constexpr("{\n\t.reg .b32 r;\n\tmov.b32 r, $1;\n}")
QUOTED = tl.constexpr("'''it's a \"\"\"\\n\\ é\u1234")
LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def helper(value):  # type: ignore[no-untyped-def]
    tl.static_assert(PTX != r"\d\n")
    return value


@triton.jit
def plain(x, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """No 'single', "double" or '''three''' quotes matter."""
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def with_line_ends(x, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.static_assert(BLOCK != "a\n\tb\\")
    tl.store(out + at, tl.load(x + at))


@triton.jit
def with_a_docstring(x, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Says '''three''' and é, and ends in a backslash \\"""
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def with_ptx(x, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.static_assert(PTX != QUOTED)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def with_a_helper(x, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out + at, helper(tl.load(x + at)))


@triton.jit
def with_the_lowest(x, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < 8, other=LOWEST))


@triton.jit
def taking(x, out, CONSTANT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.static_assert(CONSTANT != 3)
    tl.store(out + at, tl.load(x + at))


CONFIGS = [{"BLOCK": 64, "CONSTANT": r"\t"}, {"BLOCK": 32, "CONSTANT": "a\n'''b'''"}]
tuned = triton.autotune([triton.Config(config) for config in CONFIGS], key=[])(taking)
tuned_source = triton.autotune([triton.Config({"BLOCK": block}) for block in (32, 64)], key=[])(with_a_docstring)
names = (f"kernel_constants::launch_{number}" for number in itertools.count())


def code_of(kernel: Any, backend: str = "magi", **constants: Any) -> str:
    """The module that Inductor writes for a launch of *kernel*."""

    @magi_register_custom_op(next(names))
    def launch(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel[(1,)](x, out, **constants)
        return out

    return generated(launch, backend=backend)


def repairs_of(kernel: Any, **constants: Any) -> tuple[str, set[str]]:
    """The module that the backend has Inductor write, and which repairs its report names."""
    with collecting(Collector()) as collector:
        code = code_of(kernel, **constants)
    (compilation,) = collector.compilations()
    named = {repair.name for graph in compilation.graphs for repair in graph.repairs}
    return code, named & {SOURCES, CONSTANTS, INFINITE}


class Kernel:
    """The text between the quotes in generated *code*.

    Attributes:
        functions: The syntax of each function, as `ast.dump` shows it, by name.
        constants: The value of each global constant.
        given: The constant arguments.
        configs: The configurations of the autotuner.
    """

    def __init__(self, code: str) -> None:
        (source,) = (
            call.args[1]
            for call in ast.walk(ast.parse(code))
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "async_compile.triton"
        )
        statements = ast.parse(ast.literal_eval(source)).body
        functions = [statement for statement in statements if isinstance(statement, ast.FunctionDef)]
        imports: list[ast.stmt] = [part for part in statements if isinstance(part, ast.Import | ast.ImportFrom)]
        self._names: dict[str, Any] = {}
        exec(compile(ast.Module(imports, []), "<imports>", "exec"), self._names)
        self.functions = {function.name: ast.dump(ast.Module(function.body, [])) for function in functions}
        self.constants = {
            ast.unparse(statement.targets[0]): self._value(statement.value).value
            for statement in statements
            if isinstance(statement, ast.Assign)
        }
        (tuner,) = (part for part in functions[0].decorator_list if isinstance(part, ast.Call))
        keywords = {keyword.arg: keyword.value for keyword in tuner.keywords}
        meta = keywords["triton_meta"]
        assert isinstance(meta, ast.Dict)
        parts = {self._value(key): value for key, value in zip(meta.keys, meta.values, strict=True) if key}
        self.given = self._value(parts["constants"])
        self.configs = self._value(keywords["configs"])

    def _value(self, expression: ast.expr) -> Any:
        return eval(compile(ast.Expression(expression), "<constant>", "eval"), self._names)


def written(kernel: Any) -> str:
    """The syntax of the body of *kernel*, or of what it calls, as its author wrote it."""
    (function,) = ast.parse(kernel.src).body
    assert isinstance(function, ast.FunctionDef)
    return ast.dump(ast.Module(function.body, []))


SOURCE_VARIANTS = [
    pytest.param(with_line_ends, with_line_ends, {"BLOCK": 64}, id="ends of lines"),
    pytest.param(with_a_helper, helper, {"BLOCK": 64}, id="helper"),
    pytest.param(tuned_source, with_a_docstring, {}, id="autotuned"),
]


@pytest.mark.parametrize(("kernel", "function", "constants"), SOURCE_VARIANTS)
def test_sources_arrive_as_they_were_written(kernel: Any, function: Any, constants: dict[str, Any]) -> None:
    if SOURCES in ACTIVE:
        with suppress(SyntaxError):
            stock = Kernel(code_of(kernel, "inductor", **constants))
            assert stock.functions[function.fn.__name__] != written(function), "torch has mended this: give it its end"
        torch.compiler.reset()

    code, repairs = repairs_of(kernel, **constants)

    assert Kernel(code).functions[function.fn.__name__] == written(function)
    assert repairs == {SOURCES} & ACTIVE


def test_global_constants_arrive_as_they_were() -> None:
    code, repairs = repairs_of(with_ptx, BLOCK=64)

    assert Kernel(code).constants == {"PTX": PTX.value, "QUOTED": QUOTED.value}
    assert repairs == {SOURCES} & ACTIVE


TEXTS = ("a\nb", r"\t", "it's '''quoted'''", "ends in \\", "\\'\"\n", "é\u1234\n")


@pytest.mark.parametrize(
    ("value", "repair"),
    [
        (TEXTS, {CONSTANTS}),
        (("relu", "it's", 'say "so"', "é"), set()),
        (-math.inf, {INFINITE}),
        (math.nan, {INFINITE}),
    ],
    ids=["texts", "texts without an escape", "inf", "nan"],
)
def test_arguments_arrive_as_they_were_given(value: Any, repair: set[str]) -> None:
    if repair:
        with suppress(SyntaxError, NameError):
            stock = Kernel(code_of(taking, "inductor", CONSTANT=value, BLOCK=64))
            assert repr(stock.given["CONSTANT"]) != repr(value), "torch has mended this: give the defect its end"
        torch.compiler.reset()

    code, repairs = repairs_of(taking, CONSTANT=value, BLOCK=64)

    given = Kernel(code).given
    assert (repr(given.pop("CONSTANT")), given) == (repr(value), {"BLOCK": 64})
    assert repairs == repair


def test_texts_of_an_autotuner_arrive_as_they_were_given() -> None:
    code, repairs = repairs_of(tuned)

    assert [{name: config[name] for name in CONFIGS[0]} for config in Kernel(code).configs] == CONFIGS
    assert repairs == {CONSTANTS}


def test_infinite_global_constants_arrive() -> None:
    with pytest.raises(NameError, match="inf"):
        Kernel(code_of(with_the_lowest, "inductor", BLOCK=64))
    torch.compiler.reset()

    code, repairs = repairs_of(with_the_lowest, BLOCK=64)

    assert Kernel(code).constants == {"LOWEST": -math.inf}
    assert repairs == {INFINITE}


@pytest.mark.parametrize(
    ("module", "reads"),
    [
        ("X = tl.constexpr(-inf)", True),
        ("@autotune(configs=[{'A': nan}])\ndef f(): ...", True),
        ("@autotune(configs=[{'A': 'inf'}])\ndef f(): ...", False),
        ("def f():\n    inf = 3\n    return inf", False),
        ("X = tl.constexpr('information')", False),
        ("X = tl.constexpr(infinity)", False),
    ],
)
def test_only_a_name_outside_of_functions_is_imported(module: str, reads: bool) -> None:
    assert kernels.names_a_float(module) is reads


def definition(code: str) -> str:
    """The lines that define the kernel in *code*."""
    return code[code.index("async_compile.triton(") : code.index("async_compile.wait(")]


def test_without_a_backslash_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    code, repairs = repairs_of(plain, BLOCK=64)
    torch.compiler.reset()
    monkeypatch.setattr(_defect, "is_active", lambda name: name not in (SOURCES, CONSTANTS, INFINITE))

    assert definition(code) == definition(code_of(plain, BLOCK=64))
    assert repairs == set()


def test_kernels_of_inductor_are_left_alone() -> None:
    body = "async_compile.triton('f', '''\n@triton_heuristics.pointwise(x='\\\\n')\n@triton.jit\ndef f(): ...\n''')\n"

    assert kernels.with_escaped_constants(body) is body


def test_outside_of_the_backend_torch_writes_what_it_wrote() -> None:
    code_of(plain, BLOCK=64)  # puts the repairs in place
    torch.compiler.reset()

    with repaired([], pytest.fail), pytest.raises(SyntaxError):
        Kernel(code_of(taking, "inductor", CONSTANT="a\nb", BLOCK=64))
