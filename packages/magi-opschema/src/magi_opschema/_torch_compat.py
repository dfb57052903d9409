# SPDX-License-Identifier: Apache-2.0
"""Every private name of torch that magi-opschema uses, one function or constant for each quirk.

Each one works with torch 2.10 to 2.15 unless it says otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import keyword
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

# Dynamo's own module re-exports these names; importing it would load the whole compiler.
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._library import simple_registry
from torch._library.custom_ops import CustomOpDef as CustomOpDef
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.fx.experimental.sym_node import DynamicInt
from torch.torch_version import TorchVersion
from torch.utils import _pytree


any_requires_grad: Callable[..., bool] = torch._C._any_requires_grad
"""True if one of the arguments, or of the Tensors in a list among them, requires a gradient."""

are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""True inside torch.func transforms, whose levels need every key of the dispatcher."""

forward_ad: Any = torch.autograd.forward_ad
"""The module whose `_current_level` is -1 outside of forward-mode AD; torch.func.jvp and dual numbers enter a level."""


def is_forward_ad_active() -> bool:
    """True inside of torch.func.jvp, jacfwd, linearize and `dual_level`; there is no public way to ask."""
    return forward_ad._current_level >= 0  # type: ignore[no-any-return]


def is_functionalizing() -> bool:
    """True if torch.func.functionalize is the innermost transform."""
    from torch._C._functorch import TransformType, peek_interpreter_stack

    return bool(peek_interpreter_stack().key() == TransformType.Functionalize)


def run_functionalized(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call *op*, which writes into nothing, below the innermost transform, a torch.func.functionalize.

    An autograd.Function cannot be applied there (torch/_functorch/autograd_function.py has no rule for it).
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


has_torch_function: Callable[..., bool] = torch.overrides.has_torch_function_variadic
"""True if a mode or one of the arguments has a `__torch_function__` that must see the call."""

has_torch_function_among: Callable[[Iterable[object]], bool] = torch.overrides.has_torch_function
"""Like `has_torch_function`, for the items of a list."""

tracing_state: Callable[[], object] = torch._C._get_tracing_state
"""None outside of torch.jit.trace."""

dispatch: Callable[..., Any] = torch._C._dispatch_call_boxed
"""`dispatch(dispatch_handle(op), *args)` only calls the dispatcher for *op*.

The call of an OpOverload goes through the bindings of TorchScript (torch/_ops.py, `OpOverload.__call__`), which check
each argument twice more: for `__torch_function__`, and to record the call in torch.jit.trace. If neither applies, this
takes three quarters of the time.
"""


def dispatch_handle(op: Any) -> Any:
    """The dispatcher's handle of an OpOverload, for `dispatch`."""
    return op._handle


def _keys(*names: str) -> Any:
    keys = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in names)
    return functools.reduce(operator.or_, keys)


_AUTOGRAD = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")


@dataclass(frozen=True)
class ContextPool:
    """Contexts that can be entered again, because making one takes as long as entering and leaving it.

    The list is shared by threads. A thread that pops a context is the only one that has it, and appends it after
    leaving it. In the contexts, dispatch skips the autograd keys, as below the Function of torch.library.custom_op
    (torch/_library/autograd.py), whose own context can be entered only once (torch/csrc/autograd/init.cpp,
    `py_context_manager_DEPRECATED`).
    """

    make: Callable[[], Any]
    unused: list[Any] = field(default_factory=list)


below_autograd_pool = ContextPool(functools.partial(torch._C._ExcludeDispatchKeyGuard, _keys(*_AUTOGRAD)))
below_adinplaceorview_pool = ContextPool(
    functools.partial(torch._C._ExcludeDispatchKeyGuard, _keys(*_AUTOGRAD, "ADInplaceOrView"))
)
"""Contexts in which dispatch also skips the key that bumps version counters."""


