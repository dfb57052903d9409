# SPDX-License-Identifier: Apache-2.0
"""Defects in what a user's Triton kernel gets: its source, its constants, its arguments, its scratch memory.

Inductor writes the kernel, the functions that it calls, the constants that it names, its constant arguments and the
configurations of its autotuner into a module of its own, a text between three single quotes
(``define_user_defined_triton_kernel`` in torch/_inductor/codegen/wrapper.py).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import sympy
from torch.utils._sympy.functions import Identity

from magi_backend._torch_compat.compiling import assigned

from ._defect import Defect, report


_WRAPPER = "torch._inductor.codegen.wrapper:"


def _parameters_of(kernel: Any) -> Sequence[Any]:
    """The parameters of *kernel*, read from the function below its autotuner and heuristics."""
    while not hasattr(kernel, "params"):
        kernel = kernel.fn
    return kernel.params  # type: ignore[no-any-return]


def _is_of_the_user(body: str) -> bool:
    """Whether *body*, the call that defines a kernel in the generated module, defines a kernel of the user."""
    return "\n@triton_heuristics.user_autotune(\n" in body


def _define_infinite(
    original: Callable[..., Any], wrapper: Any, kernel_name: str, kernel_body: str, *args: Any, **kwargs: Any
) -> Any:
    """Import the names ``inf`` and ``nan`` if the module of a kernel reads them.

    Constants are written with `repr`: ``-inf`` for ``float("-inf")``, a name that the module does not import. Attention
    masks, for example, use this constant.
    """
    # `escape_kernel_constants`, whose name sorts later, is called first, so the text between the quotes can be parsed.
    if _is_of_the_user(kernel_body) and names_a_float(_module(kernel_body)):
        report("define_infinite_constants")
        kernel_body = kernel_body.replace("\nimport triton\n", "\nfrom math import inf, nan\nimport triton\n", 1)
    return original(wrapper, kernel_name, kernel_body, *args, **kwargs)


def _module(body: str) -> str:
    """The source of the module of a kernel, read from *body*, the call that defines the kernel."""
    match ast.parse(body.strip(), mode="eval").body:
        case ast.Call(args=[_, ast.Constant(value=str(source))]):
            return source
    raise AssertionError(f"Inductor defines a kernel in another way: {body[:80]}")


def names_a_float(module: str) -> bool:
    """Whether the source of a kernel's *module* reads ``inf`` or ``nan`` outside of the bodies of its functions."""
    if "inf" not in module and "nan" not in module:
        return False
    outside = list[ast.AST]()
    for statement in ast.parse(module).body:
        outside += statement.decorator_list if isinstance(statement, ast.FunctionDef) else [statement]
    read = (node for part in outside for node in ast.walk(part))
    return any(isinstance(node, ast.Name) and node.id in ("inf", "nan") for node in read)


DEFINE_INFINITE_CONSTANTS = Defect(
    name="define_infinite_constants",
    effect="a Triton kernel of the user with an infinite constant does not compile: 'name 'inf' is not defined'",
    severity="no code",
    repair="the module of a user's Triton kernel imports the names of infinite constants",
    replaces={f"{_WRAPPER}PythonWrapperCodegen.define_kernel": _define_infinite},
)


def _define_escaped(
    original: Callable[..., Any], wrapper: Any, kernel_name: str, kernel_body: str, *args: Any, **kwargs: Any
) -> Any:
    r"""Escape the text above the source of a user's kernel, so that a string among its constants keeps its value.

    Such strings are written with `repr` and not escaped again: a ``tl.constexpr`` argument ``"a\nb"`` becomes invalid,
    ``r"\t"`` becomes a tab, and ``"'''"`` ends the kernel.
    """
    body = with_escaped_constants(kernel_body)
    if body != kernel_body:
        report("escape_kernel_constants")
    return original(wrapper, kernel_name, body, *args, **kwargs)


def with_escaped_constants(body: str) -> str:
    """*body*, the call that defines a kernel, with the text above the source of the kernel escaped once."""
    if not _is_of_the_user(body):
        return body
    opening, quotes, text = body.partition("'''")
    above, source, kernel = text.partition("\n@triton.jit\n")
    escaped = above.replace("\\", "\\\\").replace("'''", "\\'" * 3)
    return "".join((opening, quotes, escaped, source, kernel))


