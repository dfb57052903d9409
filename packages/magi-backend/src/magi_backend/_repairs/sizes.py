# SPDX-License-Identifier: Apache-2.0
"""Defects in expressions of symbolic sizes and strides."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental import symbolic_shapes
from torch.fx.node import map_arg
from torch.utils._sympy.functions import FloatTrueDiv, IntTrueDiv, Mod, ToFloat
from torch.utils._sympy.value_ranges import ValueRanges

from magi_backend._torch_compat.compiling import is_our_backend

from ._defect import Defect, report


def _bounded_truediv(original: Callable[..., Any], a: Any, b: Any) -> Any:
    """A quotient of two sizes without an upper bound has no known range, rather than none.

    ``SymPyValueRangeAnalysis.truediv`` divides the ends of the ranges unless both are infinite, but it checks for the
    infinity of floats, and sizes have a different one. It divides ``int_oo`` by ``int_oo``, and cannot compare the
    resulting nan: ``torch.div(x.shape[0], y.shape[0], rounding_mode="trunc")`` does not compile. For infinite floats,
    torch returns the unknown range.
    """
    from torch.utils._sympy.numbers import int_oo

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
    repair="a quotient of sizes is computed in float64, as Python does",
    replaces={"torch._inductor.codegen.triton:TritonPrinter._print_IntTrueDiv": _exact_division},
)


def _number_for_quotient(original: Callable[..., None], gm: GraphModule, *args: Any) -> None:
    """Numbers in the place of quotients of two multiples of a size, before torch makes tensors of Python's scalars.

    ``_upsample_nearest`` (torch/_decomp/decompositions.py) divides a size by a multiple of it, and each thread of a
    kernel does so in float64 for each dimension. For the last upsampling of a WAN 2.2 decoder Triton makes 539
    instructions of a thread, 410 with the numbers and 354 with constant sizes (torch 2.11, sm_90).
    """
    numbers = dict[Node, float]()
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymFloat) and (number := value_of_quotient(value.node.expr)) is not None:
            numbers[node] = number
    for user in dict.fromkeys(user for node in numbers for user in node.users):
        if user.op != "output":
            user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda it: numbers.get(it, it))
    if numbers:
        report("number_for_quotient")
    original(gm, *args)


def value_of_quotient(quotient: Any) -> float | None:
    """What ``a*n / (b*n)`` is in float64 for each size n below 2**32, where a and b have few binary digits.

    None for any other quotient, and where n may be 0. Example: ``1.5*n`` is exact, so that ``n / (1.5*n)`` is the
    float64 nearest to 2/3; ``0.1*n`` is rounded, and what is divided by it depends on n.
    """
    if not isinstance(quotient, (FloatTrueDiv, IntTrueDiv)):
        return None
    (a, size), (b, other) = (part.as_coeff_Mul() for part in quotient.args)
    count = size.args[0] if isinstance(size, ToFloat) else size
    is_exact = all(abs(number) < 2**10 and (number * 2**10) % 1 == 0 for number in (a, b))
    return float(a) / float(b) if size == other and count.is_positive and is_exact else None


NUMBER_FOR_QUOTIENT = Defect(
    name="number_for_quotient",
    effect="each thread of a nearest upsampling by a factor divides sizes in float64",
    severity="slower code",
    repair="the quotient of two multiples of a size is a number",
    replaces={"torch._functorch._aot_autograd.graph_compile:tensorify_python_scalars": _number_for_quotient},
    is_of_joint_graphs=True,
)


def _no_tensor_of_remainder(original: Callable[..., Any], analysis: Any, *args: Any, **kwargs: Any) -> Any:
    """What torch makes of a number that tensor code cannot compute, where its table has no entry for the operator.

    `TensorReferenceAnalysis` (torch/utils/_sympy/reference.py) lacks Python's remainder, for example. The pass expects
    a NotImplementedError, and then leaves the number as it is.
    """
    try:
        return original(analysis, *args, **kwargs)
    except AttributeError as error:
        if error.obj is not analysis:
            raise
        report("no_tensor_of_remainder")
        raise NotImplementedError(str(error)) from error


NO_TENSOR_OF_REMAINDER = Defect(
    name="no_tensor_of_remainder",
    effect="a tensor times a number that a remainder such as (8 - n) % 8 of a size is part of does not compile",
    severity="no code",
    repair="such a number is passed to kernels as it is",
    replaces={"torch.fx.passes._tensorify_python_scalars:_run_sympy_handler": _no_tensor_of_remainder},
    is_of_joint_graphs=True,
)


@functools.lru_cache(4096)
def cancelled(question: Any) -> Any:
    """*question*, with the reciprocals in its remainders cancelled."""

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


def _multiple_of_sum(original: Callable[..., bool], sizevars: Any, number: Any, divisor: Any) -> bool:
    """Whether *number* is a multiple of *divisor*, also where the two are sums that no common factor is taken out of.

    ``simd.py:_split_iteration_ranges`` asks it of sizes whose equality Inductor has proved, so they are written in two
    ways: ``s*(128*n + 128)`` and ``s*n + s``. Up to torch 2.11 it asked with the ``%`` of sympy, which finds the common
    divisor. ``Mod`` of torch finds products alone.
    """
    if original(sizevars, number, divisor):
        return True
    if isinstance(divisor, (int, sympy.Integer)) or not is_multiple(number, divisor):
        return False
    report("multiples_of_sums")
    return True


@functools.lru_cache(4096)
def is_multiple(number: sympy.Expr, divisor: sympy.Expr) -> bool:
    """Whether *number* over *divisor* is a polynomial of the sizes with whole coefficients."""
    if len(number.free_symbols) > 20:  # torch does not ask sympy then either
        return False
    return bool(sympy.cancel(number / divisor).as_numer_denom()[1] == 1)


MULTIPLES_OF_SUMS = Defect(
    name="multiples_of_sums",
    effect="SegFormer for images of three dynamic sizes does not compile: 'CantSplit: … not divisible by …'",
    severity="no code",
    since=(2, 12, 0),
    repair="a sum of sizes is divided by another as polynomials are",
    replaces={"torch._inductor.sizevars:SizeVarAllocator.statically_known_multiple_of": _multiple_of_sum},
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
    symbols = {str(symbol): symbol for symbol in environment.var_to_range}
    for index, strides in enumerate(compiled_graph.output_strides):
        # `deserialize_symexpr` asks for the value of every symbol, and the length of a jagged tensor has no number.
        sizes = {
            name: environment.create_symintnode(symbols[name], hint=int(environment.evaluate_symexpr(name)))
            for name in symbols.keys() & re.findall(r"\w+", " ".join(strides or ()))
        }
        if sizes:
            # By way of its module: `eval` writes into it, and what code of ours names is part of the cache keys.
            names = symbolic_shapes.SYMPY_INTERP
            context.output_strides[index] = tuple(eval(stride, names, sizes) for stride in strides)  # noqa: S307
            report("keep_saved_strides_symbolic")


KEEP_SAVED_STRIDES_SYMBOLIC = Defect(
    name="keep_saved_strides_symbolic",
    effect="a training step with dynamic sizes is compiled again for each size, or fails at the third: "
    "'expected size 2==2, stride 90==126'",
    severity="no code",
    fixed=(2, 15, 0),
    repair="strides of saved tensors are expressions of the sizes",
    replaces={"torch._inductor.output_code:set_tracing_context_output_strides": _set_symbolic_strides},
)


def _of_image(image: torch.Tensor, sizes: Sequence[int], *_: Any) -> tuple[int, ...]:
    return *image.shape[-2:], *sizes


def _of_gradient(_gradient: torch.Tensor, image: torch.Tensor, _weight: torch.Tensor, *others: Any) -> tuple[int, ...]:
    """Those of the image, if its gradient is wanted and Inductor has not chosen channels-last."""
    from torch._inductor.virtualized import V

    is_wanted, *_ = others[-1]
    return tuple(image.shape) if is_wanted and not (V.graph.layout_opt and image.dim() == 4) else ()


def _makes_constant(node: Node, made_constant: dict[Any, Callable[..., tuple[int, ...]]], name: str) -> bool:
    """Whether the lowering of *node* would make a symbolic size constant; the repair *name* is reported if so.

    *made_constant* returns the sizes that the lowering of an operator makes constant, given its operands.
    """
    if (sizes_of := made_constant.get(node.target)) is None:
        return False
    sizes = sizes_of(*map_arg(node.args, lambda operand: operand.meta["val"]))
    if not any(isinstance(size, torch.SymInt) for size in sizes):
        return False
    report(name)
    return True


# The lowerings write one term for each pixel of a window, and ask for height and width with ``guard_int``
# (torch/_inductor/lowering.py), even where they then call the kernel because there are more than 25. Where the output
# size is symbolic too, they compare a symbolic number with 25, which ends with a TypeError.
_POOLS: dict[Any, Callable[..., tuple[int, ...]]] = {
    torch.ops.aten._adaptive_avg_pool2d.default: _of_image,
    torch.ops.aten.adaptive_max_pool2d.default: _of_image,
    torch.ops.aten.upsample_nearest2d_backward.default: _of_image,
    torch.ops.aten.glu.default: lambda x, dim=-1: (x.shape[dim],),
}


def _pools_as_kernels(original: Callable[..., bool], node: Node, *args: Any, **kwargs: Any) -> bool:
    return original(node, *args, **kwargs) or _makes_constant(node, _POOLS, "pool_symbolic_images")


POOL_SYMBOLIC_IMAGES = Defect(
    name="pool_symbolic_images",
    effect="a model with an adaptive pool, a nearest upsampling that is trained, or glu along a symbolic dimension is "
    "compiled for each size of an image, until torch's limit; with a symbolic output size, as for 'area', it is not "
    "compiled at all: 'cannot determine truth value of Relational'",
    severity="no code",
    repair="the operator is called as a kernel, which takes any size",
    replaces={"torch._inductor.graph:fallback_node_due_to_unsupported_type": _pools_as_kernels},
)

# ``convolution_backward_lowering`` (torch/_inductor/kernel/conv.py), which is new in 2.13, finds the order of strides
# with ``guard_int_seq``, which makes them constant.
_GRADIENTS = {torch.ops.aten.convolution_backward.default: _of_gradient}


def _gradients_as_kernels(original: Callable[..., bool], node: Node, *args: Any, **kwargs: Any) -> bool:
    return original(node, *args, **kwargs) or _makes_constant(node, _GRADIENTS, "train_symbolic_convolutions")


TRAIN_SYMBOLIC_CONVOLUTIONS = Defect(
    name="train_symbolic_convolutions",
    effect="a convolutional model that is trained is compiled for each size of an image, until torch's limit",
    severity="more graphs",
    since=(2, 13, 0),
    repair="the gradient of an image is computed by ATen's kernel, which takes any size, as up to 2.12",
    replaces={"torch._inductor.graph:fallback_node_due_to_unsupported_type": _gradients_as_kernels},
)


def _ask_once(original: Callable[..., None], builder: Any, code_parts: list[str], *args: Any, **kwargs: Any) -> None:
    """Guards on sizes of which the first that computes a number names it for the others.

    Each call checks them first. Dynamo writes them as Python expressions, and its ``PyExprCSEPass`` keeps what several
    of them look up or call, not what they compute. For each convolution, torch asks whether 32 bits suffice for the
    place of the last element, so the sizes of a net's layers are computed many times: the 133 guards of a MobileNetV3
    take 106 µs, and 15 so.
    """
    if is_our_backend(getattr(builder.check_fn_manager.output_graph, "compiler_fn", None)):
        code_parts = computed_once(code_parts)
    original(builder, code_parts, *args, **kwargs)


_OPERANDS: dict[type[ast.AST], tuple[str, ...]] = {ast.BinOp: ("left", "right"), ast.UnaryOp: ("operand",)}


def computed_once(guards: Sequence[str]) -> list[str]:
    """*guards*, expressions that are checked in this order, which compute a number that several compute only once.

    Example:
        >>> computed_once(["4 * (n // 8) < m", "n // 8 > 1"])
        ['4 * (_size0 := (n // 8)) < m', '_size0 > 1']
    """
    numbers, number_of, times, names = dict[Any, int](), dict[ast.AST, int](), Counter[int](), dict[int, str]()

    def count(node: ast.AST) -> int:
        operands = [count(getattr(node, name)) for name in _OPERANDS.get(type(node), ())]
        what = (type(node.op), *operands) if operands else ast.unparse(node)  # type: ignore[attr-defined]
        number_of[node] = number = numbers.setdefault(what, len(numbers))
        times[number] += 1
        return number

    def named(node: Any) -> Any:
        number = number_of[node]
        if number in names:
            return ast.Name(names[number])
        for name in _OPERANDS.get(type(node), ()):
            setattr(node, name, named(getattr(node, name)))
        if not isinstance(node, ast.BinOp) or times[number] == 1:
            return node
        names[number] = f"_size{len(names)}"
        return ast.NamedExpr(ast.Name(names[number]), node)

    try:
        trees = [ast.parse(guard, mode="eval") for guard in guards]
        # What stands behind ``and``, ``or`` or ``if`` may never be computed.
        compared = [t.body for t in trees if isinstance(t.body, ast.Compare) and len(t.body.comparators) == 1]
        for guard in compared:
            for side in (guard.left, guard.comparators[0]):
                count(side)
    except RecursionError:  # a sum of a thousand terms, which torch leaves as it is too
        return list(guards)
    for guard in compared:
        guard.left, guard.comparators = named(guard.left), [named(guard.comparators[0])]
    return [ast.unparse(tree) for tree in trees]


ASK_SIZES_ONCE = Defect(
    name="ask_sizes_once",
    effect="each call of a net with dynamic sizes computes the sizes of its layers for many guards",
    severity="slower code",
    repair="guards share what they compute of the sizes",
    replaces={"torch._dynamo.guards:GuardBuilder.add_python_lambda_leaf_guard_to_root": _ask_once},
    is_in_capture=True,
)
