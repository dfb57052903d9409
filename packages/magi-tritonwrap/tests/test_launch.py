# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""A resolved launch is the launch that Triton's own `run` methods would make.

Random decorator stacks over one kernel, launched with random arguments: what reaches `JITFunction.run` in eager is
compared with what the graph would hold; what Triton refuses must be refused.
"""

from __future__ import annotations

import enum
import inspect
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from graph_questions import Ops, launch_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from magi_tritonwrap import TritonWrapError, UnsupportedKernelError, UnsupportedLaunchError
from magi_tritonwrap._launch.hook import listening
from magi_tritonwrap._launch.normalise import ResolvedLaunch, resolve
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction
from tritonwrap_patterns import make_shift


@triton.jit
def kernel(x, n, A: tl.constexpr, B: tl.constexpr = 3, C: tl.constexpr = 7):
    tl.store(x + tl.arange(0, A), n + B + C)


@triton.jit
def warps_kernel(x, n, A: tl.constexpr, num_warps: tl.constexpr, B: tl.constexpr = 3, C: tl.constexpr = 7):
    tl.store(x + tl.arange(0, A), n + B + C + num_warps)


Made = tuple[dict[str, Any], dict[str, Any]]
NAMES = ("A", "B", "C")
HEURISTICS = {
    "constant": lambda args: 16,
    "of an argument": lambda args: args["n"] * 2,
    "of another constexpr": lambda args: args.get("A", 5) + 1,
    "of the warps": lambda args: args.get("num_warps", 0) + 1,
}


@st.composite
def layers(draw: st.DrawFn) -> Any:
    if draw(st.booleans()):
        names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True))
        return triton.heuristics({name: HEURISTICS[draw(st.sampled_from(sorted(HEURISTICS)))] for name in names})
    values = draw(st.dictionaries(st.sampled_from(NAMES), st.sampled_from([8, 32]), max_size=2))
    config = triton.Config(values, num_warps=draw(st.sampled_from([2, 4])))
    return triton.autotune(configs=[config], key=[])


@st.composite
def launches(draw: st.DrawFn) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    outermost: Any = draw(st.sampled_from([kernel, warps_kernel]))
    for layer in draw(st.lists(layers(), max_size=3)):
        outermost = layer(outermost)
    positional = draw(st.integers(1, 3))
    args = (None, 5, 64)[:positional]
    named: dict[str, Any] = {} if positional > 1 else {"n": 5}
    named |= draw(st.dictionaries(st.sampled_from(NAMES), st.sampled_from([16, tl.constexpr(4)]), max_size=2))
    named |= draw(st.dictionaries(st.sampled_from(["num_warps", "num_stages"]), st.sampled_from([1, 2]), max_size=2))
    return outermost, args, named


def made_by_triton(outermost: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Made:
    """Parameters and options as they reach the kernel in eager; raises what Triton or Python raises."""
    reached: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    original = JITFunction.run
    JITFunction.run = lambda self, *given, **options: reached.append((given, options))
    try:
        outermost[(1,)](*args, **named)
    finally:
        JITFunction.run = original
    ((given, options),) = reached
    jit = outermost
    while not isinstance(jit, JITFunction):
        jit = jit.fn
    parameters = {name: value for name, value in options.items() if name in jit.arg_names}
    bound = inspect.signature(jit.fn).bind(*given, **parameters)
    bound.apply_defaults()
    chosen: dict[str, Any] = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
    return {name: plain(value) for name, value in bound.arguments.items()}, chosen


def made_by_us(outermost: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Made:
    resolved: list[ResolvedLaunch] = []
    with listening(lambda launched, _run, given, options: resolved.append(resolve(launched, given, options))):
        outermost[(1,)](*args, **named)
    (launch,) = resolved
    if not isinstance(launch.kernel, Autotuner):
        return launch.arguments, {}
    (config,) = launch.kernel.configs
    assert not launch.arguments.keys() & config.kwargs.keys()
    return {**launch.arguments, **config.kwargs}, {"num_warps": config.num_warps, "num_stages": config.num_stages}


def plain(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


@given(launches())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_a_resolved_launch_is_tritons_launch(launch: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> None:
    try:
        expected = made_by_triton(*launch)
    except (TypeError, ValueError, KeyError):
        with pytest.raises((TritonWrapError, TypeError, KeyError)):
            made_by_us(*launch)
        return
    try:
        parameters, chosen = made_by_us(*launch)
    except UnsupportedKernelError as error:
        assert "@triton.autotune decorators, and torch supports one" in str(error)  # noqa: PT017 - only some launches
        return
    assert parameters == expected[0]
    assert {name: chosen.get(name, value) for name, value in expected[1].items()} == expected[1]


def test_several_configs_are_resolved_one_by_one() -> None:
    tuned = triton.autotune(
        configs=[triton.Config({"A": 8}, num_warps=2), triton.Config({"A": 32, "C": 1}, num_warps=8)], key=[]
    )(triton.heuristics({"B": lambda args: args["A"] * args["num_warps"]})(kernel))

    launch = resolve(tuned, (None, 5), {"grid": (1,)})

    assert [config.kwargs for config in launch.kernel.configs] == [
        {"A": 8, "B": 16, "C": 7},
        {"A": 32, "B": 256, "C": 1},
    ]
    assert launch.arguments == {"x": None, "n": 5}


def test_launches_of_one_function_with_other_configs_are_of_other_kernels() -> None:
    """Inductor writes one kernel for those with equal arguments, whose blocks would be those of the first."""
    tuned, larger = (triton.autotune([triton.Config({"A": size})], key=["n"])(kernel) for size in (8, 16))
    first, again, other = (resolve(each, (None, 5), {"grid": (1,)}).kernel for each in (tuned, tuned, larger))
    assert first is again
    assert first.keys == ["n"]
    assert first.fn.fn is not other.fn.fn
    assert first.fn.src == other.fn.src


def test_configs_whose_values_look_alike_are_told_apart() -> None:
    one, other = (triton.autotune([triton.Config({"A": make_shift(amount)})], key=[])(kernel) for amount in (1, 2))
    assert resolve(one, (None, 5), {"grid": (1,)}).kernel is not resolve(other, (None, 5), {"grid": (1,)}).kernel


def test_a_performance_model_prunes_as_in_eager() -> None:
    tuned = triton.autotune(
        configs=[triton.Config({"A": size}) for size in (8, 16, 32, 64)],
        key=[],
        prune_configs_by={"perf_model": lambda **arguments: -arguments["A"], "top_k": 2},
    )(kernel)
    launch = resolve(tuned, (None, 5), {"grid": (1,)})
    assert [config.kwargs["A"] for config in launch.kernel.configs] == [64, 32]
    assert not hasattr(tuned, "nargs"), "the author's autotuner is as it was"


REFUSED_GRIDS = {"a number": 8, "no sizes": (), "four sizes": (1, 1, 1, 1), "text": "8", "nothing": None}


@pytest.mark.parametrize("name", REFUSED_GRIDS)
def test_grids_that_are_none(name: str) -> None:
    with pytest.raises(UnsupportedLaunchError, match=r"a grid is a tuple of 1 to 3 sizes"):
        resolve(kernel, (None, 5, 64), {"grid": REFUSED_GRIDS[name]})
    launch = resolve(kernel, (None, 5, 64), {"grid": lambda meta: REFUSED_GRIDS[name]})
    with pytest.raises(UnsupportedLaunchError, match=r"a grid is a tuple of 1 to 3 sizes"):
        launch.grid({})


class Level(enum.IntEnum):
    HIGH = 2


class Name(enum.StrEnum):
    FAST = "fast"


PLAIN = [
    (np.int64(2), 2),
    (np.float64(0.5), 0.5),
    (np.bool_(True), True),
    (np.str_("a"), "a"),
    (np.array(3), 3),
    (Level.HIGH, 2),
    (Name.FAST, "fast"),
    (tl.constexpr(Level.HIGH), 2),
    ((np.int64(1), [Level.HIGH]), (1, [2])),
]


@pytest.mark.parametrize(("given", "plain"), PLAIN, ids=[repr(given) for given, _ in PLAIN])
def test_a_constant_is_a_plain_value(given: Any, plain: Any) -> None:
    x = torch.ones(4)
    autotuned: Any = triton.autotune(configs=[triton.Config({"B": given}, num_warps=np.int64(2))], key=[])(kernel)
    by_argument = resolve(kernel, (x, 1), {"grid": (1,), "A": 4, "B": given}).arguments["B"]
    (config,) = resolve(autotuned, (x, 1), {"grid": (1,), "A": 4}).kernel.configs
    for found in (by_argument, config.kwargs["B"]):
        assert repr(found) == repr(plain)
    assert type(config.num_warps) is int


def test_options_and_sizes_are_plain_numbers() -> None:
    grid = (np.int64(3), True, Level.HIGH)
    launch = resolve(kernel, (torch.ones(4), 1), {"grid": grid, "A": 4, "num_warps": np.int64(2)})
    assert [repr(size) for size in launch.grid] == ["3", "1", "2"]
    assert repr(launch.kernel.configs[0].num_warps) == "2"
    assert repr(resolve(kernel, (torch.ones(4), 1), {"grid": lambda _: grid, "A": 4}).grid({})) == "(3, 1, 2)"


@pytest.mark.usefixtures("stub")
def test_a_comparison_of_symbolic_sizes_is_guarded(ops: Ops) -> None:
    @triton.jit
    def flagged_kernel(out, is_large, A: tl.constexpr):
        tl.store(out + tl.arange(0, A), is_large)

    def body(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        flagged_kernel[(1,)](out, x.shape[0] > 16, A=4)
        return out

    op = ops.seen("flagged", body)
    for size in (8, 300):
        assert launch_of(op, torch.ones(size), dynamic=True).arguments["is_large"] is (size > 16)