def _keys_of_this_thread() -> tuple[Any, Any]:
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def _keys_of_a_new_thread() -> tuple[Any, Any]:
    found: list[tuple[Any, Any]] = []
    thread = threading.Thread(target=lambda: found.append(_keys_of_this_thread()))
    thread.start()
    thread.join()
    return found[0]


# Asked at the import, because from Python 3.12 on a call in an atexit function cannot start a thread.
_PLAIN_KEYS = _keys_of_a_new_thread()


def is_dispatch_plain() -> bool:
    """True if a call involves only `__torch_function__` and the kernels at the keys of its Tensors.

    Modes, autocast, transforms, inference mode, torch.jit.trace and the contexts of this module add a key to the
    dispatcher's, or take one away. Forward-mode AD has a level instead.
    """
    return forward_ad._current_level < 0 and _keys_of_this_thread() == _PLAIN_KEYS


def apply_in_eager(function: Any) -> Callable[..., Any]:
    """`function.apply` outside of transforms, without torch's check of levels (torch/autograd/function.py)."""
    return super(torch.autograd.Function, function).apply  # type: ignore[no-any-return]


def dispatch_key_of(device_type: str) -> str:
    """The dispatch key of a device type: "CUDA" for "cuda", as in torch.library.register_kernel."""
    return str(torch._C._dispatch_key_for_device(device_type))


increment_version: Callable[[Iterable[torch.Tensor]], None] = torch._C._increment_version
"""Bump version counters; a no-op for inference tensors. The public torch.autograd.graph.increment_version is slower."""


def counting_writes() -> contextlib.AbstractContextManager[None]:
    """A context in which Tensors count the writes into them, also inside a context of `below_adinplaceorview_pool`."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def writes_counted(tensor: torch.Tensor) -> int:
    """The version counter, which every write into the Tensor or a view increments; inference tensors have none."""
    return tensor._version


def storage_id(tensor: torch.Tensor) -> int:
    """A number that is equal for two Tensors, real or fake, that share memory."""
    return id(tensor) if tensor.layout is not torch.strided else int(tensor.untyped_storage()._cdata)


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
    """Make Dynamo run *fn* with its context while it traces this call, which the graph does not record.

    The functions below are for that. Each is about the local variable `value` of the function that makes this call.
    """
    from torch._dynamo.comptime import comptime

    comptime(fn)


def _local(context: Any) -> Any:
    """Dynamo's variable for the local `value`."""
    return context.get_local("value", stacklevel=1)._ComptimeVar__variable.realize()


def _set_local(context: Any, name: str, value: object) -> None:
    """Set another local of that function, *name*, to the constant *value*."""
    from torch._dynamo.variables import ConstantVariable

    context._ComptimeContext__tx.parent.symbolic_locals[name] = ConstantVariable.create(value)


def traced_object(context: Any) -> Any:
    """The object; None for one that traced code makes, because that does not exist yet."""
    variable = _local(context)
    if variable.source is None:
        return None
    return variable.value if hasattr(variable, "value") else variable.as_python_constant()


def guard_type(context: Any) -> None:
    """Add a guard on the type: torch 2.13 adds none for a DynamicInt, so its graph would run for any value."""
    from torch._dynamo.guards import GuardBuilder, install_guard

    variable = _local(context)
    if variable.source is not None:
        install_guard(variable.source.make_guard(GuardBuilder.TYPE_MATCH))


def reads_attributes(context: Any) -> bool:
    """False for an object of which Dynamo reads no attribute that it does not know, such as a DeviceMesh."""
    return type(_local(context)).__module__ != "torch._dynamo.variables.distributed"


def answer_for_one_object(context: Any, answer: int) -> None:
    """Set the local variable `answer` of the function that is traced, with a guard on the object."""
    from torch._dynamo.guards import GuardBuilder, install_guard

    install_guard(_local(context).source.make_guard(GuardBuilder.ID_MATCH))
    _set_local(context, "answer", answer)


