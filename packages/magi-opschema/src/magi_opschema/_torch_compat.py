# SPDX-License-Identifier: Apache-2.0
"""Every private name of torch that magi-opschema uses, one function or constant a quirk.

Unless it says otherwise, a name serves torch 2.10 to 2.15.
"""

from __future__ import annotations

import contextlib
import keyword
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

# Dynamo's own module re-exports these names; importing it would load the whole compiler.
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._library import simple_registry
from torch._library.custom_ops import CustomOpDef as CustomOpDef
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.fx.experimental.sym_node import DynamicInt
from torch.utils import _pytree


below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context in which dispatch skips the autograd keys; custom_op enters the same (torch/_library/autograd.py)."""

below_adinplaceorview = torch._C._AutoDispatchBelowADInplaceOrView
"""As `below_autograd`, and the key that bumps version counters too."""

any_requires_grad: Callable[..., bool] = torch._C._any_requires_grad
"""True if one of the arguments, or of the Tensors in a list among them, requires a gradient. Others are passed over."""

are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""True inside torch.func transforms, whose levels need every key of the dispatcher."""

forward_ad: Any = torch.autograd.forward_ad
"""The module whose `_current_level` is -1 outside of forward-mode AD; torch.func.jvp and dual numbers enter a level."""

is_dynamo_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""Public; Dynamo folds it to True. `torch.compiler.is_compiling` takes twice as long."""

increment_version: Callable[[Iterable[torch.Tensor]], None] = torch._C._increment_version
"""Bump version counters; a no-op for inference tensors. The public torch.autograd.graph.increment_version is slower."""


def counting_writes() -> contextlib.AbstractContextManager[None]:
    """A context in which Tensors count what is written into them, also below `below_adinplaceorview`."""
    key = torch._C.DispatchKey.ADInplaceOrView
    return torch._C._SetExcludeDispatchKeyGuard(key, False)


def writes_counted(tensor: torch.Tensor) -> int:
    """The version counter, which every write into the Tensor or a view increments; inference tensors have none."""
    return tensor._version


def storage_id(tensor: torch.Tensor) -> int:
    """A number that two Tensors, real or fake, have in common if they share memory."""
    return id(tensor) if tensor.layout is not torch.strided else int(tensor.untyped_storage()._cdata)


def is_capturing(tensor: torch.Tensor) -> bool:
    """True while a CUDA graph is captured on the Tensor's device, where nothing can be read back."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def is_forward_ad_active() -> bool:
    """True inside of torch.func.jvp, jacfwd, linearize and `dual_level`; there is no public way to ask."""
    return forward_ad._current_level >= 0  # type: ignore[no-any-return]


def is_functionalizing() -> bool:
    """True where torch.func.functionalize is the innermost transform."""
    from torch._C._functorch import TransformType, peek_interpreter_stack

    return bool(peek_interpreter_stack().key() == TransformType.Functionalize)


