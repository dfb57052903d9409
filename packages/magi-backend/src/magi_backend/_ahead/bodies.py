# SPDX-License-Identifier: Apache-2.0
"""Replace calls of registered operators by their bodies, because a package runs without Python."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import magi_tritonwrap
import torch
from magi_passes import MagiInductorPass, Reason
from magi_tritonwrap.errors import UnknownOpError
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from magi_backend import _torch_compat
from magi_backend._records.ops import registered
from magi_backend.errors import PackageError

from .program import exported_again


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from magi_opschema import OpDef
    from torch.export import ExportedProgram
    from torch.fx import Graph, Node


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
        if any(_torch_compat.has_body_for(call.definition.torch_op, call.device) for call in calls):
            _call_once(program)
        for call in calls:
            call.node.target = _body(call)
        for part in module.modules():
            if isinstance(part, GraphModule):
                part.recompile()
        program = exported_again(program, module)
    names = ", ".join(sorted({call.definition.name for call in calls}))
    msg = (
        f"aot_compile: the bodies of {names} call registered operators more than {DEPTH} levels deep, and all of them "
        "are traced into the package. Where an operator calls itself, call a function that is not an operator instead."
    )
    raise PackageError(msg)


@dataclass(frozen=True)
class _Call:
    """A call of a registered operator in a program, and the type of device that it runs on."""

    node: Node
    definition: OpDef
    device: str


def _calls(module: GraphModule) -> Iterator[_Call]:
    """The calls whose bodies are to be traced; a body may call operators itself."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            definition = registered(node.target)
            if definition is not None:
                _refuse_handles(definition)
                call = _Call(node, definition, _device(node))
                if not _is_seen_through(call):
                    yield call


def _call_once(program: ExportedProgram) -> None:
    """Run a copy of *program* on its example inputs.

    The first call of a body for each type of device is checked, and the check needs values, which a trace does not
    have.
    """
    args, kwargs = copy.deepcopy(program.example_inputs)
    copy.deepcopy(program.module())(*args, **kwargs)


def _device(node: Node) -> str:
    """The type of device that a call of an operator runs on."""
    values = pytree.tree_leaves(
        pytree.tree_map_only(torch.fx.Node, lambda n: n.meta.get("val"), (node.args, node.kwargs))
    )
    types = [value.device.type for value in values if isinstance(value, torch.Tensor)]
    return next((kind for kind in types if kind != "cpu"), "cpu")


def _refuse_handles(definition: OpDef) -> None:
    handles = [".".join(map(str, leaf.path)) for leaf in definition.lowering.leaves if leaf.codec.is_process_bound]
    if handles:
        msg = (
            f"aot_compile: {definition.name} takes an object handle ({', '.join(handles)}), which stands for an object "
            "of this process, and a package runs in another one. Pass what the body needs of it as Tensors and "
            'numbers, or compile the model where the object is: torch.compile(model, backend="magi").'
        )
        raise PackageError(msg)


def _is_seen_through(call: _Call) -> bool:
    if call.device == "cpu":
        return False
    try:
        return magi_tritonwrap.see_through_report(call.definition.torch_op).see_through
    except UnknownOpError:
        return False


def _body(call: _Call) -> Callable[..., Any]:
    """A function to trace, which runs the body that *call* would run."""
    definition, device = call.definition, call.device

    def body(*args: Any, **kwargs: Any) -> Any:
        try:
            if _torch_compat.has_body_for(definition.torch_op, device):
                return _torch_compat.call_body_for(definition.torch_op, device, args, kwargs)
            return definition.lowered_fn(*args, **kwargs)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            msg = (
                f"aot_compile: the body of {definition.name} cannot be traced into the package: "
                f"{type(error).__name__}: {lines[0]} Write it with operators of torch, whose sizes do not depend on "
                f"data; or give it such a body for this device: register_kernel(op, {device!r}, fn)."
            )
            raise PackageError(msg) from error

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
        for name in _torch_compat.python_operators(graph):
            if name.partition("::")[0] not in self.allowed:
                msg = (
                    f"aot_compile: {name} is implemented in Python, and a package runs without it. Register it with "
                    "magi_register_custom_op, whose body is traced into the package, or call operators of torch."
                )
                raise PackageError(msg)
        return Reason(False, "no operator of the graph is implemented in Python")

    def __call__(self, graph: Graph) -> None:
        """Do nothing."""
