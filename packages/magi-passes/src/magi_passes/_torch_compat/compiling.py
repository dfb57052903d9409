# SPDX-License-Identifier: Apache-2.0
"""How Inductor is called, what it knows while it compiles, graphs, and our operator. Tried on torch 2.10 to 2.15."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from . import config


OPERATOR_TYPES = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)
"""The classes of torch's operators, which their name identifies. All releases."""
PADDINGS: frozenset[Any] = frozenset(
    {
        *(torch.nn.functional.pad, torch._C._nn.pad, torch.constant_pad_nd),
        *(torch.ops.aten.pad.default, torch.ops.aten.constant_pad_nd.default),
    }
)
"""The targets of `torch.nn.functional.pad` and the padding modules in a captured graph, also after decomposition.

All releases; Dynamo captures the first or the second.
"""
_install_lock = threading.Lock()


def compilation_lock() -> AbstractContextManager[object]:
    """A lock that keeps other threads from compiling while a pass's configuration is set, if threads share it.

    It is needed only before torch 2.12. It is Dynamo's own (reentrant) compile lock, so there is only one order of
    locks.
    """
    if config.numbers_of(config.torch_version()) >= (2, 12):
        return contextlib.nullcontext()
    from torch._dynamo import convert_frame

    return convert_frame.compile_lock


def out_of_process_mode() -> str | None:
    """The value of TORCHINDUCTOR_FX_COMPILE_MODE under which Inductor loses custom passes, or None.

    Those modes send `config.save_config_portable()` to the compiling side, which leaves the hooks out
    (`_save_config_ignore` in torch/_inductor/config.py).
    """
    from torch._inductor import compile_fx

    if compile_fx.fx_compile_mode is compile_fx.FxCompileMode.NORMAL:
        return None
    prefixes = ("progressive+" * compile_fx.fx_compile_progressive, "async+" * compile_fx.fx_compile_async)
    return "".join(prefixes) + compile_fx.fx_compile_mode.name


@contextlib.contextmanager
def nested_compilation() -> Iterator[None]:
    """A context in which a compilation can run inside another one.

    TritonBundler keeps one bundle per process and asserts that none is open (`begin_compile` in
    torch/_inductor/triton_bundler.py), so the outer one is put aside. The outer tracing context is put aside too,
    because AOTAutograd would mix its fake tensors with the inner ones.
    """
    from torch._guards import tracing
    from torch._inductor.triton_bundler import TritonBundler

    names = [name for name in ("_entries", "_static_autotuners", "_winners") if hasattr(TritonBundler, name)]
    saved = {name: getattr(TritonBundler, name) for name in names}
    for name in names:
        setattr(TritonBundler, name, None)
    try:
        with tracing(None):
            yield
    finally:
        for name, value in saved.items():
            setattr(TritonBundler, name, value)


@contextlib.contextmanager
def more_symbolic_results() -> Iterator[None]:
    """A context in which sympy remembers 100,000 results of each of its functions, in place of 1,000.

    It reads the number from the environment when it is imported (sympy/core/cache.py), which is before us. A net of
    many sizes forgets what it asks again: the UNet of Stable Diffusion 1.5 makes 229,000 sums and products where 92,000
    differ. Of two compilations at once, the second has the usual number when the first ends.
    """
    replaced = [(cell, few) for cell, few in _symbolic_results() if cell.cell_contents is few]
    for cell, few in replaced:
        cell.cell_contents = functools.lru_cache(100_000, typed=True)(few.__wrapped__)
    try:
        yield
    finally:
        for cell, few in replaced:
            cell.cell_contents = few


@functools.cache
def _symbolic_results() -> list[tuple[Any, Any]]:
    """Where each function of sympy keeps its results, and what does, unless the user chose how many."""
    from sympy.core.cache import CACHE

    cells = [function.__closure__[function.__code__.co_freevars.index("cfunc")] for function in CACHE]
    return [(cell, cell.cell_contents) for cell in cells if cell.cell_contents.cache_info().maxsize == 1000]


def compile_graph(
    module: GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any], is_backward: bool
) -> Callable[[list[Any]], Any]:
    """Compile a graph that AOTAutograd has already lowered, with *options*, from inside a pass of its compilation.

    Returns a function of one list with the inputs, which it may empty.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    with config.patched(options):
        compiled: Any = compile_fx_inner(
            module,
            list(example_inputs),
            cudagraphs=BoxedBool(False),
            is_inference=not is_backward,
            is_backward=is_backward,
        )
    return compiled  # type: ignore[no-any-return]


def current_compile_id() -> str | None:
    """Dynamo's id of the compilation in progress, such as ``0/1``; None if there is none."""
    from torch._guards import CompileContext

    compile_id = CompileContext.current_compile_id()
    return None if compile_id is None else str(compile_id)


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Write a JSON artifact into torch.compile's structured trace, where tlparse shows it."""
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=payload)


