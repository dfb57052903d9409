# SPDX-License-Identifier: Apache-2.0
"""Captured graphs with symbols: their inputs and guards, and fake tensors of one size made after theirs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.meta_utils import MetaConverter, MetaStorageDesc, MetaTensorDesc, MetaTensorDescriber
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, DimDynamic, ShapeEnv
from torch.fx.experimental.symbolic_shapes import free_symbols as symbols_of
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from .values import float_memo, is_wrapper


class StaysSymbolicError(Exception):
    """No code can be made for single sizes of a graph, or for these sizes. The error never reaches the caller."""


def fakes_of_capture(example_inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a backend as AOTAutograd sees them: real tensors become fakes with the symbols of the capture."""
    context = TracingContext.get()
    mode = context.fake_mode
    assert mode is not None, "Dynamo makes one before it calls a backend"

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        symbolic = context.tensor_to_context.get(value)
        source = symbolic.tensor_source if symbolic is not None else None
        return mode.from_tensor(value, symbolic_context=symbolic, source=source, trace=False)

    return [fake(value) for value in example_inputs]


def describe(values: Sequence[Any]) -> list[Any]:
    """*values* with each tensor as plain data, which may hold symbols and says which tensors share memory."""
    describer = MetaTensorDescriber()
    return [describer.describe_tensor(value) if isinstance(value, torch.Tensor) else value for value in values]


def share_memory(descriptions: Sequence[Any]) -> bool:
    """Whether two of the described tensors share memory."""
    storages = [
        each.storage.id for each in descriptions if isinstance(each, MetaTensorDesc) and each.storage is not None
    ]
    return len({*storages}) < len(storages)


