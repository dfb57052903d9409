# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Each mistake raises, at decoration or at the first compilation: which kernel, where, why, and the fix."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import magi_tritonwrap
import pytest
import torch
import triton
import triton.language as tl
from magi_tritonwrap import TritonWrapError, make_see_through, triton_op
from magi_tritonwrap.testing import aot_graphs
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed


if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ops


@triton.jit
def kernel(x, out, n, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)))


def tuned(**settings: Any) -> Any:
    return triton.autotune(configs=[triton.Config({"BLOCK": 128})], key=["n"], **settings)(kernel)


def tuned_as_of_old(**settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return tuned(**settings)


def no_hook(*args: Any, **kwargs: Any) -> None:
    pass


block_heuristic = triton.heuristics({"BLOCK": lambda args: 128})
two_autotuners = triton.autotune(configs=[triton.Config({}, num_warps=8)], key=[])(tuned())
config_with_hook = triton.autotune(configs=[triton.Config({"BLOCK": 128}, pre_hook=no_hook)], key=[])(kernel)

CLASH = (
    r"computes BLOCK in @triton\.heuristics above an @triton\.autotune whose configs set the same\. "
    r"The accepted order is @triton\.autotune, then @triton\.heuristics, then @triton\.jit"
)
KERNELS = {
    "pre_hook": (tuned(pre_hook=no_hook), r"is autotuned with pre_hook=, .*\. Do what the hook does in the op's body"),
    "post_hook": (tuned(post_hook=no_hook), r"is autotuned with post_hook=, arbitrary Python"),
    "both hooks": (tuned(pre_hook=no_hook, post_hook=no_hook), r"is autotuned with pre_hook and post_hook="),
    "pre_hook of a config": (config_with_hook, r"has a triton\.Config with pre_hook=, arbitrary Python"),
    "warmup": (tuned_as_of_old(warmup=7), r"sets warmup= in @triton\.autotune, and Inductor benchmarks in its own way"),
    "rep": (tuned_as_of_old(rep=7), r"sets rep= in @triton\.autotune.*unsafe_ignore_unsupported_triton_autotune_args"),
    "two autotuners": (two_autotuners, r"has 2 @triton\.autotune decorators, and torch supports one\. Merge"),
    "heuristics that clash": (block_heuristic(tuned()), CLASH),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_is_refused_at_decoration(ops: Ops, name: str) -> None:
    launched, sentence = KERNELS[name]

    def body(x: Tensor) -> Tensor:
        launched[(1,)](x, x, 4)
        return x

    op = ops.define("op", body)
    where = rf"Triton kernel 'kernel' .*test_errors\.py:{kernel.starting_line_number}\)"
    for attempt in (
        lambda: make_see_through(op, body),
        lambda: triton_op(f"{ops.namespace}::other", body, mutates_args=(), schema="(Tensor x) -> Tensor"),
    ):
        with pytest.raises(magi_tritonwrap.UnsupportedKernelError, match=sentence) as caught:
            attempt()
        assert isinstance(caught.value, TypeError)
        caught.match(where)


def test_refused_op_leaves_no_op_behind(ops: Ops) -> None:
    def body(x: Tensor) -> Tensor:
        two_autotuners[(1,)](x, x, 4)
        return x

    with pytest.raises(TritonWrapError):
        triton_op(f"{ops.namespace}::refused", body, mutates_args=(), schema="(Tensor x) -> Tensor")
    with pytest.raises(AttributeError):
        _ = getattr(__import__("torch").ops, ops.namespace).refused.default


def unknown_option(x: Tensor) -> Tensor:
    kernel[(1,)](x, x, 4, BLOCK=4, enable_fp_fusion=False)
    return x


def misspelt_parameter(x: Tensor) -> Tensor:
    kernel[(1,)](x, x, n=4, BLOK=4)
    return x


def warmed_up(x: Tensor) -> Tensor:
    compiled = kernel.warmup(x, x, 4, BLOCK=4, grid=(1,))
    compiled[(1, 1, 1)](x, x, 4)
    return x


LAUNCHES: dict[Callable[..., Any], str] = {
    unknown_option: (
        r"is launched with enable_fp_fusion=, which is neither a parameter of it nor an option "
        r".*num_warps=.*leave it out"
    ),
    misspelt_parameter: r"is launched with BLOK=, which is neither a parameter of it",
    warmed_up: r"is compiled by \.warmup\(\) in the op's body, .*Launch the kernel itself",
}


@pytest.mark.parametrize("body", LAUNCHES, ids=lambda body: body.__name__)
@pytest.mark.usefixtures("stub")
def test_launch_is_refused_at_the_first_compilation(ops: Ops, body: Callable[..., Any]) -> None:
    op = ops.define("op", body)
    make_see_through(op, body)
    with pytest.raises(BackendCompilerFailed, match=f"UnsupportedLaunchError.*{LAUNCHES[body]}") as caught:
        aot_graphs(op, torch.ones(4))
    caught.match(rf"launched at .*test_errors\.py:{body.__code__.co_firstlineno + 1}, defined at .*test_errors\.py")
    assert isinstance(caught.value.inner_exception, ValueError)


def test_settings_that_inductor_was_told_to_overlook(ops: Ops) -> None:
    from torch._inductor import config

    launched, _ = KERNELS["pre_hook"]

    def body(x: Tensor) -> Tensor:
        launched[(1,)](x, x, 4)
        return x

    with config.patch(unsafe_ignore_unsupported_triton_autotune_args=True):
        assert make_see_through(ops.define("op", body), body).see_through


def test_every_error_has_one_root_and_a_builtin_base() -> None:
    errors = [
        value
        for name, value in vars(magi_tritonwrap.errors).items()
        if name.endswith("Error") and value is not TritonWrapError
    ]
    assert len(errors) == 7
    for error in errors:
        assert issubclass(error, TritonWrapError)
        assert any(issubclass(error, builtin) for builtin in (TypeError, ValueError, KeyError, RuntimeError))
