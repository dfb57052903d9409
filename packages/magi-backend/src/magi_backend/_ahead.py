# SPDX-License-Identifier: Apache-2.0
"""Models compiled ahead of time: a package that runs without Python, and without these packages.

The calls of registered operators are replaced by their bodies, and AOTInductor compiles the exported program with our
passes and repairs.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import magi_tritonwrap
import torch
from magi_opschema import OpDef
from magi_passes import MagiInductorPass, PassPipeline, Reason
from magi_tritonwrap.errors import UnknownOpError
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from magi_backend import _torch_compat
from magi_backend._passes import chosen_passes
from magi_backend._register import registered
from magi_backend._repairs._defect import active_defects, repaired
from magi_backend._settings import read_request
from magi_backend.errors import OptionError, PackageError, TargetTypeError, family


def exported(target: object, example_inputs: object, dynamic_shapes: Any) -> ExportedProgram:
    """*target* as an exported program.

    Raises:
        TargetTypeError: *target* is neither a module nor a program, or the other arguments do not fit it.
    """
    if isinstance(target, ExportedProgram):
        if dynamic_shapes is not None:
            msg = "aot_compile: dynamic_shapes with an exported program. Give them to torch.export.export."
            raise TargetTypeError(msg)
        if target.example_inputs is None and example_inputs is None:
            raise TargetTypeError("aot_compile: the exported program holds no example inputs; give example_inputs.")
        if example_inputs is not None:
            target.example_inputs = (_inputs(example_inputs), {})
        return target
    if not isinstance(target, nn.Module):
        raise TargetTypeError(
            f"aot_compile takes a torch.nn.Module or what torch.export.export returned, and got {target!r} "
            f"(a {type(target).__name__}). Write the function as the forward of a module."
        )
    return torch.export.export(target, _inputs(example_inputs), dynamic_shapes=dynamic_shapes)


def _inputs(example_inputs: object) -> tuple[Any, ...]:
    if not isinstance(example_inputs, tuple):
        raise TargetTypeError(
            f"aot_compile: example_inputs is a {type(example_inputs).__name__}. It is a tuple of the arguments that "
            "the model is called with, such as (torch.ones(2, 3),)."
        )
    return example_inputs


def exported_again(program: ExportedProgram, module: GraphModule) -> ExportedProgram:
    """*module*, a form of *program*, as an exported program with the same sizes varying."""
    args, kwargs = program.example_inputs
    flat, spec = pytree.tree_flatten((args, kwargs))
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    values = [placeholders[name].meta["val"] for name in program.graph_signature.user_inputs if name in placeholders]
    assert len(values) == len(flat), "an exported program has a placeholder for each leaf of its inputs"
    shapes, by_name = pytree.tree_unflatten([_varying(value, program) for value in values], spec)
    return torch.export.export(module, args, kwargs, dynamic_shapes=(*shapes, *by_name.values()), strict=False)


def _varying(value: Any, program: ExportedProgram) -> Any:
    """A dynamic dimension for each size: a body that works for one size only is an error, not a wrong package."""
    if isinstance(value, torch.Tensor):
        dims = {dim: _varying(size, program) for dim, size in enumerate(value.shape)}
        return {dim: varying for dim, varying in dims.items() if varying is not None}
    if not isinstance(value, torch.SymInt):
        return None
    bounds = program.range_constraints.get(value.node.expr)
    if bounds is None or not bounds.upper.is_Integer:
        return Dim.DYNAMIC
    return Dim.DYNAMIC(min=int(bounds.lower), max=int(bounds.upper))


DEPTH = 8
"""How many levels deep the bodies of registered operators may call each other."""


def with_bodies(program: ExportedProgram) -> ExportedProgram:
    """*program* with the body of each registered operator in the place of its calls.

    Calls that the compiler sees through stay, because it replaces them by their Triton launches.

    Raises:
        PackageError: An operator takes an object handle, or its body cannot be traced.
    """
    for _ in range(DEPTH):
        module = program.module()
        assert isinstance(module, GraphModule)
        calls = list(_calls(module))
        if not calls:
            return program
        if any(_torch_compat.nodes.body_for(definition.torch_op, device) for _, definition, device in calls):
            # The first call of a body for each type of device is checked, and the check needs values, which a trace
            # does not have: run a copy of the program on its example inputs.
            args, kwargs = copy.deepcopy(program.example_inputs)
            copy.deepcopy(program.module())(*args, **kwargs)
        for node, definition, device in calls:
            node.target = _body(definition, device)
        for part in module.modules():
            if isinstance(part, GraphModule):
                part.recompile()
        program = exported_again(program, module)
    names = ", ".join(sorted({definition.name for _, definition, _ in calls}))
    raise PackageError(
        f"aot_compile: the bodies of {names} call registered operators more than {DEPTH} levels deep, and all of them "
        "are traced into the package. Where an operator calls itself, call a function that is not an operator instead."
    )


def _calls(module: GraphModule) -> Iterator[tuple[Node, OpDef, str]]:
    """The calls whose bodies are to be traced: the node, the operator, and the type of device that it runs on.

    A body may call operators itself.
    """
    for node in _torch_compat.nodes.nodes_in(module):
        definition = registered(node.target)
        if definition is None:
            continue
        handles = [".".join(map(str, leaf.path)) for leaf in definition.lowering.leaves if leaf.codec.is_process_bound]
        if handles:
            raise PackageError(
                f"aot_compile: {definition.name} takes an object handle ({', '.join(handles)}), which stands for an "
                "object of this process, and a package runs in another one. Pass what the body needs of it as Tensors "
                'and numbers, or compile the model where the object is: torch.compile(model, backend="magi").'
            )
        values = pytree.tree_leaves([used.meta.get("val") for used in node.all_input_nodes])
        types = [value.device.type for value in values if isinstance(value, torch.Tensor)]
        device = next((kind for kind in types if kind != "cpu"), "cpu")
        if device == "cpu" or not _is_seen_through(definition):
            yield node, definition, device


def _is_seen_through(definition: OpDef) -> bool:
    try:
        return magi_tritonwrap.see_through_report(definition.torch_op).see_through
    except UnknownOpError:
        return False


def _body(definition: OpDef, device: str) -> Callable[..., Any]:
    """A function to trace, which runs the body that a call on a type of *device* would run."""

    def body(*args: Any, **kwargs: Any) -> Any:
        try:
            run = _torch_compat.nodes.body_for(definition.torch_op, device) or definition.lowered_fn
            return run(*args, **kwargs)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            raise PackageError(
                f"aot_compile: the body of {definition.name} cannot be traced into the package: "
                f"{type(error).__name__}: {lines[0]} Write it with operators of torch, whose sizes do not depend on "
                f"data; or give it such a body for this device: register_kernel(op, {device!r}, fn)."
            ) from error

    body.__name__ = definition.name.replace("::", "_")
    return body


@dataclass(frozen=True)
class NoPythonLeft(MagiInductorPass):
    """A pass that raises for a graph that calls an operator implemented in Python, which a package could not run."""

    allowed: ClassVar[frozenset[str]] = frozenset({"aten", "prims", "prim", "inductor"})

    def is_applicable(self, graph: Graph, context: object) -> Reason:
        """Check the graph; the pass never changes it.

        Raises:
            PackageError: There is such an operator.
        """
        del context
        for name in _torch_compat.nodes.python_operators(graph):
            if name.partition("::")[0] not in self.allowed:
                raise PackageError(
                    f"aot_compile: {name} is implemented in Python, and a package runs without it. Register it with "
                    "magi_register_custom_op, whose body is traced into the package, or call operators of torch."
                )
        return Reason(False, "no operator of the graph is implemented in Python")

    def __call__(self, graph: Graph) -> None:
        """Do nothing."""


NOT_AHEAD = ("check", "boundary_ops", "compile_sizes", "hot_sizes", "memory_budget", "report")
"""Settings that have an effect with `torch.compile` only: on calls, pieces, a backward, or the record of a run."""


def aot_compile(
    exported_program_or_module: ExportedProgram | torch.nn.Module,
    path: str | Path,
    example_inputs: tuple[Any, ...] | None = None,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Compile a model ahead of time, for inference, into a package that runs without Python.

    ``torch._inductor.aoti_load_package(path)`` loads it and needs none of our packages; neither does C++. The bodies of
    operators that ``magi_register_custom_op`` registered are part of it: they are traced on a CPU, or replaced by their
    Triton launches if the compiler sees through them.

    Args:
        exported_program_or_module: What ``torch.export.export`` returned, or a module to export.
        path: The file to write; its name ends in ``.pt2``.
        example_inputs: The arguments to export a module with; an exported program has its own.
        dynamic_shapes: The sizes that vary, as for ``torch.export.export``; only for a module.
        options: As for ``torch.compile``: settings of :class:`CompileConfig` as ``magi.*``, and keys of Inductor.

    Returns:
        The path of the package.

    Raises:
        PackageError: The model calls an operator that cannot be part of a package: its body cannot be traced, it takes
            an object handle, or it is implemented in Python and not registered here.
        TargetTypeError: The model or its inputs have another type.
        OptionError: An unknown option, or one that has no meaning ahead of time; a path that is not that of a package.

    Example:
        >>> import tempfile
        >>> batch = torch.export.Dim("batch", min=2, max=64)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = aot_compile(torch.nn.ReLU(), f"{folder}/relu.pt2", (torch.ones(4, 3),), ({0: batch},))
        ...     torch._inductor.aoti_load_package(path)(-torch.ones(7, 3)).shape
        torch.Size([7, 3])
    """
    place = os.fspath(path)
    if not place.endswith(".pt2"):
        raise OptionError(f"aot_compile: path={place!r} does not end in .pt2, as the names of packages do.")
    request = read_request(options=options)
    for name in NOT_AHEAD:
        if request.config.origin(name) == "options":
            msg = f"aot_compile: magi.{name} has no meaning ahead of time, only in torch.compile. Leave it out."
            raise OptionError(msg)
    with torch.no_grad(), warnings.catch_warnings():
        # torch 2.13 warns of a class of its own when it copies a program.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        try:
            program = with_bodies(exported(exported_program_or_module, example_inputs, dynamic_shapes))
            defects = active_defects()
            passes = (*chosen_passes(request.config, program.graph_module, defects), NoPythonLeft())
            patches = PassPipeline(passes).inductor_options(base=request.inductor)
            with magi_tritonwrap.unsupported_launches(request.config.on_unsupported), repaired(defects, lambda _: None):
                return _torch_compat.compiling.package(program, place, patches)
        except Exception as error:
            ours = _first_of_ours(error)
            if ours is None or ours is error:
                raise
            raise ours from error


def _first_of_ours(error: BaseException | None) -> BaseException | None:
    """The error of one of our packages among the causes of *error*; a `PackageError` is preferred."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return next((each for kind in (PackageError, family()) for each in found if isinstance(each, kind)), None)
