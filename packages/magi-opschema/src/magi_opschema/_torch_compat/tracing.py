# SPDX-License-Identifier: Apache-2.0
"""Dynamo and FakeTensors: what is hidden from tracing, said while it goes on, and put in the place of Tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

# Dynamo's own module re-exports these names; importing it would load the whole compiler.
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._library import simple_registry
from torch.fx.experimental.sym_node import DynamicInt


F = TypeVar("F", bound=Callable[..., Any])

is_dynamo_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""Public; Dynamo folds it to True. `torch.compiler.is_compiling` takes twice as long."""


def hide_from_dynamo(fn: F) -> F:
    """Keep Dynamo out of *fn* and of what it calls, at no cost a call.

    A body that runs between two compiled regions would else be traced and compiled.
    torch.library.custom_op wraps the body in `torch._disable_dynamo`, which costs a microsecond a call;
    marking the code object, as Dynamo does for its own frames, costs nothing
    (torch/_dynamo/eval_frame.py, `skip_code`).
    """
    set_code_exec_strategy(fn.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return fn


def symbolic_when_traced(value: int) -> int:
    """An int that Dynamo makes an input of the graph wherever it finds it, so that its value is not a constant there.

    An int attribute of a module is a constant otherwise, and each value asks for another graph.
    """
    return DynamicInt(value)


def run_at_trace_time(fn: Callable[[Any], None]) -> None:
    """While Dynamo traces the call, run *fn* with its context; what it does leaves no trace in the graph."""
    from torch._dynamo.comptime import comptime

    comptime(fn)


def _local(context: Any, name: str) -> Any:
    """Dynamo's variable for a local of the function that called `run_at_trace_time`."""
    return context.get_local(name, stacklevel=1)._ComptimeVar__variable.realize()


def _set_local(context: Any, name: str, value: object) -> None:
    """Put the constant *value* into a local of that function."""
    from torch._dynamo.variables import ConstantVariable

    context._ComptimeContext__tx.parent.symbolic_locals[name] = ConstantVariable.create(value)


def traced_object(context: Any, name: str) -> Any:
    """The object behind a local variable of the function that called `run_at_trace_time`.

    None for one that comes into being in the traced code, because it does not exist yet.
    """
    variable = _local(context, name)
    if variable.source is None:
        return None
    return variable.value if hasattr(variable, "value") else variable.as_python_constant()


def guard_type(context: Any, name: str) -> None:
    """Guard the graph by the type of a local variable of the function that called `run_at_trace_time`.

    Torch 2.13 guards a DynamicInt by nothing, so that a graph made for one is run on any value in its place.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard

    variable = _local(context, name)
    if variable.source is not None:
        install_guard(variable.source.make_guard(GuardBuilder.TYPE_MATCH))


def fix_local(context: Any, name: str) -> None:
    """Make a constant of a local number of the function that called `run_at_trace_time`, guarded by its value.

    A Tensor that is an input of the graph is said to stay at its address, with no guard on which one it is, as
    `torch._dynamo.mark_static_address(tensor, guard=False)` says; that one leaves a mark on the user's Tensor, and
    comes too late for one that was read before (torch/_functorch/_aot_autograd/frontend_utils.py reads the mark).
    """
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.tensor import SymNodeVariable

    variable = _local(context, name)
    if isinstance(variable, SymNodeVariable):
        _set_local(context, name, variable.evaluate_expr())
    elif isinstance(variable, TensorVariable):
        node = variable.as_proxy().node
        if node.op == "placeholder":
            node.meta.setdefault("tensor_dict", {}).setdefault("_dynamo_static_input_type", "unguarded")


def answer_class(context: Any, name: str, answer: str, cls: type) -> None:
    """Let the local *answer* be whether the local *name* is a *cls* and of no subclass, in the function that asked.

    Written as `type(value) is cls`, torch 2.13 compares the types of any two objects of one class in a function of
    Python at every call (torch/_dynamo/guards.py, `LAMBDA_GUARD`).
    """
    guard_type(context, name)
    _set_local(context, answer, _local(context, name).python_type() is cls)


def register_fake(library: torch.library.Library, name: str, fake: Callable[..., Any], source: str) -> None:
    """`torch.library.register_fake` for a *source* that is known, ``file:line``.

    Torch looks for the file of its caller by `inspect`, which takes a tenth of a decoration
    (torch/library.py, `Library._register_fake`).
    """
    holder = simple_registry.singleton.find(name).fake_impl
    handle = holder.register(fake, source, lib=library, allow_override=False)
    library._registration_handles.append(handle)


def run_on_fakes(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """*fn* on FakeTensors that look like the Tensors among the arguments."""
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    try:
        return _run_on_fakes(fn, args, None)
    except DynamicOutputShapeException:
        # A size that depends on data is a symbol. Only a ShapeEnv makes one, and it takes sympy to import.
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        return _run_on_fakes(fn, args, ShapeEnv())


def _run_on_fakes(fn: Callable[..., Any], args: tuple[Any, ...], shape_env: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map_only

    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        # Detached, because from_tensor reads .grad, and torch warns of that on a tensor inside a graph. Outside of the
        # mode, which knows no operator on a subclass that has no __torch_dispatch__; of such a one that is a Tensor.
        detached = tree_map_only(torch.Tensor, torch.Tensor.detach, args)
    with FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True) as mode, torch.no_grad():
        return fn(*tree_map_only(torch.Tensor, mode.from_tensor, detached))