ESCAPE_KERNEL_CONSTANTS = Defect(
    name="escape_kernel_constants",
    effect="a Triton kernel of the user that takes a text with a backslash, the end of a line or three quotes as a "
    "constant gets another text, or does not compile: 'SyntaxError: unterminated string literal'",
    severity="wrong code",
    repair="texts among the constant arguments of the user's Triton kernels are escaped",
    replaces={f"{_WRAPPER}PythonWrapperCodegen.define_kernel": _define_escaped},
)


_writing: ContextVar[bool] = ContextVar("magi_writing_a_kernel", default=False)
"""Whether the source will be written between quotes, rather than into the key of a cache."""


def _define_source(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with assigned(_writing, True):
        return original(*args, **kwargs)


def _escaped_source(original: Callable[..., str], *args: Any, **kwargs: Any) -> str:
    r"""The source of a kernel, with each backslash doubled if it is written between quotes.

    Torch escapes nothing but such quotes. So Python interprets each backslash once too often: ``"\n"`` becomes a line
    end inside a string, inline PTX of several lines is invalid, and ``"\\t"`` becomes another string.
    """
    source = original(*args, **kwargs)
    if "\\" not in source or not _writing.get():
        return source
    report("escape_kernel_sources")
    return source.replace("\\", "\\\\")


ESCAPE_KERNEL_SOURCES = Defect(
    name="escape_kernel_sources",
    effect="a Triton kernel of the user with a backslash in its source or in a constant has another text, or does not "
    "compile: 'SyntaxError: unterminated string literal'",
    severity="wrong code",
    fixed=(2, 13, 0),
    repair="backslashes in the source of the user's Triton kernels are escaped",
    replaces={
        f"{_WRAPPER}PythonWrapperCodegen.define_user_defined_triton_kernel": _define_source,
        f"{_WRAPPER}user_defined_triton_kernel_transitive_closure_source_code": _escaped_source,
    },
)


_annotated: ContextVar[frozenset[str]] = ContextVar("magi_annotated_parameters", default=frozenset())
"""Names of the parameters that are annotated with a type in the user's kernel that is being declared."""


def _define_annotated(original: Callable[..., Any], wrapper: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
    annotated = frozenset(parameter.name for parameter in _parameters_of(kernel) if parameter.annotation_type)
    with assigned(_annotated, annotated):
        return original(wrapper, kernel, *args, **kwargs)


def _declare_floats(original: Callable[..., dict[str, str]], *args: Any, **kwargs: Any) -> dict[str, str]:
    """The types of the arguments of a user's kernel, with floats in 32 bits, as Triton passes them.

    Torch declares each Python float as ``fp64``, as Inductor's own kernels need it. So ``scale * x`` is float64: a
    kernel that passes the product to `tl.dot` together with float32 does not compile, and one that computes it in a
    loop takes 1.5 times as long (`chunk_gla` and `fused_recurrent_gla` of flash-linear-attention, one H200, torch
    2.11). Triton's launcher takes a float in 32 bits unless its parameter is annotated with another type, and so does
    torch 2.15. The module `wrapper` declares kernels of the user only.
    """
    declared = original(*args, **kwargs)
    wide = [name for name, kind in declared.items() if kind == "fp64" and name not in _annotated.get()]
    if wide:
        report("keep_float_arguments")
    return declared | dict.fromkeys(wide, "fp32")


KEEP_FLOAT_ARGUMENTS = Defect(
    name="keep_float_arguments",
    effect="a Triton kernel of the user that takes a float computes in float64: slower, or it does not compile",
    severity="no code",
    since=(2, 11, 0),
    fixed=(2, 15, 0),
    repair="float arguments of the user's Triton kernels are passed in 32 bits, as Triton does",
    replaces={
        f"{_WRAPPER}PythonWrapperCodegen.define_user_defined_triton_kernel": _define_annotated,
        f"{_WRAPPER}signature_to_meta": _declare_floats,
    },
)


def _define_unspecialized(
    original: Callable[..., Any],
    wrapper: Any,
    kernel: Any,
    configs: Any,
    kwargs: Mapping[str, Any],
    *args: Any,
    **rest: Any,
) -> Any:
    """Pass a ``do_not_specialize`` argument of 1 to Inductor as an expression that hides its value.

    Triton makes a constant of each int argument that is 1, except for the parameters named in ``do_not_specialize``.
    Inductor does so for those too (``equals_1``). In the body the parameter is then a Python int, and
    ``T.to(tl.int64)`` does not compile. `fused_recurrent_delta_rule_fwd_kernel` of flash-linear-attention fails in this
    way when it decodes one token.
    """
    from torch._inductor.virtualized import V

    names = [each.name for each in _parameters_of(kernel) if each.do_not_specialize and not each.is_constexpr]
    ones = {
        name: Identity(sympy.Integer(1))
        for name in names
        if isinstance(value := kwargs.get(name), int | sympy.Integer)
        and V.graph.sizevars.statically_known_equals(value, 1)
    }
    if ones:
        report("keep_unspecialized_ones")
    return original(wrapper, kernel, configs, {**kwargs, **ones}, *args, **rest)


KEEP_UNSPECIALIZED_ONES = Defect(
    name="keep_unspecialized_ones",
    effect="a Triton kernel of the user whose `do_not_specialize` argument is 1 gets a constant, and may not compile",
    severity="no code",
    repair="arguments that the user's Triton kernels do not specialize stay numbers where they are 1",
    replaces={f"{_WRAPPER}PythonWrapperCodegen.define_user_defined_triton_kernel": _define_unspecialized},
)


def _launch_with_tensors(
    original: Callable[..., None], launch: Any, *, kernel_args: dict[str, Any], **others: Any
) -> None:
    """Make a Tensor of the number that torch passes for a constant Tensor without dimensions.

    In a package of AOTInductor the parameters and buffers of a model are constants. `GraphLowering.get_attr`
    (torch/_inductor/graph.py) takes one without dimensions for its number, and a kernel, which needs an address, gets
    that as its argument: `TypeError: '<=' not supported between instances of 'Constant' and 'int'`. For kernels of a
    library torch makes a Tensor of the number.
    """
    from torch._inductor.ir import Constant, ExternKernel

    numbers = {name: value for name, value in kernel_args.items() if isinstance(value, Constant)}
    if numbers:
        report("keep_scalar_tensors")
        kernel_args |= {name: ExternKernel.realize_input(number) for name, number in numbers.items()}
    original(launch, kernel_args=kernel_args, **others)


KEEP_SCALAR_TENSORS = Defect(
    name="keep_scalar_tensors",
    effect="a package of AOTInductor with a Triton kernel that reads a buffer without dimensions does not compile",
    severity="no code",
    repair="the kernel gets the buffer",
    replaces={"torch._inductor.ir:UserDefinedTritonKernel.__init__": _launch_with_tensors},
)


def _scratch_of_grid(
    original: Callable[..., Any], overrides: Any, idx: int, workspace: Any, *args: Any, **kwargs: Any
) -> Any:
    """The code that allocates the scratch memory of a Triton kernel, as large as its grid.

    A kernel that makes a tensor descriptor keeps it in scratch memory, each program at its own place behind the others.
    In code for C++, AOTInductor's among it, Inductor allocates the memory of one program, so the others write over
    other Tensors. Later releases multiply it by the grid, whose three sizes are variables of the generated function.
    """
    written = original(overrides, idx, workspace, *args, **kwargs)
    if written is None:
        return None
    lines, name = written
    whole_grid = f"{{static_cast<int64_t>({workspace.size}) * grid_0 * grid_1 * grid_2}}"
    enlarged = [line.replace(f"_size[] = {{{workspace.size}}};", f"_size[] = {whole_grid};") for line in lines]
    if enlarged != lines:
        report("scratch_for_each_program")
    return enlarged, name


SCRATCH_FOR_EACH_PROGRAM = Defect(
    name="scratch_for_each_program",
    effect="in a package of AOTInductor, a Triton kernel that makes tensor descriptors writes over other Tensors",
    severity="wrong code",
    fixed=(2, 12, 1),
    repair="the scratch memory of a Triton kernel is as large as its grid",
    replaces={"torch._inductor.codegen.cuda.device_op_overrides:CUDADeviceOpOverrides.cpp_scratch": _scratch_of_grid},
)
