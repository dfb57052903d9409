# SPDX-License-Identifier: Apache-2.0
"""The private torch names that this package touches: one function per quirk, with the releases that it serves."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import operator
import re
import threading
import types
import typing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.fx import Graph, GraphModule, Node


_repairs: ContextVar[tuple[frozenset[str], Callable[[str], None]] | None] = ContextVar("magi_repairs", default=None)
_install_lock = threading.Lock()


def torch_release() -> tuple[int, ...]:
    """The release of torch without its local or pre-release part, for example ``(2, 13, 0)``."""
    return tuple(map(int, re.findall(r"\d+", torch_text())[:3]))


def let_threads_register(backend: Callable[..., Any]) -> None:
    """Several threads may be the first to name *backend* (every torch release).

    ``lookup_backend`` looks whether a name is registered, loads its entry point, and registers it, without a lock. Of
    threads that are in there together all but one get ``AssertionError: duplicate name``, or a KeyError between the
    two tables. They hold torch's function by then, so the table that it asks is what can answer differently: *backend*
    is never in it yet, and always found.
    """
    from torch._dynamo.backends import registry

    class Backends(dict[str, Any]):
        def __contains__(self, name: object) -> bool:
            return name != backend.__name__ and super().__contains__(name)

        def __missing__(self, name: str) -> Any:
            if name == backend.__name__:
                return backend
            raise KeyError(name)

    registry._COMPILER_FNS = Backends(registry._COMPILER_FNS)


@contextlib.contextmanager
def repaired_functions(names: frozenset[str], report: Callable[[str], None]) -> Iterator[None]:
    """Run Inductor with the repairs *names*, within this context only.

    *report* gets the name of a repair each time that it changed what Inductor would have done. The wrappers are put
    in place on first use and do nothing outside such a context, so stock ``torch.compile`` stays what it was.
    """
    with _install_lock:
        for name in names:
            REPAIRS[name]()
    token = _repairs.set((names, report))
    try:
        yield
    finally:
        _repairs.reset(token)


def _active(name: str) -> Callable[[str], None] | None:
    active = _repairs.get()
    return active[1] if active is not None and name in active[0] else None


def keep_mutation_order() -> None:
    """Recomputed loop bodies keep their dependence on the last write to a buffer (torch < 2.14).

    ``SchedulerNode.recompute_size_and_body``, which the C++ backend calls to fuse loops, reads the dependences of a
    node anew from its body, where a mutated buffer has its first name, and renames them only if the node has fake
    dependences. A reader of ``index_put_``'s result then no longer waits for it, and the reordering for peak memory
    may put it first.
    """
    from torch._inductor.scheduler import SchedulerNode

    original = SchedulerNode.recompute_size_and_body
    if hasattr(original, "_magi_original"):
        return

    @functools.wraps(original)
    def recompute_size_and_body(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        report = _active("keep_mutation_order")
        if report is None or not self.mutation_renames:
            return
        renamed = self.read_writes.rename(self.mutation_renames)
        if renamed != self.read_writes:
            self.set_read_writes(renamed)
            report("keep_mutation_order")

    recompute_size_and_body._magi_original = original  # type: ignore[attr-defined]
    SchedulerNode.recompute_size_and_body = recompute_size_and_body  # type: ignore[method-assign]


def order_symbolic_strides() -> None:
    """Symbolic strides are put in order with the shape environment (torch < 2.14.1).

    ``GraphLowering.run_node`` calls ``ir.get_stride_order(strides)`` without one, and Python's sort then asks a
    symbolic comparison for a truth value.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    original = ir.get_stride_order
    if hasattr(original, "_magi_original") or "shape_env" not in inspect.signature(original).parameters:
        return

    @functools.wraps(original)
    def get_stride_order(seq: Sequence[Any], shape_env: Any = None) -> Sequence[int]:
        report = _active("order_symbolic_strides")
        if report is not None and shape_env is None and not all(isinstance(stride, int) for stride in seq):
            shape_env = V.graph.sizevars.shape_env
            report("order_symbolic_strides")
        return original(seq, shape_env)

    get_stride_order._magi_original = original  # type: ignore[attr-defined]
    ir.get_stride_order = get_stride_order


