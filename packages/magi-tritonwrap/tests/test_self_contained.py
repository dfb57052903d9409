# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call,attr-defined,no-untyped-def,untyped-decorator"
"""What Inductor would write for a kernel compiles to the same Triton IR as the kernel itself.

Inductor's own function makes the text; the text becomes a module with the imports that Inductor's modules have.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as T
import triton.language as tl
import tritonwrap_patterns as patterns
from magi_tritonwrap._cache_key import fingerprint
from magi_tritonwrap._launch.self_contained import self_contained
from torch._higher_order_ops.triton_kernel_wrap import generate_ttir
from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code
from triton.language import cdiv, constexpr


pytestmark = pytest.mark.usefixtures("stub")

_NUMBERS = itertools.count()
IMPORTS = "import triton\nimport triton.language as tl\n@triton.jit\n"


@triton.jit
def relu(value):
    return tl.maximum(value, 0.0)


@triton.jit
def shifted(value):
    return value + SHIFT


SHIFT = tl.constexpr(3)
DEFAULT_BLOCK = 128


def with_closure(activation, scale):
    scale = tl.constexpr(scale)

    @triton.jit
    def closure_kernel(x, out, n, BLOCK: tl.constexpr):
        tl.store(out + tl.arange(0, BLOCK), activation(tl.load(x + tl.arange(0, BLOCK))) * scale)

    return closure_kernel


def nested_closure():
    first, second = patterns.make_shift(1), patterns.make_shift(2)

    @triton.jit
    def nested_kernel(x, out, n, BLOCK: tl.constexpr):
        tl.store(out + tl.arange(0, BLOCK), second(first(tl.load(x + tl.arange(0, BLOCK)))))

    return nested_kernel


renamed_relu = relu


@triton.jit
def alias_kernel(x, out, n, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), renamed_relu(tl.load(x + tl.arange(0, BLOCK))))


@triton.jit
def language_alias_kernel(x, out, n, BLOCK: T.constexpr):
    T.store(out + T.arange(0, BLOCK), T.math.exp(T.load(x + T.arange(0, BLOCK))))


@triton.jit
def default_kernel(x, out, n, BLOCK: tl.constexpr = DEFAULT_BLOCK):
    tl.store(out + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)))


@triton.jit
def annotation_kernel(x, out, n, BLOCK: constexpr):
    tl.store(out + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)))


@triton.jit
def language_function_kernel(x, out, n, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)) + cdiv(n, 1))


@triton.jit
def module_attribute_kernel(x, out, n, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), patterns.double_value(tl.load(x + tl.arange(0, BLOCK))))


@triton.jit
def applied_kernel(x, out, n, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), ACTIVATION(tl.load(x + tl.arange(0, BLOCK))))


@triton.jit
def plain_kernel(x, out, n, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), shifted(relu(tl.load(x + tl.arange(0, BLOCK)))))


REWRITTEN = {
    "closure": with_closure(relu, 2),
    "closure of a function by another name": with_closure(patterns.double_value, 3),
    "alias of a function": alias_kernel,
    "alias of the language": language_alias_kernel,
    "default of the module": default_kernel,
    "annotation of the module": annotation_kernel,
    "function of the language": language_function_kernel,
    "function through a module": module_attribute_kernel,
}


def written_by_inductor(kernel: Any, folder: Path) -> Any:
    """The kernel as Inductor's generated module would hold it."""
    name = f"written_{next(_NUMBERS)}"
    path = folder / f"{name}.py"
    path.write_text(IMPORTS + user_defined_triton_kernel_transitive_closure_source_code(kernel))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return getattr(module, kernel.fn.__name__)


def instructions(kernel: Any, **constants: Any) -> list[str]:
    """Operations and constants of the kernel's Triton IR, in order, whatever its functions are called."""
    arguments = {"x": torch.ones(4), "out": torch.ones(4), "n": 4, "BLOCK": 128, **constants}
    ordered = {name: arguments[name] for name in kernel.arg_names}
    module, _ = generate_ttir(kernel, ordered, {})
    return re.findall(r"\b(?:arith|tt|math)\.\w+(?: dense<[^>]*>)?|arith\.constant [-\w.]+", str(module))