class FakeWorld:
    """A fake mode in which the symbols of a capture have *values*, or stay open as other symbols with these hints.

    It has a twin for each captured tensor. Twins share memory as the captured tensors do.
    """

    def __init__(self, values: Mapping[Any, int]) -> None:
        from torch._functorch import config

        self.shape_env = ShapeEnv()
        self._values = values
        self._opened: dict[Any, Any] = {}
        self._converter: Any = MetaConverter()
        self._descriptions: dict[int, Any] = {}
        self._made: dict[int, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []
        # As Dynamo makes the mode for a backend.
        with config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
            self.mode = FakeTensorMode(shape_env=self.shape_env)

    def open(self, captured: Sequence[Any]) -> None:
        """Keep the symbols open; *captured* are the sizes that they stand for.

        The guards of the capture hold here too. `condition` returns only the guards that are added later.
        """
        from torch._dynamo.source import LocalSource

        theirs = captured[0].node.shape_env
        for symbol, value in self._values.items():
            # The name of a symbol follows from its source, and passes and texts may show it.
            sources = [source for source in theirs.var_to_sources.get(symbol, ()) if source is not None]
            ours = self.shape_env.create_symbol(
                value,
                sources[0] if sources else LocalSource(str(symbol)),
                dynamic_dim=DimDynamic.DYNAMIC,
                positive=symbol.is_positive,
                do_not_specialize_zero_one=True,
            )
            self._opened[symbol] = ours
            self.shape_env.var_to_range[ours] = theirs.var_to_range[symbol]
        for guard in theirs.guards:
            if guard.expr.free_symbols <= self._values.keys():
                self.shape_env.evaluate_expr(guard.expr.xreplace(self._opened))
        self._sizes = [self.number(size) for size in captured]
        self._known = self._guarded()

    def symbols(self) -> set[Any]:
        """The symbols that were opened."""
        return {*self._opened.values()}

    def _guarded(self) -> tuple[Any, ...]:
        return (len(self.shape_env.guards), {ours: self.shape_env.var_to_range[ours] for ours in self._opened.values()})

    def knows(self, number: Any) -> bool:
        """Whether *number* is an int, or a size of the capture that follows from the values."""
        return not isinstance(number, torch.SymInt) or as_int(number, self._values) is not None

    def number(self, size: Any) -> Any:
        """The *size* of the capture in this world: an int, or a size with symbols that are open."""
        value = as_int(size, self._values)
        if value is None:
            raise StaysSymbolicError(f"the size {size} does not follow from the sizes of the inputs")
        ours = size.node.expr.xreplace(self._opened)
        return value if not self._opened or ours.is_number else self.shape_env.create_symintnode(ours, hint=value)

    def condition(self) -> Callable[[Sequence[int]], bool] | None:
        """What sizes must fulfil besides what the graph was captured for, as a function of them; None for all sizes.

        No guard is added after this: a backward that is compiled later holds for the same sizes, as in torch.

        Raises:
            StaysSymbolicError: The code needs a guard on something that is not a size.
        """
        env: Any = self.shape_env
        guards = env.guards[self._known[0] :] if self._opened else env.guards
        unknown = next((guard for guard in guards if not guard.expr.free_symbols <= {*self._opened.values()}), None)
        if unknown is not None:
            msg = f"its code would need a guard that the captured graph does not have: {unknown.expr}"
            raise StaysSymbolicError(msg)
        if not self._opened or self._guarded() == self._known:
            return None
        text = env.produce_guards_expression(self._sizes, guards=guards)
        env.freeze()
        return _function(text, SYMPY_INTERP)

    def open_number(self, hint: Any, source: Any) -> Any:
        """A symbol about which nothing is assumed, for a number from *source*; its *hint* is an int or a float."""
        symbol = self.shape_env.create_unspecified_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        make = self.shape_env.create_symintnode if isinstance(hint, int) else self.shape_env.create_symfloatnode
        return make(symbol, hint=hint, source=source)

    def input(self, captured: Any, description: Any, placeholder: Node) -> Any:
        """The input of a graph of this world, for the *captured* one with this *description*.

        An int that is not a size stays open, and so does a float argument, which is a tensor whose ``.item()`` is
        the input.
        """
        node: Any = placeholder
        if isinstance(captured, torch.SymInt):
            if self.knows(captured):
                return self.number(captured)
            return self.open_number(int(captured.node.hint), node._dynamo_source)
        if not isinstance(description, MetaTensorDesc):
            return description
        made: Any = self._twin(description)
        memo = float_memo(captured)
        if memo is not None:
            made.item_memo = self.open_number(
                float(memo.node.hint), getattr(node._dynamo_source, "base", node._dynamo_source)
            )
        return made

    def describe(self, trees: Sequence[Any]) -> None:
        """Describe the tensors in *trees*, so that :meth:`of` knows them. No more inputs are made after this."""
        self._converter = MetaConverter()  # these descriptions are numbered from 0, as those of the inputs were
        tensors = [leaf for tree in trees for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        for tensor, description in zip(tensors, describe(tensors), strict=True):
            self._descriptions.setdefault(id(tensor), description)

    def of(self, tree: Any) -> Any:
        """*tree* with tensors replaced by their twins, and sizes by their numbers."""

        def of_leaf(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in self._made:
                    self._made[id(leaf)] = self._twin(self._descriptions[id(leaf)])
                return self._made[id(leaf)]
            return self.number(leaf) if isinstance(leaf, torch.SymInt) else leaf

        return pytree.tree_map(of_leaf, tree)

    def _twin(self, description: Any) -> torch.Tensor:
        """The tensor that *description* describes with symbols."""

        def fake(meta: Callable[[], torch.Tensor], device: Any) -> torch.Tensor:
            with no_dispatch():
                return FakeTensor(self.mode, meta(), device)

        static = self._static(self._alone_where_needed(description))
        made: Any = self._converter.meta_tensor(static, None, fake, None, None)
        if made is NotImplemented:
            raise NotImplementedError(f"torch makes no fake tensor for {static.type or static.layout}")
        if static.is_parameter:
            made._is_param = True
        self._alive.append(made)  # the converter holds weak references to what shares memory
        if left := free_symbols(made) - self.symbols():
            raise StaysSymbolicError(f"a {type(made).__name__} keeps the symbols {', '.join(sorted(map(str, left)))}")
        return made  # type: ignore[no-any-return]

    def _static(self, value: Any) -> Any:
        """*value*, a description or a part of one, without symbols."""
        if isinstance(value, torch.SymInt):
            return self.number(value)
        if isinstance(value, torch.Size):
            return torch.Size([self._static(item) for item in value])
        if isinstance(value, tuple | list):
            items = [self._static(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {key: self._static(item) for key, item in value.items()}
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return value
        old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        if isinstance(value, MetaTensorDesc | MetaStorageDesc):
            # The mode and the hints belong to the capture; a gradient is not an input of the graph.
            old |= {name: None for name in ("fake_mode", "grad") if name in old}
            emptied = old.keys() & {"dynamo_dynamic_indices", "dynamo_hint_overrides"}
            old |= {name: type(old[name])() for name in emptied}
        new = {name: self._static(item) for name, item in old.items()}
        if all(new[name] is getattr(value, name) for name in new):
            return value
        twin = copy.copy(value)
        for name, item in new.items():
            try:
                setattr(twin, name, item)  # by its own method if it has one: a DTensor's spec resets its hash there
            except dataclasses.FrozenInstanceError:
                object.__setattr__(twin, name, item)
        return twin

    def _alone_where_needed(self, description: Any) -> Any:
        """*description* without its base, if the sizes of the base do not follow from the inputs.

        Dynamo gives the base of an input symbols that no input binds. Memory that inputs share stays shared; its size
        beyond what the inputs use does not matter.
        """
        changes: dict[str, Any] = {}
        if description.base is not None and not self._knows_all(description.base):
            changes |= {"base": None, "is_view": False, "creation_meta": None}
        storage = description.storage
        if storage is not None and not self.knows(storage.size):
            changes["storage"] = dataclasses.replace(storage, size=0)
        return dataclasses.replace(description, **changes) if changes else description

    def _knows_all(self, description: Any) -> bool:
        numbers = [*description.size, *(description.stride or ()), description.storage_offset]
        if description.storage is not None:
            numbers.append(description.storage.size)
        return all(map(self.knows, numbers)) and (description.base is None or self._knows_all(description.base))


class CaptureContext:
    """What compilations of the same graph need of the context of a capture, and the guards that it was given."""

    def __init__(self, gm: GraphModule) -> None:
        self._context = TracingContext.get()
        self._compile_id = gm.meta.get("dynamo_compile_id")
        self._guards: tuple[Any, ...] = ()

    def finish(self) -> None:
        """Read the guards that the compilation for any size has left to Dynamo. The context is not kept."""
        self._annotation = getattr(self._context, "cudagraph_annotation", None)
        self._guards = tuple(self._context.guards_context.aotautograd_guards)
        del self._context

    @contextlib.contextmanager
    def compiling(self, world: FakeWorld) -> Iterator[None]:
        """A context for another compilation, in which only *world* gets guards.

        Raises:
            RuntimeError: The compilation needs a guard, on inputs that share memory, that the capture does not have.
        """
        context = TracingContext(world.mode)
        if self._annotation is not None:
            context.cudagraph_annotation = self._annotation
        with compile_context(CompileContext(self._compile_id)), tracing(context):
            yield
        new = [guard for guard in context.guards_context.aotautograd_guards if guard not in self._guards]
        if new:
            raise RuntimeError(f"its code would need a guard that the captured graph does not have: {new[0]}")


def is_parameter(placeholder: Node) -> bool:
    """Whether an input is a parameter or a buffer of a module."""
    return "_dynamo_static_input_type" in placeholder.meta.get("tensor_dict", {})


SIZE_OF_INPUT, LEFT_OPEN = "TensorPropertySource", "DynamicScalarSource"
"""Sources of an int input: a size, a stride or the offset of a tensor input; and a ``DynamicInt``.

Torch never makes that a constant; object handles are such ints.
"""


def source_kind(placeholder: Node) -> str:
    """The kind of the source of an input."""
    return type(getattr(placeholder, "_dynamo_source", None)).__name__


def free_symbols(value: Any) -> set[Any]:
    """The symbols in a number, or in the sizes, strides and offset of a tensor and of what it holds."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return set(value.node.expr.free_symbols)
    if not isinstance(value, torch.Tensor):
        return set()
    tensor: Any = value
    symbols = set(symbols_of(tensor))
    if is_wrapper(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            symbols |= free_symbols(getattr(tensor, name))
    return symbols


def capture_with_constants(gm: GraphModule) -> None:
    """If floats of modules, such as an epsilon, are inputs of *gm*, have Dynamo capture it again with their values.

    With ``dynamic=True`` each is an input with a symbol of its own, so that equal layers differ. Torch makes most of
    them constants in the same way, after AOTAutograd has traced the whole graph (`tensorify_python_scalars` in
    torch/fx/passes/_tensorify_python_scalars.py, 2.10 to 2.15). When one of them changes, the function is captured
    anew, and then they stay inputs.

    Raises:
        TensorifyScalarRestartAnalysis: Dynamo catches it.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState

    current = CompileContext.current_compile_id()
    if current is None or current.frame_compile_id:
        return
    memos = {node: float_memo(node.meta.get("example_value")) for node in gm.graph.find_nodes(op="placeholder")}
    symbols = {str(memo.node._expr) for node, memo in memos.items() if memo is not None and _is_of_module(node)}
    if fresh := {symbol for symbol in symbols if not TensorifyState.should_specialize(symbol)}:
        for symbol in fresh:
            TensorifyState.specialize(symbol)
        raise TensorifyScalarRestartAnalysis


def _is_of_module(placeholder: Node) -> bool:
    kind: Any = getattr(getattr(placeholder, "_dynamo_source", None), "guard_source", None)
    kind = kind() if callable(kind) else kind  # a method up to torch 2.12
    return kind is not None and bool(kind.is_unspecialized_nn_module())


def as_int(number: Any, values: Mapping[Any, int]) -> int | None:
    """The value of a symbolic size if symbols have *values*; None if it has other symbols."""
    if number.node.is_nested_int():
        return None
    expression = number.node.expr
    known = expression.free_symbols <= values.keys()
    return int(expression.xreplace(values)) if known else None


def broken_guard(numbers: Sequence[Any], values: Mapping[Any, int]) -> str:
    """The first guard of the capture on the symbols of *numbers* that *values* violate; empty if there is none."""
    shape_env = next((number.node.shape_env for number in numbers), None)
    if shape_env is None:
        return ""
    for symbol, value in values.items():
        allowed = shape_env.var_to_range.get(symbol)
        if allowed is not None and not allowed.lower <= value <= allowed.upper:
            return f"{allowed.lower} <= {symbol} <= {allowed.upper}"
    for guard in shape_env.guards:
        expression = guard.expr
        if expression.free_symbols <= values.keys() and not bool(expression.xreplace(values)):
            return str(expression)
    return ""


def boxed(compiled: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """*compiled*, taking a list of its arguments.

    AOTAutograd's result takes a list itself. Around it are a function of single arguments (``forward`` in
    ``aot_module_simplified``), which puts them into one after the parameters of the graph, and what keeps Dynamo out,
    which our caller does already.
    """
    outer: Any = compiled
    while inspect.isfunction(outer):
        inner, cells = getattr(outer, "__wrapped__", None), inspect.getclosurevars(outer).nonlocals
        if inner is not None and cells.get("compiled_fn") is inner and cells.get("params_buffers_flat") == []:
            return cast("Callable[[list[Any]], Any]", inner)
        outer = inner
    return lambda inputs: compiled(*inputs)


def core_graph(gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """The captured graph *gm* in core ATen operators and without writes, except those to *inputs* at its end.

    It must be called where *gm* is compiled. Norms and masks are taken apart too, attention is not.
    """
    aten = torch.ops.aten
    batch_norms = [aten._native_batch_norm_legit, aten._native_batch_norm_legit_no_training, aten.native_batch_norm]
    norms = [aten.native_layer_norm, aten.native_group_norm, aten._native_batch_norm_legit_functional, *batch_norms]
    table: dict[Any, Any] = {**core_aten_decompositions(), **get_decompositions(norms)}
    table = {op: rule for op, rule in table.items() if "scaled_dot_product" not in str(op)}
    mode = TracingContext.get().fake_mode
    assert mode is not None, "every compilation has one"

    def traced(run: Callable[..., Any]) -> GraphModule:
        return make_fx(run, table, _allow_non_fake_inputs=True, _error_on_data_dependent_ops=False)(*inputs)

    with mode, preserve_node_meta(), torch.no_grad():
        # Twice, because composite operators such as `linear` fix sizes where writes are removed (2.10 to 2.15).
        with enable_python_dispatcher():
            composed = traced(torch.fx.Interpreter(gm).run)
        return traced(torch.func.functionalize(torch.fx.Interpreter(composed).run))


def factors(number: Any) -> dict[Any, int]:
    """The factors of a size, and how often each occurs."""
    return dict(number.node.expr.as_powers_dict()) if isinstance(number, torch.SymInt) else {}


def holds(sizes: Sequence[Any]) -> Callable[[Sequence[int]], bool]:
    """The guards of a capture on *sizes*, which are all its size inputs, as a function of their values."""
    env = sizes[0].node.shape_env
    symbols = {symbol for size in sizes for symbol in size.node.expr.free_symbols}
    guards = [guard for guard in env.guards if guard.expr.free_symbols <= symbols]
    return _function(env.produce_guards_expression(sizes, guards=guards), SYMPY_INTERP)


def _function(text: str | None, names: Mapping[str, Any]) -> Callable[[Sequence[int]], bool]:
    """The guards *text*, as torch writes them for inputs that it calls t0, t1, …; None stands for none."""
    body = re.sub(r"L\['t(\d+)'\]", r"sizes[\1]", text or "True")
    return eval(f"lambda sizes: {body}", dict(names))  # type: ignore[no-any-return]  # noqa: S307
