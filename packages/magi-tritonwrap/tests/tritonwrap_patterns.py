# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="attr-defined,no-untyped-def,untyped-decorator,no-untyped-call"
"""Every way to reach a kernel that the tests know, as op bodies with the result they must have.

One catalogue for three uses: AOT graphs on a CPU, numbers on a GPU, and the interpreter in a process of its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton
from triton.runtime.jit import JITFunction


if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Pattern:
    """One op body `(Tensor x) -> Tensor`, what it computes, and how many launches the graph must show.

    `interpretable` is false where Triton's own interpreter refuses the launch without a GPU, op or no op: it benchmarks
    several configs through a driver, takes no list for a grid, and has no closures (3.7.1).
    """

    name: str
    body: Callable[[Tensor], Tensor]
    reference: Callable[[Tensor], Tensor]
    launches: int = 1
    cloned: tuple[str, ...] = ("out",)
    interpretable: bool = True


PATTERNS: dict[str, Pattern] = {}

# torch.library.wrap_triton lets kernels of Triton's interpreter pass from torch 2.13 on; before, it raises.
WRAPS_ANY = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
WRAPPED_BY_HAND = ("bare_and_wrapped", "wrapped_in_all_spellings", "wrapped_outside")


def pattern(
    reference: Callable[[Tensor], Tensor], **options: Any
) -> Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]:
    def add(body: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        name = body.__name__.strip("_")
        PATTERNS[name] = Pattern(name, body, reference, **options)
        return body

    return add


def twice(x: Tensor) -> Tensor:
    return x * 2


def twice_plus_one(x: Tensor) -> Tensor:
    return x * 2 + 1


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
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask) * 2, mask)


def blocks(n: Any, block: int = 128) -> tuple[Any, ...]:
    return (triton.cdiv(n, block),)


def launch_double(x: Tensor, out: Tensor) -> None:
    double_kernel[blocks(x.numel())](x, out, x.numel(), BLOCK=128)


def launch_through_two_helpers(x: Tensor, out: Tensor) -> None:
    launch_double(x, out)


@pattern(twice)
def module_level(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    double_kernel[blocks(x.numel())](x, out, x.numel(), BLOCK=128)
    return out


def _closure() -> Callable[[Tensor], Tensor]:
    kernel = double_kernel

    def closure(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel[blocks(x.numel())](x, out, x.numel(), BLOCK=128)
        return out

    return closure


closure_body = pattern(twice)(_closure())


def make_double_kernel() -> Any:
    @triton.jit
    def made_kernel(x, out, n, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < n
        tl.store(out + offsets, tl.load(x + offsets, mask) * 2, mask)

    return made_kernel


made_outside = make_double_kernel()
cached_factory = functools.lru_cache(make_double_kernel)


@pattern(twice)
def factory_outside(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    made_outside[blocks(x.numel())](x, out, x.numel(), BLOCK=128)
    return out


@pattern(twice)
def factory_inside(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    make_double_kernel()[blocks(x.numel())](x, out, x.numel(), BLOCK=128)
    return out


@pattern(twice)
def lru_cache_factory(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    kernel = cached_factory()
    kernel[blocks(x.numel())](x, out, x.numel(), BLOCK=128)
    return out


@pattern(twice_plus_one, launches=2)
def several_kernels(x: Tensor) -> Tensor:
    middle = torch.empty_like(x)
    out = torch.empty_like(x)
    double_kernel[blocks(x.numel())](x, middle, x.numel(), BLOCK=128)
    increment_kernel[blocks(x.numel())](middle, out, x.numel())
    return out


@pattern(lambda x: x * 4, launches=2)
def bare_and_wrapped(x: Tensor) -> Tensor:
    middle = torch.empty_like(x)
    out = torch.empty_like(x)
    double_kernel[blocks(x.numel())](x, middle, x.numel(), BLOCK=128)
    wrap_triton(double_kernel)[blocks(x.numel())](middle, out, x.numel(), BLOCK=128)
    return out


@pattern(lambda x: x * 8, launches=3)
def wrapped_in_all_spellings(x: Tensor) -> Tensor:
    out = x.clone()
    wrap_triton(double_kernel)[blocks(x.numel())](out, out, x.numel(), BLOCK=128)
    torch.library.wrap_triton(double_kernel)[blocks(x.numel())](out, out, x.numel(), BLOCK=128)
    torch._library.capture_triton(double_kernel)[blocks(x.numel())](out, out, x.numel(), BLOCK=128)
    return out


# Up to torch 2.12 this raises for a kernel of the interpreter, and none of the other patterns could be imported.
wrapped_at_import: Any = wrap_triton(double_kernel) if isinstance(double_kernel, JITFunction) or WRAPS_ANY else None


@pattern(twice)
def wrapped_outside(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    wrapped_at_import[blocks(x.numel())](x, out, x.numel(), BLOCK=128)
    return out


@pattern(twice)
def helper(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    launch_double(x, out)
    return out


@pattern(twice)
def helper_of_helper(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    launch_through_two_helpers(x, out)
    return out


namespace = SimpleNamespace(kernel=double_kernel)
TABLE = {"double": double_kernel, "increment": increment_kernel}


@pattern(twice)
def attribute(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    namespace.kernel[blocks(x.numel())](x, out, x.numel(), BLOCK=128)
    return out


@pattern(twice)
def table(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    TABLE["double"][blocks(x.numel())](x, out, x.numel(), BLOCK=128)
    return out


class Doubler(torch.nn.Module):
    kernel_of_class = double_kernel

    def __init__(self) -> None:
        super().__init__()
        self.kernel = double_kernel

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self.kernel[blocks(x.numel())](x, out, x.numel(), BLOCK=128)
        return out

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return module_level(x)

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        cls.kernel_of_class[blocks(x.numel())](x, out, x.numel(), BLOCK=128)
        return out


doubler = Doubler()


@pattern(twice)
def module_attribute(x: Tensor) -> Tensor:
    return doubler.forward(x)


@pattern(twice)
def module_called(x: Tensor) -> Tensor:
    result: Tensor = doubler(x)
    return result


@pattern(twice)
def static_method(x: Tensor) -> Tensor:
    return Doubler.static(x)


@pattern(twice)
def class_method(x: Tensor) -> Tensor:
    return Doubler.of_class(x)


def launch_with(kernel: Any, x: Tensor, out: Tensor) -> None:
    kernel[blocks(x.numel())](x, out, x.numel(), BLOCK=128)


launch_partial = functools.partial(launch_with, double_kernel)


@pattern(twice)
def partial(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    launch_partial(x, out)
    return out


@pattern(twice)
def partial_of_launch(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    functools.partial(double_kernel[blocks(x.numel())], x, out)(x.numel(), BLOCK=128)
    return out


class ThinWrapper:
    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> Any:
            return self.fn[grid](*args, **kwargs)

        return launch


thin_wrapper = ThinWrapper(double_kernel)


@pattern(twice)
def thin_wrapper_object(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    thin_wrapper[blocks(x.numel())](x, out, x.numel(), BLOCK=128)
    return out


@pattern(twice)
def thin_wrapper_fn(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    thin_wrapper.fn[blocks(x.numel())](x, out, x.numel(), BLOCK=128)
    return out


@pattern(twice)
def import_inside(x: Tensor) -> Tensor:
    import tritonwrap_patterns as patterns

    out = torch.empty_like(x)
    patterns.double_kernel[blocks(x.numel())](x, out, x.numel(), BLOCK=128)
    return out


@pattern(twice)
def chosen_at_run_time(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    kernel = double_kernel if x.dim() == 1 else increment_kernel
    kernel[blocks(x.numel())](x, out, x.numel(), BLOCK=128)
    return out


@triton.jit
def double_then_kernel(x, out, n, BLOCK: tl.constexpr):
    double_kernel(x, out, n, BLOCK)


@pattern(lambda x: x * 4, launches=2)
def kernel_calls_launched_kernel(x: Tensor) -> Tensor:
    middle = torch.empty_like(x)
    out = torch.empty_like(x)
    double_then_kernel[blocks(x.numel())](x, middle, x.numel(), BLOCK=128)
    double_kernel[blocks(x.numel())](middle, out, x.numel(), BLOCK=128)
    return out


@pattern(twice)
def run_method(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    double_kernel.run(x, out, x.numel(), BLOCK=128, grid=blocks(x.numel()), warmup=False)
    return out


@pattern(twice)
def launch_options(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    double_kernel[blocks(x.numel())](x, out, x.numel(), BLOCK=128, num_warps=8, num_stages=1)
    return out


@triton.autotune(configs=[triton.Config({"BLOCK": 128}, num_warps=4)], key=["n"])
@triton.jit
def one_config_kernel(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask) * 2, mask)


@triton.autotune(
    configs=[triton.Config({"BLOCK": 128}, num_warps=4), triton.Config({"BLOCK": 256}, num_warps=8)], key=["n"]
)
@triton.jit
def two_configs_kernel(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask) * 2, mask)


def keep_small_blocks(configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
    return [config for config in configs if config.kwargs["BLOCK"] <= 256]


@triton.autotune(
    configs=[triton.Config({"BLOCK": block}) for block in (128, 256, 512)],
    key=["n"],
    prune_configs_by={"early_config_prune": keep_small_blocks},
)
@triton.jit
def pruned_kernel(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask) * 2, mask)


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


@triton.heuristics({"BLOCK": lambda args: 256 if args["n"] > 256 else 128})
@triton.jit
def heuristics_kernel(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask) * 2, mask)


@triton.heuristics({"SCALE": lambda args: 2})
@triton.autotune(configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"])
@triton.jit
def heuristics_above_autotune_kernel(x, out, n, BLOCK: tl.constexpr, SCALE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask) * SCALE, mask)


def by_block(x: Tensor) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    return lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)


def _with_tuned_grid(name: str, kernel: Any, *, interpretable: bool = True) -> None:
    def body(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel[by_block(x)](x, out, x.numel())
        return out

    body.__name__ = name
    pattern(twice, interpretable=interpretable)(body)


_with_tuned_grid("autotune_one_config", one_config_kernel)
_with_tuned_grid("autotune_two_configs", two_configs_kernel, interpretable=False)
_with_tuned_grid("autotune_pruned", pruned_kernel, interpretable=False)
_with_tuned_grid("autotune_above_heuristics", autotuned_heuristics_kernel, interpretable=False)
_with_tuned_grid("heuristics_alone", heuristics_kernel)
_with_tuned_grid("heuristics_above_autotune", heuristics_above_autotune_kernel, interpretable=False)
_with_tuned_grid("default_constexpr_in_grid", double_default_kernel)


@pattern(twice, interpretable=False)
def autotune_with_options(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    two_configs_kernel[by_block(x)](x, out, n=x.numel())
    return out


@pattern(twice, interpretable=False)
def grid_list(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    double_kernel[[triton.cdiv(x.numel(), 128)]](x, out, x.numel(), BLOCK=128)
    return out


@pattern(twice)
def grid_three_sizes(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    double_kernel[(triton.cdiv(x.numel(), 128), 1, 1)](x, out, x.numel(), BLOCK=128)
    return out


@pattern(twice)
def every_argument_named(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    double_kernel[blocks(x.numel())](BLOCK=128, n=x.numel(), out=out, x=x)
    return out


@pattern(twice)
def launcher_kept(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    launch = double_kernel[blocks(x.numel())]
    launch(x, out, x.numel(), BLOCK=128)
    return out


@pattern(lambda x: x * 8, launches=3)
def loop_over_kernels(x: Tensor) -> Tensor:
    out = x.clone()
    for kernel in (double_kernel, made_outside, double_default_kernel):
        kernel[blocks(x.numel())](out, out, x.numel(), BLOCK=128)
    return out


@pattern(lambda x: x * 2, launches=1)
def pytorch_around_the_launch(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    double_kernel[blocks(x.numel())](x.relu() - (-x).relu(), out, x.numel(), BLOCK=128)
    return out


@dataclass
class Holder:
    kernels: list[Any] = field(default_factory=lambda: [double_kernel])

    @property
    def first(self) -> Any:
        return self.kernels[0]

    def pick(self, index: int) -> Any:
        return self.kernels[index]


holder = Holder()


@pattern(twice)
def property_of_object(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    holder.first[blocks(x.numel())](x, out, x.numel(), BLOCK=128)
    return out


@pattern(twice)
def method_returns_kernel(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    holder.pick(0)[blocks(x.numel())](x, out, x.numel(), BLOCK=128)
    return out


class DoubleFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return module_level(x)


@pattern(twice)
def autograd_function(x: Tensor) -> Tensor:
    result: Tensor = DoubleFunction.apply(x)
    return result


fixed_launch = double_kernel[(3,)]
fixed_partial = functools.partial(double_kernel[(3,)], BLOCK=128)


@pattern(lambda x: x * 4, launches=2)
def launcher_made_at_import(x: Tensor) -> Tensor:
    middle = torch.empty_like(x)
    out = torch.empty_like(x)
    fixed_launch(x, middle, x.numel(), BLOCK=128)
    fixed_partial(middle, out, x.numel())
    return out


def make_scaling_kernel(activation: Any, factor: int) -> Any:
    factor = tl.constexpr(factor)

    @triton.jit
    def scaling_kernel(x, out, n, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < n
        tl.store(out + offsets, activation(tl.load(x + offsets, mask)) * factor, mask)

    return scaling_kernel


@pattern(lambda x: x * 6, interpretable=False)
def kernel_with_a_closure(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    make_scaling_kernel(double_value, 3)[blocks(x.numel())](x, out, x.numel(), BLOCK=128)
    return out


@triton.jit
def applied_kernel(x, out, n, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, ACTIVATION(tl.load(x + offsets, mask)), mask)


@pattern(twice)
def function_as_constexpr(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    applied_kernel[blocks(x.numel())](x, out, x.numel(), ACTIVATION=double_value, BLOCK=128)
    return out