def realize_readers_first() -> None:
    """What reads a buffer is computed before an operator writes to it (torch 2.13, perhaps others).

    ``FallbackKernel`` registers itself as an operation first, and then, in ``MutationOutput``, realizes the pointwise
    expressions that still read the old value: they come behind the write, and read the new one.
    """
    from torch._inductor.ir import FallbackKernel
    from torch._inductor.virtualized import V

    original = FallbackKernel.__init__
    if hasattr(original, "_magi_original"):
        return

    def realize_readers(kernel: Any, tensors: Any, others: Any, unflatten: Any) -> bool:
        before = len(V.graph.operations)
        args, kwargs = unflatten(tensors, others)
        for info, arg in torch._library.utils.zip_schema(kernel._schema, args, kwargs):
            if info.alias_info is not None and info.alias_info.is_write:
                for tensor in arg if isinstance(arg, (list, tuple)) else (arg,):
                    for reader in list(V.graph.name_to_users.get(tensor.get_name(), ())) if tensor is not None else ():
                        reader.realize()
        return len(V.graph.operations) > before

    @functools.wraps(original)
    def __init__(  # noqa: N807 - it takes the place of one
        self: Any, layout: Any, kernel: Any, tensors: Any, others: Any, unflatten: Any, *args: Any, **kwargs: Any
    ) -> None:
        report = _active("realize_readers_first")
        is_mutable = isinstance(kernel, torch._ops.OpOverload) and kernel._schema.is_mutable
        if report is not None and is_mutable and realize_readers(kernel, tensors, others, unflatten):
            report("realize_readers_first")
        original(self, layout, kernel, tensors, others, unflatten, *args, **kwargs)

    __init__._magi_original = original  # type: ignore[attr-defined]
    FallbackKernel.__init__ = __init__  # type: ignore[method-assign, assignment]


def exact_epilogues() -> None:
    """A fused epilogue computes from what the kernel stores, under names that the kernel does not use (torch >= 2.12).

    ``FusedUserDefinedTritonKernel`` puts ``tmp0 = <the stored expression>`` and the operators on ``tmp0`` before the
    store. The expression has the kernel's own dtype: an int tensor of floats loses its rounding, a bfloat16 value meets
    ``tl.sigmoid``, which takes float32 alone. And a kernel with a variable ``tmp0`` finds it overwritten.
    """
    from torch._inductor.codegen import triton
    from torch._inductor.virtualized import V

    fused: Any = getattr(triton, "FusedUserDefinedTritonKernel", None)
    if fused is None or hasattr(fused.load, "_magi_original"):
        return
    original = fused.load

    def as_stored(expression: str, dtype: torch.dtype) -> str:
        stored = f"tl.cast({expression}, {triton.triton_store_type(dtype)})"
        return f"{stored}.to({triton.triton_compute_type(dtype)})"

    @functools.wraps(original)
    def load(self: Any, name: str, index: Any) -> Any:
        report = _active("exact_epilogues")
        if report is None or name != self.ir_node.mutable_args[0].get_name():
            return original(self, name, index)
        report("exact_epilogues")
        while self.cse.name_prefix in self.ir_node.kernel_src:
            self.cse.name_prefix = f"epilogue_{self.cse.name_prefix}"
        dtype, expression = V.graph.get_dtype(name), self.original_stored_expr
        self.original_stored_expr = as_stored(expression, dtype)
        try:
            value = original(self, name, index)
        finally:
            self.original_stored_expr = expression
        if dtype in {torch.float16, torch.bfloat16}:
            value.dtype = torch.float32
        return value

    load._magi_original = original  # type: ignore[attr-defined]
    fused.load = load


REPAIRS: dict[str, Callable[[], None]] = {
    "realize_readers_first": realize_readers_first,
    "keep_mutation_order": keep_mutation_order,
    "order_symbolic_strides": order_symbolic_strides,
    "exact_epilogues": exact_epilogues,
}


_EPILOGUES = "epilogue_fusion_user_defined_triton_kernel"


def epilogue_keys() -> tuple[str, ...]:
    """The key that lets Inductor fuse pointwise work into user kernels; none before torch 2.12."""
    from torch._inductor import config

    return (_EPILOGUES,) if hasattr(config, _EPILOGUES) else ()


def fuse_epilogues() -> None:
    """Turn that key on."""
    from torch._inductor import config

    setattr(config, _EPILOGUES, True)


