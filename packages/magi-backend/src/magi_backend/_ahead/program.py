# SPDX-License-Identifier: Apache-2.0
"""The exported program of a model, and exporting it again with the sizes that vary in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from magi_backend.errors import TargetTypeError


if TYPE_CHECKING:
    from torch.fx import GraphModule


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
            msg = "aot_compile: the exported program holds no example inputs; give example_inputs."
            raise TargetTypeError(msg)
        if example_inputs is not None:
            target.example_inputs = (_inputs(example_inputs), {})
        return target
    if not isinstance(target, nn.Module):
        msg = (
            f"aot_compile takes a torch.nn.Module or what torch.export.export returned, and got {target!r} "
            f"(a {type(target).__name__}). Write the function as the forward of a module."
        )
        raise TargetTypeError(msg)
    return torch.export.export(target, _inputs(example_inputs), dynamic_shapes=dynamic_shapes)


def _inputs(example_inputs: object) -> tuple[Any, ...]:
    if not isinstance(example_inputs, tuple):
        msg = (
            f"aot_compile: example_inputs is a {type(example_inputs).__name__}. It is a tuple of the arguments that "
            "the model is called with, such as (torch.ones(2, 3),)."
        )
        raise TargetTypeError(msg)
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
    if isinstance(value, torch.Tensor):
        sizes: tuple[Any, ...] = tuple(value.shape)  # typed as ints, which a traced size is not
        return {dim: _dim(size, program) for dim, size in enumerate(sizes) if isinstance(size, torch.SymInt)}
    return _dim(value, program) if isinstance(value, torch.SymInt) else None


def _dim(size: torch.SymInt, program: ExportedProgram) -> Any:
    """A dynamic dimension for *size*: a body that works for one size only is an error, rather than a wrong package."""
    bounds = program.range_constraints.get(size.node.expr)
    if bounds is None or not bounds.upper.is_Integer:
        return Dim.DYNAMIC
    return Dim.DYNAMIC(min=int(bounds.lower), max=int(bounds.upper))