def run_functionalized(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call *op*, which writes into nothing, below the innermost transform, a torch.func.functionalize.

    No autograd.Function can be applied there (torch/_functorch/autograd_function.py has no rule for it).
    """
    from torch._functorch.pyfunctorch import FunctionalizeInterpreter, retrieve_current_functorch_interpreter
    from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI

    interpreter = retrieve_current_functorch_interpreter()
    assert isinstance(interpreter, FunctionalizeInterpreter)
    functional: Any = FunctorchFunctionalizeAPI(interpreter)
    args, kwargs = functional.unwrap_tensors((args, kwargs))
    with functional.redispatch_to_next():
        output = op(*args, **kwargs)
    return functional.wrap_tensors(output)


def dispatch(op: Any) -> Callable[..., Any]:
    """The C function behind an OpOverload: the call without one Python frame (torch/_ops.py, `OpOverload.__call__`)."""
    return op._op  # type: ignore[no-any-return]


def apply_in_eager(function: Any) -> Callable[..., Any]:
    """`function.apply` without the look at torch.func levels that torch/autograd/function.py puts in front of it.

    Only for calls outside of transforms.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[no-any-return]


def hide_from_dynamo(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo out of *fn* and of what it calls, at no cost a call.

    A body that runs between two compiled regions would else be traced and compiled.
    torch.library.custom_op wraps the body in `torch._disable_dynamo`, which costs a microsecond a call;
    marking the code object, as Dynamo does for its own frames, costs nothing
    (torch/_dynamo/eval_frame.py, `skip_code`).
    """
    set_code_exec_strategy(fn.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return fn


def register_fake(library: torch.library.Library, name: str, fake: Callable[..., Any], source: str) -> None:
    """`torch.library.register_fake` for a *source* that is known, ``file:line``.

    Torch looks for the file of its caller by `inspect`, which takes a tenth of a decoration
    (torch/library.py, `Library._register_fake`).
    """
    holder = simple_registry.singleton.find(name).fake_impl
    handle = holder.register(fake, source, lib=library, allow_override=False)
    library._registration_handles.append(handle)


def symbolic_when_traced(value: int) -> int:
    """An int that Dynamo makes an input of the graph wherever it finds it, so that its value is no constant there.

    An int attribute of a module is a constant otherwise, and each value asks for another graph.
    """
    return DynamicInt(value)


def run_at_trace_time(fn: Callable[[Any], None]) -> None:
    """While Dynamo traces the call, run *fn* with its context; what it does leaves no trace in the graph."""
    from torch._dynamo.comptime import comptime

    comptime(fn)


def traced_object(context: Any, name: str) -> Any:
    """The object behind a local variable of the function that called `run_at_trace_time`.

    None for one that comes into being in the traced code, because it does not exist yet.
    """
    variable = context.get_local(name, stacklevel=1)._ComptimeVar__variable.realize()
    if variable.source is None:
        return None
    return variable.value if hasattr(variable, "value") else variable.as_python_constant()


def guard_type(context: Any, name: str) -> None:
    """Guard the graph by the type of a local variable of the function that called `run_at_trace_time`.

    Torch 2.13 guards a DynamicInt by nothing, so that a graph made for one is run on any value in its place.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard

    variable = context.get_local(name, stacklevel=1)._ComptimeVar__variable.realize()
    if variable.source is not None:
        install_guard(variable.source.make_guard(GuardBuilder.TYPE_MATCH))


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

    with FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True) as mode, torch.no_grad():
        # Detached, because from_tensor reads .grad, and torch warns of that on a tensor inside a graph.
        return fn(*tree_map_only(torch.Tensor, lambda tensor: mode.from_tensor(tensor.detach()), args))


class ExplainedOverload(OpOverload):
    """An OpOverload whose call hands the dispatcher's error to a function that may raise a better one.

    A wrapper would cost each call, and would not be the OpOverload that graphs hold. The call is that of
    torch/_ops.py, `OpOverload.__call__`, from torch 2.10 to 2.13.
    """

    _magi_explain: Callable[..., None]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the op; an error is explained, or raised as it is."""
        try:
            return self._op(*args, **kwargs)
        except Exception as error:
            self._magi_explain(error, args, kwargs)
            raise


class ExplainedCall(ExplainedOverload):
    """An ExplainedOverload where torch's own call does more than ask the dispatcher, as in torch 2.15.

    There it has a table of Python implementations beside the dispatcher's. One more Python frame a call.
    """

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the op; an error is explained, or raised as it is."""
        try:
            return OpOverload.__call__(self, *args, **kwargs)
        except Exception as error:
            self._magi_explain(error, args, kwargs)
            raise


def explain_errors(op: OpOverload, explain: Callable[..., None]) -> None:
    """Have `explain(error, args, kwargs)` called when a call of *op* raises an error."""
    if type(op) is OpOverload:
        is_plain = OpOverload.__call__.__code__.co_names == ("_op",)
        op.__class__ = ExplainedOverload if is_plain else ExplainedCall
        vars(op)["_magi_explain"] = explain
        hide_from_dynamo(op.__class__.__call__)


_kept: dict[str, torch.library.Library] = {}
_replaced: dict[str, list[weakref.ref[OpOverload]]] = {}


def destroy(library: torch.library.Library) -> None:
    """Unregister everything that *library* holds; there is no public way to do it before the library is collected.

    The library's finalizer would clear `torch.ops` once more whenever it runs, and so part the next op of the name
    from its OpOverload: it is left nothing to do, and the cache of signatures, which only it clears, is cleared here
    (torch/library.py, `_del_library`).
    """
    from torch.fx.operator_schemas import _SCHEMA_TO_SIGNATURE_CACHE

    library._destroy()
    for name in library._op_defs:
        _SCHEMA_TO_SIGNATURE_CACHE.pop((name, ""), None)
    library._op_defs.clear()
    library._op_impls.clear()


def keep_entry(op: OpOverload) -> None:
    """Keep the dispatcher's entry of *op* alive when all its registrations go.

    An OpOverload points to the entry, and calling it after the entry was freed is a crash
    (aten/src/ATen/core/dispatch/Dispatcher.cpp, `cleanup`). One registration at a key that no call reaches is enough.
    """
    name = str(op._schema.name)
    if name not in _kept:
        namespace, op_name = name.split("::")
        _kept[name] = torch.library.Library(namespace, "IMPL")
        _kept[name].impl(op_name, torch.library.fallthrough_kernel, "TESTING_ONLY_GenericMode")
    alive = [earlier for earlier in _replaced.get(name, []) if earlier() is not None]
    _replaced[name] = [*alive, weakref.ref(op)]


def speak_for_earlier(op: OpOverload) -> None:
    """Make *op* and the OpOverloads that had its name before one in everything that they say.

    An entry that is kept keeps the OpOverload that it met first, too, and hands that one to tracers and dispatch modes
    (aten/src/ATen/core/dispatch/OperatorEntry.h, `getPythonOp`). Inductor would take a default from its old schema.
    """
    for reference in _replaced.get(str(op._schema.name), []):
        earlier = reference()
        if earlier is not None:
            earlier.__dict__ = op.__dict__


def restore_packet(op: OpOverload) -> None:
    """Make `torch.ops.namespace.op.default` be *op* again, after its definition was destroyed and made again."""
    packet = op._overloadpacket
    namespace = getattr(torch.ops, op.namespace)
    setattr(namespace, packet.__name__, packet)
    if packet.__name__ not in namespace._dir:
        namespace._dir.append(packet.__name__)


pytree_lock = _pytree._NODE_REGISTRY_LOCK
"""Torch's own lock around its table of pytree nodes."""

register_pytree_node = _pytree.register_pytree_node
"""In the Python registry, and in that of optree if it is installed. Not in torch.utils' documented names."""

GetAttrKey = _pytree.GetAttrKey
"""The key of a child that is an attribute."""


def is_pytree_node(cls: type) -> bool:
    """True if *cls* is registered in torch's Python registry of pytrees."""
    return cls in _pytree.SUPPORTED_NODES


def has_saved_name(cls: type) -> bool:
    """True if a tree that holds *cls* can be saved."""
    return cls in _pytree.SUPPORTED_SERIALIZED_TYPES


def register_saved_namedtuple(cls: type, name: str) -> None:
    """Give a named tuple, which is a pytree node as it is, the name that it is saved as."""
    _pytree._register_namedtuple(cls, serialized_type_name=name)


def class_saved_as(name: str) -> type | None:
    """The class that a saved tree means by *name*."""
    return _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)


