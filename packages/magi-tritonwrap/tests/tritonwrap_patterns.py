# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="attr-defined,no-untyped-def,untyped-decorator,no-untyped-call"
"""Every way to reach a kernel that the tests know, as op bodies with the result they must have.

One catalogue for three uses: AOT graphs on a CPU, numbers on a GPU, and the interpreter in a process of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton
from triton.runtime.jit import JITFunction


def twice(x: Tensor) -> Tensor:
    return x * 2


@dataclass(frozen=True)
class Pattern:
    """One op body `(Tensor x) -> Tensor`, what it computes, and how many launches the graph must show.

    `interpretable` is false where Triton's own interpreter refuses the launch without a GPU, op or no op: it benchmarks
    several configs through a driver, takes no list for a grid, and has no closures (3.7.1).
    """

    name: str
    body: Callable[[Tensor], Tensor]
    reference: Callable[[Tensor], Tensor] = twice
    launches: int = 1
    interpretable: bool = True


PATTERNS: dict[str, Pattern] = {}

# torch.library.wrap_triton lets kernels of Triton's interpreter pass from torch 2.13 on; before, it raises.
WRAPS_ANY = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
WRAPPED_BY_HAND = ("bare_and_wrapped", "wrapped_outside")


def add(name: str, body: Callable[[Tensor], Tensor], **options: Any) -> None:
    PATTERNS[name] = Pattern(name, body, **options)


def pattern(**options: Any) -> Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]:
    def added(body: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        add(body.__name__, body, **options)
        return body

    return added


def launching(name: str, launch: Callable[[Tensor, Tensor], object], **options: Any) -> None:
    """Add a body with one launch into a new Tensor."""

    def body(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        launch(x, out)
        return out

    add(name, body, **options)


@triton.jit
def double_value(value):
    return value * 2


@triton.jit
def double_kernel(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, double_value(tl.load(x + offsets, mask)), mask)


@triton.jit
def increment_kernel(x, out, n, BLOCK: tl.constexpr = 128):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask) + 1, mask)


@triton.jit
def double_default_kernel(x, out, n, BLOCK: tl.constexpr = 128):
    double_kernel(x, out, n, BLOCK)


def blocks(n: Any, block: int = 128) -> tuple[Any, ...]:
    return (triton.cdiv(n, block),)


def by_block(x: Tensor) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    return lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)


def through(launcher: Any, **options: Any) -> Callable[[Tensor], Tensor]:
    """A body with one launch, by a grid that depends on the block."""

    def body(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        launcher[by_block(x)](x, out, x.numel(), **options)
        return out

    return body


def calls(fn: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor) -> Tensor:
        result: Tensor = fn(x)
        return result

    return body


def launch_with(kernel: Any, x: Tensor, out: Tensor) -> None:
    kernel[blocks(x.numel())](x, out, x.numel(), BLOCK=128)


def launch_double(x: Tensor, out: Tensor) -> None:
    double_kernel[blocks(x.numel())](x, out, x.numel(), BLOCK=128)


def launch_through_two_helpers(x: Tensor, out: Tensor) -> None:
    launch_double(x, out)


@pattern()
def module_level(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    double_kernel[blocks(x.numel())](x, out, x.numel(), BLOCK=128)
    return out


@pattern()
def helper(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    launch_through_two_helpers(x, out)
    return out


@pattern(reference=lambda x: x * 2 + 1, launches=2)
def several_kernels(x: Tensor) -> Tensor:
    middle = torch.empty_like(x)
    out = torch.empty_like(x)
    double_kernel[blocks(x.numel())](x, middle, x.numel(), BLOCK=128)
    increment_kernel[blocks(x.numel())](middle, out, x.numel())
    return out


@pattern(reference=lambda x: x * 8, launches=3)
def bare_and_wrapped(x: Tensor) -> Tensor:
    out = x.clone()
    double_kernel[blocks(x.numel())](out, out, x.numel(), BLOCK=128)
    wrap_triton(double_kernel)[blocks(x.numel())](out, out, x.numel(), BLOCK=128)
    torch._library.capture_triton(double_kernel)[blocks(x.numel())](out, out, x.numel(), BLOCK=128)
    return out


# Up to torch 2.12 this raises for a kernel of the interpreter, and none of the other patterns could be imported.
wrapped_at_import: Any = wrap_triton(double_kernel) if isinstance(double_kernel, JITFunction) or WRAPS_ANY else None


@pattern()
def wrapped_outside(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    wrapped_at_import[blocks(x.numel())](x, out, x.numel(), BLOCK=128)
    return out


def make_double_kernel() -> Any:
    @triton.jit
    def made_kernel(x, out, n, BLOCK: tl.constexpr):
        double_kernel(x, out, n, BLOCK)

    return made_kernel


def make_shift(amount: int) -> Any:
    amount = tl.constexpr(amount)

    @triton.jit
    def shift(value):
        return value + amount

    return shift


def make_scaling_kernel(activation: Any, factor: int) -> Any:
    factor = tl.constexpr(factor)

    @triton.jit
    def scaling_kernel(x, out, n, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < n
        tl.store(out + offsets, activation(tl.load(x + offsets, mask)) * factor, mask)

    return scaling_kernel


launching("factory_inside", lambda x, out: launch_with(make_double_kernel(), x, out))
launching(
    "kernel_with_a_closure",
    lambda x, out: launch_with(make_scaling_kernel(double_value, 3), x, out),
    reference=lambda x: x * 6,
    interpretable=False,
)


TABLE = {"double": double_kernel, "increment": increment_kernel}
launching("table", lambda x, out: launch_with(TABLE["double"], x, out))


class Doubler(torch.nn.Module):
    kernel_of_class = double_kernel

    def __init__(self) -> None:
        super().__init__()
        self.kernel = double_kernel

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self.kernel[blocks(x.numel())](x, out, x.numel(), BLOCK=128)
        return out

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        cls.kernel_of_class[blocks(x.numel())](x, out, x.numel(), BLOCK=128)
        return out


doubler = Doubler()


@pattern()
def module_called(x: Tensor) -> Tensor:
    result: Tensor = doubler(x)
    return result


@pattern()
def class_method(x: Tensor) -> Tensor:
    return Doubler.of_class(x)


class DoubleFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return module_level(x)


@pattern()
def autograd_function(x: Tensor) -> Tensor:
    result: Tensor = DoubleFunction.apply(x)
    return result


@dataclass
class Holder:
    kernels: list[Any] = field(default_factory=lambda: [double_kernel])

    @property
    def first(self) -> Any:
        return self.kernels[0]


holder = Holder()
launch_partial = functools.partial(launch_with, double_kernel)
launching("property_of_object", lambda x, out: launch_with(holder.first, x, out))
launching("partial", lambda x, out: launch_partial(x, out))  # noqa: PLW0108 - the walk reads the name


def keep_small_blocks(configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
    return [config for config in configs if config.kwargs["BLOCK"] <= 256]


one_config_kernel = triton.autotune(configs=[triton.Config({"BLOCK": 128}, num_warps=4)], key=["n"])(double_kernel)
two_configs_kernel = triton.autotune(
    configs=[triton.Config({"BLOCK": 128}, num_warps=4), triton.Config({"BLOCK": 256}, num_warps=8)], key=["n"]
)(double_kernel)
pruned_kernel = triton.autotune(
    configs=[triton.Config({"BLOCK": block}) for block in (128, 256, 512)],
    key=["n"],
    prune_configs_by={"early_config_prune": keep_small_blocks},
)(double_kernel)
heuristics_kernel = triton.heuristics({"BLOCK": lambda args: 256 if args["n"] > 256 else 128})(double_kernel)


@triton.autotune(configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def autotuned_heuristics_kernel(x, out, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(out + offsets, tl.load(x + offsets) * 2)
    else:
        mask = offsets < n
        tl.store(out + offsets, tl.load(x + offsets, mask) * 2, mask)


@triton.heuristics({"SCALE": lambda args: 2})
@triton.autotune(configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"])
@triton.jit
def heuristics_above_autotune_kernel(x, out, n, BLOCK: tl.constexpr, SCALE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask) * SCALE, mask)


closure_body = through(double_kernel, BLOCK=128)
add("closure", closure_body)
add("autotune_one_config", through(one_config_kernel))
add("autotune_two_configs", through(two_configs_kernel), interpretable=False)
add("autotune_pruned", through(pruned_kernel), interpretable=False)
add("autotune_above_heuristics", through(autotuned_heuristics_kernel), interpretable=False)
add("heuristics_above_autotune", through(heuristics_above_autotune_kernel), interpretable=False)
add("heuristics_alone", through(heuristics_kernel))
add("default_constexpr_in_grid", through(double_default_kernel))


launching(
    "run_method",
    lambda x, out: double_kernel.run(x, out, x.numel(), BLOCK=128, grid=blocks(x.numel()), warmup=False),
)
launching(
    "launch_options",
    lambda x, out: double_kernel[blocks(x.numel())](x, out, x.numel(), BLOCK=128, num_warps=8, num_stages=1),
)
launching(
    "grid_list",
    lambda x, out: double_kernel[[triton.cdiv(x.numel(), 128)]](x, out, x.numel(), BLOCK=128),
    interpretable=False,
)
launching("every_argument_named", lambda x, out: double_kernel[blocks(x.numel())](BLOCK=128, n=x.numel(), out=out, x=x))


fixed_launch = double_kernel[(3,)]
fixed_partial = functools.partial(double_kernel[(3,)], BLOCK=128)


@pattern(reference=lambda x: x * 4, launches=2)
def launcher_made_at_import(x: Tensor) -> Tensor:
    middle = torch.empty_like(x)
    out = torch.empty_like(x)
    fixed_launch(x, middle, x.numel(), BLOCK=128)
    fixed_partial(middle, out, x.numel())
    return out


@triton.jit
def applied_kernel(x, out, n, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, ACTIVATION(tl.load(x + offsets, mask)), mask)


launching(
    "function_as_constexpr",
    lambda x, out: applied_kernel[blocks(x.numel())](x, out, x.numel(), ACTIVATION=double_value, BLOCK=128),
)


@triton.jit
def scaled_by_a_tuple_kernel(x, out, n, SIZES: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < SIZES[1]
    tl.store(out + offsets, tl.load(x + offsets, mask) * SIZES[0], mask)


launching(
    "sizes_in_a_tuple",
    lambda x, out: scaled_by_a_tuple_kernel[blocks(x.numel())](x, out, 0, SIZES=(2, *x.shape), BLOCK=128),
)
launching(
    "reinterpreted",
    lambda x, out: double_kernel[blocks(x.numel())](
        triton.reinterpret(x, tl.float32), triton.reinterpret(out, torch.float32), x.numel(), BLOCK=128
    ),
)
