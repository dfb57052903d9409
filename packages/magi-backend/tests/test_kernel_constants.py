# SPDX-License-Identifier: Apache-2.0
"""The user's Triton kernels, their constants and what they get arrive as from Triton. No GPU is needed."""

from __future__ import annotations

import ast
import contextlib
import itertools
import math
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from _pretended_gpu import generated, pretended_gpu
from magi_backend import magi_register_custom_op
from magi_backend._records.log import Collector, collecting
from magi_backend._repairs import _defect, kernels
from magi_backend._repairs._defect import active_defects, repaired
from magi_backend._repairs.kernels import KEEP_SCALAR_TENSORS, SCRATCH_FOR_EACH_PROGRAM
from magi_backend._torch_compat.compiling import torch_release
from magi_tritonwrap.testing import aot_graphs, launches_of
from torch import Tensor
from torch._inductor.codegen.common import TritonScratchWorkspace
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides
from torch._inductor.compile_fx import compile_fx_inner
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


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


def code_and_repairs(fn: Callable[..., Any], *tensors: Tensor, **how: Any) -> tuple[str, list[str]]:
    """The code that a backend, ours by default, has Inductor write, and the repairs that it reports."""
    torch.compiler.reset()
    with collecting(Collector()) as collector:
        code = generated(fn, *tensors, **{"backend": "magi", **how})
    graphs = [graph for compilation in collector.compilations() for graph in compilation.graphs]
    return code, [repair.name for graph in graphs for repair in graph.repairs]


