# SPDX-License-Identifier: Apache-2.0
"""Defects before lowering: which calls Dynamo refuses, what it captures, and what Inductor's patterns match.

Dynamo captures before the backend is called, so the repairs of that check that the captured frame is for a backend of
ours.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable
from typing import Any

import torch

from magi_backend._torch_compat.compiling import is_our_backend, replace

from ._defect import Defect, is_active, note_in_capture, report


_this_thread = threading.local()


def _trace(original: Callable[..., Any], tracer: Any, *args: Any, **kwargs: Any) -> Any:
    """Trace with FX, and remember that this thread does."""
    outer = getattr(_this_thread, "traces", False)
    _this_thread.traces = True
    try:
        return original(tracer, *args, **kwargs)
    finally:
        _this_thread.traces = outer


def _is_fx_symbolic_tracing(original: Callable[[], bool]) -> bool:
    """Whether this thread traces with FX.

    Up to torch 2.13, one flag in torch/fx/_symbolic_trace.py says so for all threads, and a call of a compiled function
    that meets it is refused (eval_frame.py). Two traces that end in the order in which they began leave it set. Torch
    2.14 has one for each thread, as here.
    """
    return getattr(_this_thread, "traces", False) and original()


REFUSE_TRACING_THREADS_ONLY = Defect(
    name="refuse_tracing_threads_only",
    effect="a call of a compiled function fails while another thread compiles: 'Detected that you are using FX to "
    "symbolically trace a dynamo-optimized function'",
    severity="failed calls",
    fixed=(2, 14, 1),
    repair="only the thread that traces is refused",
    replaces={
        "torch.fx._symbolic_trace:Tracer.trace": _trace,
        "torch.fx._symbolic_trace:is_fx_symbolic_tracing": _is_fx_symbolic_tracing,
    },
    is_in_capture=True,
)


def _make_comparison(original: Callable[..., Any], fn: Any, arg_types: list[type], has_kwargs: bool) -> Any:
    """The handler of an operator, which returns False for ``tensor == "text"``, None, a list or a similar constant.

    `Tensor.__eq__` returns NotImplemented for anything that is not a number or a tensor, and Python then returns False.
    Dynamo puts the call of `__eq__` into the graph, sees that it does not return a tensor, and breaks the graph. The
    decoder of WAN compares the entries of its cache with a string, which makes 28 graphs instead of 3.
    """
    from torch._dynamo.variables import ConstantVariable, ConstDictVariable, ListVariable, TensorVariable, TupleVariable

    never_equal = (ConstantVariable, TupleVariable, ListVariable, ConstDictVariable)
    handler = original(fn, arg_types, has_kwargs)
    if fn is not operator.eq or arg_types[:1] != [TensorVariable] or arg_types[1] not in never_equal:
        return handler

    def compare(tx: Any, args: Any, kwargs: Any) -> Any:
        tensor, other = args
        is_number = isinstance(other, ConstantVariable) and isinstance(other.value, (bool, int, float, complex))
        is_plain = tensor.class_type in (torch.Tensor, torch.nn.Parameter)
        if is_number or not is_plain or not is_our_backend(tx.output.compiler_fn):
            return handler(tx, args, kwargs)
        note_in_capture(tx.output, "compare_with_constants")
        return ConstantVariable.create(value=False)

    return compare


def _forget_comparisons() -> None:
    """Dynamo looks up the handler of an operator once for the kinds of its operands, and keeps the result."""
    from torch._dynamo.variables import BuiltinVariable

    known = BuiltinVariable.call_function_handler_cache
    for key in [key for key in known if key[0] is operator.eq]:
        del known[key]


COMPARE_WITH_CONSTANTS = Defect(
    name="compare_with_constants",
    effect="the comparison of a tensor with a string or another constant breaks the graph",
    severity="more graphs",
    fixed=(2, 13, 0),
    repair="a tensor never equals such a constant",
    replaces={"torch._dynamo.variables:BuiltinVariable._make_handler": _make_comparison},
    when_replaced=_forget_comparisons,
    is_in_capture=True,
)


def _wrap_symfloat(original: Callable[..., Any], builder: Any, value: float) -> Any:
    """A float attribute of a module as a constant of the graph until it changes, with ``dynamic=True`` too.

    With ``dynamic=True``, Dynamo makes a symbol for each float. The epsilon of each norm and the scale of each
    attention become tensors of one element on the CPU, which are made and read in each call. Fewer kernels fuse,
    because a scale that is a tensor cannot be part of the kernel that reads it. A Llama of 8 layers makes 45 such
    tensors in each call, which take 0.1 of 3.3 ms of CPU time at 256 tokens (one H200, torch 2.11). With
    ``dynamic=None``, a float is a constant with a guard; the first call with another value compiles once more, and the
    float is a symbol from then on. The repair does the same for attributes of modules. Arguments of the function are
    symbols from the start, as ``dynamic=True`` requires.
    """
    from torch._dynamo import config

    output = builder.tx.output
    is_of_module = builder.source.guard_source.is_unspecialized_nn_module()
    if config.assume_static_by_default or not is_of_module or not is_our_backend(output.compiler_fn):
        return original(builder, value)
    with config.patch(assume_static_by_default=True):
        found = original(builder, value)
    if found.is_python_constant():
        note_in_capture(output, "keep_floats_of_modules")
    return found


def _call_with_symbolic_steps(original: Callable[..., Any], function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """``torch.linspace`` of a symbolic number of steps as arithmetic on ``torch.arange``.

    The schema of ``aten::linspace`` says ``int steps``, not ``SymInt``, so the number is made constant. The reference
    points of Deformable DETR and its kin are such numbers, one for each row and column of an image.
    """
    if function.value is not torch.linspace or not is_our_backend(tx.output.compiler_fn):
        return original(function, tx, args, kwargs)
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.tensor import SymNodeVariable

    given = dict(zip(("start", "end", "steps"), args, strict=False)) | kwargs
    is_plain = given.keys() <= {"start", "end", "steps", "dtype", "device"} and len(args) <= 3
    is_floating = is_plain and all(_makes_floats(value) for name, value in given.items() if name != "device")
    if not is_floating or not isinstance(given.get("steps"), SymNodeVariable):
        return original(function, tx, args, kwargs)
    note_in_capture(tx.output, "space_symbolic_steps")
    return tx.inline_user_function_return(VariableTracker.build(tx, evenly_spaced), args, kwargs)


def _makes_floats(argument: Any) -> bool:
    """Whether *argument* of ``torch.linspace`` asks for neither complex nor whole numbers."""
    value = argument.as_python_constant() if argument.is_python_constant() else None
    if isinstance(value, torch.dtype):
        return value.is_floating_point
    return not isinstance(value, complex) and not getattr(getattr(argument, "dtype", None), "is_complex", False)


def evenly_spaced(
    start: Any, end: Any, steps: int, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """``torch.linspace(start, end, steps)``, with the operations of ``linspace`` in torch/_refs/__init__.py."""
    wanted = torch.get_default_dtype() if dtype is None else dtype
    if steps < 2:
        return torch.zeros(steps, dtype=wanted, device=device).add(start)
    wide = torch.float64 if wanted == torch.float64 else torch.float32
    places = torch.arange(steps, dtype=wide, device=device)
    step = (end - start) / (steps - 1)
    numbers = torch.where(places < steps // 2, start + places * step, end - (steps - 1 - places) * step)
    return numbers.to(wanted)


SPACE_SYMBOLIC_STEPS = Defect(
    name="space_symbolic_steps",
    effect="a model that calls torch.linspace with a size, as Deformable DETR does, is compiled for each size",
    severity="more graphs",
    repair="torch.linspace is computed from torch.arange, which takes any size",
    replaces={"torch._dynamo.variables.torch:TorchInGraphFunctionVariable.call_function": _call_with_symbolic_steps},
    is_in_capture=True,
)


KEEP_FLOATS_OF_MODULES = Defect(
    name="keep_floats_of_modules",
    effect="each float attribute of a module is a tensor that every call makes and reads, and kernels fuse less",
    severity="slower code",
    repair="float attributes of modules are constants until they change",
    replaces={"torch._dynamo.variables.builder:VariableBuilder.wrap_symfloat": _wrap_symfloat},
    is_in_capture=True,
)


def _apply_patterns(original: Callable[..., int], patterns: Any, *args: Any, **kwargs: Any) -> int:
    """Apply *patterns*, of which one that lacks one of its own inputs matches nothing.

    Inductor searches for ``x[torch.randperm(n)[:k]]``. It traces the pattern with a *k* above *n*, for which the slice
    is not a call. So the pattern matches ``x[torch.randperm(n)]`` without a *k*, and the check of every match raises an
    error. By default, Inductor replaces the random number operators before the search; under ``fallback_random``, which
    `explain` and ``magi.check`` use, it does not.
    """
    in_scope = functools.partial(is_active, "match_whole_permutations")
    for key, entries in list(patterns.patterns.items()):
        if torch.ops.aten.index.Tensor in key:
            for entry in entries:
                replace(entry, "extra_check", in_scope, _no_where_it_lacks_inputs)
    return original(patterns, *args, **kwargs)


def _no_where_it_lacks_inputs(original: Callable[[Any], Any], match: Any) -> Any:
    try:
        return original(match)
    except RuntimeError as error:
        if "Not all inputs to pattern found" not in str(error):
            raise
        report("match_whole_permutations")
        return False


MATCH_WHOLE_PERMUTATIONS = Defect(
    name="match_whole_permutations",
    effect="a tensor that is indexed by a whole torch.randperm does not compile under fallback_random: "
    "'Not all inputs to pattern found'",
    severity="no code",
    fixed=(2, 14, 1),
    repair="the pattern, which lacks one of its inputs, matches nothing",
    replaces={"torch._inductor.pattern_matcher:PatternMatcherPass.apply": _apply_patterns},
    is_of_joint_graphs=True,
)


_OF_EAGER = "eager_input_vals"


def _replace_by_example(
    original: Callable[..., Any], match: Any, replacement: Any, args: Any, trace: Any = None, **kwargs: Any
) -> Any:
    """Replace a mutating operator by its dense form, also if the sizes are not written alike before and after.

    What the operator replaces is traced twice, with the tensors that eager has and with those of the graph. torch
    asserts that both graphs have the same number of nodes, to take the descriptions of eager's tensors from one to the
    other. With symbolic sizes, a size that is one node in one of them may be two in the other.
    """

    def trace_both(function: Any, values: Any) -> Any:
        traced = trace(function, values)
        if isinstance(function, torch.fx.GraphModule) and len(function.graph.nodes) != len(traced.graph.nodes):
            report("count_operators_only")
            told = [node for node in function.graph.nodes if _OF_EAGER in node.meta]
            targets = {node.target for node in told}
            for node, taking in zip(told, (n for n in traced.graph.nodes if n.target in targets), strict=True):
                taking.meta[_OF_EAGER] = node.meta[_OF_EAGER]
            function.graph = traced.graph
        return traced

    if trace is None:
        trace = functools.partial(torch._inductor.pattern_matcher.fwd_only, **kwargs)
    return original(match, replacement, args, trace_both)


COUNT_OPERATORS_ONLY = Defect(
    name="count_operators_only",
    effect="an operator that mutates two tensors of the same symbolic sizes does not compile: AssertionError in "
    "replace_by_example",
    severity="no code",
    repair="the tensors of eager are found by the operator that takes them",
    replaces={"torch._inductor.pattern_matcher:Match.replace_by_example": _replace_by_example},
)