def is_inference_aware(hook: object) -> bool:
    """Whether *hook* wants `is_inference` as a second argument (torch 2.12 and newer)."""
    from torch._inductor import custom_graph_pass

    kind = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    return kind is not None and isinstance(hook, kind)


def inner_compile() -> Callable[..., Any]:
    """The function that compiles one graph unless the caller of `compile_fx` has one of its own."""
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner


def install(
    around_compile_fx: Callable[..., Any],
    around_inner_compile: Callable[[Callable[..., Any], GraphModule, Any, dict[str, Any]], Any],
) -> None:
    """Route `compile_fx` and `_compile_fx_inner` of torch/_inductor/compile_fx.py through two functions, once.

    Two are needed, because each knows what the other does not. `compile_fx` sees the caller's options and the hooks
    that they hide, and computes AOTAutograd's cache key. `_compile_fx_inner` compiles one graph, cache lookup included,
    and is the only function called for a backward graph, which is compiled long after `compile_fx` returned. Both are
    looked up in the module on each use, in every release from 2.10 to 2.15. *around_compile_fx* gets all arguments but
    the graph and its inputs by name.
    """
    module: Any = importlib.import_module("torch._inductor.compile_fx")
    with _install_lock:
        if hasattr(module.compile_fx, "_magi_passes_original"):
            return
        compile_fx, inner = module.compile_fx, module._compile_fx_inner

        @functools.wraps(compile_fx)
        def scoped_compile_fx(*args: Any, **kwargs: Any) -> Any:
            names = ("inner_compile", "config_patches", "decompositions", "ignore_shape_env", "compile_region_name")
            return around_compile_fx(compile_fx, args[:2], {**dict(zip(names, args[2:], strict=False)), **kwargs})

        @functools.wraps(inner)
        def scoped_inner(gm: GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
            return around_inner_compile(inner, gm, example_inputs, kwargs)

        scoped_compile_fx._magi_passes_original = compile_fx  # type: ignore[attr-defined]
        module.compile_fx = scoped_compile_fx
        module._compile_fx_inner = scoped_inner


def is_erased(node: Node) -> bool:
    """Whether *node* was taken out of its graph. All releases."""
    return bool(node._erased)


def is_body_of_higher_order_op(graph: Graph) -> bool:
    """Whether Inductor compiles *graph* as the body of `cond`, `while_loop` or a similar operator.

    Inductor notes the strides of outputs if it restores them: for a whole graph and for the body of
    `invoke_subgraph` (`_recursive_record_original_output_strides` in torch/_inductor/compile_fx.py). All releases.
    """
    from torch._inductor.virtualized import NullHandler, V

    is_at_work = not isinstance(V.fake_mode, NullHandler)
    return is_at_work and "original_output_strides" not in graph.output_node().meta


def outputs_that_are_bases() -> range:
    """The positions of outputs that AOTAutograd added to the current graph because several outputs are views of them.

    `num_forward_returns` in torch/_functorch/_aot_autograd/schemas.py has the order of outputs. All releases.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None:
        return range(0)
    first = metadata.num_mutated_inp_runtime_indices + metadata.num_outputs
    return range(first, first + metadata.num_intermediate_bases)


def symbolic_dispatch() -> AbstractContextManager[object]:
    """A context in which operators decompose in Python.

    In C++, they would ask a symbolic size for its number. All releases.
    """
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


@contextlib.contextmanager
def seeing_operators(fake: torch.Tensor, see: Callable[[Any, Any, Any, Any], None]) -> Iterator[None]:
    """A context in which *see* gets each operator of ATen that is called, its arguments and its result.

    It runs in the mode of the tensor *fake*. All releases.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            out = func(*args, **(kwargs or {}))
            see(func, args, kwargs or {}, out)
            return out

    mode: Any = Seeing  # whose base has no types
    with fake.fake_mode, symbolic_dispatch(), mode():  # type: ignore[attr-defined]
        yield


def is_plain(target: Any) -> bool:
    """Whether *target* of a captured graph means the same outside of its place: no part of a transform, and no body."""
    module = getattr(target, "__module__", None) or ""
    return not isinstance(target, torch._ops.HigherOrderOperator) and not module.startswith(
        ("torch._functorch", "torch._C._functorch")
    )


_IN_PLACE = re.compile("setitem|i(add|and|concat|floordiv|lshift|matmul|mod|mul|or|pow|rshift|sub|truediv|xor)")


def written_operands(nodes: Iterable[Node]) -> set[Node]:
    """What calls among *nodes* of a captured graph are given, of which they may change a tensor. All releases."""
    written = set[Node]()
    for node in nodes:
        if node.op in ("call_function", "call_method") and _may_write(node):
            # A method changes its tensor, and so does ``x += y``; of any other call it is not known.
            is_of_first = node.op == "call_method" or getattr(node.target, "__module__", "") == "_operator"
            written.update(node.all_input_nodes[:1] if is_of_first else node.all_input_nodes)
    return written


def storage_of(value: Any) -> int | None:
    """What tensors that share memory have in common, fake ones too; None for what has no memory. All releases."""
    has_one = isinstance(value, torch.Tensor) and torch._C._has_storage(value)
    return value.untyped_storage()._cdata if has_one else None


def _may_write(node: Node) -> bool:
    target: Any = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if getattr(target, "__module__", "") == "_operator":
        return _IN_PLACE.fullmatch(name) is not None
    return re.search("[a-z]_$", name) is not None or not {"out", "inplace"}.isdisjoint(node.kwargs)


@functools.cache
def library() -> torch.library.Library:
    """The library that holds our operators, which live as long as it."""
    return torch.library.Library("magi_passes", "FRAGMENT")


class LayoutOps(NamedTuple):
    """Operators that say how Inductor writes a tensor to memory."""

    channels_last: torch._ops.OpOverload
    cat_channels_last: torch._ops.OpOverload
    stored: torch._ops.OpOverload


@functools.cache
def layout_ops() -> LayoutOps:
    """``magi_passes::channels_last(x)``, ``magi_passes::cat_channels_last(tensors, dim)``, ``magi_passes::stored(x)``.

    They copy a tensor and join tensors, with the channels innermost in memory. Inductor lowers the first one to a
    constraint on the kernel that computes *x*, which then writes that layout itself. Its own
    `prims.inductor_force_stride_order` takes strides, and cannot sort symbolic ones.

    A constraint comes too late for a concatenation: `ConcatKernel.create` (torch/_inductor/ir.py) lets each operand be
    written into its place, in a layout that it chooses from the operands, and the result would be copied. So the
    second one is a concatenation whose places are channels-last from the beginning.

    The third one is *x*, which Inductor writes to memory, in whatever layout, rather than compute it in each reader.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch._prims_common import make_channels_last_strides_for

    ours = library()
    ours.define("channels_last(Tensor x) -> Tensor")
    ours.define("cat_channels_last(Tensor[] tensors, int dim) -> Tensor")
    ours.define("stored(Tensor x) -> Tensor")

    def copy(x: torch.Tensor) -> torch.Tensor:
        return x.clone(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)

    def join(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
        return copy(torch.cat(tensors, dim))

    for name, body in (("channels_last", copy), ("cat_channels_last", join), ("stored", torch.clone)):
        ours.impl(name, body, "CompositeExplicitAutograd")
        ours.impl(name, body, "Meta")
    ops = LayoutOps(*(getattr(torch.ops.magi_passes, name).default for name in LayoutOps._fields))

    @register_lowering(ops.channels_last, type_promotion_kind=None)
    def lower_copy(x: Any) -> Any:
        # The position of each dimension in the order of strides, from the innermost.
        order = [3, 0, 2, 1] if len(x.get_size()) == 4 else [4, 0, 3, 2, 1]
        return ir.ExternKernel.require_stride_order(x, order)

    @register_lowering(ops.cat_channels_last, type_promotion_kind=None)
    def lower_join(tensors: list[Any], dim: int) -> Any:
        box: Any = ir.ConcatKernel.create(tensors, dim)
        joined, size = box.data, box.get_size()
        strides = make_channels_last_strides_for(size)
        joined.layout = ir.FixedLayout(joined.get_device(), joined.get_dtype(), size, strides)
        start = 0
        for tensor, part in zip(tensors, joined.inputs, strict=True):
            end = start + tensor.get_size()[dim]
            place: Any = ir.SliceView.create(box, dim, start, end, clamp=False)
            part.layout = ir.NonOwningLayout(place)
            start = end
        return ir.TensorBox(box)

    @register_lowering(ops.stored, type_promotion_kind=None)
    def lower_stored(x: Any) -> Any:
        x.realize()
        return x

    return ops