def fix_local(context: Any) -> None:
    """Make a number a constant, with a guard on its value.

    A Tensor that is an input of the graph is marked as staying at its address, without a guard on its identity, as with
    `torch._dynamo.mark_static_address(tensor, guard=False)`. That function would leave a mark on the user's Tensor, and
    has no effect on one that was read before (torch/_functorch/_aot_autograd/frontend_utils.py reads the mark).
    """
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.tensor import SymNodeVariable

    variable = _local(context)
    if isinstance(variable, SymNodeVariable):
        _set_local(context, "value", variable.evaluate_expr())
    elif isinstance(variable, TensorVariable):
        node = variable.as_proxy().node
        if node.op == "placeholder":
            node.meta.setdefault("tensor_dict", {}).setdefault("_dynamo_static_input_type", "unguarded")


def answer_class(context: Any, cls: type) -> None:
    """Set the local variable `answer` of the function that is traced to whether the object is exactly a *cls*.

    For `type(value) is cls`, torch 2.13 would compare the types in a Python function at every call
    (torch/_dynamo/guards.py, `LAMBDA_GUARD`).
    """
    guard_type(context)
    _set_local(context, "answer", _local(context).python_type() is cls)


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
    from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
    from torch.utils._pytree import tree_map_only

    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        # It is detached, because from_tensor reads .grad, and torch warns about that on a tensor inside a graph. This
        # is done outside of the mode, which does not support operators on a subclass without __torch_dispatch__; such a
        # subclass becomes a Tensor.
        detached = tree_map_only(torch.Tensor, torch.Tensor.detach, args)

    def run(shape_env: Any) -> Any:
        with FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True) as mode, torch.no_grad():
            return fn(*tree_map_only(torch.Tensor, mode.from_tensor, detached))

    try:
        return run(None)
    except DynamicOutputShapeException:
        # A size that depends on data is a symbol, which only a ShapeEnv can make, and which needs sympy.
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        return run(ShapeEnv())