@dataclass(frozen=True)
class TritonLaunch:
    """A launch in a graph: the kernel's name, the tensors that it writes to by parameter, and what comes of them."""

    kernel: str
    written: dict[str, Node]
    results: tuple[Node, ...]


def triton_launches(graph: Graph) -> list[TritonLaunch]:
    """The launches in *graph* after functionalisation: a node for each, and an item taken of it for each tensor."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional

    found = []
    for node in graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional):
        kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        while not hasattr(kernel, "__name__"):
            kernel = kernel.fn  # an autotuner
        arguments: Any = node.kwargs["kwargs"]
        names: Any = node.kwargs["tensors_to_clone"]
        written = {name: arguments[name] for name in names}
        found.append(TritonLaunch(kernel.__name__, written, tuple(node.users)))
    return found


def is_item_or_view(node: Node) -> bool:
    """Whether *node* is an element of its first argument, or looks at its memory."""
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def is_empty(node: Node) -> bool:
    """Whether *node* makes a tensor without contents."""
    return operator_name(node.target) in {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"}


def is_write(node: Node) -> bool:
    """Whether *node* is a write that functionalisation has made a function: of a kernel or of an operator."""
    from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional

    return node.target in (auto_functionalized, auto_functionalized_v2, triton_kernel_wrapper_functional)


def is_pointwise(target: object) -> bool:
    """Whether the target of a node computes each element from the elements in its place."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def as_itself(error: Exception, own: tuple[type[Exception], ...]) -> Exception:
    """*error* such that it leaves a backend as itself, where it is of the classes *own*; any other one unchanged.

    Dynamo and Inductor put what a backend raises inside a ``BackendCompilerFailed``, unless it is one already
    (``OutputGraph._call_user_compiler``; all supported releases). So the result is of a class with both bases: the same
    name, the same sentence, the same attributes. Inductor's own wrapper is taken off.
    """
    from torch._dynamo.exc import BackendCompilerFailed

    inner: Any = error
    while isinstance(inner, BackendCompilerFailed) and not isinstance(inner, own):
        inner = inner.inner_exception
    if not isinstance(inner, own) or isinstance(inner, BackendCompilerFailed):
        return error
    kind = type(inner)
    both = type(kind.__name__, (kind, BackendCompilerFailed), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    # Dynamo shortens the traceback to what is inside this frame, the one that caught the error.
    frame = error.__traceback__.tb_frame if error.__traceback__ is not None else None
    as_torch_would = BackendCompilerFailed(types.SimpleNamespace(__name__="magi"), inner, frame)
    result: Any = both.__new__(both, *inner.args)
    vars(result).update(vars(as_torch_would) | vars(inner))
    result.__cause__ = inner.__cause__
    return result.with_traceback(error.__traceback__)  # type: ignore[no-any-return]


def compile_fx(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    inner_compile: Callable[..., Any],
    config_patches: dict[str, Any],
) -> Callable[..., Any]:
    """Inductor's entry for backends: its caches, logs and CUDA graphs come with it. All supported releases."""
    from torch._inductor.compile_fx import compile_fx as inductor

    return inductor(gm, example_inputs, inner_compile=inner_compile, config_patches=config_patches)  # type: ignore[return-value]


def backend_fakes(values: Sequence[Any]) -> list[Any]:
    """The fake tensors that Dynamo traced with, as AOTAutograd takes them.

    Dynamo makes another fake mode for the backend. From torch 2.11 on AOTAutograd takes tensors of the first one over
    by itself; 2.10 refuses them (`detect_fake_mode` in `torch/_guards.py`).
    """
    if torch_release() >= (2, 11):
        return list(values)
    from torch._guards import TracingContext
    from torch.utils._pytree import tree_map_only

    mode = TracingContext.get().fake_mode
    assert mode is not None, "Dynamo makes one before it calls a backend"
    return tree_map_only(torch.Tensor, mode.from_tensor, list(values))  # type: ignore[no-any-return]


def compile_graph(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compile one forward or backward graph of ATen operators, as Inductor does by itself."""
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner(gm, example_inputs, **kwargs)


def cache_counts() -> dict[str, int]:
    """How often this process hit and missed Inductor's and AOTAutograd's caches so far."""
    from torch._dynamo.utils import counters

    return {
        "aot_autograd_hit": counters["aot_autograd"]["autograd_cache_hit"],
        "aot_autograd_miss": counters["aot_autograd"]["autograd_cache_miss"],
        "aot_autograd_bypass": counters["aot_autograd"]["autograd_cache_bypass"],
        "fx_graph_hit": counters["inductor"]["fxgraph_cache_hit"],
        "fx_graph_miss": counters["inductor"]["fxgraph_cache_miss"],
        "fx_graph_bypass": counters["inductor"]["fxgraph_cache_bypass"],
    }


def graph_breaks() -> dict[str, int]:
    """How often Dynamo broke a graph in this process so far, by its first line of reason."""
    from torch._dynamo.utils import counters

    breaks: dict[str, int] = {}
    for reason, count in counters["graph_break"].items():
        first = next((line.strip() for line in str(reason).splitlines() if line.strip()), "unknown")
        breaks[first] = breaks.get(first, 0) + count
    return breaks


def trace_artifact(name: str, payload: Callable[[], dict[str, Any]]) -> None:
    """Put *payload* into the structured trace of ``torch.compile`` (TORCH_TRACE, tlparse)."""
    import json

    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "json"},
        payload_fn=lambda: json.dumps(payload()),
    )


def torch_text() -> str:
    """The version of torch as text, for example ``2.13.0+cpu``."""
    return str(torch.__version__)


def synchronize() -> None:
    """Wait for the accelerator, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _dynamic_marks(tensor: torch.Tensor) -> dict[str, Any]:
    """What ``mark_dynamic`` and its siblings left on *tensor*: ``_dynamo_dynamic_indices``, ``_has_dynamo_…``, …."""
    return {name: copy.copy(value) for name, value in vars(tensor).items() if "_dynamo_" in name}


def copy_dynamic_marks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give *target* the dynamic-dimension marks of *source*."""
    for name, value in _dynamic_marks(source).items():
        setattr(target, name, value)


def inductor_keys() -> list[str]:
    """Every key of ``torch._inductor.config``; its own ``list_options()`` leaves out those that have an alias."""
    from torch._inductor import config

    return sorted({*torch._inductor.list_options(), *config._config})  # type: ignore[attr-defined]


def inductor_type(key: str) -> type | None:
    """What a value of an Inductor key has to be, as ``torch.compile(options=...)`` checks it; None for anything."""
    from torch._inductor import config

    kind = config.get_type(key) if key in config._config else None  # type: ignore[attr-defined]
    if not isinstance(kind, type) or typing.get_origin(kind) is not None or kind is type(None):
        return None
    return kind


def mode_options(mode: str) -> dict[str, Any]:
    """The configuration that *mode* of ``torch.compile`` stands for."""
    import torch._inductor

    return dict(torch._inductor.list_mode_options(mode))


def operator_name(target: object) -> str:
    """``ns::op`` for an operator of the dispatcher, else an empty string."""
    return str(target.name()).partition(".")[0] if isinstance(target, torch._ops.OpOverload) else ""


def is_operator(target: object) -> bool:
    """Whether the target of a graph node is an operator of the dispatcher."""
    return isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def operator_schemas(gm: torch.fx.GraphModule) -> tuple[str, ...]:
    """The schemas of the operators that *gm* calls, also in nested graphs, without those of torch itself."""
    targets = {
        node.target
        for module in gm.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
    }
    overloads = {target for target in targets if isinstance(target, torch._ops.OpOverload)}
    for target in targets:
        if isinstance(target, torch._ops.OpOverloadPacket):
            overloads |= {getattr(target, name) for name in target.overloads()}
    return tuple(sorted(str(op._schema) for op in overloads if op.namespace not in {"aten", "prim", "prims"}))


def plain_call(module: torch.nn.Module) -> Callable[..., Any]:
    """The call of *module* with its hooks, never the compiled one."""
    return module._call_impl


def set_compiled_call(owner: torch.nn.Module | type[torch.nn.Module], call: object) -> None:
    """Let ``nn.Module.__call__`` run *call*: for one instance, or for every instance of a class.

    ``nn.Module.__setattr__`` is passed by, so that nothing of it shows in the module.
    """
    if isinstance(owner, type):
        owner._compiled_call_impl = call  # type: ignore[assignment]
    else:
        vars(owner)["_compiled_call_impl"] = call


def marked_as_compiled(call: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """*call*, which says that it is *original* compiled, as what ``torch.compile`` returns does."""
    call._torchdynamo_orig_callable = original  # type: ignore[attr-defined]
    return call


def uncompiled(fn: Any) -> Callable[..., Any] | None:
    """What ``torch.compile`` or ``magi_compile`` made *fn* from; None when *fn* is not compiled."""
    original = getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", None)
    if original is not None:
        return original  # type: ignore[no-any-return]
    if isinstance(fn, torch.nn.Module) and fn._compiled_call_impl is not None:
        return fn._call_impl
    return None


@contextlib.contextmanager
def dynamic_marks(tensors: Sequence[tuple[torch.Tensor, tuple[int, ...]]]) -> Iterator[None]:
    """Mark dimensions of *tensors* as dynamic within this context; every other mark is left as it was.

    The weak mark is used: a dimension that the traced code fixes, for example by a size that must be 1, is compiled
    for that size, where the strong one raises ConstraintViolationError.
    """
    before = [(tensor, _dynamic_marks(tensor)) for tensor, _ in tensors]
    try:
        for tensor, dims in tensors:
            for dim in dims:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
        yield
    finally:
        for tensor, marks in before:
            for name in _dynamic_marks(tensor):
                delattr(tensor, name)
            for name, value in marks.items():
                setattr(tensor, name, value)


def restarts() -> type[Exception]:
    """What a backend raises through to make Dynamo capture a function again; no failure."""
    from torch._dynamo.exc import RestartAnalysis

    return RestartAnalysis


def graph_copy(gm: GraphModule) -> GraphModule:
    """A copy of *gm* with a graph of its own, which shares parameters and constants."""
    from torch.fx import GraphModule

    return GraphModule(gm, copy.deepcopy(gm.graph))


def split_module(gm: GraphModule, place: Callable[[Any], int]) -> GraphModule:
    """*gm* with the calls of each place in a submodule of its own, in the order of the places."""
    from torch.fx.passes.split_module import split_module as split

    return split(gm, None, place, keep_original_order=True)  # type: ignore[arg-type]


def replace_submodule(owner: torch.nn.Module, name: str, compiled: Callable[..., Any]) -> None:
    """Let *owner* call *compiled* where it called its submodule *name*."""
    delattr(owner, name)
    # Not a submodule: nn.Module.__call__ costs a microsecond a call, and there is nothing to hook.
    vars(owner)[name] = compiled


def operator_names() -> list[str]:
    """Every operator that is registered, as ``ns::op``."""
    return sorted({name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()})


def version(tensor: torch.Tensor) -> int:
    """How often *tensor* was written to."""
    return tensor._version


def view_base(tensor: torch.Tensor) -> torch.Tensor:
    """What *tensor* is a view of; itself where it is none."""
    return tensor if tensor._base is None else tensor._base


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether *tensor* is of a subclass that holds other tensors, such as a DTensor."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return bool(is_traceable_wrapper_subclass(tensor))


def storage_id(tensor: torch.Tensor) -> int:
    """A number that two tensors share exactly if they share memory; fake tensors have no address to compare."""
    return int(tensor.untyped_storage()._cdata)


_PRODUCTS = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "convolution",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
)


def is_product(target: object) -> bool:
    """Whether the target of a node is a matrix product, a convolution, or attention: bound by arithmetic."""
    if getattr(target, "__name__", "") == "flex_attention":
        return True
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" and target._opname in _PRODUCTS


def has_backward(graph: Any) -> bool:
    """Whether *graph* is a joint graph, whose later part computes gradients from tangents."""
    return any("tangents" in node.name for node in graph.find_nodes(op="placeholder"))


def in_backward(node: Any) -> bool:
    """Whether a node of a joint graph belongs to its backward."""
    return node.meta.get("partitioner_tag") == "is_backward" or "fwd_source_fn_stack" in node.meta


def partitioner(settings: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """AOTAutograd with *settings*, in this context; they are part of its cache key."""
    from torch._functorch import config

    return config.patch(settings) if settings else contextlib.nullcontext()
