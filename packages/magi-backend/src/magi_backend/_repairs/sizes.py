# SPDX-License-Identifier: Apache-2.0
"""Defects in expressions of symbolic sizes and strides."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from ._defect import Defect, report


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def _bounded_truediv(original: Callable[..., Any], a: Any, b: Any) -> Any:
    """A quotient of two sizes without an upper bound has no known range, rather than none.

    ``SymPyValueRangeAnalysis.truediv`` divides the ends of the ranges unless both are infinite, but it checks for the
    infinity of floats, and sizes have a different one. It divides ``int_oo`` by ``int_oo``, and cannot compare the
    resulting nan: ``torch.div(x.shape[0], y.shape[0], rounding_mode="trunc")`` does not compile. For infinite floats,
    torch returns the unknown range.
    """
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    ranges = [ValueRanges.wrap(value) for value in (a, b)]
    unbounded = (values.lower == -int_oo or values.upper == int_oo for values in ranges)
    if not all(unbounded) or 0 in ranges[1]:  # torch does not divide by a range with 0 in it
        return original(a, b)
    report("bound_infinite_quotients")
    return ValueRanges.unknown()


BOUND_INFINITE_QUOTIENTS = Defect(
    name="bound_infinite_quotients",
    effect="a division of two dynamic sizes as tensors, as in Longformer, does not compile: "
    "'TypeError: Invalid NaN comparison'",
    severity="no code",
    since=(2, 10, 0),
    fixed=None,
    repair="the range of a quotient of two unbounded sizes is taken as unknown",
    replaces={"torch.utils._sympy.value_ranges:SymPyValueRangeAnalysis.truediv": _bounded_truediv},
)


def _exact_division(original: Callable[..., str], printer: Any, expr: Any) -> str:
    """The code of a quotient of two sizes in the widest float of the device; for float32, a function divides exactly.

    ``TritonPrinter`` writes ``s0 / s1``. Triton divides integers in float32, and its ``/`` of float32 is PTX's
    ``div.full``, which may be two units in the last place too small. So ``45 / 45`` may be less than 1, and a nearest
    upsampling, which rounds ``i * (s0 / s1)`` down, reads the pixel before the right one everywhere. Python divides in
    float64, and Triton's ``/`` of float64 is rounded as IEEE 754 requires.
    """
    del original
    report("divide_sizes_exactly")
    float_type = getattr(printer, "_get_scalar_float_type", lambda: "tl.float64")()
    left, right = (f"tl.cast({printer.doprint(size)}, {float_type})" for size in expr.args)
    return f"({left} / {right})" if float_type == "tl.float64" else f"tl.div_rn({left}, {right})"


DIVIDE_SIZES_EXACTLY = Defect(
    name="divide_sizes_exactly",
    effect="on a GPU, nearest upsampling to a size given by another tensor is shifted by a pixel at some sizes",
    severity="wrong code",
    since=(2, 10, 0),
    fixed=None,
    repair="a quotient of sizes is computed in float64, as Python does",
    replaces={"torch._inductor.codegen.triton:TritonPrinter._print_IntTrueDiv": _exact_division},
)


@functools.lru_cache(4096)
def cancelled(question: Any) -> Any:
    """*question*, with the reciprocals in its remainders cancelled."""
    import sympy
    from torch.utils._sympy.functions import Mod

    def has_reciprocal(remainder: Any) -> bool:
        return any(power.exp.is_negative for power in remainder.atoms(sympy.Pow))

    remainders = [found for found in question.atoms(sympy.Mod) if has_reciprocal(found)]
    return question.xreplace({found: Mod(*map(sympy.cancel, found.args)) for found in remainders})


def _without_reciprocals(original: Callable[..., bool], sizevars: Any, left: Any, *args: Any, **kwargs: Any) -> bool:
    """The answer of the shape environment to a question without reciprocals.

    ``Layout._stride_expr_ge_or_false`` asks whether ``left % right`` is 0. The ``%`` is that of sympy, which takes out
    the greatest common divisor and does not cancel quotients, so images of n+1 by n+1 pixels give
    ``Mod(1, (n**2 + 2*n + 1)/(n + 1))``. A reciprocal is not an integer: its range is empty, which raises an error, and
    a guard with one in it cannot be printed. The quotients are polynomials, so they can be cancelled, and ``Mod`` of
    torch leaves the result unchanged.
    """
    asked = cancelled(left)
    if asked is not left and asked != left:
        report("divide_strides_exactly")
    return original(sizevars, asked, *args, **kwargs)


DIVIDE_STRIDES_EXACTLY = Defect(
    name="divide_strides_exactly",
    effect="convolutions behind tokens of a square image of dynamic size do not compile: "
    "'ValueRangeError: Invalid ranges [0:-1]'",
    severity="no code",
    since=(2, 13, 0),
    fixed=(2, 14, 1),
    repair="strides that divide each other are divided before their remainder is asked for",
    replaces={"torch._inductor.sizevars:SizeVarAllocator.evaluate_expr": _without_reciprocals},
)


def _stride_order(original: Callable[..., Sequence[int]], seq: Sequence[Any], shape_env: Any = None) -> Sequence[int]:
    """The order of *seq*, by the shape environment if Python's sort cannot compare two strides.

    ``GraphLowering.run_node`` calls ``ir.get_stride_order(strides)`` without one. Python's sort then asks symbolic
    comparisons for a truth value. Those that hold for all sizes have one; any other raises an error.
    """
    from torch._inductor.virtualized import V

    if shape_env is not None:
        return original(seq, shape_env)
    try:
        return original(seq)
    except TypeError:  # sympy: "cannot determine truth value of Relational"
        if "shape_env" not in inspect.signature(original).parameters:
            raise
        order = original(seq, V.graph.sizevars.shape_env)
        report("order_symbolic_strides")
        return order


ORDER_SYMBOLIC_STRIDES = Defect(
    name="order_symbolic_strides",
    effect="attention in a training graph with dynamic sizes does not compile: "
    "'cannot determine truth value of Relational'",
    severity="no code",
    since=(2, 10, 0),
    fixed=(2, 14, 1),
    repair="symbolic strides are compared by what is known of the sizes",
    replaces={"torch._inductor.ir:get_stride_order": _stride_order},
)


def _set_symbolic_strides(original: Callable[[Any, Any], None], example_inputs: Any, compiled_graph: Any) -> None:
    """Give AOTAutograd the strides of tensors that are saved for the backward as expressions instead of numbers.

    Inductor tells AOTAutograd which strides the outputs of the forward have, and evaluates them for the sizes of the
    first call. Where these are not known to equal those of the trace, and symbolic ones never are, the backward is
    compiled for tensors with these numbers as strides. So it is compiled again for each size, or asserts the strides of
    another size: "expected size 2==2, stride 90==126".
    """
    from torch._inductor.utils import shape_env_from_inputs

    original(example_inputs, compiled_graph)
    context: Any = torch._guards.TracingContext.try_get()
    environment: Any = shape_env_from_inputs(example_inputs)
    if environment is None or context is None or not context.output_strides:
        return
    metadata: Any = context.fw_metadata
    if metadata is None or metadata.num_symints_saved_for_bw is None:
        return  # an inference, which saves nothing
    for index, strides in enumerate(compiled_graph.output_strides):
        expressions = tuple(map(environment.deserialize_symexpr, strides or ()))
        if any(isinstance(stride, torch.SymInt) for stride in expressions):
            context.output_strides[index] = expressions
            report("keep_saved_strides_symbolic")


KEEP_SAVED_STRIDES_SYMBOLIC = Defect(
    name="keep_saved_strides_symbolic",
    effect="a training step with dynamic sizes is compiled again for each size, or fails at the third: "
    "'expected size 2==2, stride 90==126'",
    severity="no code",
    since=(2, 10, 0),
    fixed=(2, 15, 0),
    repair="strides of saved tensors are expressions of the sizes",
    replaces={"torch._inductor.output_code:set_tracing_context_output_strides": _set_symbolic_strides},
)