def _translating(call: Callable[..., Any]) -> Callable[..., Any]:
    def translate(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        except Exception as error:
            self._magi_translate(error, args, kwargs)
            raise

    return translate


class TranslatingOverload(OpOverload):
    """An OpOverload whose call passes the dispatcher's error to a function that may raise a better one.

    A wrapper would cost each call, and would not be the OpOverload that graphs hold.
    """

    _magi_translate: Callable[..., None]
    magi_direct: Callable[[str], Callable[..., Any]]
    """From a dispatch key to what code that Inductor generates calls instead; see `call_directly`."""

    if OpOverload.__call__.__code__.co_names == ("_op",):

        def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
            try:  # the call of torch/_ops.py from torch 2.10 to 2.13, without its frame
                return self._op(*args, **kwargs)
            except Exception as error:
                self._magi_translate(error, args, kwargs)
                raise

    else:  # Such as torch 2.15, which has a table of Python implementations besides the dispatcher's.
        __call__ = _translating(OpOverload.__call__)


class TranslatingPacket(OpOverloadPacket):
    """The OpOverloadPacket of such an op, `torch.ops.namespace.op`: it does not go through the OpOverload."""

    _magi_translate: Callable[..., None]
    __call__ = _translating(OpOverloadPacket.__call__)


def functionalize_by(op: OpOverload, rule: Callable[..., Any]) -> None:
    """Make AOTAutograd call *rule* with a call of *op* where it makes a graph functional.

    If *rule* returns NotImplemented, torch makes the call functional itself. Nothing changes outside of a compiler.
    """
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    def functionalize(mode: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            output = rule(*args, **kwargs)
        return mode.__torch_dispatch__(op, (), args, kwargs) if output is NotImplemented else output

    op.py_impl(FunctionalTensorMode)(functionalize)


def translate_errors(op: OpOverload, translate: Callable[..., None]) -> None:
    """Make a call of *op*, or of its packet, that raises an error call `translate(error, args, kwargs)`."""
    if type(op) is OpOverload:
        op.__class__ = TranslatingOverload
        packet = op._overloadpacket
        packet.__class__ = TranslatingPacket
        for translating in (op, packet):
            vars(translating)["_magi_translate"] = translate
            hide_from_dynamo(translating.__class__.__call__)


kernel_guards: dict[str, Callable[[str], None]] = {}
"""By op, what Python code must ask before it gives the op a kernel at a dispatch key; it may raise."""


@functools.cache
def install_kernel_guards() -> None:
    """Make all libraries ask `kernel_guards`, because torch 2.13 lets them replace a kernel, and no op is told."""
    impl: Any = torch.library.Library.impl

    @functools.wraps(impl)
    def guarded(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> Any:
        name = op_name._schema.name if isinstance(op_name, OpOverload) else op_name
        guard = kernel_guards.get(name if "::" in name else f"{self.ns}::{name}")
        if guard is not None:
            guard(dispatch_key or self.dispatch_key)
        return impl(self, op_name, fn, dispatch_key, **options)

    torch.library.Library.impl = guarded  # type: ignore[method-assign]


count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""How many modes with `__torch_dispatch__`, and with `__torch_function__`, are active in this thread."""

profiler: Any = torch.autograd.profiler
"""The module whose `_is_profiler_enabled` is true while a profiler, or `emit_nvtx`, records operators."""


def has_kernel(name: str, key: str) -> bool:
    """True if `namespace::op` has a kernel that was registered at the dispatch key *key* itself."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def call_directly(op: TranslatingOverload, key_of: Callable[[tuple[Any, ...], dict[str, Any]], str]) -> None:
    """Make Inductor, if it compiles now, generate a call of `op.magi_direct(key)` where it would call *op*.

    `key_of(args, kwargs)`, with the fake values of a call, returns the key; for an empty one the call stays as it is.

    Inductor gives the same lowering to every op without one (torch/_inductor/graph.py, `call_function`). Here it also
    changes the name that the generated code calls, for which torch has no public way.
    """
    is_compiling = torch._guards.TracingContext.try_get() is not None
    if "torch._inductor.lowering" not in sys.modules or not is_compiling:
        return  # what Inductor is given it keeps, so an op that is only called is not
    from torch._inductor import decomposition, lowering
    from torch._inductor.virtualized import V

    if op in lowering.lowerings or op in decomposition.decompositions:
        return
    tag = torch._library.utils.get_layout_constraint_tag(op, with_default=True)
    lowering.make_fallback(op, layout_constraint=lowering.tag_to_layout_constraint(tag), warn=False)
    fallback = lowering.lowerings[op]

    @functools.wraps(fallback)
    def lower(*args: Any, **kwargs: Any) -> Any:
        known = len(V.graph.operations)
        lowered = fallback(*args, **kwargs)
        node = V.graph.current_node
        if node.target is op and not V.graph.cpp_wrapper:
            fakes = torch.fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
            if key := key_of(*fakes):
                for operation in V.graph.operations[known:]:
                    if getattr(operation, "op_overload", None) is op:
                        _rename_call(operation, key)
        return lowered

    lowering.lowerings[op] = lower


def _rename_call(operation: Any, key: str) -> None:
    op, generate = operation.python_kernel_name, operation.codegen
    _, _, namespace, *words = op.split(".")
    # Without the length, "a_b::c" and "a::b_c" would have one name.
    name = "_".join(["call", str(len(namespace)), namespace, *words, key])
    # The code also serves another process, from a cache, in which *op* may be one of another library.
    line = f"{name} = getattr({op}, 'magi_direct', lambda _: {op})({key!r})"

    def codegen(wrapper: Any) -> None:
        wrapper.add_import_once(line)
        generate(wrapper)

    operation.python_kernel_name, operation.codegen = name, codegen


_kept: dict[str, torch.library.Library] = {}

_replaced: dict[str, list[weakref.ref[OpOverload]]] = {}


def destroy(library: torch.library.Library) -> None:
    """Unregister everything that *library* holds, which has no public way before the library is collected.

    The library's finalizer would clear `torch.ops` again when it runs, and so separate the next op of the name from its
    OpOverload. So nothing is left for it to do, and the cache of signatures, which only it clears, is cleared here
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
    """Make the OpOverloads that had the name of *op* before equal to *op* in all their attributes.

    An entry that is kept also keeps the OpOverload that it first saw, and passes that one to tracers and dispatch modes
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


def is_registered(name: str) -> bool:
    """True if torch's dispatcher has a schema `namespace::op`, from any library."""
    return bool(torch._C._jit_get_schemas_for_operator(name))


def reserved_part(namespace: str, op: str) -> str:
    """The part of `namespace::op` that no op can have; empty if there is none.

    These are the keywords of the schema language (torch/csrc/jit/frontend/lexer.h), namespaces that torch.library
    refuses or that are attributes of torch.ops, and attributes that every torch.ops.namespace has.
    """
    words = {*keyword.kwlist, "Ellipsis", "NoneType"}
    if namespace in {*words, "prim", "_"} or type(getattr(torch.ops, namespace)) is not torch._ops._OpNamespace:
        return namespace
    if op in {*words, "__origin__"} or hasattr(torch._ops._OpNamespace, op):
        return op
    attribute = vars(getattr(torch.ops, namespace)).get(op)
    return "" if attribute is None or isinstance(attribute, OpOverloadPacket) else op


def opaque_name(cls: type) -> str:
    """The schema type of a class, or of its base, that was registered with `register_opaque_type`; empty for any other.

    The module came with torch 2.11. From 2.13 on torch registers ProcessGroup and DeviceMesh, when DTensor is imported.
    2.15 renamed `is_opaque_type`, and logs a warning at each call of the old name.
    """
    module: Any = getattr(torch._library, "opaque_object", None)
    if cls.__module__.startswith("torch.distributed."):
        from torch.distributed import device_mesh

        getattr(device_mesh, "_register_distributed_opaque_types", lambda: None)()
    if not hasattr(module, "get_opaque_type_name"):
        return ""
    is_registered = getattr(module, "is_custom_class", None) or module.is_opaque_type
    if not is_registered(cls):
        return ""
    return str(module.get_opaque_type_name(cls))


def why_not_returned(cls: type) -> str:
    """Why no op can return an object of a class that was registered with `register_opaque_type`; empty if one can.

    2.15 renamed `is_opaque_value_type`.
    """
    module: Any = torch._library.opaque_object
    if (getattr(module, "is_opaque_constant_type", None) or module.is_opaque_value_type)(cls):
        return "which torch takes for a constant of a graph, so that compiled code would return what the fake returns"
    return "" if TorchVersion(torch.__version__) >= "2.12" else "which Inductor takes from an op from torch 2.12 on"


pytree_lock = _pytree._NODE_REGISTRY_LOCK
"""Torch's own lock around its table of pytree nodes."""

register_pytree_node = _pytree.register_pytree_node
"""Register in the Python registry, and in that of optree if it is installed. It is not documented in torch.utils."""

GetAttrKey = _pytree.GetAttrKey
"""The class of keys of children that are attributes."""


pytree_nodes = _pytree.SUPPORTED_NODES
"""The classes in torch's Python registry of pytrees."""

saved_nodes = _pytree.SUPPORTED_SERIALIZED_TYPES
"""The classes of which a tree that holds one can be saved."""

register_saved_namedtuple: Callable[..., None] = _pytree._register_namedtuple
"""`register_saved_namedtuple(cls, serialized_type_name=name)`, for a class that is a node already."""

saved_classes: dict[str, type] = _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
"""The class of each name in a saved tree; a registration silently gives the name to the latest class."""
