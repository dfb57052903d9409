# SPDX-License-Identifier: Apache-2.0
"""Dynamo and FakeTensors: hiding code from tracing, acting while a function is traced, and running on FakeTensors."""

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
"""True while Dynamo traces, which folds it. It is public; `torch.compiler.is_compiling` takes twice as long."""


def hide_from_dynamo(fn: F) -> F:
    """Keep Dynamo out of *fn* and of what it calls, at no cost for each call.

    Otherwise a body that runs between two compiled regions would be traced and compiled.
    torch.library.custom_op wraps the body in `torch._disable_dynamo`, which costs a microsecond a call;
    marking the code object, as Dynamo does for its own frames, costs nothing
    (torch/_dynamo/eval_frame.py, `skip_code`).
    """
    set_code_exec_strategy(fn.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return fn


def symbolic_when_traced(value: int) -> int:
    """*value* as an int that Dynamo always makes an input of the graph, so that its value is not a constant.

    Otherwise an int attribute of a module is a constant, and each value needs another graph.
    """
    return DynamicInt(value)


def run_at_trace_time(fn: Callable[[Any], None]) -> None:
    """A function for which Dynamo runs *fn* with its context while it traces the call.

    The graph does not record the call.
    """
    from torch._dynamo.comptime import comptime

    comptime(fn)


def _local(context: Any, name: str) -> Any:
    """Dynamo's variable for the local *name* of the function that called what `run_at_trace_time` returned."""
    return context.get_local(name, stacklevel=1)._ComptimeVar__variable.realize()


def _set_local(context: Any, name: str, value: object) -> None:
    """Set the local *name* of that function to the constant *value*."""
    from torch._dynamo.variables import ConstantVariable

    context._ComptimeContext__tx.parent.symbolic_locals[name] = ConstantVariable.create(value)


def traced_object(context: Any, name: str) -> Any:
    """The object of a local variable of the function that is traced.

    It is None for an object that traced code makes, because that does not exist yet.
    """
    variable = _local(context, name)
    if variable.source is None:
        return None
    return variable.value if hasattr(variable, "value") else variable.as_python_constant()


def guard_type(context: Any, name: str) -> None:
    """Add a guard on the type of a local variable of the function that is traced.

    Torch 2.13 adds no guard for a DynamicInt, so a graph made for one would run for any value.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard

    variable = _local(context, name)
    if variable.source is not None:
        install_guard(variable.source.make_guard(GuardBuilder.TYPE_MATCH))


def fix_local(context: Any, name: str) -> None:
    """Make a local number of the function that is traced a constant, with a guard on its value.

    A Tensor that is an input of the graph is marked as staying at its address, without a guard on its identity, as with
    `torch._dynamo.mark_static_address(tensor, guard=False)`. That function would leave a mark on the user's Tensor, and
    has no effect on one that was read before (torch/_functorch/_aot_autograd/frontend_utils.py reads the mark).
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
    """Set the local *answer* of the function that is traced to whether the local *name* is exactly a *cls*.

    For `type(value) is cls`, torch 2.13 would compare the types in a Python function at every call
    (torch/_dynamo/guards.py, `LAMBDA_GUARD`).
    """
    guard_type(context, name)
    _set_local(context, answer, _local(context, name).python_type() is cls)


def register_fake(library: torch.library.Library, name: str, fake: Callable[..., Any], source: str) -> None:
    """`torch.library.register_fake` with a given *source*, ``file:line``.

    Torch looks for the file of its caller by `inspect`, which takes a tenth of a decoration
    (torch/library.py, `Library._register_fake`).
    """
    holder = simple_registry.singleton.find(name).fake_impl
    handle = holder.register(fake, source, lib=library, allow_override=False)
    library._registration_handles.append(handle)


def run_on_fakes(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The result of *fn* on FakeTensors that look like the Tensors among the arguments."""
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    try:
        return _run_on_fakes(fn, args, None)
    except DynamicOutputShapeException:
        # A size that depends on data is a symbol, which only a ShapeEnv can make, and which needs sympy.
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        return _run_on_fakes(fn, args, ShapeEnv())


def _run_on_fakes(fn: Callable[..., Any], args: tuple[Any, ...], shape_env: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map_only

    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        # It is detached, because from_tensor reads .grad, and torch warns about that on a tensor inside a graph. This
        # is done outside of the mode, which does not support operators on a subclass without __torch_dispatch__; such a
        # subclass becomes a Tensor.
        detached = tree_map_only(torch.Tensor, torch.Tensor.detach, args)
    with FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True) as mode, torch.no_grad():
        return fn(*tree_map_only(torch.Tensor, mode.from_tensor, detached))