def repairs_of(kernel: Any, backend: str = "magi", **constants: Any) -> tuple[str, set[str]]:
    """The module that Inductor writes for a launch of *kernel*, and which repairs are reported."""

    @magi_register_custom_op(next(names))
    def launch(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel[(1,)](x, out, **constants)
        return out

    code, named = code_and_repairs(launch, backend=backend)
    return code, {*named} & {SOURCES, CONSTANTS, INFINITE}


def stock_code_of(kernel: Any, **constants: Any) -> str:
    return repairs_of(kernel, "inductor", **constants)[0]


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
            stock = Kernel(stock_code_of(kernel, **constants))
            assert stock.functions[function.fn.__name__] != written(function), "torch has mended this: give it its end"

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
            stock = Kernel(stock_code_of(taking, CONSTANT=value, BLOCK=64))
            assert repr(stock.given["CONSTANT"]) != repr(value), "torch has mended this: give the defect its end"

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
        Kernel(stock_code_of(with_the_lowest, BLOCK=64))

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
    monkeypatch.setattr(_defect, "is_active", lambda name: name not in (SOURCES, CONSTANTS, INFINITE))

    assert definition(code) == definition(repairs_of(plain, BLOCK=64)[0])
    assert repairs == set()


def test_kernels_of_inductor_are_left_alone() -> None:
    body = "async_compile.triton('f', '''\n@triton_heuristics.pointwise(x='\\\\n')\n@triton.jit\ndef f(): ...\n''')\n"

    assert kernels.with_escaped_constants(body) is body


def test_outside_of_the_backend_torch_writes_what_it_wrote() -> None:
    repairs_of(plain, BLOCK=64)  # puts the repairs in place

    with repaired([], pytest.fail), pytest.raises(SyntaxError):
        Kernel(stock_code_of(taking, CONSTANT="a\nb", BLOCK=64))


@triton.jit
def scale_kernel(x, out, scale, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * scale, at < n)


@triton.jit
def wide_kernel(x, out, scale: tl.float64, shift, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * scale + shift, at < n)


def add_tokens(x, out, tokens, scale, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * scale + tokens.to(tl.int64), at < n)


BLOCKS = [triton.Config({"BLOCK": block}) for block in (64, 128)]
unspecialized = triton.jit(do_not_specialize=["tokens"])(add_tokens)
specialized = triton.jit(add_tokens)
tuned_unspecialized = triton.autotune(BLOCKS, key=["n"])(triton.heuristics({"scale": lambda given: 0.5})(unspecialized))


def launched(launch: Callable[[Tensor, Tensor, Any], Any], of: type = int) -> Callable[..., Tensor]:
    """An operator whose body launches a kernel, with its second argument, an int or a float."""

    def body(x: Tensor, number: Any) -> Tensor:
        out = torch.empty_like(x)
        launch(x, out, number)
        return out

    body.__annotations__["number"] = of
    body.__name__ = f"launch_{launch.__code__.co_firstlineno}"
    return magi_register_custom_op(f"kernel_arguments::{body.__name__}")(body)


FLOATS: dict[str, Callable[..., Tensor]] = {
    "plain": launched(lambda x, out, scale: scale_kernel[(4,)](x, out, scale, x.numel(), BLOCK=64), float),
    "annotated": launched(lambda x, out, _: wide_kernel[(4,)](x, out, 0.125, 2.0, x.numel(), BLOCK=64), float),
    "an int": launched(lambda x, out, _: scale_kernel[(4,)](x, out, 3, x.numel(), BLOCK=64), float),
}
ONES: dict[str, Callable[..., Tensor]] = {
    "plain": launched(lambda x, out, tokens: unspecialized[(4,)](x, out, tokens, 0.5, x.numel(), BLOCK=64)),
    "tuned": launched(lambda x, out, tokens: tuned_unspecialized[(4,)](x, out, tokens, n=x.numel())),
    "specialized": launched(lambda x, out, tokens: specialized[(4,)](x, out, tokens, 0.5, x.numel(), BLOCK=64)),
}


def types(op: Callable[..., Tensor], number: float, backend: str = "magi") -> tuple[dict[str, str], list[str]]:
    """The declared types of the user's kernel in the code that *backend* has Inductor write, and the repairs."""
    code, names = code_and_repairs(lambda x: op(x, number), backend=backend)
    (signature,) = [found for found in re.findall(r"'signature': (\{.*?\})", code) if "'n'" in found]
    return dict(re.findall(r"'(\w+)': '([^']+)'", signature)), names


def compiled(kernel: Any, declared: dict[str, str]) -> str:
    """What Triton makes of *kernel* for a card of compute capability 9.0."""
    signature = {name: kind for name, kind in declared.items() if kind != "constexpr"}
    made = triton.compile(ASTSource(kernel, signature, {"BLOCK": 64}), target=GPUTarget("cuda", 90, 32))
    return str(made.asm["ptx"])


@pytest.mark.skipif("keep_float_arguments" not in ACTIVE, reason="torch has mended it")
@pytest.mark.parametrize(
    ("op", "expected"), [("plain", {"scale": "fp32"}), ("annotated", {"scale": "fp64", "shift": "fp32"})]
)
def test_floats_are_32_bits_wide_unless_annotated(op: str, expected: dict[str, str]) -> None:
    stock, _ = types(FLOATS[op], 0.5, "inductor")
    assert {stock[name] for name in expected} == {"fp64"}, "torch has mended this: give the defect its end"
    declared, repairs = types(FLOATS[op], 0.5)
    assert {name: declared[name] for name in expected} == expected
    assert repairs == ["keep_float_arguments"]


def test_a_kernel_without_floats_has_no_repair() -> None:
    assert types(FLOATS["an int"], 0.5)[1] == []


@pytest.mark.parametrize("op", ["plain", "tuned"])
def test_a_one_is_declared_as_a_number(op: str) -> None:
    stock, _ = types(ONES[op], 1, "inductor")
    assert stock["tokens"] == "constexpr", "torch has mended this: give the defect its end"
    declared, repairs = types(ONES[op], 1)
    assert declared["tokens"] == "i32"
    assert "keep_unspecialized_ones" in repairs
    if op == "plain":
        assert compiled(unspecialized, declared)


def test_other_ones_are_constants_as_in_triton_and_another_number_needs_no_repair() -> None:
    assert types(ONES["specialized"], 1)[0]["tokens"] == "constexpr"
    declared, repairs = types(ONES["plain"], 2)
    assert declared["tokens"] == "i32"
    assert "keep_unspecialized_ones" not in repairs


@triton.jit
def scaled(x, scale, out):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * 16 + tl.arange(0, 16)
    tl.store(out + at, tl.load(x + at) * tl.load(scale))


@magi_register_custom_op("kernel_arguments::multiplied")
def multiplied(x: Tensor, scale: Tensor) -> Tensor:
    out = torch.empty_like(x)
    scaled[(x.numel() // 16,)](x, scale, out)
    return out


def write_with_a_constant() -> None:
    """Have Inductor write the code for the graph of `multiplied` where *scale* is a constant."""
    (graph,) = aot_graphs(multiplied, torch.ones(64), torch.tensor(2.0))
    (launch,) = launches_of(graph)
    scale = launch.arguments["scale"]
    graph.register_buffer("scale", torch.tensor(2.0))
    with graph.graph.inserting_before(scale):
        scale.replace_all_uses_with(graph.graph.get_attr("scale"))
    graph.graph.erase_node(scale)
    graph.recompile()
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(Exception, match="Generated"):
        compile_fx_inner(graph, [torch.empty(64, device="cuda")])


def test_a_kernel_reads_a_constant_without_dimensions() -> None:
    """As a package of AOTInductor holds a buffer."""
    reported: list[str] = []
    with pretended_gpu() as codes, repaired([KEEP_SCALAR_TENSORS], reported.append):
        write_with_a_constant()
    assert "scaled_0.run(arg0_1, constant0, buf0" in codes[0]
    assert reported == [KEEP_SCALAR_TENSORS.name]
    is_lost = torch_release() < (2, 11)  # torch 2.10 writes code without the launch; later releases fail
    fails = contextlib.nullcontext() if is_lost else pytest.raises(AssertionError, match="Constant")
    with pretended_gpu() as codes, fails:
        write_with_a_constant()
    assert "scaled_0.run" not in "".join(codes)


class OlderOverrides(CUDADeviceOpOverrides):
    """What torch 2.10 and 2.11 write."""

    def cpp_scratch(self, idx: int, workspace: Any, prefix: str | None = None) -> Any:
        name = f"{prefix}_scratch_{idx}"
        if workspace.size == 0:
            return [f"CUdeviceptr {name} = 0;"], name
        return [f"int64_t {name}_size[] = {{{workspace.size}}};", f"int64_t {name}_stride[] = {{1}};"], name


def allocation(size: int) -> str:
    """The line that generated C++ has for *size* bytes of scratch memory."""
    workspace = TritonScratchWorkspace(size, lambda: "uint8")
    overrides: Any = CUDADeviceOpOverrides()
    lines, _ = overrides.cpp_scratch(3, workspace, prefix="global_scratch")
    return str(lines[0])


def test_there_is_scratch_for_each_program_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_grid = "int64_t global_scratch_scratch_3_size[] = {static_cast<int64_t>(128) * grid_0 * grid_1 * grid_2};"
    of_one_program = "int64_t global_scratch_scratch_3_size[] = {128};"
    # With the repair where the installed release needs it, without it where torch does so itself.
    with repaired([SCRATCH_FOR_EACH_PROGRAM], lambda _: None):
        assert allocation(128) == whole_grid

    monkeypatch.setattr(CUDADeviceOpOverrides, "cpp_scratch", OlderOverrides.cpp_scratch)
    reported: list[str] = []
    assert allocation(128) == of_one_program
    with repaired([SCRATCH_FOR_EACH_PROGRAM], reported.append):
        assert allocation(128) == whole_grid
    assert allocation(128) == of_one_program
    assert reported == [SCRATCH_FOR_EACH_PROGRAM.name]
    with repaired([SCRATCH_FOR_EACH_PROGRAM], pytest.fail):
        assert allocation(0) == "CUdeviceptr global_scratch_scratch_3 = 0;"


def upsampled(x: Tensor, y: Tensor) -> Tensor:
    return F.interpolate(x, size=y.shape[-2:])


SMALL, LARGE = torch.empty(1, 8, 45, 66), torch.empty(1, 8, 90, 132)
INEXACT = r"\bks\d+ / ks\d+"


def test_sizes_are_divided_in_float64() -> None:
    stock, _ = code_and_repairs(upsampled, SMALL, LARGE, dynamic=True, backend="inductor")
    assert re.search(INEXACT, stock), "torch has mended this: give the defect its end"

    code, repairs = code_and_repairs(upsampled, SMALL, LARGE, dynamic=True)

    assert not re.search(INEXACT, code)
    assert re.search(r"tl\.cast\(ks\d+, tl\.float64\) / tl\.cast\(ks\d+, tl\.float64\)", code)
    assert set(repairs) == {"divide_sizes_exactly"}

    code, repairs = code_and_repairs(lambda x: F.interpolate(x, scale_factor=2.0), SMALL, dynamic=True)
    assert "tl.float64" not in code
    assert set(repairs) == {"number_for_quotient"}


@pytest.mark.parametrize(
    ("fn", "dynamic"),
    [
        (upsampled, False),
        (lambda x, y: x * (y.shape[-1] / x.shape[-1]), False),
        (lambda x, y: F.avg_pool2d(x, 2) + y.mean(), True),
    ],
)
def test_a_graph_without_a_quotient_of_symbols_has_no_repair(fn: Callable[..., Tensor], dynamic: bool) -> None:
    code, repairs = code_and_repairs(fn, SMALL, LARGE, dynamic=dynamic)

    assert "tl.cast(ks" not in code
    assert repairs == []


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["inductor", "magi"])
def test_upsampling_to_a_size_on_a_gpu(backend: str) -> None:
    compiled = torch.compile(upsampled, backend=backend, dynamic=True)
    wrong = []
    for height in range(40, 72):
        x = torch.arange(height * 66.0, device="cuda").view(1, 1, height, 66)
        y = torch.empty(1, 1, height, 132, device="cuda") if height > 40 else torch.empty(1, 1, 80, 132, device="cuda")
        if not torch.equal(compiled(x, y), upsampled(x, y)):
            wrong.append(height)
    assert bool(wrong) is (backend == "inductor"), wrong