def save_as(name: str, cls: type) -> None:
    """Let a saved tree mean *cls* by *name*; a registration gives the name to the latest class without a word."""
    _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name] = cls


def is_registered(name: str) -> bool:
    """True if torch's dispatcher knows a schema `namespace::op`, whoever defined it."""
    return bool(torch._C._jit_get_schemas_for_operator(name))


def reserved_part(namespace: str, op: str) -> str:
    """The part of `namespace::op` that no op can have, or the empty text.

    These are the words of the schema language (torch/csrc/jit/frontend/lexer.h), namespaces that torch.library
    refuses or that are attributes of torch.ops, and attributes that every torch.ops.namespace has.
    """
    words = {*keyword.kwlist, "Ellipsis", "NoneType"}
    if namespace in {*words, "prim", "_"} or type(getattr(torch.ops, namespace)) is not torch._ops._OpNamespace:
        return namespace
    if op in {*words, "__origin__"} or hasattr(torch._ops._OpNamespace, op):
        return op
    attribute = vars(getattr(torch.ops, namespace)).get(op)
    return "" if attribute is None or isinstance(attribute, OpOverloadPacket) else op


def dispatch_key_of(device_type: str) -> str:
    """The dispatch key of a device type: "CUDA" for "cuda". torch.library.register_kernel asks the same."""
    return str(torch._C._dispatch_key_for_device(device_type))