def check_twin(kernel: Any, folder: Path) -> None:
    twin = self_contained(kernel)
    assert twin is not kernel
    assert instructions(twin) == instructions(kernel)
    assert instructions(written_by_inductor(twin, folder)) == instructions(kernel)


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten_kernel_is_the_same_kernel(name: str, tmp_path: Path) -> None:
    check_twin(REWRITTEN[name], tmp_path)


@pytest.mark.parametrize("name", ["closure", "alias of a function", "annotation of the module"])
def test_inductor_cannot_write_the_kernel_as_it_is(name: str, tmp_path: Path) -> None:
    with pytest.raises((NameError, triton.CompilationError)):
        instructions(written_by_inductor(REWRITTEN[name], tmp_path))


def test_names_with_two_meanings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tritonwrap_two_meanings.py"
    path.write_text(
        "import triton\nimport triton.language as tl\nSHIFT = tl.constexpr(50)\n"
        "@triton.jit\ndef relu(value):\n    return value * SHIFT\n"
        "@triton.jit\ndef other(value):\n    return relu(value)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import tritonwrap_two_meanings as two  # type: ignore[import-not-found]

    check_twin(with_closure(two.other, 2), tmp_path)
    check_twin(_calls_both(two.other), tmp_path)


def _calls_both(other):
    @triton.jit
    def both_kernel(x, out, n, BLOCK: tl.constexpr):
        tl.store(out + tl.arange(0, BLOCK), other(shifted(relu(tl.load(x + tl.arange(0, BLOCK))))))

    return both_kernel


def test_two_closures_of_one_factory(tmp_path: Path) -> None:
    """Triton 3.7.1 compiles both callees as one, by their qualified name; the compiled graph does what is written."""
    twin = self_contained(nested_closure())
    for one in (twin, written_by_inductor(twin, tmp_path)):
        constants = [item for item in instructions(one) if item.startswith("arith.constant")]
        assert len(set(constants)) > len({item for item in instructions(nested_closure()) if "constant" in item})


def test_function_passed_as_a_constexpr(tmp_path: Path) -> None:
    twin = self_contained(applied_kernel, {"ACTIVATION": shifted})

    assert twin.arg_names == ["x", "out", "n", "BLOCK"]
    assert instructions(twin) == instructions(applied_kernel, ACTIVATION=shifted)
    assert instructions(written_by_inductor(twin, tmp_path)) == instructions(twin)


def test_plain_kernels_stay_as_they_are() -> None:
    assert self_contained(plain_kernel) is plain_kernel
    assert self_contained(patterns.double_kernel) is patterns.double_kernel


def test_equal_kernels_of_a_factory_become_one() -> None:
    first, second = with_closure(relu, 2), with_closure(relu, 2)
    assert first is not second
    assert self_contained(first) is self_contained(second)
    assert self_contained(first) is not self_contained(with_closure(relu, 3))
    assert self_contained(patterns.make_double_kernel()) is self_contained(patterns.make_double_kernel())


def test_settings_survive() -> None:
    kernel = triton.jit(do_not_specialize=["n"], noinline=False, debug=True)(with_closure(relu, 2).fn)
    registered = dict(getattr(triton.runtime.jit, "_triton_jit_function_registry", {}))
    twin = self_contained(kernel)
    assert (twin.do_not_specialize, twin.debug) == (["n"], True)
    assert getattr(triton.runtime.jit, "_triton_jit_function_registry", {}) == registered
    assert twin.raw_src[0].strip().startswith("def closure_kernel")


@pytest.mark.parametrize(
    "settings",
    [
        {"version": "2"},
        {"debug": True},
        {"noinline": True},
        {"do_not_specialize": ["n"]},
        {"do_not_specialize_on_alignment": ["n"]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_kernels_with_other_settings_stay_apart(settings: dict[str, Any]) -> None:
    function = with_closure(relu, 2).fn
    one, same, other = triton.jit(function), triton.jit(function), triton.jit(**settings)(function)

    assert self_contained(one) is self_contained(same)
    assert self_contained(one) is not self_contained(other)
    assert fingerprint([one], "kernel").digest == fingerprint([same], "kernel").digest
    assert fingerprint([one], "kernel").digest != fingerprint([other], "kernel").digest
